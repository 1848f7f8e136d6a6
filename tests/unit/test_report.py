# SPDX-License-Identifier: Apache-2.0
"""What a report draws and says of runs that are easily drawn wrongly."""

import html
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client import measured, report, report_plots
from client.metrics import RequestRecord, goodput, request_columns, summarise

ROOT = Path(__file__).parents[2]
FACTS = {"cores": 2, "kernel": "6", "python": "3", "packages": {}}


def written(path, *runs):
    """A result file of `client bench` with a run of each (rate, slots, records), and what it is read as."""
    documents = [
        {
            "label": "ours", "server": "triton", "machine": FACTS,
            "request_rate": rate, "max_concurrency": slots,
            "started": "2026-01-01", "command": "bench", "prompts_sha256": "p", "summary": summarise(records),
            "requests": request_columns(records),
        }
        for rate, slots, records in runs
    ]  # fmt: skip
    path.write_text(json.dumps({"runs": documents}))
    return measured.read(path)


def answer(ttft, index=0, **more):
    return RequestRecord(index, 5, 11, ttft=ttft, latency=ttft + 0.5, start=0.1, end=1.0, chunks=11, **more)


def test_a_curve_joins_runs_of_one_bound(tmp_path):
    points = [(rate, slots) for rate in (2.0, 4.0) for slots in (1, 16)]
    runs = written(tmp_path / "r.json", *((r, s, [answer(r * s / 100)]) for r, s in points))
    found = report_plots.series(runs, ["ours"])
    assert [label for label, *_ in found] == ["ours, 1 in flight", "ours, 16 in flight"]
    assert len({colour for _, colour, _, _ in found}) == 2
    curves = [report_plots.curve(each, "rate", "median_ttft_ms") for *_, each in found]
    assert curves == [([2.0, 4.0], [20.0, 40.0]), ([2.0, 4.0], [320.0, 640.0])]
    one_bound = [run for run in runs if run.slots == 1]
    assert [label for label, *_ in report_plots.series(one_bound, ["ours"])] == ["ours"]
    closed = [replace(run, rate=None) for run in runs if run.rate == 2.0]
    assert [label for label, *_ in report_plots.series(closed, ["ours"], by_slots=True)] == ["ours"]


def test_a_server_has_one_colour_whatever_its_rows(tmp_path):
    runs = written(tmp_path / "r.json", *((rate, None, [answer(0.1)]) for rate in (2.0, 4.0)))
    runs = [replace(run, label=label, row=row) for row in "ab" for label in ("ours", "other") for run in runs]
    found = report_plots.series(runs, ["ours", "other"])
    assert [label for label, *_ in found] == ["ours, row a", "other, row a", "ours, row b", "other, row b"]
    assert [colour for _, colour, _, _ in found] == [*report_plots.COLOURS[:2]] * 2
    assert len({marker for _, _, marker, _ in found}) == 4


def test_several_runs_of_a_point_are_their_median(tmp_path):
    runs = written(tmp_path / "r.json", *((2.0, None, [answer(ttft)]) for ttft in (0.3, 0.1, 0.2)))
    runs = [replace(run, repeat=number) for number, run in enumerate(runs)]
    assert report_plots.curve(runs, "rate", "median_ttft_ms") == ([2.0], [200.0])
    none = written(tmp_path / "none.json", (2.0, None, [answer(0.1, error="cut off")]))
    assert math.isnan(report_plots.curve([*runs, *none], "rate", "median_ttft_ms")[1][0])
    sweep = [*runs, *(replace(run, rate=4.0) for run in runs)]
    captions = [plot.caption for plot in report_plots.draw(sweep)]
    assert captions[0].endswith("Several runs of a point: their median.")


