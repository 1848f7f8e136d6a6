# SPDX-License-Identifier: Apache-2.0
"""What the metrics count: sequences however they end, blocks, and what outlives an engine or an instance."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from asking import PROMPT, inputs, int32, stop_request, stream, strings
from metering import BLOCKS, ENDLESS, Shown, idle, leaving, metrics_port_open, shown, shown_once
from running import Server, build_repository, plain_command, running, wait_for

HISTOGRAMS = (
    "nv_llm_input_token_len",
    "nv_llm_output_token_len",
    "flashinfer_backend_time_to_first_token_seconds",
    "flashinfer_backend_inter_token_latency_seconds",
    "flashinfer_backend_inter_token_latency_max_seconds",
    "flashinfer_backend_e2e_latency_seconds",
    "flashinfer_backend_queue_time_seconds",
)


def observed(after: Shown, before: Shown) -> dict[str, float]:
    """How many values each histogram has taken in between."""
    return {name: after.get(f"{name}_count") - before.get(f"{name}_count") for name in HISTOGRAMS}


def test_counts_equal_what_was_sent(metered: Server) -> None:
    before = idle(metered)
    prompt = {"text_input": PROMPT, "return_num_input_tokens": True, **ENDLESS}
    lengths = [2, 12, 60]
    for length in lengths:
        status, answer = metered.post({**prompt, "max_tokens": length})
        assert status == 200 and "kv_cache_reused_blocks" not in answer
    prompt_tokens = answer["num_input_tokens"]
    for length in lengths:
        metered.post({**prompt, "max_tokens": length, "stream": True}, stream=True)
    several = {**prompt, "max_tokens": 7, "num_return_sequences": 3, "stream": True, "temperature": 1.0}
    metered.post(several, stream=True)
    lengths += [*lengths, 7, 7, 7]
    batch = {
        "text_input": strings(PROMPT, PROMPT),
        "max_tokens": int32(3, 4),
        "end_id": int32(1048576, 1048576),
    }
    stream(metered, "ensemble", [("", batch)])
    lengths += [3, 4]
    count = len(lengths)

    after = shown_once(metered, lambda s: s.ended() == before.ended() + count, "all ends to be noted")
    after = idle(metered)

    def moved(name: str) -> float:
        return after.get(name) - before.get(name)

    assert after.ended("length") - before.ended("length") == count
    assert observed(after, before) == dict.fromkeys(HISTOGRAMS, count)
    for name in HISTOGRAMS:
        at_most_inf = after.get(f"{name}_bucket", le="+Inf") - before.get(f"{name}_bucket", le="+Inf")
        assert at_most_inf == count, name
    assert moved("nv_llm_input_token_len_sum") == prompt_tokens * count
    assert moved("nv_llm_output_token_len_sum") == sum(lengths)
    le_50 = after.get("nv_llm_output_token_len_bucket", le="50")
    assert le_50 - before.get("nv_llm_output_token_len_bucket", le="50") == sum(n <= 50 for n in lengths)
    assert moved("flashinfer_backend_prompt_tokens_total") == prompt_tokens * count
    assert moved("flashinfer_backend_generated_tokens_total") == sum(lengths)
    # Parts of one time: a sequence waits, gets its first token, then the others.
    first = moved("flashinfer_backend_time_to_first_token_seconds_sum")
    mean = moved("flashinfer_backend_inter_token_latency_seconds_sum")
    longest = moved("flashinfer_backend_inter_token_latency_max_seconds_sum")
    assert 0 < moved("flashinfer_backend_queue_time_seconds_sum") < first
    assert 0 < mean <= longest
    assert first + longest < moved("flashinfer_backend_e2e_latency_seconds_sum")
    assert after.general("iteration_counter") > before.general("iteration_counter")


def test_one_token_has_no_inter_token_latency(metered: Server) -> None:
    before = idle(metered)
    metered.text(PROMPT, 1)
    after = shown_once(metered, lambda s: s.ended() > before.ended(), "the end")
    first, between = "flashinfer_backend_time_to_first_token_seconds_count", HISTOGRAMS[3] + "_count"
    assert after.get(first) == before.get(first) + 1
    assert after.get(between) == before.get(between)


def test_gauges_follow_a_sequence_whose_client_leaves(metered: Server) -> None:
    before = idle(metered)
    with leaving(metered, 500):
        shown_once(  # gauges are set one after the other, and may be read in between
            metered,
            lambda s: (
                s.requests("active") == 1
                and s.blocks("used") > 0
                and s.blocks("used") + s.blocks("free") == BLOCKS
                and s.blocks("fraction") == pytest.approx(s.blocks("used") / BLOCKS)
            ),
            "a sequence",
        )
    after = shown_once(metered, lambda s: s.ended("cancelled") == before.ended("cancelled") + 1, "the end")
    assert after.ended() == before.ended() + 1
    after = idle(metered)
    assert observed(after, before) == dict.fromkeys(HISTOGRAMS, 1)
    assert after.blocks("free") == BLOCKS and after.blocks("fraction") == 0
    assert after.requests("scheduled") == after.requests("waiting") == 0
    tokens = "nv_llm_output_token_len_sum"
    assert 0 < after.get(tokens) - before.get(tokens) < 500


def test_stop_words_and_mistakes_are_told_apart(metered: Server) -> None:
    before = idle(metered)
    full = metered.text(PROMPT, 40)
    metered.text(PROMPT, 40, stop_words=[full[17:23]])
    assert metered.post({"text_input": PROMPT, "max_tokens": 0})[0] == 400
    after = shown_once(metered, lambda s: s.ended() == before.ended() + 3, "three ends")
    assert [after.ended(r) - before.ended(r) for r in ("length", "stop", "refused")] == [1, 1, 1]
    assert observed(idle(metered), before) == dict.fromkeys(HISTOGRAMS, 2)


def of_ensemble(answers: list[Any]) -> list[Any]:
    """Without those to requests that stop others. Raises the first error."""
    for _, error in answers:
        if error is not None:
            raise error
    return [result for result, _ in list(answers) if result.get_response().model_name == "ensemble"]


def test_a_sequence_that_is_cancelled_while_it_waits_is_observed_once(metered: Server) -> None:
    before = idle(metered)
    request = {"text_input": strings("a cat, " * 160), "max_tokens": int32(4)}
    answers: list[Any] = []
    with leaving(metered, 500), grpcclient.InferenceServerClient(metered.grpc) as client:
        shown_once(metered, lambda s: s.blocks("used") >= 12, "too few free blocks for the other prompt")
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer("ensemble", inputs(request), request_id="waits")
        while not (ends := of_ensemble(answers)):  # the request may not have come to llm yet
            client.async_stream_infer("llm", inputs(stop_request()), request_id="waits")
            time.sleep(0.01)
    (result,) = ends
    assert result.as_numpy("finish_reason").item() == b"cancelled"
    shown_once(metered, lambda s: s.ended() == before.ended() + 2, "both ends")
    # Without a token there are no times of tokens.
    single = {name: 1 for name in HISTOGRAMS if "first_token" in name or "inter_token" in name}
    assert observed(idle(metered), before) == {**dict.fromkeys(HISTOGRAMS, 2), **single}


def test_prefix_cache_hits(metered: Server) -> None:
    name = "flashinfer_backend_prefix_cache_hit_tokens_total"
    before = idle(metered)
    body = {
        "text_input": "A bird, a fish and a frog met. " * 8,
        "max_tokens": 4,
        "return_num_input_tokens": True,
    }
    first = metered.post(body)[1]
    again = metered.post(body)[1]
    assert first["text_output"] == again["text_output"]
    after = shown_once(metered, lambda s: s.blocks("reused") > before.blocks("reused"), "a hit")
    # All full blocks but the one with the last token, which has to be computed.
    assert after.get(name) - before.get(name) == (first["num_input_tokens"] - 1) // 16 * 16 > 0


def test_preemptions(metered: Server) -> None:
    name = "flashinfer_backend_preemptions_total"
    before = idle(metered)
    # Two answers to one request begin in the same step, however busy the machine is.
    body = {"text_input": PROMPT, "max_tokens": 400, "num_return_sequences": 2, "stream": True, **ENDLESS}
    assert isinstance(metered.post(body, stream=True), list)
    after = shown_once(metered, lambda s: s.ended("length") == before.ended("length") + 2, "both ends")
    assert after.get(name) > before.get(name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without serve, which would start it again whatever of it dies."""
    folder = tmp_path_factory.mktemp("plain")
    repository = build_repository(folder, "max_seq_len=512", kv_tokens=16 * BLOCKS)
    with running(repository, folder, plain_command(repository, folder)) as started:
        wait_for(lambda: metrics_port_open(started), "the metrics port")
        yield started


