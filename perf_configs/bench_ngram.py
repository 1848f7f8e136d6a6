# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second of the engine without a server, with n-gram drafts (speculative_method=ngram) and
without.

    python -m perf_configs.bench_ngram --model DIR [--drafts 4] [--batches 1,4,16,64,256] [--set KNOB=VALUE]
        [--out FILE.json]

It times decode steps on three kinds of texts (perf_configs.repeating): code edits, answers that quote
documents, and chats, which repeat little. Weights are random: a small kernel replaces each sampled token by
the text's next one, with drafts and without.
"""

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.arguments import argument_parser, integer, integers
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.engine.start import Core
from perf_configs import repeating
from perf_configs.bench_engine import Driver
from perf_configs.engine_start import add_engine_options, parameters_from, start_again

WARM = 4  # steps
TEXTS = 8  # of each kind at least, side by side or one after the other


class Script:
    """What sequences say, by their seeds and positions."""

    def __init__(self, rows: int, length: int, device: str) -> None:
        self._tokens = torch.zeros((rows, length), dtype=torch.int32, device=device)

    def write(self, sequences: Sequence[np.ndarray]) -> None:
        """Sequences with the seeds 0, 1, ...: prompts and answers."""
        for row, tokens in zip(self._tokens, sequences, strict=False):
            row[: len(tokens)] = torch.from_numpy(tokens)

    @contextlib.contextmanager
    def replaces(self, ops: ModuleType) -> Iterator[None]:
        """Engines that start meanwhile sample this."""
        sample = ops.sample

        def scripted(
            logits: Tensor,
            temperature: Tensor,
            seed: Tensor,
            position: Tensor,
            suppressed: Tensor | None = None,
            record: tuple[Tensor, Tensor] | None = None,
        ) -> Tensor:
            sample(logits, temperature, seed, position, suppressed, record)
            rows, length = self._tokens.shape  # which steps of the start go beyond
            tokens = self._tokens[seed % rows, position.long() % length]
            if record is not None:
                last_token, slots = record
                last_token[slots] = tokens
            return tokens

        ops.sample = scripted  # type: ignore[attr-defined]
        try:
            yield
        finally:
            ops.sample = sample  # type: ignore[attr-defined]


def measure(core: Core, kind: str, batch: int, script: Script) -> dict[str, float]:
    """Decode `batch` texts of a kind side by side, until one of them ends, and others until there were
    TEXTS."""
    pieces, texts = repeating.Pieces(core.spec.vocab_size), repeating.texts(kind)
    scheduler, seconds = core.scheduler, 0.0
    made, steps, drafted, accepted = 0, 0, scheduler.drafted_tokens, scheduler.accepted_tokens
    for _ in range(-(-TEXTS // batch)):
        pairs = [[pieces.ids(part) for part in text] for text in itertools.islice(texts, batch)]
        script.write([np.concatenate(pair) for pair in pairs])
        driver = Driver(core)
        driver.decode([prompt for prompt, _ in pairs], min(len(answer) for _, answer in pairs), warm=WARM)
        tokens, began = driver.socket.output_tokens, time.perf_counter()
        while len(scheduler.running) == batch:
            driver.step()
            steps += 1
        seconds += time.perf_counter() - began
        made += driver.socket.output_tokens - tokens
        driver.stop()
    return {
        "tokens_per_s": made / seconds,
        "step_ms": seconds / steps * 1e3,
        "tokens_per_step": made / steps / batch,
        "drafted": scheduler.drafted_tokens - drafted,
        "accepted": scheduler.accepted_tokens - accepted,
    }


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
    parameters = parameters_from(parser, options, max_queue_size="0", **own)
    require_cuda(parser)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.cuda.init()
    from flashinfer_backend.ops import cuda_ops

    print(torch.cuda.get_device_name(), parameters.get("quantization", ""), flush=True)
    script = Script(max(batches), int(parameters["max_seq_len"]) + 1, "cuda")
    drafting = {"speculative_method": "ngram", "max_draft_len": str(options.drafts)}
    results: list[dict[str, Any]] = []
    for knobs in ({}, drafting):
        with script.replaces(cuda_ops):
            core = start_again(parameters | knobs, None)
            for batch, kind in itertools.product(batches, repeating.KINDS):
                row = measure(core, kind, batch, script)
                results.append({"what": kind, "batch": batch, "drafts": bool(knobs), **row})
                plain = next(r for r in results if (r["what"], r["batch"]) == (kind, batch))
                print(
                    f"{kind:>12} {batch:>4} sequences {row['tokens_per_s']:>9.0f} tokens/s"
                    f" {row['tokens_per_s'] / plain['tokens_per_s']:6.3f} x"
                    f"  step {row['step_ms']:.2f} ms, {row['tokens_per_step']:.2f} tokens,"
                    f" {row['accepted']} of {row['drafted']} drafts",
                    flush=True,
                )
            core.close()
            del core
        if options.out:
            options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
