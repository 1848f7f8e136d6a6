# SPDX-License-Identifier: Apache-2.0
"""The engine without a server: times of decode steps, and batches of requests from arrival to end.

    python -m perf_configs.bench_engine --model DIR [--load-format dummy] [--sharegpt FILE]
        [--shared 64x1x30016,64x16x704] [--lengths 128/128x3000,2048/2048] [--out FILE.json]

The engine's own loop runs, with lists instead of its socket. For each number of sequences, at a context of
about 256 tokens, it prints the wall time of a step and the CPU time of the engine's thread; on one GPU also
the time of the step's CUDA graph alone (replayed back to back) and the device's idle time, which is the share
of the wall time without the graph.

--shared ROWSxDOCUMENTSxTOKENS times decode steps of ROWS sequences. Each has 200 tokens of its own after one
of DOCUMENTS shared documents of TOKENS tokens; with 0 documents, all tokens are its own. It prints the times
as the engine runs these steps, and with each row reading all of its keys (alone_step_ms, alone_graph_ms).

--lengths is the throughput of trtllm-bench: prompts of one length and answers of another, all sent at the
beginning; the output tokens of all divided by the time to the end of the last.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from client.arguments import argument_parser, integer, integers, tuples
from client.datasets import load_tokenizer, read_turns
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import named_folder
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.loop import EngineLoop
from flashinfer_backend.engine.start import Core
from flashinfer_backend.transport import protocol
from flashinfer_backend.worker.graphs import DecodeGraphs
from perf_configs.engine_start import add_engine_options, parameters_from, start_on_gpu

STUB = 1  # pid of the stub that the requests seem to come from
REPLAYS = 30
REQUESTS = 1000  # conversations of a file
OWN_TOKENS = 200  # of each row's prompt behind a document
CONTEXT, STEPS, SPARE = 256, 100, 56  # tokens: prompt of decode steps, steps timed, steps before and after


class LocalSocket:
    """EngineSocket's methods, without processes: takes messages from a list, counts what is sent."""

    def __init__(self) -> None:
        self.pid, self.closed = STUB, False
        self.inbox: list[protocol.ToEngine] = []
        self.output_tokens = 0

    def receive(self, timeout_ms: int, until: float) -> list[protocol.ToEngine]:
        messages, self.inbox = self.inbox, []
        if not messages:
            time.sleep(timeout_ms / 1000)
        return messages

    def send_tokens(self, pid: int, frame: bytes, reports: list[protocol.RowReport] | None) -> None:
        tokens = protocol.unpack_tokens(frame)[:, 1]
        self.output_tokens += int((tokens != protocol.NO_TOKEN).sum())

    def send_failure(self, failure: protocol.Failure) -> None:
        raise RuntimeError(failure.message)

    def send_status(self, status: protocol.Status) -> None:
        """None asked."""

    def forget(self, pid: int) -> None:
        """None leaves."""


