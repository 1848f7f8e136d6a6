# SPDX-License-Identifier: Apache-2.0
"""Attacks a real server and writes down what came of it: `make attack MINUTES=30`.

Streams run all the time. Every round does one harm and waits until the server answers as before. Clients get
a whole answer, a worded error, a cut connection (where the process that would have told them was killed), or
silence, which is a failure.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "server")]

from running import Server, build_repository, running, wait_for  # noqa: E402

PROMPT = "Once upon a time"
SILENT_S = 30.0  # a client that hears nothing for so long has been forgotten
BACK_S = 120.0  # when the server has not come back by then, the attack has won
PARTS = [
    "flashinfer_backend.engine",
    "/preprocessing/1/",
    "/llm/1/",
    "/postprocessing/1/",
    "bin/tritonserver",
]
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
    b'{"max_tokens": 99999999999, "text_input": "a"}',
    b'{"max_tokens": 1, "text_input": ["a", "b", "c"]}',
    b'{"max_tokens": 1, "text_input": "a", "temperature": 1e39, "top_p": -3}',
    b'{"max_tokens": 1, "text_input": "\\ud800"}',
    json.dumps({"max_tokens": 1, "text_input": "a", "stop_words": ["x" * 9] * 30_000}).encode(),
    json.dumps({"max_tokens": 1, "text_input": "a " * 1_000_000}).encode(),
]


def attempt(server: Server, body: bytes, verb: str = "generate") -> tuple[str, str]:
    """(outcome, text) of one request: whole, worded, cut or silent."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=SILENT_S)
    try:
        connection.request("POST", f"/v2/models/ensemble/{verb}", body, {"Content-Type": "application/json"})
        text = connection.getresponse().read().decode(errors="replace")
    except TimeoutError:
        return "silent", ""
    except (OSError, http.client.HTTPException):
        return "cut", ""
    finally:
        connection.close()
    if '"error"' in text:
        return "worded", text
    return ("whole" if '"finish_reason":' in text else "silent"), text


class Attack:
    """One server under load, and what it has suffered."""

    def __init__(self, server: Server, seed: int, streams: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.recoveries: dict[str, list[float]] = collections.defaultdict(list)
        self.refusals_ms: list[float] = []
        self._expected = server.text(PROMPT, 24)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(streams)]
        for thread in self._threads:
            thread.start()

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def _stream(self) -> None:
        body = json.dumps({"text_input": PROMPT, "max_tokens": 24, "stream": True}).encode()
        while not self._ending.is_set():
            outcome, text = attempt(self.server, body, "generate_stream")
            if outcome == "whole":
                events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
                got = "".join(event["text_output"] for event in events)
                outcome = "whole" if got == self._expected else "wrong"
            self._count(outcome)
            if outcome != "whole":
                self._ending.wait(0.2)  # as a client that tries again

    def close(self) -> None:
        """Ends the load."""
        self._ending.set()
        for thread in self._threads:
            thread.join(SILENT_S + 5)

    def kill(self) -> str:
        """SIGKILL for one process, or for two within a moment."""
        part = self.rng.choice(PARTS)
        for victim in self.server.matching(part)[: self.rng.randint(1, 2)]:
            time.sleep(self.rng.uniform(0.0, 0.5))
            with contextlib.suppress(psutil.Error):
                victim.kill()
        return f"kill {part.strip('/').partition('/')[0]}"

    def stop(self) -> str:
        """SIGSTOP for a second and a half."""
        part = self.rng.choice(PARTS[1:4])
        victims = self.server.matching(part)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for victim in victims:
                with contextlib.suppress(psutil.Error):
                    victim.send_signal(number)
            time.sleep(1.5 if number == signal.SIGSTOP else 0)
        return f"stop {part.strip('/').partition('/')[0]} for 1.5 s"

    def drop(self, connections: int = 500) -> str:
        """Clients that leave while their streams run."""
        place = urlsplit(self.server.url)
        body = json.dumps({"text_input": PROMPT, "max_tokens": 500, "stream": True})
        head = "POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        for _ in range(connections):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((str(place.hostname), place.port), timeout=5) as sock,
            ):
                sock.sendall((head + body).encode())
        return f"{connections} dropped connections"

    def flood(self, requests: int = 300) -> str:
        """Many times what the server can run at once."""
        body = json.dumps({"text_input": PROMPT, "max_tokens": 8}).encode()

        def one() -> None:
            began = time.monotonic()
            outcome, _ = attempt(self.server, body)
            self._count(outcome)
            if outcome == "worded":
                with self._lock:
                    self.refusals_ms.append((time.monotonic() - began) * 1000)

        threads = [threading.Thread(target=one, daemon=True) for _ in range(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SILENT_S + 5)
        return f"flood of {requests}"

    def hostile(self) -> str:
        """Requests that are wrong in every way."""
        for body in HOSTILE:
            for kind in ("generate", "generate_stream"):
                outcome, _ = attempt(self.server, body, kind)
                self._count(f"hostile {outcome}")
                if outcome in ("silent", "cut"):
                    print(f"hostile {outcome}: {kind} {body[:60]!r}", file=sys.stderr)
        return "hostile inputs"

    def round(self, harm: Callable[[], str]) -> None:
        """One harm, and the way back. Raises AssertionError where there is none."""
        name = harm()
        began = time.monotonic()
        wait_for(
            lambda: self.server.ready() and self.server.answers(PROMPT), f"answers after: {name}", BACK_S
        )
        # What is noticed only now is part of this harm.
        time.sleep(1.2)
        wait_for(
            lambda: self.server.ready() and self.server.answers(PROMPT), f"answers after: {name}", BACK_S
        )
        self.recoveries[name].append(max(0.0, time.monotonic() - began - 1.2))
        assert self.server.launcher.poll() is None, "serve ended"

    def memory(self) -> dict[str, int]:
        """MiB by kind of process, and of shared memory."""
        found: collections.Counter[str] = collections.Counter()
        for process, line in self.server.commands().items():
            name = next((part for part in PARTS if part in line), "others").strip("/").partition("/")[0]
            with contextlib.suppress(psutil.Error):
                found[name] += process.memory_info().rss >> 20
        shared = Path("/dev/shm").glob(f"{self.server.shm_prefix}*")
        found["shared memory"] = sum(path.stat().st_size for path in shared) >> 20
        return dict(found)

    def failures(self) -> list[str]:
        """What broke a promise; empty after a run that the server has stood."""
        kinds = ("silent", "wrong", "hostile silent", "hostile cut")
        return [f"{self.outcomes[kind]} clients: {kind}" for kind in kinds if self.outcomes[kind]]


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--report", type=Path, help="where to write the tables as well")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        repository = build_repository(Path(folder))
        with running(repository, Path(folder), options=["--restarts", "0"]) as server:
            attack = Attack(server, options.seed, options.streams)
            before = attack.memory()
            end = time.monotonic() + options.minutes * 60
            harms = [
                attack.kill,
                attack.kill,
                attack.kill,
                attack.stop,
                attack.drop,
                attack.flood,
                attack.hostile,
            ]
            try:
                while time.monotonic() < end:
                    attack.round(attack.rng.choice(harms))
            finally:
                attack.close()
            text = report(attack, options.minutes, before, attack.memory())
            server.interrupt()
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not server.leftovers(), "nothing to be left", 10)
            failures = attack.failures() + [f"left behind: {name}" for name in server.leftovers()]
    print(text, *failures, sep="\n")
    if options.report:
        options.report.write_text(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
