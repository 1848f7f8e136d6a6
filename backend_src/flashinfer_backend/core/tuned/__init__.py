# SPDX-License-Identifier: Apache-2.0
"""Numbers that depend on the GPU: one JSON file a device beside this module, and one for all others.

A file holds a `Tuned`. Its name is the device's, as `slug` writes it: nvidia-h200.json is for "NVIDIA H200".
`python -m flashinfer_backend.tune` measures and writes one; docs/tuning.md tells how. fallback.json is for
devices that nobody has measured: it takes cuBLAS for all products.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

FOLDER = Path(__file__).parent
FALLBACK = "fallback"
PARTIAL_SUMS = 16 << 20  # float32 sums of a split product's parts, at most
SPLIT_BLOCKS = 4096  # output blocks of a split product, at most
LARGEST_CLUSTER = 8  # blocks that every Hopper GPU runs together
LINE = 130  # characters of a line in a file, at most, where values share one

# Under which name a product finds its numbers: queries, keys and values; attention's output; gate and up
# projections; down projection; logits. Products of one role and shape share them.
Role = str
ROLES: tuple[Role, ...] = ("qkv", "o", "gate_up", "down", "head")
GATED: Role = "gate_up"  # whose rows are a gate's and as many of what it multiplies
Shape = tuple[int, int]  # weight [N, K]
# Of a weight: 16 bits have none; e4m3 has one for each row, or for each block of 128x128.
Scales = Literal["none", "rows", "blocks"]


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Tiling(_Data, frozen=True, omit_defaults=True):
    """How ops.triton_linear cuts up one product.

    tokens, rows, inner: the block of x rows, weight rows and inner dimension that a program multiplies at a
    time; tokens is 1, or 16 or more. split: programs that share the inner dimension of one output block.
    stages, warps: depth of the load pipeline and warps per program. swap: the weights are the left
    operand, so that few tokens do not waste the tensor cores' 64 rows. prefetch: bytes of weights that a
    program pulls into L2 before it waits for the previous kernel. early: let the next kernel start
    (and prefetch) at once rather than when the product is done. fuse_norm: a norm of x is part of the
    product; else it is a kernel of its own. quantise, of weights in e4m3 with scales by row: x comes in 16
    bits, and its norm and its scales, computed for each block of `inner` columns, are part of the product;
    else they are a kernel of its own, as always where scales of x are stored.
    """

    tokens: int
    rows: int
    inner: int
    split: int = 1
    stages: int = 4
    warps: int = 4
    swap: bool = True
    prefetch: int = 32768
    early: bool = True
    fuse_norm: bool = True
    quantise: bool = False

    def fits(self, shape: Shape, gated: bool, tokens: int) -> bool:
        """Whether weight[N, K] divides into these blocks, and the parts of a split product of so many tokens,
        with the squares that a norm adds up, have room. gated: the weight's rows are two halves."""
        rows = shape[0] // 2 if gated else shape[0]
        if rows % self.rows or shape[1] % (self.inner * self.split):
            return False
        blocks = rows // self.rows * -(-tokens // self.tokens)
        sums = (tokens * rows + blocks * self.tokens) * self.split
        return self.split == 1 or (sums <= PARTIAL_SUMS and blocks <= SPLIT_BLOCKS)


class BlockTile(_Data, frozen=True, omit_defaults=True):
    """How ops.triton_fp8.block_product cuts up a product with a weight of 128x128 blocks.

    Up to `tokens` tokens, None: all more. tile, rows: tokens and weight rows of a program; rows is 64 or 128.
    split: programs that share the inner dimension of a tile, if it divides into so many groups of 128.
    stages, warps: as in Tiling.
    """

    tokens: int | None
    tile: int
    rows: int
    split: int = 1
    stages: int = 4
    warps: int = 4


