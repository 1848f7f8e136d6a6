# SPDX-License-Identifier: Apache-2.0
"""How many streamed chunks the OpenAI API can send, without a model: an engine that only counts feeds it.

    python -m perf_configs.bench_openai --workers 4 --clients 4 --streams 512 --steps-per-second 20,40,60,80

Every step has a token for every stream, and a new stream replaces each one that ends. A process that is too
slow for a chunk sends its token with the next one, so fewer chunks/s than tokens/s show the limit. API,
engine and clients share this machine's cores; the table has the CPU time of each.
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import c_double, c_longlong
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from client.arguments import argument_parser, integer, positive, seconds
from client.machine import facts
from flashinfer_backend.core import processes
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.openai.model import Model, WorkerOptions
from flashinfer_backend.openai.supervisor import Supervisor
from flashinfer_backend.transport import protocol, rundir
from flashinfer_backend.transport.addresses import resolve
from flashinfer_backend.transport.engine_socket import EngineSocket
from flashinfer_backend.transport.records import EngineRecord

VOCABULARY = 2048
FIRST_TEXT_ID = 300  # ids from here on write something in the bundled model's vocabulary
TEXT, END = b'"text":"', b"data: [DONE]\n\n"  # marks in a stream
WARM_UP_S = 1.0
READY_S = 120.0
PACKAGES = ("numpy", "pyzmq", "uvicorn", "uvloop", "httptools", "starlette")


def engine(run_dir: Path, server_pid: int, rate: Any, sent: Any) -> None:
    """Answers every sequence with tokens of its own, one a step, until it has as many as it asked for. rate:
    shared, steps/s. sent: shared, tokens so far."""
    ticks = rundir.start_ticks(os.getpid())
    assert ticks is not None
    record = EngineRecord(os.getpid(), ticks, ready=True, ever_ready=True)
    sock = EngineSocket(run_dir, server_pid)
    (run_dir / "engine.json").write_bytes(msgspec.json.encode(record))
    status = protocol.Status(os.getpid(), "none", VOCABULARY, 32768, 32767, 4096, 16, 1)
    left: dict[int, dict[int, int]] = {}  # tokens to come, by stub and local id
    due = time.monotonic()
    rng = np.random.default_rng(0)
    while not sock.closed:
        for message in sock.receive(max(0, int((due - time.monotonic()) * 1000)), due):
            if isinstance(message, protocol.Hello):
                sock.send_status(status)
            elif isinstance(message, protocol.Submit):
                pid, local_id = protocol.split_handle(message.handle)
                left.setdefault(pid, {})[local_id] = message.params.max_tokens
            elif isinstance(message, protocol.Cancel):
                pid, local_id = protocol.split_handle(message.handle)
                left.get(pid, {}).pop(local_id, None)
            elif isinstance(message, protocol.Goodbye):
                left.pop(message.pid, None)
                sock.forget(message.pid)
        if time.monotonic() < due:
            continue
        due = max(due + 1 / rate.value, time.monotonic() - 0.1)
        for pid, rows in left.items():
            if not rows:
                continue
            ids = np.array(list(rows), np.int32)
            tokens = rng.integers(FIRST_TEXT_ID, VOCABULARY, len(ids), dtype=np.int32)
            codes = np.array([protocol.FINISHED_LENGTH * (n == 1) for n in rows.values()], np.int32)
            sock.send_tokens(pid, protocol.pack_tokens(ids, tokens, codes), None)
            sent.value += len(ids)
            left[pid] = {local_id: n - 1 for local_id, n in rows.items() if n > 1}
    sock.close()


class Reader(asyncio.Protocol):
    """Asks for one stream after the other on a connection and counts chunks with text."""

    def __init__(self, request: bytes, count: Callable[[int], None], broken: asyncio.Future[None]) -> None:
        self._request, self._count, self._broken = request, count, broken
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._fail(f"the API answered {data[:200]!r}")
        # A mark may be cut in two. What is kept before a piece is shorter than the mark: none counts twice.
        self._count((self._tail[1 - len(TEXT) :] + data).count(TEXT))
        held = self._tail + data
        self._tail = held[1 - len(END) :]
        if END in held:
            self._tail = b""
            self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"a stream broke off: {exc}")

    def _fail(self, words: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(RuntimeError(words))


def client(port: int, streams: int, tokens: int, received: Any) -> None:
    """Reads streams until it is ended. received: shared, chunks with text so far."""
    import uvloop

    body = {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    request = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )

    def count(chunks: int) -> None:
        received.value += chunks

    async def run() -> None:
        loop = asyncio.get_running_loop()
        broken = loop.create_future()
        for _ in range(streams):
            await loop.create_connection(lambda: Reader(request, count, broken), "127.0.0.1", port)
        await broken

    uvloop.run(run())


def serve_api(run_dir: Path, port: int, workers: int) -> None:
    """The API's supervisor."""
    options = WorkerOptions(
        models=[Model(["bundled"], EngineConfig(model_dir="bundled"), str(run_dir))],
        max_body_bytes=1 << 20,
        receive_s=60,
        drain_s=1,
        metrics_dir=str(run_dir.parent / f"{os.getpid()}-metrics"),
        apis=str(run_dir),
    )
    supervisor = Supervisor(options, resolve("127.0.0.1"), port, workers, stalled_s=0)
    signal.signal(signal.SIGTERM, supervisor.stop)
    supervisor.run()


