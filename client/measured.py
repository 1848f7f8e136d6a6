# SPDX-License-Identifier: Apache-2.0
"""The runs that `client bench --output` and `perf_configs.run` wrote, in one form."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client import configurations


@dataclass(frozen=True)
class Measured:
    """One run of one server: rate in requests/s (None: all at once), slots in flight at most (None: no
    bound)."""

    label: str
    rate: float | None
    slots: int | None
    ramp: str | None
    row: str
    started: str
    command: str
    server: str
    machine: str
    interrupted: bool
    prompts_sha256: str
    summary: dict[str, Any]
    requests: dict[str, list[Any]]
    devices: dict[str, Any] | None  # None where a file is older than that
    model: str = ""
    repeat: int = 0  # which of several runs of the same point

    @property
    def load(self) -> str:
        words = [f"row {self.row}"] if self.row else []
        if self.ramp is not None or self.rate is not None:
            words.append(f"{self.ramp or format(self.rate, 'g')} req/s")
        if self.slots is not None:
            words.append(f"{self.slots} in flight")
        if self.rate is self.slots is self.ramp is None:
            words.append("all at once")
        return ", ".join(words)


def read(path: Path, name: str | None = None) -> list[Measured]:
    """The runs of a result file of either form. Raises ValueError for another file."""
    try:
        return runs_of(json.loads(path.read_text(encoding="utf-8")), name)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} holds no results of client bench or perf_configs.run") from None


def runs_of(document: dict[str, Any], name: str | None = None) -> list[Measured]:
    """Those of a file's content. name: what the server is called."""
    runs = document.get("runs", [document])
    labels = configurations.labels(run for run in runs if "row" in run)
    return [_measured(run, document.get("machines", {}), labels, name) for run in runs]


def _measured(
    run: dict[str, Any],
    machines: dict[str, Any],
    labels: dict[tuple[str, configurations.Configuration], str],
    name: str | None,
) -> Measured:
    if "row" in run:  # of perf_configs.run
        label = labels[configurations.base_label(run), configurations.configuration(run)]
        command = f"{run['command']} {run['knobs']} {run.get('flags') or ''}"
        command = " ".join([command, *(f"{k}={v}" for k, v in (run.get("environment") or {}).items())])
        server = f"{run['server']} {run['version']}, commit {run['commit']}, {_settings(run)}"
        facts, slots = machines[run["machine"]], run.get("load", {}).get("max_concurrency")
    else:
        label, server, command = run["label"], run["server"], run["command"]
        facts, slots = run["machine"], run["max_concurrency"]
    summary, requests = run["summary"], run.get("requests", {})
    if not (isinstance(summary["completed"], int) and isinstance(requests, dict)):
        raise TypeError
    return Measured(
        label=name or label,
        rate=run["request_rate"],
        slots=slots,
        ramp=run.get("ramp"),
        row=run.get("row", ""),
        started=run["started"],
        command=" ".join(command.split()),
        server=server,
        machine=_facts(facts),
        interrupted=run.get("interrupted", False),
        prompts_sha256=run["prompts_sha256"],
        summary=summary,
        requests=requests,
        devices=run.get("devices"),
        model=run.get("model") or "",
        repeat=run.get("repeat", 0),
    )


def _settings(run: dict[str, Any]) -> str:
    """How a server of perf_configs.run was started, as far as that was recorded."""
    seconds = run["start_seconds"]
    parts = ["running already" if seconds is None else f"up in {seconds:.0f} s"]
    if checkpoint := run.get("checkpoint"):
        parts.append(f"checkpoint {checkpoint['name']} (config.json {checkpoint['config_sha256']})")
    if profile := run.get("profile"):
        parts.append(f"profile {profile['name']} ({profile['sha256']})")
    if (size := run.get("tensor_parallel_size") or 1) > 1:
        parts.append(f"{size} GPUs")
    if run.get("load_format", "dummy") == "auto":
        parts.append("the checkpoint's weights")
    return ", ".join(parts)


def _facts(facts: dict[str, Any]) -> str:
    """A machine in one line."""
    gpus = facts.get("gpus") or []
    if facts.get("gpu", "none") != "none":  # of perf_configs.run
        gpus = [f"{facts['gpu']} ({facts['gpu_memory']}, driver {facts['driver']})"]
    words = [*gpus] or ["no GPU"]
    words += [facts["processor"]] if "processor" in facts else []
    words += [f"{facts['cores']} cores"]
    words += [f"{facts['memory_gib']} GiB"] if "memory_gib" in facts else []
    words += [f"Linux {facts['kernel']}", f"Python {facts['python']}"]
    words += [f"{name} {version}" for name, version in facts["packages"].items()]
    return ", ".join(words)


def told_apart(files: Sequence[tuple[Path, list[Measured], bool]]) -> list[Measured]:
    """The runs of all files. Those of client bench in different files may be of different loads, which no
    curve should join: a label that several files have gets the file's name, unless it was given (True)."""
    sources: dict[str, set[Path]] = {}
    for path, runs, _ in files:
        for run in runs:
            sources.setdefault(run.label, set()).add(path)
    return [
        run
        if given or run.row or len(sources[run.label]) == 1
        else replace(run, label=f"{run.label}, {path.name}")
        for path, runs, given in files
        for run in runs
    ]