class Int4Tile(_Data, frozen=True):
    """How ops.int4_linear cuts up one product.

    tokens: rows of x in a tile, 8 to 64. warp_rows: weight rows of a warp, 32 or 64; row_warps: warps with
    other rows that share the copies of x. teams: groups of such warps in a block of threads, which share
    the inner dimension; split: blocks of a cluster, 1 to 8, which share it, too. stages: depth of the load
    pipeline, 2 to 5. ops.int4_linear.TILES lists which tokens, warp_rows and row_warps there are together.
    """

    tokens: int
    warp_rows: int
    row_warps: int
    teams: int
    split: int
    stages: int

    def __post_init__(self) -> None:
        if not 1 <= self.split <= LARGEST_CLUSTER:
            raise ValueError(f"split of a tile should be 1 to {LARGEST_CLUSTER}, not {self.split}")

    def fits(self, shape: Shape) -> bool:
        """Whether weight[N, K] divides into such tiles."""
        rows, inner = shape
        return not (rows % (self.warp_rows * self.row_warps) or inner % 128) and self.split * 128 <= inner


# For weights that nobody has measured.
BLOCK_TILES = (
    BlockTile(16, 16, 64),
    BlockTile(32, 32, 64),
    BlockTile(64, 64, 64),
    BlockTile(None, 128, 128, stages=3, warps=8),
)


class ExpertBlock(_Data, frozen=True):
    """What a program of one of the two products of experts multiplies, for all tokens of a tile.

    rows: of the weight; of gate and up as many of each. inner, stages, warps: as in Tiling; with scales of
    128x128 blocks inner is 128 in any case.
    """

    rows: int
    inner: int
    stages: int
    warps: int

    def __post_init__(self) -> None:
        for name, least in {"rows": 16, "inner": 32, "warps": 1}.items():
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} should be a power of two of at least {least}, not {value}")


class ExpertTile(_Data, frozen=True):
    """How ops.triton_experts cuts up the products of a mixture of experts.

    Up to `pairs` tokens an expert on average, None: all more. tokens: of a tile, all of one expert; a power
    of two of at least 16. gate_up, down: of the two products.
    """

    pairs: int | None
    tokens: int
    gate_up: ExpertBlock
    down: ExpertBlock

    def __post_init__(self) -> None:
        if self.tokens < 16 or self.tokens & (self.tokens - 1):
            raise ValueError(f"tokens should be a power of two of at least 16, not {self.tokens}")


# For devices whose file has none: an H100's with 128 experts of 768, by perf_configs/kernels/bench_experts.
EXPERT_TILES: dict[Scales, tuple[ExpertTile, ...]] = {
    "none": (
        ExpertTile(4, 16, ExpertBlock(64, 128, 5, 4), ExpertBlock(64, 128, 4, 4)),
        ExpertTile(16, 32, ExpertBlock(64, 128, 4, 4), ExpertBlock(64, 128, 3, 4)),
        ExpertTile(64, 64, ExpertBlock(64, 128, 4, 4), ExpertBlock(128, 64, 4, 8)),
        ExpertTile(None, 128, ExpertBlock(128, 64, 4, 8), ExpertBlock(128, 64, 3, 4)),
    ),
    "rows": (
        ExpertTile(4, 16, ExpertBlock(64, 256, 3, 4), ExpertBlock(64, 128, 4, 4)),
        ExpertTile(16, 32, ExpertBlock(64, 256, 4, 4), ExpertBlock(64, 128, 4, 4)),
        ExpertTile(64, 64, ExpertBlock(64, 128, 3, 4), ExpertBlock(128, 128, 3, 4)),
        ExpertTile(None, 128, ExpertBlock(128, 128, 4, 8), ExpertBlock(64, 128, 3, 4)),
    ),
    "blocks": (
        ExpertTile(4, 16, ExpertBlock(64, 128, 4, 4), ExpertBlock(64, 128, 4, 4)),
        ExpertTile(16, 32, ExpertBlock(64, 128, 3, 4), ExpertBlock(64, 128, 4, 4)),
        ExpertTile(64, 64, ExpertBlock(64, 128, 3, 4), ExpertBlock(128, 128, 3, 4)),
        ExpertTile(None, 128, ExpertBlock(64, 128, 3, 8), ExpertBlock(64, 128, 3, 4)),
    ),
}


