# SPDX-License-Identifier: Apache-2.0
"""A failure while a step is launched ends the request at fault, and none besides."""

from pathlib import Path
from typing import Any

import pytest

from engine.graphed import replayed
from engine.harness import Client, serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.sampling import processors, sampler

STREAMS = [[0, *range(40 + i, 60)] for i in range(4)]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, end_id=-1)
MARKED = 77  # a token of the request that fails


def expected(tmp_path: Path) -> list[list[int]]:
    with serve(start_core(Path("bundled")), tmp_path / "alone") as client:
        return client.generate(STREAMS, GREEDY)


def fails_beside(streams: list[list[int]], core: Any, tmp_path: Path, params: SamplingParams) -> str:
    """Runs the streams, and beside them a request that fails; its message."""
    with serve(core, tmp_path / "beside") as client:
        ids = [client.submit(prompt, GREEDY) for prompt in STREAMS]
        while min(len(client.tokens[i]) for i in ids) < 5:
            client.receive()
        bad = client.submit([MARKED] * 33, params)
        client.wait([*ids, bad])
        assert list(client.failure) == [bad]
        assert [client.tokens[i] for i in ids] == streams
        # Nothing of what failed is found in the cache, and the engine goes on.
        again = client.submit([MARKED] * 33, SamplingParams(max_tokens=3, temperature=0.0, end_id=-1))
        client.wait([again])
        assert len(client.tokens[again]) == 3
        return client.failure[bad].message


def test_what_fails_for_one_rows_logits_fails_that_row(tmp_path, monkeypatch):
    streams = expected(tmp_path)
    add_bias = processors.add_bias

    def fail_for_marked(logits: Any, where: Any, bias: Any) -> None:
        if bool((bias == -99.0).any()):
            raise MemoryError("no room for these logits")
        add_bias(logits, where, bias)

    monkeypatch.setattr(processors, "add_bias", fail_for_marked)
    biased = SamplingParams(max_tokens=9, bias_ids=[1], bias_values=[-99.0], end_id=-1)
    assert "no room for these logits" in fails_beside(streams, start_core(Path("bundled")), tmp_path, biased)


def test_tokens_before_the_one_that_fails_are_sent(tmp_path, monkeypatch):
    calls, add_bias = [], processors.add_bias

    def fail_at_last(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 3:  # the steps before are tried again, row by row
            raise MemoryError("no room for these logits")
        add_bias(*args)

    monkeypatch.setattr(processors, "add_bias", fail_at_last)
    core = start_core(Path("bundled"))
    replayed(core.runner)  # a graph does not stop between layers for the step before to be read
    with serve(core, tmp_path) as client:
        biased = SamplingParams(max_tokens=9, bias_ids=[1], bias_values=[-9.0], end_id=-1)
        bad = client.submit([MARKED], biased)
        client.wait([bad])
        assert len(client.tokens[bad]) == 3 and "no room" in client.failure[bad].message


def test_stateful_rows_beside_the_one_that_fails_keep_their_tokens(tmp_path, monkeypatch):
    told = {"log_probs": True, "max_tokens": 30, "end_id": -1}
    penalised = SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.5, **told)

    def heard(client: Client, ids: list[int]) -> list[Any]:
        """Tokens and log probabilities."""
        return [(client.tokens[i], [report.log_prob for report in client.reports[i]]) for i in ids]

    with serve(start_core(Path("bundled")), tmp_path / "alone") as client:
        client.generate(STREAMS, penalised)
        alone = heard(client, [1, 2, 3, 4])
    take = sampler.ReportedRows.take

    def fail_for_marked(self: Any, logits: Any, tokens: Any) -> Any:
        if max(self.top_counts):
            raise MemoryError("no room for log probabilities")
        return take(self, logits, tokens)

    monkeypatch.setattr(sampler.ReportedRows, "take", fail_for_marked)
    with serve(start_core(Path("bundled")), tmp_path / "beside") as client:
        ids = [client.submit(prompt, penalised) for prompt in STREAMS]
        bad = client.submit([MARKED] * 33, SamplingParams(top_logprobs=1, **told))
        client.wait([*ids, bad])
        assert list(client.failure) == [bad]
        # Other numbers of rows in a step round differently.
        assert heard(client, ids) == [(ids, pytest.approx(probs, abs=1e-4)) for ids, probs in alone]


@pytest.mark.parametrize("reuse", [True, False])
def test_a_prompt_whose_step_fails_takes_no_stream_with_it(reuse, tmp_path):
    streams = expected(tmp_path)
    core = start_core(Path("bundled"), enable_kv_cache_reuse=reuse)
    step, failed = core.runner.state.attention.step, []

    def fail_once(batch: Any) -> Any:
        if not failed and 33 in batch.q_lens.tolist():
            failed.append(batch)
            raise RuntimeError("no room for this prompt")
        return step(batch)

    core.runner.state.attention.step = fail_once
    message = fails_beside(streams, core, tmp_path, GREEDY)
    assert message == "RuntimeError: no room for this prompt"


def test_a_step_of_streams_that_fails_ends_them_and_the_engine_goes_on(tmp_path):
    core = start_core(Path("bundled"))
    run, failing = core.runner.state.attention.run, []

    def fail_once(layer: int, q: Any, out: Any) -> None:
        if layer == 1 and len(q) == 4 and not failing:
            failing.append(True)
            raise RuntimeError("no room")
        run(layer, q, out)

    core.runner.state.attention.run = fail_once
    with serve(core, tmp_path) as client:
        ids = [client.submit(prompt, GREEDY) for prompt in STREAMS]
        client.wait(ids)
        assert sorted(client.failure) == ids
        assert len(client.generate_after_failures([STREAMS[0]], GREEDY)[0]) == 60
