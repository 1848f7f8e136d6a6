# SPDX-License-Identifier: Apache-2.0
"""Benchmark rows as read from perf_configs/scenarios/*.toml."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True)
class Requirement:
    """What a metric of ours must reach: bounds on ours / peer, and an absolute bound in the metric's unit."""

    metric: str
    ratio_at_most: float | None = None
    ratio_at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if self.ratio_at_most is None and self.ratio_at_least is None and self.at_most is None:
            raise ValueError(f"requirement on {self.metric} has no bound")

    def met(self, ours: float, peer: float) -> bool:
        """Whether every bound holds."""
        ratio = ours / peer
        return (
            (self.ratio_at_most is None or ratio <= self.ratio_at_most)
            and (self.ratio_at_least is None or ratio >= self.ratio_at_least)
            and (self.at_most is None or ours <= self.at_most)
        )

    def __str__(self) -> str:
        bounds = []
        if self.ratio_at_most is not None:
            bounds.append(f"ratio ≤ {self.ratio_at_most:.2f}")
        if self.ratio_at_least is not None:
            bounds.append(f"ratio ≥ {self.ratio_at_least:.2f}")
        if self.at_most is not None:
            bounds.append(f"≤ {self.at_most:g}")
        return ", ".join(bounds)


@dataclass(frozen=True)
class Point:
    """One measured run of a row: a sweep has one for each rate, other rows have one."""

    request_rate: float
    num_prompts: int


@dataclass(frozen=True)
class Scenario:
    """One row. dataset is `random` (with lengths) or `sharegpt`; max_concurrency None means unbounded."""

    row: str
    title: str
    expected_seconds: float
    dataset: str
    points: tuple[Point, ...]
    warm_up_prompts: int
    max_concurrency: int | None = None
    lengths: dict[str, tuple[int, int]] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()
    seed: int = 0


def read_scenario(path: Path) -> Scenario:
    """Reads one TOML file; an unknown key or a contradictory one raises ValueError."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    load: dict[str, Any] = table.pop("load")
    try:
        if rates := load.pop("request_rates", None):
            seconds = load.pop("seconds")
            points = tuple(Point(float(rate), math.ceil(rate * seconds)) for rate in rates)
        else:
            points = (Point(float(load.pop("request_rate", math.inf)), load.pop("num_prompts")),)
        dataset = load.pop("dataset")
        lengths = {}
        if dataset == "random":
            lengths = {f"{side}_range": tuple(load.pop(f"{side}_len")) for side in ("input", "output")}
        scenario = Scenario(
            row=table.pop("row"),
            title=table.pop("title"),
            expected_seconds=table.pop("expected_seconds"),
            dataset=dataset,
            points=points,
            warm_up_prompts=table.pop("warm_up")["num_prompts"],
            max_concurrency=load.pop("max_concurrency", None),
            lengths=lengths,
            requirements=tuple(Requirement(**r) for r in table.pop("require", ())),
            seed=load.pop("seed", 0),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if table or load:
        raise ValueError(f"{path}: unknown keys {sorted(table) + sorted(load)}")
    if dataset not in ("random", "sharegpt"):
        raise ValueError(f"{path}: dataset {dataset!r} must be random or sharegpt")
    return scenario


def read_scenarios(rows: str = "") -> dict[str, Scenario]:
    """row -> Scenario, for a comma-separated choice of rows (in that order), or all of them."""
    known = {s.row: s for s in (read_scenario(path) for path in sorted(SCENARIOS.glob("*.toml")))}
    chosen = [row.strip() for row in rows.split(",") if row.strip()] or list(known)
    if unknown := [row for row in chosen if row not in known]:
        raise ValueError(f"no scenario for row {', '.join(unknown)}; rows are {', '.join(known)}")
    return {row: known[row] for row in chosen}
