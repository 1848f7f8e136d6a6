# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's prompts over one layer's paged cache, as a step calls it.

    python perf_configs/kernels/bench_prompts.py [--heads 24/4x256,32/8x128] [--window 1024]
        [--prompts 1x8192/8192,1x8192/30720,16x512/512] [--backend fa3] [--tile 64] [--trials 20]

--heads: query heads / heads of keys x head_dim. --prompts: rows x tokens of the step / tokens that the row
has then. --backend: FlashInfer's FA2, FA3 over the cache, or FA3 over copies, which are part of the time;
without it, what a step takes. --tile: tokens of FA3's tiles over the cache for these heads, a multiple of 16,
instead of those of attention/flashinfer_calls.py. bfloat16, blocks of 16 tokens in random order. Each call is
a CUDA graph, timed as bench_attention.py does it; its results are compared with plain torch's for the last
queries of the first row and the last. TFLOPS count what causality and a window leave.
"""

import numpy as np
import torch
from bench_attention import timed

from client.arguments import argument_parser, integer, tuples
from flashinfer_backend.attention import flashinfer_calls
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.copies import gap_blocks
from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.arguments import require_cuda

BLOCK_SIZE, CHECKED = 16, 64  # tokens of a block; queries of a row whose results are compared
STOCK_TILES = {64: (192, 96), 128: (128, 96), 256: (128, 32)}  # FlashInfer's queries x tokens, by head_dim


class Bench:
    def __init__(self, shape: list[int], rows: int, kv_len: int, window: int | None) -> None:
        self.heads, kv_heads, self.dim = shape
        self.window = window
        columns = -(-kv_len // BLOCK_SIZE)
        size = (rows * columns, BLOCK_SIZE, kv_heads, self.dim)
        self.cache = tuple(torch.randn(size, device="cuda").bfloat16() for _ in "kv")
        order = torch.randperm(rows * columns, device="cuda").int()
        self.table = order.view(rows, columns).contiguous()
        room = rows * (columns + gap_blocks(BLOCK_SIZE))
        self.attention = FlashInferAttention(
            KVCache.over([self.cache]), self.heads, rows, columns, copied_blocks=room, window=window
        )

    def time(self, step: list[int], trials: int, flush: torch.Tensor) -> tuple[float, float]:
        """Microseconds, and the relative error of the last queries."""
        rows, q_len, kv_len = step
        lengths = (np.full(rows, n, np.int32) for n in (q_len, kv_len))
        batch = AttentionBatch(*lengths, np.arange(rows, dtype=np.int32), self.table)
        q = torch.randn(rows * q_len, self.heads, self.dim, device="cuda").bfloat16()
        out = torch.empty_like(q)
        prepared = self.attention.step(batch)
        us, _ = timed(lambda: prepared.run(0, q, out), trials, flush)
        last = min(CHECKED, q_len)
        errors = []
        for row in {0, rows - 1}:
            keys, values = (
                part[self.table[row].long()].flatten(0, 1)[:kv_len].float().repeat_interleave(
                    self.heads // part.shape[2], dim=1
                ).transpose(0, 1)
                for part in self.cache
            )  # fmt: skip
            own = slice((row + 1) * q_len - last, (row + 1) * q_len)
            place = torch.arange(kv_len - last, kv_len, device="cuda")[:, None]
            seen = (token := torch.arange(kv_len, device="cuda")) <= place
            if self.window is not None:
                seen &= token > place - self.window
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[own].float().transpose(0, 1), keys, values, attn_mask=seen
            ).transpose(0, 1)
            errors.append(((out[own].float() - expected).norm() / expected.norm()).item())
        return us, max(errors)


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("--heads", type=tuples("N/NxN"), default="24/4x256,32/8x128,64/8x64")
    parser.add_argument(
        "--prompts",
        type=tuples("NxN/N"),
        default="1x8192/8192,1x8192/30720,4x2048/2048,16x512/512,1x512/8192,1x128/4096",
    )
    parser.add_argument("--window", type=integer(1))
    parser.add_argument("--backend", choices=["fa2", "fa3", "copied"])
    parser.add_argument("--tile", type=integer(16, 128))
    parser.add_argument("--trials", type=integer(1), default=20)
    options = parser.parse_args(arguments)
    require_cuda(parser)
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    print("| heads | step | taken | us | TFLOPS | error |\n|---|---|---|---|---|---|")
    for heads, kv_heads, dim in options.heads:
        if options.tile:
            named = STOCK_TILES[dim]
            flashinfer_calls.FA3_TILES[dim] = named, (named[0], options.tile)
            if options.tile == named[1]:
                del flashinfer_calls.FA3_TILES[dim]
        for rows, q_len, kv_len in options.prompts:
            bench = Bench([heads, kv_heads, dim], rows, kv_len, options.window)
            chosen = bench.attention.choose_prefill(*(np.full(rows, n, np.int32) for n in (q_len, kv_len)))
            if options.backend:
                bench.attention.choose_prefill = lambda *_: options.backend
            us, error = bench.time([rows, q_len, kv_len], options.trials, flush)
            places = range(kv_len - q_len, kv_len)
            pairs = sum(min(place + 1, options.window or kv_len) for place in places)
            flops = 4 * rows * pairs * heads * dim
            name = f"{heads}/{kv_heads} x {dim}"
            print(f"| {name} | {rows} x {q_len} of {kv_len} | {options.backend or chosen} |"
                  f" {us:.1f} | {flops / us / 1e6:.0f} | {error:.1e} |", flush=True)  # fmt: skip
            del bench


if __name__ == "__main__":
    main()
