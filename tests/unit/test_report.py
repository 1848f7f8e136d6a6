# SPDX-License-Identifier: Apache-2.0
"""What a report draws and says of runs that are easily drawn wrongly."""

import html
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from client import measured, report
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
    from client import report_plots

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


def test_markers_of_the_highest_values_are_whole(tmp_path, monkeypatch):
    """Also where all values lie close together, far above 0."""
    from client import report_plots

    figures = []
    monkeypatch.setattr(report_plots, "_svg", lambda figure: figures.append(figure) or "")
    runs = written(tmp_path / "r.json", *((rate, None, [answer(0.2 + rate / 1000)]) for rate in (2.0, 4.0)))
    report_plots.draw(runs)
    for axis in figures[0].axes:
        highest = max(max(line.get_ydata()) for line in axis.lines)
        assert 1.025 * highest < axis.get_ylim()[1] < 1.2 * highest


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
        assert shown["end to end ms"] in text and "triton, model llama. no GPU" in text
        assert "good: the share of requests that have ttft <= 350 ms, tpot <= 80 ms." in text


def test_a_servers_name_that_is_its_label_is_there_once(tmp_path):
    (run,) = written(tmp_path / "r.json", (2.0, None, [answer(0.1)]))
    run = replace(run, label="openai-chat, vllm 1", server="vllm 1")
    for model, words in (("", "no GPU"), ("llama", "model llama. no GPU")):
        text = report.markdown([replace(run, model=model)], "t")
        assert f"* **openai-chat, vllm 1**: {words}, 2 cores" in text


def test_without_matplotlib_there_is_help_and_no_half_report(tmp_path):
    runs, wanted = ROOT / "perf_configs/results/2026-11-21-h200.json", tmp_path / "report"
    program = (
        "import sys; sys.modules['matplotlib'] = None; from client.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "report"]
    asked = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert asked.returncode == 0 and "--title" in asked.stdout, asked.stderr
    run = subprocess.run(
        [*command, runs, "--out", wanted], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode != 0 and "client report needs matplotlib" in run.stderr
    assert not list(tmp_path.iterdir())
