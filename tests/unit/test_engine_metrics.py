# SPDX-License-Identifier: Apache-2.0
"""Which of several instances counts what the engine reports; the times of a sequence."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer_backend.serving import timing
from flashinfer_backend.transport.protocol import Status
from flashinfer_backend.triton_server.engine_metrics import EngineMetrics

GENERATED = "flashinfer_backend_generated_tokens_total"
PAUSED = "paused_requests"


def test_the_next_writer_counts_nothing_twice_though_its_report_is_older(tmp_path: Path) -> None:
    """Every instance has the engine's reports by a thread of its own."""
    counted: Counter[str] = Counter()
    shown: dict[str, float] = {}

    class Family:  # Triton's own is there in its stubs alone
        GAUGE, COUNTER = 0, 1

        def __init__(self, name: str, description: str, kind: int) -> None:
            self._name = name

        def Metric(self, labels: dict[str, str]) -> Any:
            def show(value: float) -> None:
                shown[next(iter(labels.values()), self._name)] = value

            return SimpleNamespace(increment=lambda by: counted.update({self._name: by}), set=show)

    def report(total: int) -> list[Status | None]:
        own = {"pid": 7, "device": "cpu", "block_size": 16, "blocks_total": 9, "vocab_size": 9}
        limits = dict.fromkeys(("max_seq_len", "max_input_len", "max_num_seqs"), 1)
        return [Status(**own, **limits, generated_tokens=total, preemptions=total)]  # type: ignore[arg-type]

    first, second = (EngineMetrics(SimpleNamespace(MetricFamily=Family), {}, tmp_path, 1) for _ in range(2))
    first.update(report(100))
    second.update(report(90))
    assert counted[GENERATED] == 100
    first.close()
    second.update(report(90))
    assert shown[PAUSED] == 0
    second.update(report(110))
    assert counted[GENERATED] == 110 and shown[PAUSED] == 10


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], {"e2e": 3.0}),
        ([10.5], {"e2e": 3.0, "ttft": 0.5}),
        ([10.5, 11.25], {"e2e": 3.0, "ttft": 0.5, "itl": 0.75, "longest_itl": 0.75}),
        ([10.5, 11.25, 11.5], {"e2e": 3.0, "ttft": 0.5, "itl": 0.5, "longest_itl": 0.75}),
    ],
)
def test_times_of_a_sequence(
    tokens: list[float], found: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, *tokens, 13.0, 13.0])
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    sequence = timing.SequenceTiming()
    for _ in tokens:
        sequence.token()
    sequence.sent += 2
    counts = {"input": 7, "output": 2}
    assert sequence.quantities(7) == found | counts
    sequence.queued = 0.25
    assert sequence.quantities(7) == found | counts | {"queue": 0.25}
