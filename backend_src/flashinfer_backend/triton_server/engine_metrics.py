# SPDX-License-Identifier: Apache-2.0
"""Metrics of the engines, which all instances of a model share: one instance writes them for all."""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_backend.transport.api_states import ApiState
from flashinfer_backend.transport.protocol import Status

Value = Callable[[Status], float]

# Family: (description, label, {label value: value}). Names and labels are TensorRT-LLM's.
GAUGES: dict[str, tuple[str, str, dict[str, Value]]] = {
    "nv_trt_llm_request_metrics": (
        "Sequences in the engine",
        "request_type",
        {
            "active": lambda s: s.requests_active,
            "max": lambda s: s.max_num_seqs,
            "scheduled": lambda s: s.prefill_rows + s.decode_rows,
            "context": lambda s: s.prefill_rows,
            "waiting": lambda s: s.requests_waiting,
        },
    ),
    "nv_trt_llm_runtime_memory_metrics": (
        "Memory of the engine process in bytes",
        "memory_type",
        {"cpu": lambda s: resident_bytes(s.pid), "gpu": lambda s: s.memory_gpu, "pinned": lambda s: 0},
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "Blocks of the KV cache",
        "kv_cache_block_type",
        {
            "max": lambda s: s.blocks_total,
            "free": lambda s: s.blocks_total - s.blocks_used,
            "used": lambda s: s.blocks_used,
            "tokens_per": lambda s: s.block_size,
            "reused": lambda s: s.blocks_reused,
            "fraction": lambda s: s.blocks_used / s.blocks_total,
        },
    ),
    "flashinfer_backend_logits_metrics": (
        "Logits that sequences asked for",
        "logits_type",
        {"bytes": lambda s: s.logits_bytes, "waiting": lambda s: s.logits_waiting},
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "The engine's latest step",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": lambda s: s.prefill_tokens,
            "generation_requests": lambda s: s.decode_rows,
            "micro_batch_id": lambda s: 0,
            "paused_requests": lambda s: 0,  # of the latest period; update() puts it in
        },
    ),
    "nv_trt_llm_general_metrics": (
        "Time of the engine's latest report in seconds since the epoch, and its steps",
        "general_type",
        {"timestamp": lambda s: s.timestamp_ns / 1e9, "iteration_counter": lambda s: s.iteration},
    ),
}
PAUSED = ("nv_trt_llm_inflight_batcher_metrics", "paused_requests")
UP = "flashinfer_backend_engine_up"
# Gauge of an API: (description, value).
APIS: dict[str, tuple[str, Callable[[ApiState], float]]] = {
    "flashinfer_backend_api_up": ("Whether an API of the server answers (1) or not (0)", lambda d: d.up),
    "flashinfer_backend_api_restarts": (
        "How often an API was started again since the server started",
        lambda d: d.restarts,
    ),
}

# Counter: (description, the field of Status that counts it since the engine's start).
COUNTERS: dict[str, tuple[str, str]] = {
    "flashinfer_backend_prompt_tokens_total": ("Prompt tokens of admitted sequences", "prompt_tokens"),
    "flashinfer_backend_prefix_cache_hit_tokens_total": (
        "Prompt tokens whose keys and values were taken from the cache",
        "prompt_tokens_reused",
    ),
    "flashinfer_backend_generated_tokens_total": ("Tokens generated", "generated_tokens"),
    "flashinfer_backend_drafted_tokens_total": ("Guessed tokens that were checked", "drafted_tokens"),
    "flashinfer_backend_accepted_draft_tokens_total": (
        "Guessed tokens that were right, and so came without a step of their own",
        "accepted_tokens",
    ),
    "flashinfer_backend_preemptions_total": (
        "Sequences put back into the queue because blocks ran out",
        "preemptions",
    ),
}
_TOTALS = struct.Struct(f"<{1 + len(COUNTERS)}q")  # the engine's pid, then the counters


ENGINE = "engine"  # the label with an engine's number, where a model has several


