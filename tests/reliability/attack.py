# SPDX-License-Identifier: Apache-2.0
"""Attacks a real server and writes down what came of it: `make attack MINUTES=30`.

Streams run all the time. Every round does one harm and waits until the server answers as before. Clients get
a whole answer, a worded error, a cut connection (where the process that would have told them was killed), or
silence, which is a failure.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)] + [str(Path(__file__).parents[1] / "server")]

from running import BothApis, both_running, build_repository, request_bytes, wait_for  # noqa: E402
from watching import KEEPERS, MIB, PARTS, SILENT_S, attempt, cpu_seconds, ports, usage  # noqa: E402

from client.arguments import integer, positive  # noqa: E402
from flashinfer_backend.config_tools.knobs import BY_NAME  # noqa: E402
from flashinfer_backend.transport import rundir  # noqa: E402

PROMPT = "Once upon a time"
BACK_S = 120.0  # when the server has not come back by then, the attack has won
LOG_END = 5000  # characters of the server's log that are shown then
PATHS = {"triton": "/v2/models/ensemble/generate", "openai": "/v1/completions"}
STREAMED = {"triton": "/v2/models/ensemble/generate_stream", "openai": "/v1/completions"}
# Where one API says something else than the other; both have bodies of text_input and max_tokens here.
WORDS = {b'"text_input"': b'"prompt"', b'"stop_words"': b'"stop"'}
MOST_JSON_BYTES = int(BY_NAME["max_json_logits_mib"].default) * MIB  # of logits: the ensemble refuses more
HOSTILE: list[bytes] = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{" * 1000,
    b'{"max_tokens": 1, "text_input": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"max_tokens": 1, "text_input": "' + b"&=" * (3 << 20) + b'"}',
    b'{"max_tokens": 1, "text_input": ""}',
    b'{"max_tokens": -1, "text_input": "a"}',
    # tritonserver makes 1215752191 of it, which is cut to max_seq_len. Random weights end by themselves
    # nowhere, and a long answer is no silence: so one of the commonest characters ends it.
    b'{"max_tokens": 99999999999, "text_input": "a", "seed": 1, "stop_words": [" ", "a", "e", "t"]}',
    b'{"max_tokens": 1, "text_input": ["a", "b", "c"]}',
    b'{"max_tokens": 1, "text_input": "a", "temperature": 1e39, "top_p": -3}',
    b'{"max_tokens": 1, "text_input": "\\ud800"}',
    json.dumps({"max_tokens": 1, "text_input": "a", "stop_words": ["x" * 9] * 30_000}).encode(),
    b'{"max_tokens": 1, "text_input": "a", "stop_words": [' + b'"",' * 3_000_000 + b'""]}',
    json.dumps({"max_tokens": 1, "text_input": "a " * 1_000_000}).encode(),
]

# What took seconds, or the process, before it was bounded: path and body.
CHAT = "/v1/chat/completions"
BEYOND_BOUNDS: list[tuple[str, bytes]] = [
    *[
        (PATHS["openai"], b'{"prompt": "a", "max_tokens": 1, ' + field + b"}")
        for field in (
            b'"stop": "' + b"x" * 600_000 + b'"',
            b'"stop_token_ids": [' + b"1," * 4_000_000 + b"1]",
            b'"logit_bias": {' + b",".join(b'"%d":1' % n for n in range(200_000)) + b"}",
            b'"metadata": {"a": [' + b'{"k":1},' * 2_000_000 + b"1]}",
            b'"structured_outputs": {"choice": [' + b'"a",' * 500_000 + b'"b"]}',
            b'"seed": ' + b"1" * 1_000_000,
        )
    ],
    (PATHS["openai"], b'{"prompt": [' + b"5," * 8_000_000 + b"5]}"),
    (PATHS["openai"], b"{" + b'"stop": [1],' * 1_000_000 + b'"prompt": "a"}'),
    ("/detokenize", b'{"tokens": [' + b"5," * 4_000_000 + b"5]}"),
    (CHAT, b'{"messages": [' + b'{"role":"user","content":"a"},' * 500_000 + b"0]}"),
    (CHAT, b'{"messages": [{"role":"user","content":[' + b'{"type":"text"},' * 500_000 + b"0]}]}"),
    (CHAT, b'{"messages": [], "tools": [' + b'{"a":1},' * 500_000 + b"0]}"),
]


def large_requests(vocab_size: int) -> dict[str, dict[str, Any]]:
    """By API: requests for answers of some MB, more than the kernel takes from a server whose client does
    not read. vocab_size: words of the model."""
    tokens = min(480, MOST_JSON_BYTES // (4 * vocab_size))
    words = "Once upon a time "  # five tokens or fewer
    return {
        "triton": {"text_input": words * (tokens // 5), "max_tokens": 1, "return_context_logits": True},
        "openai": {"prompt": [words * 120] * 8, "max_tokens": 1, "echo": True, "logprobs": 20},
    }


def body_for(api: str, body: bytes) -> bytes:
    """The same in an API's words."""
    for word, other in WORDS.items() if api == "openai" else ():
        body = body.replace(word, other)
    return body


