# SPDX-License-Identifier: Apache-2.0
"""Load generator for streaming servers.

python -m client bench --tokenizer MODEL --request-rate 2,4,8 --output r.json
python -m client bench --tokenizer MODEL --backend openai-chat \\
    --url http://127.0.0.1:9000 --max-concurrency 1,8,64
python -m client bench --tokenizer MODEL --scenario rates-1-2-5-8 --data x.json
python -m client bench --tokenizer MODEL --find-rate 1:64 --limit p99_ttft=200
"""

import argparse
import csv
import datetime
import json
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from client import find_rate, machine, ready, scenarios
from client.bench_options import OF_SCENARIO, SAMPLING, given_options, make_parser
from client.datasets import (
    DATASETS,
    Prompt,
    TooFewError,
    fingerprint,
    kind_of,
    load_prompts,
    load_tokenizer,
)  # fmt: skip
from client.device_log import DeviceLog, Devices, find_devices
from client.load import Load, LoadResult, run_load
from client.metrics import PERCENTILES, format_table, goodput, request_columns
from client.progress import Display, Snapshot
from client.scenarios import Point, Scenario
from client.wire import OPENAI

WARM_UP_SEED = 1_000_003  # other prompts than those measured
EXIT_INTERRUPTED = 130
Run = dict[str, Any]


