# SPDX-License-Identifier: Apache-2.0
"""Result documents: what a run writes, how several are merged, and the Markdown table with pass or miss.

A document is {"machines": {id: {...}}, "runs": [...]}. Each run names its server and variant, row, request
rate (None: all at once), which repeat it is, machine and commands, and holds the load generator's summary and
every request's numbers. Several repeats count as their median.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client import machine as here
from client.configurations import Configuration, base_label, configuration, labels
from client.device_log import COLUMNS, NO_GPU, describe
from client.scenarios import Requirement, Scenario

OURS, PEER = "ours", "vllm"  # PEER: whom a report without any other compares with
OWN = (OURS, "ours-openai")  # this backend's doors; each is compared with every peer
PACKAGES = ("torch", "flashinfer-python", "numpy", "aiohttp", "uvloop")
Run = dict[str, Any]
Document = dict[str, Any]
Key = tuple[str, str, Configuration, str, float, int]

# What a run must have to be merged and reported. checkpoint, profile, environment, variant, repeat, devices
# and floor came later: files without them stay readable.
RUN_FIELDS = {
    *("server", "row", "request_rate", "machine", "started", "version", "commit", "command", "knobs"),
    *("start_seconds", "prompts_sha256", "warm_up", "summary"),
}


def machine() -> tuple[str, dict[str, Any]]:
    """(identity of this machine and GPU, its description)."""
    found = here.facts(PACKAGES)
    gpus = here.gpu_query("name,driver_version,memory.total,uuid")
    gpu = [part.strip() for part in gpus[0].split(",")] if gpus else []
    gpu_name, driver, memory, uuid = gpu if len(gpu) == 4 else ("none", "none", "none", "none")
    return f"{platform.node()}/{uuid}", {
        "gpu": gpu_name,
        "driver": driver,
        "gpu_memory": memory,
        **{name: found[name] for name in ("cores", "kernel", "python")},
        "packages": dict.fromkeys(PACKAGES, "none") | found["packages"],
    }


def run_key(run: Run) -> Key:
    """What a run measures, by which server and how that was set; a later run with the same key replaces an
    earlier one."""
    variant, repeat = run.get("variant", ""), run.get("repeat", 0)
    return run["server"], variant, configuration(run), run["row"], _rate(run), repeat


def _rate(run: Run) -> float:
    return math.inf if run["request_rate"] is None else float(run["request_rate"])


class Labels:
    """Short names of a document's servers: no two configurations of one have the same."""

    def __init__(self, document: Document) -> None:
        self._labels = labels(document["runs"])

    def of(self, run: Run) -> str:
        """Server, variant and what tells its configuration from the document's others."""
        return self._labels[base_label(run), configuration(run)]


def merge(documents: Iterable[Document]) -> Document:
    """One document of all runs; of runs with the same key the one started last stays, and of equal ones the
    last given. A run without failures stays before any with failures, which is said on stderr. The repeats of
    a point are of one machine and of one version of server and checkout: those of the last one stay."""
    machines: dict[str, Any] = {}
    found: dict[tuple[Any, ...], dict[tuple[str, ...], dict[Key, Run]]] = {}
    for document in documents:
        machines |= document["machines"]
        for run in document["runs"]:
            key, source = run_key(run), (run["machine"], run["version"], run["commit"])
            runs = found.setdefault(key[:-1], {}).setdefault(source, {})
            # sorted keeps the order of equals: of two that started at once the later document's stays.
            dropped, runs[key] = sorted((runs.get(key, run), run), key=_rank)
            _say_dropped([dropped], [runs[key]])
    kept: dict[Key, Run] = {}
    for sources in found.values():
        *others, last = sorted(sources.values(), key=lambda runs: max(map(_rank, runs.values())))
        for other in others:
            _say_dropped([*other.values()], [*last.values()])
        kept |= last
    named = Labels({"runs": list(kept.values())})
    ordered = sorted(
        kept.values(), key=lambda r: (r["row"], _rate(r), base_label(r), named.of(r), r.get("repeat", 0))
    )
    used = {run["machine"] for run in ordered}
    return {"machines": {k: v for k, v in machines.items() if k in used}, "runs": ordered}