def text_of(api: str, answer: str) -> str:
    """What a stream of events says."""
    lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
    if api == "triton":
        return "".join(json.loads(line)["text_output"] for line in lines)
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def open_loads(server: BothApis) -> dict[str, list[int]]:
    """What living processes say that they have open in engines, by the file's name, where it is anything.
    With one engine nobody says."""
    found = {}
    for path in server.run_dir.glob("load-*"):
        with contextlib.suppress(FileNotFoundError):  # its process has just left
            load = np.fromfile(path, np.int64).tolist()
            if any(load) and rundir.process_alive(int(path.name.rpartition("-")[2])):
                found[path.name] = load
    return found


class SlowClient:
    """Asks for a large answer twice, and reads a byte a second of it, or nothing."""

    def __init__(self, api: str, port: int, large: dict[str, Any], bytes_a_second: int) -> None:
        """large: the request."""
        self.api, self._rate = api, bytes_a_second
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # A kernel that gives a connection up does not tell the other side until that asks.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            self._sock.setsockopt(socket.IPPROTO_TCP, option, 1)
        self._sock.connect(("127.0.0.1", port))
        self._sock.sendall(2 * request_bytes(PATHS[api], large))
        self._next = self.began = time.monotonic()

    def read(self) -> None:
        """To be called once a second."""
        if self._rate and time.monotonic() >= self._next:
            self._next = time.monotonic() + 1.0
            with contextlib.suppress(OSError):
                self._sock.settimeout(0.01)
                self._sock.recv(self._rate)

    @property
    def cut(self) -> bool:
        """Whether the server's side has closed the connection. The state's first byte says so: the socket
        itself would not before all that came has been read."""
        established = 1
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != established

    def close(self) -> None:
        self._sock.close()


