# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic through every API of a real server, every answer compared: `make soak MINUTES=30`.

Requests are drawn from a fixed number of cases whose right answers are known (reference.py), and go out
over Triton's HTTP and gRPC and the OpenAI API, streamed and not. Now and then one is refused, or its client
leaves. Meanwhile memory, file descriptors, threads and shared memory of every process are looked at.
"""

import argparse
import functools
import json
import os
import queue
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)] + [str(Path(__file__).parents[1] / "server")]

from asking import inputs  # noqa: E402
from openai_server import events  # noqa: E402
from reference import Answer, Case, cases  # noqa: E402
from running import BothApis, both_running, build_repository, request_bytes, wait_for  # noqa: E402
from watching import MIB, SILENT_S, Usage, attempt, ports, usage  # noqa: E402

from client.arguments import integer, positive  # noqa: E402
from flashinfer_backend.core.paths import resolve_model_dir  # noqa: E402

KNOBS = ["max_num_seqs=16", "max_num_tokens=256", "max_num_tokens_while_decoding=128"]
KV_TOKENS = 8192  # blocks run out now and then, and what is cached has to go
SETTLED = 0.3  # of a run; what grows before that is the server's own warming up
# Both APIs' words for parameters, and gRPC's types of them.
TRITON = {
    "max_tokens": np.int32,
    "temperature": np.float32,
    "seed": np.uint64,
    "top_k": np.int32,
    "top_p": np.float32,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "num_return_sequences": np.int32,
    "stream": np.bool_,
    "exclude_input_in_output": np.bool_,
    "exclude_stop_words_in_output": np.bool_,
}


def parameters(case: Case) -> dict[str, Any]:
    """What both APIs call by the same name. What a request leaves out, it does not ask for."""
    said: dict[str, Any] = {"max_tokens": case.max_tokens, "temperature": case.temperature}
    if case.temperature:
        said |= {"seed": case.seed, "top_p": case.top_p, "top_k": case.top_k}
    if case.repetition_penalty != 1.0:
        said["repetition_penalty"] = case.repetition_penalty
    if case.frequency_penalty:
        said["frequency_penalty"] = case.frequency_penalty
    return said


def triton_body(case: Case, stream: bool) -> dict[str, Any]:
    body = {"text_input": case.prompt, "stream": stream, **parameters(case)}
    body |= {"exclude_input_in_output": True, "exclude_stop_words_in_output": True}
    if case.stop:
        body["stop_words"] = [case.stop]
    if case.regex:
        body |= {"guided_decoding_guide_type": "regex", "guided_decoding_guide": case.regex}
    if case.sequences > 1:
        body["num_return_sequences"] = case.sequences
    return body


def openai_body(case: Case, stream: bool) -> dict[str, Any]:
    body = {"stream": stream, "n": case.sequences, **parameters(case)}
    if case.question:
        body["messages"] = [{"role": "user", "content": case.question}]
    else:
        body["prompt"] = case.prompt
    if case.stop:
        body["stop"] = case.stop
    if case.regex:
        body["structured_outputs"] = {"regex": case.regex}
    return body


def gathered(parts: list[tuple[int, str, str | None]], count: int) -> list[Answer]:
    """The answers of so many sequences by (number, text, finish reason or none) of their chunks."""
    texts, reasons = [""] * count, [""] * count
    for number, text, reason in parts:
        texts[number] += text
        reasons[number] += reason or ""
    return [Answer(text, reason) for text, reason in zip(texts, reasons, strict=True)]


def shown(case: Case) -> str:
    """A case without its answers, and the end of its prompt."""
    return str(replace(case, prompt=f"...{case.prompt[-40:]}", answers=()))


class NoAnswerError(Exception):
    """What a client got in the place of an answer."""


APIS = ("HTTP generate", "HTTP generate_stream", "gRPC stream", "OpenAI", "OpenAI stream")


class Client:
    """Asks every API, one request at a time."""

    def __init__(self, server: BothApis) -> None:
        self._ports = ports(server)
        self._grpc = grpcclient.InferenceServerClient(server.grpc)
        self._heard: queue.Queue[Any] = queue.Queue()
        self._grpc.start_stream(lambda result, error: self._heard.put((result, error)))
        openai = (functools.partial(self.openai, stream=stream) for stream in (False, True))
        asks = [self.generate, self.generate_stream, self.grpc_stream, *openai]
        self.apis: dict[str, Callable[[Case], list[Answer]]] = dict(zip(APIS, asks, strict=True))

    def close(self) -> None:
        self._grpc.stop_stream()
        self._grpc.close()

    def _post(self, api: str, path: str, body: dict[str, Any]) -> str:
        outcome, text = attempt(self._ports[api], path, json.dumps(body).encode())
        if outcome != "whole":
            raise NoAnswerError(f"{outcome}: {text[:300]}")
        return text

    def generate(self, case: Case) -> list[Answer]:
        text = self._post("triton", "/v2/models/ensemble/generate", triton_body(case, stream=False))
        answer = json.loads(text)
        return [Answer(answer["text_output"], answer["finish_reason"])]

    def generate_stream(self, case: Case) -> list[Answer]:
        text = self._post("triton", "/v2/models/ensemble/generate_stream", triton_body(case, stream=True))
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        parts = [(e.get("sequence_index", 0), e["text_output"], e.get("finish_reason")) for e in events]
        return gathered(parts, case.sequences)

    def grpc_stream(self, case: Case) -> list[Answer]:
        values = {}
        for name, value in triton_body(case, stream=True).items():
            words = value if isinstance(value, list) else [value]
            texts = np.array([[str(word).encode() for word in words]], np.object_)
            values[name] = np.array([[value]], TRITON[name]) if name in TRITON else texts
        self._grpc.async_stream_infer("ensemble", inputs(values), enable_empty_final_response=True)
        parts: list[tuple[int, str, str | None]] = []
        while True:
            try:
                result, error = self._heard.get(timeout=SILENT_S)
            except queue.Empty:
                raise NoAnswerError("silent") from None
            if error is not None:
                raise NoAnswerError(f"worded: {error}")
            if (text := result.as_numpy("text_output")) is not None:
                index, reason = result.as_numpy("sequence_index"), result.as_numpy("finish_reason")
                number = 0 if index is None else int(index.item())
                said = None if reason is None else reason.item().decode()
                parts.append((number, text.item().decode(), said))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return gathered(parts, case.sequences)

    def openai(self, case: Case, stream: bool) -> list[Answer]:
        path = "/v1/chat/completions" if case.question else "/v1/completions"
        text = self._post("openai", path, openai_body(case, stream))
        answers = events(text) if stream else [json.loads(text)]
        parts = []
        for choice in (choice for answer in answers for choice in answer["choices"]):
            said = choice.get("text")
            if said is None:
                said = choice["delta" if stream else "message"].get("content") or ""
            parts.append((choice["index"], said, choice["finish_reason"]))
        return gathered(parts, case.sequences)

    def refused(self) -> None:
        """A request that is wrong."""
        body = {"text_input": "a", "max_tokens": -1} if random.random() < 0.5 else {"text_input": "a"}
        outcome, _ = attempt(self._ports["triton"], "/v2/models/ensemble/generate", json.dumps(body).encode())
        other, _ = attempt(self._ports["openai"], "/v1/completions", b'{"prompt": [99999]}')
        if (outcome, other) != ("worded", "worded"):
            raise NoAnswerError(f"{outcome}, {other} in the place of errors in words")

    def leave(self) -> None:
        """A client of the OpenAI API that goes in the midst of its stream. Of the ensemble's streams none
        does: that costs tritonserver some memory, as docs/triton-notes.md says, and would hide all else."""
        body = {"prompt": "Once upon a time", "max_tokens": 500, "stream": True}
        with socket.create_connection(("127.0.0.1", self._ports["openai"]), timeout=SILENT_S) as sock:
            sock.sendall(request_bytes("/v1/completions", body))
            sock.recv(1)


@dataclass
class Sample:
    """At a moment: seconds since the start, answers so far, what the processes take."""

    at: float
    answers: int
    usage: dict[str, Usage]


class Soak:
    """Traffic to one server, until `close`."""

    def __init__(
        self, server: BothApis, known: list[Case], seed: int, clients: int, apis: Sequence[str] = APIS
    ) -> None:
        self.server, self.known, self.apis = server, known, apis
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[Sample] = []
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(f"{seed} {number}"),), daemon=True)
            for number in range(clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the traffic. Requests that run have their answers."""
        self._ending.set()
        for thread in self._threads:
            thread.join(SILENT_S + 5)

    @property
    def answers(self) -> int:
        return sum(self.counts.values())

    def sample(self) -> None:
        found = usage(self.server)
        self.samples.append(Sample(time.monotonic() - self.began, self.answers, found))

    def _ask(self, rng: random.Random) -> None:
        client = Client(self.server)
        while not self._ending.is_set():
            case, name = rng.choice(self.known), rng.choice(self.apis)
            if case.sequences > 1 and name == "HTTP generate":  # which has one answer
                continue
            draw = rng.random() if self.apis == APIS else 1.0
            try:
                if draw < 0.01:
                    name = "refused"
                    client.refused()
                elif draw < 0.02:
                    name = "left"
                    client.leave()
                else:
                    self._compare(name, case, client.apis[name](case))
            except Exception as error:
                self._note(f"{name}: {type(error).__name__}: {error}; {shown(case)}")
                self._ending.wait(0.2)
                client.close()  # a gRPC stream that had an error takes no more requests
                client = Client(self.server)
            with self._lock:
                self.counts[name] += 1
        client.close()

    def _compare(self, name: str, case: Case, found: list[Answer]) -> None:
        if found != list(case.answers):
            self._note(f"{name} answers {found}, not {list(case.answers)}; {shown(case)}")

    def _note(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)
        print(what, file=sys.stderr, flush=True)


