# SPDX-License-Identifier: Apache-2.0
"""The Triton products in Triton's interpreter, without a GPU: which element goes where, and how well
quantising x inside the product does; with all tilings that devices' files have, too. tests/gpu/test_fp8.py
runs the real ones.
"""

import torch
from interpreted import interpreted
from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import Tiling
from flashinfer_backend.ops import fp8

ROWS, INNER = 128, 512
# Where x is quantised, with a weight's scales by row or by 128x128 blocks; or weights in 16 bits. Tokens,
# tile, rows, inner, split, swap, gated, norm, bias, residual.
CASES = [
    ("inside", 1, 1, 64, 128, 1, True, False, True, True, False),
    ("inside", 1, 1, 64, 128, 2, True, False, True, False, False),
    ("inside", 1, 1, 32, 128, 4, False, False, False, False, True),
    ("inside", 1, 1, 64, 256, 1, True, True, True, False, False),
    ("inside", 3, 1, 64, 256, 2, True, False, False, False, True),
    ("inside", 1, 16, 64, 128, 2, True, False, False, False, True),
    ("inside", 7, 16, 64, 128, 1, True, False, True, True, False),
    ("inside", 7, 16, 128, 128, 4, True, False, True, False, True),
    ("inside", 7, 16, 64, 128, 1, True, True, True, False, False),
    ("inside", 16, 16, 64, 256, 2, True, False, False, False, True),
    ("inside", 16, 16, 32, 512, 1, False, True, True, False, False),
    ("inside", 20, 16, 64, 128, 2, False, False, True, True, True),
    ("before", 1, 1, 64, 128, 2, True, False, False, False, True),
    ("before", 7, 16, 64, 128, 1, True, True, False, False, False),
    ("blocks inside", 1, 1, 64, 128, 2, True, False, True, True, True),
    ("blocks inside", 1, 1, 128, 128, 1, True, True, True, False, False),
    ("blocks inside", 7, 16, 64, 128, 4, False, False, False, False, True),
    ("blocks inside", 20, 16, 64, 128, 1, True, True, True, False, False),
    ("blocks before", 1, 1, 64, 128, 2, True, False, False, False, True),
    ("blocks before", 7, 16, 32, 128, 1, True, True, False, False, False),
    ("blocks before", 20, 16, 64, 128, 4, False, False, False, True, True),
    ("dense", 1, 1, 64, 128, 1, True, True, True, False, False),
    ("dense", 7, 16, 64, 128, 2, True, False, True, True, False),
]


def run_case(kind, tokens, tile, rows, inner, split, swap, gated, norm, bias, residual) -> None:
    tiling = Tiling(tile, rows, inner, split, stages=2, swap=swap, quantise=kind.endswith("inside"))
    rows = 2 * ROWS if kind.startswith("blocks") else ROWS
    run(kind, tokens, tiling, rows, INNER, gated, norm, bias, residual)


def every_tiling() -> list[tuple[str, bool, bool, bool, Tiling]]:
    """Kind of weight, whether it is gated, has a norm and a residual, and tiling of all that a device's file
    chooses, without what only a GPU heeds."""
    chosen = {}
    for path in sorted(tuned.FOLDER.glob("*.json")):
        numbers = tuned.read(path)
        tables = {"dense": numbers.linear, "": numbers.linear_fp8, "blocks ": numbers.linear_blocks}
        for weights, table in tables.items():
            for role, entries in table.items():
                for tiling in (tiling for entry in entries for _, tiling in entry.steps if tiling):
                    quantised = "inside" if tiling.quantise else "before"
                    kind = weights if weights == "dense" else weights + quantised
                    norm = (
                        role in ("qkv", "gate_up", "head")
                        and tiling.fuse_norm
                        and not kind.endswith("before")
                    )
                    tiling = replace(tiling, stages=2, warps=4, prefetch=0, early=True)
                    chosen[kind, role == "gate_up", norm, role in ("o", "down"), tiling] = None
    return list(chosen)


def run_tiling(kind: str, gated: bool, norm: bool, residual: bool, tiling: Tiling) -> None:
    """Two tiles of rows, two of tokens that the last ones do not fill, and two of `inner` for each part."""
    tokens = 2 * tiling.tokens - tiling.tokens // 3
    rows, inner = 2 * tiling.rows // (1 + gated), 2 * tiling.inner * tiling.split
    if kind.startswith("blocks"):
        rows = 256 // (1 + gated)  # two blocks of rows
    run(kind, tokens, tiling, rows, inner, gated, norm, False, residual)