def _say_dropped(dropped: Sequence[Run], kept: Sequence[Run]) -> None:
    """Later runs that failures keep out."""
    stays = max(kept, key=_rank)
    for run in dropped:
        if run["started"] > stays["started"]:
            print(
                f"row {run['row']} of {base_label(run)}: {failures(run)} requests of the run of "
                f"{run['started']} failed; the one of {stays['started']} is kept",
                file=sys.stderr,
            )


def failures(run: Run) -> int:
    """Failed requests of a run and its warm-up."""
    return int(run["summary"]["failed"]) + int(run["warm_up"].get("failed", 0))


def _rank(run: Run) -> tuple[bool, str]:
    return failures(run) == 0, run["started"]


def load(path: Path) -> Document:
    """Reads a document; a file that is none raises ValueError."""
    document: Any
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        document = None
    match document:
        case {"machines": dict(), "runs": list(runs)}:
            if all(isinstance(run, dict) and run.keys() >= RUN_FIELDS for run in runs):
                return document
    raise ValueError(f"{path} is no result document of perf_configs.run")


def existing(path: Path) -> list[Document]:
    """The document that is at path already, if there is one."""
    return [load(path)] if path.exists() else []


def save(document: Document, path: Path) -> None:
    """Writes atomically, one run a line, so that an interrupted benchmark keeps what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = ",\n".join(json.dumps(run) for run in document["runs"])
    text = f'{{"machines": {json.dumps(document["machines"], indent=1)},\n"runs": [\n{runs}\n]}}\n'
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@dataclass(frozen=True)
class Repeats:
    """The runs of one point by one configuration of a server's variant, in order; label names it."""

    runs: tuple[Run, ...]
    label: str = ""

    def values(self, metric: str) -> list[float]:
        """The metric of each run that has it."""
        return [run["summary"][metric] for run in self.runs if run["summary"][metric] is not None]

    def median(self, metric: str) -> float | None:
        """Over the runs; None where one has no value."""
        values = self.values(metric)
        return statistics.median(values) if len(values) == len(self.runs) else None

    def text(self, metric: str) -> str:
        """The median, with the lowest and the highest of several."""
        values = self.values(metric)
        if len(values) < 2:
            return _number(values[0] if values else None)
        return f"{_number(self.median(metric))} ({_number(min(values))} to {_number(max(values))})"


def points(document: Document) -> dict[tuple[str, float], dict[str, list[Repeats]]]:
    """(row, rate) -> server -> its variants in each of their configurations, each with its repeats."""
    by_key: dict[tuple[Any, ...], list[Run]] = {}
    for run in document["runs"]:
        by_key.setdefault(run_key(run)[:-1], []).append(run)
    named = Labels(document)
    found: dict[tuple[str, float], dict[str, list[Repeats]]] = {}
    for (server, _, _, row, rate), runs in by_key.items():
        variants = found.setdefault((row, rate), {}).setdefault(server, [])
        variants.append(Repeats(tuple(runs), named.of(runs[0])))
    return found


