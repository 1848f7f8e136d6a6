# SPDX-License-Identifier: Apache-2.0
"""/metrics: what this API's sequences took, of all its processes, and the engine's state."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from flashinfer_backend.serving.generation import FINISH_REASONS, Chunk, Generation
from flashinfer_backend.serving.timing import QUANTITIES
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.api_states import ApiState, read_api_states

PREFIX = "flashinfer_backend_openai_"
PAGES_S = 0.1  # between pages: each takes the loop some 10 ms, which others wait
MODEL_NAME = "model_name"  # the label of series that are one of several models'
HISTOGRAMS = {  # names of QUANTITIES
    "input": "prompt_tokens",
    "output": "completion_tokens",
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_latency_seconds",
    "queue": "queue_time_seconds",
}
ENGINE = {
    "requests_running": "Sequences that have a slot",
    "requests_waiting": "Sequences that wait for one",
    "blocks_total": "Blocks of the KV cache",
    "blocks_used": "Blocks that sequences hold",
    "blocks_cached": "Blocks of the prefix cache that no sequence holds",
    "snapshots": "Snapshots of states, of models with recurrent layers",
    "snapshots_cached": "Of these, kept for reuse",
    "preemptions": "Sequences that gave their slot back, since the engine started",
    "cancellations": "Sequences that their clients ended, since the engine started",
    "prompt_tokens": "Prompt tokens since the engine started",
    "prompt_tokens_reused": "Of these, found in the prefix cache",
    "generated_tokens": "Tokens generated since the engine started",
    "drafted_tokens": "Guessed tokens that were checked since the engine started",
    "adapters_loaded": "Adapters brought to the GPU since the engine started",
    "accepted_tokens": "Of these, right ones, which came without a step of their own",
}


@dataclass(frozen=True)
class ModelState:
    """The current state of a model's engines and adapters. statuses: each engine's latest report. adapters:
    names with their folders; None where the model has none. room: how many one step can have."""

    name: str
    statuses: Sequence[protocol.Status | None]
    adapters: Mapping[str, str] | None = None
    room: int = 0


class Metrics:
    """Metrics of one process. The processes of the API share a folder, and each can show the sum."""

    def __init__(self, folder: Path, apis: Path, models: Sequence[str], number: int = 0) -> None:
        """folder: for the files of all processes; PROMETHEUS_MULTIPROC_DIR has to name it already. apis: of
        read_api_states. models: names; of several, each is a label of the series that are a model's. number:
        the process's among those that run. One that replaces it goes on with its files, so that counters
        never fall and files do not gather."""
        self._api_states = apis
        self._label = [MODEL_NAME] if len(models) > 1 else []
        assert os.environ["PROMETHEUS_MULTIPROC_DIR"] == str(folder), "the library reads it"
        values.ValueClass = values.MultiProcessValue(lambda: number)
        own = CollectorRegistry()
        histograms = {}
        for quantity, name in HISTOGRAMS.items():
            text, buckets = QUANTITIES[quantity]
            histograms[quantity] = Histogram(PREFIX + name, text, self._label, buckets=buckets, registry=own)
        self._observe: dict[str, dict[str, Callable[[float], None]]] = {
            model: {
                name: (histogram.labels(model) if self._label else histogram).observe
                for name, histogram in histograms.items()
            }
            for model in models
        }
        self._finished = Counter(
            PREFIX + "sequences_finished",
            "Sequences by how they ended",
            [*self._label, "finish_reason"],
            registry=own,
        )
        self._refused = Counter(PREFIX + "errors", "Answers that are errors", ["status"], registry=own)

    def ended(self, model: str, stream: Generation, chunk: Chunk | None) -> None:
        """Notes the end of a sequence of a model, once: with its last chunk, or None where it had none."""
        timing = stream.timing
        if timing.counted:
            return
        timing.counted = True
        label = [model] if self._label else []
        self._finished.labels(*label, FINISH_REASONS[chunk.code] if chunk else "aborted").inc()
        if chunk is None:
            return
        for quantity, value in timing.quantities(len(stream.row.prompt)).items():
            if quantity in HISTOGRAMS:
                self._observe[model][quantity](value)

    def error(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def text(self, models: Sequence[ModelState]) -> bytes:
        """Prometheus's text format, summed over the API's processes, with the state of every model."""
        every = CollectorRegistry()
        MultiProcessCollector(every)
        apis = read_api_states(self._api_states)
        families = [*_engines(models), *_routers(models), *_adapters(models), *_api_states(apis)]
        every.register(_Families(families))
        return bytes(generate_latest(every))


class Pages:
    """Pages that take long to make. One is made for all who wait for one, after they asked: none is old."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._next: asyncio.Task[bytes] | None = None
        self._made = -math.inf  # when the latest one was, by the loop's clock

    async def next(self) -> bytes:
        """The next page: at once, but not within PAGES_S of the last one."""
        if self._next is None:
            wait_s = self._made + PAGES_S - asyncio.get_running_loop().time()
            self._next = asyncio.create_task(self._later(max(0.0, wait_s)))
        return await asyncio.shield(self._next)

    async def _later(self, wait_s: float) -> bytes:
        await asyncio.sleep(wait_s)
        self._next = None
        try:
            return self._make()
        finally:
            self._made = asyncio.get_running_loop().time()


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


