# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second with n-gram drafts (speculative_method=ngram) and without, of the engine without a
server.

    python -m perf_configs.bench_ngram --model DIR [--drafts 4] [--batches 1,4,16,64,256] [--set KNOB=VALUE]
        [--out FILE.json]

Decode steps of so many greedy sequences behind prompts of 256 tokens: answers that copy from their prompt,
and answers that never say anything twice. Weights are random but for an embedding and an output projection by
which an answer goes through the vocabulary in one known order (perf_configs.replaying).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client.arguments import argument_parser, integer, integers
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.engine.start import Core
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.ngram import NGram, make_ngram
from perf_configs.bench_engine import Driver, random_prompts
from perf_configs.engine_start import add_engine_options, parameters_from, start_again
from perf_configs.replaying import tokens_follow

PROMPT, WARM, SECONDS, LEAST_STEPS = 256, 24, 1.5, 60
COPIED = 240  # tokens of a prompt that an answer copies


def measure(core: Core, prompts: list[np.ndarray], most: int) -> dict[str, float]:
    """Decode these sequences side by side for SECONDS and LEAST_STEPS, or until one has `most` tokens."""
    driver, scheduler = Driver(core), core.scheduler
    driver.decode(prompts, most, warm=WARM)
    drafted, accepted = scheduler.drafted_tokens, scheduler.accepted_tokens
    tokens, began, steps = driver.socket.output_tokens, time.perf_counter(), 0
    running = len(scheduler.running)
    while len(scheduler.running) == running:
        driver.step()
        steps += 1
        seconds = time.perf_counter() - began
        if steps >= LEAST_STEPS and seconds > SECONDS:
            break
    made = driver.socket.output_tokens - tokens
    drafted, accepted = scheduler.drafted_tokens - drafted, scheduler.accepted_tokens - accepted
    driver.stop()
    return {
        "tokens_per_s": made / seconds,
        "step_ms": seconds / steps * 1e3,
        "tokens_per_step": made / steps / len(prompts),
        "drafted": drafted,
        "accepted": accepted,
    }


def copying_prompts(count: int, follows: np.ndarray) -> list[np.ndarray]:
    """Prompts that end as they begin, in the order that answers go on with."""
    generator, prompts = np.random.default_rng(count), []
    for _ in range(count):
        chain = [int(generator.integers(3, len(follows)))]
        while len(chain) < COPIED:
            chain.append(int(follows[chain[-1]]))
        between = generator.integers(3, len(follows), PROMPT - COPIED - 4)
        prompts.append(np.array([*chain, *between, *chain[:4]], np.int32))
    return prompts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.bench_ngram", __doc__)
    add_engine_options(parser)
    parser.add_argument("--batches", type=integers(1), default="1,4,16,64,256", metavar="N,...")
    parser.add_argument("--drafts", type=integer(1), default=4, metavar="K", help="a step (default: 4)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(argv)
    batches: list[int] = options.batches
    sizes = ",".join(map(str, batches))
    own = {"max_num_seqs": str(max(batches)), "cuda_graph_batch_sizes": sizes, "max_seq_len": "2048"}
    parameters = parameters_from(
        parser, options, max_queue_size="0", max_draft_len=str(options.drafts), **own
    )
    require_cuda(parser)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.cuda.init()
    print(torch.cuda.get_device_name(), parameters.get("quantization", ""), flush=True)
    results: list[dict[str, Any]] = []

    def note(what: str, batch: int, row: dict[str, float]) -> None:
        results.append({"what": what, "batch": batch, **row})
        plain = next((r for r in results if r["batch"] == batch), row)
        ratio = row["tokens_per_s"] / plain["tokens_per_s"]
        print(
            f"{what:>16} {batch:>4} sequences {row['tokens_per_s']:>9.0f} tokens/s {ratio:6.3f} x"
            f"  step {row['step_ms']:.2f} ms, {row['tokens_per_step']:.2f} tokens,"
            f" {row['accepted']} of {row['drafted']} drafts",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(results))

    most = int(parameters["max_seq_len"]) - PROMPT
    follows: list[np.ndarray] = []

    def make(config: EngineConfig, model: Transformer) -> NGram:
        follows.append(tokens_follow(model, torch.Generator().manual_seed(0)).numpy())
        return make_ngram(config, model)

    core = start_again(parameters, None)
    vocab = core.spec.vocab_size
    for batch in batches:
        note("no drafts", batch, measure(core, random_prompts(batch, PROMPT, vocab, seed=batch), most))
    core.close()
    del core
    core = start_again(parameters, make)
    for batch in batches:
        copying = copying_prompts(batch, follows[0])
        note("copies", batch, measure(core, copying, COPIED - 8))
        note("nothing twice", batch, measure(core, random_prompts(batch, PROMPT, vocab, seed=batch), most))
    core.close()


if __name__ == "__main__":
    main()
