# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with drafts at a set accepted length, with a head of published cost, and without drafts:

    python -m perf_configs.bench_speculation [--case DIR[,KNOB=VALUE...] ...] [--out FILE.json]

Without --case: Llama-3.1-8B's shape in bfloat16 and in FP8, and Qwen3-30B-A3B's. Weights are random;
perf_configs/replaying.py says how drafts can still be right. For each case the engine starts twice, without a
drafter and with one. The last table has the ratios of the two rates, and in brackets the accepted length that
was reached, which is below the set one if the engine checks fewer drafts, or none. Two lists follow: rates
below what is required, and the time of the graph of a step without drafts in both engines, which is the cost
of a drafter even if no drafts are tried.
"""

import argparse
import json
import logging
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from client.arguments import argument_parser, integer, integers, positive
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.engine.start import Core
from perf_configs.bench_engine import CONTEXT, Driver, graph_seconds, random_prompts
from perf_configs.engine_start import DEFAULTS, engine_parameters, start_again
from perf_configs.replaying import HEADS, Replaying, make_replaying, tokens_follow

SHAPES = Path(__file__).parent / "shapes"
CASES = [
    str(SHAPES / "llama-3.1-8b"),
    f"{SHAPES / 'llama-3.1-8b'},quantization=fp8",
    str(SHAPES / "qwen3-30b-a3b"),
]
LENGTHS = (1.0, 2.0, 2.5, 3.0)  # accepted ones
WARM, TOKENS, SECONDS = 24, 160, 1.2  # steps before; then tokens of each answer, or seconds
SLOW = 3.0  # times the median, from which on a step is named


class Row(NamedTuple):
    """What a case's engine came to: rates in tokens per second, tokens of each sequence's steps, and
    milliseconds of a graph without drafts, with a drafter and without one (nan without graphs)."""

    case: str
    batch: int
    accepted: float
    tokens_per_s: float
    plain: float
    tokens_a_step: float
    graph_ms: float = math.nan
    plain_graph_ms: float = math.nan

    @property
    def ratio(self) -> float:
        return self.tokens_per_s / self.plain

    @property
    def required(self) -> float:
        dense = "a3b" not in self.case
        if dense and self.accepted >= 2.5 and self.batch in (1, 16):
            return 1.9 if self.batch == 1 else 1.3
        return 0.99


def accepted_lengths(text: str) -> list[float]:
    lengths = sorted({positive(each) for each in text.split(",")})
    if lengths[0] < 1:
        raise argparse.ArgumentTypeError(f"a step makes at least 1 token, not {lengths[0]:g}")
    return lengths


class Rate(NamedTuple):
    """Output tokens per second, tokens of each step of one sequence, and milliseconds of the graph without
    drafts."""

    tokens_per_s: float
    tokens_a_step: float
    graph_ms: float


def rate(core: Core, batch: int, rounds: int) -> Rate:
    """The median round of `batch` greedy sequences. The first prompts are the same for every batch, so the
    prefix cache has them."""
    return sorted(one_round(core, batch) for _ in range(rounds))[rounds // 2]


def one_round(core: Core, batch: int) -> Rate:
    driver = Driver(core)
    prompts = random_prompts(batch, CONTEXT, core.spec.vocab_size, seed=0)
    driver.decode(prompts, core.config.max_seq_len - CONTEXT, warm=WARM)
    tokens, steps, times = driver.socket.output_tokens, len(driver.shapes), [time.perf_counter()]
    while driver.socket.output_tokens < tokens + batch * TOKENS and times[-1] < times[0] + SECONDS:
        driver.step()
        times.append(time.perf_counter())
    tokens, steps = driver.socket.output_tokens - tokens, len(driver.shapes) - steps
    usual = statistics.median(np.diff(times))
    for number, each in enumerate(np.diff(times)):
        if each > SLOW * usual:
            print(f"{batch} at once: step {number} took {each * 1e3:.1f} ms, the median is {usual * 1e3:.2f}")
    graphs = core.runner.graphs
    graph = math.nan if graphs is None or graphs.last is None else graph_seconds(core, graphs) * 1e3
    driver.stop()
    return Rate(tokens / (times[-1] - times[0]), tokens / steps / batch, graph)


def measure(
    case: str,
    parameters: dict[str, str],
    batches: list[int],
    drafts: int,
    head: str = "eagle3",
    *,
    lengths: Sequence[float],
    rounds: int = 3,
) -> list[Row]:
    """A row for each batch and each accepted length, which is at most drafts + 1."""
    core = start_again(parameters, None)
    # The same tokens as with drafts: they decide which experts a step reads.
    tokens_follow(core.runner.state.model, torch.Generator().manual_seed(0))
    plain = {batch: rate(core, batch, rounds) for batch in sorted(batches, reverse=True)}
    core.close()
    del core
    core = start_again(parameters, make_replaying(drafts, max(lengths), head=head))
    assert core.runner.drafting is not None
    proposer = core.runner.drafting.proposer
    assert isinstance(proposer, Replaying)
    rows = []
    for batch in batches:
        for length in lengths:
            proposer.accept(length)
            found, without = rate(core, batch, rounds), plain[batch]
            rates = found.tokens_per_s, without.tokens_per_s
            graphs = found.graph_ms, without.graph_ms
            rows.append(Row(case, batch, length, *rates, found.tokens_a_step, *graphs))
    core.close()
    return rows


def table(rows: list[Row]) -> str:
    lengths = sorted({row.accepted for row in rows})
    lines = [f"| case | at once | without | {' | '.join(map(str, lengths))} |"]
    lines.append("|---|---:|---:|" + "---:|" * len(lengths))
    found = {(row.case, row.batch, row.accepted): row for row in rows}
    for case, batch in dict.fromkeys((row.case, row.batch) for row in rows):
        own = [found[case, batch, length] for length in lengths]
        each = [f"{row.ratio:.3f} ({row.tokens_a_step:.2f})" for row in own]
        lines.append(f"| {case} | {batch} | {own[0].plain:.0f} | {' | '.join(each)} |")
    missed = [
        f"{row.case}, {row.batch} at {row.accepted}: {row.ratio:.3f}, required {row.required}"
        for row in rows
        if row.ratio < row.required
    ]
    graphs = [
        f"{row.case}, {row.batch} at once: a graph without drafts takes {row.plain_graph_ms:.3f} ms, next to"
        f" a drafter {row.graph_ms:.3f}"
        for row in rows
        if row.accepted == lengths[0] and not math.isnan(row.graph_ms)
    ]
    return "\n".join([*lines, *(missed or ["no row misses what is required"]), *graphs])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.bench_speculation", __doc__)
    parser.add_argument(
        "--case", action="append", metavar="DIR[,KNOB=VALUE...]",
        help="a checkpoint folder (config.json suffices) and knobs of the engine; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--drafts", type=integer(1), default=3, metavar="K", help="drafts of a step (default: 3)"
    )
    parser.add_argument(
        "--batches",
        type=integers(1),
        default=[1, 4, 16, 64, 256],
        metavar="N,...",
        help="sequences at a time",
    )
    parser.add_argument(
        "--lengths",
        type=accepted_lengths,
        metavar="X,...",
        help=f"accepted lengths to set (default: {LENGTHS})",
    )
    parser.add_argument("--rounds", type=integer(1), default=3, metavar="N", help="repetitions (default: 3)")
    parser.add_argument(
        "--head", choices=HEADS, default="eagle3",
        help="an EAGLE-3 head of published size, the checkpoint's own (mtp), or none (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(argv)
    most = options.drafts + 1
    lengths = options.lengths or [length for length in LENGTHS if length <= most]
    if max(lengths) > most:
        parser.error(f"--lengths: {options.drafts} drafts make no more than {most} tokens")
    own = {
        "max_num_seqs": str(max(options.batches)),
        "cuda_graph_batch_sizes": ",".join(map(str, sorted(options.batches))),
        "max_seq_len": "2048",
        "max_queue_size": "0",
        "enable_kv_cache_reuse": "true",
    }
    cases: dict[str, dict[str, str]] = {}
    try:
        for case in options.case or CASES:
            folder, *knobs = case.split(",")
            name = ", ".join([Path(folder).name, *knobs])
            cases[name] = engine_parameters(folder, "dummy", DEFAULTS | own, knobs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if any(parameters.get("device") != "cpu" for parameters in cases.values()):
        require_cuda(parser)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows: list[Row] = []
    for name, parameters in cases.items():
        began = time.monotonic()
        rows += measure(
            name, parameters, options.batches, options.drafts, options.head,
            lengths=lengths, rounds=options.rounds,
        )  # fmt: skip
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        if options.out is not None:
            written: list[dict[str, Any]] = [row._asdict() | {"ratio": row.ratio} for row in rows]
            options.out.write_text(json.dumps({"cases": cases, "rows": written}, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
