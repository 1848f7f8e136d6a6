# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with drafts whose accepted length is set, next to an EAGLE-3 head that costs what a
published one does, and without drafts:

    python -m perf_configs.bench_speculation --model DIR [--set quantization=fp8] [--out FILE.json]

Weights are random; perf_configs/replaying.py says how drafts can be right all the same. The engine starts
twice, without a drafter and with one. `x` is the rate over that without; `tokens a step` what each sequence's
steps came to, which stays below the set length where the engine checks fewer drafts, or none.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client.arguments import integer, integers
from flashinfer_backend.engine.start import Core
from perf_configs.bench_engine import CONTEXT, Driver
from perf_configs.engine_start import add_engine_options, parameters_from, start_on_gpu
from perf_configs.replaying import Replaying, make_replaying

TOKENS = 160  # of each answer while the time is taken
SPARE = 64  # before and after


def rate(core: Core, batch: int, vocab: int) -> dict[str, float]:
    """Output tokens per second of `batch` greedy sequences, and tokens of each step of one of them."""
    driver = Driver(core)
    generator = np.random.default_rng(batch)
    for _ in range(batch):
        driver.submit(generator.integers(3, vocab, CONTEXT, dtype=np.int32), TOKENS + 2 * SPARE)
    driver.step_until_all_decode()
    for _ in range(8):
        driver.step()
    torch.cuda.synchronize()
    driver.step()
    tokens, steps, began = driver.socket.output_tokens, len(driver.shapes), time.perf_counter()
    while driver.socket.output_tokens < tokens + batch * TOKENS:
        driver.step()
    seconds = time.perf_counter() - began
    tokens, steps = driver.socket.output_tokens - tokens, len(driver.shapes) - steps
    driver.drain()
    return {"tokens_per_s": tokens / seconds, "tokens_a_step": tokens / steps / batch}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m perf_configs.bench_speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(parser)
    parser.add_argument("--drafts", type=integer(1), default=3, metavar="K", help="a step (default: 3)")
    parser.add_argument(
        "--batches", type=integers(1), default=[1, 4, 16, 64, 256], metavar="N,...", help="sequences at once"
    )
    parser.add_argument("--no-head", action="store_true", help="leave the head's cost out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(argv)
    parameters = parameters_from(parser, options, max_num_seqs="256", max_queue_size="0")
    lengths = [length for length in (1.0, 2.0, 2.5, 3.0) if length <= options.drafts + 1]
    plain: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    core = start_on_gpu(parser, parameters)
    for batch in options.batches:
        plain[batch] = rate(core, batch, core.spec.vocab_size)["tokens_per_s"]
    core.close()
    del core
    gc.collect()  # its parts know each other
    torch.cuda.empty_cache()
    made = make_replaying(options.drafts, lengths[-1], with_head=not options.no_head)
    core = start_on_gpu(parser, parameters, made)
    assert core.runner.drafting is not None
    proposer = core.runner.drafting.proposer
    assert isinstance(proposer, Replaying)
    print("| at once | set | tokens a step | tokens/s | without | x |\n|---:|---:|---:|---:|---:|---:|")
    for batch in options.batches:
        for length in lengths:
            proposer.accept(length)
            row = {"batch": batch, "set": length, "plain": plain[batch]} | rate(
                core, batch, core.spec.vocab_size
            )
            rows.append(row)
            print(
                f"| {batch} | {length} | {row['tokens_a_step']:.2f} | {row['tokens_per_s']:.0f} |"
                f" {plain[batch]:.0f} | {row['tokens_per_s'] / plain[batch]:.2f} |",
                flush=True,
            )
    core.close()
    if options.out is not None:
        options.out.write_text(json.dumps({"parameters": parameters, "rows": rows}))


if __name__ == "__main__":
    main()
