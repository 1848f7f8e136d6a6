# SPDX-License-Identifier: Apache-2.0
"""/metrics: what this door's sequences took, of all its processes, and the engine's state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from flashinfer_backend.serving.generation import FINISH_REASONS, Chunk, Generation
from flashinfer_backend.serving.timing import INTERVALS, LENGTHS, TOTALS, WAITS
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.doors import DoorState, read_doors

PREFIX = "flashinfer_backend_openai_"
HISTOGRAMS = {
    "prompt_tokens": ("Tokens of the prompt", LENGTHS),
    "completion_tokens": ("Tokens of the completion", LENGTHS),
    "time_to_first_token_seconds": ("From a sequence's submission to its first token", WAITS),
    "inter_token_latency_seconds": ("Time between two tokens, mean over a sequence", INTERVALS),
    "e2e_latency_seconds": ("From a sequence's submission to its last chunk", TOTALS),
    "queue_time_seconds": ("From arrival in the engine until a sequence was first scheduled", WAITS),
}
PROMPT_LOGITS: dict[str, tuple[str, Literal["livesum", "livemax"]]] = {
    "prompt_logits_bytes": ("Room that logits of prompts have", "livesum"),
    "prompt_logits_peak_bytes": ("The most that they had in one process", "livemax"),
    "prompt_logits_waiting": ("Prompts that wait for room for their logits", "livesum"),
}
ENGINE = {
    "requests_running": "Sequences that have a slot",
    "requests_waiting": "Sequences that wait for one",
    "blocks_total": "Blocks of the KV cache",
    "blocks_used": "Blocks that sequences hold",
    "blocks_cached": "Blocks of the prefix cache that no sequence holds",
    "preemptions": "Sequences that gave their slot back, since the engine started",
    "cancellations": "Sequences that their clients ended, since the engine started",
    "prompt_tokens": "Prompt tokens since the engine started",
    "prompt_tokens_reused": "Of these, found in the prefix cache",
    "generated_tokens": "Tokens generated since the engine started",
    "drafted_tokens": "Guessed tokens that were checked since the engine started",
    "adapters_loaded": "Adapters brought to the GPU since the engine started",
    "accepted_tokens": "Of these, right ones, which came without a step of their own",
}


class Metrics:
    """Of one process. The processes of a door share a folder, and each can show the sum."""

    def __init__(self, folder: Path, doors: Path) -> None:
        """folder: for the files of all processes; PROMETHEUS_MULTIPROC_DIR has to name it already. doors: of
        read_doors."""
        self._doors = doors
        assert os.environ["PROMETHEUS_MULTIPROC_DIR"] == str(folder), "the library reads it when imported"
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        own = CollectorRegistry()
        self._histograms = {
            name: Histogram(PREFIX + name, text, buckets=[float(b) for b in buckets], registry=own)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._finished = Counter(
            PREFIX + "sequences_finished", "Sequences by how they ended", ["finish_reason"], registry=own
        )
        # Of processes that live. The parent removes the files of those that do not.
        self._gauges = {
            name: Gauge(PREFIX + name, text, registry=own, multiprocess_mode=mode)
            for name, (text, mode) in PROMPT_LOGITS.items()
        }
        self._peak = 0
        self._refused = Counter(PREFIX + "errors", "Answers that are errors", ["status"], registry=own)

    def ended(self, stream: Generation, chunk: Chunk | None) -> None:
        """Notes a sequence's end, once: with its last chunk, or None where it had none."""
        timing = stream.timing
        if timing.counted:
            return
        timing.counted = True
        self._finished.labels(FINISH_REASONS[chunk.code] if chunk else "aborted").inc()
        if chunk is None:
            return
        now = time.monotonic()
        observe = {name: histogram.observe for name, histogram in self._histograms.items()}
        observe["prompt_tokens"](len(stream.row.prompt))
        observe["completion_tokens"](timing.sent)
        observe["e2e_latency_seconds"](now - timing.started)
        if timing.tokens:
            observe["time_to_first_token_seconds"](timing.first - timing.started)
        if timing.tokens > 1:
            observe["inter_token_latency_seconds"]((timing.last - timing.first) / (timing.tokens - 1))
        if timing.queued is not None:
            observe["queue_time_seconds"](timing.queued)

    def prompt_logits(self, held: int, waiting: int) -> None:
        """Notes what has room for logits of prompts: bytes, and how many prompts wait for some."""
        self._peak = max(self._peak, held)
        for name, value in zip(PROMPT_LOGITS, (held, self._peak, waiting), strict=True):
            self._gauges[name].set(value)

    def error(self, status: int) -> None:
        """Notes an answer that is an error."""
        self._refused.labels(str(status)).inc()

    def text(
        self, statuses: list[protocol.Status | None], adapters: Mapping[str, str] | None, room: int
    ) -> bytes:
        """Prometheus's text format, summed over the door's processes, with each engine's latest report.
        adapters: names with their folders; None where the model has none. room: how many one step can
        have."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        every = CollectorRegistry()
        MultiProcessCollector(every)
        every.register(_EngineState(statuses))
        every.register(_RouterState(statuses))
        if adapters is not None:
            every.register(_AdapterState(statuses, adapters, room))
        every.register(_DoorState(read_doors(self._doors)))
        return bytes(generate_latest(every))


# Families of TensorRT-LLM's backend that request routers read of a server: text, label, and of each of its
# values what is summed over the engines.
_ROUTERS: dict[str, tuple[str, str, dict[str, Callable[[protocol.Status], float]]]] = {
    "nv_trt_llm_request_metrics": (
        "Sequences in all engines",
        "request_type",
        {
            "active": lambda s: s.requests_active,
            "max": lambda s: s.max_num_seqs,
            "scheduled": lambda s: s.prefill_rows + s.decode_rows,
            "waiting": lambda s: s.requests_waiting,
        },
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "Blocks of the KV caches of all engines",
        "kv_cache_block_type",
        {
            "max": lambda s: s.blocks_total,
            "free": lambda s: s.blocks_total - s.blocks_used,
            "used": lambda s: s.blocks_used,
            "reused": lambda s: s.blocks_reused,
        },
    ),
}


class _RouterState:
    """A collector of the engines' sums, one series of each."""

    def __init__(self, statuses: list[protocol.Status | None]) -> None:
        self._statuses = [status for status in statuses if status is not None]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, (text, label, values) in _ROUTERS.items() if self._statuses else ():
            made = GaugeMetricFamily(name, text, labels=[label])
            sums = {key: float(sum(map(value, self._statuses))) for key, value in values.items()}
            if "used" in sums:
                sums["fraction"] = sums["used"] / sums["max"]
                sums["tokens_per"] = float(self._statuses[0].block_size)
            for key, value in sums.items():
                made.add_metric([key], value)
            yield made


