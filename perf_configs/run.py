# SPDX-License-Identifier: Apache-2.0
"""Runs benchmark rows against one server after the other and writes results/<date>-<gpu>.json, .md and .html.

    python -m perf_configs.run --model-dir DIR --sharegpt FILE                     everything, both servers
    python -m perf_configs.run ... --server ours --rows a,b                        one server, some rows
    python -m perf_configs.run ... --server ours,vllm:all,sglang --repeats 3       three runs of each point
    python -m perf_configs.run ... --dry-run                                       what would be done, alone
    python -m perf_configs.run ... --url ours=http://127.0.0.1:8000                a server that runs already
    python -m perf_configs.run --merge part1.json part2.json                       only merge and draw

Rows that do not fit into --time-limit any more are left out and named; run them in another call and merge.
"""

import argparse
import datetime
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from client.arguments import integer, seconds
from client.bench_options import given_options
from client.datasets import Prompt, fingerprint, load_prompts, load_tokenizer
from client.device_log import DeviceLog, find_devices
from client.load import Load, run_load
from client.measured import read, told_apart
from client.metrics import format_table, request_columns
from client.report import page
from client.scenarios import Point, Scenario, known_rows, read_scenarios
from client.wire import OPENAI
from flashinfer_backend.core.paths import named_folder
from perf_configs import floor, provenance, results
from perf_configs.plan import (
    PROFILE,
    Plan,
    check_conversations,
    gpus_of_ours,
    knob_options,
    knob_values,
    make_plan,
)
from perf_configs.servers import ROOT, Running, ServerSpec, StartError, check, running_at, serve

WARM_UP_SEED = 1_000_003
WARM_UP_KEYS = ("completed", "failed", "errors", "requests_with_checked_length")
LEFT_OUT = ("url", "api_key")  # of the load, in results
OF_MERGING = {"merge", "out"}  # the options that count where nothing is measured
OF_STARTING = {"port", "load_format"}
SLOWER_SERVER = 1.5  # times as long as another server a server is given for a row
EXIT_INTERRUPTED = 130
STOP_RESERVE = 40.0  # seconds kept back for stopping a server and writing results


def argument_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m perf_configs.run", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument(
        "--model-dir", type=named_folder, metavar="DIR",
        help="checkpoint folder (config.json and tokenizer.json suffice); bundled: the package's small one",
    )  # fmt: skip
    p.add_argument(
        "--sharegpt", type=Path, metavar="FILE", help="ShareGPT-style JSON; needed by rows with that dataset"
    )
    p.add_argument(
        "--server", default="ours,vllm", metavar="NAME[:VARIANT|:all],...",
        help="servers of servers.toml to measure, in this order (default: ours,vllm)",
    )  # fmt: skip
    p.add_argument(
        "--rows", default="", metavar="ROW,...",
        help="rows to run, by the names of files in scenarios/ (default: all that compare servers)",
    )  # fmt: skip
    p.add_argument(
        "--repeats", type=integer(1), default=1, metavar="N",
        help="runs of each row and rate (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--load-format", choices=("dummy", "auto"), default="dummy",
        help="weights of all servers: random (dummy), or the checkpoint's (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--url", action="append", default=[], metavar="SERVER=URL",
        help="measure a running server instead of starting one; may be repeated",
    )  # fmt: skip
    p.add_argument(
        "--profile", type=Path, metavar="FILE", help=f"knobs of ours (default: {PROFILE.relative_to(ROOT)})"
    )
    p.add_argument(
        "--knob", action="append", default=[], metavar="NAME=VALUE",
        help="a knob of ours, which overrides the profile's; may be repeated",
    )  # fmt: skip
    p.add_argument(
        "--port", type=integer(1, 65533), metavar="PORT", default=8300,
        help="HTTP port; the next two are used as well (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--time-limit", type=seconds, metavar="S", default=1800.0,
        help="seconds for the whole call; rows that no longer fit are omitted (default: %(default)g)",
    )  # fmt: skip
    p.add_argument(
        "--workers", type=integer(0), metavar="N", default=0,
        help="processes that send (default: 0, which is half the cores, at most 8)",
    )  # fmt: skip
    p.add_argument(
        "--check-tokens",
        action="store_true",
        help="have ours report every chunk's token count also in measured runs",
    )
    p.add_argument(
        "--dry-run", action="store_true", help="check all that a call needs, say what it would do, and end"
    )
    p.add_argument("--no-warm-up", action="store_true", help="send no warm-up requests before each row")
    p.add_argument(
        "--out", type=Path, metavar="DIR", default=ROOT / "perf_configs/results",
        help="folder of the results (default: perf_configs/results)",
    )  # fmt: skip
    p.add_argument(
        "--commit",
        default="",
        help="name of this version in the results (default: the commit that git names)",
    )
    p.add_argument(
        "--merge", type=Path, metavar="FILE", nargs="+", default=[], help="earlier results to merge"
    )
    return p