class Step(_Data, frozen=True):
    """Up to so many tokens, and beyond the step before, a product takes this tiling; None is cuBLAS."""

    tokens: int
    tiling: Tiling | None


S = TypeVar("S")


class Product(_Data, frozen=True):
    """Steps of one role, by rising tokens; beyond the last, cuBLAS. shape: of the weight, or None for all
    that no other entry names."""

    shape: Shape | None
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        _rising("steps", [step.tokens for step in self.steps])


class Int4Step(_Data, frozen=True):
    """With weights of 4 bits; None writes them out in 16."""

    tokens: int
    tile: Int4Tile | None


class Int4Product(_Data, frozen=True):
    """As Product, with weights of 4 bits; beyond the last step they are written out in 16."""

    shape: Shape | None
    steps: tuple[Int4Step, ...]

    def __post_init__(self) -> None:
        _rising("steps", [step.tokens for step in self.steps])


class Interfaces(_Data, frozen=True):
    """Which of cuBLAS's two interfaces is faster for a weight's shape; each picks kernels by its own rules.

    tokens: the numbers measured; one goes for those from it down to the next smaller one, the first for
    those above `above`. lt: the ones of them for which cublasLt was faster. All others, and all shapes
    without an entry, take PyTorch's default.
    """

    shape: Shape
    above: int
    tokens: tuple[int, ...]
    lt: tuple[int, ...]

    def __post_init__(self) -> None:
        _rising("tokens", [self.above, *self.tokens])
        if not set(self.lt) <= set(self.tokens):
            raise ValueError(f"lt should name some of tokens, not {sorted(set(self.lt) - set(self.tokens))}")


class GatedLinear(_Data, frozen=True):
    """The Hopper kernel of the gate and up products, ops.gated_linear, for weights of 16 bits or in e4m3.

    fewest_tokens: from which on it is used; None: never. wave_us: tokens of a tile -> microseconds of a wave
    of such tiles, one on each SM; only their ratios count. Above many_tokens tokens, tiles have at least
    tile_of_many: smaller ones move the same weights too often, and their power comes off the clock.
    """

    fewest_tokens: int | None
    wave_us: dict[int, float]
    many_tokens: int
    tile_of_many: int

    def __post_init__(self) -> None:
        if not any(tile >= self.tile_of_many for tile in self.wave_us):
            raise ValueError(
                f"wave_us should have a tile of at least tile_of_many={self.tile_of_many} tokens"
            )


class DecodeAttention(_Data, frozen=True, omit_defaults=True):
    """The Triton decode kernel up to `rows` rows, and beyond the entry before; None: for all more.

    block: tokens per step of its loop; stages, warps: pipeline depth and warps of a program; prefetch:
    tokens whose keys and values it pulls into L2 before it waits for the previous kernel; merge: parts of
    a split row added at a time; registers: a thread's, or None for what the assembler picks; programs_per_sm:
    how many rows are split for. block, warps and merge are powers of two, prefetch is one or 0.
    """

    rows: int | None
    block: int
    stages: int
    warps: int
    prefetch: int
    merge: int
    programs_per_sm: int
    registers: int | None = None

    def __post_init__(self) -> None:
        fewest = {"block": 16, "warps": 1, "merge": 1, "prefetch": 0}
        for name, least in fewest.items():
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} should be a power of two of at least {least}, not {value}")
        for name in ("stages", "programs_per_sm"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} should be at least 1, not {getattr(self, name)}")


