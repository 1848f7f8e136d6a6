# SPDX-License-Identifier: Apache-2.0
"""When and in which order the loop sends tokens. No sockets: frames are seen as the engine makes them."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.loop import EngineLoop
from flashinfer_backend.transport import engine_socket, protocol
from perf_configs.bench_engine import LocalSocket


class Recorder(LocalSocket):
    """`log` has the local ids of every frame's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def submit(self, local_id: int, prompt_tokens: int, max_tokens: int) -> None:
        prompt = np.full(prompt_tokens, 65, "<i4").tobytes()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.inbox.append(protocol.Submit(protocol.make_handle(self.pid, local_id), prompt, params, 0, 0, 0))

    def send_tokens(self, pid: int, frame: bytes, reports: Any) -> None:
        super().send_tokens(pid, frame, reports)
        self.log.append(protocol.unpack_tokens(frame)[:, 0].tolist())


@pytest.fixture
def loop() -> EngineLoop:
    core = start_core(Path("bundled"), device="cpu", max_num_seqs=8, max_num_tokens=64)
    return EngineLoop(core, Recorder())  # type: ignore[arg-type]


def test_first_tokens_leave_before_the_other_tokens_of_their_step(loop: EngineLoop):
    recorder: Any = loop.socket
    for local_id in (1, 2, 3):
        recorder.submit(local_id, 8, 20)
    for _ in range(6):
        loop.step()
    recorder.submit(9, 8, 20)
    for _ in range(4):
        loop.step()
    assert [9, 1, 2, 3] in recorder.log, recorder.log
    following = recorder.log[recorder.log.index([9, 1, 2, 3]) + 1]
    assert following == [1, 2, 3, 9]


def test_a_steps_tokens_are_sent_while_the_next_one_is_launched(loop: EngineLoop):
    """On a CPU a step has ended when its launch returns, so it is read within the next launch."""
    recorder: Any = loop.socket
    launch = loop.runner.launch

    def logged(*args: Any) -> Any:
        recorder.log.append("begin")
        launched = launch(*args)
        recorder.log.append("end")
        return launched

    loop.runner.launch = logged  # type: ignore[method-assign]
    recorder.submit(1, 8, 20)
    for _ in range(4):
        loop.step()
    assert recorder.log[:2] == ["begin", "end"]
    assert recorder.log[2:] == ["begin", [1], "end"] * 3


def test_a_step_that_cannot_be_read_ends_the_engine(loop: EngineLoop, monkeypatch):
    """Also within the launch of the next one, which it is no fault of."""
    recorder: Any = loop.socket
    recorder.submit(1, 8, 20)
    loop.step()
    monkeypatch.setattr(recorder, "send_tokens", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.step()


def test_a_step_that_has_ended_is_not_waited_for(loop: EngineLoop):
    """However wrong the expectation of its end was."""
    recorder: Any = loop.socket
    recorder.submit(1, 8, 20)
    loop.step()
    kind = loop.pacer._class(loop.in_flight[0].plan)
    loop.pacer._began, loop.pacer._duration[kind] = time.monotonic(), 3600.0
    loop.step()
    assert recorder.log == [[1]]
    assert loop.pacer._duration[kind] < 3600.0


@pytest.mark.parametrize("share", [0.0, 1e6])
def test_a_step_waits_for_its_share_of_what_has_come(share, tmp_path, monkeypatch):
    """However much comes at once, a step does not wait until all of it is taken in, and nothing is lost.
    Behind a long step more is taken in, or what comes would have to wait for many of them."""
    monkeypatch.setattr("flashinfer_backend.engine.loop.RECEIVE_SHARE", share)
    core = start_core(Path("bundled"), device="cpu", max_num_seqs=8, max_num_tokens=64)
    order: list[str] = []
    handle, launch = EngineLoop._handle, core.runner.launch

    def slow(loop: EngineLoop, message: protocol.ToEngine) -> None:
        order.append("message")
        time.sleep(2 * engine_socket.LEAST_RECEIVE_S)
        handle(loop, message)

    def logged(*args: Any) -> Any:
        order.append("step")
        return launch(*args)

    monkeypatch.setattr(EngineLoop, "_handle", slow)
    monkeypatch.setattr(core.runner, "launch", logged)
    with serve(core, tmp_path) as client:
        stream = client.submit([65] * 8, SamplingParams(max_tokens=240, temperature=0.0))
        while not client.tokens[stream]:
            client.receive()
        del order[:]
        others = [client.submit([66] * 4, SamplingParams(max_tokens=1)) for _ in range(60)]
        client.wait([stream, *others])
        assert not client.failure
    taken = [len(run) for run in "".join("m" if o == "message" else "s" for o in order).split("s")]
    assert sum(taken) == len(others)
    assert max(taken) > 20 if share else max(taken) <= 2


def test_block_counts_add_up_over_the_times_that_a_sequence_is_computed():
    """As TensorRT-LLM's backend counts them: what a sequence is given, and finds, when it comes to a slot."""
    core = start_core(Path("bundled"), device="cpu", max_seq_len=128, max_tokens_in_paged_kv_cache=128)
    recorder: Any = Recorder()
    loop = EngineLoop(core, recorder)
    counts: dict[int, list[tuple[int, int, int, int]]] = {}
    send_tokens = recorder.send_tokens

    def noted(pid: int, frame: bytes, reports: list[protocol.RowReport] | None) -> None:
        send_tokens(pid, frame, reports)
        for report in reports or []:
            if (perf := report.perf) is not None:
                blocks = perf.allocated_blocks, perf.new_blocks, perf.reused_blocks
                counts.setdefault(report.local_id, []).append((*blocks, perf.cached_tokens))

    def run(*requests: tuple[int, int, int]) -> None:
        for local_id, token, max_tokens in requests:
            handle, prompt = protocol.make_handle(recorder.pid, local_id), np.full(20, token, "<i4").tobytes()
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, perf_metrics=True)
            recorder.inbox.append(protocol.Submit(handle, prompt, params, 0, 0, 0))
        while recorder.inbox or loop.scheduler.requests or loop.in_flight:
            loop.step()

    recorder.send_tokens = noted
    run((1, 65, 50), (2, 66, 100))
    # The second one made room when both had filled four blocks. Of its own it found three again; of the two
    # that it then got, one was another's that could have been found.
    assert loop.scheduler.preemptions == 1
    assert counts == {1: [(2, 2, 0, 0)] * 2, 2: [(2, 2, 0, 0), (2 + 2, 2 + 1, 3, 0)]}
    run((3, 66, 1))
    assert loop.status().blocks_reused == 3 + 1 and loop.status().prompt_tokens_reused == 16
