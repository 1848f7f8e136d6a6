# SPDX-License-Identifier: Apache-2.0
"""A gated delta net layer between its products, next to the time that the memory needs for its bytes.

    python perf_configs/kernels/bench_delta.py [--rows 1,16,64,256] [--drafts 3]
        [--prompts 1x8192,4x2048,1x30720] [--heads 16/32,16/48] [--trials 20]

Heads are key heads / value heads of 128: by default those of Qwen3.5's 35B-A3B and 27B. A convolution of 4
inputs, bfloat16, float32 states. Each step is a CUDA graph, timed as bench_attention.py does it. The floor
counts the bytes that a layer has to move at the speed of a copy in this memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from bench_attention import timed

from client.arguments import argument_parser, integer, integers
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights, inputs_kept

DIM, WIDTH = 128, 4
COPIED = 2 << 30  # bytes, whose copy shows the memory's speed


def pairs(separator: str) -> Callable[[str], list[tuple[int, int]]]:
    """A parser of pairs of numbers, `16/32,16/48` with the separator `/`."""

    def parse(text: str) -> list[tuple[int, int]]:
        found = [[int(n) for n in each.split(separator)] for each in text.split(",")]
        if any(len(each) != 2 or min(each) < 1 for each in found):
            raise ValueError(text)
        return [(first, second) for first, second in found]

    return parse


class Layer:
    def __init__(self, key_heads: int, heads: int, slots: int, drafts: int, device: str = "cuda") -> None:
        self.heads, self.channels, self.device = heads, (2 * key_heads + heads) * DIM, device
        conv = torch.randn(self.channels, WIDTH, device=device).bfloat16()
        a_log, dt_bias = torch.randn(2, heads, device=device)
        self.weights = DeltaWeights(conv, a_log, dt_bias, torch.ones(DIM, device=device).bfloat16(), 1e-6)
        kept = inputs_kept(WIDTH, drafts)
        self.states = DeltaStates(
            torch.zeros(slots, heads, DIM, DIM, device=device),
            torch.zeros(slots, kept, self.channels + 2 * heads, device=device).bfloat16(),
        )

    def step(self, lengths: list[int], decodes: int, held: int | None = None) -> Callable[[], object]:
        """A step of rows that go on at position 100. held: as of DeltaRows, of all rows."""
        from flashinfer_backend.ops.triton_delta import delta_net

        def words(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        rows, sizes = len(lengths), [self.channels, self.heads * DIM, self.heads, self.heads]
        product = torch.randn(sum(lengths), sum(sizes), device=self.device).bfloat16()
        parts = product.split(sizes, dim=-1)
        slots, starts = torch.randperm(len(self.states.recurrent))[:rows].tolist(), [0, *accumulate(lengths)]
        own = DeltaRows(
            *(words(values) for values in (slots, starts, [100] * rows)),
            None if held is None else words([held] * rows),
            decodes,
        )
        return lambda: delta_net(*parts, self.weights, self.states, own)

    def moved(self, lengths: list[int]) -> int:
        """Bytes: states both ways, and the convolution's past inputs; tokens' inputs and results."""
        rows, tokens, two, four = len(lengths), sum(lengths), 2, 4
        each = 2 * four * self.heads * DIM * DIM + 2 * two * (WIDTH - 1) * self.channels
        return rows * each + two * tokens * (self.channels + 2 * self.heads * DIM + 2 * self.heads)


def copy_speed(trials: int, flush: torch.Tensor) -> float:
    """Bytes per microsecond, of those read and those written."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / timed(lambda: target.copy_(source), trials, flush)[0]


def main() -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("--rows", type=integers(1), default="1,16,64,256")
    parser.add_argument("--drafts", type=integer(1), default=3)
    parser.add_argument("--prompts", type=pairs("x"), default="1x8192,4x2048,1x30720")
    parser.add_argument("--heads", type=pairs("/"), default="16/32,16/48")
    parser.add_argument("--trials", type=integer(1), default=20)
    options = parser.parse_args()
    require_cuda(parser)
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    speed = copy_speed(options.trials, flush)
    print(f"a copy moves {speed / 1e3:.0f} GB/s\n")
    print("| heads | step | us | floor us | share of the floor |")
    print("|---|---|---|---|---|")
    drafts = options.drafts
    slots = max(*options.rows, *(rows for rows, _ in options.prompts))
    for key_heads, heads in options.heads:
        layer, drafted = (Layer(key_heads, heads, slots, n) for n in (0, drafts))
        cases = [(f"{n} decode rows", layer, [1] * n, n, None) for n in options.rows]
        cases += [(f"{n} rows with {drafts} drafts", drafted, [1 + drafts] * n, n, 2) for n in options.rows]
        cases += [(f"{n} prompts of {tokens}", layer, [tokens] * n, 0, None) for n, tokens in options.prompts]
        for title, own, lengths, decodes, held in cases:
            us = timed(own.step(lengths, decodes, held), options.trials, flush)[0]
            floor = own.moved(lengths) / speed
            print(
                f"| {key_heads}/{heads} | {title} | {us:.1f} | {floor:.1f} | {floor / us:.0%} |", flush=True
            )


if __name__ == "__main__":
    main()