def test_of_several_runs_the_middle_one_is_drawn_and_the_spread_is_said(tmp_path):
    """Three of each of five points: 15 curves, with one name for every three, could not be read."""
    runs = written(tmp_path / "r.json", *((2.0, None, [answer(ttft)]) for ttft in (0.3, 0.1, 0.2)))
    points = [
        replace(run, rate=rate, repeat=number)
        for rate in (1.0, 2.0, 4.0, 8.0, 16.0)
        for number, run in enumerate(runs)
    ]
    middles = report_plots.middle_runs(points)
    assert [(run.rate, run.repeat) for run in middles] == [(r, 2) for r in (1.0, 2.0, 4.0, 8.0, 16.0)]
    plots = report_plots.draw(points)
    assert ["the middle one by its median" in plot.caption for plot in plots] == [False, True, True]
    assert report_plots.middle_runs(runs) == runs and report.medians(runs)[1] == []
    for text in (report.markdown(points, "t"), report.page(points, "t")):
        assert report.MEDIANS in text and "200 (100 to 300)" in text
    head, rows = report.medians([*points, replace(points[0], label="other")])
    assert head[:3] == ["server", "load", "runs"] and len(rows) == 6
    assert rows[0][:3] == ["ours", "1 req/s", "3"] and rows[-1][:3] == ["other", "1 req/s", "1"]
    assert rows[-1][head.index("TTFT median ms")] == "300"


def test_times_rates_model_and_limits_are_shown(tmp_path):
    records = [answer(ttft / 10, number) for number, ttft in enumerate((1, 2, 3, 4, 10))]
    (run,) = written(tmp_path / "r.json", (2.0, None, records))
    run = replace(run, model="llama", summary=run.summary | goodput(records, {"ttft": 350, "tpot": 80}))
    head, rows = report.table([run])
    assert dict(zip(head, rows[0], strict=True))["in tok/s"] == "25"  # 5 prompts of 5 tokens in a second
    assert dict(zip(head, rows[0], strict=True))["good"] == "60.0%"
    head, rows = report.times_table([run])
    shown = dict(zip(head, rows[0], strict=True))
    assert shown["TTFT ms"] == "400 / 300 / 760 / 976"
    assert shown["end to end ms"] == "900 / 800 / 1,260 / 1,476"
    for text in (report.markdown([run], "t"), html.unescape(report.page([run], "t"))):
        assert shown["end to end ms"] in text and "triton, model llama" in text
        assert "good: the share of requests that have ttft <= 350 ms, tpot <= 80 ms." in text


def test_prompts_that_a_server_counts_otherwise_are_said(tmp_path):
    (run,) = written(
        tmp_path / "r.json", (2.0, None, [answer(0.1), answer(0.1, 1, reported_prompt_tokens=6)])
    )
    assert report.notes([run])[0].startswith("1 prompts had another number of tokens by the server's count")
    same = written(tmp_path / "s.json", (2.0, None, [answer(0.1, reported_prompt_tokens=5)]))
    assert report.notes(same) == []


@pytest.mark.parametrize(
    "of, values, shown",
    [
        ("rate", [1, 2, 4, 8, 10, 46, 60], ["1", "4", "10", "46", "60"]),
        ("rate", [1, 2, 3, 4, 5], ["1", "2", "3", "4", "5"]),
        ("slots", [1000, 1010, 1020, 2000, 15000], ["1,020", "2,000", "15,000"]),
    ],
)
def test_numbers_below_a_plot_do_not_touch(tmp_path, of, values, shown):
    runs = written(tmp_path / "r.json", *((None, None, [answer(0.1)]) for _ in values))
    runs = [replace(run, **{of: value}) for run, value in zip(runs, values, strict=True)]
    for panel in report_plots.draw(runs)[0].svg.split('<g id="axes_')[1:]:
        ticks = panel.partition('<g id="matplotlib.axis_')[2].partition('<g id="matplotlib.axis_')[0]
        ticks = re.split('<g id="xtick_', ticks)[1:]
        assert len(ticks) == len(values)
        texts = [
            re.search("<!-- (.*?) -->", tick) for tick in ticks
        ]  # the last tick's, before the axis' name
        assert [text[1] for text in texts if text] == shown


def test_one_request_is_drawn(tmp_path):
    times, shares = report_plots.shares([7.0])
    assert (list(times), list(shares)) == ([7.0, 7.0], [0.0, 100.0])
    times, shares = report_plots.shares([3.0, 1.0])
    assert (list(times), list(shares)) == ([1.0, 1.0, 3.0], [0.0, 50.0, 100.0])
    page = report.page(written(tmp_path / "r.json", (None, None, [answer(0.1)])), "t")
    assert page.count("<svg") == 2