def test_a_new_engine_shows_nothing_of_the_old_one(plain: Server) -> None:
    old = plain.engine_pid()
    with leaving(plain, 500):
        # more steps than the new engine will have when it is looked at
        before = shown_once(
            plain, lambda s: s.blocks("used") > 0 and s.general("iteration_counter") > 20, "a sequence"
        )
        os.kill(old, signal.SIGKILL)
    # The old engine's gauges go to 0 or vanish, unless the new one is there before we look.
    up = "flashinfer_backend_engine_up"

    def replaced(now: Shown) -> bool:
        return not any(now.named(up)) or now.general("iteration_counter") < before.general(
            "iteration_counter"
        )

    down = shown_once(plain, replaced, "the end of the old engine's gauges")
    if not any(down.named(up)):
        for name, kind in down.types.items():
            if name.startswith("nv_trt_llm_"):
                assert kind == "gauge" and not any(down.named(name)), name
    wait_for(lambda: plain.ready() and plain.engine_pid() != old, "the new engine")
    count = shown(plain).ended("length")
    wait_for(lambda: plain.answers(PROMPT), "answers")
    shown_once(plain, lambda s: s.named(up) == [1] and s.ended("length") == count + 1, "the new engine")
    after = idle(plain)
    assert after.get(up) == 1
    assert after.general("iteration_counter") < before.general("iteration_counter")
    assert after.blocks("max") == BLOCKS
    plain.text(PROMPT, 3)
    shown_once(plain, lambda s: s.ended() == after.ended() + 1, "the end")
    assert np.isfinite(list(shown(plain).series.values())).all()


def writer(server: Server) -> int | None:
    """Pid of the llm instance that writes the engine's metrics, None between two of them."""
    inode = (server.run_dir / "metrics.lock").stat().st_ino
    pids = re.findall(rf"FLOCK +ADVISORY +WRITE (\d+) \S+:{inode} ", Path("/proc/locks").read_text())
    return int(pids[0]) if pids else None


def test_another_instance_takes_over_from_the_writer(plain: Server) -> None:
    name = "flashinfer_backend_generated_tokens_total"
    plain.text(PROMPT, 9)
    before = idle(plain)
    assert before.get(name) > 0
    pid = writer(plain)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: writer(plain) not in (None, pid), "another writer")
    after = idle(plain)  # waits for newer reports
    assert after.get(name) == before.get(name)  # the new writer has not added the totals again
    answered = sum(plain.post({"text_input": PROMPT, "max_tokens": 9})[0] == 200 for _ in range(6))
    assert answered > 0
    tokens = before.get(name) + 9 * answered
    assert shown_once(plain, lambda s: s.get(name) >= tokens, "the tokens").get(name) == tokens
