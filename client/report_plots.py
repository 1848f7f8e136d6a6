# SPDX-License-Identifier: Apache-2.0
"""The plots of a report, as SVG to put into a page. Needs matplotlib."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from client.measured import Measured

# A page's colours, by their names in its style sheet; plots are drawn in the light ones. With red-green
# blindness as well, curves are told apart by their colours; markers and dashes tell as well.
LIGHT = {
    "background": "#ffffff", "ink": "#1a1a1a", "quiet": "#444444", "line": "#cccccc", "grid": "#dddddd",
    "curve-1": "#0072b2", "curve-2": "#d55e00", "curve-3": "#419d8d", "curve-4": "#6e1d4d",
    "curve-5": "#158cfa", "curve-6": "#79450b",
}  # fmt: skip
DARK = {
    "background": "#17191c", "ink": "#e8e8e8", "quiet": "#b4b4b4", "line": "#43474d", "grid": "#34383d",
    "curve-1": "#4c8df0", "curve-2": "#f0803c", "curve-3": "#63dc92", "curve-4": "#a95391",
    "curve-5": "#58beea", "curve-6": "#a16201",
}  # fmt: skip
COLOURS = tuple(LIGHT[f"curve-{i}"] for i in range(1, 7)) + (LIGHT["ink"],)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MOST_CURVES = 8  # of single runs in a plot; with more, nothing can be read
SETTINGS: Any = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    **{f"{part}.color": LIGHT["ink"] for part in ("text", "xtick", "ytick")},
    "axes.edgecolor": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "savefig.transparent": True,  # the page's background shows
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "path",  # letters look the same wherever the page is opened
    "svg.hashsalt": "report",  # the same results give the same file
}


@dataclass(frozen=True)
class Plot:
    """An SVG element, and what it shows in words."""

    svg: str
    caption: str


def draw(runs: Sequence[Measured]) -> list[Plot]:
    """Those plots that the runs have the numbers for."""
    plots = []
    servers = list(dict.fromkeys(run.label for run in runs))  # each has its colour in all plots
    with matplotlib.rc_context(SETTINGS):
        by_rate = [run for run in runs if run.rate is not None]
        by_slots = [run for run in runs if run.rate is run.ramp is None and run.slots is not None]
        if _is_sweep(by_rate, "rate"):
            plots.append(_latency_by_rate(by_rate, servers))
        if _is_sweep(by_slots, "slots"):
            plots.append(_throughput_by_concurrency(by_slots, servers))
        single = middle_runs([run for run in runs if _first_token_times(run)])
        chosen = single if len(single) <= MOST_CURVES else _spread_out(single)
        if chosen:
            left_out = len(single) - len(chosen)
            note = f" {left_out} further runs are left out." if left_out else ""
            if any(run.repeat for run in runs):
                note = " Of several runs of a point: the middle one by its median time to first token." + note
            plots.append(_first_token(chosen, servers, note))
            plots.append(_timelines(chosen, servers, note))
    return plots


def middle_runs(runs: Sequence[Measured]) -> list[Measured]:
    """Of several runs of a point the one in the middle by its median time to first token, in the order of
    runs: drawn one over the other, none of them could be followed."""
    if not any(run.repeat for run in runs):
        return list(runs)
    found: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(runs):
        found.setdefault((run.label, run.load), []).append(i)
    middles = [
        sorted(places, key=lambda i: float(np.median(_first_token_times(runs[i]))))[(len(places) - 1) // 2]
        for places in found.values()
    ]
    return [runs[i] for i in sorted(middles)]


def _is_sweep(runs: Sequence[Measured], name: str) -> bool:
    """Whether some server has runs at two or more values."""
    values: dict[tuple[str, str], set[Any]] = {}
    for run in runs:
        values.setdefault((run.label, run.row), set()).add(getattr(run, name))
    return any(len(found) > 1 for found in values.values())


def _spread_out(runs: Sequence[Measured]) -> list[Measured]:
    """As many as can be read: loads spread evenly over all, each with every server's run of it."""
    loads = list(dict.fromkeys(run.load for run in runs))
    servers = len({run.label for run in runs})
    count = min(len(loads), max(1, MOST_CURVES // servers))
    chosen = {loads[i] for i in np.linspace(0, len(loads) - 1, count).round().astype(int)}
    return [run for run in runs if run.load in chosen]


def series(
    runs: Sequence[Measured], servers: Sequence[str], by_slots: bool = False
) -> list[tuple[str, str, str, list[Measured]]]:
    """(label, colour, marker, runs) of each server, and of each of its rows and bounds on requests in flight
    where there are several: a curve joins what differs in one thing. servers: labels of all in the report;
    where there are several, each has one colour, and markers tell its curves apart. by_slots: the curves are
    over the bounds."""
    several_rows = len({run.row for run in runs}) > 1
    several_bounds = not by_slots and len({(run.row, run.slots) for run in runs}) > len(
        {run.row for run in runs}
    )
    grouped: dict[str, list[Measured]] = {}
    for run in runs:
        label = f"{run.label}, row {run.row}" if several_rows and run.row else run.label
        if several_bounds:
            label += ", no bound" if run.slots is None else f", {run.slots} in flight"
        grouped.setdefault(label, []).append(run)
    found_series = []
    for i, (label, found) in enumerate(grouped.items()):
        server = servers.index(found[0].label)
        colour = server if len(servers) > 1 else i
        marker = i if several_rows or several_bounds else server
        found_series.append((label, COLOURS[colour % len(COLOURS)], MARKERS[marker % len(MARKERS)], found))
    return found_series


def curve(runs: Sequence[Measured], over: str, metric: str) -> tuple[list[float], list[float]]:
    """What runs differ in (rate or slots), and the metric there: of several runs of a point the median, nan
    where one has none."""
    found: dict[float, list[float]] = {}
    for run in runs:
        value = run.summary[metric]
        found.setdefault(getattr(run, over), []).append(math.nan if value is None else value)
    places = sorted(found)
    return places, [float(np.median(found[place])) for place in places]


def shares(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a distribution: times in order, and the share in percent that is there by then, from 0 at
    the first."""
    ordered = np.sort(times)
    return np.concatenate((ordered[:1], ordered)), np.arange(len(ordered) + 1) / len(ordered) * 100


def _latency_by_rate(runs: Sequence[Measured], servers: Sequence[str]) -> Plot:
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6))
    names = {"ttft": "time to first token, ms", "tpot": "time per further token, ms"}
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        for label, colour, marker, found in series(runs, servers):
            for which, style, word in (("median", "-", "median"), ("p99", "--", "P99")):
                axis.plot(
                    *curve(found, "rate", f"{which}_{name}_ms"),
                    style,
                    color=colour,
                    marker=marker,
                    label=f"{label}: {word}",
                )
        if len(offered := sorted({run.rate or 0.0 for run in runs})) <= 8:
            axis.set_xticks(offered)
        axis.set_xlabel("requests/s")
        axis.set_title(title, fontsize=11, loc="left")
        _from_zero(axis)
        axis.set_xlim(left=0)
        _finish(axis)
    _legend(figure, axes[0])
    note = _of_several(runs)
    return Plot(_svg(figure), "Latency against request rate: median as a line, P99 dashed." + note)


def _throughput_by_concurrency(runs: Sequence[Measured], servers: Sequence[str]) -> Plot:
    figure, axis = pyplot.subplots(figsize=(11, 4.8))
    slots = sorted({run.slots or 0 for run in runs})
    for label, colour, marker, found in series(runs, servers, by_slots=True):
        axis.plot(
            *curve(found, "slots", "output_tokens_per_s"), "-", color=colour, marker=marker, label=label
        )
    if slots[-1] >= 16 * slots[0]:
        axis.set_xscale("log", base=2)
    axis.set_xticks(slots, [f"{count:,}" for count in slots])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("requests in flight")
    axis.set_title("output tokens/s", fontsize=11, loc="left")
    _from_zero(axis)
    _finish(axis, x=False)
    _legend(figure, axis)
    return Plot(_svg(figure), "Throughput against concurrency." + _of_several(runs))


def _of_several(runs: Sequence[Measured]) -> str:
    return " Several runs of a point: their median." if any(run.repeat for run in runs) else ""


def _first_token(runs: Sequence[Measured], servers: Sequence[str], note: str) -> Plot:
    figure, axis = pyplot.subplots(figsize=(11, 4.8))
    highest = 0.0
    lowest = np.inf
    for i, run in enumerate(runs):
        times, share = shares(np.array(_first_token_times(run)) * 1e3)
        axis.step(times, share, where="post", label=_name(run, runs), **_style(i, runs, servers))
        highest, lowest = max(highest, times[-1]), min(lowest, times[0])
    if highest > 20 * lowest:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("time to first token, ms")
    axis.set_title("requests with their first token by then, %", fontsize=11, loc="left")
    axis.set_ylim(0, 101)
    _finish(axis)
    _legend(figure, axis)
    return Plot(_svg(figure), "Distribution of the time to first token." + note)


def _timelines(runs: Sequence[Measured], servers: Sequence[str], note: str) -> Plot:
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True)
    for i, run in enumerate(runs):
        starts, ends = np.array(_column(run, "start")), np.array(_column(run, "end"))
        first = starts + np.array([t or 0.0 for t in _column(run, "ttft")])
        span = max(float(ends.max()), 1e-3)
        edges = np.linspace(0, span, 121)
        middles = (edges[:-1] + edges[1:]) / 2
        in_flight = [int(((starts <= t) & (ends > t)).sum()) for t in middles]
        # An answer's tokens, spread evenly from its first to its end.
        width = edges[1] - edges[0]
        failed = np.array([error is not None for error in _column(run, "error")])
        tokens = np.where(failed, 0, np.array(_column(run, "output_tokens")))
        lengths = np.maximum(ends - first, 1e-6)
        overlap = np.clip(
            np.minimum(ends[:, None], edges[None, 1:]) - np.maximum(first[:, None], edges[None, :-1]), 0, None
        )
        rate = (tokens / lengths) @ overlap / width
        axes[0].plot(middles, in_flight, label=_name(run, runs), **_style(i, runs, servers))
        axes[1].plot(middles, rate, **_style(i, runs, servers))
    axes[0].set_title("requests in flight", fontsize=11, loc="left")
    axes[1].set_title("output tokens/s", fontsize=11, loc="left")
    axes[1].set_xlabel("seconds since the run began")
    for axis in axes:
        _from_zero(axis)
        axis.set_xlim(left=0)
        _finish(axis, whole=axis is axes[0])
    _legend(figure, axes[0])
    return Plot(
        _svg(figure), "What was in flight, and how fast tokens came, in the course of each run." + note
    )


def _first_token_times(run: Measured) -> list[float]:
    """Seconds, of the requests that did not fail."""
    both = zip(_column(run, "ttft"), _column(run, "error"), strict=True)
    return [float(seconds) for seconds, error in both if seconds and error is None]


def _column(run: Measured, name: str) -> list[Any]:
    return list(run.requests.get(name, []))


def _name(run: Measured, runs: Sequence[Measured]) -> str:
    """What tells this run from the others."""
    return run.load if len({each.label for each in runs}) == 1 else f"{run.label}: {run.load}"


def _style(number: int, runs: Sequence[Measured], servers: Sequence[str]) -> dict[str, Any]:
    """Of one run among these: a colour a server, and dashes for its runs; with one server a colour a run."""
    label = runs[number].label
    place = sum(run.label == label for run in runs[:number])
    colour = servers.index(label) if len(servers) > 1 else number
    dashes = ("-", "--", "-.", ":", (0, (6, 1, 1, 1)), (0, (8, 2)), (0, (8, 2, 1, 2, 1, 2)), (0, (4, 3)))
    return {
        "color": COLOURS[colour % len(COLOURS)], "linestyle": dashes[place % len(dashes)], "linewidth": 1.8
    }  # fmt: skip


def _from_zero(axis: Any) -> None:
    """With room for the markers of the highest values: next to 0 the margin may be too little for them."""
    axis.set_ylim(0, axis.get_ylim()[1] * 1.03)


def _finish(axis: Any, x: bool = True, whole: bool = False) -> None:
    """Plain numbers on both axes, on the vertical one perhaps whole ones alone, and a grid."""
    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    if x:
        axis.xaxis.set_major_formatter(plain)
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_major_locator(MaxNLocator(6, integer=whole))
    axis.grid(True, color=LIGHT["grid"], linewidth=0.8)
    axis.set_axisbelow(True)


def _legend(figure: Any, axis: Any) -> None:
    """Below the plots, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    columns = 2 if len(labels) > 1 and max(map(len, labels)) < 55 else 1
    rows = -(-len(labels) // columns)
    figure.tight_layout()
    height = figure.get_figheight()
    figure.set_figheight(height + 0.27 * rows + 0.1)
    figure.subplots_adjust(bottom=(0.62 + 0.27 * rows + 0.1) / figure.get_figheight())
    figure.legend(handles, labels, loc="lower left", ncol=columns, frameon=False, fontsize=10)
    for each in figure.axes:
        _thin_labels(each)


def _thin_labels(axis: Any) -> None:
    """Leaves out numbers below the axis that would touch the next one. The highest stays, and all ticks."""
    gap = axis.figure.dpi / 72 * SETTINGS["font.size"] * 0.4
    (low, high), left = axis.get_xlim(), math.inf
    for tick in reversed(axis.xaxis.get_major_ticks()):
        if not low <= tick.get_loc() <= high:
            continue
        box = tick.label1.get_window_extent()
        if box.x1 + gap > left:
            tick.label1.set_visible(False)
        elif box.width:
            left = box.x0


def _svg(figure: Any) -> str:
    """The drawing without the XML head, which is for a file of its own; colours are the page's variables."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = file.getvalue()
    for name, colour in LIGHT.items():
        text = text.replace(f": {colour}", f": var(--{name})")
    return text[text.index("<svg") :]
