# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes: device kernels of some kinds of steps, from PyTorch's profiler.

    python -m perf_configs.profile_steps --model DIR [--load-format dummy] [--steps 1024/0,64/200]
        [--context 300] [--set kv_cache_dtype=fp8_e4m3] [--out FILE.txt]

Steps are launched ahead, as in serving. What is printed of each is as perf_configs.read_trace says; the
profiler itself slows steps of many short kernels by some percent.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from client.arguments import argument_parser, integer, tuples
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.engine.start import Core
from perf_configs.bench_engine import Driver
from perf_configs.engine_start import add_engine_options, parameters_from, start_on_gpu
from perf_configs.read_trace import device_events, read_events, report

CONTEXT, OUTPUT = 300, 200  # tokens of a decode row's prompt, unless told, and of its answer
SHAPES = [(1, 0), (64, 0), (256, 0), (64, 64), (64, 200), (64, 1024), (0, 2048), (8, 2048)]  # rows, prompt


def kernels_of_step(core: Core, rows: int, prompt: int, context: int = CONTEXT) -> list[dict[str, Any]]:
    """Trace events (ts and dur in microseconds) of one step of `rows` decodes and a prompt."""
    driver = Driver(core)
    generator = np.random.default_rng(0)
    vocab = core.spec.vocab_size

    def tokens(count: int) -> np.ndarray:
        return generator.integers(3, vocab, count, dtype=np.int32)

    for _ in range(rows):
        driver.submit(tokens(context), OUTPUT)
    driver.step_until_all_decode()
    for _ in range(4):  # what is compiled late is there, and all rows decode
        if prompt:
            driver.submit(tokens(prompt), 1)
        driver.step()
        driver.step()
    if prompt:
        driver.submit(tokens(prompt), 1)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        driver.step()
        torch.cuda.synchronize()
    driver.drain()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return device_events(read_events(Path(file.name)))


def fitting_shapes(
    shapes: Sequence[tuple[int, int]], config: EngineConfig, num_blocks: int, context: int = CONTEXT
) -> list[tuple[int, int]]:
    """Those of the shapes for whose sequences the engine has positions, slots and blocks of the KV cache."""

    def fits(rows: int, prompt: int) -> bool:
        streams, other = context + OUTPUT if rows else 0, prompt + 1 if prompt else 0
        blocks = rows * -(-streams // config.tokens_per_block) + -(-other // config.tokens_per_block)
        has_slots = rows + bool(prompt) <= config.max_num_seqs
        return max(streams, other) <= config.max_seq_len and has_slots and blocks <= num_blocks

    return [shape for shape in shapes if fits(*shape)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.profile_steps", __doc__)
    add_engine_options(parser)
    parser.add_argument(
        "--steps", type=tuples("n/n"), default=",".join(f"{rows}/{prompt}" for rows, prompt in SHAPES),
        metavar="ROWS/PROMPT,...",
        help="decode rows, and tokens of a prompt in the same step (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=integer(1), metavar="N",
        help=f"tokens of context of each decode row (default: {CONTEXT})",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write what is printed to a file")
    options = parser.parse_args(argv)
    wanted = options.steps
    if [0, 0] in wanted:
        parser.error("--steps 0/0: should have decode rows or tokens of a prompt")
    if options.context is not None and not any(rows for rows, _ in wanted):
        parser.error(
            "--context is of decode rows, and --steps has none: leave it out, or add a step like 64/0"
        )
    core = start_on_gpu(parser, parameters_from(parser, options))
    config, context = core.config, options.context or CONTEXT
    num_blocks = core.scheduler.kv_manager.pools[0].num_blocks
    shapes = fitting_shapes(wanted, config, num_blocks, context)
    if len(shapes) < len(wanted):
        limits = f"max_seq_len {config.max_seq_len}, max_num_seqs {config.max_num_seqs} and a KV cache of"
        tokens = num_blocks * config.tokens_per_block
        print(f"{limits} {tokens} tokens leave out {len(wanted) - len(shapes)} kinds of steps")
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {len(core.spec.layers)} layers"]
    for rows, prompt in shapes:
        what = f"{rows} decodes at about {context} tokens" if rows else "no decodes"
        lines += ["", f"{what}, " + (f"a prompt of {prompt} tokens" if prompt else "no prompt")]
        lines += report(kernels_of_step(core, rows, prompt, context))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
