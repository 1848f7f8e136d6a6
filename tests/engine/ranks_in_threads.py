# SPDX-License-Identifier: Apache-2.0
"""An engine whose ranks are threads of this process: all that ranks do, but for how they talk.

tests/engine/test_ranks.py has them as processes, too; starting those takes seconds.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.harness import start_core
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.engine.start import Core
from flashinfer_backend.models.adapters import State
from flashinfer_backend.ops.collectives import Collectives
from flashinfer_backend.worker import start
from flashinfer_backend.worker.ranks import Loads, adapter_message, plan_message

TIMEOUT_S = 120


class Meeting:
    """Where the threads of an engine exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._values: list[Any] = [None] * size

    def abort(self) -> None:
        """Nobody waits for a rank that has failed."""
        self._barrier.abort()

    def all(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class ThreadCollectives(Collectives):
    def __init__(self, shard: Shard, meeting: Meeting) -> None:
        self.shard, self._meeting = shard, meeting

    def _all(self, value: Any) -> list[Any]:
        return self._meeting.all(self.shard.rank, value)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self.sum(partial)

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self._all(values.clone())).sum(0)

    def gather_columns(self, local: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        every = self._all(local)
        if self.shard.rank:
            return local
        joined = torch.cat(every, 1)[:, :width].contiguous()
        return joined if out is None else out.copy_(joined)

    def broadcast(self, values: Tensor) -> Tensor:
        return values.copy_(self._all(values.clone())[0])

    def minimum(self, value: int) -> int:
        return min(self._all(value))


class Threads:
    """In place of worker.ranks.OtherRanks: the same bytes, through queues."""

    def __init__(self, size: int, meeting: Meeting) -> None:
        self.meeting = meeting
        self.messages: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(size)]
        self.loads = [Loads() for _ in range(size)]
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def send(self, plan: StepPlan) -> None:
        self._send(plan_message(plan))

    def load_adapter(self, place: int, folder: str) -> list[Future[State]]:
        begun = [loads.begin() for loads in self.loads]
        self._send(adapter_message(place, folder))
        return begun

    def _send(self, message: bytes) -> None:
        assert not self.errors, self.errors
        for messages in self.messages:
            messages.put(message)

    def step_read(self) -> None:
        """Steps have no limit here."""

    def close(self, leave: Callable[[], None]) -> None:
        for messages in self.messages:
            messages.put(None)
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        assert not self.errors, self.errors


def start_ranks(
    model_dir: Path,
    size: int,
    monkeypatch: Any,
    changed: Callable[[Any], None] = lambda _: None,
    expert_groups: int = 1,
    **settings: Any,
) -> Core:
    """harness.start_core of `size` ranks. changed: what to do to each rank's runner. expert_groups: as of
    Shard."""
    meeting = Meeting(size)
    others = Threads(size - 1, meeting)
    monkeypatch.setattr(start, "connect", lambda shard, *_: ThreadCollectives(shard, meeting))
    cores: list[Core] = []
    start_runner = start.start_runner

    def follow(rank: int, config: Any) -> None:
        try:
            _, runner = start_runner(config, Shard(rank, size, expert_groups), "")
            changed(runner)
            while (data := others.messages[rank - 1].get()) is not None:
                runner.obey(data, others.loads[rank - 1].end)
        except BaseException as error:
            others.errors.append(error)
            meeting.abort()

    def start_first(config: Any, **_: Any) -> Any:
        for rank in range(1, size):
            others.threads.append(threading.Thread(target=follow, args=(rank, config), daemon=True))
            others.threads[-1].start()
        config, runner = start_runner(config, Shard(0, size, expert_groups), "")
        changed(runner)
        runner.others = others
        return config, runner

    with monkeypatch.context() as patch:
        patch.setattr("flashinfer_backend.engine.start.start_runner", start_first)
        cores.append(start_core(model_dir, **settings))
    return cores[0]
