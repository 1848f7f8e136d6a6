# SPDX-License-Identifier: Apache-2.0
"""The kernels that are searched, as cases of search.py: sizes, candidates and neighbours of each. Nothing
here needs a GPU."""

import itertools
from typing import Any, get_args

from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import (
    GATED,
    LARGEST_CLUSTER,
    BlockTile,
    DecodeAttention,
    ExpertBlock,
    ExpertTile,
    Int4Tile,
    Role,
    RowGroups,
    RowTile,
    Scales,
    Shape,
    Tiling,
    Tuned,
)
from flashinfer_backend.models.spec import ModelSpec, Product
from flashinfer_backend.ops.int4_linear import TILES
from flashinfer_backend.ops.tilings import untuned_int4
from flashinfer_backend.tune.search import Case, Kind, is_gated

SMS = 132  # that candidates should fill: an H200's
# Tokens of the steps for which fields are chosen, by table. Products up to the first of "cublas" are not
# compared: cuBLAS has few of them.
Sizes = dict[str, tuple[int, ...]]
FULL: Sizes = {
    "linear": (1, 8, 16, 32, 64, 128, 256),
    "linear_fp8": (1, 8, 16, 32, 64, 128, 256),
    "linear_blocks": (1, 8, 16, 32, 64),
    "blocks_linear": (1, 8, 16, 32),
    "blocks_fp8": (1, 16, 32, 64, 128, 256, 512, 1024, 4096),
    "int4": (1, 8, 16, 32, 48, 64, 128, 256),
    "cublas": (64, *range(80, 513, 16), *range(544, 1025, 32)),
    "experts": (1, 16, 64, 128, 256, 1024, 4096, 8192),
    "decode_attention": (1, 8, 16, 32, 48, 64, 128, 256, 1024),
}
QUICK: Sizes = {
    "linear": (8, 64),
    "linear_fp8": (8, 64),
    "linear_blocks": (8, 64),
    "blocks_linear": (8, 32),
    "blocks_fp8": (16, 64, 1024),
    "int4": (8, 64),
    "cublas": (64, 80, 96, 128, 192, 256, 384, 512, 1024),
    "experts": (16, 256),
    "decode_attention": (8, 64),
}


def kind_of_gated(spec: ModelSpec) -> Kind | None:
    """Which numbers of the gated kernel a model's gate and up products say something of."""
    formats = {product.format for product in spec.products if product.gated and not product.experts}
    if formats == {"dense"}:
        return "dense"
    by_rows = formats and all(each.startswith("fp8") and not each.startswith("fp8_block") for each in formats)
    return "rows" if by_rows else None


def of_model(spec: ModelSpec, sizes: Sizes, numbers: Tuned, gated: bool, teams: bool = False) -> list[Case]:
    """The cases of a model's products, by role and shape. gated: the gated kernel is measured as well; else
    gate and up have only sizes that it does not take. teams: ops.mxfp4_experts can compute its experts.
    Raises ValueError for products of one role in several formats."""
    found: list[Case] = []
    products = [product for product in spec.products if product.role and not product.experts]
    for product in {(product.role, product.shape): product for product in products}.values():
        if others := {each.format for each in products if each.role == product.role} - {product.format}:
            formats = ", ".join(sorted({product.format, *others}))
            raise ValueError(f"the {product.role} weights have several formats: {formats}")
        cases = _of_product(product, sizes, None if gated else numbers)
        known = {(case.table, case.key, case.shape) for case in found}  # one for all shapes may be there
        found += [case for case in cases if (case.table, case.key, case.shape) not in known]
    if (mlp := spec.experts) is not None:
        (format,) = {product.format for product in spec.products if product.experts}
        found.append(of_experts(format, mlp.count, mlp.per_token, sizes["experts"], teams))
    return found


