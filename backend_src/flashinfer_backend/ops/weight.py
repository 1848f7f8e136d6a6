# SPDX-License-Identifier: Apache-2.0
"""Weights of matrix products, which know what they are for and how they are stored.

A format says which tensors of a checkpoint a weight is made of, and what its product is, in plain torch.
ops.cuda_fp8, ops.cuda_int4 and ops.cuda_experts compute the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashinfer_backend.core.shard import Part
from flashinfer_backend.core.tuned import Role
from flashinfer_backend.ops import fp8, int4, mxfp4

FLOATS = ("F32", "F16", "BF16")
FP8 = ("F8_E4M3",)
INTEGERS = ("I32", "I64")
BYTES = ("U8",)
DUMMY_INPUT_SCALE = 1 / 16  # of random weights: activations up to 28
FILLED = 8192  # rows that are quantised at a time, which takes them in float32


ALL = slice(None)
Reading = Callable[[Tensor], Tensor]  # of a tensor as it is stored


class Stored(NamedTuple):
    """A tensor of a checkpoint: the shapes and safetensors types it may have, who takes its value, and what
    of it, a slice of each dimension (of dimensions of size 1, and those without a slice: all).

    `take` raises ValueError saying what is wrong with the values. optional: a checkpoint may lack it.
    fills: what of the model, for readers. instead: names of tensors that this one has in it.
    elsewhere: other ranks alone read it.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    take: Callable[[Tensor], object]
    cuts: tuple[slice, ...] = ()
    optional: bool = False
    fills: str = ""
    instead: tuple[str, ...] = ()
    elsewhere: bool = False

    @classmethod
    def into(cls, target: Tensor) -> Stored:
        """All of a tensor of the target's shape."""
        return cls((tuple(target.shape),), FLOATS, target.copy_)

    @classmethod
    def part_into(cls, target: Tensor, part: Part, dtypes: tuple[str, ...] = FLOATS) -> Stored:
        """A part of a tensor, of the target's shape."""
        return cls((part.whole,), dtypes, target.copy_, (part.rows, part.columns))

    def and_then(self, other: Stored) -> Stored:
        """For a tensor that two parts of a weight are made of: all of it is read, and each takes its own."""

        def take(found: Tensor) -> None:
            for each in (self, other):
                each.take(found[each.cut(tuple(found.shape))] if found.dim() else found)

        optional, fills = self.optional and other.optional, f"{self.fills}; {other.fills}"
        return Stored(self.shapes, self.dtypes, take, optional=optional, fills=fills)

    def cut(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """What to read of a tensor of this shape."""
        cuts = self.cuts + (ALL,) * len(shape)
        return tuple(cut if size > 1 else ALL for cut, size in zip(cuts, shape, strict=False))


class LowRank(NamedTuple):
    """What adapters add to a product x[T, K] -> [T, N], each in one of S places: up @ (down @ x), of ranks up
    to R (https://arxiv.org/abs/2106.09685). A product's rows are those of P modules in their order.
    Each module has its matrix `down`; ends: their last rows + 1. Lower ranks are padded with zeros."""

    down: Tensor  # [S, P, R, K]
    up: Tensor  # [S, N, R]
    ends: tuple[int, ...]


class Chosen(NamedTuple):
    """Each token's adapter. places: int32 [T], of S; -1: none. distinct: int32 [1 + L], L = min(T, S), how
    many different ones there are, these, ascending, and -1 for the rest. Some may be of no token."""

    places: Tensor
    distinct: Tensor

    def of(self, rows: Tensor | slice) -> Chosen:
        """The adapters of some of the tokens."""
        return Chosen(self.places[rows], self.distinct)


class Added(NamedTuple):
    """What adapters will add to a product. inner: float32 [splits, T, P, R], whose sum over splits is down @
    x of each token with an adapter; elsewhere it is undefined."""

    inner: Tensor
    low: LowRank
    chosen: Chosen


class Weight(nn.Module):
    """Stands for a matrix [N, K] of a product x[T, K] @ weight.T. `shape`: [N, K]. `data` [N, K] holds its
    elements (of 4 bits: packed as in ops.int4 or ops.mxfp4), `scale`, `zero` and `order` further tensors of a
    format. `input_scales`: of formats with scales for x, first row of a module -> scale. `adapters`: where
    the engine has room for some."""

    scale: nn.Parameter
    bias: nn.Parameter | None  # [N], of the product
    zero: Tensor | None  # of formats with zero points
    order: Tensor | None  # of the columns, int64 [K], where groups are of columns that are no neighbours

    def __init__(
        self, role: Role, data: Tensor, format: Format | None = None, scale: Tensor | None = None
    ) -> None:
        super().__init__()
        self.role, self.format = role, format or DENSE
        self.data = data if isinstance(data, nn.Parameter) else nn.Parameter(data, requires_grad=False)
        if scale is not None:
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.shape: tuple[int, int] = (data.shape[0], data.shape[1])
        self.register_parameter("bias", None)
        self.register_buffer("zero", None)
        self.register_buffer("order", None)
        self.adapters: LowRank | None = None
        self.input_scales: dict[int, float] = {}
        self.group_indices: dict[int, Tensor] = {}  # first row of a module -> each column's group, to finish

    @classmethod
    def empty(
        cls, role: Role, shape: tuple[int, int], format: str, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """An empty weight of a format in FORMATS. dtype: the type of dense weights."""
        return FORMATS[format].empty(role, shape, dtype, device)

    def part(self, index: int, count: int) -> Weight:
        """One of `count` weights of equal size that are stored below each other, in the same memory; not
        of formats with input_scales."""

        def own(stored: Tensor) -> Tensor:
            rows = len(stored) // count
            return stored[index * rows : (index + 1) * rows]

        by_column = isinstance(self.format, Int4)
        scale = getattr(self, "scale", None)
        if scale is not None:
            scale = own(scale.t()).t() if by_column else own(scale)
        part = Weight(self.role, own(self.data), self.format, scale)
        part.order, part.zero = self.order, None if self.zero is None else own(self.zero.t()).t()
        part.shape = self.shape[0] // count, self.shape[1]
        if self.bias is not None:
            part.bias = nn.Parameter(own(self.bias), requires_grad=False)
        return part


class Format(Protocol):
    """How weights are stored, and what that means for their product."""

    name: str

    def empty(self, role: Role, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        """A weight [N, K] whose values are not set; dtype: the model's."""

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        """The tensors of the module of which a part fills these rows, by their last names in a checkpoint."""

    def fill(self, weight: Weight, values: Tensor) -> None:
        """Store a matrix [N, K] of any floating type as this format can."""

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias: x[T, K], bias[N] -> [T, N] in x's dtype."""


class Dense:
    name = "dense"

    def empty(self, role: Role, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        return Weight(role, torch.empty(shape, dtype=dtype, device=device), self)

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

    def empty(self, role: Role, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        elements = torch.empty(shape, dtype=fp8.E4M3, device=device)
        return Weight(role, elements, self, torch.empty(shape[0], device=device))

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        scale, count = weight.scale[rows], part.whole[0]
        shapes = ((), (1,), (count,), (count, 1))
        take = Stored(shapes, FLOATS, lambda found: scale.copy_(_finite(found).reshape(-1)), (part.rows,))
        return {"weight": Stored.part_into(weight.data[rows], part, FP8), "weight_scale": take}

    def fill(self, weight: Weight, values: Tensor) -> None:
        for begin in range(0, len(values), FILLED):
            part = slice(begin, begin + FILLED)
            elements, scale = fp8.quantise_rows(values[part])
            weight.data[part], weight.scale[part] = elements, scale[:, 0]

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

        return {"weight": Stored((part.whole,), FLOATS, take, (part.rows, part.columns))}


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

    def empty(self, role: Role, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        elements = torch.empty(shape, dtype=fp8.E4M3, device=device)
        return Weight(role, elements, self, fp8.empty_block_scales(shape, device))

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        # Stacked modules, and parts of them, begin at whole blocks: Product.check_format.
        data = weight.data[rows]
        own, cut_rows, cut_columns = (
            slice(cut.start // fp8.BLOCK, -(-cut.stop // fp8.BLOCK))
            for cut in (rows, part.rows, part.columns)
        )
        scale, shape = weight.scale[own], tuple(-(-size // fp8.BLOCK) for size in part.whole)
        take = Stored((shape,), FLOATS, lambda found: scale.copy_(_finite(found)), (cut_rows, cut_columns))
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


class Int4:
    """Elements of 4 bits with a scale, and in some layouts a zero point, for each group of a row's columns.

    layout: which tensors a checkpoint has, by LAYOUTS. group: columns of a group; 0: all of a row.
    """

    LAYOUTS = ("awq", "gptq", "gptq_v2", "packed", "packed_zeros")
    GROUPS = (32, 64, 128, 0)

    def __init__(self, layout: str, group: int) -> None:
        self.layout, self.group = layout, group
        self.name = f"int4_{layout}_{group or 'row'}"
        self.zeros = layout != "packed"

    def empty(self, role: Role, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        data = torch.empty(shape[0], shape[1] // 4, dtype=torch.int16, device=device)
        scales = shape[1] // (self.group or shape[1]), shape[0]  # [groups, N]
        scale = torch.empty(scales, dtype=dtype, device=device)
        weight = Weight(role, data, self, scale)
        weight.shape = shape
        if self.zeros:
            weight.zero = torch.empty(scales, dtype=torch.uint8, device=device)
        return weight

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        # Parts are of whole groups and of whole words of 8 elements: Product.check_format.
        (height, width), device = part.whole, weight.data.device
        data, scale = weight.data[rows], weight.scale[:, rows]
        size = self.group or width
        groups = width // size
        own_groups = slice(part.columns.start // size, -(-part.columns.stop // size))
        row_words, column_words = (slice(cut.start // 8, cut.stop // 8) for cut in (part.rows, part.columns))

        def values(shape: tuple[int, int], unpacked: Reading, *cuts: slice) -> Stored:
            def take(found: Tensor) -> None:
                data.copy_(int4.pack(unpacked(found.to(device))))

            return Stored((shape,), ("I32",), take, cuts)

        def zeros(shape: tuple[int, int], unpacked: Reading, *cuts: slice) -> Stored:
            assert weight.zero is not None
            zero = weight.zero[:, rows]
            return Stored((shape,), ("I32",), lambda x: zero.copy_(unpacked(x.to(device))), cuts)

        def scales(shape: tuple[int, int], read: Reading, *cuts: slice) -> Stored:
            return Stored((shape,), FLOATS, lambda x: scale.copy_(_finite(read(x))), cuts)

        neighbours = torch.arange(weight.shape[1], device=device) // (weight.shape[1] // len(scale))
        weight.group_indices[rows.start] = neighbours

        def index(found: Tensor) -> None:
            if int4.order_of(found, groups) is None:
                return
            if weight.shape[1] < width:
                raise ValueError("puts columns of several ranks into one group; set tensor_parallel_size=1")
            weight.group_indices[rows.start] = found.to(neighbours)

        groups_of_columns = Stored(((width,),), INTEGERS, index, optional=True)
        if self.layout == "awq":
            return {
                "qweight": values(
                    (width, height // 8), lambda x: int4.awq_nibbles(x).t(), part.columns, row_words
                ),
                "qzeros": zeros((groups, height // 8), int4.awq_nibbles, own_groups, row_words),
                "scales": scales((groups, height), lambda x: x, own_groups, part.rows),
            }
        if self.layout in ("gptq", "gptq_v2"):
            # The first version stores zero points less one. Its writers subtract from whole words, with
            # borrow, so adding to whole words gives back every one.
            more = 0x11111111 if self.layout == "gptq" else 0
            return {
                "qweight": values(
                    (width // 8, height), lambda x: int4.nibbles_of_rows(x).t(), column_words, part.rows
                ),
                "qzeros": zeros(
                    (groups, height // 8), lambda x: int4.nibbles(x + more), own_groups, row_words
                ),
                "scales": scales((groups, height), lambda x: x, own_groups, part.rows),
                "g_idx": groups_of_columns,
                # Some writers add one to modules that have none.
                "bias": Stored(((height,),), FLOATS, _all_zero, optional=True),
            }
        found = {
            "weight_packed": values((height, width // 8), int4.nibbles, part.rows, column_words),
            "weight_scale": scales((height, groups), lambda x: x.t(), part.rows, own_groups),
            "weight_shape": Stored(((2,),), INTEGERS, lambda x: _is_shape(x, part.whole)),
            "weight_g_idx": groups_of_columns,
        }
        if self.zeros:
            found["weight_zero_point"] = zeros(
                (height // 8, groups), lambda x: int4.nibbles_of_rows(x).t(), row_words, own_groups
            )
        return found

    def finish(self, weight: Weight) -> None:
        """Bring each group's columns together, once all tensors of a weight are taken. Raises ValueError
        where its modules have other groups."""
        found, weight.group_indices = weight.group_indices, {}
        index = next(iter(found.values()))
        if any(not torch.equal(index, other) for other in found.values()):
            raise ValueError("put columns into other groups than their neighbours, which read the same x")
        order = int4.order_of(index, len(weight.scale))
        if order is not None:
            weight.data.copy_(int4.pack(int4.unpack(weight.data)[:, order]))
            weight.order = order

    def fill(self, weight: Weight, values: Tensor) -> None:
        elements, scale, zero = int4.quantise(values, len(weight.scale), symmetric=not self.zeros)
        weight.data.copy_(int4.pack(elements))
        weight.scale.copy_(scale)
        if weight.zero is not None:
            weight.zero.copy_(zero)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        ordered = x if weight.order is None else x[:, weight.order]
        matrix = int4.dequantise(weight.data, weight.scale, weight.zero)
        return _result(F.linear(ordered.float(), matrix), x, bias)


class Mxfp4:
    """ops.mxfp4, of experts that are stacked in a checkpoint's tensors."""

    name = "mxfp4"

    def empty(self, role: Role, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Weight:
        rows, groups = shape[0], shape[1] // mxfp4.GROUP
        packed = -(-shape[1] // mxfp4.PACKED) * mxfp4.PACKED // 2
        data = torch.empty(rows, packed, dtype=torch.uint8, device=device)
        apart = -(-groups // mxfp4.ALIGNED) * mxfp4.ALIGNED
        scale = torch.zeros(rows, apart, dtype=torch.uint8, device=device)[:, :groups]
        weight = Weight(role, data, self, scale)
        weight.shape = shape
        return weight

    def reads(self, weight: Weight, rows: slice, part: Part) -> dict[str, Stored]:
        raise NotImplementedError("Product.check_format refuses matrices that are not stacked")

    def take_elements(self, weight: Weight, blocks: Tensor) -> None:
        """blocks: uint8 [N, K / 32, 16], two neighbours in a byte, the first in its lowest 4 bits."""
        weight.data.copy_(mxfp4.pack(mxfp4.neighbours(blocks)))

    def take_scales(self, weight: Weight, scales: Tensor) -> None:
        """scales: uint8 [N, K / 32]. Raises ValueError where one is too large, or none."""
        if bool((scales > mxfp4.LARGEST).any()):
            raise ValueError(f"has scales above {mxfp4.LARGEST} (2.0), which are not computed")
        weight.scale.copy_(scales)

    def fill(self, weight: Weight, values: Tensor) -> None:
        elements, scales = mxfp4.quantise(values)
        weight.data.copy_(elements)
        weight.scale.copy_(scales)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return _result(F.linear(x.float(), mxfp4.dequantise(weight.data, weight.scale)), x, bias)


def _all_zero(found: Tensor) -> None:
    if bool(found.count_nonzero()):
        raise ValueError("is not zero, but config.json describes a model without it")


def _is_shape(found: Tensor, shape: tuple[int, int]) -> None:
    if tuple(found.tolist()) != shape:
        raise ValueError(f"says {found.tolist()}, config.json asks for {list(shape)}")


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
_ALL: tuple[Format, ...] = (
    DENSE,
    Fp8Token(),
    Fp8Static(),
    Fp8OnLoad(),
    Fp8Block("fp8_block", "weight_scale_inv"),
    Fp8Block("fp8_block_scale", "weight_scale"),
    Mxfp4(),
    *(Int4(layout, group) for layout in Int4.LAYOUTS for group in Int4.GROUPS),
)
FORMATS: dict[str, Format] = {format.name: format for format in _ALL}
