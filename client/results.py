# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: JSON, CSV and sglang's JSON lines."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from client.metrics import RequestRecord, percentile_name

Run = dict[str, Any]
# sglang's name of a time -> ours, and the percentiles that it writes.
SGLANG_TIMES = {
    "e2e_latency": ("latency", (99,)),
    "ttft": ("ttft", (99,)),
    "tpot": ("tpot", (99,)),
    "itl": ("itl", (95, 99)),
}


def write_json(runs: Sequence[Run], path: Path) -> None:
    """A run as it is, several as {"runs": [...]}. The file is replaced in one go."""
    text = json.dumps(runs[0] if len(runs) == 1 else {"runs": list(runs)}, allow_nan=False)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """A line a request: the run's number, rate and concurrency, then the columns of `requests`. Inter-chunk
    times are separated by blanks."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names: list[str] = next((list(run["requests"]) for run in runs if run["requests"]), [])
        writer.writerow(["run", "request_rate", "max_concurrency", *names])
        for number, run in enumerate(runs):
            where = [number, run["request_rate"], run["max_concurrency"]]
            for row in zip(*(run["requests"].get(name, []) for name in names), strict=True):
                cells = [" ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in row]
                writer.writerow([*where, *cells])


def sglang_line(run: Run, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What sglang's bench_serving writes of a run with --output-details, under the same names. Lengths and
    times of failed requests are 0 there. Where the tokens of the received text were not counted
    (--retokenize) their total is None."""
    summary, done = run["summary"], [r for r in records if r.error is None]
    duration = summary["duration_s"] or math.nan
    times = {
        "latency": [r.latency for r in done],
        "ttft": [r.ttft for r in done],
        "tpot": [r.tpot for r in done if r.tpot is not None],
        "itl": [gap for r in done for gap in r.itl],
    }
    line: dict[str, Any] = {
        "backend": run["backend"],
        "dataset_name": run["arguments"]["dataset"].partition(":")[0],
        "request_rate": run["request_rate"] or run["ramp"] or "inf",
        "max_concurrency": run["max_concurrency"],
        "duration": summary["duration_s"],
        "completed": summary["completed"],
        "total_input_tokens": summary["prompt_tokens"],
        "total_output_tokens": summary["output_tokens"],
        "total_output_tokens_retokenized": summary.get("retokenized_output_tokens"),
        "request_throughput": summary["completed"] / duration,
        "input_throughput": summary["prompt_tokens"] / duration,
        "output_throughput": summary["output_tokens"] / duration,
    }
    for theirs, (ours, percentiles) in SGLANG_TIMES.items():
        ms = np.asarray(times[ours] or [math.nan]) * 1e3
        line[f"mean_{theirs}_ms"] = float(ms.mean())
        line[f"median_{theirs}_ms"] = float(np.median(ms))
        line[f"std_{theirs}_ms"] = float(ms.std())
        for which in percentiles:
            line[f"{percentile_name(which)}_{theirs}_ms"] = float(np.percentile(ms, which))
    line["concurrency"] = sum(times["latency"]) / duration
    line["accept_length"] = summary["accepted_length"]
    line["input_lens"] = [0 if r.error else r.prompt_tokens for r in records]
    line["output_lens"] = [0 if r.error else r.output_tokens for r in records]
    line["ttfts"] = [0.0 if r.error else r.ttft for r in records]
    line["itls"] = [[] if r.error else r.itl for r in records]
    line["generated_texts"] = [r.text for r in records]
    line["errors"] = [r.error or "" for r in records]
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in line.items()}


def append_sglang(run: Run, records: Sequence[RequestRecord], path: Path) -> None:
    """Adds a line to the file, as bench_serving does."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(sglang_line(run, records), allow_nan=False) + "\n")
