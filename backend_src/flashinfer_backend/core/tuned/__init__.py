# SPDX-License-Identifier: Apache-2.0
"""Numbers that depend on the GPU: one JSON file a device next to this module, and one for all others.

A file holds a `Tuned`, or says with "like" which other file has what it leaves out. Its name is the device's,
as `slug` writes it: nvidia-h200.json is for "NVIDIA H200".
`python -m flashinfer_backend.tune` measures and writes one; docs/tuning.md tells how. fallback.json is for
unmeasured devices: it takes cuBLAS for products in 16 bits and in e4m3 with scales by row.

Each kernel has a `Table` of what it takes: by a key (a product's role, say), a weight's shape, and the number
of tokens. `find` is the one rule by which all of them are read.
"""

import json
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

FOLDER = Path(__file__).parent
FALLBACK = "fallback"
PARTIAL_SUMS = 16 << 20  # float32 sums of a split product's parts, at most
SPLIT_BLOCKS = 4096  # output blocks of a split product, at most
LARGEST_CLUSTER = 8  # blocks that every Hopper GPU runs together
MOST_ROW_TOKENS = 32  # of ops.blocks_linear
TEAMS = {16: (1, 2), 64: (1,), 128: (1,)}  # of ops.mxfp4_experts, by the tokens of a tile
LINE = 160  # characters of a line in a file, at most, where values share one
SHORT = 28  # characters of an item, up to which items share lines

# Under which name a product finds its numbers: queries, keys and values; attention's output; gate and up
# projections; down projection; logits; betas and decays of a delta net. Products of one role and shape share
# them.
Role = str
LAYER_ROLES: tuple[Role, ...] = ("qkv", "o", "gate_up", "down")  # whose weights can be quantised
ROLES: tuple[Role, ...] = (*LAYER_ROLES, "head", "ba")
GATED: Role = "gate_up"  # whose rows are a gate's and as many of what it multiplies
Shape = tuple[int, int]  # weight [N, K]
# Of a weight: 16 bits have none; e4m3 has one for each row, or each block of 128x128; else the 4-bit format.
Scales = Literal["none", "rows", "blocks", "mxfp4", "int4"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
ClusterSplit = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_CLUSTER)]  # blocks of a cluster
RowGroups = Literal[2, 4]


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    def _check_powers(self, **fewest: int) -> None:
        """Raises ValueError for a field that is not a power of two, or is below its value in `fewest`."""
        for name, least in fewest.items():
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} should be a power of two of at least {least}, not {value}")


class Tiling(_Data, frozen=True, omit_defaults=True):
    """How ops.triton_linear cuts up one product.

    tokens, rows, inner: the block of x rows, weight rows and inner dimension that a program multiplies at a
    time; tokens is 1, or 16 or more. split: programs that share the inner dimension of one output block.
    stages, warps: depth of the load pipeline and warps per program. swap: the weights are the left
    operand, so that few tokens do not waste the tensor cores' 64 rows. prefetch: bytes of weights that a
    program pulls into L2 before it waits for the previous kernel. early: let the next kernel start (and
    prefetch) right behind that wait rather than when the product's loop is done, or with adapters most of it.
    fuse_norm: a norm of x is part of the product; else it is a kernel of its own. quantise, of weights in
    e4m3: x comes in 16 bits, and its norm and its scales, computed for each block of `inner` columns, are
    part of the product; else they are a kernel of their own, as always where scales of x are stored.
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
        """Whether weight[N, K] divides into these blocks, and the parts of a split product of `tokens`
        tokens, with the squares that a norm adds up, have room. gated: the weight's rows are two halves."""
        rows = shape[0] // 2 if gated else shape[0]
        if rows % self.rows or shape[1] % (self.inner * self.split):
            return False
        blocks = rows // self.rows * -(-tokens // self.tokens)
        sums = (tokens * rows + blocks * self.tokens) * self.split
        return self.split == 1 or (sums <= PARTIAL_SUMS and blocks <= SPLIT_BLOCKS)


class BlockTile(_Data, frozen=True, omit_defaults=True):
    """How ops.triton_fp8.block_product cuts up a product with a weight of 128x128 blocks.

    tile, rows: tokens and weight rows of a program; rows is 64 or 128.
    split: programs that share the inner dimension of a tile, if it divides into this number of groups of 128.
    stages, warps: as in Tiling.
    """

    tile: int
    rows: int
    split: int = 1
    stages: int = 4
    warps: int = 4


class RowTile(_Data, frozen=True, omit_defaults=True):
    """How ops.blocks_linear cuts up one product.

    groups: how many sets of 64 weight rows a block of threads multiplies at a time. split: blocks of a
    cluster, which share the inner dimension of a tile.
    """

    groups: RowGroups = 2
    split: ClusterSplit = 1

    def fits(self, shape: Shape) -> bool:
        """Whether weight[N, K] divides into such tiles."""
        rows, inner = shape
        return rows % (64 * self.groups) == 0 and inner % 128 == 0 and self.split * 128 <= inner