class Driver:
    """The engine's loop with requests from this process."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.socket = LocalSocket()
        self.loop = EngineLoop(core, self.socket)
        self.last_id = 0
        self.shapes: list[tuple[int, int, int]] = []  # of steps: prefill rows, decode rows, prompt tokens

    def submit(self, prompt: np.ndarray, max_tokens: int, adapter: str = "", seed: int = 0) -> None:
        self.last_id += 1
        handle = protocol.make_handle(STUB, self.last_id)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, adapter=adapter, seed=seed)
        self.socket.inbox.append(protocol.Submit(handle, prompt.astype("<i4").tobytes(), params, 0, 0, 0))

    def step(self) -> None:
        iteration = self.loop.iteration
        self.loop.step()
        if self.loop.iteration > iteration:
            self.shapes.append(self.loop.last_plan)

    @property
    def busy(self) -> bool:
        waiting = len(self.loop.preparations)
        return bool(self.socket.inbox or self.core.scheduler.requests or self.loop.in_flight or waiting)

    def decode(
        self, prompts: Sequence[np.ndarray], max_tokens: int, adapters: Sequence[str] = ("",), warm: int = 16
    ) -> None:
        """Submit these prompts, with the adapters in turns and their numbers as seeds, and step until all
        decode and `warm` steps more. The device has nothing left to do but the step that was launched
        last."""
        for number, prompt in enumerate(prompts):
            self.submit(prompt, max_tokens, adapters[number % len(adapters)], number)
        self.step_until_all_decode()
        for _ in range(warm):
            self.step()
        if self.core.runner.device.type == "cuda":
            torch.cuda.synchronize()
            self.step()

    def step_until_all_decode(self) -> None:
        """Until the prompts of all requests so far are computed."""
        self.step()
        scheduler = self.core.scheduler
        while scheduler.prefilling or scheduler.queue or len(self.loop.preparations):
            self.step()

    def drain(self) -> None:
        while self.busy:
            self.step()

    def stop(self) -> None:
        for request in list(self.core.scheduler.requests.values()):
            self.core.scheduler.release(request)
        self.drain()


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocab, length, dtype=np.int32) for _ in range(count)]


def decode_steps(core: Core, batch: int, context: int, steps: int, vocab: int) -> dict[str, float]:
    """Mean step of `batch` sequences whose context grows from `context` by `steps`. Without graph_ms and
    idle_share of several ranks."""
    driver = Driver(core)
    driver.decode(random_prompts(batch, context, vocab, seed=batch), steps + SPARE)
    row = {"batch": batch, "context": context} | timed_steps(driver, steps)
    driver.drain()
    return row


def timed_steps(driver: Driver, steps: int) -> dict[str, float]:
    """Mean of the next steps, all of decodes."""
    core = driver.core
    began, cpu_began = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        driver.step()
    wall = (time.perf_counter() - began) / steps
    cpu = (time.thread_time() - cpu_began) / steps
    row = {"step_ms": wall * 1e3, "cpu_ms": cpu * 1e3}
    if core.runner.others is None:
        graph = graph_seconds(core, core.runner.graphs)
        row |= {"graph_ms": graph * 1e3, "idle_share": 1.0 - graph / wall}
    return row


class SharedCase(NamedTuple):
    """Rows in turns over documents; without any, of as many tokens that they do not share."""

    rows: int
    documents: int
    tokens: int


def shared_steps(core: Core, case: SharedCase, steps: int, vocab: int) -> dict[str, float]:
    """Decode steps of rows that share documents, as they run and with each row reading all of its keys."""
    driver, prefixes = Driver(core), core.runner.state.prefixes
    documents = random_prompts(case.documents or case.rows, case.tokens, vocab, seed=1)
    own = random_prompts(case.rows, OWN_TOKENS, vocab, seed=2)
    prompts = [np.concatenate([documents[row % len(documents)], behind]) for row, behind in enumerate(own)]
    driver.decode(prompts, 2 * steps + SPARE)
    row: dict[str, float] = {**case._asdict()} | timed_steps(driver, steps)
    prefixes.enabled = False
    for _ in range(2):
        driver.step()
    row |= {f"alone_{name}": value for name, value in timed_steps(driver, steps).items()}
    prefixes.enabled = True
    driver.drain()
    return row


def graph_seconds(core: Core, graphs: DecodeGraphs | None) -> float:
    """Device time of one replay of the decode graph that ran last, with what it read then; last tokens and
    lengths are put back, the cache positions that it writes are written again by the next real step."""
    assert graphs is not None, "the model's decode graphs are switched off"
    torch.cuda.synchronize()
    state = core.runner.state
    last_token, lengths = state.last_token.clone(), state.lengths.clone()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = graphs.last
    assert graph is not None, "no decode graph has run"
    for _ in range(3):
        graph.replay()
    state.lengths.copy_(lengths)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    state.last_token.copy_(last_token)
    state.lengths.copy_(lengths)
    return begin.elapsed_time(end) / REPLAYS / 1e3


def offline(core: Core, lengths: list[tuple[int, int]], vocab: int) -> dict[str, Any]:
    """All requests at once, to the end."""
    driver = Driver(core)
    generator = np.random.default_rng(0)
    for prompt, output in lengths:
        driver.submit(generator.integers(3, vocab, prompt, dtype=np.int32), output)
    began, cpu_began = time.perf_counter(), time.thread_time()
    timeline = []
    while driver.busy:
        before = time.perf_counter()
        count = len(driver.shapes)
        driver.step()
        shape = driver.shapes[-1] if len(driver.shapes) > count else (0, 0, 0)
        timeline.append((*shape, time.perf_counter() - before))
    seconds = time.perf_counter() - began
    return {
        "requests": len(lengths),
        "seconds": seconds,
        "cpu_seconds": time.thread_time() - cpu_began,
        "output_tokens_per_s": driver.socket.output_tokens / seconds,
        "prompt_tokens": sum(p for p, _ in lengths),
        "steps": len(timeline),
        "timeline": timeline,
    }


def sharegpt_lengths(path: Path, model_dir: Path, count: int, config: EngineConfig) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the first two turns of each of the first `count` conversations that have
    two, without those that the engine would refuse or cut. In the order of the file, as earlier results."""
    texts = [text for turns in read_turns(path)[:count] for text in turns]
    encodings = load_tokenizer(model_dir).encode_batch(texts, add_special_tokens=False)
    lengths = [len(encoding.ids) for encoding in encodings]
    return [
        (prompt, output)
        for prompt, output in zip(lengths[::2], lengths[1::2], strict=True)
        if 0 < prompt <= config.max_input_len and 0 < output <= config.max_seq_len - prompt
    ]


