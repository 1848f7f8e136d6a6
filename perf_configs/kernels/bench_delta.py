# SPDX-License-Identifier: Apache-2.0
"""A gated delta net layer between its products, next to the time that the memory needs for its bytes.

    python perf_configs/kernels/bench_delta.py [--rows 1,16,64,256] [--drafts 3]
        [--prompts 1x8192,4x2048,1x30720] [--heads 16/32,16/48] [--trials 20] [--flashinfer]

Heads are key heads / value heads of 128: by default those of Qwen3.5's 35B-A3B and 27B. A convolution of 4
inputs, bfloat16, float32 states. Each step is a CUDA graph, timed as bench_attention.py does it. The floor
counts the bytes that a layer has to move at the speed of a copy in this memory.

--flashinfer adds FlashInfer's kernel of the delta rule alone: without the convolution and the norm, on states
that already lie one row behind the other.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
from bench_attention import timed
from torch import Tensor

from client.arguments import argument_parser, integer, integers, tuples
from flashinfer_backend.cache.device import StateFormat
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.ops.torch_delta import L2_EPS, DeltaRows, DeltaWeights, delta_gates
from flashinfer_backend.ops.triton_delta import MOST_PENDING, delta_net

DEVICE = "cuda"
DIM, WIDTH = 128, 4
COPIED = 2 << 30  # bytes, whose copy shows the memory's speed


class Layer:
    def __init__(self, key_heads: int, heads: int, slots: int, drafts: int) -> None:
        self.key_heads, self.heads, self.channels = key_heads, heads, (2 * key_heads + heads) * DIM
        conv = torch.randn(self.channels, WIDTH, device=DEVICE).bfloat16()
        a_log, dt_bias = torch.randn(2, heads, device=DEVICE)
        self.weights = DeltaWeights(conv, a_log, dt_bias, torch.ones(DIM, device=DEVICE).bfloat16(), 1e-6)
        state = 1, heads, DIM, DIM, self.channels, WIDTH, torch.bfloat16, drafts
        states = StateFormat(*state, 0 if drafts else MOST_PENDING).allocate(slots, torch.device(DEVICE))
        self.states = states.layers[0]

    def step(self, lengths: list[int], decodes: int, held: int | None = None) -> Callable[[], object]:
        """A step of rows that go on at position 100, or of decode rows without drafts one position further
        with each call (by a kernel of its own, of some 2 us): their heads' states have seen as many tokens as
        in serving. held: as of DeltaRows, of all rows."""

        def words(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        moving = decodes > 0 and self.states.pending is not None
        if self.states.pending is not None:
            heads = torch.arange(self.heads, dtype=torch.int32, device=DEVICE)
            self.states.pending.begun.copy_(100 - (100 + heads) % MOST_PENDING if moving else heads * 0 + 100)
        rows, sizes = len(lengths), [self.channels, self.heads * DIM, self.heads, self.heads]
        product = torch.randn(sum(lengths), sum(sizes), device=DEVICE).bfloat16()
        parts = product.split(sizes, dim=-1)
        slots, starts = torch.randperm(len(self.states.recurrent))[:rows].tolist(), [0, *accumulate(lengths)]
        own = DeltaRows(
            *(words(values) for values in (slots, starts, [100] * rows)),
            None if held is None else words([held] * rows),
            decodes,
        )

        def call() -> Tensor:
            out = delta_net(*parts, self.weights, self.states, own)
            if moving:
                own.first.add_(1)
            return out

        return call

    def flashinfer_step(self, lengths: list[int], decodes: int, held: int | None) -> Callable[[], object]:
        shape = (sum(lengths), self.heads, DIM)
        v, (q, k) = (
            torch.randn(shape, device=DEVICE),
            torch.randn(2, shape[0], self.key_heads, DIM, device=DEVICE),
        )
        a, b = torch.randn(2, *shape[:2], device=DEVICE).bfloat16()
        states = torch.zeros(len(lengths), self.heads, DIM, DIM, device=DEVICE)
        inputs = (q.bfloat16(), k.bfloat16(), v.bfloat16(), a, b, self.weights.a_log, self.weights.dt_bias)
        return flashinfer_rule(*inputs, states, lengths, decodes > 0)

    def moved(self, lengths: list[int]) -> float:
        """Bytes: states both ways, or for decode rows without drafts once, and once in MOST_PENDING steps the
        other way, with what is pending; the convolution's past inputs; tokens' inputs and results."""
        rows, tokens, two, four = len(lengths), sum(lengths), 2, 4
        each = 2 * four * self.heads * DIM * DIM + 2 * two * (WIDTH - 1) * self.channels
        if self.states.pending is not None and max(lengths) == 1:
            pending = (MOST_PENDING - 1) / 2 + 1  # read, and written
            each -= four * self.heads * DIM * DIM * (1 - 1 / MOST_PENDING)
            each += pending * four * DIM * (self.heads + self.key_heads)
        return rows * each + two * tokens * (self.channels + 2 * self.heads * DIM + 2 * self.heads)


def flashinfer_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    lengths: list[int],
    decodes: bool,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """FlashInfer's kernel for rows of these lengths: of prompts, or of equally many tokens each where they
    decode. q, k[T, Hk, 128], v[T, Hv, 128], a, b[T, Hv], states[R, Hv, 128, 128], a row's at its place.

    The call gives results [T, Hv, 128], and the states behind the rows. Of prompts, and with drafts,
    FlashInfer's states are transposed; prompts' queries and keys have to be normalised before.
    """
    from flashinfer import gdn_decode, gdn_prefill

    rows, out = len(lengths), torch.empty_like(v)
    if not decodes:
        q, k = (x / (x.float().square().sum(-1, keepdim=True) + L2_EPS).sqrt() for x in (q, k))
        decay, beta = delta_gates(a, b, a_log, dt_bias)
        before = states.mT.contiguous()
        behind = torch.empty_like(before)
        given = [q.to(v.dtype), k.to(v.dtype), v, decay.exp(), beta]
        more = {"initial_state": before, "output_final_state": True, "output": out, "output_state": behind}
        starts = torch.tensor([0, *accumulate(lengths)], device=v.device)

        def prompts() -> tuple[Tensor, Tensor]:
            gdn_prefill.chunk_gated_delta_rule(*given, cu_seqlens=starts, **more)
            return out, behind.mT

        return prompts
    shaped = [x.unflatten(0, (rows, -1)) for x in (q, k, v, a, b)]
    parts = dict(
        zip("qkvab", shaped, strict=True), A_log=a_log, dt_bias=dt_bias, output=out.view_as(shaped[2])
    )
    if lengths[0] == 1:

        def tokens() -> tuple[Tensor, Tensor]:
            gdn_decode.gated_delta_rule_decode(**parts, state=states)
            return out, states

        return tokens
    pool = states.mT.contiguous()
    kept = torch.empty(rows, lengths[0], *pool.shape[1:], device=v.device)
    slots = torch.arange(rows, dtype=torch.int32, device=v.device)

    def drafts() -> tuple[Tensor, Tensor]:
        gdn_decode.gated_delta_rule_mtp(
            **parts,
            initial_state=pool,
            initial_state_indices=slots,
            intermediate_states_buffer=kept,
            disable_state_update=True,
        )
        return out, kept[:, -1].mT

    return drafts


def copy_speed(trials: int, flush: Tensor) -> float:
    """Bytes per microsecond, of those read and those written."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPIED / timed(lambda: target.copy_(source), trials, flush)[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("--rows", type=integers(1), default="1,16,64,256")
    parser.add_argument("--drafts", type=integer(1), default=3)
    parser.add_argument("--prompts", type=tuples("NxN"), default="1x8192,4x2048,1x30720")
    parser.add_argument("--heads", type=tuples("N/N"), default="16/32,16/48")
    parser.add_argument("--trials", type=integer(1), default=20)
    parser.add_argument(
        "--flashinfer", action="store_true", help="time FlashInfer's kernel of the rule alone"
    )
    options = parser.parse_args(arguments)
    require_cuda(parser)
    flush = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
    speed = copy_speed(options.trials, flush)
    print(f"a copy moves {speed / 1e3:.0f} GB/s\n")
    columns = ["heads", "step", "us", "floor us", "share of the floor"]
    columns += ["FlashInfer's rule us"] if options.flashinfer else []
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    drafts = options.drafts
    slots = max(*options.rows, *(rows for rows, _ in options.prompts))
    for key_heads, heads in options.heads:
        layer, drafted = (Layer(key_heads, heads, slots, n) for n in (0, drafts))
        cases = [(f"{n} decode rows", layer, [1] * n, n, None) for n in options.rows]
        cases += [(f"{n} rows with {drafts} drafts", drafted, [1 + drafts] * n, n, 2) for n in options.rows]
        cases += [(f"{n} prompts of {tokens}", layer, [tokens] * n, 0, None) for n, tokens in options.prompts]
        for title, own, *step in cases:
            us = timed(own.step(*step), options.trials, flush)[0]
            floor = own.moved(step[0]) / speed
            cells = [f"{key_heads}/{heads}", title, f"{us:.1f}", f"{floor:.1f}", f"{floor / us:.0%}"]
            if options.flashinfer:
                cells.append(f"{timed(own.flashinfer_step(*step), options.trials, flush)[0]:.1f}")
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