class EngineMetrics:
    """The families, and of each engine its metrics."""

    def __init__(
        self,
        pb_utils: Any,
        labels: dict[str, str],
        run_dir: Path,
        engines: int,
        apis: Callable[[], dict[str, ApiState]] = dict,
    ) -> None:
        """labels: those all metrics have; with several engines also ENGINE. Every instance registers the
        metrics; Triton merges them. apis: the APIs' states by name."""
        kinds = pb_utils.MetricFamily
        described = {name: (description, kinds.GAUGE) for name, (description, _, _) in GAUGES.items()}
        described |= {name: (description, kinds.COUNTER) for name, (description, _) in COUNTERS.items()}
        described |= {name: (description, kinds.GAUGE) for name, (description, _) in APIS.items()}
        described[UP] = ("Whether the engine process is there and ready (1) or not (0)", kinds.GAUGE)
        self._families = {  # a metric needs its family to live
            name: kinds(name=name, description=description, kind=kind)
            for name, (description, kind) in described.items()
        }
        self._api_states = apis
        self._shown: dict[str, ApiState] = {}
        self._api_gauges: dict[tuple[str, str], Any] = {}  # by family and API
        self._engines = [
            _Engine(
                self._families,
                labels if engines == 1 else {**labels, ENGINE: str(number)},
                run_dir / f"metrics{f'-{number}' if number else ''}.lock",
            )
            for number in range(engines)
        ]

    def update(self, statuses: Sequence[Status | None]) -> None:
        """Shows each engine's latest report, or None while it is not there. To be called often, by every
        instance: this is also how a writer's end is noticed."""
        for engine, status in zip(self._engines, statuses, strict=True):
            engine.update(status)
        if self._engines[0].elected:
            self._show_apis()

    def _show_apis(self) -> None:
        for api, state in self._api_states().items():
            if self._shown.get(api) == state:
                continue
            self._shown[api] = state
            for name, (_, value) in APIS.items():
                if (name, api) not in self._api_gauges:
                    self._api_gauges[name, api] = self._families[name].Metric(labels={"api": api})
                self._api_gauges[name, api].set(float(value(state)))

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


class _Engine:
    """Writes what an engine reports, in one of the instances: the one with the lock of a file in the run
    directory, which passes on when its holder ends. The file holds the totals that have been added to
    Triton's counters, so that the next writer neither loses nor repeats any.
    """

    def __init__(self, families: Mapping[str, Any], labels: dict[str, str], lock: Path) -> None:
        self._gauges: dict[tuple[str, str], Any] = {}
        for name, (_, label, values) in GAUGES.items():
            for kind in values:
                self._gauges[name, kind] = families[name].Metric(labels={**labels, label: kind})
        self._gauges[UP, ""] = families[UP].Metric(labels=labels)
        self._counters = {name: families[name].Metric(labels=labels) for name in COUNTERS}
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.elected = False
        self._published: tuple[int, ...] = (0,) * (1 + len(COUNTERS))
        self._written: dict[tuple[str, str], float] = {}

    def update(self, status: Status | None) -> None:
        """As EngineMetrics.update, of this engine."""
        if not self.elected and not self._elect():
            return
        values = dict.fromkeys(self._gauges, 0.0)
        if status is not None:
            values = {
                (name, kind): get(status) for name, (_, _, g) in GAUGES.items() for kind, get in g.items()
            }
            values[PAUSED] = self._count(status)
            values[UP, ""] = 1
        changed = {key: value for key, value in values.items() if self._written.get(key) != value}
        for key, value in changed.items():
            self._gauges[key].set(value)
        self._written.update(changed)

    def close(self) -> None:
        os.close(self._lock)

    def _elect(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.elected = True
        if len(data := os.pread(self._lock, _TOTALS.size, 0)) == _TOTALS.size:
            self._published = _TOTALS.unpack(data)
        return True

    def _count(self, status: Status) -> int:
        """Brings the counters up to date; the preemptions since the last time."""
        # A new engine counts from 0.
        before = self._published[1:] if self._published[0] == status.pid else (0,) * len(COUNTERS)
        # The writer before may have had a newer report than this instance has yet.
        reported = (getattr(status, field) for _, field in COUNTERS.values())
        totals = tuple(map(max, reported, before))
        added = {}
        for name, now, then in zip(COUNTERS, totals, before, strict=True):
            added[name] = now - then
            if now > then:
                self._counters[name].increment(now - then)
        if self._published != (status.pid, *totals):
            self._published = (status.pid, *totals)
            os.pwrite(self._lock, _TOTALS.pack(*self._published), 0)
        return added["flashinfer_backend_preemptions_total"]


def resident_bytes(pid: int) -> int:
    """Main memory that a process occupies; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
