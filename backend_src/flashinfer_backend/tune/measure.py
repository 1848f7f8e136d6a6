# SPDX-License-Identifier: Apache-2.0
"""Times on this process's GPU. What is compared takes turns, as the clock follows the power; weights differ
from call to call, so that they come from memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.core.tuned import Role, Shape, Tuned
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops import device, gated_linear
from flashinfer_backend.ops.collectives import Collectives
from flashinfer_backend.ops.fp8 import E4M3
from flashinfer_backend.tune.search import Kind
from flashinfer_backend.worker import prebuild_triton

INTERFACES = ("cublas", "cublaslt")
WEIGHTS = 10
REPLAYS = 7  # of each graph


def capture(body: Callable[[], object], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `body`, which ran before: compilation and workspaces are no part of it."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    return graph


def microseconds(graphs: Sequence[torch.cuda.CUDAGraph], replays: int = REPLAYS) -> list[float]:
    """Median time of each graph's replays, which take turns."""
    for graph in graphs:
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays * len(graphs) + 1)]
    events[0].record()
    for index, event in enumerate(events[1:]):
        graphs[index % len(graphs)].replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
    return [statistics.median(times[n :: len(graphs)]) for n in range(len(graphs))]


def interface_times(weights: Sequence[Tensor], tokens: int) -> tuple[float, float]:
    """Microseconds of x[tokens, K] @ weight.T with cuBLAS and with cublasLt, added to [tokens, N] in place
    where N <= K. weights: several [N, K]."""
    rows, inner = weights[0].shape
    x = torch.randn(tokens, inner, dtype=weights[0].dtype, device=weights[0].device)
    out = torch.zeros(tokens, rows, dtype=x.dtype, device=x.device) if rows <= inner else None

    def products() -> None:
        for weight in weights:
            if out is None:
                F.linear(x, weight)
            else:
                out.addmm_(x, weight.t())

    graphs = []
    before = torch.backends.cuda.preferred_blas_library()
    try:
        for interface in INTERFACES:
            torch.backends.cuda.preferred_blas_library(interface)
            graphs.append(capture(products))
    finally:
        torch.backends.cuda.preferred_blas_library(before)
    older, newer = microseconds(graphs)
    return older / len(weights), newer / len(weights)


class _Copies(Collectives):
    """One rank without the others: where they would be summed, a kernel that copies stands between the
    products."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.clone()


class ModelBench:
    """search.Bench with the products of a model, or of one rank's share; its weights are random numbers."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        if model.spec.shard.size > 1:
            model.collectives = _Copies()
        products = model.spec.products
        self.shapes: dict[Role, Shape] = {product.role: product.shape for product in products}
        self.kinds: dict[Role, Kind] = {}
        for role in self.shapes:
            formats = sorted({product.format for product in products if product.role == role})
            if len(formats) > 1:
                raise ValueError(f"the {role} weights have several formats: {', '.join(formats)}")
            (format,) = formats
            blocks = format.startswith("fp8_block")
            self.kinds[role] = "dense" if format == "dense" else "blocks" if blocks else "rows"
        self._stream = torch.cuda.Stream() if model.device.type == "cuda" else None

    def step(self, tokens: int, layers: int | None = None) -> Callable[[], Tensor]:
        """The products of a step of so many tokens, one after the other as in a step, without what is between
        them: rotation and attention. layers: only the first ones."""
        model, spec = self.model, self.model.spec
        start = self._random(tokens, spec.hidden_size)
        attended = self._random(tokens, spec.attention.heads, spec.attention.head_dim)

        def body() -> Tensor:
            hidden = start.clone()
            for layer in model.layers[:layers]:
                model.ops.norm_linear(hidden, layer.input_norm, layer.eps, layer.qkv, layer.qkv.bias)
                hidden = layer.after(attended, hidden, model.collectives)
            return model.logits(hidden)

        return body

    def steps(self, tokens: int, candidates: Sequence[Tuned]) -> list[float]:
        """See search.Bench."""
        from triton.errors import TritonError

        self._compile(tokens, candidates)
        body = self.step(tokens)
        times = [math.inf] * len(candidates)
        graphs = {}
        for index, candidate in enumerate(candidates):
            with device.use(candidate):
                try:
                    graphs[index] = capture(body, self._stream)
                except TritonError:  # too much shared memory, say: before the capture, when it is compiled
                    continue
                except NotImplementedError:  # what torch says of scales that only Hopper's cuBLAS knows
                    continue
                except RuntimeError as error:  # the compiler's own failures have no class, nor have cuBLAS's
                    if not any(part in str(error) for part in ("PassManager", "STATUS_NOT_SUPPORTED")):
                        raise
        for index, us in zip(graphs, microseconds(list(graphs.values())), strict=True):
            times[index] = us
        return times

    def _compile(self, tokens: int, candidates: Sequence[Tuned]) -> None:
        """Compile what the candidates need, all at once. Those that cannot be compiled fail in steps()."""
        body, variants = self.step(tokens, layers=1), {}
        for candidate in candidates:
            with device.use(candidate):
                variants.update(dict.fromkeys(prebuild_triton.collect(body)))
        prebuild_triton.compile_together(list(variants))

    def interfaces(self, role: Role, tokens: int) -> tuple[float, float]:
        """See search.Bench."""
        rows, inner = self.shapes[role]
        return interface_times([self._random(rows, inner) * 0.02 for _ in range(WEIGHTS)], tokens)

    def waves(self) -> dict[int, float]:
        """See search.Bench. Each tile has as many as fill whole waves."""
        rows, inner = self.shapes["gate_up"]
        fp8 = self.kinds["gate_up"] == "rows"
        weight = self._random(rows, inner) * 0.02
        weight = weight.to(E4M3) if fp8 else weight
        if not gated_linear.takes(weight):
            return {}
        module, sms = gated_linear.module(weight.dtype, weight.device), device.sms()
        blocks = rows // 128
        count = sms // math.gcd(blocks, sms)  # tiles a block of weights
        x = self._random(max(gated_linear.TILES) * count, inner)
        out = torch.empty(len(x), rows // 2, dtype=x.dtype, device=x.device)
        x = x.to(weight.dtype)
        scales = [torch.ones(size, device=x.device) for size in (len(x), rows)]

        def product(tile: int) -> Callable[[], None]:
            tokens = tile * count
            if fp8:
                return lambda: module.gated_linear_scaled(
                    out[:tokens], x[:tokens], weight, *scales, tile, sms
                )
            return lambda: module.gated_linear(out[:tokens], x[:tokens], weight, tile, sms)

        times = microseconds([capture(product(tile), self._stream) for tile in gated_linear.TILES])
        waves = blocks * count // sms
        return {tile: round(us / waves, 2) for tile, us in zip(gated_linear.TILES, times, strict=True)}

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.model.dtype, device=self.model.device)