class PromptAttention(_Data, frozen=True):
    """When prompts take FlashInfer's FA2 instead of FA3 (attention/flashinfer_paged.py).

    short_queries: where prompts have fewer on average, FA3's tiles of 128 are wasted, and FA2 is faster once
    there are more tiles than SMs. few_tiles, long_prefix: fewer tiles over more tokens leave SMs idle, so FA2
    splits them. serial_tokens: a step of more has its decode rows beside its prompts; up to so many, products
    start before the kernel before them has ended, which works along one stream only.

    Over a cache of e4m3, FA3 reads copies in 16 bits. copied_queries: the fewest queries, on average over the
    tokens that they read, that make up for copying these tokens; for fewer FA2, which reads e4m3.
    copied_freely: tokens up to which copying takes next to nothing, whatever the queries.
    """

    short_queries: int
    few_tiles: int
    long_prefix: int
    serial_tokens: int
    copied_queries: int = 64
    copied_freely: int = 1024


class Scheduling(_Data, frozen=True):
    """How the scheduler fills steps (scheduler/budget.py).

    prompts_together: tokens of prompts from which on the device is busy. filled_step: tokens; fewer leave it
    waiting for its weights, from here on a step's time grows with its tokens. pause_tokens: of prompts, for
    which at least pause_rows decode rows sit a step out, up to `pauses` steps in a row; rest: steps with
    decode rows for each without. short_steps: the most over which waiting prompts are spread beside
    pause_rows decode rows, of short_tokens tokens each and only until the first of them has waited for
    short_wait_ms milliseconds; 1: not spread. slow_steps: over how many they are spread evenly instead where
    a step without prompts takes slow_step_ms milliseconds or more, and slow_rows decode rows or more, but
    fewer than slow_tokens, are in it; such steps may have slow_tokens tokens in any case. When the first of
    them has waited for as long as slow_steps such steps take, they are spread over one less; 1: as above.
    """

    prompts_together: int
    filled_step: int
    pause_tokens: int
    pause_rows: int
    pauses: int
    rest: int
    short_steps: int = 1
    short_tokens: int = 256
    short_wait_ms: int = 1000
    slow_step_ms: int = 10
    slow_steps: int = 1
    slow_tokens: int = 192
    slow_rows: int = 16


class Drafts(_Data, frozen=True, omit_defaults=True):
    """The most drafts that each row checks in a step of up to `rows` decode rows, and beyond the entry
    before; None: for all more, or as many as there are."""

    rows: int | None
    most: int | None


