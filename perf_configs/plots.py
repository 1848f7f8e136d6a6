# SPDX-License-Identifier: Apache-2.0
"""Plots of a result document: latency against request rate, and a step's time against its floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from client.configurations import base_label
from perf_configs.results import OURS, OWN, Document, Repeats, points

SWEEP_ROW = "s"
STEP_FIELDS = ("rows", "context", "step_us", "floor_us")
COLOURS = {
    "ours": "tab:green",
    "ours-openai": "tab:olive",
    "vllm": "tab:blue",
    "sglang": "tab:orange",
    "trtllm": "tab:purple",
}
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
TIMES = {"ttft": "time to first token, ms", "tpot": "time per further token, ms"}


def draw(document: Document, step_times: Path | None, folder: Path, stem: str) -> list[Path]:
    """Writes <stem>-latency.svg when the document holds a rate sweep and <stem>-step.svg when step_times is
    given, which is of the document's GPU and model; returns what was written. Without matplotlib nothing is
    drawn, with a message."""
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
        _draw_steps(read_step_times(step_times), _measured_on(document), written[-1])
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


def _measured_on(document: Document) -> str:
    """GPUs and models of the document's runs, or of its machines where there are no runs."""
    machines = {run["machine"] for run in document["runs"]} or set(document["machines"])
    gpus = {document["machines"][machine]["gpu"] for machine in machines}
    models = {run["checkpoint"]["name"] for run in document["runs"] if run.get("checkpoint")}
    return ", ".join([*sorted(gpus), *sorted(models)])


def _label(each: Repeats) -> str:
    """Server, version and what tells its configuration from others. tritonserver's version says little of
    this backend: its commit does."""
    run = each.runs[-1]
    how = each.label.removeprefix(base_label(run))
    if run["server"] in OWN:
        door = "" if run["server"] == OURS else f", OpenAI API {run.get('variant', '')}".rstrip()
        return f"this backend{door}, {run['commit']}{how}"
    variant = f" {run['variant']}" if run.get("variant") else ""
    return f"{NAMES[run['server']]} {run['version']}{variant}{how}"


def _draw_sweep(document: Document, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    by_rate = sorted((rate, servers) for (row, rate), servers in points(document).items() if row == SWEEP_ROW)
    sweep = [each for _, servers in by_rate for variants in servers.values() for each in variants]
    labels = list(dict.fromkeys((each.runs[0]["server"], each.label) for each in sweep))
    for axis, name in zip(axes, ("ttft", "tpot"), strict=True):
        for server, label in labels:
            mine = [each for each in sweep if each.label == label]
            rates = [each.runs[0]["request_rate"] for each in mine]
            for which, style in (("median", "-o"), ("p99", "--^")):
                values = [each.median(f"{which}_{name}_ms") for each in mine]
                text = f"{_label(mine[-1])}: {'median' if which == 'median' else 'P99'}"
                # Variants and configurations of one server share its colour and differ in strength.
                alpha = 1.0 / (1 + [v for s, v in labels if s == server].index(label))
                axis.plot(rates, values, style, color=COLOURS[server], alpha=alpha, label=text)
        axis.set_xlabel("requests/s")
        axis.set_ylabel(TIMES[name])
        axis.set_ylim(bottom=0)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.suptitle(f"Latency against request rate, ShareGPT-shaped load\n{_measured_on(document)}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _draw_steps(cases: list[dict[str, Any]], measured_on: str, path: Path) -> None:
    from matplotlib import pyplot

    cases = sorted(cases, key=lambda c: (c["context"], c["rows"]))
    figure, axis = pyplot.subplots(figsize=(6.5, 4.2))
    for context in dict.fromkeys(c["context"] for c in cases):
        part = [c for c in cases if c["context"] == context]
        rows = [c["rows"] for c in part]
        (line,) = axis.plot(
            rows, [c["step_us"] / 1e3 for c in part], "-o", label=f"{context} tokens of context"
        )
        floor = [c["floor_us"] / 1e3 for c in part]
        axis.plot(rows, floor, ":", color=line.get_color(), label=f"{context} tokens, floor")
    axis.set_xscale("log", base=2)
    rows = sorted({c["rows"] for c in cases})
    axis.set_xticks(rows, [str(count) for count in rows])
    axis.set_xlabel("sequences in the step")
    axis.set_ylabel("decode step, ms")
    axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.3)
    axis.legend()
    figure.suptitle(f"Decode step against the time to read weights and KV cache once\n{measured_on}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
