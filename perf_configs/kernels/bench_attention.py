# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one layer: FlashInfer's decode wrapper, its TensorRT-LLM call and our Triton kernel.

    python perf_configs/kernels/bench_attention.py [--num-seqs 1,2,..,256] [--max-seq-lens 1024,..,131072]
        [--shared 64x1x30016,64x16x704,64x0x0] [--tiles 64x64x3,..] [--heads 32] [--kv-heads 8] [--trials 20]
        [--json FILE]

The table of vLLM's pull request 19825: for each number of sequences and longest length, lengths are uniform
in 1..max_seq_len with one of max_seq_len, blocks of 16 tokens in random order, bfloat16, head_dim 128. On
compute capability 9.0 the TensorRT-LLM call (trtllm_batch_decode_with_kv_cache) runs XQA. Each contender's
call is a CUDA graph of its own, replayed 10 times to warm up and `trials` times between events; a memory
write larger than L2 precedes each. "speed-up" is (wrapper - other) / wrapper in percent, as there. GB/s
counts the cache read. Cases whose cache does not fit the device are left out.

--shared ROWSxSETSxTOKENS,... takes other cases: rows in as many sets, of which each begins with as many
tokens in common, and 200 of each row's own; of no sets, rows of 904 tokens that share nothing. Our kernel
reads the rows by themselves, then what they share once. --tiles QUERIESxTOKENSxSTAGES,... are other tiles of
the kernel that does so.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from client.arguments import argument_parser, integer, integers, tuples
from flashinfer_backend.attention import split
from flashinfer_backend.core.arguments import require_cuda

BLOCK_SIZE, DIM, OWN_TOKENS = 16, 128, 200


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


class SharedCase(NamedTuple):
    """Rows whose first tokens are those of others in their set; each has OWN_TOKENS behind them."""

    rows: int
    sets: int
    tokens: int

    @property
    def length(self) -> int:
        return (self.tokens if self.sets else 704) + OWN_TOKENS

    @property
    def blocks(self) -> int:
        shared = self.tokens // BLOCK_SIZE
        return self.rows * (-(-self.length // BLOCK_SIZE) - (shared if self.sets else 0)) + self.sets * shared

    def table(self) -> np.ndarray:
        """Blocks of each row, before they are put in a random order."""
        shared = self.tokens // BLOCK_SIZE if self.sets else 0
        own = -(-self.length // BLOCK_SIZE) - shared
        behind = self.sets * shared + np.arange(self.rows * own).reshape(self.rows, own)
        common = np.arange(self.rows)[:, None] % max(1, self.sets) * shared + np.arange(shared)
        return np.concatenate([common, behind], axis=1)


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

    def shared(self, case: SharedCase, tiles: list[list[int]], trials: int) -> dict:
        from flashinfer_backend.attention import prefixes, triton_decode, triton_prefix

        rows, heads, kv_heads = case.rows, self.heads, self.kv_heads
        host = self.order.cpu().numpy()[case.table()].astype(np.int32)
        table, slots = torch.from_numpy(host).cuda(), np.arange(rows, dtype=np.int32)
        lens = np.full(rows, case.length, np.int32)
        q = torch.randn(rows, heads, DIM, device="cuda").bfloat16()
        count = split.max_items(rows, kv_heads, fp8=False)
        items = np.zeros((count, split.ITEM_WORDS), np.int32)
        split.split_rows(lens, slots, count, items)
        alone, expected = torch.from_numpy(items).cuda(), torch.empty_like(q)
        found = prefixes.find_prefixes(host, slots, (lens - 1) // BLOCK_SIZE, BLOCK_SIZE)
        device = torch.device("cuda")
        space = triton_decode.DecodeWorkspace(rows, count, heads, kv_heads, DIM, device)
        how, result = (table, space, DIM**-0.5), {**case._asdict()}
        call = lambda: triton_decode.decode(q, self.cache, expected, alone, *how)  # noqa: E731
        result["alone_us"], result["alone_std"] = timed(call, trials, self.flush)
        for queries, tokens, stages in tiles:
            prefixes.QUERIES = triton_prefix.QUERIES = queries
            triton_prefix.TILE, triton_prefix.STAGES = tokens, stages
            cut = prefixes.PrefixTiles(rows, heads, kv_heads)
            words = np.zeros(cut.words, np.int32)
            parts = cut.split(found, slots, count, words)
            split.split_rows(lens, slots, count, items, shared=parts)
            own, out = torch.from_numpy(items).cuda(), torch.empty_like(q)
            tile_items, order = torch.from_numpy(words).cuda().split_with_sizes(cut.sizes)
            work = triton_prefix.SharedWork(tile_items.view(-1, prefixes.PREFIX_WORDS), order)
            space = triton_decode.DecodeWorkspace(rows, count + cut.cells, heads, kv_heads, DIM, device)
            how = (table, space, DIM**-0.5)

            def prefix(how: tuple = how, work: triton_prefix.SharedWork = work) -> None:
                triton_prefix.prefix_parts(q, self.cache, work, *how)

            def both(how: tuple = how, own: torch.Tensor = own, out: torch.Tensor = out) -> None:
                prefix()
                triton_decode.decode(q, self.cache, out, own, *how, shared=True)

            name = f"{queries}x{tokens}x{stages}"
            result[f"prefix_us_{name}"] = timed(prefix, trials, self.flush)[0]
            result[f"once_us_{name}"], result[f"once_std_{name}"] = timed(both, trials, self.flush)
            error = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
            if not error < 1e-2:
                raise RuntimeError(f"tiles of {name} differ from rows by themselves by {error:.1e}: {result}")
        return result


def main() -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("--num-seqs", type=integers(1), default="1,2,4,8,16,32,64,128,256")
    parser.add_argument(
        "--max-seq-lens", type=integers(1), default="1024,2048,4096,8192,16384,32768,65536,131072"
    )
    parser.add_argument("--shared", type=tuples("nxnxn"), metavar="ROWSxSETSxTOKENS,...")
    parser.add_argument(
        "--tiles", type=tuples("NxNxN"), default="64x64x3", metavar="QUERIESxTOKENSxSTAGES,..."
    )
    parser.add_argument("--heads", type=integer(1), default=32)
    parser.add_argument("--kv-heads", type=integer(1), default=8)
    parser.add_argument("--trials", type=integer(1), default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    require_cuda(parser)
    block_bytes = BLOCK_SIZE * options.kv_heads * DIM * 4
    room = int(torch.cuda.mem_get_info()[0] * 0.85) // block_bytes
    if options.shared:
        shared = [SharedCase(*case) for case in options.shared]
        bench = Bench(options.heads, options.kv_heads, max(case.blocks for case in shared))
        results = []
        for case in shared:
            results.append(bench.shared(case, options.tiles, options.trials))
            print(
                " ".join(
                    f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in results[-1].items()
                )
            )
        write(options.json, results)
        return
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
    write(options.json, results)


def write(path: str | None, results: list[dict]) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