class Tuned(_Data, frozen=True, omit_defaults=True):
    """What was measured on one device. measured: with what, as name -> version or remark, for readers.

    fp8_decode_attention: as decode_attention, over a cache of e4m3; None: those hold for it as well.
    fp8_products: as products, of weights in e4m3 with scales by row, whose norm is part of those that
    quantise.
    fp8_scaled_by_cublas: tokens from which on cuBLAS applies the scales of such products that have neither
    activation nor residual behind them; None: never.
    fp8_gated_linear: as gated_linear, of weights in e4m3 with scales by row; None: never.
    fp8_blocks: tiles of products with 128x128 blocks; BLOCK_TILES for other roles.
    fp8_blocks_by_cublas: tokens from which on cuBLAS multiplies with such blocks instead; for roles that are
    not named: never.
    experts: tiles of a mixture of experts by the scales of its weights; EXPERT_TILES without.
    int4: as products, of weights of 4 bits; without, ops.tilings' rules say how they are cut up, and by which
    kernel.
    """

    device: str
    measured: dict[str, str]
    products: dict[Role, tuple[Product, ...]]
    interfaces: tuple[Interfaces, ...]
    gated_linear: GatedLinear
    decode_attention: tuple[DecodeAttention, ...]
    prompt_attention: PromptAttention
    scheduling: Scheduling
    fp8_decode_attention: tuple[DecodeAttention, ...] | None = None
    fp8_products: dict[Role, tuple[Product, ...]] = {}
    fp8_scaled_by_cublas: int | None = None
    fp8_gated_linear: GatedLinear | None = None
    fp8_blocks: dict[Role, tuple[BlockTile, ...]] = {}
    fp8_blocks_by_cublas: dict[Role, Annotated[int, msgspec.Meta(ge=1)]] = {}
    experts: dict[Scales, tuple[ExpertTile, ...]] = {}
    int4: dict[Role, tuple[Int4Product, ...]] = {}
    drafts: tuple[Drafts, ...] = (Drafts(4, None), Drafts(16, 3), Drafts(32, 1), Drafts(None, 0))

    def __post_init__(self) -> None:
        _upwards("decode_attention", "rows", [entry.rows for entry in self.decode_attention])
        if self.fp8_decode_attention is not None:
            _upwards("fp8_decode_attention", "rows", [entry.rows for entry in self.fp8_decode_attention])
        _upwards("drafts", "rows", [entry.rows for entry in self.drafts])
        drafts = [math.inf if entry.most is None else entry.most for entry in self.drafts]
        if drafts != sorted(drafts, reverse=True):
            raise ValueError(f"most of drafts should fall with the rows, not be {drafts}")
        for scales, entries in self.experts.items():
            _upwards(f"experts.{scales}", "pairs", [entry.pairs for entry in entries])
            most = max(block.rows for entry in entries for block in (entry.gate_up, entry.down))
            if scales == "blocks" and most > 128:
                raise ValueError(f"rows of experts.blocks should be at most 128, not {most}")
        for role, tiles in self.fp8_blocks.items():
            _upwards(f"fp8_blocks.{role}", "tokens", [entry.tokens for entry in tiles])
        by_name: dict[str, Mapping[Role, tuple[Product | Int4Product, ...]]] = {
            "products": self.products, "fp8_products": self.fp8_products, "int4": self.int4
        }  # fmt: skip
        named = {
            role
            for by_role in (*by_name.values(), self.fp8_blocks, self.fp8_blocks_by_cublas)
            for role in by_role
        }
        if unknown := sorted(named - set(ROLES)):
            raise ValueError(f"roles of products should be {', '.join(ROLES)}, not {', '.join(unknown)}")
        for name, by_role in by_name.items():
            for role, products in by_role.items():
                shapes = [product.shape for product in products]
                if len(set(shapes)) < len(shapes):
                    raise ValueError(f"{name}.{role} should have one entry a shape, not {shapes}")

    def steps(self, role: Role, shape: Shape, fp8: bool = False) -> tuple[Step, ...]:
        """The steps of a product with weight[N, K] = shape, of 16 bits or of e4m3."""
        products = (self.fp8_products if fp8 else self.products).get(role, ())
        return _of_shape({product.shape: product.steps for product in products}, shape)

    def int4_steps(self, role: Role, shape: Shape) -> tuple[Int4Step, ...]:
        """The same of 4 bits."""
        return _of_shape({product.shape: product.steps for product in self.int4.get(role, ())}, shape)

    def tiling(self, role: Role, tokens: int, shape: Shape, fp8: bool = False) -> Tiling | None:
        """The tiling for weight[N, K] = shape, or None where cuBLAS is faster or the shape does not fit."""
        for step in self.steps(role, shape, fp8):
            if tokens <= step.tokens:
                tiling = step.tiling
                return tiling if tiling and tiling.fits(shape, role == GATED, tokens) else None
        return None

    def block_tiles(self, role: Role) -> tuple[BlockTile, ...]:
        """By rising tokens, of Triton's products with 128x128 blocks."""
        return self.fp8_blocks.get(role, BLOCK_TILES)

    def triton_block_tile(self, role: Role, tokens: int) -> BlockTile:
        """The one of them for so many tokens."""
        tiles = self.block_tiles(role)
        return next(tile for tile in tiles if tile.tokens is None or tokens <= tile.tokens)

    def block_tile(self, role: Role, tokens: int) -> BlockTile | None:
        """The same, or None where cuBLAS multiplies."""
        fewest = self.fp8_blocks_by_cublas.get(role)
        return self.triton_block_tile(role, tokens) if fewest is None or tokens < fewest else None

    def expert_tiles(self, scales: Scales) -> tuple[ExpertTile, ...]:
        """By rising tokens an expert."""
        return self.experts.get(scales, EXPERT_TILES[scales])

    def expert_tile(self, pairs: int, scales: Scales) -> ExpertTile:
        """The one of them for so many tokens an expert on average."""
        tiles = self.expert_tiles(scales)
        return next(tile for tile in tiles if tile.pairs is None or pairs <= tile.pairs)

    def takes_lt(self, shape: Shape, tokens: int) -> bool:
        """Whether x[tokens, K] @ weight.T with weight[N, K] = shape is faster with cublasLt."""
        for entry in self.interfaces:
            if entry.shape == shape and entry.above < tokens <= entry.tokens[-1]:
                return next(size for size in entry.tokens if tokens <= size) in entry.lt
        return False

    def decode_entries(self, fp8: bool) -> tuple[DecodeAttention, ...]:
        """The decode kernel by rising rows, over a cache of 16 bits or of e4m3."""
        return self.fp8_decode_attention if fp8 and self.fp8_decode_attention else self.decode_attention

    def decode(self, rows: int, fp8: bool) -> DecodeAttention:
        """The one of them for so many rows."""
        entries = self.decode_entries(fp8)
        return next(entry for entry in entries if entry.rows is None or rows <= entry.rows)

    def most_drafts(self, rows: int, count: int) -> int:
        """How many of `count` drafts each row checks in a step of so many decode rows."""
        entry = next(entry for entry in self.drafts if entry.rows is None or rows <= entry.rows)
        return count if entry.most is None else min(count, entry.most)


