# SPDX-License-Identifier: Apache-2.0
"""Times on this process's GPU. What is compared takes turns, as the clock follows the power; weights differ
from call to call, so that they come from memory."""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from flashinfer_backend.attention import split
from flashinfer_backend.core.tuned import Cache, Entry, ExpertTile, Tuned
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops import device, gated_linear
from flashinfer_backend.ops.collectives import Collectives
from flashinfer_backend.ops.fp8 import E4M3
from flashinfer_backend.worker import prebuild_triton

BLOCK_SIZE = 16  # tokens of a block of the cache
BYTES = 160 << 20  # of a cache that a graph goes through: three times an H200's L2
MOST_LOGITS = 256
CONTEXTS = (1152, 256, 4096)  # tokens behind decode rows
REPLAYS = 7  # of each graph
# Of a result's norm: rounding, and tokens that choose other experts by it, are some hundredths; a wrong tile
# gives something else altogether.
AGREES = 0.5


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


def compile_all(body: Callable[[], object], candidates: Sequence[Tuned]) -> None:
    """The Triton kernels of `body` by each candidate, in threads. What fails here fails again as it runs.
    Without those of mixtures in CUDA: these would run, with tiles that nothing has written."""
    variants: dict[tuple[Any, str], None] = {}
    for candidate in candidates:
        with device.use(without_teams(candidate)), suppress(Exception):
            variants.update(dict.fromkeys(prebuild_triton.collect(body)))
    prebuild_triton.compile_together(list(variants))


def without_teams(numbers: Tuned) -> Tuned:
    """The same with Triton's kernels for all mixtures of experts."""

    def of(entry: Entry[ExpertTile]) -> Entry[ExpertTile]:
        return replace(
            entry, steps=tuple((most, tile and replace(tile, teams=0)) for most, tile in entry.steps)
        )

    return replace(
        numbers, experts={key: tuple(map(of, entries)) for key, entries in numbers.experts.items()}
    )


def compare(
    body: Callable[[], Tensor],
    candidates: Sequence[Tuned],
    stream: torch.cuda.Stream | None = None,
    part: Callable[[], Tensor] | None = None,
) -> list[float]:
    """Microseconds of a graph of `body` by the choices of each candidate; infinite where it cannot run, or
    gives something else than the first that can, which is said. body: gives the same each time. part: what
    takes all kernels of `body`, in less time."""
    compile_all(part or body, candidates)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    expected: Tensor | None = None
    for index, candidate in enumerate(candidates):
        with device.use(candidate):
            try:
                result = body().float()
                torch.cuda.synchronize()
                graph = capture(body, stream)
            except Exception as error:  # too much shared memory, a cluster too large, nothing of cuBLAS's
                if "CUDA error" in str(error):  # the device's state is gone, and with it what follows
                    raise
                said = str(error).splitlines()[0] if str(error) else ""
                print(f"  left out: {type(error).__name__}: {said[:120]}", flush=True)
                continue
        expected = result if expected is None else expected
        difference = float((result - expected).norm() / expected.norm())
        # A deep model of random weights may overflow.
        if difference < AGREES or not expected.isfinite().all():
            graphs[index] = graph
        else:
            print(f"  WRONG by {difference:.2g}: candidate {index} of {len(candidates)}", flush=True)
    times = [math.inf] * len(candidates)
    for index, us in zip(graphs, microseconds(list(graphs.values())) if graphs else (), strict=True):
        times[index] = us
    return times


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
        self._stream = torch.cuda.Stream() if model.device.type == "cuda" else None

    def step(self, tokens: int, layers: int | None = None) -> Callable[[], Tensor]:
        """The products of a step of `tokens`, one after the other as in a step, without what is between
        them: rotation and attention; logits of the last MOST_LOGITS tokens, as prompts want few. layers: only
        the first ones."""
        model, spec = self.model, self.model.spec
        start = self._random(tokens, spec.hidden_size)
        widths = {layer.mixer.o.shape[1] for layer in spec.layers}
        mixed = {width: self._random(tokens, width) for width in widths}

        def body() -> Tensor:
            hidden = start.clone()
            for layer in model.layers[:layers]:
                first, *further = (getattr(layer, each.name) for each in layer.spec.mixer.products[:-1])
                if further:
                    model.ops.norm_linears(hidden, layer.input_norm, layer.eps, (first, *further))
                else:
                    model.ops.norm_linear(hidden, layer.input_norm, layer.eps, first, first.bias)
                hidden = layer.behind(mixed[layer.spec.mixer.o.shape[1]], hidden, model.collectives)
            return model.logits(hidden[-MOST_LOGITS:])

        return body

    def steps(self, tokens: int, candidates: Sequence[Tuned]) -> list[float]:
        products = [{(each.role, each.shape) for each in layer.products} for layer in self.model.spec.layers]
        kinds = 1 + max(products.index(each) for each in products)  # by then there was a layer of each
        return compare(self.step(tokens), candidates, self._stream, self.step(tokens, layers=kinds))

    def waves(self) -> dict[int, float]:
        """See search.Bench. Each tile has as many as fill whole waves."""
        gate_up = next(each for each in self.model.spec.products if each.gated)
        (rows, inner), fp8 = gate_up.shape, gate_up.format != "dense"
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