def test_why_requests_failed_and_that_they_waited_is_said(tmp_path):
    records = [answer(0.1), answer(0.1, 1, slot_wait=2.5), answer(0.0, 2, error="HTTP 503: <busy>\nnow")]
    runs = written(tmp_path / "r.json", (2.0, 1, records))
    text, page = report.markdown(runs, "t"), report.page(runs, "t")
    assert (
        "* ours, 2 req/s, 1 in flight: 1 x HTTP 503: <busy> now" in text
        and "HTTP 503: &lt;busy&gt; now" in page
    )
    for shown in (text, page):
        assert "ours, 2 req/s, 1 in flight: 1 requests waited for a slot, by up to 2.5 s" in shown
        assert "Not every rate was offered" in shown and report.TROUBLES in shown
    quiet = written(tmp_path / "quiet.json", (2.0, 1, records[:1]))
    assert report.TROUBLES not in report.markdown(quiet, "t") + report.page(quiet, "t")


def test_a_servers_settings_are_shown():
    runs = measured.read(ROOT / "perf_configs/results/2026-11-23-h200-openai.json")
    text = report.markdown(runs, "t")
    for flags in ("--api-server-count 4", "--api-server-count 1", "--workers 4"):
        assert flags in text
    assert "VLLM_USE_FLASHINFER_SAMPLER=1" in text


# How colours look without one kind of cone, in linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
VISION = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
}  # fmt: skip
# Ottosson 2020: linear RGB to OKLab.
TO_CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.6806995, 0.10739696],
    [0.08830246, 0.28171884, 0.6299787],
]
TO_LAB = [
    [0.21045426, 0.79361778, -0.00407205],
    [1.9779985, -2.4285922, 0.45059371],
    [0.0259040, 0.78277177, -0.80867577],
]


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As WCAG 2.2 defines it."""
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [report_plots.LIGHT, report_plots.DARK], ids=["light", "dark"])
def test_text_and_curves_can_be_seen_and_told_apart(colours):
    curves = [colours[name] for name in colours if name.startswith("curve-")] + [colours["ink"]]
    assert len(curves) == len(report_plots.COLOURS)
    assert all(contrast(colours[name], colours["background"]) >= 4.5 for name in ("ink", "quiet"))
    assert all(contrast(curve, colours["background"]) >= 3 for curve in curves)
    for vision in VISION.values():
        seen = np.clip(np.array([linear(curve) for curve in curves]) @ np.transpose(vision), 0, 1)
        lab = np.cbrt(seen @ np.transpose(TO_CONES)) @ np.transpose(TO_LAB)
        distances = np.linalg.norm(lab[:, None] - lab, axis=-1)[np.triu_indices(len(lab), 1)]
        assert distances.min() > 0.1  # two neighbours of the earlier colours, of Okabe and Ito, have 0.076


def test_page_is_dark_where_the_browser_prefers_it_and_printed_light(tmp_path):
    runs = written(tmp_path / "r.json", *((rate, None, [answer(0.1)]) for rate in (2.0, 4.0)))
    runs += [
        replace(run, label="other", rate=None, slots=slots) for run, slots in zip(runs, (1, 2), strict=True)
    ]
    page = report.page(runs, "t")
    style, body = page.split("</style>", 1)
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")
    assert "color-scheme: light" in light and "color-scheme: dark" in dark
    for colours, found in ((report_plots.LIGHT, light), (report_plots.DARK, dark)):
        assert all(f"--{name}: {colour};" in found for name, colour in colours.items())
    assert body.count("<svg") == body.count('<div class="wide"><svg') == 4  # on a narrow screen they scroll
    drawn = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", body))
    assert drawn == {"none", *(f"var(--{name})" for name in ("curve-1", "curve-2", "ink", "grid"))}
    letters = re.findall(r"-->\s*<g ([^>]*)>", body)  # behind a comment that says what they read
    assert letters and all(letter.startswith('style="fill: var(--ink)') for letter in letters)
    assert set(re.findall(r"var\(--([^)]+)\)", style)) <= set(report_plots.LIGHT)


def test_without_matplotlib_there_is_help_and_no_half_report(tmp_path):
    runs, wanted = ROOT / "perf_configs/results/2026-11-21-h200.json", tmp_path / "report"
    program = (
        "import sys; sys.modules['matplotlib'] = None; from client.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "report"]
    asked = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0 and "--title" in asked.stdout, asked.stderr
    run = subprocess.run(
        [*command, runs, "--out", wanted], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode != 0 and "client report needs matplotlib" in run.stderr
    assert not list(tmp_path.iterdir())