class _EngineState:
    """A collector of the engines' reports; with several of them their number is a label."""

    def __init__(self, statuses: list[protocol.Status | None]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        labels = ["engine"] if len(self._statuses) > 1 else []

        def family(name: str, text: str, values: list[float | None]) -> Any:
            made = GaugeMetricFamily(f"{PREFIX}engine_{name}", text, labels=labels)
            for number, value in enumerate(values):
                if value is not None:
                    made.add_metric([str(number)] * len(labels), value)
            return made

        yield family("up", "Whether there is an engine", [float(s is not None) for s in self._statuses])
        if any(self._statuses):
            for name, text in ENGINE.items():
                values = [None if s is None else float(getattr(s, name)) for s in self._statuses]
                yield family(name, text, values)


class _AdapterState:
    """A collector of which adapters run, as vLLM names it and request routers read it: the value is the time
    of the report, and the labels are names with commas between."""

    def __init__(
        self, statuses: list[protocol.Status | None], adapters: Mapping[str, str], room: int
    ) -> None:
        self._statuses, self._room = statuses, room
        self._names: dict[str, list[str]] = {}
        for name, folder in adapters.items():
            self._names.setdefault(folder, []).append(name)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        made = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running requests", labels=labels)
        told = [status for status in self._statuses if status is not None]
        running = self._named(folder for status in told for folder in status.adapters_running)
        waiting = self._named(folder for status in told for folder in status.adapters_waiting)
        made.add_metric([str(self._room), running, waiting], time.time())
        yield made

    def _named(self, folders: Iterable[str]) -> str:
        return ",".join(sorted({name for folder in folders for name in self._names.get(folder, ())}))


class _DoorState:
    """A collector of what serve says of its doors."""

    def __init__(self, doors: dict[str, DoorState]) -> None:
        self._doors = doors

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        up = GaugeMetricFamily(f"{PREFIX}door_up", "Whether a door of the server answers", labels=["door"])
        starts = CounterMetricFamily(
            f"{PREFIX}door_restarts", "How often a door was started again", labels=["door"]
        )
        for name, state in self._doors.items():
            up.add_metric([name], state.up)
            starts.add_metric([name], state.restarts)
        yield from (up, starts)