def _of_product(product: Product, sizes: Sizes, numbers: Tuned | None) -> list[Case]:
    role, shape, name = product.role, product.shape, f"{product.role} {list(product.shape)}"
    if product.format.startswith("int4"):
        return [
            Case(
                name, "int4", role, shape, sizes["int4"],
                lambda tokens: [None, *int4_tiles(shape, tokens)], other="written out",
            )
        ]  # fmt: skip
    by_blocks = product.format.startswith("fp8_block")  # by either name of their scales
    table = "linear_blocks" if by_blocks else "linear" if product.format == "dense" else "linear_fp8"
    chosen = sizes[table]
    if numbers is not None and product.gated and not by_blocks:
        kind: Kind = "dense" if table == "linear" else "rows"
        chosen = tuple(tokens for tokens in chosen if not is_gated(numbers, kind, tokens))
    linear = Case(
        name, table, role, shape, chosen,
        lambda tokens: [None, *seeds(role, shape, tokens, table)],
        lambda tiling, tokens: neighbours(tiling, role, shape, tokens, table),
        other="another kernel" if by_blocks else "cuBLAS",
    )  # fmt: skip
    if by_blocks:
        # First, so that a tiling is compared with the best of these.
        tiles = Case(
            f"{name}, blocks", "blocks_fp8", role, None, sizes["blocks_fp8"],
            lambda tokens: block_tiles(shape, tokens, sizes["blocks_fp8"][0]), whole=True,
        )  # fmt: skip
        # Last, as the table that is looked at first.
        rows = Case(
            f"{name}, CUDA", "blocks_linear", role, shape, sizes["blocks_linear"],
            lambda tokens: [None, *row_tiles(shape)], other="another kernel",
        )  # fmt: skip
        return [tiles, linear, rows]
    if table == "linear_fp8" or role not in BY_CUBLAS:
        return [linear]
    first, *_ = sizes["cublas"]
    interface = Case(
        f"{role} {list(shape)}, cuBLAS", "cublas", "16 bits", shape, sizes["cublas"],
        lambda tokens: [None] if tokens == first else [None, "cublasLt"], other="PyTorch's default",
    )  # fmt: skip
    return [linear, interface]


# Products in 16 bits, and in e4m3 with scales by row.

NORMED: tuple[Role, ...] = ("qkv", GATED, "head", "ba")  # the products that a norm can be part of
BY_CUBLAS: tuple[Role, ...] = ("qkv", "o", "down")  # without an activation
# What a search tries in each field of a tiling: the neighbours of its value.
FIELDS: dict[str, tuple[Any, ...]] = {
    "rows": (32, 64, 128),
    "inner": (64, 128, 256),
    "split": (1, 2, 4),
    "stages": (2, 3, 4, 5, 6),
    "warps": (4, 8),
    "swap": (False, True),
    "prefetch": (0, 32768, 65536, 131072),
    "fuse_norm": (False, True),
}
# The same of products in e4m3: as many bytes are twice the numbers, and a norm goes with quantising.
FP8_FIELDS = FIELDS | {
    "inner": (128, 256, 512, 1024),
    "split": (1, 2, 4, 8),
    "fuse_norm": (True,),
    "quantise": (False, True),
}
FIELDS_OF = {
    "linear": FIELDS,
    "linear_fp8": FP8_FIELDS,
    "linear_blocks": FP8_FIELDS | {"inner": (128,), "stages": (2, 3, 4, 5, 6, 8)},
}
FEW = 16  # tokens, up to which a product in e4m3 may begin with quantising


def seeds(role: Role, shape: Shape, tokens: int, table: str) -> list[Tiling]:
    """What the devices' files take for `tokens`, and a plain tiling; in e4m3 also with quantising in it, and
    with blocks also what scales by row take."""
    files = [tuned.read(path) for path in sorted(tuned.FOLDER.glob("*.json"))]
    tables = [table, "linear_fp8"] if table == "linear_blocks" else [table]
    entries = [entry for file in files for name in tables for entry in getattr(file, name).get(role, ())]
    known = [tiling for entry in entries for limit, tiling in entry.steps if limit == tokens and tiling]
    known.append(Tiling(min(max(1 << (tokens - 1).bit_length(), 16), 128), 64, 128))
    if table == "linear_blocks":
        known = [replace(tiling, inner=128) for tiling in known]
    if table != "linear" and tokens <= FEW:
        tile = 1 if tokens == 1 else 16
        known += [replace(tiling, tokens=tile, quantise=True) for tiling in known]
    return [tiling for tiling in dict.fromkeys(known) if possible(tiling, role, shape, tokens, table)]


def neighbours(tiling: Tiling, role: Role, shape: Shape, tokens: int, table: str = "linear") -> list[Tiling]:
    """Tilings that differ in one field, by one step."""
    found = []
    for name, values in FIELDS_OF[table].items():
        now = getattr(tiling, name)
        less, more = [v for v in values if v < now], [v for v in values if v > now]
        for other in (*less[-1:], *more[:1]):
            found.append(replace(tiling, **{name: other}))
    return [other for other in found if possible(other, role, shape, tokens, table)]


def possible(tiling: Tiling, role: Role, shape: Shape, tokens: int, table: str = "linear") -> bool:
    """Whether ops.triton_linear can compute a product of `tokens` so."""
    fp8, gated = table != "linear", role == GATED
    normed = role in NORMED and not fp8
    if not normed and not tiling.fuse_norm:  # without a norm the field means nothing
        return False
    if tiling.quantise and not (fp8 and tokens <= FEW):
        return False
    return tiling.fits(shape, gated, tokens) and (tiling.split == 1 or not gated)


# Products in e4m3 with 128x128 blocks.

# Tiles of a product times the parts of a split: for half of the SMs, eight for each SM
FEWEST_TILES, MOST_TILES = 64, 8 * SMS
PARTS_PAY = 256  # tokens; the parts of a split of more are too many bytes