def verdict(requirement: Requirement, ours: Repeats | None, peer: Repeats | None) -> tuple[float | None, str]:
    """(ours / peer, word): pass or miss, or why there is no comparison. Of several runs the medians count."""
    compared = [ours, peer] if requirement.compares else [ours]
    for each in compared:
        if each is None:
            return None, "not run"
        whose = "ours" if each is ours else "the peer's"
        for run in each.runs:
            if failed := run["summary"]["failed"]:
                return None, f"invalid: {failed} of {whose} failed"
            if failed := run["warm_up"].get("failed"):
                return None, f"invalid: {failed} of {whose} failed in the warm-up"
    assert ours is not None
    a = ours.median(requirement.metric)
    if a is None:
        return None, "invalid: no value"
    ratio, note = None, ""
    if requirement.compares and peer is not None:
        runs = [*ours.runs, *peer.runs]
        if len({run["checkpoint"]["config_sha256"] for run in runs if run.get("checkpoint")}) > 1:
            return None, "invalid: different checkpoints"
        if len({form for run in runs if (form := run.get("load_format")) is not None}) > 1:
            return None, "invalid: different weights"
        if [run.get("repeat", 0) for run in ours.runs] != [run.get("repeat", 0) for run in peer.runs]:
            return None, f"invalid: {_which_runs(ours)} of ours, {_which_runs(peer)} of the peer's"
        if [run["prompts_sha256"] for run in ours.runs] != [run["prompts_sha256"] for run in peer.runs]:
            return None, "invalid: different prompts"
        if len({size for run in runs if (size := run.get("tensor_parallel_size")) is not None}) > 1:
            return None, "invalid: different numbers of GPUs"
        if not (b := peer.median(requirement.metric)):
            return None, "invalid: no value"
        ratio = a / b
        note = "" if len({run["machine"] for run in runs}) == 1 else " (other machine)"
        if _overlap(ours.values(requirement.metric), peer.values(requirement.metric)):
            note += " (within the spread)"
    return ratio, ("pass" if requirement.met(a, ratio) else "**miss**") + note


def _which_runs(of: Repeats) -> str:
    """Their numbers, as the table of all runs has them: prompts are the same only where these are."""
    numbers = [str(run.get("repeat", 0) + 1) for run in of.runs]
    return f"run{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the runs of two servers, several of each, cannot be told apart by this number."""
    return min(len(one), len(other)) > 1 and max(min(one), min(other)) <= min(max(one), max(other))


def best(requirement: Requirement, variants: Sequence[Repeats]) -> Repeats | None:
    """Of a peer's variants the one that makes the requirement hardest to meet. One with failed requests
    counts only where there is no other."""
    whole = [
        v for v in variants if not any(map(failures, v.runs)) and v.median(requirement.metric) is not None
    ]
    if not whole:
        return variants[0] if variants else None
    # Where more is better, the requirement is a ratio of at least something.
    choose = max if requirement.ratio_at_least is not None else min
    return choose(whole, key=lambda v: v.median(requirement.metric) or 0.0)


def _of_the_same_model(variants: Sequence[Repeats], ours: Repeats | None) -> Sequence[Repeats]:
    """Those of a peer's variants that served what ours did, or all where none is known to."""

    def served(each: Repeats) -> tuple[str | None, str | None]:
        checkpoint = each.runs[0].get("checkpoint") or {}
        return checkpoint.get("config_sha256"), each.runs[0].get("load_format")

    def agree(each: Repeats) -> bool:
        pairs = zip(served(each), served(ours), strict=True) if ours else ()
        return all(one is None or other is None or one == other for one, other in pairs)

    return [each for each in variants if agree(each)] or variants