class Attack:
    """One server under load at both APIs, and what it has suffered."""

    def __init__(
        self, server: BothApis, seed: int, streams: int, exact: bool = True, pause_s: float = 0.0
    ) -> None:
        """exact: every stream's text is compared with what the server said before the attack. In 16 bits on a
        GPU it can depend on what else is in the batch. pause_s: of a client between two streams."""
        self.server, self.rng, self._exact, self._pause_s = server, random.Random(seed), exact, pause_s
        self.ports = ports(server)
        self.slow: list[SlowClient] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.recoveries: dict[str, list[float]] = collections.defaultdict(list)
        self.refusals_ms: list[float] = []
        self._expected = server.text(PROMPT, 24)
        self._large = large_requests(server.engine_status().vocab_size)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        apis = itertools.islice(itertools.cycle(self.ports), streams)
        self._threads = [threading.Thread(target=self._stream, args=(d,), daemon=True) for d in apis]
        for thread in self._threads:
            thread.start()

    def _count(self, api: str, outcome: str) -> None:
        with self._lock:
            self.outcomes[f"{api}: {outcome}"] += 1

    def _stream(self, api: str) -> None:
        body = json.dumps({"text_input": PROMPT, "max_tokens": 24, "stream": True, "temperature": 0}).encode()
        while not self._ending.is_set():
            began = time.monotonic()
            outcome, text = attempt(self.ports[api], STREAMED[api], body_for(api, body))
            if outcome == "whole" and self._exact:
                outcome = "whole" if text_of(api, text) == self._expected else "wrong"
            self._count(api, outcome)
            if outcome in ("silent", "wrong"):
                took = time.monotonic() - began
                ending = text if outcome == "wrong" else text[-300:]
                print(f"{outcome} after {took:.1f} s: {STREAMED[api]} {ending!r}", file=sys.stderr)
            self._ending.wait(self._pause_s if outcome == "whole" else 0.2)  # as a client that tries again

    def answers(self) -> bool:
        """Whether both APIs answer as they should."""
        body = json.dumps({"text_input": PROMPT, "max_tokens": 2, "temperature": 0}).encode()
        got = [attempt(port, PATHS[api], body_for(api, body))[0] for api, port in self.ports.items()]
        return got == ["whole"] * len(got)

    def close(self) -> None:
        """Ends the load."""
        self._ending.set()
        for thread in self._threads:
            thread.join(SILENT_S + 5)
        for client in self.slow:
            client.close()

    def kill(self, name: str = "") -> str:
        """SIGKILL for one process of a kind, or for two within a moment."""
        parts = {**PARTS, "keeper": KEEPERS["keeper"]}
        name = name or self.rng.choice([*parts])
        for victim in self.server.matching(parts[name])[: self.rng.randint(1, 2)]:
            time.sleep(self.rng.uniform(0.0, 0.5))
            with contextlib.suppress(psutil.Error):
                victim.kill()
        return f"kill {name}"

    def stop(self, name: str = "") -> str:
        """SIGSTOP for a second and a half."""
        name = name or self.rng.choice(["preprocessing", "llm", "postprocessing", "OpenAI API"])
        victims = self.server.matching(PARTS[name])
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for victim in victims:
                with contextlib.suppress(psutil.Error):
                    victim.send_signal(number)
            time.sleep(1.5 if number == signal.SIGSTOP else 0)
        return f"stop {name} for 1.5 s"

    def drop(self, connections: int = 500) -> str:
        """Clients that leave while their streams run."""
        asked = {"max_tokens": 500, "stream": True}
        bodies = {"triton": {"text_input": PROMPT, **asked}, "openai": {"prompt": PROMPT, **asked}}
        for _, (api, port) in zip(range(connections), itertools.cycle(self.ports.items()), strict=False):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=5) as sock,
            ):
                sock.sendall(request_bytes(STREAMED[api], bodies[api]))
        return f"{connections} dropped connections"

    def flood(self, requests: int = 300) -> str:
        """Many times what the server can run at once."""
        body = json.dumps({"text_input": PROMPT, "max_tokens": 8}).encode()

        def one(api: str) -> None:
            began = time.monotonic()
            outcome, _ = attempt(self.ports[api], PATHS[api], body_for(api, body))
            self._count(api, outcome)
            if outcome == "worded":
                with self._lock:
                    self.refusals_ms.append((time.monotonic() - began) * 1000)

        apis = itertools.islice(itertools.cycle(self.ports), requests)
        threads = [threading.Thread(target=one, args=(api,), daemon=True) for api in apis]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SILENT_S + 5)
        return f"flood of {requests}"

    def several(self, connections: int = 40) -> str:
        """Requests of several sequences: some clients stay, some leave early, some requests are refused."""
        asked = {"max_tokens": 60, "stream": True}
        bodies: dict[str, dict[str, Any]] = {
            "triton": {"text_input": PROMPT, "num_return_sequences": 3, **asked},
            "openai": {"prompt": [PROMPT, "A king"], "n": 3, **asked},
        }
        refused = {
            "triton": {"text_input": "a " * 9000, "num_return_sequences": 3, "max_tokens": 5},
            "openai": {"prompt": ["a", "a " * 9000], "n": 3, "max_tokens": 5},
        }
        with contextlib.ExitStack() as staying:
            apis = itertools.islice(itertools.cycle(self.ports.items()), connections)
            for number, (api, port) in enumerate(apis):
                with contextlib.suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
                    sock.sendall(request_bytes(STREAMED[api], bodies[api]))
                    staying.enter_context(sock)
                    if number % 3 == 0:
                        sock.close()
                self._count(api, attempt(port, PATHS[api], json.dumps(refused[api]).encode())[0])
        return f"{connections} requests of several sequences"

    def clean(self) -> str:
        """What a cleaner of old files does to the processes' loads (there are none with one engine)."""
        for path in self.server.run_dir.glob("load-*"):
            path.unlink(missing_ok=True)
        return "removed loads"

    def hostile(self) -> str:
        """Requests that are wrong in every way."""
        for body in HOSTILE:
            for api, path in [*PATHS.items(), ("triton", STREAMED["triton"])]:
                outcome, _ = attempt(self.ports[api], path, body_for(api, body))
                self._count(api, f"hostile {outcome}")
                if outcome in ("silent", "cut"):
                    print(f"hostile {outcome}: {path} {body[:60]!r}", file=sys.stderr)
        for path, body in BEYOND_BOUNDS:
            outcome, _ = attempt(self.ports["openai"], path, body)
            self._count("openai", f"hostile {outcome}")
            if outcome != "worded":
                print(f"hostile {outcome}: {path} {body[:60]!r}", file=sys.stderr)
        return "hostile inputs"

    def stall(self, clients: int = 3, seconds: float = 5.0) -> str:
        """Clients that do not read their answers, or a byte a second; the server is looked at meanwhile. They
        stay until they are cut."""
        for number in range(clients):
            for api, port in self.ports.items():
                with contextlib.suppress(OSError):
                    self.slow.append(SlowClient(api, port, self._large[api], number % 2))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look_at_slow_clients()
            time.sleep(0.2)
        return f"{2 * clients} clients that do not read"

    def hold(self, connections: int = 300) -> str:
        """Clients that send nothing, or a few bytes, more than tritonserver has descriptors for; others are
        answered meanwhile."""
        held: list[socket.socket] = []
        limited: dict[int, tuple[int, int]] = {}
        for process in self.server.matching(PARTS["tritonserver"]):
            with contextlib.suppress(psutil.Error, OSError):
                most = process.num_fds() + connections // 2
                _, hard = limited[process.pid] = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, hard))
        try:
            for port in [*self.ports.values(), int(self.server.grpc.rpartition(":")[2])]:
                for number in range(connections):
                    with contextlib.suppress(OSError):
                        held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                        held[-1].sendall(b"POST"[: number % 5])
            wait_for(self.answers, "answers while connections are held", BACK_S)
        finally:
            for sock in held:
                sock.close()
            for pid, limit in limited.items():
                with contextlib.suppress(OSError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
        return f"{3 * connections} silent connections"

    def look_at_slow_clients(self) -> None:
        """Counts and forgets those that were cut; the others read."""
        for client in list(self.slow):
            client.read()
            if client.cut:
                self._count(client.api, "does not read, cut")
                self.slow.remove(client)
                client.close()

    def _wait_for_answers(self, name: str) -> None:
        """Raises AssertionError with what tells a server that is stuck from one that gets no core: what CPU
        time its processes had meanwhile, and how its log ends, which is removed with the server."""
        before, began = cpu_seconds(self.server), time.monotonic()
        try:
            wait_for(lambda: self.server.ready() and self.answers(), f"answers after: {name}", BACK_S)
        except AssertionError as error:
            used = sum(seconds - before.get(each, 0.0) for each, seconds in cpu_seconds(self.server).items())
            took, load = time.monotonic() - began, ", ".join(f"{number:.1f}" for number in os.getloadavg())
            raise AssertionError(
                f"{error}. In {took:.1f} s the server's processes had {used:.1f} s of CPU time; the load "
                f"averages are {load}. Its log ends:\n{self.server.log[-LOG_END:]}"
            ) from None

    def round(self, harm: Callable[[], str], late_s: float = 1.2) -> None:
        """One harm, and the way back. late_s: after how long what is noticed only then is part of it. Raises
        AssertionError where there is no way back."""
        name = harm()
        began = time.monotonic()
        self._wait_for_answers(name)
        time.sleep(late_s)
        self._wait_for_answers(name)
        self.recoveries[name].append(max(0.0, time.monotonic() - began - late_s))
        assert self.server.launcher.poll() is None, "serve ended"
        self.look_at_slow_clients()

    def memory(self) -> dict[str, int]:
        """MiB by kind of process, and of shared memory."""
        return {name: used.memory // MIB for name, used in usage(self.server).items()}

    def failures(self) -> list[str]:
        """What broke a promise; empty after a run that the server has stood."""
        broken = ("silent", "wrong", "hostile silent", "hostile cut")
        return [
            f"{count} clients: {kind}"
            for kind, count in self.outcomes.items()
            if kind.partition(": ")[2] in broken
        ]


def report(attack: Attack, minutes: float, before: dict[str, int], after: dict[str, int]) -> str:
    """Markdown tables of a run."""
    lines = [f"{minutes:.0f} minutes, {sum(map(len, attack.recoveries.values()))} rounds", ""]
    lines += ["| outcome | requests |", "|---|---:|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(attack.outcomes.items())]
    lines += ["", "| harm | rounds | back after, median s | at most s |", "|---|---:|---:|---:|"]
    for name, times in sorted(attack.recoveries.items()):
        lines.append(f"| {name} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |")
    if attack.refusals_ms:
        lines += ["", f"Refusals in floods: median {statistics.median(attack.refusals_ms):.0f} ms."]
    lines += ["", "| process | MiB before | MiB after |", "|---|---:|---:|"]
    lines += [
        f"| {name} | {before.get(name, 0)} | {after.get(name, 0)} |" for name in sorted({*before, *after})
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--minutes", type=positive, default=30.0)
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--streams", type=integer(1), default=50)
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE",
        help="knobs of the server, as of build.py: another model, a GPU; texts are not compared then",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, help="where to write the tables as well")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The server, in a session of its own, ends as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        repository = build_repository(Path(folder), *options.set, model="bundled")
        with both_running(repository, Path(folder), ["--restarts", "0"]) as server:
            attack = Attack(server, options.seed, options.streams, exact=not options.set)
            before = attack.memory()
            end = time.monotonic() + options.minutes * 60
            harms = [*[attack.kill] * 3, attack.stop, attack.drop, attack.flood, attack.hostile]
            harms += [attack.stall, attack.hold, attack.several, attack.clean]
            try:
                while time.monotonic() < end:
                    attack.round(attack.rng.choice(harms))
            finally:
                attack.close()
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not open_loads(server), "the end of what was open", SILENT_S)
            drifted = [f"counts {load} and is idle: {name}" for name, load in open_loads(server).items()]
            text = report(attack, options.minutes, before, attack.memory())
            server.interrupt()
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not server.leftovers(), "nothing to be left", 10)
            failures = attack.failures() + drifted + [f"left behind: {name}" for name in server.leftovers()]
    print(text, *failures, sep="\n")
    if options.report:
        options.report.write_text(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
