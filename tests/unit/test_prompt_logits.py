# SPDX-License-Identifier: Apache-2.0
"""Logits of prompts in the OpenAI API: who has room for them, how they arrive, and what is made of them."""

import asyncio
import dataclasses
import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flashinfer_backend.core.gate import Gate, Ticket
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.link import EngineLink, LogitsRoom
from flashinfer_backend.openai.log_probs import (
    TokenTexts,
    largest,
    prompt_lists,
    prompt_log_probs,
    reduced,
    text_of,
)
from flashinfer_backend.serving.generation import GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import protocol

VOCAB = 2048
DECODER = DeltaDecoder(TextTokenizer(resolve_model_dir("bundled")).backend, skip_special_tokens=False)
TEXTS = TokenTexts(text_of, DECODER)


class Places:
    """Of a gate for 100 bytes."""

    def __init__(self, most_waiting: int | None = None) -> None:
        self.started: list[str] = []
        self.seen: list[tuple[int, int]] = []
        self.gate = Gate(100, lambda held, waiting: self.seen.append((held, waiting)), most_waiting)

    def enter(self, name: str, size: int, priority: int = 0) -> Ticket:
        ticket = Ticket(size, priority, lambda: self.started.append(name))
        assert self.gate.enter(ticket)
        return ticket


def test_who_waits_goes_in_by_priority_and_then_by_arrival() -> None:
    places = Places()
    first = places.enter("first", 60)
    large = places.enter("large", 300)
    places.enter("small", 10)  # would fit
    urgent = places.enter("urgent", 50, priority=-1)
    assert places.started == ["first"] and places.seen[-1] == (60, 3)
    places.gate.leave(first)
    places.gate.leave(first)
    assert places.started == ["first", "urgent"]
    places.gate.leave(urgent)
    assert places.started[2:] == ["large"] and places.seen[-1] == (300, 1)  # alone, beyond the bound
    places.gate.leave(large)
    assert places.started[3:] == ["small"] and places.seen[-1] == (10, 0)
    places.enter("the rest", 90)
    places.enter("empty", 1)
    assert places.started[4:] == ["the rest"] and places.seen[-1] == (100, 1)


def test_who_leaves_together_lets_in_none_of_themselves() -> None:
    places = Places()
    first, second, third = (places.enter(name, 100) for name in ("first", "second", "third"))
    places.enter("last", 100)
    places.gate.leave(first, second, third, Ticket(1, 0, lambda: None))
    assert places.started == ["first", "last"] and places.seen[-1] == (100, 0) == (100, places.gate.waiting)


def test_those_who_leave_the_line_in_any_order_leave_the_others_in_theirs() -> None:
    draw, places = random.Random(0), Places()
    last = places.enter("in", 100)
    line = [(draw.randrange(3), f"{i}") for i in range(200)]
    entered = {name: places.enter(name, 100, priority) for priority, name in line}
    for priority, name in draw.sample(line, 120):
        places.gate.leave(entered.pop(name))
        line.remove((priority, name))
        if draw.random() < 0.2:  # who comes again is last
            entered[name] = places.enter(name, 100, priority)
            line.append((priority, name))
    expected = [name for _, name in sorted(line, key=lambda each: each[0])]
    for name in expected:
        places.gate.leave(last)
        last = entered[name]
    assert places.started == ["in", *expected]


def test_too_many_that_wait_are_refused() -> None:
    places = Places(most_waiting=2)
    for name in ("in", "one", "two"):
        places.enter(name, 100)
    assert not places.gate.enter(Ticket(1, 0, lambda: None))


class Sent:
    """Engines that keep what is submitted."""

    def __init__(self) -> None:
        self.up, self.full = True, False
        self.status = SimpleNamespace(vocab_size=VOCAB)
        self.submitted: list[tuple[Any, SamplingParams, int]] = []
        self.cancelled: list[int] = []
        self.cancel = self.cancelled.append
        self.said_free: list[int] = []
        self.freed = self.said_free.append

    def refusal(self, count: int) -> None:
        """Room may be gone by the time of submit."""

    def submit(self, sink: Any, prompt: bytes, params: SamplingParams, share: int, *rest: int) -> int:
        if self.full:
            self.submitted.append((sink, params, share))
            sink.on_failure(protocol.QUEUE_FULL, True)
            return 0
        sink.handle = len(self.submitted) + 1
        self.submitted.append((sink, params, share))
        return int(sink.handle)


def row(tokens: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=1, context_logits=True)
    return GenerationRequest(np.arange(tokens, dtype="<i4"), params)