def markdown(document: Document, scenarios: dict[str, Scenario]) -> str:
    """Requirements with ratio and verdict, every run's numbers, power and clocks, machines, versions and
    commands."""
    found, named = points(document), Labels(document)
    servers_seen = {run["server"] for run in document["runs"]}
    peers = sorted(servers_seen - set(OWN)) or [PEER]
    doors = {named.of(run): run for run in document["runs"] if run["server"] in OWN}
    several = any(
        len(v.runs) > 1 for servers in found.values() for variants in servers.values() for v in variants
    )
    lines = ["# Benchmark results", "", "Ratio is ours / the peer's; lower is better for times."]
    if several:
        lines[-1] += " Several runs: their median (lowest to highest)."
    for door, peer in ((door, peer) for door in sorted(doors) or [OURS] for peer in peers):
        table = _comparison(found, scenarios, door, doors.get(door, {"server": OURS}), peer)
        if table:
            title = f"## Against {peer}" if door == OURS else f"## {door} against {peer}"
            head = f"| row | scenario | metric | {door} | {peer} | ratio | required | result |"
            lines += ["", title, "", head, "|---|---|---|---:|---:|---:|---|---|", *table]
    if several:
        lines += _medians(found)
    lines += _all_runs(document, several, named)
    lines += ["", "## Failures", ""] if any(run["summary"]["failed"] for run in document["runs"]) else []
    for run in document["runs"]:
        for message, count in run["summary"]["errors"].items():
            lines.append(f"* row {run['row']}, {named.of(run)}: {count} x {message}")
    for run in document["runs"]:
        if other := run["summary"].get("requests_with_other_prompt_length"):
            text = f"{other} prompts had another number of tokens by the server's count than by the client's"
            lines += ["", f"Row {run['row']}, {named.of(run)}: {text}."]
    lines += _devices(document, named)
    lines += ["", "## Machines and servers", ""]
    for identity, facts in document["machines"].items():
        packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
        lines.append(f"* `{identity}`: {facts['gpu']} ({facts['gpu_memory']}, driver {facts['driver']}), "
                     f"{facts['cores']} cores, Python {facts['python']}, {packages}")  # fmt: skip
        floors = [run["floor"] for run in document["runs"] if run["machine"] == identity and run.get("floor")]
        for text in dict.fromkeys(map(describe_floor, floors)):
            lines.append(f"  * its own floor: {text}")
    settings = {(named.of(r), r["version"], r["commit"], r["start_seconds"], r["command"], r["knobs"],
                 r.get("flags", ""), _what(r)): None for r in document["runs"]}  # fmt: skip
    for server, version, commit, seconds, command, knobs, flags, what in settings:
        started = "running already" if seconds is None else f"up in {seconds:.0f} s"
        lines.append(f"* {server} (version {version}, benchmark commit {commit}, {started}{what}): "
                     f"`{' '.join(command.split())}` {f'{knobs} {flags}'.strip()}".rstrip())  # fmt: skip
    return "\n".join(lines) + "\n"


def _comparison(
    found: dict[tuple[str, float], dict[str, list[Repeats]]],
    scenarios: dict[str, Scenario],
    door: str,
    of: Run,
    peer: str,
) -> list[str]:
    """A line for each requirement on a row that this door ran (its label, and one of its runs), or that the
    peer ran and no other configuration of this door."""
    lines = []
    for scenario in scenarios.values():
        servers = found.get((scenario.row, scenario.points[0].request_rate), {})
        mine = [each for each in servers.get(of["server"], ()) if base_label(each.runs[0]) == base_label(of)]
        ours = next((each for each in mine if each.label == door), None)
        theirs = servers.get(peer, ())
        if ours is None and (mine or not theirs):
            continue
        for requirement in scenario.requirements:
            other = best(requirement, _of_the_same_model(theirs, ours))
            ratio, word = verdict(requirement, ours, other)
            values = [each.text(requirement.metric) if each else "-" for each in (ours, other)]
            if other is not None and (variant := other.label.removeprefix(peer).removeprefix(":").strip()):
                values[1] += f" {variant}"
            ratio_text = "-" if ratio is None else _ratio(ratio, requirement)
            bounds = str(requirement)
            cells = [scenario.row, scenario.title, requirement.metric, *values, ratio_text, bounds, word]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _ratio(ratio: float, requirement: Requirement) -> str:
    """Two digits, or as many as it takes to see on which side of a bound it is."""
    bounds = replace(requirement, at_most=math.inf)
    for digits in (2, 3, 4):
        text = f"{ratio:.{digits}f}"
        if bounds.met(0.0, float(text)) == bounds.met(0.0, ratio):
            break
    return text


def describe_floor(floor: dict[str, Any]) -> str:
    """What the machine itself did, in one line."""
    if "none" in floor:
        return f"not measured ({floor['none']})"
    return (
        f"copy {floor['copy_bytes_per_s'] / 1e12:.3g} TB/s (read and written), product {floor['product']} "
        f"{floor['flops_per_s'] / 1e12:.3g} TFLOP/s on {floor['device']}"
    )


