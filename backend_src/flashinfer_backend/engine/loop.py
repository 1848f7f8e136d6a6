# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: receive, plan, launch step N + 1, then read and send step N."""

from __future__ import annotations

import logging
import time
from collections import deque

import numpy as np
import torch

from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import NO_TOKEN_LEFT
from flashinfer_backend.core.step import Feeds, StepPlan
from flashinfer_backend.engine.adapters import AdapterPreparation
from flashinfer_backend.engine.admission import Admission, RefusedError
from flashinfer_backend.engine.logits_room import LogitsRoom
from flashinfer_backend.engine.outputs import accept, end_grammars, perf_of, queue_ns, row_reports
from flashinfer_backend.engine.pacing import Pacer
from flashinfer_backend.engine.preparations import Preparation, Preparations
from flashinfer_backend.engine.profiling import Profiling
from flashinfer_backend.engine.start import Core
from flashinfer_backend.scheduler.invariants import InvariantChecker
from flashinfer_backend.structured.grammar import Grammar, is_of_the_guide
from flashinfer_backend.structured.preparation import GrammarPreparation
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.engine_socket import EngineSocket
from flashinfer_backend.worker.runner import Launched

log = logging.getLogger(__name__)

STEP_POLL_MS = 2  # how soon it is seen that a step with prompts has ended before it was expected to
DECODE_POLL_MS = 10  # the same of other steps, whose time hardly changes from one to the next
# Messages are taken in for this share of the time since the last ones were, also when a step is due. Else
# long steps would leave the loop behind: it took in ten a step, and APIs can send thousands a second.
RECEIVE_SHARE = 0.25