class Int4Tile(_Data, frozen=True):
    """How ops.int4_linear cuts up one product.

    tokens: rows of x in a tile, 8 to 64. warp_rows: weight rows of a warp, 32 or 64; row_warps: warps with
    other rows that share the copies of x. teams: groups of such warps in a block of threads, which share
    the inner dimension; split: blocks of a cluster, which also share it. stages: depth of the load
    pipeline, 2 to 5. ops.int4_linear.TILES lists which tokens, warp_rows and row_warps there are together.
    """

    tokens: int
    warp_rows: int
    row_warps: int
    teams: int
    split: ClusterSplit
    stages: int

    def fits(self, shape: Shape) -> bool:
        """Whether weight[N, K] divides into such tiles."""
        rows, inner = shape
        return not (rows % (self.warp_rows * self.row_warps) or inner % 128) and self.split * 128 <= inner


class ExpertBlock(_Data, frozen=True):
    """What a program of one of the two products of experts multiplies, for all tokens of a tile.

    rows: of the weight; of gate and up as many of each. inner, stages, warps: as in Tiling; with scales of
    128x128 blocks, and of int4, inner is 128 in any case, and of mxfp4 512 at most.
    """

    rows: int
    inner: int
    stages: int
    warps: int

    def __post_init__(self) -> None:
        self._check_powers(rows=16, inner=32, warps=1)


class ExpertTile(_Data, frozen=True, omit_defaults=True):
    """How ops.triton_experts cuts up the products of a mixture of experts.

    tokens: of a tile, all of one expert; a power of two of at least 16. gate_up, down: of the two products.
    teams: of 8 warps, 1 or 2, of a block of threads of ops.mxfp4_experts, which then computes both products
    of MXFP4 where it can; 0: never. Its tiles have 16 tokens, or with teams of 1 also 64 or 128.
    """

    tokens: int
    gate_up: ExpertBlock
    down: ExpertBlock
    teams: int = 0

    def __post_init__(self) -> None:
        self._check_powers(tokens=16)
        if self.teams and self.teams not in TEAMS.get(self.tokens, ()):
            raise ValueError(
                "teams should be 0, 1 or 2 for a tile of 16 tokens, 0 or 1 for one of 64 or 128, 0 for"
                f" others, not {self.teams} for {self.tokens}"
            )


F = TypeVar("F")  # a kernel's fields
Limit = Annotated[int, msgspec.Meta(ge=0)] | None  # tokens of a step at most; None: no limit
Steps = tuple[tuple[Limit, F | None], ...]
Cache = Literal["16 bits", "e4m3"]


class Entry(_Data, Generic[F], frozen=True):
    """What a kernel takes for weights of one shape, or with None of all that no other entry names.

    steps: up to how many tokens, and beyond the step before, which fields; rising. None for fields, and more
    tokens than the last step's: another kernel takes them.
    """

    shape: Shape | None
    steps: Steps[F]

    def __post_init__(self) -> None:
        limits = [math.inf if limit is None else limit for limit, _ in self.steps]
        if sorted(set(limits)) != limits:
            raise ValueError(f"steps should rise, not be {[limit for limit, _ in self.steps]}")


Table = dict[str, tuple[Entry[F], ...]]


def steps(table: Table[F], key: str, shape: Shape | None = None) -> Steps[F]:
    """The steps of a shape's own entry, else of the one for all shapes."""
    by_shape = {entry.shape: entry.steps for entry in table.get(key, ())}
    return by_shape.get(shape, by_shape.get(None, ()))


def find(table: Table[F], key: str, tokens: int, shape: Shape | None = None) -> F | None:
    """The fields of the first step that holds `tokens` tokens; None where another kernel takes them."""
    found = (fields for limit, fields in steps(table, key, shape) if limit is None or tokens <= limit)
    return next(found, None)


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
    """A form of the Triton decode kernel.

    block: tokens per step of its loop; stages, warps: pipeline depth and warps of a program whose results are
    16 query rows of 128 numbers (of more they have more warps, up to 8); prefetch: tokens whose keys and
    values it pulls into L2 before it waits for the previous kernel; merge: parts of a split row added at a
    time; registers: a thread's, or None for what the assembler picks; programs_per_sm: how many rows are
    split for. block, warps and merge are powers of two, prefetch is one or 0.
    """

    block: int
    stages: Positive
    warps: int
    prefetch: int
    merge: int
    programs_per_sm: Positive
    registers: int | None = None

    def __post_init__(self) -> None:
        self._check_powers(block=16, warps=1, merge=1, prefetch=0)


