# SPDX-License-Identifier: Apache-2.0
"""What a report draws and says of runs that are easily drawn wrongly."""

import json
import math
from dataclasses import replace
from pathlib import Path

from client import report, report_plots
from client.metrics import RequestRecord, request_columns, summarise

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
    return report.read(path)


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


def test_several_runs_of_a_point_are_their_median(tmp_path):
    runs = written(tmp_path / "r.json", *((2.0, None, [answer(ttft)]) for ttft in (0.3, 0.1, 0.2)))
    runs = [replace(run, repeat=number) for number, run in enumerate(runs)]
    assert report_plots.curve(runs, "rate", "median_ttft_ms") == ([2.0], [200.0])
    none = written(tmp_path / "none.json", (2.0, None, [answer(0.1, error="cut off")]))
    assert math.isnan(report_plots.curve([*runs, *none], "rate", "median_ttft_ms")[1][0])
    sweep = [*runs, *(replace(run, rate=4.0) for run in runs)]
    captions = [plot.caption for plot in report_plots.draw(sweep)]
    assert captions[0].endswith("Several runs of a point: their median.")


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
    runs = report.read(ROOT / "perf_configs/results/2026-11-23-h200-openai.json")
    text = report.markdown(runs, "t")
    for flags in ("--api-server-count 4", "--api-server-count 1", "--workers 4"):
        assert flags in text
    assert "VLLM_USE_FLASHINFER_SAMPLER=1" in text
