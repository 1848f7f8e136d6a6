# SPDX-License-Identifier: Apache-2.0
"""Benchmark rows as read from perf_configs/scenarios/: what is sent, how, and what is required of it. Those
in the folder itself compare two servers (perf_configs.run runs them all), those in its subfolders are chosen
by name."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from client.datasets import DATASETS, Part, Ramp

SCENARIOS = Path(__file__).parent.parent / "perf_configs/scenarios"
KINDS = tuple(name.partition(":")[0] for name in DATASETS)


@dataclass(frozen=True)
class Requirement:
    """What a metric of ours must reach: bounds on ours / peer, and an absolute bound in the metric's unit."""

    metric: str
    ratio_at_most: float | None = None
    ratio_at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if not self.compares and self.at_most is None:
            raise ValueError(f"requirement on {self.metric} has no bound")

    @property
    def compares(self) -> bool:
        """Whether it takes a peer to say if it is met."""
        return self.ratio_at_most is not None or self.ratio_at_least is not None

    def met(self, ours: float, ratio: float | None) -> bool:
        """Whether every bound holds. ratio: ours / peer, None only where it does not compare."""
        return (
            (self.ratio_at_most is None or (ratio is not None and ratio <= self.ratio_at_most))
            and (self.ratio_at_least is None or (ratio is not None and ratio >= self.ratio_at_least))
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
    """One measured run of a row: a sweep has one for each rate, other rows have one. max_concurrency None
    means unbounded."""

    request_rate: float
    num_prompts: int
    max_concurrency: int | None = None


@dataclass(frozen=True)
class Scenario:
    """One row. dataset is a kind of client.datasets.DATASETS, lengths what load_prompts takes for it;
    sampling is laid over each request's body. priority_per_output_token: for OpenAI servers, as in
    client.load.Load; a Triton ensemble gets nothing of it, as it knows the lengths by max_tokens.
    tensor_parallel_size: the GPUs that perf_configs.run gives to each server."""

    row: str
    title: str
    expected_seconds: float
    dataset: str
    points: tuple[Point, ...]
    warm_up_prompts: int
    serves: str = ""
    lengths: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    burstiness: float = 1.0
    ramp: Ramp | None = None
    think_seconds: float = 0.0
    priority_per_output_token: int = 0
    requirements: tuple[Requirement, ...] = ()
    seed: int = 0
    tensor_parallel_size: int = 1

    @property
    def from_file(self) -> bool:
        """Whether its prompts come from a file of conversations."""
        return f"{self.dataset}:FILE" in DATASETS


def read_scenario(path: Path) -> Scenario:
    """Reads one TOML file; an unknown key or a contradictory one raises ValueError."""
    try:
        table = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        load: dict[str, Any] = table.pop("load")
        points = _points(load)
        dataset = load.pop("dataset")
        if dataset not in KINDS:
            raise ValueError(f"dataset {dataset!r} must be one of {', '.join(KINDS)}")
        ramp = load.pop("ramp", None)
        scenario = Scenario(
            row=table.pop("row"),
            title=table.pop("title"),
            expected_seconds=table.pop("expected_seconds"),
            dataset=dataset,
            points=points,
            warm_up_prompts=table.pop("warm_up")["num_prompts"],
            serves=table.pop("serves", ""),
            lengths=_lengths(dataset, load),
            sampling=load.pop("sampling", {}),
            burstiness=float(load.pop("burstiness", 1.0)),
            ramp=Ramp(**ramp) if ramp else None,
            think_seconds=float(load.pop("think_seconds", 0.0)),
            priority_per_output_token=load.pop("priority_per_output_token", 0),
            requirements=tuple(Requirement(**r) for r in table.pop("require", ())),
            seed=load.pop("seed", 0),
            tensor_parallel_size=table.pop("tensor_parallel_size", 1),
        )
    except KeyError as error:
        raise ValueError(f"{path}: the key {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if table or load:
        raise ValueError(f"{path}: unknown keys {sorted(table) + sorted(load)}")
    factor = scenario.priority_per_output_token
    if type(factor) is not int:
        raise ValueError(f"{path}: priority_per_output_token {factor!r} must be an integer")
    size = scenario.tensor_parallel_size
    if type(size) is not int or size < 1:
        raise ValueError(f"{path}: tensor_parallel_size {size!r} must be an integer of at least 1")
    return scenario


def _points(load: dict[str, Any]) -> tuple[Point, ...]:
    """Takes the keys of rate, concurrency and number out of [load]. A sweep of rates has the same time or the
    same number of prompts at each."""
    if rates := load.pop("request_rates", None):
        seconds, count = load.pop("seconds", None), load.pop("num_prompts", None)
        if (seconds is None) == (count is None):
            raise ValueError("request_rates needs either seconds or num_prompts")
        return tuple(Point(float(r), count or math.ceil(r * seconds)) for r in rates)
    rate = float(load.pop("request_rate", math.inf))
    return (Point(rate, load.pop("num_prompts"), load.pop("max_concurrency", None)),)


def _lengths(dataset: str, load: dict[str, Any]) -> dict[str, Any]:
    """Takes what the dataset needs out of [load]: lengths are called input_len and output_len there. The
    limits of data from a file may be left out."""
    found: dict[str, Any] = {}
    wanted = DATASETS[dataset if dataset in DATASETS else f"{dataset}:FILE"]
    for name in wanted:
        key = name.replace("_range", "_len")
        if name == "parts":
            found[name] = [
                Part(part["weight"], tuple(part["input_len"]), tuple(part["output_len"]))
                for part in load.pop(name)
            ]
        elif key != name:
            found[name] = tuple(load.pop(key))
        elif key in load or not key.startswith(("max_", "min_")):
            found[name] = load.pop(key)
    return found


def scenario_files() -> dict[str, Path]:
    """Name -> file of every scenario of this checkout; none where the client is installed without it."""
    paths = sorted(SCENARIOS.glob("*.toml")) + sorted(SCENARIOS.glob("*/*.toml"))
    return {path.stem: path for path in paths}


def find_scenario(name: str) -> Scenario:
    """The scenario of a file, or of that name in perf_configs/scenarios/."""
    files = scenario_files()
    if name in files:
        return read_scenario(files[name])
    if not Path(name).is_file():
        raise ValueError(f"no scenario {name!r}: give a TOML file or one of {', '.join(files)}")
    return read_scenario(Path(name))


def known_rows() -> dict[str, Scenario]:
    """row -> Scenario, of every scenario of this checkout."""
    return {s.row: s for s in map(read_scenario, scenario_files().values())}


def read_scenarios(rows: str = "") -> dict[str, Scenario]:
    """row -> Scenario, for a comma-separated choice of rows (in that order), or all those that compare
    servers."""
    known = known_rows()
    compared = [path.stem for path in sorted(SCENARIOS.glob("*.toml"))]
    chosen = [row.strip() for row in rows.split(",") if row.strip()] or compared
    if unknown := [row for row in chosen if row not in known]:
        raise ValueError(f"no scenario for row {', '.join(unknown)}; rows are {', '.join(known)}")
    return {row: known[row] for row in chosen}