def children(pid: int) -> list[int]:
    """Processes that a process started and that still run."""
    return sorted(child for child, _, fields in processes.running() if int(fields[1]) == pid)


def machine() -> str:
    """Date, cores and versions in one line."""
    found = facts(PACKAGES)
    packages = [f"{name} {version}" for name, version in found["packages"].items()]
    where = f"{found['cores']} cores of {found['processor']}, Python {found['python']}"
    return ", ".join([datetime.date.today().isoformat(), where, *packages])


def rates(text: str) -> list[float]:
    """Numbers over 0, separated by commas."""
    return [positive(word) for word in text.split(",")]


def arguments() -> argparse.ArgumentParser:
    parser = argument_parser("perf_configs.bench_openai", __doc__)
    parser.add_argument("--workers", type=integer(1), default=1, help="processes of the API")
    parser.add_argument("--clients", type=integer(1), default=1, help="processes that read")
    parser.add_argument("--streams", type=integer(1), default=64, help="streams at a time, of all clients")
    parser.add_argument("--tokens", type=integer(1), default=200, help="tokens of each stream")
    parser.add_argument(
        "--steps-per-second",
        type=rates,
        default=[100.0],
        metavar="N,...",
        help="rates of steps, a line of the table for each",
    )
    parser.add_argument("--seconds", type=seconds, default=5.0, help="seconds of each measurement, after 1 s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_args(argv)
    if options.streams < options.clients:
        parser.error(f"--streams {options.streams} should be at least --clients {options.clients}")
    spawn = multiprocessing.get_context("spawn")
    base = Path(tempfile.mkdtemp(prefix="bench-openai-"))
    run_dir = base / "user" / f"{os.getpid()}-llm"
    rundir.create(run_dir)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rate, sent = spawn.Value(c_double, options.steps_per_second[0]), spawn.Value(c_longlong, 0)
    received = [spawn.Value(c_longlong, 0) for _ in range(options.clients)]
    feeder = spawn.Process(target=engine, args=(run_dir, os.getpid(), rate, sent), daemon=True)
    api = spawn.Process(target=serve_api, args=(run_dir, port, options.workers))
    share, rest = divmod(options.streams, options.clients)
    readers = [
        spawn.Process(target=client, args=(port, share + (n < rest), options.tokens, each), daemon=True)
        for n, each in enumerate(received)
    ]
    print(f"{machine()}; {options.workers} workers, {options.clients} clients, {options.streams} streams")
    print("steps/s  tokens/s  chunks/s  CPU us/chunk  of a core: API's processes; engine; clients")
    feeder.start()
    api.start()
    try:
        assert api.pid is not None
        wait_ready(port, api, options.workers)
        for reader in readers:
            reader.start()
        wait_for_chunks(received, readers)
        workers = children(api.pid)
        groups = [workers, [feeder.pid or 0], [reader.pid or 0 for reader in readers]]

        def now() -> tuple[float, int, int, list[list[float]]]:
            used = [[processes.cpu_seconds(processes.stat(pid)[1]) for pid in group] for group in groups]
            return time.monotonic(), sent.value, sum(each.value for each in received), used

        for steps in options.steps_per_second:
            rate.value = steps
            time.sleep(WARM_UP_S)
            began = now()
            time.sleep(options.seconds)
            ended = now()
            dead = [process for process in (feeder, api, *readers) if not process.is_alive()]
            if dead or children(api.pid) != workers:
                print("a process ended meanwhile; its message is above", file=sys.stderr)
                return 1
            print(line(steps, began, ended), flush=True)
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        for process in (*readers, api):
            if process.pid is not None:
                process.terminate()
                process.join(10)
        feeder.terminate()
        feeder.join(10)
        shutil.rmtree(base, ignore_errors=True)


def line(steps: float, began: Any, ended: Any) -> str:
    seconds, tokens, chunks = (after - before for before, after in zip(began[:3], ended[:3], strict=True))
    shares = [
        [(after - before) / seconds for before, after in zip(*group, strict=True)]
        for group in zip(began[3], ended[3], strict=True)
    ]
    used = "; ".join(" ".join(f"{share:.0%}" for share in group) for group in shares)
    cost = sum(shares[0]) * seconds / max(chunks, 1) * 1e6
    return f"{steps:7g}  {tokens / seconds:8.0f}  {chunks / seconds:8.0f}  {cost:12.1f}  {used}"


def wait_ready(port: int, api: Any, workers: int) -> None:
    """Until each process has answered; which one does is up to the kernel."""
    deadline, good = time.monotonic() + READY_S, 0
    while good < 8 * workers:
        if time.monotonic() > deadline or not api.is_alive():
            raise SystemExit("the API did not become ready; its message is above")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                ready = b" 200 " in connection.recv(4096)
        except OSError:
            ready = False
        good = good + 1 if ready else 0
        time.sleep(0 if ready else 0.2)


def wait_for_chunks(received: Sequence[Any], readers: Sequence[Any]) -> None:
    """Until every client reads."""
    deadline = time.monotonic() + READY_S
    while not all(each.value for each in received):
        if time.monotonic() > deadline or not all(reader.is_alive() for reader in readers):
            raise SystemExit("the clients got no chunks")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
