# SPDX-License-Identifier: Apache-2.0
"""What to measure, and what follows from it. The times come from a `Bench`; nothing here needs a GPU."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from msgspec.structs import astuple, replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import BlockTile, Interfaces, Product, Role, Shape, Step, Tiling, Tuned

# Weights of 16 bits, in e4m3 with scales by row, and with scales of 128x128 blocks.
Kind = Literal["dense", "rows", "blocks"]
Choice = TypeVar("Choice")

NORMED: tuple[Role, ...] = ("qkv", "gate_up", "head")  # the products that a norm can be part of
MANY = 1024  # tokens, for which no tiling is measured
BY_CUBLAS: tuple[Role, ...] = ("qkv", "o", "down")  # without an activation
LT_FASTER = 0.985  # of cuBLAS's time: less of a gain is within what repeats differ by
STEP_FASTER = 0.998  # the same of a whole step's, of which one product is a part
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
FEW = 16  # tokens, up to which a product in e4m3 may begin with quantising
# Tiles of a product with blocks, times the parts of a split: for half of an H200's SMs, eight for each SM
FEWEST_TILES, MOST_TILES = 64, 1056
PARTS_PAY = 256  # tokens; the parts of a split of more are too many bytes


class Bench(Protocol):
    """Measures on one device with one model's shapes."""

    shapes: dict[Role, Shape]
    kinds: dict[Role, Kind]

    def steps(self, tokens: int, candidates: Sequence[Tuned]) -> list[float]:
        """Time of the products of a step of so many tokens by the choices of each candidate, in
        microseconds; infinite where they cannot run."""
        ...

    def interfaces(self, role: Role, tokens: int) -> tuple[float, float]:
        """Time of one product with cuBLAS and with cublasLt, in microseconds."""
        ...

    def waves(self) -> dict[int, float]:
        """Tokens of a tile of the gated kernel -> microseconds of a wave; empty where there is no kernel."""
        ...


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    tokens: of steps for which tilings are chosen, rising. interface_tokens: for which cuBLAS's interfaces are
    compared, the first for those above `above`. rounds: of neighbours, for each tiling. seconds: after which
    what is left keeps its numbers. blocks: tokens of steps for which tiles of products with blocks are
    chosen, and compared with cuBLAS, rising; the last for all more. gated: the gated kernel is measured, too;
    else it keeps its numbers and its tokens.
    """

    tokens: tuple[int, ...]
    interface_tokens: tuple[int, ...]
    rounds: int
    seconds: float = math.inf
    above: int = 64
    blocks: tuple[int, ...] = (16, 64, 1024)
    gated: bool = True


FULL = Plan(
    (1, 8, 16, 32, 64, 128, 256),
    (*range(80, 513, 16), *range(544, 1025, 32)),
    rounds=3,
    blocks=(1, 16, 32, 64, 128, 256, 512, 1024, 4096),
)
QUICK = Plan((8, 64), (80, 96, 128, 192, 256, 384, 512, 1024), rounds=0, seconds=60)


def search(base: Tuned, bench: Bench, plan: Plan, say: Callable[[str], None] = print) -> Tuned:
    """`base` with what is faster by `bench`: the gated kernel's waves, cuBLAS's interfaces, the tilings of
    the model's shapes, and from how many tokens on the gated kernel is used; tilings and tiles of weights in
    FP8, and from how many tokens on cuBLAS multiplies those with blocks. The rest stays."""
    end = time.monotonic() + plan.seconds
    numbers = base
    kind = bench.kinds["gate_up"]
    waves = bench.waves() if plan.gated and kind != "blocks" else {}
    if waves:
        numbers = _with_gated(numbers, kind, wave_us=waves)
        say("gated kernel: " + ", ".join(f"{tile} tokens {us:.1f} us" for tile, us in waves.items()))
    elif not plan.gated:
        say("gated kernel: as before")
    elif kind == "blocks":
        say("gated kernel: as before, as it does not take weights of blocks")
    else:
        say("gated kernel: none, as this is no Hopper GPU or it could not be compiled")
    if kind == "dense":
        numbers = replace(numbers, interfaces=_interfaces(numbers, bench, plan, end, say))
    else:
        say("cuBLAS's interfaces: as before, as the layers' weights are in FP8")
    # Tilings are compared with cuBLAS: the gated kernel is compared with the better of them.
    keep = kind == "blocks" or not plan.gated
    without = numbers if keep else _with_gated(numbers, kind, fewest_tokens=None)
    for tokens in plan.tokens:
        for role in tuned.ROLES:
            if time.monotonic() > end:
                say(f"{role}, {tokens} tokens: out of time, as before")
            elif role == "gate_up" and not plan.gated and _is_gated(numbers, kind, tokens):
                say(f"{role}, {tokens} tokens: as before, as the gated kernel has them")
            elif bench.kinds[role] != "blocks":
                without = _best_tiling(without, role, tokens, bench, plan.rounds, say)
    for role in tuned.ROLES:
        if bench.kinds[role] == "blocks":
            without = _best_blocks(without, role, bench, plan.blocks, end, say)
    return _with_gated_kernel(without, bench, (*plan.tokens, MANY), say) if waves else without


def _with_gated(numbers: Tuned, kind: Kind, **fields: Any) -> Tuned:
    """With other fields of the gated kernel's numbers for gate and up of a kind, rows or dense."""
    if kind == "dense":
        return replace(numbers, gated_linear=replace(numbers.gated_linear, **fields))
    return replace(
        numbers, fp8_gated_linear=replace(numbers.fp8_gated_linear or numbers.gated_linear, **fields)
    )


