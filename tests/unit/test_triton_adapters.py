# SPDX-License-Identifier: Apache-2.0
"""The kernels of adapters in Triton's interpreter, without a GPU; tests/gpu/test_adapters.py runs the real
ones."""

import torch
from interpreted import interpreted

from flashinfer_backend.core.tuned import Tiling
from flashinfer_backend.ops import device, torch_ops
from flashinfer_backend.ops.weight import Added, Chosen, LowRank, Weight

# Tokens, columns of x, rows of the product's modules, places, rank.
SHAPES = [
    (1, 64, (96,), 1, 16),
    (5, 200, (128, 32, 32), 3, 16),
    (37, 160, (200, 200), 4, 32),
    (20, 1100, (40,), 20, 16),
    (33, 264, (72, 8, 8), 2, 256),
]
# The same as part of a product, with what else that has: norm, gate, residual; and a tiling.
FUSED = [
    (1, 512, (128, 64, 64), 4, 16, True, False, False, Tiling(16, 64, 128, stages=2)),
    (21, 512, (64, 64), 12, 16, True, True, False, Tiling(16, 64, 128, stages=2)),
    (30, 512, (128,), 3, 32, False, False, True, Tiling(32, 64, 128, 2, stages=2)),
    (40, 512, (128,), 2, 256, False, False, True, Tiling(64, 32, 128, stages=2, swap=False)),
    # Gate and up are rows of one module.
    (18, 512, (128,), 4, 16, True, True, False, Tiling(16, 64, 128, stages=2)),
]


def busy(sms: int) -> tuple:
    """The same with a program for each SM, and many adapters: they are not shrunk in the product's launch."""
    return (6, 128, (64 * sms,), 6, 16, False, False, True, Tiling(16, 64, 128, stages=2))


class Sample:
    """A weight with adapters, x, and the tokens' adapters."""

    def __init__(
        self,
        tokens: int,
        columns: int,
        rows: tuple[int, ...],
        places: int,
        rank: int,
        where: str,
        dtype: torch.dtype,
        role: str = "o",
    ) -> None:
        self._generator = torch.Generator().manual_seed(tokens)
        self._where, self._dtype = where, dtype
        ends = tuple(torch.tensor(rows).cumsum(0).tolist())
        self.weight = Weight(role, self.values(ends[-1], columns))
        down, up = self.values(places, len(rows), rank, columns), self.values(places, ends[-1], rank)
        self.weight.adapters = self.low = LowRank(down, up, ends)
        self.places = torch.randint(-1, places, (tokens,), generator=self._generator).int()
        self.places[0] = places - 1
        self.places = self.places.to(where)
        self.chosen = torch_ops.group_adapters(self.places, places)
        self.x, self.residual = self.values(tokens, columns), self.values(tokens, ends[-1])
        self.norm = self.values(columns) + 1

    def values(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._where, self._dtype) * 0.25


def check(
    count: int, columns: int, rows: tuple[int, ...], places: int, rank: int, where: str, dtype: torch.dtype
) -> None:
    """shrink and expand, of a product that is computed elsewhere."""
    from flashinfer_backend.ops import triton_adapters

    own, native = Sample(count, columns, rows, places, rank, where, dtype), where != "cpu"
    grouped = triton_adapters.group_adapters(own.places, places)
    assert torch.equal(grouped.distinct, own.chosen.distinct)
    product = own.x @ own.weight.data.T
    wanted = torch_ops.linear(own.x, own.weight, None, own.chosen)
    added = triton_adapters.shrink(own.x, own.low, grouped, native=native)
    found = triton_adapters.expand(product.clone(), added, native=native)
    none = own.places < 0
    assert torch.equal(found[none], product[none]), "tokens without an adapter"
    close(found, wanted, dtype)
    assert (wanted - product).abs().max() > 1, "the adapters add too little"


def check_fused(
    count: int,
    columns: int,
    rows: tuple[int, ...],
    places: int,
    rank: int,
    norm: bool,
    gated: bool,
    residual: bool,
    tiling: Tiling,
    where: str,
    dtype: torch.dtype,
) -> None:
    """As part of the product."""
    from flashinfer_backend.ops import triton_linear

    own, native = Sample(count, columns, rows, places, rank, where, dtype), where != "cpu"
    assert triton_linear.takes_adapters(tiling, own.low)
    norm_weight = own.norm if norm else None
    beside = own.residual if residual else None
    kept = {"residual": beside, "gated": gated, "native": native}
    found, plain = (
        triton_linear.linear(own.x, own.weight.data, tiling, norm_weight, 1e-5, adapters=each, **kept)
        for each in ((own.low, own.chosen), None)
    )

    def computed(chosen: Chosen | None) -> torch.Tensor:
        if gated:
            return torch_ops.norm_gate_up_silu(own.x, own.norm, 1e-5, own.weight, chosen)
        if norm:
            return torch_ops.norm_linear(own.x, own.norm, 1e-5, own.weight, None, chosen=chosen)
        return torch_ops.linear_add(own.x, own.weight, beside, chosen)

    none = own.places < 0
    assert torch.equal(found[none], plain[none]), "tokens without an adapter"
    close(found, computed(own.chosen), dtype)
    assert (computed(own.chosen) - computed(None)).abs().max() > 1, "the adapters add too little"


def check_embedded(tokens: int, where: str, dtype: torch.dtype) -> None:
    """Of embeddings; every third id is another rank's."""
    from flashinfer_backend.ops import triton_adapters

    own = Sample(tokens, 500, (96,), 3, 16, where, dtype)
    ids = (torch.arange(tokens, device=where) * 7 % 500).int()
    ids[::3] = -1
    hidden = own.residual.clone()
    wanted = torch_ops.add_embedded(own.residual, ids, own.low, own.chosen)
    if where == "cpu":
        inner = torch_ops.embedded_down(ids, own.low, own.chosen).float().view(1, tokens, 1, -1)
        found = triton_adapters.expand(hidden.clone(), Added(inner, own.low, own.chosen), native=False)
    else:
        from flashinfer_backend.ops import cuda_ops

        found = cuda_ops.add_embedded(hidden.clone(), ids, own.low, own.chosen)
    close(found, wanted, dtype)
    assert torch.equal(found[::3], hidden[::3]) and not torch.equal(found, hidden)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}[dtype], error


def test_kernels_in_the_interpreter() -> None:
    interpreted(__file__)


if __name__ == "__main__":
    for shape in SHAPES:
        check(*shape, "cpu", torch.float32)
    for case in FUSED:
        check_fused(*case, "cpu", torch.float16)
    device.sms = lambda: 12
    check_fused(*busy(12), "cpu", torch.float16)
    check_embedded(40, "cpu", torch.float32)