@dataclass
class Bench:
    """What a call measures: prompts come from spec, lengths and seed, each point is one run."""

    args: argparse.Namespace
    command: str
    tokenizer: Tokenizer
    load: Load
    spec: str
    lengths: dict[str, Any]
    points: list[Point]
    warm_up: int
    devices: Devices = field(default_factory=find_devices)
    facts: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    interrupted: bool = False

    @property
    def percentiles(self) -> list[float]:
        """Those that results hold: more than are shown, so that results can be compared."""
        limits = [each.percentile for each in self.args.limit]
        return sorted({*PERCENTILES, *self.args.percentiles, *(p for p in limits if p is not None)})

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """The same for every server. Raises OSError or ValueError."""
        return load_prompts(self.spec, self.tokenizer, count, seed, **self.lengths)

    def time_limit(self, point: Point) -> float:
        if self.args.time_limit is not None:
            return float(self.args.time_limit)
        if self.args.find_rate:  # where requests pile up they have as long again to end
            return float(2 * self.args.try_seconds + 10)
        rate = self.load.ramp.mean if self.load.ramp else point.request_rate
        return max(600.0, point.num_prompts / rate + 300.0)

    def prepare(self) -> dict[str, Any]:
        """Waits for the server, completes the load with what it says and warms it up; what the warm-up
        counted."""
        if self.args.ready_timeout:
            ready.wait_ready(self.load, self.args.ready_timeout)
            if self.load.backend in OPENAI and self.load.model is None:
                self.load = replace(self.load, model=ready.first_model(self.load.url, self.load.api_key))
        self.facts = {"server": ready.server_version(self.load), "machine": machine.facts()}
        if not self.warm_up:
            return {}
        load = replace(self.load, request_rate=math.inf, ramp=None)
        summary = run_load(load, self.prompts(self.warm_up, WARM_UP_SEED)).summary
        if summary["failed"]:
            print(format_table(summary, "warm-up"), flush=True)
        return {key: summary[key] for key in ("completed", "failed", "errors")}

    def measure(self, point: Point, warm_up: dict[str, Any], note: str = "") -> dict[str, Any]:
        """One run: prints its table, unless a note for one line stands for it, and writes all results; its
        summary."""
        args = self.args
        # Other prompts in each run: a server that caches prefixes would know those of the run before.
        seed = args.seed + len(self.runs)
        load = replace(
            self.load, request_rate=point.request_rate, max_concurrency=point.max_concurrency, seed=seed,
            time_limit=self.time_limit(point),
        )  # fmt: skip
        prompts = self.prompts(point.num_prompts, seed)
        what = describe(point, load)
        log = DeviceLog(self.devices)
        with Display(note or what) as display, _first_interrupt() as stop, log:

            def watch(snapshot: Snapshot) -> bool:
                display.show(snapshot)
                return stop.is_set()

            result = run_load(load, prompts, watch, self.percentiles)
        self.interrupted = result.interrupted
        summary = result.summary
        if args.goodput:
            summary |= goodput(result.records, dict(args.goodput))
        if args.retokenize:
            texts = [r.text for r in result.records if r.error is None]
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
            summary["retokenized_output_tokens"] = sum(len(e) for e in encodings)
        if not note:
            table = format_table(summary, f"{load.backend} {load.target}\n{what}", args.percentiles)
            print("\n" * bool(self.runs) + table, flush=True)
        self._write(point, load, result, seed, fingerprint(prompts), warm_up, log)
        return summary

    def _write(
        self, point: Point, load: Load, result: LoadResult, seed: int, prompts_sha256: str,
        warm_up: dict[str, Any], log: DeviceLog,
    ) -> None:  # fmt: skip
        args = self.args
        when = datetime.datetime.fromtimestamp(result.started, datetime.timezone.utc)
        told = {name: _plain(value) for name, value in vars(args).items()} | {"dataset": self.spec}
        run = {
            "label": args.label or _label(load.backend, self.facts["server"]),
            "backend": load.backend,
            "model": load.model,
            "started": when.isoformat(timespec="milliseconds"),
            "command": self.command,
            **self.facts,
            "request_rate": None if math.isinf(point.request_rate) else point.request_rate,
            "max_concurrency": point.max_concurrency,
            "ramp": f"{load.ramp.start:g} to {load.ramp.end:g}" if load.ramp else None,
            "arguments": told,
            "interrupted": result.interrupted,
            "warm_up": warm_up,
            "seed": seed,
            "prompts_sha256": prompts_sha256,
            "summary": result.summary,
            "devices": log.result(*result.clock),
            "requests": request_columns(result.records, args.save_itl),
        }
        self.runs.append(run)
        if args.output:
            write_json(self.runs, args.output)
        if args.csv:
            write_csv(self.runs, args.csv)

    def search(self, warm_up: dict[str, Any]) -> int:
        """--find-rate; the exit status: 0 where a rate was found."""
        args = self.args

        def attempt(rate: float) -> bool:
            count = max(2, math.ceil(rate * args.try_seconds))
            point = Point(rate, count, self.points[0].max_concurrency)
            try:
                summary = self.measure(point, warm_up, note=f"try {rate:.3g} requests/s")
            except TooFewError as error:
                raise find_rate.CannotTry(f"{error}; give a larger file, or shorter --try-seconds") from None
            if self.interrupted:
                raise KeyboardInterrupt
            problem = find_rate.broken(summary, args.limit)
            values = [f"{each.metric} {each.value(summary) or math.nan:.1f} ms" for each in args.limit]
            verdict = f"no, {problem}" if problem else "good"
            print(f"{rate:8.4g} requests/s: {', '.join(values)}: {verdict}", flush=True)
            return problem is None

        try:
            search = find_rate.Search(args.find_rate[0], args.find_rate[1], args.search_seconds)
            rate, ended = search.run(attempt, lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            print("INCOMPLETE: interrupted", flush=True)
            return EXIT_INTERRUPTED
        if rate is not None:
            wanted = ", ".join(f"{each.metric} <= {each.ms:g} ms" for each in args.limit)
            incomplete = "" if ended else " at least (INCOMPLETE)"
            print(f"highest rate: {rate:.4g} requests/s{incomplete} with {wanted}", flush=True)
        return 0 if rate is not None and ended else 1


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


def _label(backend: str, server: str) -> str:
    """What reports call a server that was given no name: "triton 2.51.0", "openai-chat, vllm 0.25.1"."""
    return server if server.partition(" ")[0] == backend else f"{backend}, {server}"


def describe(point: Point, load: Load) -> str:
    """A run's load in a few words."""
    words = []
    if load.ramp is not None:
        words.append(f"{load.ramp.start:g} to {load.ramp.end:g} requests/s")
    elif not math.isinf(point.request_rate):
        words.append(f"{point.request_rate:g} requests/s")
    if point.max_concurrency is not None:
        words.append(f"{point.max_concurrency} at a time")
    return ", ".join(words) or "all at once"


def _plain(value: Any) -> Any:
    """A value for JSON; a list of one as that one, and no infinity."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and math.isinf(value):
        return None
    return value if isinstance(value, (int, float, str, dict, tuple, type(None))) else str(value)


@contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event once; the second time it interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are not for others
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stop.set()
        print("\nstopping, with what there is; Ctrl-C again leaves it", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def plan(args: argparse.Namespace, given: set[str], command: str) -> Bench:
    """Asks the server for its tokenizer where none is given. Raises OSError or ValueError for arguments that
    contradict each other or name what is not there, and ready.NotReadyError."""
    scenario: Scenario | None = None
    if args.scenario is not None:
        if fixed := sorted(given & OF_SCENARIO):
            names = ", ".join("--" + name.replace("_", "-") for name in fixed)
            raise ValueError(f"{names}: the scenario says that; leave it out, or --scenario")
        scenario = scenarios.find_scenario(args.scenario)
        if scenario.from_file != (args.data is not None):
            needs = "needs --data FILE" if scenario.from_file else "takes no --data"
            raise ValueError(f"scenario {scenario.row} {needs}: its dataset is {scenario.dataset}")
    elif args.data is not None:
        raise ValueError("--data is for --scenario; otherwise write --dataset sharegpt:FILE")
    key = None
    if args.api_key_env is not None and not (key := os.environ.get(args.api_key_env)):
        raise ValueError(f"--api-key-env {args.api_key_env}: there is no such environment variable")
    if bool(args.find_rate) != bool(args.limit):
        raise ValueError("--find-rate and --limit go together: the rates to search and what to keep within")
    if args.ramp is not None and ("request_rate" in given or args.find_rate):
        raise ValueError("--ramp says the rate: leave out --request-rate and --find-rate")
    _refuse_idle(args, given)
    if scenario is not None:
        sampling, spec, lengths = scenario.sampling, scenario.dataset, scenario.lengths
        burstiness, ramp, think = scenario.burstiness, scenario.ramp, scenario.think_seconds
        priority = scenario.priority_per_output_token if args.backend in OPENAI else 0
        points = [replace(p, num_prompts=args.num_prompts or p.num_prompts) for p in scenario.points]
        if scenario.from_file:
            spec = f"{spec}:{args.data}"
        if "seed" not in given:
            args.seed = scenario.seed
        warm_up = scenario.warm_up_prompts
    else:
        sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
        spec, lengths = args.dataset, _lengths(args, given)
        burstiness, ramp, think = args.burstiness, args.ramp, args.think_time
        priority = args.priority_per_output_token
        points = [
            Point(rate, args.num_prompts or 100, slots)
            for rate in args.request_rate
            for slots in args.max_concurrency
        ]
        warm_up = 1
    rated = ramp is not None or not math.isinf(points[0].request_rate)
    if args.find_rate and (len(points) > 1 or rated):
        raise ValueError(
            "--find-rate chooses the rates: leave out --request-rate, lists of concurrencies, and scenarios"
            " that say a rate"
        )
    if twice := sorted(sampling.keys() & args.extra_body.keys()):
        raise ValueError(f"--extra-body must not hold {', '.join(twice)} too: it is given already")
    port = 8001 if args.backend == "triton-grpc" else 8000
    args.url = args.url or f"http://127.0.0.1:{port}"
    load = Load(
        backend=args.backend, url=args.url, model=args.model, endpoint=args.endpoint, burstiness=burstiness,
        ramp=ramp, max_concurrency=points[0].max_concurrency, seed=args.seed, workers=args.workers,
        ignore_eos=not args.respect_eos, check_tokens=args.check_tokens,
        keep_text=args.retokenize, extra_body=sampling | args.extra_body,
        think_seconds=think, api_key=key, priority_per_output_token=priority,
        lora_modules=tuple(filter(None, args.lora_modules.split(","))),
    )  # fmt: skip
    warm_up = warm_up if args.warm_up is None else args.warm_up
    if args.tokenizer is None:
        if args.ready_timeout:
            ready.wait_ready(load, args.ready_timeout)
        args.tokenizer = ready.tokenizer_folder(load)
    made = Bench(args, command, load_tokenizer(args.tokenizer), load, spec, lengths, points, warm_up)
    for count in {point.num_prompts for point in points} if not args.find_rate else {2}:
        made.prompts(count, args.seed)  # errors in them show before anything is sent
    return made


def _refuse_idle(args: argparse.Namespace, given: set[str]) -> None:
    """Raises ValueError for an option that would do nothing with the others."""
    if args.find_rate:
        if "num_prompts" in given:
            raise ValueError("--num-prompts: a try of --find-rate sends its rate times --try-seconds")
        shown = sorted(given & {"goodput", "percentiles", "retokenize"})
        if shown and not args.output:
            raise ValueError(
                f"--{shown[0]}: --find-rate prints its limits alone; add --output to write it to"
            )
    elif idle := sorted(given & {"try_seconds", "search_seconds"}):
        raise ValueError(f"--{idle[0].replace('_', '-')} is for --find-rate")
    arrivals = args.find_rate or args.ramp or not all(map(math.isinf, args.request_rate))
    if "burstiness" in given and not arrivals:
        raise ValueError("--burstiness shapes arrivals: give --request-rate, --ramp or --find-rate")
    filters = sorted(given & {"top_k", "top_p"})
    if filters and not args.extra_body.get("temperature", args.temperature):
        option = f"--{filters[0].replace('_', '-')}"
        raise ValueError(f"{option}: requests are greedy and take no notice of it; also give --temperature")
    if "model" in given and args.backend == "triton" and "{model}" not in (args.endpoint or "{model}"):
        raise ValueError(
            f"--model: --endpoint {args.endpoint} says which; write {{model}} in it, or leave one out"
        )
    if args.label is not None and not args.output:
        raise ValueError("--label is for --output: reports call the server that")
    if args.output and args.csv and args.output.resolve() == args.csv.resolve():
        raise ValueError("--output and --csv must be files of their own")
    if args.save_itl and not (args.output or args.csv):
        raise ValueError("--save-itl needs --output or --csv to write to")
    if "check_tokens" in given and args.backend in OPENAI:
        raise ValueError("--check-tokens and --no-check-tokens are for Triton: OpenAI servers always count")
    if args.respect_eos and not args.check_tokens:
        raise ValueError("--no-check-tokens: with --respect-eos nothing else says how many tokens there were")
    if len(dict(args.goodput)) < len(args.goodput):
        raise ValueError("--goodput limits a time twice; give each of ttft, tpot and latency once")


def _lengths(args: argparse.Namespace, given: set[str]) -> dict[str, Any]:
    """What the dataset takes, of the options for it. Raises ValueError for one given that it does not
    take."""
    options = {
        "input_range": "input_len", "output_range": "output_len", "parts": "part", "prefixes": "prefixes",
        "prefix_tokens": "prefix_len", "turns": "turns",
    }  # fmt: skip
    taken = DATASETS[kind_of(args.dataset)]
    for name, option in options.items():
        if option in given and name not in taken:
            raise ValueError(f"--{option.replace('_', '-')} means nothing to dataset {args.dataset!r}")
    if "think_time" in given and "turns" not in taken:
        raise ValueError(f"--think-time means nothing to dataset {args.dataset!r}, which has single turns")
    if "think_time" in given and args.turns == 1:
        raise ValueError("--think-time is between two turns, and --turns 1 has one; leave out one of them")
    return {name: getattr(args, options[name]) for name in taken if name in options}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    try:
        bench = plan(args, given_options(parser, argv), f"{parser.prog} {shlex.join(argv)}")
    except ready.NotReadyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(str(error))
    failed = 0
    try:
        warm_up_counts = bench.prepare()
        if args.find_rate:
            return bench.search(warm_up_counts)
        for point in bench.points:
            summary = bench.measure(point, warm_up_counts)
            failed += summary["failed"]
            if bench.interrupted:
                return EXIT_INTERRUPTED
    except BrokenPipeError:  # client.__main__ knows what to do
        raise
    except (ready.NotReadyError, RuntimeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        files = [str(path) for path in (args.output, args.csv) if path is not None]
        if bench.runs and files:
            print(f"wrote {', '.join(files)}", file=sys.stderr)
    return 1 if failed or warm_up_counts.get("failed") else 0
