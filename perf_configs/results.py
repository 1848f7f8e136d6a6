# SPDX-License-Identifier: Apache-2.0
"""Result documents: what a run writes, how several are merged, and the Markdown table with pass or miss.

A document is {"machines": {id: {...}}, "runs": [...]}. Each run names its server, row, request rate (None:
all at once), machine and commands, and holds the load generator's summary and every request's numbers.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from client.scenarios import Requirement, Scenario
from perf_configs.servers import gpu_query

OURS, PEER = "ours", "vllm"
Run = dict[str, Any]
Document = dict[str, Any]

# What a run must have to be merged and reported. checkpoint, profile and environment came later: files
# without them stay readable.
RUN_FIELDS = {
    *("server", "row", "request_rate", "machine", "started", "version", "commit", "command", "knobs"),
    *("start_seconds", "prompts_sha256", "warm_up", "summary"),
}


def machine() -> tuple[str, dict[str, Any]]:
    """(identity of this machine and GPU, its description)."""
    packages = {}
    for name in ("torch", "flashinfer-python", "numpy", "aiohttp", "uvloop"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "none"
    gpu = [part.strip() for part in gpu_query("name,driver_version,memory.total,uuid").split(",")]
    gpu_name, driver, memory, uuid = gpu if len(gpu) == 4 else ("none", "none", "none", "none")
    return f"{platform.node()}/{uuid}", {
        "gpu": gpu_name,
        "driver": driver,
        "gpu_memory": memory,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": packages,
    }


def run_key(run: Run) -> tuple[str, str, float]:
    """What a run measures; a later run with the same key replaces an earlier one."""
    rate = run["request_rate"]
    return run["server"], run["row"], math.inf if rate is None else float(rate)


def merge(documents: Iterable[Document]) -> Document:
    """One document of all runs; of runs with the same key the one started last stays, and of equal ones the
    last given. A run without failures stays before any with failures, which is said on stderr."""
    machines: dict[str, Any] = {}
    runs: dict[tuple[str, str, float], Run] = {}
    for document in documents:
        machines |= document["machines"]
        for run in document["runs"]:
            key = run_key(run)
            # sorted keeps the order of equals: of two that started at once the later document's stays.
            dropped, runs[key] = sorted((runs.get(key, run), run), key=_rank)
            if dropped["started"] > runs[key]["started"]:
                print(
                    f"row {run['row']} of {run['server']}: {failures(dropped)} requests of the run of "
                    f"{dropped['started']} failed; the one of {runs[key]['started']} is kept",
                    file=sys.stderr,
                )
    ordered = sorted(runs.values(), key=lambda r: (r["row"], run_key(r)[2], r["server"]))
    used = {run["machine"] for run in ordered}
    return {"machines": {k: v for k, v in machines.items() if k in used}, "runs": ordered}


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


def verdict(requirement: Requirement, ours: Run | None, peer: Run | None) -> tuple[float | None, str]:
    """(ours / peer, word): pass or miss, or why there is no comparison."""
    if ours is None or peer is None:
        return None, "not run"
    for run, whose in ((ours, "ours"), (peer, "the peer's")):
        if failed := run["summary"]["failed"]:
            return None, f"invalid: {failed} of {whose} failed"
        if failed := run["warm_up"].get("failed"):
            return None, f"invalid: {failed} of {whose} failed in the warm-up"
    known = [run["checkpoint"]["config_sha256"] for run in (ours, peer) if run.get("checkpoint")]
    if len(set(known)) > 1:
        return None, "invalid: different checkpoints"
    if ours["prompts_sha256"] != peer["prompts_sha256"]:
        return None, "invalid: different prompts"
    a, b = ours["summary"][requirement.metric], peer["summary"][requirement.metric]
    if a is None or not b:
        return None, "invalid: no value"
    word = "pass" if requirement.met(a, b) else "**miss**"
    return a / b, word + ("" if ours["machine"] == peer["machine"] else " (other machine)")


def markdown(document: Document, scenarios: dict[str, Scenario]) -> str:
    """Requirements with ratio and verdict, every run's numbers, machines, versions and commands."""
    runs = {run_key(run): run for run in document["runs"]}
    lines = ["# Benchmark results", "", "Ratio is ours / vLLM; lower is better for times.", ""]
    lines += ["| row | scenario | metric | ours | vLLM | ratio | required | result |"]
    lines += ["|---|---|---|---:|---:|---:|---|---|"]
    for scenario in scenarios.values():
        rate = scenario.points[0].request_rate
        ours, peer = runs.get((OURS, scenario.row, rate)), runs.get((PEER, scenario.row, rate))
        for requirement in scenario.requirements:
            ratio, word = verdict(requirement, ours, peer)
            values = [_number(run["summary"][requirement.metric]) if run else "-" for run in (ours, peer)]
            ratio_text = "-" if ratio is None else f"{ratio:.2f}"
            bounds = str(requirement)
            cells = [scenario.row, scenario.title, requirement.metric, *values, ratio_text, bounds, word]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## All runs", ""]
    columns = ["row", "server", "req/s offered", "requests", "failed", "out tok/s"]
    columns += ["TTFT ms median / P90 / P99", "TPOT ms median / P99", "ITL ms median / P99"]
    columns += ["send delay P99 ms", "busiest worker"]
    lines += ["| " + " | ".join(columns) + " |", "|---|---|---:|---:|---:|---:|---|---|---|---:|---:|"]
    for run in document["runs"]:
        s = run["summary"]
        spread = {
            name: " / ".join(_number(s[f"{which}_{name}_ms"]) for which in whichs)
            for name, whichs in (("ttft", ("median", "p90", "p99")), ("tpot", ("median", "p99")),
                                 ("itl", ("median", "p99")))
        }  # fmt: skip
        rate_text = "inf" if run["request_rate"] is None else f"{run['request_rate']:g}"
        cells = [run["row"], run["server"], rate_text, str(s["completed"] + s["failed"]), str(s["failed"]),
                 _number(s["output_tokens_per_s"]), spread["ttft"], spread["tpot"], spread["itl"],
                 _number(s["p99_send_delay_ms"]), f"{s['busiest_worker_cpu']:.0%}"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Failures", ""] if any(run["summary"]["failed"] for run in document["runs"]) else []
    for run in document["runs"]:
        for message, count in run["summary"]["errors"].items():
            lines.append(f"* row {run['row']}, {run['server']}: {count} x {message}")
    lines += ["", "## Machines and servers", ""]
    for identity, facts in document["machines"].items():
        packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
        lines.append(f"* `{identity}`: {facts['gpu']} ({facts['gpu_memory']}, driver {facts['driver']}), "
                     f"{facts['cores']} cores, Python {facts['python']}, {packages}")  # fmt: skip
    servers = {(r["server"], r["version"], r["commit"], r["start_seconds"], r["command"], r["knobs"],
                _what(r)): None for r in document["runs"]}  # fmt: skip
    for server, version, commit, seconds, command, knobs, what in servers:
        started = "running already" if seconds is None else f"up in {seconds:.0f} s"
        lines.append(f"* {server} (version {version}, benchmark commit {commit}, {started}{what}): "
                     f"`{' '.join(command.split())}` {knobs}".rstrip())  # fmt: skip
    return "\n".join(lines) + "\n"


def _what(run: Run) -> str:
    """Checkpoint, profile and variables, as far as they were recorded."""
    parts = []
    if checkpoint := run.get("checkpoint"):
        parts.append(f"checkpoint {checkpoint['name']} (config.json {checkpoint['config_sha256']})")
    if profile := run.get("profile"):
        parts.append(f"profile {profile['name']} ({profile['sha256']})")
    parts += [f"{name}={value}" for name, value in run.get("environment", {}).items()]
    return "".join(f", {part}" for part in parts)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