def _is_gated(numbers: Tuned, kind: Kind, tokens: int) -> bool:
    gated = numbers.gated_linear if kind == "dense" else numbers.fp8_gated_linear
    return gated is not None and gated.fewest_tokens is not None and tokens >= gated.fewest_tokens


def _interfaces(
    numbers: Tuned, bench: Bench, plan: Plan, end: float, say: Callable[[str], None]
) -> tuple[Interfaces, ...]:
    entries = {entry.shape: entry for entry in numbers.interfaces}
    for role in BY_CUBLAS:
        if time.monotonic() > end:
            say(f"{role}, cuBLAS: out of time, as before")
            continue
        shape = bench.shapes[role]
        times = {tokens: bench.interfaces(role, tokens) for tokens in plan.interface_tokens}
        entries[shape] = faster_interfaces(shape, plan.above, times)
        say(f"{role} {list(shape)}: cublasLt is faster for {list(entries[shape].lt)} tokens")
    return tuple(entries.values())


def faster_interfaces(shape: Shape, above: int, times: dict[int, tuple[float, float]]) -> Interfaces:
    """The entry that follows from times: tokens -> microseconds with cuBLAS and with cublasLt."""
    sizes = sorted(times)
    lt = tuple(tokens for tokens in sizes if times[tokens][1] < LT_FASTER * times[tokens][0])
    return Interfaces(shape, above, tuple(sizes), lt)


def _best_tiling(
    numbers: Tuned, role: Role, tokens: int, bench: Bench, rounds: int, say: Callable[[str], None]
) -> Tuned:
    shape, fp8 = bench.shapes[role], bench.kinds[role] == "rows"

    def times(tilings: Sequence[Tiling | None]) -> list[float]:
        return bench.steps(tokens, [with_tiling(numbers, role, shape, tokens, t, fp8) for t in tilings])

    now = numbers.tiling(role, tokens, shape, fp8)
    known = [now, None, *_seeds(role, tokens, fp8)]
    known = [t for t in known if t is None or possible(t, role, shape, tokens, fp8)]
    best, us, before = descend(known, times, role, shape, tokens, rounds, fp8)
    gain = "as before" if best == known[0] else f"{before:.1f} us before"
    say(f"{role} {list(shape)}, {tokens} tokens: {best or 'cuBLAS'}, step {us:.1f} us, {gain}")
    return with_tiling(numbers, role, shape, tokens, best, fp8)


def _best_blocks(
    numbers: Tuned, role: Role, bench: Bench, sizes: Sequence[int], end: float, say: Callable[[str], None]
) -> Tuned:
    """`numbers` with the fastest tiles for steps of these sizes, and with cuBLAS above the largest of them at
    which it is not the faster one. Out of time, cuBLAS multiplies from as many tokens on as before."""
    before = numbers.fp8_blocks_by_cublas
    by_triton = {other: tokens for other, tokens in before.items() if other != role}
    numbers = replace(numbers, fp8_blocks_by_cublas=by_triton)
    for index, tokens in enumerate(sizes):
        if time.monotonic() > end:
            say(f"{role}, {tokens} tokens: out of time, as before")
            return replace(numbers, fp8_blocks_by_cublas=before)
        limit = None if index == len(sizes) - 1 else tokens
        numbers = _best_block_tile(numbers, role, tokens, limit, bench, say)
    for index in reversed(range(len(sizes))):
        tokens, fewest = sizes[index], sizes[index - 1] + 1 if index else 1
        cublas = replace(numbers, fp8_blocks_by_cublas=by_triton | {role: fewest})
        triton_us, cublas_us = bench.steps(tokens, [numbers, cublas])
        say(f"{role}, {tokens} tokens: step {triton_us:.1f} us, with cuBLAS {cublas_us:.1f} us")
        if not cublas_us < STEP_FASTER * triton_us:
            break
        numbers = cublas
    return numbers