def report(soak: Soak) -> str:
    """Markdown tables of a run."""
    last, engine = soak.samples[-1], soak.server.engine_status()
    lines = [f"{last.answers} requests in {last.at / 60:.1f} minutes, {len(soak.wrong)} wrong;"]
    lines += [
        f"{engine.generated_tokens} tokens, {engine.prompt_tokens} of prompts, of these"
        f" {engine.prompt_tokens_reused} found in the cache, {engine.preemptions} preemptions,"
        f" {engine.cancellations} cancellations",
        "",
    ]
    lines += ["| API | requests |", "|---|---:|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(soak.counts.items())]
    settled = [s for s in soak.samples if s.at >= SETTLED * last.at] or soak.samples
    first = settled[0]
    lines += [
        "",
        f"Memory of their own, from {first.answers} requests on; descriptors and threads: least and most.",
        "",
        "| process | MiB at first | MiB then | MiB at last | bytes a request | descriptors | threads |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    requests = np.array([s.answers for s in settled], float)
    for name in sorted({name for s in soak.samples for name in s.usage}):
        each = [s.usage.get(name, Usage()) for s in settled]
        memory = np.array([u.memory for u in each], float)
        rate = np.polyfit(requests, memory, 1)[0] if np.ptp(requests) else 0.0
        at_first = soak.samples[0].usage.get(name, Usage()).memory
        cells = [f"{value / MIB:.1f}" for value in (at_first, memory[0], memory[-1])] + [f"{rate:.0f}"]
        for values in ([u.files for u in each], [u.threads for u in each]):
            cells.append("-" if name == "shared memory" else f"{min(values)} to {max(values)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Mixed traffic, every answer compared.")
    parser.add_argument("--minutes", type=positive, default=30.0)
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--cases", type=integer(1), default=500, help="different requests")
    parser.add_argument("--clients", type=integer(1), default=12)
    parser.add_argument("--apis", nargs="+", choices=APIS, default=APIS, help="these alone")
    parser.add_argument("--samples", type=Path, help="where to write all samples, as JSON lines")
    options = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The server, in a session of its own, ends as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = resolve_model_dir("bundled")
        known = cases(options.cases, options.seed, folder / "reference", model)
        repository = build_repository(folder, *KNOBS, kv_tokens=KV_TOKENS, model=model)
        with both_running(repository, folder) as server:
            soak = Soak(server, known, options.seed, options.clients, options.apis)
            soak.sample()
            soak.start()
            end = time.monotonic() + options.minutes * 60
            while time.monotonic() < end:
                time.sleep(min(10.0, options.minutes * 60 / 20))
                soak.sample()
                if options.samples:
                    with options.samples.open("a") as file:
                        one = soak.samples[-1]
                        each = {name: vars(value) for name, value in one.usage.items()}
                        file.write(json.dumps({"at": one.at, "answers": one.answers, **each}) + "\n")
                if len(soak.wrong) > 50:
                    break
            soak.close()
            wrong = [*soak.wrong, *problems_at_rest(server)]
            soak.sample()
            print(report(soak))
            said = [word for word in ("Traceback", "starting the server") if word in server.log]
            wrong += [f"the log says {word}" for word in said]
    print(*wrong, f"{len(wrong)} findings", sep="\n")
    return 1 if wrong else 0


def problems_at_rest(server: BothApis) -> list[str]:
    """What the engine still has once nobody asks for anything."""
    try:
        wait_for(lambda: not server.engine_status().requests_active, "the engine to have nothing to do")
    except AssertionError:
        return [f"the engine still has {server.engine_status().requests_active} requests"]
    used = server.engine_status().blocks_used
    return [f"{used} blocks are held by nobody"] if used else []


if __name__ == "__main__":
    sys.exit(main())