class PromptAttention(_Data, frozen=True):
    """When prompts take FlashInfer's FA2 instead of FA3 (attention/flashinfer_paged.py).

    short_queries: where prompts have fewer on average, FA3's tiles of 128 are wasted, and FA2 is faster once
    there are more tiles than SMs. few_tiles, long_prefix: fewer tiles over more tokens leave SMs idle, so FA2
    splits them. serial_tokens: a step of more has its decode rows next to its prompts; up to that, products
    start before the kernel before them has ended, which works along one stream only.

    FA3 is fastest over copies in 16 bits (attention/copies.py). copied_head_queries: the fewest queries, on
    average over the tokens that are copied, times the query heads of a head of keys, that make up for
    copying these tokens; for fewer, FA3 over the cache. copied_queries: the fewest queries with a cache of
    e4m3; for fewer FA2, which reads it. copied_freely: tokens of such a cache up to which copying takes next
    to nothing, whatever the queries.
    """

    short_queries: int
    few_tiles: int
    long_prefix: int
    serial_tokens: int
    copied_queries: int = 64
    copied_freely: int = 1024
    copied_head_queries: int = 1024


class Scheduling(_Data, frozen=True):
    """How the scheduler fills steps (scheduler/budget.py).

    prompts_together: tokens of prompts from which on the device is busy: prompts share a step of up to as
    many, streams included. filled_step: tokens; fewer leave it waiting for its weights, from here on a step's
    time grows with its tokens. slow_step_ms: milliseconds of a step without prompts from which on streams
    take precedence; None: never.
    """

    prompts_together: int
    filled_step: int
    slow_step_ms: int | None


class Tuned(_Data, frozen=True, omit_defaults=True):
    """What was measured on one device. measured: with what, as name -> version or remark, for readers.

    Tables by role:
    linear: products with weights of 16 bits that Triton multiplies; cuBLAS takes the others.
    linear_adapted: the same of steps with adapters, which the product then adds. A shape without steps takes
    ops.tilings' rule.
    linear_fp8: the same of e4m3 with scales by row, whose norm is part of those that quantise.
    linear_blocks: the same of e4m3 with 128x128 blocks, of which `inner` is one and `rows` a part.
    blocks_linear: the same by a CUDA kernel, for up to MOST_ROW_TOKENS tokens. linear_blocks takes
    the rest.
    blocks_fp8: what linear_blocks leaves. The last tile also takes the weights that cuBLAS cannot.
    int4: products with weights of 4 bits; the others are written out in 16. A shape without steps takes
    ops.tilings' rule.

    Other tables:
    cublas: by "16 bits" and shape, where cublasLt is faster than PyTorch's default.
    experts: by the scales of a mixture's weights; its tokens are those of an expert on average.
    decode_attention: by the cache's elements; its tokens are decode rows.

    gated_linear: weights of 16 bits. fp8_gated_linear: of e4m3 with scales by row; None: never.
    fp8_scaled_by_cublas: tokens from which on cuBLAS applies the scales of products by row that have neither
    activation nor residual behind them; None: never.
    """

    device: str
    measured: dict[str, str]
    linear: Table[Tiling]
    cublas: Table[Literal["cublasLt"]]
    gated_linear: GatedLinear
    decode_attention: Table[DecodeAttention]
    blocks_fp8: Table[BlockTile]
    experts: Table[ExpertTile]
    prompt_attention: PromptAttention
    scheduling: Scheduling
    linear_adapted: Table[Tiling] = {}
    linear_fp8: Table[Tiling] = {}
    linear_blocks: Table[Tiling] = {}
    blocks_linear: Table[RowTile] = {}
    fp8_scaled_by_cublas: int | None = None
    fp8_gated_linear: GatedLinear | None = None
    int4: Table[Int4Tile] = {}

    def __post_init__(self) -> None:
        for name, keys, whole in (
            ("linear", ROLES, False),
            ("linear_adapted", ROLES, False),
            ("linear_fp8", ROLES, False),
            ("linear_blocks", LAYER_ROLES, False),
            ("blocks_linear", LAYER_ROLES, False),
            ("blocks_fp8", LAYER_ROLES, True),
            ("int4", LAYER_ROLES, False),
            ("cublas", ("16 bits",), False),
            ("experts", get_args(Scales), True),
            ("decode_attention", get_args(Cache), True),
        ):
            _check_table(name, getattr(self, name), keys, whole)
        of_rows = [entry for entries in self.blocks_linear.values() for entry in entries]
        for limit, tile in (step for entry in of_rows for step in entry.steps):
            if tile is not None and (limit is None or limit > MOST_ROW_TOKENS):
                raise ValueError(f"tiles of blocks_linear should be for at most {MOST_ROW_TOKENS} tokens")
        of_blocks = [entry for entries in self.linear_blocks.values() for entry in entries]
        for tiling in (tiling for entry in of_blocks for _, tiling in entry.steps if tiling is not None):
            if tiling.inner != 128 or tiling.rows > 128:
                raise ValueError(
                    "linear_blocks should have tilings of 128 inner columns and at most 128 rows, not"
                    f" {tiling.inner} and {tiling.rows}"
                )
        for entry in self.experts["blocks"]:
            tiles = [tile for _, tile in entry.steps if tile is not None]
            if (most := max(block.rows for tile in tiles for block in (tile.gate_up, tile.down))) > 128:
                raise ValueError(f"rows of experts.blocks should be at most 128, not {most}")


