# SPDX-License-Identifier: Apache-2.0
"""What to measure, and what follows from it: one search for every table of core.tuned. The times come from a
`Bench`; nothing here needs a GPU.

A `Case` is what one kernel may take for one key and shape of its table: which numbers of tokens, which
fields to try, and which are next to the best of them (tune/cases.py has them).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct
from msgspec.structs import astuple, replace

from flashinfer_backend.core.tuned import Entry, Shape, Tuned, find, steps

# The fields of a kernel, as a table has them; None: another kernel takes these tokens.
Fields = Any
Kind = Literal["dense", "rows"]  # weights of the gated kernel: of 16 bits, or in e4m3 with scales by row

MANY = 1024  # tokens of a step for which no tiling is measured, and the gated kernel is
MOST_SHOWN = 2048  # tokens of the largest step whose choices are compared
FASTER = 0.998  # of a step's time: less of a gain is within what repeats differ by
# Tables that are looked at before another: with their entries, its candidates would all be the same step.
BEFORE = {"linear_blocks": ("blocks_linear",), "blocks_fp8": ("blocks_linear", "linear_blocks")}


class Bench(Protocol):
    """Measures on one device."""

    def steps(self, tokens: int, candidates: Sequence[Tuned]) -> list[float]:
        """Time of a step of `tokens` by the choices of each candidate, in microseconds; infinite where
        it cannot run, or gives something else than the first."""

    def waves(self) -> dict[int, float]:
        """Tokens of a tile of the gated kernel -> microseconds of a wave; empty where there is no kernel."""


@dataclass(frozen=True)
class Case:
    """name: for people. table, key, shape: where the fields are kept in a `Tuned`. sizes: tokens of steps
    for which fields are chosen, rising; limit: the table's number for one of them. whole: the last size
    stands for all more. candidates: what is tried for a number of tokens besides what is chosen now.
    neighbours: of such fields, those that are tried next. other: which kernel None is."""

    name: str
    table: str
    key: str
    shape: Shape | None
    sizes: tuple[int, ...]
    candidates: Callable[[int], Sequence[Fields]]
    neighbours: Callable[[Fields, int], Sequence[Fields]] = lambda fields, tokens: ()
    limit: Callable[[int], int] = lambda tokens: tokens
    whole: bool = False
    other: str = "cuBLAS"

    def now(self, numbers: Tuned, tokens: int) -> Fields:
        """What `numbers` take for a step of `tokens`."""
        return find(getattr(numbers, self.table), self.key, self.limit(tokens), self.shape)

    def with_step(self, numbers: Tuned, tokens: int, fields: Fields) -> Tuned:
        """`numbers` with these fields for up to `tokens`, and beyond the step before. A shape without
        an entry gets one, which begins as the one for all shapes."""
        limit = None if self.whole and tokens == self.sizes[-1] else self.limit(tokens)
        table = getattr(numbers, self.table)
        by_limit = dict(steps(table, self.key, self.shape)) | {limit: fields}
        rising = sorted(by_limit.items(), key=lambda step: math.inf if step[0] is None else step[0])
        others = tuple(entry for entry in table.get(self.key, ()) if entry.shape != self.shape)
        entries = (*others, Entry(self.shape, tuple(rising)))
        return replace(numbers, **{self.table: table | {self.key: entries}})

    def shown(self, fields: Fields) -> str:
        if isinstance(fields, Struct):
            return str(tuple(astuple(each) if isinstance(each, Struct) else each for each in astuple(fields)))
        return fields or self.other


@dataclass(frozen=True)
class Plan:
    """How much is measured. rounds: of neighbours, for each choice. seconds: after which what is left keeps
    its numbers. gated: the kind of weights that the gated kernel is measured with; None: it keeps its
    numbers."""

    rounds: int
    seconds: float = math.inf
    gated: Kind | None = None


def search(
    base: Tuned, cases: Sequence[Case], bench: Bench, plan: Plan, say: Callable[[str], None] = print
) -> Tuned:
    """`base` with what is faster by `bench`: each case's fields by rising tokens, and the gated kernel's
    numbers. The rest stays."""
    end = time.monotonic() + plan.seconds
    numbers, kind = base, plan.gated
    waves = bench.waves() if kind else {}
    if kind and waves:
        # Tilings are compared with cuBLAS: the gated kernel is compared with the better of them.
        numbers = _with_gated(numbers, kind, wave_us=waves, fewest_tokens=None)
        say("gated kernel: " + ", ".join(f"{tile} tokens {us:.1f} us" for tile, us in waves.items()))
    elif kind:
        numbers = _with_gated(numbers, kind, fewest_tokens=None)
        say("gated kernel: none, as this is no Hopper GPU or it could not be compiled")
    for tokens in sorted({tokens for case in cases for tokens in case.sizes}):
        for case in cases:
            if tokens not in case.sizes:
                continue
            if time.monotonic() > end:
                say(f"{case.name}, {tokens} tokens: out of time, as before")
            else:
                numbers = _best(numbers, case, tokens, bench, plan.rounds, say)
    if not kind or not waves:
        return numbers
    gate_up = next(case for case in cases if case.key == "gate_up")
    return _with_gated_kernel(numbers, gate_up, kind, bench, say)


def _best(
    numbers: Tuned, case: Case, tokens: int, bench: Bench, rounds: int, say: Callable[[str], None]
) -> Tuned:
    """`numbers` with the fastest fields for `tokens`: of what is chosen now, unless another is faster
    by more than repeats differ, and the candidates; then of its neighbours, and so on for some rounds."""

    def fastest(choices: Sequence[Fields]) -> tuple[Fields, float, float]:
        """The fastest, its time, and the first one's."""
        changed = (case.with_step(numbers, tokens, fields) for fields in choices)
        hidden: dict[str, Any] = {table: {} for table in BEFORE.get(case.table, ())}
        times = bench.steps(tokens, [replace(each, **hidden) for each in changed])
        index = min(range(len(times)), key=times.__getitem__)
        index = index if times[index] < FASTER * times[0] else 0
        return choices[index], times[index], times[0]

    now = case.now(numbers, tokens)
    tried = list(dict.fromkeys([now, *case.candidates(tokens)]))
    best, us, before = fastest(tried)
    for _ in range(rounds):
        new = [fields for fields in case.neighbours(best, tokens) if fields not in tried] if best else []
        if not new:
            break
        tried += new
        found, us, _ = fastest([best, *new])
        if found == best:
            break
        best = found
    if math.isinf(us):
        say(f"{case.name}, {tokens} tokens: nothing runs, as before")
        return numbers
    gain = "as before" if best == now else f"{before:.1f} us before"
    say(f"{case.name}, {tokens} tokens: {case.shown(best)}, step {us:.1f} us, {gain}")
    return case.with_step(numbers, tokens, best)


