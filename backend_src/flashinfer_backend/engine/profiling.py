# SPDX-License-Identifier: Apache-2.0
"""Traces of a running engine's steps, which a client starts and ends; the knob profile_dir allows it."""

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from torch.profiler import record_function

from flashinfer_backend.core.bounds import MOST_TRACED_STEPS
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.transport.protocol import Profile, Profiled
from flashinfer_backend.worker.runner import Runner

log = logging.getLogger(__name__)

MOST_FILES = 64  # in the folder; a client that starts traces again and again fills no disk
MOST_S = 300.0  # until a trace is written although its steps have not come
_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


class Profiling:
    """One trace at a time, of a bounded number of steps. send: of answers to clients."""

    def __init__(
        self, config: EngineConfig, runner: Runner, number: int, send: Callable[[Profiled], None]
    ) -> None:
        """number: the engine's number. Raises OSError where the folder cannot be made."""
        self._runner, self._number, self._send = runner, number, send
        self._folder = None if config.profile_dir == "none" else Path(config.profile_dir)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._ranks = config.tensor_parallel_size
        self._tracing = False
        self._left, self._until = 0, 0.0  # steps to come, and how long they may take
        self._files: list[str] = []  # of the latest trace
        self._error = ""  # why its own file is not there

    def asked(self, message: Profile) -> None:
        """Starts or ends a trace, and answers."""
        if refusal := self._refusal(message):
            self._send(Profiled(message.handle, [], refusal, refused=True))
            return
        if message.steps:
            self._start(message.steps)
        elif self._tracing:
            self._write()
        self._send(Profiled(message.handle, self._files, self._error))

    def _refusal(self, message: Profile) -> str:
        if self._folder is None:
            return "traces are off: start the server with the knob profile_dir=FOLDER"
        if not message.steps:
            return "" if self._files else "no trace was started: POST /start_profile"
        if self._tracing:
            return f"a trace is being made, {self._left} steps are left: POST /stop_profile ends it"
        if message.steps > MOST_TRACED_STEPS:
            return f"a trace should have at most {MOST_TRACED_STEPS} steps"
        found = len(list(self._folder.glob("*.json")))
        if found + self._ranks > MOST_FILES:
            return f"{self._folder} has {found} traces, and may have {MOST_FILES}: move some away"
        return ""

    def _start(self, steps: int) -> None:
        assert self._folder is not None
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1000 % 10**6:06}-engine-{self._number}"
        self._error, self._left, self._until = "", steps, time.monotonic() + MOST_S
        try:
            self._files = self._runner.start_trace(str(self._folder / name))
        except (OSError, RuntimeError) as error:  # another profiler may be attached to the process
            self._files, self._error = [], f"the trace could not be started: {error}"
            log.error("%s", self._error)
            return
        self._tracing = True
        log.info("tracing the next %d steps", steps)

    def span(self, what: str, plan: StepPlan | None = None) -> AbstractContextManager[object]:
        """Around a part of the loop, which a trace shows by this name."""
        if not self._tracing:
            return _NOTHING
        if plan is not None:
            prompts = plan.num_rows - plan.num_decodes
            what += f": {plan.num_decodes} decodes, {plan.num_prompt_tokens} tokens of {prompts} prompts"
        return record_function(what)

    def step_read(self) -> None:
        """A step has come to its end."""
        self._left -= 1

    def advance(self) -> None:
        """Writes a trace whose steps have been read, or whose time is over."""
        if self._tracing and (self._left <= 0 or time.monotonic() > self._until):
            self._write()

    def _write(self) -> None:
        self._tracing = False
        began = time.monotonic()
        try:
            self._runner.write_trace()
        except (OSError, ValueError, RuntimeError) as error:
            self._error = f"the trace could not be written: {error}"
            log.error("%s", self._error)
        else:
            log.info("wrote %s in %.1f s", " and ".join(self._files), time.monotonic() - began)
