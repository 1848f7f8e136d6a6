# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one layer: FlashInfer's decode wrapper, its TensorRT-LLM call and our Triton kernel.

    python perf_configs/kernels/bench_attention.py [--num-seqs 1,2,..,256] [--max-seq-lens 1024,..,131072]
        [--heads 32] [--kv-heads 8] [--trials 20] [--json FILE]

The table of vLLM's pull request 19825: for each number of sequences and longest length, lengths are uniform
in 1..max_seq_len with one of max_seq_len, blocks of 16 tokens in random order, bfloat16, head_dim 128. On
compute capability 9.0 the TensorRT-LLM call (trtllm_batch_decode_with_kv_cache) runs XQA. Each contender's
call is a CUDA graph of its own, replayed 10 times to warm up and `trials` times between events; a memory
write larger than L2 precedes each. "speed-up" is (wrapper - other) / wrapper in percent, as there. GB/s
counts the cache read. Cases whose cache does not fit the device are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch

from client.arguments import argument_parser, integer, integers
from flashinfer_backend.attention import split
from flashinfer_backend.core.arguments import require_cuda

BLOCK_SIZE, DIM = 16, 128


def timed(call: Callable[[], object], trials: int, flush: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of one call in microseconds."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = []
    for trial in range(10 + trials):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        if trial >= 10:
            events.append((start, end))
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e3 for start, end in events]
    return float(np.mean(times)), float(np.std(times))


def draw_lens(num_seqs: int, max_seq_len: int) -> np.ndarray:
    rng = np.random.default_rng(num_seqs * 1000003 + max_seq_len)
    lens = rng.integers(1, max_seq_len + 1, num_seqs).astype(np.int32)
    lens[-1] = max_seq_len
    return lens


def blocks_of(lens: np.ndarray) -> int:
    return int(((lens + BLOCK_SIZE - 1) // BLOCK_SIZE).sum())


class Bench:
    def __init__(self, heads: int, kv_heads: int, blocks: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        shape = (blocks, BLOCK_SIZE, kv_heads, DIM)
        self.cache = tuple(torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in "kv")
        self.float_workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.trtllm_workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        self.flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        self.order = torch.randperm(blocks, device="cuda", dtype=torch.int32)

    def case(self, num_seqs: int, max_seq_len: int, trials: int) -> dict:
        import flashinfer  # not where there is no GPU

        from flashinfer_backend.attention import triton_decode

        lens = draw_lens(num_seqs, max_seq_len)
        counts = (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        indices = self.order[: int(indptr[-1])]
        columns = -(-max_seq_len // BLOCK_SIZE)
        places = torch.arange(columns, device="cuda") + torch.from_numpy(indptr[:-1]).cuda().long()[:, None]
        table = indices[places.clamp(max=len(indices) - 1)].contiguous()
        q = torch.randn(num_seqs, self.heads, DIM, device="cuda").bfloat16()
        outs = {name: torch.empty_like(q) for name in ("wrapper", "trtllm", "triton")}
        kv_lens = torch.from_numpy(lens).cuda()

        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.float_workspace, use_tensor_cores=True)
        wrapper.plan(
            torch.from_numpy(indptr), indices, torch.from_numpy(lens - (counts - 1) * BLOCK_SIZE).int(),
            self.heads, self.kv_heads, DIM, BLOCK_SIZE,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        max_items = split.max_items(num_seqs, self.kv_heads, fp8=False)
        items = np.zeros((max_items, split.ITEM_WORDS), dtype=np.int32)
        split.split_rows(lens, np.arange(num_seqs, dtype=np.int32), max_items, items)
        items_device = torch.from_numpy(items).cuda()
        space = triton_decode.DecodeWorkspace(
            num_seqs, max_items, self.heads, self.kv_heads, DIM, torch.device("cuda")
        )
        calls = {
            "wrapper": lambda: wrapper.run(q, self.cache, out=outs["wrapper"]),
            "trtllm": lambda: flashinfer.decode.trtllm_batch_decode_with_kv_cache(
                q,
                self.cache,
                self.trtllm_workspace,
                table,
                kv_lens.view(torch.uint32),
                max_seq_len,
                bmm1_scale=DIM**-0.5,
                bmm2_scale=1.0,
                out=outs["trtllm"],
                kv_layout="NHD",
            ),
            "triton": lambda: triton_decode.decode(
                q, self.cache, outs["triton"], items_device, table, space, DIM**-0.5
            ),
        }
        tokens = int(lens.sum())
        result: dict = {"num_seqs": num_seqs, "max_seq_len": max_seq_len, "tokens": tokens}
        for name, call in calls.items():
            result[f"{name}_us"], result[f"{name}_std"] = timed(call, trials, self.flush)
            result[f"{name}_gb_s"] = tokens * self.kv_heads * DIM * 4 / result[f"{name}_us"] * 1e-3
        reference = outs["wrapper"].float()
        for name in ("trtllm", "triton"):
            error = ((outs[name].float() - reference).norm() / reference.norm()).item()
            if not error < 1e-2:
                raise RuntimeError(f"{name} differs from the wrapper by {error:.1e}: {result}")
            result[f"{name}_speedup"] = 100 * (1 - result[f"{name}_us"] / result["wrapper_us"])
        return result


def main() -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("--num-seqs", type=integers(1), default="1,2,4,8,16,32,64,128,256")
    parser.add_argument(
        "--max-seq-lens", type=integers(1), default="1024,2048,4096,8192,16384,32768,65536,131072"
    )
    parser.add_argument("--heads", type=integer(1), default=32)
    parser.add_argument("--kv-heads", type=integer(1), default=8)
    parser.add_argument("--trials", type=integer(1), default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    require_cuda(parser)
    block_bytes = BLOCK_SIZE * options.kv_heads * DIM * 4
    room = int(torch.cuda.mem_get_info()[0] * 0.85) // block_bytes
    cases = [(s, m) for m in options.max_seq_lens for s in options.num_seqs]
    needed = {case: blocks_of(draw_lens(*case)) for case in cases}
    cases = [case for case in cases if needed[case] <= room]
    bench = Bench(options.heads, options.kv_heads, max(needed[case] for case in cases))
    print("| sequences | longest | wrapper us (std) | TRT-LLM us (std) | gain % | Triton us (std) | gain % |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for num_seqs, max_seq_len in cases:
        r = bench.case(num_seqs, max_seq_len, options.trials)
        results.append(r)
        print(
            f"| {num_seqs} | {max_seq_len} | {r['wrapper_us']:.1f} ({r['wrapper_std']:.1f})"
            f" | {r['trtllm_us']:.1f} ({r['trtllm_std']:.1f}) | {r['trtllm_speedup']:+.0f}"
            f" | {r['triton_us']:.1f} ({r['triton_std']:.1f}) | {r['triton_speedup']:+.0f} |",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