def _upwards(name: str, key: str, limits: list[int | None]) -> None:
    if not limits or limits[-1] is not None:
        raise ValueError(f"the last entry of {name} should have {key} null: it is for all more")
    _rising(f"{key} of {name}", [0 if limit is None else limit for limit in limits[:-1]])


def _of_shape(steps: dict[Shape | None, tuple[S, ...]], shape: Shape) -> tuple[S, ...]:
    return steps.get(shape, steps.get(None, ()))


def _rising(name: str, numbers: list[int]) -> None:
    if sorted(set(numbers)) != numbers:
        raise ValueError(f"{name} should rise, not be {numbers}")


def slug(device: str) -> str:
    """A device's name as the name of its file, without .json."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def load(device: str) -> Tuned | None:
    """The numbers of a device by its name as CUDA gives it, or None if nobody has measured it."""
    path = FOLDER / f"{slug(device)}.json"
    return read(path) if slug(device) != FALLBACK and path.is_file() else None


def fallback() -> Tuned:
    """The numbers for devices that nobody has measured."""
    return read(FOLDER / f"{FALLBACK}.json")


def read(path: Path) -> Tuned:
    """Raises OSError, or ValueError naming the file and what is wrong in it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tuned)
    except ValueError as error:  # msgspec's, too
        raise ValueError(f"{path}: {error}") from None


def write(path: Path, tuned: Tuned) -> None:
    """Write a file that `read` reads and a person can: short lists and objects have a line each."""
    path.write_text(_text(json.loads(msgspec.json.encode(tuned)), "") + "\n", encoding="utf-8")


def _text(value: Any, indent: str) -> str:
    line = json.dumps(value)
    if len(indent) + len(line) <= LINE or not isinstance(value, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{deeper}{json.dumps(key)}: {_text(item, deeper)}" for key, item in value.items()]
    elif all(isinstance(item, int | float) for item in value):
        parts = textwrap.wrap(line[1:-1], LINE, initial_indent=deeper, subsequent_indent=deeper)
        return "[\n" + "\n".join(parts) + f"\n{indent}]"
    else:
        parts = [deeper + _text(item, deeper) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(parts) + f"\n{indent}{end}"
