# SPDX-License-Identifier: Apache-2.0
"""Plots of a result document: latency against request rate, and a step's time against its floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perf_configs.results import Document

SWEEP_ROW = "s"
STEP_FIELDS = ("rows", "context", "step_us", "floor_us")
SERVERS = {"ours": ("this backend", "tab:green"), "vllm": ("vLLM", "tab:blue")}


def draw(document: Document, step_times: Path | None, folder: Path, stem: str) -> list[Path]:
    """Writes <stem>-latency.svg when the document holds a rate sweep and <stem>-step.svg when step_times is
    given; returns what was written. Without matplotlib nothing is drawn, with a message."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plots drawn")
        return []
    matplotlib.use("Agg")
    written = []
    if any(run["row"] == SWEEP_ROW for run in document["runs"]):
        written.append(folder / f"{stem}-latency.svg")
        _draw_sweep(document, written[-1])
    if step_times is not None:
        written.append(folder / f"{stem}-step.svg")
        _draw_steps(read_step_times(step_times), written[-1])
    return written


def read_step_times(path: Path) -> list[dict[str, Any]]:
    """The decode entries of bench_step.py's JSON. Raises ValueError for a file that holds something else."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        cases = [{field: entry[field] for field in STEP_FIELDS} for entry in entries if "step_us" in entry]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError):
        cases = []
    if not cases:
        raise ValueError(
            f"{path} holds no decode steps; it should be written by kernels/bench_step.py --json"
        )
    return cases


def _draw_sweep(document: Document, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for axis, name in zip(axes, ("ttft", "tpot"), strict=True):
        for server, (label, colour) in SERVERS.items():
            runs = [r for r in document["runs"] if r["row"] == SWEEP_ROW and r["server"] == server]
            runs.sort(key=lambda run: run["request_rate"])
            rates = [run["request_rate"] for run in runs]
            for which, style in (("median", "-o"), ("p99", "--^")):
                values = [run["summary"][f"{which}_{name}_ms"] for run in runs]
                if runs:
                    axis.plot(rates, values, style, color=colour, label=f"{label}, {which}")
        axis.set_xlabel("requests/s")
        axis.set_ylabel(f"{name.upper()}, ms")
        axis.set_ylim(bottom=0)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.suptitle("Latency against request rate, ShareGPT-shaped load")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _draw_steps(cases: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    cases = sorted(cases, key=lambda c: (c["context"], c["rows"]))
    figure, axis = pyplot.subplots(figsize=(6.5, 4.2))
    for context in dict.fromkeys(c["context"] for c in cases):
        part = [c for c in cases if c["context"] == context]
        rows = [c["rows"] for c in part]
        (line,) = axis.plot(rows, [c["step_us"] / 1e3 for c in part], "-o", label=f"context {context}")
        floor = [c["floor_us"] / 1e3 for c in part]
        axis.plot(rows, floor, ":", color=line.get_color(), label=f"context {context}, floor")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("sequences in the step")
    axis.set_ylabel("decode step, ms")
    axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.3)
    axis.legend()
    figure.suptitle("Decode step against the time to read weights and KV cache once")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