class DecodeBench:
    """search.Bench of decode attention over a cache, whose "tokens" are rows. Their lengths are uniform from
    half of each context to one and a half. A time is the geometric mean over the contexts. The calls of a
    graph read blocks of their own, more than L2 holds."""

    def __init__(self, spec: ModelSpec, cache: Cache) -> None:
        attention = spec.attention
        self.heads, self.kv_heads, self.dim = attention.heads, attention.kv_heads, attention.head_dim
        self.fp8 = cache == "e4m3"

    def steps(self, rows: int, candidates: Sequence[Tuned]) -> list[float]:
        found = [1.0] * len(candidates)
        for context in CONTEXTS:
            rng = np.random.default_rng(rows * 1000003 + context)
            lens = rng.integers(context - context // 2, context + context // 2 + 1, rows).astype(np.int32)
            times = compare(self.call(lens), candidates)
            found = [product * us ** (1 / len(CONTEXTS)) for product, us in zip(found, times, strict=True)]
        return found

    def waves(self) -> dict[int, float]:
        return {}

    def call(self, lens: np.ndarray) -> Callable[[], Tensor]:
        """Decode rows of these lengths, int32 [rows], by the numbers in use, over copies of a cache."""
        from flashinfer_backend.attention import triton_decode

        rows, blocks = len(lens), -(-lens // BLOCK_SIZE)
        need = int(blocks.sum())
        copies = -(-BYTES // int(lens.sum(dtype=np.int64) * 2 * self.kv_heads * self.dim))
        shape = (need * copies, BLOCK_SIZE, self.kv_heads, self.dim)
        keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        cache = (keys.to(E4M3), values.to(E4M3)) if self.fp8 else (keys, values)
        # The kernel is compiled for whether it is a multiple of 16.
        columns = -(-int(blocks.max()) // 16) * 16
        order = torch.randperm(need * copies, device="cuda", dtype=torch.int32)
        starts = torch.from_numpy(np.cumsum(blocks) - blocks).to("cuda")
        places = (starts[:, None] + torch.arange(columns, device="cuda")).clamp(max=need - 1)
        tables = [order[need * copy :][places] for copy in range(copies)] * (2 if copies == 1 else 1)
        q = torch.randn(rows, self.heads, self.dim, device="cuda").bfloat16()
        out, made = torch.empty_like(q), dict[int, tuple[Tensor, Any]]()
        scales = (0.5, 0.25) if self.fp8 else (1.0, 1.0)

        def body() -> Tensor:
            items = split.max_items(rows, self.kv_heads, self.fp8)
            if items not in made:  # outside of a graph, which keeps their addresses
                words = np.zeros((items, split.ITEM_WORDS), np.int32)
                split.split_rows(lens, np.arange(rows, dtype=np.int32), items, words)
                sizes = rows, items, self.heads, self.kv_heads, self.dim
                made[items] = (
                    torch.from_numpy(words).to("cuda"),
                    triton_decode.DecodeWorkspace(*sizes, q.device),
                )
            work, space = made[items]
            for table in tables:
                triton_decode.decode(q, cache, out, work, table, space, self.dim**-0.5, scales)
            return out

        return body