class EngineLoop:
    """Serves the stubs that connect to `socket`."""

    def __init__(self, core: Core, socket: EngineSocket) -> None:
        self.config, self.scheduler, self.runner = core.config, core.scheduler, core.runner
        self.vocab_size = core.spec.vocab_size
        self.longest_seq_len, self._pools = core.spec.longest_seq_len, core.spec.pooling is not None
        self.socket, self._kv_events = socket, core.kv_events
        self.admission = Admission(self.config, core.spec)
        self._grammars = GrammarPreparation(
            self.config.tokenizer_dir or self.config.model_dir,
            self.vocab_size,
            self.config.max_num_seqs,
            enabled=self.config.guided_decoding_backend != "none",
        )
        self.logits = LogitsRoom(self.config.max_logits_mib << 20, self.vocab_size)
        load = self.runner.load_adapter if self.config.max_loras else None
        self.adapters = AdapterPreparation(load, self.config.max_loras, self._with_adapters)
        line: list[Preparation] = [self._grammars, self.adapters, self.logits]
        self.preparations = Preparations(line, self.scheduler, self._refuse)
        self.in_flight: deque[Launched] = deque()
        self._reading = False  # in _finish, or it has failed
        self.profiling = Profiling(
            self.config, self.runner, core.number, lambda answer: socket.send_profiled(answer)
        )
        self.pacer = Pacer()
        self._checker = InvariantChecker(self.scheduler) if self.config.check_invariants else None
        self.iteration = 0
        self.cancellations = 0
        self.generated_tokens = 0
        self.last_plan = (0, 0, 0)  # prefill rows, decode rows, prefill tokens
        self._next_status = 0.0
        self._received = time.monotonic()  # when messages were last taken in

    def run(self) -> None:
        """Until `socket` is closed: the engine's parent has ended, or the engine was told to end."""
        while self.step():
            pass

    def step(self) -> bool:
        """One turn; False when the engine should end. With check_invariants, raises BrokenInvariantError
        where it cannot go on."""
        self.profiling.advance()
        with self.profiling.span("receive"):
            self._receive()
        if self.socket.closed:
            return False
        self._refuse_late(time.monotonic_ns())
        self.preparations.advance()
        began = time.monotonic()
        with self.profiling.span("plan"):
            plan = self.scheduler.schedule(bool(self.in_flight), self.pacer.decode_s)
        if plan is not None:
            if self._checker is not None:
                self._checker.check_plan(plan)
            self.iteration += 1
            self.last_plan = (plan.num_rows - plan.num_decodes, plan.num_decodes, plan.num_prompt_tokens)
            with self.profiling.span("launch", plan):
                self._launch(plan, began)
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self._finish(self.in_flight.popleft())
        self._enqueue_rest()
        if self._checker is not None:
            self._checker.check(len(self.in_flight))
        if self._kv_events is not None:
            self._kv_events.publish()
        self._send_status()
        return True

    def _receive(self) -> None:
        """Take in what has come: at once if nothing runs on the device, else until it is time to plan."""
        timeout_ms = 0
        if not self.in_flight and not self.scheduler.requests:
            timeout_ms = self.config.stats_check_period_ms
            poll_ms = self.preparations.poll_ms
            timeout_ms = timeout_ms if poll_ms is None else min(timeout_ms, poll_ms)
        now = time.monotonic()
        least = now + RECEIVE_SHARE * (now - self._received)
        while not self.socket.closed:
            left_s = self._time_to_plan()
            until = time.monotonic() + left_s
            wait_ms = min(int(left_s * 1000), self._poll_ms)
            rest_s = left_s - wait_ms / 1000
            if 0.0 < rest_s < 0.001:  # the socket waits for whole milliseconds
                time.sleep(rest_s)
            idle = True
            for message in self.socket.receive(max(timeout_ms, wait_ms), max(until, least)):
                self._handle(message)
                idle = False  # a prompt may want to be planned earlier
            if time.monotonic() >= until or (idle and rest_s < 0.001):
                break
        self._received = time.monotonic()

    @property
    def _poll_ms(self) -> int:
        prompts = self.in_flight and self.in_flight[0].plan.num_prompt_tokens
        return STEP_POLL_MS if prompts else DECODE_POLL_MS

    def _time_to_plan(self) -> float:
        """Seconds until the next step should be planned; 0 for now."""
        if not self.in_flight:
            return 0.0
        running, now = self.in_flight[0], time.monotonic()
        prompts_wait = bool(self.scheduler.queue or self.scheduler.prefilling)
        left_s = self.pacer.deadline(running.plan, prompts_wait) - now
        if left_s > 0.0 and running.download.done:
            self.pacer.ended_early(running.plan, now)
            return 0.0
        return max(left_s, 0.0)

    def _handle(self, message: protocol.ToEngine) -> None:
        if isinstance(message, protocol.Submit):
            self._submit(message)
        elif isinstance(message, protocol.Cancel):
            waited = self.preparations.cancel(message.handle)
            request = self.scheduler.requests.get(message.handle)
            if request is not None:
                self.scheduler.release(request)
            request = request or waited
            if request is not None:
                self.cancellations += 1
                self._send_cancelled(request)
        elif isinstance(message, protocol.Profile):
            self.profiling.asked(message)
        elif isinstance(message, protocol.Freed):
            self.logits.freed(message.handle)
        elif isinstance(message, protocol.Hello):
            self.logits.drop_stub(message.pid)  # which had to reconnect, if it has been here
            self._next_status = 0.0
        elif isinstance(message, protocol.Goodbye):
            self._drop_stub(message.pid, message.said)

    def _submit(self, message: protocol.Submit) -> None:
        # What has come since the last plan waits for no other request while there are slots.
        queued = max(0, len(self.scheduler.queue) - self.scheduler.table.free) + len(self.preparations)
        try:
            request = self.admission.request(message, queued)
        except RefusedError as error:
            self.socket.send_failure(protocol.Failure(message.handle, str(error), refused=True))
        else:
            self.preparations.submit(request)

    def _with_adapters(self) -> list[Request]:
        """Requests that can have a place of an adapter."""
        return [*self.scheduler.requests.values(), *self.logits]

    def _refuse(self, request: Request, why: str) -> None:
        self._send_failure(request, why, refused=True)

    def _refuse_late(self, now_ns: int) -> None:
        """Refuse what has waited for as long as it may. None of it ever had a slot."""
        for request in self.scheduler.drop_late(now_ns) + self.preparations.drop_late(now_ns):
            waited_s = (time.time_ns() - request.arrival_ns) / 1e9
            self._refuse(
                request,
                f"{protocol.QUEUE_TIMEOUT}: it waited in the queue for {waited_s:.3g} s and never ran. Send"
                " it again later, with a longer timeout, or with a higher priority",
            )

    def _launch(self, plan: StepPlan, began: float) -> None:
        """Give `plan`, planned since `began`, to the device. Launching a step with prompts takes the host so
        long that the step before it may end meanwhile: that one is read between two layers."""
        for new in plan.new:
            request = self.scheduler.requests.get(new.handle)
            if request is not None and isinstance(request.grammar, Grammar):
                self.runner.sampler.grammars.put(new.handle, request.grammar)
                request.grammar = None
                self._grammars.started(request)

        def started() -> None:
            before = self.in_flight[0] if self.in_flight else None
            running, late = (before.plan, before.download.done) if before is not None else (None, False)
            self.pacer.planned(plan, began, time.monotonic(), running, late)

        try:
            launched = self.runner.launch(plan, started, self._finish_ended, self._read_all)
        except Exception as error:
            # The other ranks may be in the middle of the step; a step that is half read cannot be read again.
            if self.runner.others is not None or self._reading:
                raise
            self._abandon(plan, error)
            return
        results = launched.results
        for row, logits in results.logits:
            self._keep_context_logits(plan, row, logits)
        for row, found in results.log_probs:
            self._request(plan, row).keep_log_probs(int(plan.starts[row]), found)
        if results.failed:
            self._read_all()  # what came before is sent before
        for row, why in results.failed:
            self._fail(int(plan.slots[row]), why)
        self.in_flight.append(launched)

    def _abandon(self, plan: StepPlan, error: Exception) -> None:
        """Go on without a step that could not be launched. Its prompts fail, which are what differs from one
        step to the next; without any, all of its rows do. The others are computed again."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()  # raises where the device is what failed: nothing can go on then
        log.error("a step of %d rows failed", plan.num_rows, exc_info=error)
        self._read_all()
        self.pacer.interrupted()
        prompts = plan.feeds == Feeds.GIVEN
        failed = plan.slots[prompts] if prompts.any() else plan.slots
        for request in self.scheduler.abandon(plan, failed.tolist()):
            self._send_failure(request, f"{type(error).__name__}: {error}")

    def _enqueue_rest(self) -> None:
        """Enqueue what the last step left, behind the reading: when a step has ended is seen by that. It is
        a proposer's work: where it fails, the next drafts are worse, and no request is."""
        try:
            self.runner.settle()
        except Exception as error:
            if self.runner.others is not None:  # they may be in the middle of it
                raise
            if self.runner.device.type == "cuda":
                torch.cuda.synchronize()  # raises where the device is what failed
            log.error("the drafts behind a step failed", exc_info=error)

    def _fail(self, slot: int, why: str) -> None:
        """End the sequence that has a slot."""
        request = self.scheduler.table.requests[slot]
        if request is not None:
            if why != NO_TOKEN_LEFT and not is_of_the_guide(why):  # what the client asked for
                log.error("request %d failed: %s", request.handle, why)
            self.scheduler.release(request)
            self._send_failure(request, why)

    def _send_failure(self, request: Request, why: str, refused: bool = False) -> None:
        self.socket.send_failure(protocol.Failure(request.handle, why, refused))

    def _request(self, plan: StepPlan, row: int) -> Request:
        """That of a row of a step which has only just been launched."""
        request = self.scheduler.table.requests[int(plan.slots[row])]
        assert request is not None
        return request

    def _keep_context_logits(self, plan: StepPlan, row: int, logits: np.ndarray) -> None:
        request, start = self._request(plan, row), int(plan.starts[row])
        if len(logits) == len(request.prompt):
            request.context_logits = logits
        else:
            if request.context_logits is None:
                request.context_logits = np.empty((len(request.prompt), logits.shape[1]), np.float32)
            request.context_logits[start : start + len(logits)] = logits
        if start + len(logits) == len(request.prompt):
            self.logits.computed(request.handle)

    def _finish_ended(self) -> None:
        """Read the step before, if it has ended."""
        if self.in_flight and self.in_flight[0].download.done:
            self._finish(self.in_flight.popleft())

    def _read_all(self) -> None:
        """Read every step in flight."""
        while self.in_flight:
            self._finish(self.in_flight.popleft())

    def _finish(self, launched: Launched) -> None:
        """Read a step's tokens, send them, release what ended."""
        with self.profiling.span("read"):
            self._read(launched)
        self.profiling.step_read()

    def _read(self, launched: Launched) -> None:
        self._reading = True
        output = self.runner.read(launched)
        self.pacer.finished(launched.plan, time.monotonic())
        table = self.scheduler.table
        outcome = accept(table, launched.plan, output.tokens, output.counts)
        if output.counts is not None and len(launched.plan.drafted_rows):
            kept = np.bincount(outcome.rows, minlength=len(output.counts))
            self.scheduler.correct(launched.plan, kept)
        requests = table.requests
        for slot in outcome.slots[outcome.first].tolist():
            requests[slot].first_token_ns = time.time_ns()
        end_grammars(outcome, output)
        if not self._pools:
            self.generated_tokens += int(np.count_nonzero(outcome.tokens != protocol.NO_TOKEN))
        reports = row_reports(table, outcome, output)
        slots, tokens, codes = outcome.slots, outcome.tokens, outcome.codes
        # First tokens come first: a row of a step waits in its stub for those before it.
        if outcome.first.any():
            order = np.argsort(~outcome.first, kind="stable")
            slots, tokens, codes = slots[order], tokens[order], codes[order]
        owners, local_ids = table.stub[slots], table.local_id[slots]
        for pid in dict.fromkeys(owners.tolist()):
            mine = (owners == pid).nonzero()[0]
            frame = protocol.pack_tokens(local_ids[mine], tokens[mine], codes[mine])
            self.socket.send_tokens(pid, frame, reports.get(pid))
        for slot in outcome.slots[outcome.codes != protocol.RUNNING].tolist():
            request = requests[slot]
            assert request is not None
            self.scheduler.release(request)
        for row, why in output.failed:
            slot = int(launched.plan.sample_slots[row])
            if table.epoch[slot] == launched.plan.epochs[row]:
                self._fail(slot, why)
        self._reading = False

    def _send_cancelled(self, request: Request) -> None:
        pid, local_id = protocol.split_handle(request.handle)
        codes = np.array([protocol.FINISHED_CANCELLED])
        frame = protocol.pack_tokens(np.array([local_id]), np.array([protocol.NO_TOKEN]), codes)
        report = protocol.RowReport(local_id)
        if not request.first_token_ns:
            report.queue_ns = queue_ns(request)
        if request.params.perf_metrics:
            request.last_token_ns = time.time_ns() if request.first_token_ns else 0
            report.perf = perf_of(request)
        told = report.queue_ns is not None or report.perf is not None
        self.socket.send_tokens(pid, frame, [report] if told else None)

    def _drop_stub(self, pid: int, said: bool) -> None:
        count = len(self.scheduler.requests) + len(self.preparations)
        for request in [r for r in self.scheduler.requests.values() if r.handle >> 32 == pid]:
            self.scheduler.release(request)
        self.preparations.drop_stub(pid)
        dropped = count - len(self.scheduler.requests) - len(self.preparations)
        if dropped and not said:
            log.warning("process %d has died; its open requests, %d, are dropped", pid, dropped)
        self.socket.forget(pid)

    def _send_status(self) -> None:
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + self.config.stats_check_period_ms / 1000
        self.socket.send_status(self.status())

    def status(self) -> protocol.Status:
        """The engine's state as the metrics show it."""
        scheduler = self.scheduler
        pool = scheduler.kv_manager.pools[0]  # the group that holds the most tokens
        snapshots = scheduler.kv_manager.snapshots
        prefill_rows, decode_rows, prefill_tokens = self.last_plan if scheduler.running else (0, 0, 0)
        cuda = self.runner.device.type == "cuda"
        # memory_reserved() would flatten and sort all statistics to give this one.
        memory = torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"] if cuda else 0
        return protocol.Status(
            pid=self.socket.pid,
            device=torch.cuda.get_device_name() if cuda else "cpu",
            vocab_size=self.vocab_size,
            max_seq_len=self.config.max_seq_len,
            max_input_len=self.config.max_input_len,
            max_num_seqs=self.config.max_num_seqs,
            max_queue_size=self.config.max_queue_size,
            block_size=self.config.tokens_per_block,
            blocks_total=pool.num_blocks,
            longest_seq_len=self.longest_seq_len,
            blocks_used=pool.num_blocks - pool.available,
            blocks_cached=pool.cached,
            snapshots=0 if snapshots is None else snapshots.num_blocks,
            snapshots_cached=0 if snapshots is None else snapshots.cached,
            requests_active=len(scheduler.requests) + len(self.preparations),
            requests_waiting=len(scheduler.queue) + len(self.preparations),
            requests_running=len(scheduler.running),
            prefill_rows=prefill_rows,
            decode_rows=decode_rows,
            prefill_tokens=prefill_tokens,
            iteration=self.iteration,
            preemptions=scheduler.preemptions,
            cancellations=self.cancellations,
            prompt_tokens=scheduler.prompt_tokens,
            prompt_tokens_reused=scheduler.prompt_tokens_reused,
            generated_tokens=self.generated_tokens,
            drafted_tokens=scheduler.drafted_tokens,
            accepted_tokens=scheduler.accepted_tokens,
            adapters_running=sorted({r.params.adapter for r in scheduler.running.values()} - {""}),
            adapters_waiting=self.adapters.waiting,
            adapters_loaded=self.adapters.loads,
            blocks_reused=scheduler.blocks_reused,
            logits_bytes=self.logits.held,
            logits_waiting=len(self.logits),
            memory_gpu=memory,
            timestamp_ns=time.time_ns(),
        )