def _check_table(name: str, table: Table[Any], keys: Sequence[str], whole: bool) -> None:
    """whole: every key has an entry for all shapes, which is for any number of tokens."""
    if unknown := sorted(set(table) - set(keys)):
        raise ValueError(f"keys of {name} should be {', '.join(keys)}, not {', '.join(unknown)}")
    for key in keys:
        shapes = [entry.shape for entry in table.get(key, ())]
        if len(set(shapes)) < len(shapes):
            raise ValueError(f"{name}.{key} should have one entry a shape, not {shapes}")
        if whole and [limit for limit, _ in steps(table, key)][-1:] != [None]:
            raise ValueError(f"the last step of {name}.{key} should have null for its tokens: all more")


def slug(device: str) -> str:
    """A device's name as the name of its file, without .json."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def load(device: str) -> Tuned | None:
    """The tuned values of a device by its name as CUDA gives it; None if it was not measured."""
    path = FOLDER / f"{slug(device)}.json"
    return read(path) if slug(device) != FALLBACK and path.is_file() else None


def fallback() -> Tuned:
    """The generic values, for devices that were not measured."""
    return read(FOLDER / f"{FALLBACK}.json")


def read(path: Path) -> Tuned:
    """Raises OSError, or ValueError naming the file and what is wrong in it."""
    return _read(path, ())


def _read(path: Path, above: tuple[Path, ...]) -> Tuned:
    """above: the files that build on this one."""
    try:
        sections = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if "like" in sections:
            like = sections.pop("like")
            others = sorted(file.stem for file in FOLDER.glob("*.json") if file not in (path, *above))
            if like not in others:  # a circle of files is refused too
                raise ValueError(f"like should be one of {', '.join(others)}, not {like}")
            sections = _over(_read(FOLDER / f"{like}.json", (path, *above)), sections)
        return msgspec.convert(sections, Tuned, str_keys=True)
    except ValueError as error:  # also msgspec's
        raise ValueError(f"{path}: {error}") from None


def _over(other: Tuned, own: dict[str, Any]) -> dict[str, Any]:
    """A file's own sections over those of another. Of a section that both have, the roles or keys of the file
    replace the other's; an empty one empties the section."""
    base = msgspec.to_builtins(other, str_keys=True)
    del base["device"], base["measured"]  # which a file says of itself
    for name, section in own.items():
        before = base.get(name)
        merged = section and isinstance(section, dict) and isinstance(before, dict)
        base[name] = before | section if merged else section
    return base


def write(path: Path, tuned: Tuned) -> None:
    """Write a file that `read` reads and a person can."""
    path.write_text(_text(json.loads(msgspec.json.encode(tuned))) + "\n", encoding="utf-8")


def _text(value: Any, opening: str = "", indent: str = "") -> str:
    """`opening` and the value, on one line if it has room. Else short items share lines, and a long one
    behind short ones begins on their line; of others each has its own."""
    line = opening + json.dumps(value)
    if len(indent) + len(line) <= LINE or not value or not isinstance(value, dict | list):
        return line
    deeper = indent + "  "
    begin, end = "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, dict):
        items = [(f"{json.dumps(key)}: ", item) for key, item in value.items()]
    else:
        items = [("", item) for item in value]
    *first, last = [name + json.dumps(item) for name, item in items]
    if any(len(each) > SHORT for each in first):
        inside = ",\n".join(deeper + _text(item, name, deeper) for name, item in items)
    elif len(last) > SHORT:
        name, item = items[-1]
        return _text(item, opening + begin + ", ".join([*first, name]), indent) + end
    else:
        words = ", ".join(each.replace(" ", "\0") for each in (*first, last))  # breaks between items alone
        lines = textwrap.wrap(words, LINE, initial_indent=deeper, subsequent_indent=deeper)
        inside = "\n".join(lines).replace("\0", " ")
    return f"{opening}{begin}\n{inside}\n{indent}{end}"