class Benchmark:
    """The state of one call: what is left of its time and the document it fills."""

    def __init__(self, args: argparse.Namespace, plan: Plan) -> None:
        self.args, self.plan = args, plan
        self.deadline = time.monotonic() + args.time_limit - STOP_RESERVE
        self.tokenizer = load_tokenizer(args.model_dir)
        self.machine, self.facts = results.machine()
        self.took: dict[str, float] = {}  # seconds of each row, on the slowest server so far
        self.left_out: list[str] = []
        self.problems: list[str] = []
        self.failed_requests = 0
        self.measured = 0  # runs of this call
        self.commit = args.commit or current_commit()
        self.devices = find_devices()
        self.floor: dict[str, Any] = {"none": "a server ran already"}
        gpu = re.sub(r"[^a-z0-9]+", "-", str(self.facts["gpu"]).lower().replace("nvidia", "")).strip("-")
        self.path = args.out / f"{datetime.date.today().isoformat()}-{gpu or 'none'}.json"
        self.document = results.merge(results.existing(self.path))

    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    def expected(self) -> str:
        """What the call will probably take, of what it may take."""
        servers, rows = self.plan.servers, self.plan.scenarios.values()
        wanted = sum(map(self.seconds_of, rows)) * len(servers)
        starts = "" if all(spec.name in self.plan.urls for spec in servers) else " beside the servers' starts"
        what = f"{_count(len(rows), 'row')} on {_count(len(servers), 'server')}"
        left = f"{self.remaining():.0f} (--time-limit less {STOP_RESERVE:.0f} for the end)"
        return f"{what}: some {wanted:.0f} s{starts}, of {left}"

    def described(self) -> str:
        """What the call would start, send and write, line by line."""
        scenarios = self.plan.scenarios.values()
        lines = ["servers, in this order:"]
        for spec in self.plan.servers:
            if (url := self.plan.urls.get(spec.name)) is not None:
                lines.append(f"  {spec.label}: runs at {url}")
                continue
            for size in dict.fromkeys(scenario.tensor_parallel_size for scenario in scenarios):
                words = [f"{name}={value}" for name, value in spec.settings.environment.items()]
                if spec.name in results.OWN:
                    words += [self.plan.profile.name, self.knobs_of_ours(size)]
                else:
                    words += [f"tensor parallel over {_count(size, 'GPU')}"]
                words += [spec.settings.flags] if spec.settings.flags else []
                lines.append(f"  {spec.label}: started, {' '.join(words)}")
        lines.append("rows, the same on each:")
        for scenario in scenarios:
            warm_up = 0 if self.args.no_warm_up else scenario.warm_up_prompts
            points = "; ".join(map(_in_words, scenario.points))
            times = f", {self.args.repeats} times" if self.args.repeats > 1 else ""
            lines.append(f"  {scenario.row}: {scenario.title}; some {self.seconds_of(scenario):.0f} s")
            lines.append(f"    {_count(warm_up, 'prompt')} to warm up; {points}{times}")
            lines += [f"    required: {r.metric} {r}" for r in scenario.requirements]
        there = ", with what is in it" if self.path.exists() else ""
        return "\n".join([*lines, f"results: {self.path}{there}"])

    def knobs_of_ours(self, tensor_parallel_size: int) -> str:
        """`--set name=value ...` of ours for rows of this size: what a comparison needs, and --knob over
        it."""
        # With tensor_parallel_size and replicas of its own the row's GPUs are cut up otherwise.
        defaults = {"tensor_parallel_size": tensor_parallel_size, "enable_kv_cache_reuse": "false"}
        given = knob_values(self.args.knob)
        knobs = [f"{name}={value}" for name, value in defaults.items() if name not in given]
        return knob_options([*knobs, *self.args.knob])

    def seconds_of(self, scenario: Scenario) -> float:
        """How long a row will probably take: somewhat more than on the slowest server that this call has
        measured; before there is one, what its file says."""
        if scenario.row in self.took:
            return self.took[scenario.row] * SLOWER_SERVER
        return scenario.expected_seconds * self.args.repeats

    def prompts(self, scenario: Scenario, count: int, seed: int) -> list[Prompt]:
        """The row's prompts: the same for every server."""
        dataset = f"{scenario.dataset}:{self.args.sharegpt}" if scenario.from_file else scenario.dataset
        return load_prompts(dataset, self.tokenizer, count, seed, **scenario.lengths)

    def run_row(self, scenario: Scenario, spec: ServerSpec, running: Running) -> None:
        """Warm-up, then every point of the row; each is in the result file once it is done. One that no
        longer fits into the call's time is left out, with those after it."""
        warm_up: dict[str, Any] = {}
        if not self.args.no_warm_up:
            prompts = self.prompts(scenario, scenario.warm_up_prompts, WARM_UP_SEED)
            point = replace(scenario.points[0], request_rate=math.inf)
            load = self.load(spec, running, replace(scenario, ramp=None), point, check_tokens=True)
            summary = run_load(load, prompts).summary
            warm_up = {key: summary[key] for key in WARM_UP_KEYS}
            self.failed_requests += summary["failed"]
            if summary["failed"]:
                print(format_table(summary, f"warm-up of row {scenario.row}, {spec.name}"), flush=True)
            if prompts and not summary["completed"]:
                error = next(iter(summary["errors"]), "none was sent")
                self.problems.append(f"{spec.label} row {scenario.row}: its whole warm-up failed: {error}")
                return
        took: dict[Point, float] = {}  # seconds of each point's last run
        rounds = [point for _ in range(self.args.repeats) for point in scenario.points]
        for number, point in enumerate(rounds):
            repeat, began = number // len(scenario.points), time.monotonic()
            if (left := self.remaining()) <= took.get(point, 0.0):
                self.left_out.append(
                    f"{spec.label} row {scenario.row} from rate {point.request_rate:g}, run {repeat + 1} of "
                    f"{self.args.repeats} ({_seconds_wanted(took.get(point), left)})"
                )
                return
            # A seed of its own: a server that caches prefixes would know the prompts of the run before.
            seed = scenario.seed + number
            prompts = self.prompts(scenario, point.num_prompts, seed)
            load = replace(
                self.load(spec, running, scenario, point, check_tokens=self.args.check_tokens), seed=seed
            )
            started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            with DeviceLog(self.devices) as log:
                result = run_load(load, prompts)
            title = f"row {scenario.row} ({scenario.title}), {spec.label}, rate {point.request_rate:g}"
            title += f", run {repeat + 1} of {self.args.repeats}" if self.args.repeats > 1 else ""
            print(format_table(result.summary, title), flush=True)
            run = {
                "server": spec.name,
                "variant": spec.variant,
                "row": scenario.row,
                "request_rate": None if math.isinf(point.request_rate) else point.request_rate,
                "repeat": repeat,
                "machine": self.machine,
                "started": started,
                "version": running.version,
                "commit": self.commit,
                **self.settings(scenario, spec, running),
                "seed": seed,
                "prompts_sha256": fingerprint(prompts),
                "load": {k: v for k, v in asdict(load).items() if k not in LEFT_OUT and v != math.inf},
                "warm_up": warm_up,
                "summary": result.summary,
                "devices": log.result(*result.clock),
                "floor": self.floor | self.floor_of_steps(self.gpus(scenario, spec), point, prompts),
                "requests": request_columns(result.records),
            }
            self.failed_requests += result.summary["failed"]
            new = {"machines": {self.machine: self.facts}, "runs": [run]}
            self.document = results.merge([self.document, new])
            results.save(self.document, self.path)
            self.measured += 1
            took[point] = time.monotonic() - began

    def floor_of_steps(self, gpus: int, point: Point, prompts: Sequence[Prompt]) -> dict[str, float]:
        """TPOT if each step took what the devices need to read weights and cache once; nothing where the
        number of rows in a step is not given, or either is not known."""
        if point.max_concurrency is None or "none" in self.floor:
            return {}
        turns = [turn for prompt in prompts for turn in (prompt, *prompt.later)]
        context = sum(turn.prompt_tokens + turn.output_tokens / 2 for turn in turns) / len(turns)
        try:
            size = floor.bytes_of_a_step(self.args.model_dir / "config.json", point.max_concurrency, context)
        except ValueError:
            return {}
        bandwidth = self.floor["copy_bytes_per_s"] * gpus
        return {"tpot_ms": round(size / bandwidth * 1e3, 4)}

    def gpus(self, scenario: Scenario, spec: ServerSpec) -> int:
        """How many a server that is started for the row runs on: of ours knobs and profile may say another
        number than the row."""
        if spec.name not in results.OWN or spec.name in self.plan.urls:
            return scenario.tensor_parallel_size
        return gpus_of_ours(scenario, self.plan.profile, self.args.knob)

    def settings(self, scenario: Scenario, spec: ServerSpec, running: Running) -> dict[str, Any]:
        """What the server serves, and what it was started with: of one that ran already, only where."""
        started = running.start_seconds is not None
        ours = started and spec.name in results.OWN
        peer = started and spec.name not in results.OWN
        environment = os.environ | spec.settings.environment
        return {
            "checkpoint": provenance.checkpoint_identity(self.args.model_dir),
            "command": spec.command if started else running.url,
            "profile": provenance.file_identity(self.plan.profile) if ours else None,
            "knobs": self.plan.knobs if ours else "",
            "environment": provenance.peer_variables(spec.name, environment) if peer else {},
            "flags": spec.settings.flags if started else "",
            "load_format": self.args.load_format if started else None,
            "tensor_parallel_size": self.gpus(scenario, spec) if started else None,
            "start_seconds": running.start_seconds,
        }

    def load(
        self, spec: ServerSpec, running: Running, scenario: Scenario, point: Point, check_tokens: bool
    ) -> Load:
        """The load generator's settings for one point."""
        return Load(
            backend=spec.backend, url=running.url, model=running.model, request_rate=point.request_rate,
            max_concurrency=point.max_concurrency, seed=scenario.seed, workers=self.args.workers,
            time_limit=max(5.0, self.remaining()), check_tokens=check_tokens, extra_body=scenario.sampling,
            burstiness=scenario.burstiness, ramp=scenario.ramp, think_seconds=scenario.think_seconds,
            priority_per_output_token=scenario.priority_per_output_token if spec.backend in OPENAI else 0,
        )  # fmt: skip

    def run_server(self, spec: ServerSpec) -> None:
        """Runs every row that fits: on the server that runs already, or on one started for the rows of each
        number of GPUs."""
        by_size: dict[int, list[Scenario]] = {}
        for scenario in self.plan.scenarios.values():
            by_size.setdefault(scenario.tensor_parallel_size, []).append(scenario)
        for size, scenarios in by_size.items():
            # As this call's results, but for the ending; with a server for each size, the size too.
            name = (
                f"{self.path.stem}-{spec.label.replace(':', '-')}{f'-{size}' if len(by_size) > 1 else ''}.log"
            )
            try:
                self._run_server(spec, size, scenarios, self.path.with_name(name))
            except RuntimeError as error:  # it did not start, or the load generator broke
                # At once: the call may be cut before its end.
                print(f"{spec.label}: {error}", file=sys.stderr, flush=True)
                self.problems.append(f"{spec.label}: {error}".splitlines()[0])

    def _run_server(
        self, spec: ServerSpec, tensor_parallel_size: int, scenarios: list[Scenario], kept_log: Path
    ) -> None:
        variables = {
            "MODEL_DIR": str(self.args.model_dir.resolve()),
            "PROFILE": str(self.plan.profile.resolve()),
            "KNOBS": self.knobs_of_ours(tensor_parallel_size),
            "LOAD_FORMAT": self.args.load_format,
            "TENSOR_PARALLEL_SIZE": str(tensor_parallel_size),
        }
        with tempfile.TemporaryDirectory(prefix=f"perf-{spec.name}-") as work:
            server: Any
            if (url := self.plan.urls.get(spec.name)) is not None:
                server = nullcontext(running_at(url, spec))
            else:
                server = serve(spec, variables, Path(work), self.args.port, self.remaining(), kept_log)
            with server as running:
                print(f"{spec.label} {running.version} at {running.url}, {running.since}", flush=True)
                for scenario in scenarios:
                    wanted, left = self.seconds_of(scenario), self.remaining()
                    if wanted > left:
                        times = _seconds_wanted(wanted, left)
                        self.left_out.append(f"{spec.label} row {scenario.row} ({times})")
                        continue
                    began, before = time.monotonic(), (self.failed_requests, len(self.left_out))
                    self.run_row(scenario, spec, running)
                    took = time.monotonic() - began
                    # Requests that fail may take no time at all, and a part of a row takes less.
                    if (self.failed_requests, len(self.left_out)) == before:
                        self.took[scenario.row] = max(took, self.took.get(scenario.row, 0.0))


