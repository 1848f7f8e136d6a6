# SPDX-License-Identifier: Apache-2.0
"""Sums a trace of a running engine (docs/performance.md): the parts of its loop, and the work of the device.

    python -m perf_configs.read_trace FILE.json

"span" is from the first kernel to the last, "busy" the part of it in which at least one kernel ran. "ms" is
the sum of a kernel's times, in which it may wait for the one before it. "busy ms" counts only what is behind
the end of all earlier ones; the sum of all of these is "busy".
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.arguments import argument_parser

TOP, GAPS = 20, 8  # lines


def read_events(file: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace by time, ts and dur in microseconds. Raises OSError or ValueError."""
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError("it should be a Chrome trace, an object with traceEvents")
    return sorted((e for e in found["traceEvents"] if "dur" in e), key=lambda e: float(e["ts"]))


def device_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def report_loop(events: Sequence[dict[str, Any]]) -> list[str]:
    """The parts of the engine's loop that took most of the host's time."""
    parts: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation":
            parts[event["name"]].append(event["dur"] / 1e3)
    lines = [f"{'ms':>8} {'calls':>6} {'ms each':>8} {'most':>8}  part of the loop"]
    for name, each in sorted(parts.items(), key=lambda part: -sum(part[1]))[:TOP]:
        lines.append(
            f"{sum(each):8.2f} {len(each):6} {sum(each) / len(each):8.3f} {max(each):8.3f}  {name[:80]}"
        )
    return lines


def report(events: list[dict[str, Any]]) -> list[str]:
    """Span, busy time, the kernels that took most, and between which kernels the device idled."""
    first, end, busy = events[0]["ts"], 0.0, 0.0
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    gaps: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    previous = ""
    for event in events:
        begin, stop = event["ts"], event["ts"] + event["dur"]
        if previous and begin > end:
            gap = gaps[f"{_short(previous)} -> {_short(event['name'])}"]
            gap[0] += 1
            gap[1] += begin - end
        previous = event["name"]
        added = max(0.0, stop - max(begin, end))
        busy, end = busy + added, max(end, stop)
        entry = totals[event["name"]]
        for place, value in enumerate((1, event["dur"], added)):
            entry[place] += value
    lines = [f"span {(end - first) / 1e3:.2f} ms, busy {busy / 1e3:.2f} ms, {len(events)} kernels and copies"]
    lines.append(f"{'busy ms':>8} {'ms':>8} {'calls':>6} {'us each':>8}  kernel")
    ranked = sorted(totals.items(), key=lambda item: -item[1][2])
    for name, (count, micros, added) in ranked[:TOP]:
        lines.append(
            f"{added / 1e3:8.3f} {micros / 1e3:8.3f} {count:6.0f} {micros / count:8.1f}  {name[:90]}"
        )
    rest, added = (sum(each[place] for _, each in ranked[TOP:]) / 1e3 for place in (1, 2))
    lines.append(f"{added:8.3f} {rest:8.3f}                 {max(0, len(ranked) - TOP)} others")
    widest = sorted(gaps.items(), key=lambda item: -item[1][1])[:GAPS]
    return lines + [
        f"{us / 1e3:8.3f} {'':8} {n:6.0f} {us / n:8.1f}  idle: {pair}" for pair, (n, us) in widest
    ]


def _short(name: str) -> str:
    return name.removeprefix("void ")[:42]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.read_trace", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        events = read_events(options.file)
    except (OSError, ValueError) as error:
        parser.error(f"{options.file}: {error}")
    device = device_events(events)
    print("\n".join([*report_loop(events), "", *(report(device) if device else ["nothing ran on a GPU"])]))


if __name__ == "__main__":
    main()
