# SPDX-License-Identifier: Apache-2.0
"""Weights of matrix products, which know what they are for and how they are stored.

A format says which tensors of a checkpoint a weight is made of, and what its product is, in plain torch.
ops.cuda_fp8 computes the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashinfer_backend.core.shard import Part
from flashinfer_backend.core.tuned import Role
from flashinfer_backend.ops import fp8

FLOATS = ("F32", "F16", "BF16")
FP8 = ("F8_E4M3",)
DUMMY_INPUT_SCALE = 1 / 16  # of random weights: activations up to 28


ALL = slice(None)


class Stored(NamedTuple):
    """A tensor of a checkpoint: the shapes and safetensors types it may have, who takes its value, and which
    rows and columns of it (of dimensions of size 1: all).

    `take` raises ValueError saying what is wrong with the values.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    take: Callable[[Tensor], object]
    rows: slice = ALL
    columns: slice = ALL

    @classmethod
    def into(cls, target: Tensor, dtypes: tuple[str, ...] = FLOATS) -> Stored:
        """All of a tensor of the target's shape."""
        return cls((tuple(target.shape),), dtypes, target.copy_)

    @classmethod
    def part_into(cls, target: Tensor, part: Part, dtypes: tuple[str, ...] = FLOATS) -> Stored:
        """A part of a tensor, of the target's shape."""
        return cls((part.whole,), dtypes, target.copy_, part.rows, part.columns)

    def cut(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """What to read of a tensor of this shape."""
        dimensions = zip((self.rows, self.columns), shape, strict=False)
        return tuple(part if size > 1 else ALL for part, size in dimensions)


class Weight(nn.Module):
    """Stands for a matrix [N, K] of a product x[T, K] @ weight.T. `data` [N, K] holds its elements, `scale`
    what a format has beside. `input_scales`: of formats with scales for x, first row of a module -> scale."""

    scale: nn.Parameter

    def __init__(
        self,
        role: Role,
        data: Tensor,
        format: Format | None = None,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.role, self.format = role, format or DENSE
        self.data = data if isinstance(data, nn.Parameter) else nn.Parameter(data, requires_grad=False)
        if scale is not None:
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.input_scales: dict[int, float] = {}

    @classmethod
    def empty(
        cls, role: Role, shape: tuple[int, int], format: str, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Of a format named in FORMATS, not yet filled. dtype: of dense weights."""
        kind = FORMATS[format]
        elements = fp8.E4M3 if kind.scales(shape) else dtype
        scale = torch.empty(kind.scales(shape), device=device) if kind.scales(shape) else None
        return cls(role, torch.empty(shape, dtype=elements, device=device), kind, scale)


class Format(Protocol):
    """How weights are stored, and what that means for their product."""

    name: str

    def scales(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the float32 scales of a weight [N, K] in e4m3; () for weights of the model's dtype."""

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        """The tensors of the module of which a part fills these rows, by their last names in a checkpoint."""

    def fill(self, weight: Weight, values: Tensor) -> None:
        """Store a matrix [N, K] of any floating type as this format can."""

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias: x[T, K], bias[N] -> [T, N] in x's dtype."""


class Dense:
    name = "dense"

    def scales(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return ()

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        return {"weight": Stored.part_into(weight.data[rows], part)}

    def fill(self, weight: Weight, values: Tensor) -> None:
        weight.data.copy_(values)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight.data, bias)


class Fp8Token:
    """A scale for each row of the weight (a checkpoint's one for all rows of a module is repeated, which is
    exact) and for each token, of that token's largest magnitude."""

    name = "fp8_token"

    def scales(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return shape[:1]

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        scale, count = weight.scale[rows], part.whole[0]
        shapes = ((), (1,), (count,), (count, 1))
        take = Stored(shapes, FLOATS, lambda found: scale.copy_(_finite(found).reshape(-1)), part.rows)
        return {"weight": Stored.part_into(weight.data[rows], part, FP8), "weight_scale": take}

    def fill(self, weight: Weight, values: Tensor) -> None:
        elements, scale = fp8.quantise_rows(values)
        weight.data.copy_(elements)
        weight.scale.copy_(scale[:, 0])

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        elements, scale = fp8.quantise_rows(x)
        product = F.linear(elements.float(), weight.data.float()) * scale * weight.scale
        return _result(product, x, bias)


class Fp8OnLoad(Fp8Token):
    """Fp8Token, made from weights of 16 or 32 bits while they are read."""

    name = "fp8_on_load"

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        data, scale = weight.data[rows], weight.scale[rows]

        def take(found: Tensor) -> None:
            elements, scales = fp8.quantise_rows(found.to(data.device))
            data.copy_(elements)
            scale.copy_(scales[:, 0])

        return {"weight": Stored((part.whole,), FLOATS, take, part.rows, part.columns)}


class Fp8Static(Fp8Token):
    """Fp8Token, but x is divided by a scale that the checkpoint has for each module, whatever the token."""

    name = "fp8_static"

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        def take(found: Tensor) -> None:
            weight.input_scales[rows.start] = positive(found)

        return super().reads(weight, rows, part) | {"input_scale": Stored(((), (1,)), FLOATS, take)}

    def fill(self, weight: Weight, values: Tensor) -> None:
        super().fill(weight, values)
        weight.input_scales[0] = DUMMY_INPUT_SCALE

    def parts(self, weight: Weight) -> list[tuple[slice, float]]:
        """Rows whose x has the same scale, in order. Modules that read the same x mostly have one."""
        starts: list[tuple[int, float]] = []
        for start, scale in sorted(weight.input_scales.items()):
            if not starts or starts[-1][1] != scale:
                starts.append((start, scale))
        ends = [start for start, _ in starts[1:]] + [len(weight.data)]
        return [(slice(start, end), scale) for (start, scale), end in zip(starts, ends, strict=True)]

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        products = [
            F.linear(fp8.to_e4m3(x, scale).float(), weight.data[rows].float()) * scale
            for rows, scale in self.parts(weight)
        ]
        return _result(torch.cat(products, dim=-1) * weight.scale, x, bias)


class Fp8Block:
    """A scale for each 128x128 block of the weight, and for each 128 neighbours of a token's values."""

    def __init__(self, name: str, scale_name: str) -> None:
        self.name, self._scale_name = name, scale_name

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // fp8.BLOCK) for size in shape)

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        # Modules beside each other, and parts of them, begin at whole blocks: ModelConfig.check_formats.
        data = weight.data[rows]
        first, (blocks, _) = rows.start // fp8.BLOCK, self.scales(data.shape)
        scale = weight.scale[first : first + blocks]
        cuts = (slice(cut.start // fp8.BLOCK, -(-cut.stop // fp8.BLOCK)) for cut in (part.rows, part.columns))
        shapes = (self.scales(part.whole),)
        take = Stored(shapes, FLOATS, lambda found: scale.copy_(_finite(found)), *cuts)
        return {"weight": Stored.part_into(data, part, FP8), self._scale_name: take}

    def fill(self, weight: Weight, values: Tensor) -> None:
        elements, scale = fp8.quantise_blocks(values)
        weight.data.copy_(elements)
        weight.scale.copy_(scale)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        rows, inner = weight.data.shape
        elements, scale = fp8.quantise_groups(x)
        product = F.linear(
            elements.float() * fp8.spread(scale, inner),
            weight.data.float() * fp8.spread(weight.scale, inner, rows),
        )
        return _result(product, x, bias)


def _result(product: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return (product if bias is None else product + bias.float()).to(x.dtype)


def _finite(found: Tensor) -> Tensor:
    if not bool(found.isfinite().all()):
        raise ValueError("has scales that are not finite")
    return found


def positive(found: Tensor) -> float:
    """The number in a tensor of one. Raises ValueError unless it is finite and above 0."""
    value = float(found)
    if not 0 < value < float("inf"):
        raise ValueError(f"is {value}; a scale should be finite and above 0")
    return value


DENSE = Dense()
FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        DENSE,
        Fp8Token(),
        Fp8Static(),
        Fp8OnLoad(),
        Fp8Block("fp8_block", "weight_scale_inv"),
        Fp8Block("fp8_block_scale", "weight_scale"),
    )
}