def _with_gated(numbers: Tuned, kind: Kind, **fields: Any) -> Tuned:
    """With other fields of the gated kernel's numbers for weights of a kind."""
    if kind == "dense":
        return replace(numbers, gated_linear=replace(numbers.gated_linear, **fields))
    base = numbers.fp8_gated_linear or numbers.gated_linear
    return replace(numbers, fp8_gated_linear=replace(base, **fields))


def is_gated(numbers: Tuned, kind: Kind, tokens: int) -> bool:
    """Whether the gated kernel takes steps of `tokens`."""
    gated = numbers.gated_linear if kind == "dense" else numbers.fp8_gated_linear
    return gated is not None and gated.fewest_tokens is not None and tokens >= gated.fewest_tokens


def _with_gated_kernel(
    numbers: Tuned, gate_up: Case, kind: Kind, bench: Bench, say: Callable[[str], None]
) -> Tuned:
    """`numbers`, which do without the gated kernel, with it from where it is the faster one: above the
    largest size at which it is not."""
    sizes = (*gate_up.sizes, MANY)
    for index in reversed(range(len(sizes))):
        tokens = sizes[index]
        gated, tiling = numbers, gate_up.now(numbers, tokens)
        # A tiling with the norm in it, of FP8 with the quantising, wins over the gated kernel, and one
        # without stands in for it where it cannot be compiled.
        if tiling and (tiling.quantise if kind == "rows" else tiling.fuse_norm):
            apart = {"quantise": False} if kind == "rows" else {"fuse_norm": False}
            gated = gate_up.with_step(numbers, tokens, replace(tiling, **apart))
        gated = _with_gated(gated, kind, fewest_tokens=sizes[index - 1] + 1 if index else 1)
        without, with_it = bench.steps(tokens, [numbers, gated])
        say(f"gate_up, {tokens} tokens: step {without:.1f} us, with the gated kernel {with_it:.1f} us")
        if not with_it < FASTER * without:
            break
        numbers = gated
    return numbers


def changes(before: Tuned, after: Tuned, cases: Sequence[Case]) -> list[str]:
    """What is chosen otherwise for steps of up to MOST_SHOWN tokens, one line a run of tokens."""
    lines = []
    for case in cases:
        runs: list[tuple[int, int, str]] = []
        for tokens in range(1, MOST_SHOWN + 1):
            old, new = case.now(before, tokens), case.now(after, tokens)
            if old == new:
                continue
            text = f"{case.shown(old)} -> {case.shown(new)}"
            if runs and runs[-1][1] == tokens - 1 and runs[-1][2] == text:
                runs[-1] = (runs[-1][0], tokens, text)
            else:
                runs.append((tokens, tokens, text))
        lines += [f"{case.name}, {first}..{last} tokens: {text}" for first, last, text in runs]
    return lines