def _in_words(point: Point) -> str:
    """A point's load."""
    words = [] if math.isinf(point.request_rate) else [f"at {point.request_rate:g} requests/s"]
    words += [] if point.max_concurrency is None else [f"{point.max_concurrency} at a time"]
    return f"{_count(point.num_prompts, 'prompt')} {', '.join(words) or 'at once'}"


def _seconds_wanted(wanted: float | None, left: float) -> str:
    """Why something is left out. wanted: None where it never ran."""
    some = "" if wanted is None else f"some {wanted:.0f} s wanted, "
    return f"{some}{max(0.0, left):.0f} left"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def current_commit() -> str:
    """HEAD of this checkout, with + when files differ, or unknown."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def write_report(document: results.Document, path: Path) -> None:
    """The merged JSON, the Markdown table beside it, and a page with plots, unless matplotlib is missing."""
    results.save(document, path)
    # Beside the rows that compare servers those that are there and require something.
    known = known_rows()
    rows = [*read_scenarios(), *(run["row"] for run in document["runs"] if run["row"] in known)]
    table = results.markdown(document, read_scenarios(",".join(dict.fromkeys(rows))))
    path.with_suffix(".md").write_text(table, encoding="utf-8")
    runs = told_apart([(path, read(path), False)]) if document["runs"] else []
    try:
        if runs:
            path.with_suffix(".html").write_text(page(runs, path.stem), encoding="utf-8")
    except ImportError:
        print("matplotlib is not installed: no plots drawn")
    print("\n".join(line for line in table.split(results.ALL_RUNS)[0].splitlines() if line))
    print(f"written: {path}")


def _end_with_servers(*_: Any) -> None:
    """A terminated benchmark keeps the log of its server and ends it; once is enough."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser()
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    merge_only = bool(args.merge) and args.model_dir is None
    if merge_only and (unused := given_options(parser, argv) - OF_MERGING):
        option = f"--{min(unused).replace('_', '-')}"
        parser.error(f"{option} has no effect where results are only merged; with --model-dir rows are run")
    try:
        earlier = [results.load(path) for path in args.merge]
        if merge_only:
            path = args.out / max(args.merge, key=lambda path: path.name).name
            earlier = [*results.existing(path), *earlier]
        else:
            if args.time_limit <= STOP_RESERVE:
                raise ValueError(
                    f"--time-limit {args.time_limit:g} leaves no time to measure: {STOP_RESERVE:g} s of it"
                    " are kept for stopping servers"
                )
            plan = make_plan(args)
            started = [spec for spec in plan.servers if spec.name not in plan.urls]
            if not started and (unused := given_options(parser, argv) & OF_STARTING):
                option = f"--{min(unused).replace('_', '-')}"
                raise ValueError(f"{option} is for servers started here, and --url names all of them")
            benchmark = Benchmark(args, plan)
            check_conversations(args.sharegpt, benchmark.tokenizer, benchmark.plan.scenarios.values())
            for spec in {spec.name: spec for spec in started}.values():
                check(spec, args.port)
    except (OSError, ValueError, StartError) as error:
        parser.error(str(error))
    if merge_only:
        write_report(results.merge(earlier), path)
        return 0
    print(benchmark.expected(), flush=True)
    if args.dry_run:
        print(benchmark.described())
        return 0
    signal.signal(signal.SIGTERM, _end_with_servers)
    try:
        if not benchmark.plan.urls:  # nothing of a server is on the devices yet
            benchmark.floor = floor.measure_apart()
            print(f"machine's own floor: {results.describe_floor(benchmark.floor)}", flush=True)
        for spec in benchmark.plan.servers:
            benchmark.run_server(spec)
    except KeyboardInterrupt:
        runs = f"{_count(benchmark.measured, 'run')} of this call" if benchmark.measured else ""
        there = f"what was measured, {runs}, is in {benchmark.path}" if runs else "nothing was measured"
        print(f"interrupted: {there}", file=sys.stderr)
        return EXIT_INTERRUPTED
    for line in benchmark.problems:
        print(f"not measured: {line}", file=sys.stderr)
    write_report(results.merge([*earlier, benchmark.document]), benchmark.path)
    if benchmark.left_out:
        print(f"left out for lack of time: {', '.join(benchmark.left_out)}", file=sys.stderr)
    return 1 if benchmark.problems or benchmark.left_out or benchmark.failed_requests else 0


if __name__ == "__main__":
    sys.exit(main())
