# SPDX-License-Identifier: Apache-2.0
"""Plans are pure data: their bytes, run in another process, give the same tokens."""

import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.harness import asks, serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.worker.runner import Launched, Runner

# Blocks for about three of the sequences, so that some are preempted; chunks of at most 32 tokens.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_tokens": 32,
    "max_num_tokens_while_decoding": 32,
    "max_seq_len": 160,
    "tokens_per_block": 16,
    "max_tokens_in_paged_kv_cache": 320,
}
PREFIX = list(range(40, 80))


def requests() -> list[tuple[list[int], SamplingParams]]:
    common: dict[str, Any] = {"max_tokens": 40, "end_id": -1}
    sampled = {"temperature": 0.8, **common}
    return [
        ([*range(30, 130)], SamplingParams(temperature=0.0, **common)),
        (PREFIX + [7, 8], SamplingParams(seed=1, top_k=20, top_p=0.9, **sampled)),
        (PREFIX + [9], SamplingParams(seed=2, min_p=0.05, repetition_penalty=1.3, **sampled)),
        (PREFIX + [5] * 20, SamplingParams(seed=3, presence_penalty=0.5, frequency_penalty=0.2, **sampled)),
        ([3], SamplingParams(seed=4, log_probs=True, top_logprobs=3, bad_words=[[60], [61, 62]], **sampled)),
        ([6] * 17, asks("[a-z ]{30,60}", max_tokens=40, temperature=0.9, seed=5)),
        ([6] * 18, SamplingParams(seed=6, bias_ids=[70, 71], bias_values=[8.0, 9.0], min_tokens=5, **common)),
        ([11, 12], SamplingParams(temperature=0.0, generation_logits=True, **common)),
    ]  # fmt: skip


class Recording:
    """Plans as bytes in the order of their launches, and the tokens of each."""

    def __init__(self, runner: Runner) -> None:
        self.plans: list[bytes] = []
        self.tokens: dict[int, list[int]] = {}  # by number of the plan
        self._numbers: dict[int, int] = {}
        launch, read = runner.launch, runner.read

        def recorded_launch(plan: StepPlan, *callbacks: Any) -> Any:
            number = len(self.plans)
            self.plans.append(plan.to_bytes())
            launched = launch(plan, *callbacks)
            self._numbers[id(launched.plan)] = number
            return launched

        def recorded_read(launched: Launched) -> Any:
            output = read(launched)
            self.tokens[self._numbers.pop(id(launched.plan))] = output.tokens.tolist()
            return output

        runner.launch, runner.read = recorded_launch, recorded_read  # type: ignore[method-assign, assignment]


def replay(runner: Runner, plans: list[bytes]) -> list[list[int]]:
    tokens: list[list[int]] = []
    in_flight: deque[Launched] = deque()

    def read() -> None:
        tokens.append(runner.read(in_flight.popleft()).tokens.tolist())

    def read_all() -> None:
        while in_flight:
            read()

    compiler, guided = GrammarCompiler("bundled", runner.state.model.spec.vocab_size), set()
    for data in plans:
        plan = StepPlan.from_bytes(data)
        for new in plan.new:  # grammars are no part of plans: the loop hands them to the sampler
            if new.params.grammar_type and new.handle not in guided:
                guided.add(new.handle)
                grammar = compiler.compile(new.params.grammar_type, new.params.grammar, new.params.end_id)
                assert grammar.fill() is None
                runner.sampler.grammars.put(new.handle, grammar)
        in_flight.append(runner.launch(plan, tokens_wanted=read_all))
        if len(in_flight) > 1:
            read()
    read_all()
    return tokens


def test_plans_replayed_in_another_process_give_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    core = start_core(Path("bundled"), **SETTINGS)
    recording = Recording(core.runner)
    with serve(core, tmp_path / "run") as client:
        ids = [client.submit(prompt, params) for prompt, params in requests()]
        several = [SamplingParams(max_tokens=30, seed=seed, end_id=-1) for seed in (8, 9)]
        ids.append(client.submit([20] * 33, several[0]))
        ids.append(client.submit([20] * 33, several[1], share_with=ids[-1]))
        client.wait(ids)
        assert not client.failure, client.failure
        client.wait_idle()
    scheduler = core.scheduler
    assert scheduler.preemptions and scheduler.prompt_tokens_reused, "the run was not mixed"
    plans = [StepPlan.from_bytes(data) for data in recording.plans]
    assert any((plan.lengths > 1).any() and len(plan.sampling_rows) < plan.num_rows for plan in plans), (
        "nothing in chunks"
    )
    path = tmp_path / "plans"
    path.write_bytes(msgspec.msgpack.encode(recording.plans))
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
    )
    assert not done.returncode, done.stderr
    replayed = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert replayed == [recording.tokens[number] for number in range(len(plans))]


def test_a_plan_says_what_is_no_data() -> None:
    none = np.empty(0, np.int32)
    columns = dict.fromkeys(
        ("slots", "starts", "lengths", "feeds", "wants", "tokens")
        + ("epochs", "temperature", "seed", "suppressed"),
        none,
    )
    plan = StepPlan(**columns)  # type: ignore[arg-type]
    assert len(StepPlan.from_bytes(plan.to_bytes()).slots) == 0
    plan.seed = lambda: None  # type: ignore[assignment]
    with pytest.raises(TypeError, match="function, which is no data"):
        plan.to_bytes()


if __name__ == "__main__":
    again = start_core(Path("bundled"), **SETTINGS)
    recorded = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes())
    print(msgspec.json.encode(replay(again.runner, recorded)).decode())
