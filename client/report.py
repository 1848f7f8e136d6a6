# SPDX-License-Identifier: Apache-2.0
"""Markdown and one HTML page of the load generator's results.

python -m client report rates.json --out report
python -m client report ours=a.json "other engine=b.json" --out comparison

Reads what `client bench --output` and `perf_configs.run` write; the runs of
several files share the plots. NAME=FILE says what the file's server is called;
files of the same NAME are joined to one curve.
The page holds all it needs and loads nothing; it is light or dark as the
browser prefers.
"""

import argparse
import html
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from client.arguments import argument_parser
from client.device_log import COLUMNS, NO_GPU, describe
from client.measured import Measured, read, told_apart
from client.metrics import limits_text


def number(value: float | None) -> str:
    """Three digits, or all of those before the point; - for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


SPREAD = ("mean", "median", "p90", "p99")


def table(runs: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of counts and rates of all runs."""
    head = ["server", "load", "requests", "failed", "req/s", "in tok/s", "out tok/s"]
    goodput = any("goodput_share" in run.summary for run in runs)
    rows = []
    for run in runs:
        s = run.summary
        count = f"{s['completed'] + s['failed']}" + (" (incomplete)" if run.interrupted else "")
        row = [*_names(run, runs), count, str(s["failed"]), number(s.get("requests_per_s"))]
        input_rate = s["prompt_tokens"] / s["duration_s"] if s.get("duration_s") else None
        row += [number(input_rate), number(s["output_tokens_per_s"])]
        if goodput:
            share = s.get("goodput_share")
            row.append("-" if share is None else f"{share:.1%}")
        rows.append(row)
    return head + (["good"] if goodput else []), rows


