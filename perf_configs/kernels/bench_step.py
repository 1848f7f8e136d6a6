# SPDX-License-Identifier: Apache-2.0
"""Time of one decode step of a model's shape: the whole step in one CUDA graph, and each operation.

    python perf_configs/kernels/bench_step.py MODEL_DIR [--batches 1,16,64,256] [--contexts 256,1024]
        [--decode-backend auto] [--prefill 2048] [--json FILE]

MODEL_DIR needs a config.json only: weights and cache are random (time depends on values a little, so never
zeros). An operation's time is that of a graph of all layers' calls over the number of layers. The floor is
the bytes that a step must read (weights once, the cache once) over --bandwidth.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from client.arguments import argument_parser, integers, positive
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import StepShape
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.core.paths import named_folder
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.spec import Experts, ModelSpec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops.weight import Weight

if TYPE_CHECKING:
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

BLOCK_SIZE = 16


def graph_time(body: Callable[[], object], replays: int = 10) -> float:
    """Median time of one replay in microseconds."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(np.median(times))


class Bench:
    """A model with random weights and one set of caches large enough for the largest case."""

    def __init__(self, spec: ModelSpec, ops: types.ModuleType, tokens: int, max_seqs: int, max_context: int):
        self.spec, self.ops, self.heads = spec, ops, spec.attention
        self.model = Transformer(spec, ops, torch.bfloat16, "cuda", max_seq_len=max(max_context, 8192))
        load_weights(self.model, "", "dummy")
        blocks = tokens // BLOCK_SIZE + max_seqs + 2
        shape = (blocks, BLOCK_SIZE, self.heads.kv_heads, self.heads.head_dim)
        self.caches = [
            tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv") for _ in spec.layers
        ]
        self.blocks, self.columns = blocks, -(-max_context // BLOCK_SIZE)
        self.max_seqs = max_seqs

    def attention(self, decode_backend: str) -> FlashInferAttention:
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        return FlashInferAttention(
            KVCache.over(self.caches), self.heads.heads, self.max_seqs, self.columns, decode_backend,
        )  # fmt: skip

    def batch(
        self, q_lens: np.ndarray, kv_lens: np.ndarray
    ) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
        """The step plus positions and cache locations; blocks are drawn at random as after long service."""
        rows = len(q_lens)
        free = np.random.default_rng(0).permutation(np.arange(1, self.blocks))
        table = np.zeros((self.max_seqs, self.columns), dtype=np.int32)
        positions, taken = [], 0
        for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            count = -(-int(kv_len) // BLOCK_SIZE)
            table[row, :count] = free[taken : taken + count]
            taken += count
            positions.append(np.stack((np.full(q_len, row), np.arange(kv_len - q_len, kv_len))))
        row_of, position = np.concatenate(positions, axis=1)
        cache_locations = table[row_of, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        slots = np.arange(rows, dtype=np.int32)
        batch = AttentionBatch(q_lens, kv_lens, slots, torch.from_numpy(table).cuda())
        to_device = lambda array: torch.from_numpy(array.astype(np.int32)).cuda()  # noqa: E731
        return batch, to_device(position), to_device(cache_locations)

    def decode(self, rows: int, context: int, decode_backend: str, per_op: bool) -> dict:
        spec, model, ops = self.spec, self.model, self.ops
        layers: list = list(model.layers)
        q_lens, kv_lens = np.ones(rows, dtype=np.int32), np.full(rows, context, dtype=np.int32)
        batch, positions, where = self.batch(q_lens, kv_lens)
        attention = self.attention(decode_backend)
        shape = StepShape(rows, rows, 1)
        host = np.zeros(attention.graph_words(shape), np.int32)
        words = torch.zeros(len(host), dtype=torch.int32, device="cuda")
        state = attention.captured(shape, batch.block_table, words)
        state.plan(batch, host)
        words.copy_(torch.from_numpy(host))
        ids = torch.randint(0, spec.vocab_size, (rows,), device="cuda")
        hidden = torch.randn(rows, spec.hidden_size, device="cuda").bfloat16()
        zeros = torch.zeros(rows, device="cuda")

        def step() -> None:
            logits = model.logits(model.forward(ids, positions, where, self.caches, state))
            ops.sample(logits, zeros, zeros.long(), positions)

        result: dict = {"rows": rows, "context": context, "step_us": graph_time(step)}
        if not per_op:
            return result
        heads, kv_heads, head_dim = self.heads.heads, self.heads.kv_heads, self.heads.head_dim
        inner = torch.randn(rows, spec.mlp.size, device="cuda").bfloat16()
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device="cuda").bfloat16()
        q = torch.randn(rows, heads, head_dim, device="cuda").bfloat16()
        out = torch.empty_like(q)
        logits = model.logits(hidden)
        eps = spec.norm_eps

        def rope(index: int, layer) -> None:
            ops.rope_and_store(
                qkv, positions, layer.cos_sin, *self.caches[index], where, layer.q_norm, layer.k_norm, eps,
                heads, kv_heads,
            )  # fmt: skip

        per_layer: dict[str, Callable] = {
            "qkv": lambda i, layer: ops.norm_linear(hidden, layer.input_norm, eps, layer.qkv, layer.qkv.bias),
            "rope_and_store": rope,
            "attention": lambda i, layer: state.run(i, q, out),
            "o": lambda i, layer: ops.linear_add(q.view(rows, -1), layer.o, hidden),
            "gate_up": lambda i, layer: ops.norm_gate_up_silu(hidden, layer.post_norm, eps, layer.gate_up),
            "down": lambda i, layer: ops.linear_add(inner, layer.down, hidden),
        }
        for name, call in per_layer.items():
            body = lambda call=call: [call(i, layer) for i, layer in enumerate(layers)]  # noqa: E731
            result[name] = graph_time(body) / len(layers)
        result["lm_head"] = graph_time(lambda: model.logits(hidden))
        result["sample"] = graph_time(lambda: ops.sample(logits, zeros, zeros.long(), positions))
        return result

    def prefill(self, tokens: int) -> dict:
        """One eager prefill of a single prompt, timed with events; includes the launches."""
        q_lens = np.array([tokens], dtype=np.int32)
        batch, positions, where = self.batch(q_lens, q_lens)
        attention = self.attention("auto")
        ids = torch.randint(0, self.spec.vocab_size, (tokens,), device="cuda")
        times = []
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            attention.step(batch)
            self.model.logits(self.model.forward(ids, positions, where, self.caches, attention)[-1:])
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        weights = sum(
            w.shape[0] * w.shape[1]
            for layer in self.model.layers
            for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        flops = 2.0 * tokens * weights
        flops += 2.0 * tokens * tokens * self.heads.heads * self.heads.head_dim * len(self.spec.layers)
        time = float(np.median(times[2:]))
        return {"prefill": tokens, "us": time, "tflops": flops / time * 1e-6}


def weight_bytes(model: Transformer) -> int:
    """What a decode step reads of the weights, as they are stored: all but embeddings that are only looked
    up."""
    tied = model.lm_head.data is model.embed_tokens
    read = [tensor for name, tensor in model.named_parameters() if tied or name != "embed_tokens"]
    zeros = [module.zero for module in model.modules() if isinstance(module, Weight)]
    return sum(tensor.nbytes for tensor in [*read, *zeros] if tensor is not None)


def floor_us(bench: Bench, rows: int, context: int, bandwidth: float) -> float:
    heads = bench.heads
    cache = rows * context * len(bench.spec.layers) * heads.kv_heads * heads.head_dim * 2
    return (weight_bytes(bench.model) + cache * 2) / bandwidth * 1e6


def lengths(text: str) -> list[int]:
    """Whole numbers separated by commas, or none."""
    return integers(1)(text) if text else []


def main() -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("model_dir", type=named_folder)
    parser.add_argument("--batches", type=integers(1), default="1,4,16,64,128,256")
    parser.add_argument("--contexts", type=integers(1), default="256,1024")
    parser.add_argument("--decode-backend", default="auto")
    parser.add_argument("--prefill", type=lengths, default="2048", help="prompt lengths, or empty")
    parser.add_argument("--bandwidth", type=positive, default=4.29e12, help="bytes/s of a device copy")
    parser.add_argument("--per-op", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json")
    options = parser.parse_args()
    require_cuda(parser)
    from flashinfer_backend.ops import cuda_ops

    batches, contexts = options.batches, options.contexts
    spec = read_spec(options.model_dir)
    if isinstance(spec.mlp, Experts):
        parser.error("steps of a mixture of experts are measured by perf_configs.bench_engine")
    longest = max([*contexts, *options.prefill])
    bench = Bench(spec, cuda_ops, max(max(batches) * max(contexts), longest), max(batches), longest)
    results = []
    for context in contexts:
        for rows in batches:
            result = bench.decode(rows, context, options.decode_backend, options.per_op)
            result["floor_us"] = floor_us(bench, rows, context, options.bandwidth)
            results.append(result)
            times = " ".join(f"{k} {v:.1f}" for k, v in result.items() if k not in ("rows", "context"))
            print(f"{rows:4d} x {context:5d}: {times}", flush=True)
    for tokens in options.prefill:
        results.append(bench.prefill(tokens))
        print(
            f"prefill {tokens}: {results[-1]['us'] / 1e3:.2f} ms, {results[-1]['tflops']:.0f} TFLOP/s",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