def test_logits_are_reduced_beside_the_event_loop_and_free_their_room_then() -> None:
    """The reduction waits for the loop: on its thread, or on the link's, it would wait for ever."""
    goes_on, engines = threading.Event(), Sent()

    def reduce(prompt: np.ndarray, logits: memoryview) -> Any:
        assert goes_on.wait(120)
        return np.int64(len(prompt) * len(logits))

    async def run() -> None:
        link = EngineLink(engines, asyncio.get_running_loop(), LogitsRoom(4 * VOCAB))  # type: ignore[arg-type]
        streams = link.generate([(row(1), 2), (row(1), 1)], DECODER, reduce)
        first, other, later = streams.all
        wanted = [params.context_logits for _, params, _ in engines.submitted]
        assert wanted == [True, False] and later.handle == 0, "once for a prompt, and one prompt at a time"
        report = protocol.RowReport(1, context_logits=memoryview(b"1234"))
        first.on_token(7, protocol.FINISHED_LENGTH, report)
        assert report.context_logits is None, "nobody else keeps them"
        await asyncio.sleep(0)
        assert later.handle == 0, "its room is taken until they are reduced"
        goes_on.set()
        assert first.logits is not None and await asyncio.wrap_future(first.logits.reduced) == 4
        while not later.handle:
            await asyncio.sleep(0.001)
        assert engines.said_free == [first.handle]
        streams.leave()
        streams.cancel()
        assert {other.handle, later.handle} <= {*engines.cancelled} and len(engines.cancelled) == 2, "once"
        later.on_token(protocol.NO_TOKEN, protocol.FINISHED_CANCELLED, None)
        next_one = link.generate([(row(1), 1)], DECODER, reduce).all[0]
        while not next_one.handle:
            await asyncio.sleep(0.001)
        assert engines.said_free == [first.handle, later.handle]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_of_a_prompt_whose_first_sequence_is_refused_no_others_are_tried() -> None:
    engines = Sent()
    engines.full = True

    async def run() -> None:
        link = EngineLink(engines, asyncio.get_running_loop(), LogitsRoom())  # type: ignore[arg-type]
        plain = dataclasses.replace(row(1), params=SamplingParams(max_tokens=1))
        streams = link.generate([(plain, 100), (plain, 1)], DECODER)
        with pytest.raises(ApiError, match=protocol.QUEUE_FULL) as error:
            async for _ in streams:
                pass
        assert error.value.status == 429 and len(engines.submitted) == 1 and not engines.cancelled

    asyncio.run(asyncio.wait_for(run(), 30))


def test_context_logits_are_frames_of_their_own() -> None:
    logits = [np.full(6, n, "<f4") for n in range(2)]
    reports = [protocol.RowReport(n, context_logits=memoryview(a).cast("B")) for n, a in enumerate(logits)]
    frames = protocol.pack_reports([reports[0], protocol.RowReport(9, queue_ns=3), reports[1]])
    for frame, sent in zip(frames[1:], logits, strict=True):
        assert np.shares_memory(np.frombuffer(frame, np.uint8), sent), "not copied"
    assert len(frames) == 3 and len(frames[0]) < 100
    found = protocol.unpack_reports(frames)
    assert [each.local_id for each in found] == [0, 9, 1] and found[1].context_logits is None
    for each, sent in ((found[0], logits[0]), (found[2], logits[1])):
        assert each.context_logits == memoryview(sent).cast("B")
    assert protocol.unpack_reports([]) == []


@pytest.mark.parametrize("size", [3, 25, 511, 1500, 4097])
def test_the_largest_of_a_row(size: int) -> None:
    generator = np.random.default_rng(size)
    for values in (generator.normal(size=size), generator.integers(0, 4, size), np.zeros(size)):
        numbers = values.astype(np.float32)
        for count in (0, 1, 20):
            expected = sorted(((float(v), i) for i, v in enumerate(numbers)), reverse=True)[:count]
            assert largest(numbers, count) == [(i, value) for value, i in expected]


def test_log_probs_of_a_prompt_are_kept_packed() -> None:
    """As JSON they take four times as much."""
    tokens = 200
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(tokens, VOCAB)).astype(np.float32)
    prompt = generator.integers(3, VOCAB, tokens).astype(np.int32)
    found = reduced(prompt, logits.tobytes(), 20)
    text = msgspec.json.encode(prompt_lists(found, 20, TEXTS, DECODER).json())
    assert found.size < 180 * tokens < len(text) / 3
    assert all(array.base is None for array in found), "a view would keep the logits"
    answer = json.loads(text)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))[:, None]
    assert answer["token_logprobs"][0] is None and answer["top_logprobs"][0] is None
    chosen = exact[np.arange(tokens - 1), prompt[1:]]
    np.testing.assert_allclose(answer["token_logprobs"][1:], chosen, atol=1e-6)
    for ticket, (token, begin) in enumerate(zip(answer["tokens"], answer["text_offset"], strict=True)):
        assert begin == len(DECODER.delta([], prompt[:ticket].tolist(), last=False))
        assert token == DECODER.piece(int(prompt[ticket])).decode(errors="replace")
    for best, values in zip(answer["top_logprobs"][1:], exact, strict=False):
        assert max(best.values()) == pytest.approx(values.max(), abs=1e-6) and len(best) <= 21


def test_log_probs_of_a_prompt_by_id() -> None:
    generator = np.random.default_rng(6)
    logits = generator.normal(size=(50, VOCAB)).astype(np.float32)
    logits[3, 40] = -np.inf
    prompt = generator.integers(3, VOCAB, 50).astype(np.int32)
    prompt[4], prompt[6] = 40, logits[5].argmax()
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))[:, None]
    for top in (0, 3):
        first, *others = json.loads(bytes(prompt_log_probs(reduced(prompt, logits.tobytes(), 3), top, TEXTS)))
        assert first is None and len(others) == 49
        for found, values, token in zip(others, exact, prompt[1:].tolist(), strict=False):
            order = np.argsort(-values).tolist()
            assert [int(name) for name in found] == list(dict.fromkeys([token, *order[:top]]))
            for name, told in found.items():
                assert told["rank"] == order.index(int(name)) + 1
                assert told["logprob"] == pytest.approx(max(values[int(name)], -9999.0), abs=1e-6)
                assert told["decoded_token"] == DECODER.piece(int(name)).decode(errors="replace")
    assert others[3]["40"]["logprob"] == -9999.0 and len(others[5]) == 3