def _medians(found: dict[tuple[str, float], dict[str, list[Repeats]]]) -> list[str]:
    """A line for each point of each variant."""
    columns = ["row", "server", "req/s offered", "runs", "out tok/s", "TTFT ms median", "TTFT ms P99"]
    columns += ["TPOT ms median", "TPOT ms P99"]
    metrics = ("output_tokens_per_s", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    lines = ["", "## Medians of several runs", "", "| " + " | ".join(columns) + " |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for (row, rate), servers in found.items():
        for each in (each for variants in servers.values() for each in variants):
            cells = [row, each.label, f"{rate:g}", str(len(each.runs)), *map(each.text, metrics)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _all_runs(document: Document, several: bool, named: Labels) -> list[str]:
    columns = [
        "row",
        "server",
        "req/s offered",
        *(["run"] if several else []),
        "requests",
        "failed",
        "out tok/s",
    ]
    columns += ["TTFT ms median / P90 / P99", "TPOT ms median / P99", "ITL ms median / P99"]
    columns += ["floor of TPOT", "send delay P99 ms", "busiest worker"]
    align = "|---|---|---:" + ("|---:" if several else "") + "|---:|---:|---:|---|---|---|---:|---:|---:|"
    lines = ["", "## All runs", "", "| " + " | ".join(columns) + " |", align]
    for run in document["runs"]:
        s = run["summary"]
        spread = {
            name: " / ".join(_number(s[f"{which}_{name}_ms"]) for which in whichs)
            for name, whichs in (("ttft", ("median", "p90", "p99")), ("tpot", ("median", "p99")),
                                 ("itl", ("median", "p99")))
        }  # fmt: skip
        rate_text = "inf" if run["request_rate"] is None else f"{run['request_rate']:g}"
        number = [str(run.get("repeat", 0) + 1)] if several else []
        cells = [run["row"], named.of(run), rate_text, *number,
                 str(s["completed"] + s["failed"]), str(s["failed"]),
                 _number(s["output_tokens_per_s"]), spread["ttft"], spread["tpot"], spread["itl"],
                 _number(run.get("floor", {}).get("tpot_ms")), _number(s["p99_send_delay_ms"]),
                 f"{s['busiest_worker_cpu']:.0%}"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _devices(document: Document, named: Labels) -> list[str]:
    """Power and clocks of every run that recorded them, or why they could not be read."""
    rows = [
        (run, cells)
        for run in document["runs"]
        if "devices" in run and run["devices"].get("none") != NO_GPU
        for cells in describe(run["devices"])
    ]
    if not rows:
        return []
    reasons = {run["devices"].get("none") for run, _ in rows}
    if None not in reasons:
        return ["", "## Power and clocks", "", f"None: {', '.join(sorted(reasons))}."]
    lines = ["", "## Power and clocks", "", "| row | server | req/s offered | " + " | ".join(COLUMNS) + " |"]
    lines += ["|---|---|---:|---|---:|---:|---|"]
    for run, cells in rows:
        rate_text = "inf" if run["request_rate"] is None else f"{run['request_rate']:g}"
        lines.append("| " + " | ".join([run["row"], named.of(run), rate_text, *cells]) + " |")
    return lines


def _what(run: Run) -> str:
    """Checkpoint, profile and variables, as far as they were recorded."""
    parts = []
    if checkpoint := run.get("checkpoint"):
        parts.append(f"checkpoint {checkpoint['name']} (config.json {checkpoint['config_sha256']})")
    if profile := run.get("profile"):
        parts.append(f"profile {profile['name']} ({profile['sha256']})")
    if (size := run.get("tensor_parallel_size") or 1) > 1:
        parts.append(f"{size} GPUs")
    if run.get("load_format", "dummy") == "auto":
        parts.append("the checkpoint's weights")
    parts += [f"{name}={value}" for name, value in run.get("environment", {}).items()]
    return "".join(f", {part}" for part in parts)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