class Load(NamedTuple):
    """Requests of one shape. requests 0: as many as run at once."""

    prompt: int
    output: int
    requests: int


def batch_sizes(text: str) -> list[int]:
    """Whole numbers separated by commas, or none."""
    return integers(1)(text) if text else []


def at_once(core: Core, load: Load) -> int:
    """How many sequences of such lengths the engine runs at once."""
    config = core.config
    blocks = -(-(load.prompt + load.output) // config.tokens_per_block)
    return min(config.max_num_seqs, core.scheduler.kv_manager.pools[0].num_blocks // blocks)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.bench_engine", __doc__)
    add_engine_options(parser)
    parser.add_argument("--sharegpt", type=Path, metavar="FILE", help="conversations to answer, all at once")
    parser.add_argument(
        "--requests", type=integer(1), metavar="N", help=f"conversations of that file (default: {REQUESTS})"
    )
    parser.add_argument(
        "--batches", type=batch_sizes, default="1,16,64,256", metavar="N,...",
        help='sequences of the decode steps to time; "": none (default: %(default)s)',
    )  # fmt: skip
    parser.add_argument(
        "--shared", type=tuples("NxnxN"), default=[], metavar="ROWSxDOCUMENTSxTOKENS,...",
        help="decode steps of rows that share documents",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=tuples("N/N[xN]"), default=[], metavar="PROMPT/OUTPUT[xREQUESTS],...",
        help="tokens of prompt and answer of loads, all at once; without xREQUESTS as many requests as run at"
        " the same time",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(argv)
    if options.sharegpt is not None and not options.sharegpt.is_file():
        parser.error(f"--sharegpt {options.sharegpt}: there is no such file")
    if options.sharegpt is None and options.requests is not None:
        parser.error("--requests is the number of conversations of --sharegpt FILE, which is not given")
    loads = [Load(*case) for case in options.lengths]
    reuse = str(bool(options.shared)).lower()
    own = {"max_num_seqs": "1024", "max_queue_size": "0", "enable_kv_cache_reuse": reuse}
    own["read_shared_prefixes_once"] = reuse
    parameters = parameters_from(parser, options, **own)
    began = time.perf_counter()
    core = start_on_gpu(parser, parameters)
    batches = options.batches
    most = at_once(core, Load(CONTEXT, STEPS + SPARE, 0))
    if max(batches, default=0) > most:  # the others would wait, and the steps be of fewer
        parser.exit(1, f"{parser.prog}: --batches {max(batches)}: {most} run at once with these settings\n")
    if (batches or options.shared) and core.runner.graphs is None:
        parser.exit(1, f"{parser.prog}: needs the decode graphs that these settings switch off\n")
    longest = [CONTEXT + STEPS + SPARE] * bool(batches) + [load.prompt + load.output for load in loads]
    shared = [SharedCase(*case) for case in options.shared]
    longest += [case.tokens + OWN_TOKENS + 2 * STEPS + SPARE for case in shared]
    if max(longest, default=0) > core.config.max_seq_len:
        needed = f"needs sequences of {max(longest)} tokens"
        parser.exit(1, f"{parser.prog}: {needed}, and max_seq_len is {core.config.max_seq_len}\n")
    results: dict[str, Any] = {"start_s": time.perf_counter() - began, "parameters": parameters}
    results |= {"decode": [], "shared": []}
    print(f"start-up {results['start_s']:.1f} s")
    vocab = core.spec.vocab_size
    for batch in batches:
        row = decode_steps(core, batch, CONTEXT, STEPS, vocab)
        results["decode"].append(row)
        print(_shown(row))
    for case in shared:
        row = shared_steps(core, case, STEPS, vocab)
        results["shared"].append(row)
        print(_shown(row), flush=True)
    if options.sharegpt:
        folder, count = named_folder(options.model), options.requests or REQUESTS
        lengths = sharegpt_lengths(options.sharegpt, folder, count, core.config)
        row = offline(core, lengths, vocab)
        results["offline"] = row
        print({k: v for k, v in row.items() if k != "timeline"})
    results["lengths"] = []
    _write(options.out, results)
    for load in loads:
        requests = load.requests or at_once(core, load)
        row = offline(core, [(load.prompt, load.output)] * requests, vocab)
        results["lengths"].append({**load._asdict(), **row})
        _write(options.out, results)
        rate = f"{row['output_tokens_per_s']:.0f} output tokens/s"
        print(
            f"{load.prompt}/{load.output}: {requests} requests in {row['seconds']:.1f} s, {rate}", flush=True
        )
    core.close()


def _shown(row: dict[str, float]) -> str:
    return " ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def _write(path: Path | None, results: dict[str, Any]) -> None:
    """After each load: what is there stays if a later one is ended."""
    if path:
        path.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # of several ranks: while the interpreter ended, NCCL's group would wait for the graphs' end
