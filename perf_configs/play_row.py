# SPDX-License-Identifier: Apache-2.0
"""What other numbers of `scheduling` would make of a measured row, without a GPU.

    python -m perf_configs.play_row --result perf_configs/results/2026-11-23-h200x2-70b.json \\
        --row tp2-70b-sharegpt --times perf_configs/times/h200x2-70b.json --set slow_step_ms=1000

The real scheduler and the real pacer, with the row's arrivals and lengths; only the clock and the times of
steps are played. FILE of --times has them as they were measured: milliseconds without what the KV cache of
streams takes, of steps with prompts by all their tokens ("tokens") and of others by their rows ("rows"),
between which is interpolated; "kv_ns": for each token of the streams' contexts; "host_ms": until a step
without and with prompts is launched; "answer_ms": of what is around the engine, once for each request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from client.arguments import argument_parser, integer, positive
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core import tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.core.tuned import Scheduling
from flashinfer_backend.engine.outputs import accept
from flashinfer_backend.engine.pacing import Pacer
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.scheduler import Scheduler
from flashinfer_backend.transport.protocol import RUNNING
from flashinfer_backend.worker.graphs import MIXED_SIZES

SLOTS, STEP_TOKENS, BLOCK, BLOCKS = 1024, 8192, 16, 60_000
SEEN_S = 0.0005  # between a step's end and the host's look at it
NOISE, NOISE_WITH_PROMPTS = 0.02, 0.03  # standard deviation of a step's time; they only get longer
Pairs = Sequence[tuple[float, float]]


class Times(msgspec.Struct, forbid_unknown_fields=True):
    """How long steps take; see above."""

    about: str
    tokens: Pairs
    rows: Pairs
    kv_ns: float
    host_ms: tuple[float, float] = (0.7, 1.6)
    answer_ms: float = 0.0

    def step_ms(self, plan: StepPlan) -> float:
        kv_ms = self.kv_ns * 1e-6 * float(plan.starts[: plan.num_decodes].sum())
        if not plan.num_prompt_tokens:
            return float(np.interp(plan.num_rows, *np.transpose(self.rows))) + kv_ms
        padded = next((size for size in MIXED_SIZES if size >= plan.num_tokens), plan.num_tokens)
        return float(np.interp(padded, *np.transpose(self.tokens))) + kv_ms


class Row(msgspec.Struct):
    """Requests of a row, by their arrival: seconds, tokens, tokens."""

    arrivals: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray


class Engine:
    """The loop of engine/loop.py in played time, which begins at 0. Seconds."""

    def __init__(self, row: Row, times: Times, numbers: Scheduling, seed: int) -> None:
        config = EngineConfig(
            model_dir="",
            max_seq_len=STEP_TOKENS,
            max_input_len=STEP_TOKENS - 1,
            max_num_seqs=SLOTS,
            max_num_tokens=STEP_TOKENS,
            max_num_tokens_while_decoding=STEP_TOKENS,
            enable_kv_cache_reuse=False,
        )
        self.row, self.times, self.now, self.came = row, times, 0.0, 0
        self.scheduler = Scheduler(config, KVCacheManager([BlockPool(BLOCKS)], BLOCK, False), numbers=numbers)
        self.pacer, self.rng = Pacer(), np.random.default_rng(seed)
        self.running: tuple[StepPlan, float] | None = None  # and when it ends
        self.first, self.last = np.zeros(len(row.arrivals)), np.zeros(len(row.arrivals))

    def play(self) -> tuple[np.ndarray, np.ndarray]:
        """TTFT of each request, and TPOT of those with two tokens or more; milliseconds."""
        while self.came < len(self.row.arrivals) or self.scheduler.requests:
            self._wait()
            self._step()
        several = self.row.outputs > 1
        decoding = (self.last - self.first)[several] / (self.row.outputs[several] - 1)
        return (self.first - self.row.arrivals) * 1e3 + self.times.answer_ms, decoding * 1e3

    def _take(self, until: float) -> None:
        """What arrives until then."""
        row = self.row
        while self.came < len(row.arrivals) and row.arrivals[self.came] <= until:
            prompt, output = int(row.prompts[self.came]), int(row.outputs[self.came])
            arrival_ns = _ns(row.arrivals[self.came])
            params = SamplingParams(max_tokens=output)
            prompt_ids = np.zeros(prompt, np.int32)
            handle = self.came + 1
            self.scheduler.submit(Request(handle, prompt_ids, params, output, arrival_ns=arrival_ns))
            self.came += 1

    def _wait(self) -> None:
        """Until the next step should be planned."""
        if self.running is None:
            if not self.scheduler.requests:
                self.now = max(self.now, float(self.row.arrivals[self.came]))
            self._take(self.now)
            return
        plan, end = self.running
        while True:
            prompts_wait = bool(self.scheduler.queue or self.scheduler.prefilling)
            deadline = self.pacer.deadline(plan, prompts_wait)
            until = max(self.now, min(deadline, end + SEEN_S))
            if self.came < len(self.row.arrivals) and self.row.arrivals[self.came] <= until:
                self.now = max(self.now, float(self.row.arrivals[self.came]))
                self._take(self.now)
                continue
            self.now = until
            if end + SEEN_S <= until < deadline:
                self.pacer.ended_early(plan, until)
            return

    def _step(self) -> None:
        """Plan and launch a step, and read the one before."""
        before, began = self.running, self.now
        plan = self.scheduler.schedule(before is not None, self.pacer.decode_s)
        self.running = None
        if plan is not None:
            prompts = plan.num_prompt_tokens > 0
            self.now += self.times.host_ms[prompts] / 1e3 * self.rng.uniform(0.8, 1.3)
            late = before is not None and before[1] <= self.now
            self.pacer.planned(plan, began, self.now, before[0] if before else None, late)
            noise = 1 + abs(self.rng.normal(0, NOISE_WITH_PROMPTS if prompts else NOISE))
            start = max(self.now, before[1]) if before else self.now
            self.running = plan, start + self.times.step_ms(plan) / 1e3 * noise
        if before is not None:
            self.now = max(self.now, before[1])
            self._read(before[0])

    def _read(self, plan: StepPlan) -> None:
        self.pacer.finished(plan, self.now)
        table = self.scheduler.table
        outcome = accept(table, plan, np.zeros(len(plan.sample_slots), np.int32))
        for slot, code, first in zip(outcome.slots, outcome.codes, outcome.first, strict=True):
            request = table.requests[slot]
            assert request is not None
            index = request.handle - 1
            self.last[index] = self.now
            if first:
                self.first[index] = self.now
            if code != RUNNING:
                self.scheduler.release(request)


def _ns(seconds: float) -> int:
    return int((1 + seconds) * 1e9)  # 0 would be no time


def read_row(result: Path, name: str, server: str = "ours", until: float = float("inf")) -> Row:
    """A row of a file that perf_configs.run wrote. Raises ValueError where it has none, or not by request."""
    for run in json.loads(result.read_text())["runs"]:
        if (run["row"], run["server"]) == (name, server) and run.get("requests"):
            requests: dict[str, list[Any]] = run["requests"]
            columns = [np.array(requests[key]) for key in ("scheduled", "prompt_tokens", "output_tokens")]
            order = np.argsort(columns[0], kind="stable")
            order = order[columns[0][order] < until]
            if not len(order):
                raise ValueError(f"no request of {name} arrives before {until:g} s; choose a larger --until")
            if (longest := int((columns[1] + columns[2])[order].max())) > STEP_TOKENS:
                raise ValueError(f"{name} has a request of {longest} tokens; {STEP_TOKENS} can be played")
            return Row(*(column[order] for column in columns))
    raise ValueError(f"{result} has no requests of the row {name} by {server}")


def percentiles(row: Row, times: Times, numbers: Scheduling, seeds: int) -> np.ndarray:
    """Median, P90 and P99 of TTFT and of TPOT, ms [6], each the mean of that many runs."""
    played = [Engine(row, times, numbers, seed).play() for seed in range(seeds)]
    return np.mean([[np.percentile(v, [50, 90, 99]) for v in values] for values in played], axis=0).ravel()


def chosen(base: Scheduling, assignments: Sequence[str]) -> Scheduling:
    """`base` with NAME=NUMBER texts. Raises ValueError for others."""
    fields = {}
    for text in assignments:
        name, _, value = text.partition("=")
        if name not in base.__struct_fields__ or not value.isdigit():
            names = ", ".join(base.__struct_fields__)
            raise ValueError(f"--set {text}: should be NAME=NUMBER with a name of {names}")
        fields[name] = int(value)
    return msgspec.structs.replace(base, **fields)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.play_row", __doc__)
    parser.add_argument("--result", required=True, type=Path, metavar="FILE", help="of perf_configs.run")
    parser.add_argument("--row", required=True, help="which of its rows")
    parser.add_argument("--server", default="ours", help="whose run of it (default: %(default)s)")
    parser.add_argument("--times", required=True, type=Path, metavar="FILE", help="of steps")
    parser.add_argument("--device", default="NVIDIA H200", help="whose numbers (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="instead of them")
    parser.add_argument("--until", type=positive, default=float("inf"), help="seconds: later ones left out")
    parser.add_argument("--runs", type=integer(1), default=8, help="of which the mean is shown")
    options = parser.parse_args(argv)
    try:
        device = tuned.load(options.device) or tuned.fallback()
        numbers = chosen(device.scheduling, options.set)
        times = msgspec.json.decode(options.times.read_bytes(), type=Times)
        row = read_row(options.result, options.row, options.server, options.until)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    ttft, tpot = percentiles(row, times, numbers, options.runs).reshape(2, 3)
    print(f"TTFT {ttft[0]:.1f} / {ttft[1]:.1f} / {ttft[2]:.1f} ms", end=", ")
    print(f"TPOT {tpot[0]:.2f} / {tpot[1]:.2f} / {tpot[2]:.2f} ms (median / P90 / P99)")


if __name__ == "__main__":
    main()