def block_tiles(shape: Shape, tokens: int, smallest: int = 1) -> list[BlockTile | None]:
    """Tiles enough for the SMs, and splits where it takes some; above `smallest` tokens cuBLAS as well, which
    cannot take all weights."""
    few, groups = tokens <= 64, shape[1] // 128
    sizes = [max(16, 1 << (tokens - 1).bit_length())] if few else [64, 128]
    found: list[BlockTile | None] = [None] if tokens > smallest else []
    for size, rows in itertools.product(sizes, (64, 128)):
        tiles = -(-shape[0] // rows) * -(-tokens // size)
        most = MOST_TILES if few else MOST_TILES // 2 if tokens <= PARTS_PAY else 0
        splits = [split for split in (1, 2, 4, 8) if groups % split == 0 and tiles * split <= most] or [1]
        splits = [split for split in splits if tiles * split >= FEWEST_TILES] or splits[-1:]
        forms = [(4, 4), (6, 4), (4, 8)] if few else [(3, 4), (3, 8), (4, 8)]
        # At most 64 sums, and at least 8, in the registers of a thread.
        forms = [form for form in forms if 256 <= rows * size // form[1] <= 2048]
        found += [BlockTile(size, rows, split, *form) for split in splits for form in forms]
    return found


def row_tiles(shape: Shape) -> list[RowTile]:
    """Tiles of the CUDA kernel with which at least two fifths of the SMs read weights, and splits for two
    blocks an SM at most."""
    found = []
    for groups, split in itertools.product(get_args(RowGroups), (1, 2, 3, 4, 6, 8)):
        tile, blocks = RowTile(groups, split), shape[0] // (64 * groups) * split
        if tile.fits(shape) and blocks >= SMS * 2 // 5 and (split == 1 or blocks <= 2 * SMS):
            found.append(tile)
    return found


# Products with weights of 4 bits.


def int4_tiles(shape: Shape, tokens: int) -> list[Int4Tile]:
    """Tiles of the CUDA kernel: the rule's, and those of 2 to 8 warps a block, of which an SM gets 4 to 32,
    with at most a third more tokens than the smallest that has room for all. From 48 tokens on with every
    split: few of the large tiles fill the SMs."""
    rule = untuned_int4(tokens, *shape)
    found = [rule] if rule else []
    sizes = [tile_tokens for tile_tokens, *_ in TILES]
    size = min((each for each in sizes if each >= tokens), default=max(sizes))
    splits, depths = ((1, 2, 4, 8), (2, 3, 4)) if size <= 32 else (range(1, LARGEST_CLUSTER + 1), (2, 3))
    for (tile_tokens, warp_rows, row_warps), warps, split, stages in itertools.product(
        TILES, (2, 4, 8), splits, depths
    ):
        teams = max(1, warps // row_warps)
        tile = Int4Tile(tile_tokens, warp_rows, row_warps, teams, split, stages)
        programs = shape[0] // (warp_rows * row_warps) * -(-tokens // tile_tokens) * split
        parts = shape[1] // 128 // split // teams
        if not size <= tile_tokens <= size * 4 / 3 or not tile.fits(shape) or teams * row_warps != warps:
            continue
        if parts > 1 and 4 <= programs * warps / SMS <= 32:
            found.append(tile)
    return list(dict.fromkeys(found))


# Mixtures of experts. By tokens of a tile: rows, inner, stages, warps. In FP8 as many columns take half of
# the memory.
FEW_BLOCKS = [
    (32, 128, 4, 4), (32, 128, 6, 4), (32, 256, 3, 4), (64, 64, 6, 4), (64, 128, 3, 4), (64, 128, 4, 4),
    (64, 128, 5, 4), (64, 256, 2, 4), (64, 256, 3, 4), (128, 64, 4, 4), (128, 128, 3, 4), (128, 128, 3, 8),
]  # fmt: skip
MORE_BLOCKS = [
    (64, 64, 4, 4), (64, 64, 5, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 3, 4), (128, 64, 4, 4),
    (128, 64, 4, 8), (128, 128, 2, 8),
]  # fmt: skip
MANY_BLOCKS = [
    (64, 64, 4, 4), (64, 64, 4, 8), (64, 128, 3, 8), (128, 64, 3, 4), (128, 64, 3, 8), (128, 64, 4, 8),
    (128, 128, 2, 8), (256, 64, 2, 8),
]  # fmt: skip
FEW_IN_FP8 = [
    (32, 128, 4, 4), (32, 128, 6, 4), (32, 256, 4, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4),
    (64, 256, 3, 4), (64, 256, 4, 4), (128, 128, 3, 4), (128, 128, 4, 8), (128, 256, 2, 8),
]  # fmt: skip
MORE_IN_FP8 = [
    (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (64, 256, 3, 4), (128, 128, 3, 4), (128, 128, 3, 8),
    (128, 128, 4, 8),
]  # fmt: skip
MANY_IN_FP8 = [
    (64, 128, 3, 4), (64, 128, 3, 8), (64, 128, 4, 8), (128, 64, 4, 8), (128, 128, 2, 8), (128, 128, 3, 8),
    (128, 128, 4, 8),
]  # fmt: skip
BLOCKS = {16: FEW_BLOCKS, 32: FEW_BLOCKS, 64: MORE_BLOCKS, 128: MANY_BLOCKS}
BLOCKS_IN_FP8 = {16: FEW_IN_FP8, 32: FEW_IN_FP8, 64: MORE_IN_FP8, 128: MANY_IN_FP8}


def of_experts(format: str, count: int, per_token: int, sizes: tuple[int, ...], teams: bool = False) -> Case:
    """A layer's experts: first each size's gate and up, then down for the fastest of these. teams: as in
    of_model."""
    kinds: dict[str, Scales] = {"dense": "none", "mxfp4": "mxfp4", "int4": "int4", "fp8_block": "blocks"}
    scales: Scales = next((kind for begin, kind in kinds.items() if format.startswith(begin)), "rows")

    def candidates(tokens: int) -> list[ExpertTile]:
        pairs, found = tokens * per_token / count, []
        for size in BLOCKS:
            if size == 16 > pairs or pairs / 4 <= size <= 4 * pairs or size == 128 < pairs:
                blocks = expert_blocks(size, scales)
                start = next(block for block in blocks if block.rows <= 64)
                found += [ExpertTile(size, block, start) for block in blocks]
                if teams:
                    found += [ExpertTile(size, start, start, n) for n in tuned.TEAMS.get(size, ())]
        return found

    def downs(tile: ExpertTile, tokens: int) -> list[ExpertTile]:
        if tile.teams:
            return [tile]
        return [replace(tile, down=block) for block in expert_blocks(tile.tokens, scales)]

    def limit(tokens: int) -> int:
        return tokens * per_token // count

    # Of sizes with as many tokens an expert, the table has the largest.
    sizes = tuple({limit(tokens): tokens for tokens in sizes}.values())
    name = f"{count} experts, {scales}"
    return Case(name, "experts", scales, None, sizes, candidates, downs, limit, whole=True, other="none")


def expert_blocks(tokens: int, scales: Scales) -> list[ExpertBlock]:
    """Those for a tile of `tokens`; with scales of 128x128 blocks no more rows, and one inner."""
    found = [ExpertBlock(*block) for block in (BLOCKS if scales == "none" else BLOCKS_IN_FP8)[tokens]]
    return [block for block in found if scales != "blocks" or (block.inner == 128 and block.rows <= 128)]


# Decode attention. Block, stages, warps and registers. With 2 stages shared memory holds one block of a
# program, with 3 two and with 4 three; a token has 256 bytes of e4m3. Registers are limited where more
# programs fit an SM then and little is spilled. One warp spills with blocks of 64 tokens, two with 128.
FORMS: tuple[tuple[int, int, int, int | None], ...] = (
    (16, 3, 1, None), (32, 2, 1, None), (32, 3, 1, None), (32, 4, 1, None), (32, 3, 1, 128), (32, 3, 2, None),
    (64, 2, 2, None), (64, 3, 2, None), (64, 4, 2, None), (64, 3, 2, 168), (32, 3, 4, None), (64, 2, 4, None),
    (64, 3, 4, None), (64, 4, 4, None), (64, 3, 4, 128), (128, 2, 4, None), (128, 3, 4, None),
    (128, 4, 4, None), (128, 3, 8, None), (128, 3, 8, 128),
)  # fmt: skip
PROGRAMS = {1: (4, 6, 8, 12), 2: (2, 4, 8), 4: (2, 4, 8), 8: (1, 2, 4)}  # for each SM, by warps
SHORT = 64  # rows, up to which programs are short: what they load before they may begin counts


def of_decode_attention(cache: tuned.Cache, sizes: tuple[int, ...]) -> Case:
    """The decode kernel over a cache; its tokens are rows."""
    name = f"decode attention, {cache}"
    return Case(name, "decode_attention", cache, None, sizes, decode_forms, whole=True, other="none")


def decode_forms(rows: int) -> list[DecodeAttention]:
    """Forms worth a try for `rows`."""
    found = []
    for block, stages, warps, registers in FORMS:
        few, *more = PROGRAMS[warps]
        for programs in (few, *more) if rows <= SHORT else more:
            for prefetch in (16, 64) if rows <= SHORT else (16,):
                merge = 4 if warps == 1 else 8
                found.append(DecodeAttention(block, stages, warps, prefetch, merge, programs, registers))
    return found