def run(kind, tokens, tiling, rows, inner, gated, norm, bias, residual) -> None:
    """x [tokens, inner] by a weight of so many rows, or of twice as many where it is gated."""
    from flashinfer_backend.ops import triton_fp8
    from flashinfer_backend.ops.triton_linear import linear

    torch.manual_seed(0)
    assert tiling.fits((2 * rows if gated else rows, inner), gated, tokens)
    dtype = torch.float16 if kind == "dense" else torch.bfloat16  # the interpreter multiplies no bfloat16
    weight = torch.randn(2 * rows if gated else rows, inner) * inner**-0.5
    blocks, before = kind.startswith("blocks"), kind.endswith("before")
    if kind == "dense":
        weight = weight.to(dtype)
        scale = own = torch.ones(len(weight), 1)
    elif blocks:
        spread = torch.logspace(-1, 0, inner) * torch.logspace(-1, 0, len(weight))[:, None]
        weight, found = fp8.quantise_blocks(weight * spread)
        own = fp8.empty_block_scales(tuple(weight.shape), "cpu").copy_(found)
        scale = fp8.spread(own, inner, len(weight))
    else:
        weight, scale = fp8.quantise_rows(weight)
        own = scale[:, 0].contiguous()
    largest = 0 if kind == "dense" and not norm else 2  # gate times up should stay below float16's limit
    x = (torch.randn(tokens, inner) * torch.logspace(0, largest, tokens)[:, None]).to(dtype)
    x[-1, 5] = 40 * x[-1].abs().max()  # far beyond the others
    norm_weight = (torch.rand(inner) + 0.5).to(dtype) if norm else None
    beside = {
        "bias": torch.randn(rows).to(dtype) if bias else None,
        "residual": torch.randn(tokens, rows).to(dtype) if residual else None,
    }

    def finished(product: torch.Tensor) -> torch.Tensor:
        if gated:
            gate, up = product.chunk(2, -1)
            product = torch.nn.functional.silu(gate) * up
        return product + sum(more.double() for more in beside.values() if more is not None)

    wide = x.double()
    if norm_weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
    matrix = (weight.double() * scale).t()
    exact = finished(wide @ matrix)
    elements, scales = fp8.quantise_rows(wide.bfloat16())  # of the norm
    by_row = exact if kind == "dense" else finished((elements.double() * scales) @ matrix)
    if blocks and before:
        elements, scales = triton_fp8.quantise_groups(wide.bfloat16())
    found = linear(
        elements[:tokens] if before else x,
        weight,
        tiling,
        None if before else norm_weight,
        1e-5,
        gated=gated,
        scales=None if kind == "dense" else (scales if before else None, own),
        native=False,
        **beside,
    )
    assert found.dtype == dtype
    error, allowed = ((each.double() - exact).norm(dim=1) / exact.norm(dim=1) for each in (found, by_row))
    # A row's own scale is the same or a coarser one; rounding goes either way, and bfloat16 adds to it.
    times = 2 if blocks else 1.3  # few columns count where blocks are of several sizes
    assert (error < times * allowed + 4e-3).all(), f"{tiling}: {error.tolist()}, by row {allowed.tolist()}"


def exact_conversions() -> None:
    """The interpreter cuts off where a GPU rounds to the nearest: torch's rounding takes its place."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    kinds = {tl.float8e4nv: (torch.float8_e4m3fn, np.uint8), tl.bfloat16: (torch.bfloat16, np.uint16)}
    plain = interpreter._convert_float

    def convert(data, source, target, mode):
        if source != tl.float32 or target not in kinds:
            return plain(data, source, target, mode)
        dtype, bits = kinds[target]
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).to(dtype)
        return rounded.view(getattr(torch, bits.__name__)).numpy().reshape(data.shape)

    interpreter._convert_float = convert


def test_products_in_the_interpreter():
    interpreted(__file__)


if __name__ == "__main__":
    from flashinfer_backend.ops import triton_fp8

    triton_fp8.NATIVE = False
    exact_conversions()
    for case in CASES:
        run_case(*case)
    for chosen in every_tiling():
        run_tiling(*chosen)
