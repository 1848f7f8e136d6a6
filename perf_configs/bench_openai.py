# SPDX-License-Identifier: Apache-2.0
"""How many streamed chunks the OpenAI API carries, without a model: an engine that only counts feeds it.

    python -m perf_configs.bench_openai --workers 4 --streams 256 --steps-per-second 120

Every step is a token for every stream. What the processes cannot carry as a chunk of its own they send
together with the next, so chunks/s below tokens/s shows the limit. Door, engine and clients share this
machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.openai.parent import Parent
from flashinfer_backend.openai.worker import WorkerOptions
from flashinfer_backend.transport import protocol, rundir
from flashinfer_backend.transport.addresses import resolve
from flashinfer_backend.transport.engine_socket import EngineSocket
from flashinfer_backend.transport.supervisor import EngineRecord

VOCABULARY = 2048
FIRST_TEXT_ID = 300  # ids from here on write something in the bundled model's vocabulary


def engine(run_dir: Path, server_pid: int, steps_per_second: float) -> None:
    """Answers every sequence with tokens of its own, one a step, until it has as many as it asked for."""
    record = EngineRecord(
        os.getpid(), rundir.start_ticks(os.getpid()) or 0, time.monotonic(), ready=True, ever_ready=True
    )
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
        due = max(due + 1 / steps_per_second, time.monotonic() - 0.1)
        for pid, rows in left.items():
            if not rows:
                continue
            ids = np.array(list(rows), np.int32)
            tokens = rng.integers(FIRST_TEXT_ID, VOCABULARY, len(ids), dtype=np.int32)
            codes = np.array([protocol.FINISHED_LENGTH * (n == 1) for n in rows.values()], np.int32)
            sock.send_tokens(pid, protocol.pack_tokens(ids, tokens, codes), None)
            left[pid] = {local_id: n - 1 for local_id, n in rows.items() if n > 1}
    sock.close()


def client(port: int, streams: int, tokens: int, results: multiprocessing.Queue[tuple[int, float]]) -> None:
    """Reads streams to their ends; puts (chunks with text, when the last one came)."""
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + data)
        chunks, held = 0, b""
        while b"[DONE]" not in held:
            part = await reader.read(1 << 16)
            assert part, "the stream broke off"
            held = held[-16:] + part
            chunks += part.count(b'"text":"')
        writer.close()
        return chunks

    async def run() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    chunks = asyncio.run(run())
    results.put((chunks, time.monotonic()))


def door(run_dir: Path, server_pid: int, port: int, workers: int) -> None:
    """The API's parent process."""
    options = WorkerOptions(
        engine=EngineConfig(model_dir="bundled"),
        run_dir=str(run_dir),
        server_pid=server_pid,
        follow=True,
        listener=-1,
        notify=-1,
        names=["bundled"],
        created=0,
        template_file=None,
        tool_format="auto",
        reasoning_format="auto",
        openai_defaults=False,
        keys=[],
        max_body_bytes=1 << 20,
        drain_s=1,
        metrics_dir=str(run_dir.parent / f"{os.getpid()}-metrics"),
    )
    Parent(options, resolve("127.0.0.1"), port, workers).run()


def cpu_seconds(parent: int) -> float:
    """CPU time of a process's children."""
    times = [child.cpu_times() for child in psutil.Process(parent).children()]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="processes that read")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--steps-per-second", type=float, default=100.0)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    base = Path(tempfile.mkdtemp(prefix="bench-openai-"))
    run_dir = base / "user" / f"{os.getpid()}-llm"
    rundir.create(run_dir)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fake = spawn.Process(target=engine, args=(run_dir, os.getpid(), options.steps_per_second))
    api = spawn.Process(target=door, args=(run_dir, os.getpid(), port, options.workers))
    fake.start()
    api.start()
    try:
        wait_ready(port, options.workers)
        assert api.pid is not None
        results: multiprocessing.Queue[tuple[int, float]] = spawn.Queue()
        each = options.streams // options.clients
        readers = [
            spawn.Process(target=client, args=(port, each, options.tokens, results))
            for _ in range(options.clients)
        ]
        before, began = cpu_seconds(api.pid), time.monotonic()
        for reader in readers:
            reader.start()
        found = [results.get(timeout=600) for _ in readers]
        seconds, used = max(end for _, end in found) - began, cpu_seconds(api.pid) - before
        chunks, tokens = sum(count for count, _ in found), each * options.clients * options.tokens
        print(
            f"{options.workers} workers, {options.streams} streams: {tokens / seconds:.0f} tokens/s as"
            f" {chunks / seconds:.0f} chunks/s in {seconds:.1f} s;"
            f" {used / chunks * 1e6:.0f} us of the API's CPU time for a chunk"
        )
    finally:
        api.terminate()
        api.join(10)
        fake.terminate()
        rundir.remove(run_dir)


def wait_ready(port: int, workers: int) -> None:
    """Until each process has answered; which one does is up to the kernel."""
    deadline, good = time.monotonic() + 60, 0
    while good < 8 * workers:
        assert time.monotonic() < deadline, "the API did not become ready"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                ready = b" 200 " in connection.recv(4096)
        except OSError:
            ready = False
        good = good + 1 if ready else 0
        time.sleep(0 if ready else 0.2)


if __name__ == "__main__":
    main()