def _best_block_tile(
    numbers: Tuned, role: Role, tokens: int, limit: int | None, bench: Bench, say: Callable[[str], None]
) -> Tuned:
    """`numbers` with the fastest tile for steps of so many tokens, used up to `limit`."""
    now = numbers.triton_block_tile(role, tokens)
    tiles = list(dict.fromkeys([replace(now, tokens=limit), *block_tiles(bench.shapes[role], tokens, limit)]))
    best, us = fastest(tiles, bench.steps(tokens, [with_block_tile(numbers, role, tile) for tile in tiles]))
    if best is None:
        return numbers
    say(f"{role}, {tokens} tokens: {best}, step {us:.1f} us")
    return with_block_tile(numbers, role, best)


def block_tiles(shape: Shape, tokens: int, limit: int | None) -> list[BlockTile]:
    """What is tried for so many tokens: tiles enough for the SMs, and splits where it takes some."""
    few, groups = tokens <= 64, shape[1] // 128
    sizes = [max(16, 1 << (tokens - 1).bit_length())] if few else [64, 128]
    found = []
    for size, rows in itertools.product(sizes, (64, 128)):
        tiles = -(-shape[0] // rows) * -(-tokens // size)
        most = MOST_TILES if few else MOST_TILES // 2 if tokens <= PARTS_PAY else 0
        splits = [split for split in (1, 2, 4, 8) if groups % split == 0 and tiles * split <= most] or [1]
        splits = [split for split in splits if tiles * split >= FEWEST_TILES] or splits[-1:]
        forms = [(4, 4), (6, 4), (4, 8)] if few else [(3, 4), (3, 8), (4, 8)]
        # At most 64 sums, and at least 8, in the registers of a thread.
        forms = [form for form in forms if 256 <= rows * size // form[1] <= 2048]
        found += [BlockTile(limit, size, rows, split, *form) for split in splits for form in forms]
    return found


def with_block_tile(numbers: Tuned, role: Role, tile: BlockTile) -> Tuned:
    """`numbers` with this tile for up to tile.tokens tokens, and beyond the tile before."""
    tiles = {each.tokens: each for each in numbers.block_tiles(role)} | {tile.tokens: tile}
    rising = sorted(tiles.values(), key=lambda each: math.inf if each.tokens is None else each.tokens)
    return replace(numbers, fp8_blocks=numbers.fp8_blocks | {role: tuple(rising)})


def descend(
    known: Iterable[Tiling | None],
    times: Callable[[Sequence[Tiling | None]], list[float]],
    role: Role,
    shape: Shape,
    tokens: int,
    rounds: int,
    fp8: bool = False,
) -> tuple[Tiling | None, float, float]:
    """The fastest of `known`, the first unless another is faster by more than repeats differ, then of its
    neighbours, and so on for some rounds. With it, its time, and the first one's."""
    tried = list(dict.fromkeys(known))
    took = times(tried)
    best, us = fastest(tried, took)
    for _ in range(rounds):
        new = (
            [] if best is None else [t for t in neighbours(best, role, shape, tokens, fp8) if t not in tried]
        )
        if not new:
            break
        tried += new
        found, us = fastest([best, *new], times([best, *new]))
        if found == best:
            break
        best = found
    return best, us, took[0]


def fastest(choices: Sequence[Choice], times: Sequence[float]) -> tuple[Choice | None, float]:
    """The fastest, and its time; the first unless it is slower by more than repeats differ. None where none
    can run."""
    index = min(range(len(times)), key=times.__getitem__)
    if math.isinf(times[index]):
        return None, math.inf
    index = index if times[index] < STEP_FASTER * times[0] else 0
    return choices[index], times[index]


def neighbours(tiling: Tiling, role: Role, shape: Shape, tokens: int, fp8: bool = False) -> list[Tiling]:
    """Tilings that differ in one field, by one step."""
    found = []
    for name, values in (FP8_FIELDS if fp8 else FIELDS).items():
        now = getattr(tiling, name)
        less, more = [v for v in values if v < now], [v for v in values if v > now]
        for other in (*less[-1:], *more[:1]):
            found.append(replace(tiling, **{name: other}))
    return [other for other in found if possible(other, role, shape, tokens, fp8)]


def possible(tiling: Tiling, role: Role, shape: Shape, tokens: int, fp8: bool = False) -> bool:
    """Whether ops.triton_linear can compute a product of so many tokens so."""
    normed, gated = role in NORMED and not fp8, role == "gate_up"
    if not normed and not tiling.fuse_norm:  # without a norm the field means nothing
        return False
    if tiling.quantise and not (fp8 and tokens <= FEW):
        return False
    return tiling.fits(shape, gated, tokens) and (tiling.split == 1 or not gated)


def _seeds(role: Role, tokens: int, fp8: bool) -> list[Tiling]:
    """What other devices take for so many tokens, and a plain tiling; in e4m3 with quantising in it, too."""
    files = [tuned.read(path) for path in sorted(tuned.FOLDER.glob("*.json"))]
    by_role = [file.fp8_products if fp8 else file.products for file in files]
    steps = [step for products in by_role for product in products.get(role, ()) for step in product.steps]
    known = [step.tiling for step in steps if step.tokens == tokens and step.tiling]
    known.append(Tiling(min(max(1 << (tokens - 1).bit_length(), 16), 128), 64, 128))
    if fp8 and tokens <= FEW:
        tile = 1 if tokens == 1 else 16
        known += [replace(tiling, tokens=tile, quantise=True) for tiling in known]
    return known


def with_tiling(
    numbers: Tuned, role: Role, shape: Shape, tokens: int, tiling: Tiling | None, fp8: bool = False
) -> Tuned:
    """`numbers` with this tiling for up to so many tokens, and beyond the step before. A shape without an
    entry gets one, which begins as the rule for all shapes."""
    name = "fp8_products" if fp8 else "products"
    products: dict[Role, tuple[Product, ...]] = getattr(numbers, name)
    steps = {step.tokens: step for step in numbers.steps(role, shape, fp8)} | {tokens: Step(tokens, tiling)}
    own = Product(shape, tuple(steps[key] for key in sorted(steps)))
    others = tuple(product for product in products.get(role, ()) if product.shape != shape)
    return replace(numbers, **{name: products | {role: (*others, own)}})


def _with_gated_kernel(
    numbers: Tuned, bench: Bench, sizes: Sequence[int], say: Callable[[str], None]
) -> Tuned:
    """`numbers`, which do without the gated kernel, with it from where it is the faster one: above the
    largest of `sizes` at which it is not."""
    for index in reversed(range(len(sizes))):
        tokens = sizes[index]
        kind = bench.kinds["gate_up"]
        gated = _ready_for_gated_kernel(numbers, bench.shapes["gate_up"], tokens, kind == "rows")
        fewest = sizes[index - 1] + 1 if index else 1
        gated = _with_gated(gated, kind, fewest_tokens=fewest)
        without, with_it = bench.steps(tokens, [numbers, gated])
        say(f"gate_up, {tokens} tokens: step {without:.1f} us, with the gated kernel {with_it:.1f} us")
        if not with_it < STEP_FASTER * without:
            break
        numbers = gated
    return numbers


def _ready_for_gated_kernel(numbers: Tuned, shape: Shape, tokens: int, fp8: bool) -> Tuned:
    """A tiling with the norm in it, of FP8 with the quantising, wins over the gated kernel, and one without
    stands in for it where it cannot be compiled."""
    tiling = numbers.tiling("gate_up", tokens, shape, fp8)
    if tiling is None or not (tiling.quantise if fp8 else tiling.fuse_norm):
        return numbers
    apart = replace(tiling, quantise=False) if fp8 else replace(tiling, fuse_norm=False)
    return with_tiling(numbers, "gate_up", shape, tokens, apart, fp8)


def changes(
    before: Tuned, after: Tuned, shapes: dict[Role, Shape], kinds: dict[Role, Kind], most: int = 2048
) -> list[str]:
    """What is chosen otherwise for up to `most` tokens, one line a run of tokens."""
    lines = []
    for role, shape in shapes.items():
        runs: list[tuple[int, int, str]] = []
        for tokens in range(1, most + 1):
            old, new = (_shown(numbers, role, shape, tokens, kinds[role]) for numbers in (before, after))
            if old == new:
                continue
            text = f"{old} -> {new}"
            if runs and runs[-1][1] == tokens - 1 and runs[-1][2] == text:
                runs[-1] = (runs[-1][0], tokens, text)
            else:
                runs.append((tokens, tokens, text))
        lines += [f"{role}, {first}..{last} tokens: {text}" for first, last, text in runs]
    return lines


def _shown(numbers: Tuned, role: Role, shape: Shape, tokens: int, kind: Kind) -> str:
    if kind == "blocks":
        tile = numbers.block_tile(role, tokens)
        return str(astuple(tile)[1:]) if tile else "cuBLAS"
    tiling = numbers.tiling(role, tokens, shape, kind == "rows")
    lt = kind == "dense" and numbers.takes_lt(shape, tokens)
    return str(astuple(tiling)) if tiling else "cublasLt" if lt else "cuBLAS"
