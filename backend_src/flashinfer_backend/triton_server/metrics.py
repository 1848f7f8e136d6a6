# SPDX-License-Identifier: Apache-2.0
"""Metrics of the llm model on Triton's metrics port; docs/metrics.md explains each.

Setting or observing a value is a round trip to the server (some 20 us), so none is made where tokens
pass: what a sequence took is noted when it ends, and a thread hands the notes to Triton every period.
"""

import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashinfer_backend.serving.generation import FINISH_REASONS, Chunk
from flashinfer_backend.serving.timing import QUANTITIES
from flashinfer_backend.transport.api_states import ApiState
from flashinfer_backend.transport.protocol import Status
from flashinfer_backend.triton_server.engine_metrics import EngineMetrics
from flashinfer_backend.triton_server.sequence import Sequence

CLOSE_S = 1.0  # the thread may wait indefinitely for a killed server

# Names of QUANTITIES, and their labels in addition to those of all metrics.
HISTOGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "input": ("nv_llm_input_token_len", {"response_metric_type": "total_input_tokens"}),
    "output": ("nv_llm_output_token_len", {"response_metric_type": "total_output_tokens"}),
    "ttft": ("flashinfer_backend_time_to_first_token_seconds", {}),
    "itl": ("flashinfer_backend_inter_token_latency_seconds", {}),
    "longest_itl": ("flashinfer_backend_inter_token_latency_max_seconds", {}),
    "e2e": ("flashinfer_backend_e2e_latency_seconds", {}),
    "queue": ("flashinfer_backend_queue_time_seconds", {}),
}
FINISHED = "flashinfer_backend_sequences_finished_total"
ERROR, REFUSED = "error", "refused"
REASONS = (*dict.fromkeys(FINISH_REASONS.values()), ERROR, REFUSED)


class Metrics:
    """Metrics of one instance; the series are shared by all instances of the model, which Triton adds up."""

    def __init__(
        self,
        pb_utils: Any,
        model: str,
        version: str,
        run_dir: Path,
        engine_statuses: Callable[[], list[Status | None]],
        period_s: float,
        apis: Callable[[], dict[str, ApiState]],
    ) -> None:
        """engine_statuses: each engine's latest report, None while it is not there. apis: as EngineMetrics
        has them."""
        kinds = pb_utils.MetricFamily
        labels = {"model": model, "version": version}
        self._families: list[Any] = []  # a metric needs its family to live
        self._histograms: dict[str, Any] = {}
        for quantity, (name, more) in HISTOGRAMS.items():
            description, buckets = QUANTITIES[quantity]
            self._families.append(kinds(name=name, description=description, kind=kinds.HISTOGRAM))
            self._histograms[quantity] = self._families[-1].Metric(
                labels={**labels, **more}, buckets=[float(b) for b in buckets]
            )
        finished = kinds(name=FINISHED, description="Sequences by how they ended", kind=kinds.COUNTER)
        self._families.append(finished)
        self._finished = {r: finished.Metric(labels={**labels, "finish_reason": r}) for r in REASONS}
        self._engine = EngineMetrics(pb_utils, labels, run_dir, len(engine_statuses()), apis)
        self._engine_statuses = engine_statuses
        self._notes: deque[tuple[str, float]] = deque()  # quantity and value
        self._ends: deque[str] = deque()  # reasons
        self._period_s = period_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def ended(self, sequence: Sequence, chunk: Chunk | None = None) -> None:
        """Notes a sequence's end, once: with its last chunk, or None for an error."""
        timing = sequence.timing
        if timing.counted:
            return
        timing.counted = True
        if chunk is None:
            self._ends.append(REFUSED if sequence.refused else ERROR)
            return
        self._notes += timing.quantities(len(sequence.row.prompt)).items()
        self._ends.append(FINISH_REASONS[chunk.code])

    def refused(self) -> None:
        """Notes a request that had a mistake, or came when there was no engine."""
        self._ends.append(REFUSED)

    def close(self) -> None:
        """Hands over what is noted and ends the thread."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._engine.close()

    def _run(self) -> None:
        open_ = True
        while open_:
            open_ = not self._closing.wait(self._period_s)
            try:
                self._hand_over()
                self._engine.update(self._engine_statuses())
            except Exception:  # the next round may work; none at all would go unnoticed
                traceback.print_exc()

    def _hand_over(self) -> None:
        ends: Counter[str] = Counter()
        while self._notes:
            name, value = self._notes.popleft()
            self._histograms[name].observe(value)
        while self._ends:
            ends[self._ends.popleft()] += 1
        for reason, count in ends.items():
            self._finished[reason].increment(count)
