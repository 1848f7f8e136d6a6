# SPDX-License-Identifier: Apache-2.0
"""The engine without Triton: decode step times, and a batch of requests from arrival to end.

    python -m perf_configs.bench_engine --model DIR [--load-format dummy] [--sharegpt FILE] [--out FILE.json]

Step times are those of the real scheduler and runner with steps launched ahead, per number of
sequences at a context of about 256 tokens: wall time per step, host time per step, and the share
of the time in which the device waited for the host (from an event pair around each launch).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashinfer_backend.engine.config import EngineConfig
from flashinfer_backend.engine.request import Request
from flashinfer_backend.engine.results import accept
from flashinfer_backend.engine.startup import Core, start
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.protocol import SamplingParams


class Driver:
    """The engine's loop without its socket."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.in_flight: deque[Any] = deque()
        self.next_handle = 1 << 32
        self.host_seconds: list[float] = []
        self.shapes: list[tuple[int, int, int]] = []
        self.output_tokens = 0

    def submit(self, prompt: np.ndarray, max_tokens: int) -> None:
        self.next_handle += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = Request(handle=self.next_handle, prompt=prompt, params=params, max_new=max_tokens)
        self.core.scheduler.submit(request)

    def step(self) -> None:
        began = time.perf_counter()
        scheduler, runner = self.core.scheduler, self.core.runner
        plan = scheduler.schedule(in_flight=bool(self.in_flight))
        if plan is not None:
            self.shapes.append((plan.num_decode, plan.num_prefill, len(plan.prefill_tokens)))
            self.in_flight.append(runner.launch(plan))
        host = time.perf_counter() - began
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            launched = self.in_flight.popleft()
            tokens = launched.download.wait()
            began = time.perf_counter()
            outcome = accept(scheduler.table, launched.plan, tokens)
            self.output_tokens += len(tokens)
            table = scheduler.table
            owners = table.stub[outcome.slots]
            for pid in np.unique(owners).tolist():
                mine = owners == pid
                protocol.pack_tokens(
                    table.local_id[outcome.slots][mine], outcome.tokens[mine], outcome.codes[mine]
                )
            for slot in outcome.slots[outcome.codes != protocol.RUNNING].tolist():
                scheduler.release(table.requests[slot])  # type: ignore[arg-type]
            host += time.perf_counter() - began
        self.host_seconds.append(host)

    def drain(self) -> None:
        while self.core.scheduler.requests or self.in_flight:
            self.step()


def decode_steps(core: Core, batch: int, context: int, steps: int, vocab: int) -> dict[str, float]:
    """Median step of `batch` sequences whose context grows from `context` by `steps`."""
    driver = Driver(core)
    generator = np.random.default_rng(batch)
    for _ in range(batch):
        driver.submit(generator.integers(3, vocab, context, dtype=np.int32), steps + 40)
    scheduler = core.scheduler
    while scheduler.prefilling or scheduler.waiting:
        driver.step()
    for _ in range(16):
        driver.step()
    torch.cuda.synchronize()
    driver.host_seconds.clear()
    began = time.perf_counter()
    times = []
    for _ in range(steps):
        before = time.perf_counter()
        driver.step()
        times.append(time.perf_counter() - before)
    wall = (time.perf_counter() - began) / steps
    result = {
        "batch": batch,
        "context": context,
        "step_ms": wall * 1e3,
        "step_p50_ms": float(np.median(times)) * 1e3,
        "host_ms": float(np.median(driver.host_seconds)) * 1e3,
    }
    driver.drain()
    return result


def offline(core: Core, lengths: list[tuple[int, int]], vocab: int) -> dict[str, Any]:
    """All requests at once, to the end."""
    driver = Driver(core)
    generator = np.random.default_rng(0)
    for prompt, output in lengths:
        driver.submit(generator.integers(3, vocab, prompt, dtype=np.int32), output)
    torch.cuda.synchronize()
    began = time.perf_counter()
    timeline = []
    while core.scheduler.requests or driver.in_flight:
        before = time.perf_counter()
        count = len(driver.shapes)
        driver.step()
        shape = driver.shapes[-1] if len(driver.shapes) > count else (0, 0, 0)
        timeline.append((*shape, time.perf_counter() - before, driver.host_seconds[-1]))
    seconds = time.perf_counter() - began
    return {
        "requests": len(lengths),
        "seconds": seconds,
        "output_tokens_per_s": sum(o for _, o in lengths) / seconds,
        "prompt_tokens": sum(p for p, _ in lengths),
        "steps": len(timeline),
        "host_seconds": sum(driver.host_seconds),
        "timeline": timeline,
    }


def sharegpt_lengths(path: Path, model_dir: Path, count: int) -> list[tuple[int, int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    rows = json.loads(path.read_text())[:count]
    texts = [turn["value"] for row in rows for turn in row["conversations"][:2]]
    lengths = [len(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return list(zip(lengths[::2], lengths[1::2], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--load-format", default="dummy", choices=["auto", "dummy"])
    parser.add_argument("--sharegpt", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parameters = dict(item.split("=", 1) for item in options.set)
    parameters = {
        "max_num_seqs": "1024",
        "max_seq_len": "8192",
        "enable_kv_cache_reuse": "false",
    } | parameters
    parameters |= {"model_dir": str(options.model), "load_format": options.load_format}
    began = time.perf_counter()
    core = start(EngineConfig.from_parameters(parameters))
    results: dict[str, Any] = {"start_s": time.perf_counter() - began, "parameters": parameters, "decode": []}
    print(f"start-up {results['start_s']:.1f} s")
    vocab = core.model_config.vocab_size
    for batch in map(int, options.batches.split(",")):
        row = decode_steps(core, batch, 256, 100, vocab)
        results["decode"].append(row)
        print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if options.sharegpt:
        lengths = sharegpt_lengths(options.sharegpt, options.model, options.requests)
        row = offline(core, lengths, vocab)
        results["offline"] = row
        print({k: v for k, v in row.items() if k != "timeline"})
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