def times_table(runs: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the times of all runs: mean, median, P90 and P99 of each."""
    names = ("ttft", "tpot", "itl", "latency")

    def spread(run: Measured, name: str) -> str:
        return " / ".join(number(run.summary.get(f"{which}_{name}_ms")) for which in SPREAD)

    rows = [[*_names(run, runs), *(spread(run, name) for name in names)] for run in runs]
    return ["server", "load", "TTFT ms", "TPOT ms", "ITL ms", "end to end ms"], rows


def _names(run: Measured, runs: Sequence[Measured]) -> list[str]:
    """Server and load of a run among others."""
    return [run.label, f"{run.load}, run {run.repeat + 1}" if any(each.repeat for each in runs) else run.load]


MEDIANS = "Medians of several runs"
MEDIANS_EXPLAINED = "In brackets the lowest and the highest run."


def medians(runs: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: of each point that ran several times the median run, with the lowest and the highest; no
    rows where none did."""
    metrics = {
        "out tok/s": "output_tokens_per_s",
        **{f"{name.upper()} {which} ms": f"{key}_{name}_ms" for name in ("ttft", "tpot")
           for which, key in (("median", "median"), ("P99", "p99"))},
    }  # fmt: skip
    found: dict[tuple[str, str], list[Measured]] = {}
    for run in runs if any(run.repeat for run in runs) else ():
        found.setdefault((run.label, run.load), []).append(run)
    rows = []
    for (label, load), several in found.items():
        cells = []
        for metric in metrics.values():
            values = [v for run in several if (v := run.summary.get(metric)) is not None]
            middle = number(statistics.median(values) if len(values) == len(several) else None)
            spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
            cells.append(middle + spread)
        rows.append([label, load, str(len(several)), *cells])
    return ["server", "load", "runs", *metrics], rows


def power_table(runs: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of power and clocks, a row for each GPU of a run; no rows where there was no GPU."""
    rows = [
        [run.label, run.load, *cells]
        for run in runs
        if run.devices and "none" not in run.devices
        for cells in describe(run.devices)
    ]
    return ["server", "load", *COLUMNS], rows


def notes(runs: Sequence[Measured]) -> list[str]:
    """What a reader must know before comparing."""
    found = []
    for limits in dict.fromkeys(limits_text(s) for run in runs if "goodput_share" in (s := run.summary)):
        found.append(f"good: the share of requests that have {limits}.")
    if any(run.interrupted for run in runs):
        found.append("Some runs were interrupted: their numbers are of what was done until then.")
    if failed := sum(run.summary["failed"] for run in runs):
        found.append(f"{failed} requests failed; their times are in no number.")
    if any(run.summary.get("requests_that_waited_for_a_slot") for run in runs):
        found.append("Not every rate was offered: requests waited for a slot, and no time holds that wait.")
    if other := sum(run.summary.get("requests_with_other_prompt_length", 0) for run in runs):
        found.append(
            f"{other} prompts had another number of tokens by the server's count than by the client's."
        )
    by_load: dict[tuple[Any, ...], set[str]] = {}
    for run in runs:
        by_load.setdefault((run.row, run.load, run.repeat), set()).add(run.prompts_sha256)
    if any(len(prompts) > 1 for prompts in by_load.values()):
        found.append("Not all runs of the same load had the same prompts.")
    reasons = {run.devices["none"] for run in runs if run.devices and "none" in run.devices}
    if reasons := reasons - {NO_GPU}:
        found.append(f"Power and clocks of GPUs were not read ({', '.join(sorted(reasons))}).")
    if len({run.machine for run in runs}) > 1:
        found.append("The runs are of different machines or versions, listed below.")
    return found


def troubles(runs: Sequence[Measured]) -> list[str]:
    """A line for each kind of failure of a run, and for requests that waited for a slot."""
    found = []
    for run in runs:
        what, summary = f"{run.label}, {run.load}", run.summary
        for message, count in summary.get("errors", {}).items():
            found.append(f"{what}: {count} x {' '.join(message.split())}")
        if waited := summary.get("requests_that_waited_for_a_slot"):
            longest = summary["longest_slot_wait_s"]
            found.append(f"{what}: {waited} requests waited for a slot, by up to {longest:.3g} s")
    return list(dict.fromkeys(found))


TROUBLES = "Requests that failed or waited"


def origins(runs: Iterable[Measured]) -> list[tuple[str, str, str]]:
    """(server's label, what that does not say of server and machine, command with the date of its first run),
    each once."""
    first: dict[tuple[str, str, str], str] = {}
    for run in runs:
        told = [run.server] if run.server not in run.label else []
        told += [f"model {run.model}"] if run.model else []
        what = ". ".join([", ".join(told), run.machine] if told else [run.machine])
        first.setdefault((run.label, what, run.command), run.started)
    return [(label, what, f"{date[:10]}: {command}") for (label, what, command), date in first.items()]


EXPLAINED = (
    "TTFT: from sending a request to its first chunk. TPOT: time per further token. ITL: time between two"
    " chunks. End to end: from sending a request to its last chunk. Times are mean / median / P90 / P99."
    " Failed requests count in no time and no rate."
)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: str = ":") -> list[str]:
    """Columns from the third on are numbers, unless `numbers` is empty."""
    lines = ["", "| " + " | ".join(head) + " |", "|---|---" + f"|---{numbers}" * (len(head) - 2) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def markdown(runs: Sequence[Measured], title: str) -> str:
    """The table, notes, machines, versions and commands."""
    return "\n".join([f"# {title}", *sections(runs)]) + "\n"


def sections(runs: Sequence[Measured]) -> list[str]:
    """The lines of all of it behind the title."""
    lines = ["", *(f"* {note}" for note in notes(runs)), "", EXPLAINED]
    lines += [*markdown_table(*table(runs)), *markdown_table(*times_table(runs))]
    medians_head, medians_rows = medians(runs)
    if medians_rows:
        lines += ["", f"## {MEDIANS}", "", MEDIANS_EXPLAINED, *markdown_table(medians_head, medians_rows)]
    if found := troubles(runs):
        lines += ["", f"## {TROUBLES}", "", *(f"* {line}" for line in found)]
    power_head, power_rows = power_table(runs)
    if power_rows:
        lines += ["", "## Power and clocks", *markdown_table(power_head, power_rows, "")]
    lines += ["", "## Measured with", ""]
    for label, what, command in origins(runs):
        lines += [f"* **{label}**: {what}.", f"  `{command}`"]
    return lines


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--background);
  max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.wide { overflow-x: auto; }
figure { margin: 2rem 0; }
figure svg { width: 100%; height: auto; }
@media screen { figure svg { min-width: 44rem; } }
@media print { .wide { overflow: visible; } table { font-size: .6em; } }
figcaption { color: var(--quiet); }
code { font-size: .85em; overflow-wrap: anywhere; }
.note { border-left: .3rem solid var(--curve-2); padding-left: .75rem; }
"""


def _colours() -> str:
    """What is printed is light, whatever the screen is."""
    from client import report_plots

    return f"""
:root {{ color-scheme: light; {_variables(report_plots.LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ color-scheme: dark; {_variables(report_plots.DARK)} }}
}}
"""


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(name: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{name}>{html.escape(cell)}</{name}>" for cell in cells) + "</tr>\n"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{line("th", head)}</thead>\n<tbody>{body}</tbody></table></div>'


def page(runs: Sequence[Measured], title: str) -> str:
    """The HTML page, plots included as SVG. Needs matplotlib."""
    from client import report_plots

    text = html.escape
    parts = [f'<p class="note">{text(note)}</p>' for note in notes(runs)]
    parts.append(f"<p>{text(EXPLAINED)}</p>")
    parts += [_html_table(*table(runs)), _html_table(*times_table(runs))]
    medians_head, medians_rows = medians(runs)
    if medians_rows:
        parts += [f"<h2>{MEDIANS}</h2>", f"<p>{MEDIANS_EXPLAINED}</p>"]
        parts.append(_html_table(medians_head, medians_rows))
    if found := troubles(runs):
        parts += [f"<h2>{TROUBLES}</h2>\n<ul>", *(f"<li>{text(line)}</li>" for line in found), "</ul>"]
    for plot in report_plots.draw(runs):
        caption = text(plot.caption)
        parts.append(f'<figure role="img" aria-label="{caption}"><div class="wide">{plot.svg}</div>')
        parts.append(f"<figcaption>{caption}</figcaption></figure>")
    power_head, power_rows = power_table(runs)
    if power_rows:
        parts += ["<h2>Power and clocks</h2>", _html_table(power_head, power_rows)]
    parts.append("<h2>Measured with</h2>\n<ul>")
    for label, what, command in origins(runs):
        said = f"<strong>{text(label)}</strong>: {text(what)}."
        parts.append(f"<li>{said}<br><code>{text(command)}</code></li>")
    parts.append("</ul>")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{text(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_colours()}{STYLE}</style>\n"
        f"</head>\n<body>\n<h1>{text(title)}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argument_parser("client report", __doc__)
    p.add_argument("results", nargs="+", metavar="[NAME=]FILE", help="results; NAME: what to call the server")
    p.add_argument(
        "--out", type=Path, default=Path("report"), help="write OUT.md and OUT.html (default: report)"
    )
    p.add_argument("--title", default="Benchmark results", help="heading (default: %(default)s)")
    p.add_argument(
        "--rows",
        default="",
        help="rows of perf_configs.run's results to show, with commas between (default: all)",
    )
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    files: list[tuple[Path, list[Measured], bool]] = []
    try:
        for given in args.results:
            name, named, file = given.partition("=")
            if Path(given).exists() or not named:
                name, file = "", given
            files.append((Path(file), read(Path(file), name or None), bool(name)))
        runs = told_apart(files)
        if wanted := [row.strip() for row in args.rows.split(",") if row.strip()]:
            found = {run.row for run in runs}
            if missing := [row for row in wanted if row not in found]:
                rows = ", ".join(sorted(row for row in found if row)) or "runs of no row"
                raise ValueError(f"--rows: there are no runs of {', '.join(missing)}, but of {rows}")
            runs = [run for run in runs if run.row in wanted]
        if not runs:
            raise ValueError("there are no runs to report")
        written = [args.out.with_name(args.out.name + ending) for ending in (".md", ".html")]
        texts = markdown(runs, args.title), page(runs, args.title)
        for file, text in zip(written, texts, strict=True):
            file.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("written: " + ", ".join(map(str, written)))
    return 0
