# SPDX-License-Identifier: Apache-2.0
"""The kernels of a gated delta net layer, next to the time that the memory needs for their bytes.

    python perf_configs/kernels/bench_delta.py [--rows 1,4,..,256] [--prompts 512,2048,..,32768]
        [--key-heads 16] [--value-heads 32] [--trials 20]

Decode steps have `rows` rows of one token, prompts are one row each; heads of 128, a convolution of 4 inputs,
bfloat16, float32 states. Each operation is a CUDA graph of its own, timed as bench_attention.py does it. The
floor counts the bytes that an operation has to move at the speed of a copy in this memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from bench_attention import timed

from client.arguments import argument_parser, integer, integers
from flashinfer_backend.core.arguments import require_cuda

DIM, WIDTH = 128, 4
COPIED = 2 << 30  # bytes, whose copy shows the memory's speed


class Timing(NamedTuple):
    """An operation's time in microseconds, and the bytes that it has to move."""

    name: str
    us: float
    moved: int


class Bench:
    def __init__(self, key_heads: int, value_heads: int, trials: int, slots: int) -> None:
        self.key_heads, self.heads, self.trials = key_heads, value_heads, trials
        self.channels = (2 * key_heads + value_heads) * DIM
        self.states = torch.zeros(slots, value_heads, DIM, DIM, device="cuda")
        self.inputs = torch.zeros(slots, self.channels, WIDTH - 1, device="cuda", dtype=torch.bfloat16)
        self.flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")

    def copy_speed(self) -> float:
        """Bytes/s, of those read and those written."""
        source = torch.zeros(COPIED, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * COPIED / timed(lambda: target.copy_(source), self.trials, self.flush)[0] * 1e6

    def case(self, lengths: list[int], decodes: int) -> list[Timing]:
        from flashinfer_backend.ops import triton_delta

        rows, tokens, heads = len(lengths), sum(lengths), self.heads
        width = self.channels + heads * DIM + 2 * heads
        product = torch.randn(tokens, width, device="cuda").bfloat16()
        qkv, z, a, b = product.split([self.channels, heads * DIM, heads, heads], dim=-1)
        weight = torch.randn(self.channels, WIDTH, device="cuda").bfloat16()
        a_log, dt_bias = torch.randn(2, heads, device="cuda")
        norm = torch.ones(DIM, device="cuda").bfloat16()
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32).cuda()
        row = torch.randperm(len(self.states))[:rows].int().cuda(), starts, decodes
        convolved = triton_delta.causal_conv(qkv, weight, self.inputs, *row)
        gates = triton_delta.delta_gates(a, b, a_log, dt_bias)
        sizes = [self.key_heads * DIM] * 2 + [heads * DIM]
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in convolved.split(sizes, dim=-1))
        out = torch.randn_like(v)
        z = z.unflatten(-1, (-1, DIM))
        two, four = 2, 4  # bytes of bfloat16 and float32
        moved = {
            "convolution": two * self.channels * (2 * tokens + 2 * rows * (WIDTH - 1)),
            "gates": heads * tokens * (2 * two + 2 * four),
            "delta rule": 2 * rows * four * heads * DIM * DIM + two * tokens * (self.channels + heads * DIM),
            "norm": 3 * two * tokens * heads * DIM,
        }
        calls: dict[str, Callable[[], object]] = {
            "convolution": lambda: triton_delta.causal_conv(qkv, weight, self.inputs, *row),
            "gates": lambda: triton_delta.delta_gates(a, b, a_log, dt_bias),
            "delta rule": lambda: triton_delta.gated_delta_rule(q, k, v, *gates, self.states, *row),
            "norm": lambda: triton_delta.gated_norm(out, z, norm, 1e-6),
        }
        return [
            Timing(name, timed(call, self.trials, self.flush)[0], moved[name]) for name, call in calls.items()
        ]


def main() -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("--rows", type=integers(1), default="1,4,16,64,256")
    parser.add_argument("--prompts", type=integers(2), default="512,2048,8192,32768")
    parser.add_argument("--key-heads", type=integer(1), default=16)
    parser.add_argument("--value-heads", type=integer(1), default=32)
    parser.add_argument("--trials", type=integer(1), default=20)
    options = parser.parse_args()
    require_cuda(parser)
    slots = max([*options.rows, 8])
    bench = Bench(options.key_heads, options.value_heads, options.trials, slots)
    speed = bench.copy_speed()
    cases = [(f"{rows} decode rows", [1] * rows, rows) for rows in options.rows]
    cases += [(f"a prompt of {tokens}", [tokens], 0) for tokens in options.prompts]
    cases += [(f"8 prompts of {tokens}", [tokens] * 8, 0) for tokens in options.prompts[:1]]
    print(f"a copy moves {speed / 1e9:.0f} GB/s\n")
    print("| step | operation | us | floor us | share of the floor |")
    print("|---|---|---|---|---|")
    for title, lengths, decodes in cases:
        for name, us, moved in bench.case(lengths, decodes):
            floor = moved / speed * 1e6
            print(f"| {title} | {name} | {us:.1f} | {floor:.1f} | {floor / us:.0%} |", flush=True)


if __name__ == "__main__":
    main()
