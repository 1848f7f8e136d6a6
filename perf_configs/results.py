# SPDX-License-Identifier: Apache-2.0
"""Result documents: what a run writes, how several are merged, and the Markdown table with pass or miss.

A document is {"machines": {id: {...}}, "runs": [...]}. Each run names its server and variant, row, request
rate (None: all at once), which repeat it is, machine and commands, and holds the load generator's summary and
every request's numbers. Several repeats count as their median.
"""

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
from client import report
from client.configurations import Configuration, base_label, configuration, labels
from client.measured import runs_of
from client.scenarios import Requirement, Scenario

OURS, PEER = "ours", "vllm"  # PEER: whom a report without any other compares with
OWN = (OURS, "ours-openai")  # this backend's APIs; each is compared with every peer
PACKAGES = ("torch", "flashinfer-python", "numpy", "aiohttp", "uvloop")
ALL_RUNS = "## All runs"
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
            return report.number(values[0] if values else None)
        low, high = report.number(min(values)), report.number(max(values))
        return f"{report.number(self.median(metric))} ({low} to {high})"


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
    """Requirements with ratio and verdict, what `client report` writes of the runs, and what the machines and
    the load generator could do."""
    found, named = points(document), Labels(document)
    servers_seen = {run["server"] for run in document["runs"]}
    peers = sorted(servers_seen - set(OWN)) or [PEER]
    apis = {named.of(run): run for run in document["runs"] if run["server"] in OWN}
    lines = [
        "# Benchmark results",
        "",
        "Ratio is ours / the peer's; lower is better for times. Several runs:",
    ]
    lines[-1] += " their median (lowest to highest)."
    for api, peer in ((api, peer) for api in sorted(apis) or [OURS] for peer in peers):
        table = _comparison(found, scenarios, api, apis.get(api, {"server": OURS}), peer)
        if table:
            title = f"## Against {peer}" if api == OURS else f"## {api} against {peer}"
            head = f"| row | scenario | metric | {api} | {peer} | ratio | required | result |"
            lines += ["", title, "", head, "|---|---|---|---:|---:|---:|---:|---|", *table]
    runs = runs_of(document)
    lines += ["", ALL_RUNS, *report.sections(runs), "", "## What the machine and the load generator could do"]
    head = ["server", "load", "floor of TPOT, ms", "send delay P99, ms", "busiest worker"]
    rows = []
    for each, run in zip(runs, document["runs"], strict=True):
        floor, summary = run.get("floor", {}).get("tpot_ms"), run["summary"]
        numbers = report.number(floor), report.number(summary["p99_send_delay_ms"])
        rows.append([each.label, each.load, *numbers, f"{summary['busiest_worker_cpu']:.0%}"])
    floors = [describe_floor(run["floor"]) for run in document["runs"] if run.get("floor")]
    lines += [
        *report.markdown_table(head, rows),
        "",
        *(f"* its own floor: {text}" for text in dict.fromkeys(floors)),
    ]
    return "\n".join(lines) + "\n"


def _comparison(
    found: dict[tuple[str, float], dict[str, list[Repeats]]],
    scenarios: dict[str, Scenario],
    api: str,
    of: Run,
    peer: str,
) -> list[str]:
    """A line for each requirement on a row that this API ran (its label, and one of its runs), or that the
    peer ran and no other configuration of this API."""
    lines = []
    for scenario in scenarios.values():
        servers = found.get((scenario.row, scenario.points[0].request_rate), {})
        mine = [each for each in servers.get(of["server"], ()) if base_label(each.runs[0]) == base_label(of)]
        ours = next((each for each in mine if each.label == api), None)
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