class _Families:
    """A collector of prometheus_client that has these families."""

    def __init__(self, families: Sequence[Any]) -> None:
        self._families = families

    def collect(self) -> Sequence[Any]:
        return self._families


def _routers(models: Sequence[ModelState]) -> Iterator[Any]:
    """Sums over all models' engines, one series of each."""
    statuses = [status for model in models for status in model.statuses if status is not None]
    for name, (text, label, kinds) in _ROUTERS.items() if statuses else ():
        made = GaugeMetricFamily(name, text, labels=[label])
        sums = {key: float(sum(map(value, statuses))) for key, value in kinds.items()}
        if "used" in sums:
            sums["fraction"] = sums["used"] / sums["max"]
            sums["tokens_per"] = float(statuses[0].block_size)
        for key, value in sums.items():
            made.add_metric([key], value)
        yield made


def _engines(models: Sequence[ModelState]) -> Iterator[Any]:
    """The engines' reports; with several models each one's name is a label, with several engines of a model
    their number."""
    named, numbered = len(models) > 1, any(len(model.statuses) > 1 for model in models)
    labels = [MODEL_NAME] * named + ["engine"] * numbered
    engines = [
        ([model.name] * named + [str(number)] * numbered, status)
        for model in models
        for number, status in enumerate(model.statuses)
    ]

    def family(name: str, text: str, values: list[tuple[list[str], float]]) -> Any:
        made = GaugeMetricFamily(f"{PREFIX}engine_{name}", text, labels=labels)
        for of, value in values:
            made.add_metric(of, value)
        return made

    up = [(of, float(status is not None)) for of, status in engines]
    yield family("up", "Whether there is an engine", up)
    told = [(of, status) for of, status in engines if status is not None]
    for name, text in ENGINE.items() if told else ():
        yield family(name, text, [(of, float(getattr(status, name))) for of, status in told])


def _adapters(models: Sequence[ModelState]) -> Iterator[Any]:
    """Which adapters run, as vLLM names it and request routers read it: the value is the time of the report,
    and the labels are names with commas between. One series for all models; none where none has adapters."""
    if all(model.adapters is None for model in models):
        return
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    made = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running requests", labels=labels)
    running, waiting = set[str](), set[str]()
    for model in models:
        told = [status for status in model.statuses if status is not None]
        for name, folder in (model.adapters or {}).items():
            if any(folder in status.adapters_running for status in told):
                running.add(name)
            if any(folder in status.adapters_waiting for status in told):
                waiting.add(name)
    room = sum(model.room for model in models)
    made.add_metric([str(room), ",".join(sorted(running)), ",".join(sorted(waiting))], time.time())
    yield made


def _api_states(apis: dict[str, ApiState]) -> Iterator[Any]:
    up = GaugeMetricFamily(f"{PREFIX}api_up", "Whether an API of the server answers", labels=["api"])
    starts = CounterMetricFamily(
        f"{PREFIX}api_restarts", "How often an API was started again", labels=["api"]
    )
    for name, state in apis.items():
        up.add_metric([name], state.up)
        starts.add_metric([name], state.restarts)
    yield from (up, starts)
