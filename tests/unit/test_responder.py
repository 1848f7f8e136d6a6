# SPDX-License-Identifier: Apache-2.0
"""Tokens of sequences to responses: order, merging, stop words, ends, waiting for postprocessing.
Only Triton itself is replaced."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from responder_bench import FINAL, TIMEOUT_S, Bench, Error, Sender, bench, feed, row

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.text.chunk import unpack_chunk
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server import responder
from flashinfer_backend.triton_server.postprocessing import chunk_text
from flashinfer_backend.triton_server.requests import Row
from flashinfer_backend.triton_server.responder import (
    AHEAD_NS,
    LOOK_AGAIN_S,
    MOST_UNSENT_BYTES,
    SENDER_THREADS,
)
from flashinfer_backend.triton_server.sequence import ResponseIndices, Sequence


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(resolve_model_dir("bundled"))


def test_tokens_that_arrive_while_a_response_is_sent_go_out_together(bench: Bench) -> None:
    sender, request = bench.open(row())
    sender.free.clear()
    feed(request.sequences[0], 1)
    assert sender.entered.wait(TIMEOUT_S)
    feed(request.sequences[0], 2, 3, 4)
    feed(request.sequences[0], 5, end=protocol.FINISHED_LENGTH)
    sender.free.set()
    assert sender.ended.wait(TIMEOUT_S)
    assert sender.ids == [[1], [2, 3, 4, 5]]
    last, flags, _ = sender.sent[-1]
    assert flags == FINAL and last["finish_reason"].item() == b"length"
    bench.wait_closed()


def test_each_chunk_carries_the_ids_before_it(bench: Bench) -> None:
    sender, request = bench.open(row())
    for n in range(12):
        done = len(sender.sent)
        feed(request.sequences[0], n, end=protocol.FINISHED_END_ID if n == 11 else protocol.RUNNING)
        while len(sender.sent) == done:
            pass
    contexts = [unpack_chunk(tensors["chunk"][0]) for tensors, _, _ in sender.sent]
    assert [context.context_ids for context in contexts] == [list(range(max(0, n - 8), n)) for n in range(12)]
    assert [context.last for context in contexts] == [False] * 11 + [True]
    assert {context.handle for context in contexts} == {100}


def test_the_end_token_is_not_sent(bench: Bench) -> None:
    sender, request = bench.open(row())
    feed(request.sequences[0], 5, protocol.NO_TOKEN, end=protocol.FINISHED_END_ID)
    assert sender.ended.wait(TIMEOUT_S)
    assert [token for ids in sender.ids for token in ids] == [5]
    assert sender.sent[-1][0]["finish_reason"].item() == b"stop"


@pytest.mark.parametrize("exclude", [False, True])
def test_without_streaming_there_is_one_response(bench: Bench, exclude: bool) -> None:
    sender, request = bench.open(row(streaming=False, exclude_input=exclude))
    feed(request.sequences[0], 1, 2, 3, end=protocol.FINISHED_LENGTH)
    assert sender.ended.wait(TIMEOUT_S)
    assert sender.ids == [[1, 2, 3] if exclude else [7, 8, 1, 2, 3]]
    assert unpack_chunk(sender.sent[0][0]["chunk"][0]).whole


def test_only_the_last_row_of_a_batch_is_final(bench: Bench) -> None:
    sender, request = bench.open(row(), row(), row())
    for n in (1, 0, 2):
        feed(request.sequences[n], n + 10, end=protocol.FINISHED_LENGTH)
    assert sender.ended.wait(TIMEOUT_S)
    assert sorted(tensors["batch_index"].item() for tensors, _, _ in sender.sent) == [0, 1, 2]
    assert [flags for _, flags, _ in sender.sent] == [0, 0, FINAL]


@pytest.mark.parametrize("held", [False, True])
def test_tokens_that_arrive_with_a_failure_while_a_response_is_sent_come_before_it(
    bench: Bench, held: bool
) -> None:
    """held: they may begin a stop word."""
    sender, request = bench.open(row())
    (sequence,) = request.sequences
    matcher = SimpleNamespace(held=0, feed=lambda ids: None)
    sequence._matcher = matcher  # type: ignore[assignment]
    sender.free.clear()
    feed(sequence, 1)
    assert sender.entered.wait(TIMEOUT_S)
    matcher.held = 2 * held
    feed(sequence, 2, 3)
    sequence.on_failure("out of luck", False)
    sender.free.set()
    assert sender.ended.wait(TIMEOUT_S)
    assert sender.ids == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (True, "out of luck"),
        (False, "Executor failed process requestId 100 due to the following error: out of luck"),
    ],
)
def test_a_failure_comes_after_the_tokens_before_it_and_ends_the_request(
    bench: Bench, refused: bool, message: str
) -> None:
    sender, request = bench.open(row(), row())
    feed(request.sequences[0], 1)
    request.sequences[0].on_failure("out of luck", refused)
    assert sender.ended.wait(TIMEOUT_S)
    feed(request.sequences[1], 2, end=protocol.FINISHED_LENGTH)  # too late: nothing may follow
    assert sender.ids == [[1]]
    _, flags, error = sender.sent[-1]
    assert error is not None and (error.message, error.code, flags) == (message, Error.INTERNAL, FINAL)
    assert 101 in bench.cancelled


def test_an_unread_stream_is_told_why_it_ended(bench: Bench) -> None:
    sender, request = bench.open(row(), row())
    request.unread = True
    for sequence in request.sequences:
        feed(sequence, protocol.NO_TOKEN, end=protocol.FINISHED_CANCELLED)
    assert sender.ended.wait(TIMEOUT_S)
    assert [error is None for _, _, error in sender.sent] == [True, False]
    _, flags, error = sender.sent[-1]
    assert error is not None and "request text_output" in error.message and flags == FINAL
    bench.wait_closed()


def test_stop_cancels_the_requests_with_that_id(bench: Bench) -> None:
    sender, request = bench.open(row(), request_id="a")
    other, _ = bench.open(row(), request_id="b")
    bench.responder.stop("a")
    assert bench.cancelled == [100]
    feed(request.sequences[0], protocol.NO_TOKEN, end=protocol.FINISHED_CANCELLED)
    assert sender.ended.wait(TIMEOUT_S) and not other.sent
    assert sender.sent[-1][0]["finish_reason"].item() == b"cancelled"


def test_a_character_that_the_prompt_begins_is_counted_once(bench: Bench, tokenizer: TextTokenizer) -> None:
    decoder = DeltaDecoder(tokenizer.backend)
    (tokens,) = tokenizer.encode_batch(["A \U0001f327 girl. She"], False)
    cut = next(n for n in range(len(tokens)) if decoder.delta([], tokens[:n], True).endswith("\ufffd"))
    whole = dataclasses.replace(row(False, stop_words=["irl"], exclude_stop_words=True), exclude_input=False)
    sender, request = bench.open(dataclasses.replace(whole, prompt=np.array(tokens[:cut], np.int32)))
    request.sequences[0].match_stop_words(decoder)
    feed(request.sequences[0], *tokens[cut:])
    assert sender.ended.wait(TIMEOUT_S)
    context = unpack_chunk(sender.sent[-1][0]["chunk"][0])
    assert decoder.delta([], context.ids, True)[: context.max_chars] == "A \U0001f327 g"


def test_stop_words_whose_text_is_not_followed_stay_with_the_engine(
    bench: Bench, tokenizer: TextTokenizer
) -> None:
    params = SamplingParams(max_tokens=9, stop_sequences=[[1], [300], [301]])  # 1 is the end-of-text token
    followed = tokenizer.backend.decode([300])
    wanted = Row(np.array([7], np.int32), params, streaming=True, stop_words=["x", followed])
    _, request = bench.open(wanted)
    remaining = request.sequences[0].match_stop_words(DeltaDecoder(tokenizer.backend))
    assert remaining.stop_sequences == [[1], [301]]


def test_what_is_reported_of_an_id_that_is_held_back_goes_out_with_it() -> None:
    """An id that may begin a stop word waits for the next chunk; so does its log probability."""
    asking = msgspec.structs.replace(row().params, log_probs=True)
    request: Any = SimpleNamespace()
    sequence = Sequence(request, dataclasses.replace(row(), params=asking), ResponseIndices(), lambda _: None)
    matcher = SimpleNamespace(held=1, feed=lambda ids: None)
    sequence._matcher = matcher  # type: ignore[assignment]

    def report(token: int) -> None:
        report = protocol.RowReport(1, log_prob=-float(token))
        sequence.on_token(token, protocol.RUNNING, report)

    def sent() -> tuple[list[int], list[float], float]:
        chunk = sequence.take()
        assert chunk is not None
        return chunk.ids.tolist(), chunk.log_probs.tolist(), sequence.cum_log_prob

    report(1)
    report(2)
    assert sent() == ([1], [-1.0], -1.0)
    matcher.held = 0
    report(3)
    assert sent() == ([2, 3], [-2.0, -3.0], -6.0)


def test_who_asks_for_no_logits_never_waits_behind_who_does(bench: Bench) -> None:
    """The server takes seconds to write large ones as JSON, and a sender waits for that."""
    asking = SamplingParams(max_tokens=9, context_logits=True)
    held, request = bench.open(dataclasses.replace(row(), params=asking))
    held.free.clear()
    feed(request.sequences[0], 1, end=protocol.FINISHED_LENGTH)
    assert held.entered.wait(TIMEOUT_S)
    others = [bench.open(row()) for _ in range(2 * SENDER_THREADS)]
    for _, other in others:
        feed(other.sequences[0], 1, 2, end=protocol.FINISHED_LENGTH)
    assert all(sender.ended.wait(TIMEOUT_S / 4) for sender, _ in others)
    assert not held.sent
    held.free.set()
    assert held.ended.wait(TIMEOUT_S)


def test_large_logits_for_the_ensemble_wait_until_those_before_are_sent(bench: Bench) -> None:
    """The server sends the ensemble's answers one after the other: others' should come between."""
    wanted = dataclasses.replace(row(), params=SamplingParams(max_tokens=9, context_logits=True))
    large = memoryview(bytes(MOST_UNSENT_BYTES))  # of a prompt of two tokens
    (first, one), (second, two) = bench.open(wanted), bench.open(wanted)
    for request in (one, two):
        report = protocol.RowReport(0, context_logits=large)
        request.sequences[0].on_token(1, protocol.FINISHED_LENGTH, report)
    assert first.ended.wait(TIMEOUT_S) and bench.probed.wait(TIMEOUT_S)
    sender, other = bench.open(row())
    feed(other.sequences[0], 1, end=protocol.FINISHED_LENGTH)
    assert sender.ended.wait(TIMEOUT_S)
    assert not second.sent
    bench.caught_up.set()
    assert second.ended.wait(TIMEOUT_S)
    assert [tensors["context_logits"].nbytes for tensors, _, _ in second.sent if tensors] == [len(large)]


ROOM = 300_000
FITS = 20_000  # ids: more than LARGE_BYTES, less than ROOM
TOO_MANY = 40_000


def finish(bench: Bench, sender: Sender, tokens: int) -> None:
    _, request = bench.open(row(streaming=False, exclude_input=True), sender=sender)
    feed(request.sequences[0], *range(tokens), end=protocol.FINISHED_LENGTH)
    assert sender.ended.wait(TIMEOUT_S)
    bench.wait_closed()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_large_response_is_sent_before_its_flag(bench: Bench, decoupled: bool) -> None:
    sender = Sender(ROOM, decoupled)
    finish(bench, sender, FITS)
    assert sender.ids == [list(range(FITS))]
    assert [flags for _, flags, _ in sender.sent] == [0, FINAL]


def test_a_small_response_carries_its_flag(bench: Bench) -> None:
    sender = Sender(ROOM)
    finish(bench, sender, 100)
    assert [flags for _, flags, _ in sender.sent] == [FINAL]


def test_what_does_not_fit_is_answered_with_an_error(bench: Bench) -> None:
    sender = Sender(ROOM)
    finish(bench, sender, TOO_MANY)
    _, flags, error = sender.sent[-1]
    assert error is not None and "cannot send a response: Failed to increase" in error.message
    assert flags == FINAL and len(sender.sent) == 1


def test_not_decoupled_what_does_not_fit_ends(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    """The one response that may be sent was tried: the server makes an error of an end without any. The log
    says why."""
    sender = Sender(ROOM, decoupled=False)
    finish(bench, sender, TOO_MANY)
    assert sender.sent == [({}, FINAL, None)]
    bench.responder.close()  # it writes to the log behind the end
    assert "Failed to increase the shared memory pool" in capfd.readouterr().err


@pytest.mark.parametrize("decoupled", [True, False])
def test_what_cannot_fit_is_not_tried(bench: Bench, monkeypatch: pytest.MonkeyPatch, decoupled: bool) -> None:
    full = SimpleNamespace(f_bavail=ROOM // 10, f_frsize=10)
    monkeypatch.setattr(responder.os, "statvfs", lambda _: full)
    sender = Sender(ROOM, decoupled)
    finish(bench, sender, TOO_MANY)
    ((_, flags, error),) = sender.sent
    assert error is not None and "has 0.5 MiB, and /dev/shm has room for 0.3 MiB" in error.message
    assert flags == FINAL
    another = Sender(ROOM, decoupled)
    finish(bench, another, FITS)
    assert another.ids == [list(range(FITS))]


def wait_sent(sender: Sender, ids: list[list[int]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while sender.ids != ids and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sender.ids == ids


def run_ahead(bench: Bench, in_ensemble: bool = True) -> tuple[Sender, Sequence]:
    """A stream of two chunks, of which postprocessing had the first only, and then a pause."""
    sender, request = bench.open(row())
    request.in_ensemble, (sequence,) = in_ensemble, request.sequences
    feed(sequence, 1)
    wait_sent(sender, [[1]])
    bench.seen_ns = time.monotonic_ns()
    time.sleep(2 * AHEAD_NS / 1e9)
    feed(sequence, 2)
    wait_sent(sender, [[1], [2]])
    return sender, sequence


def third_waits_a_while(sender: Sender, sequence: Sequence) -> None:
    """A third chunk waits, and goes without postprocessing having had the second."""
    feed(sequence, 3)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2]]
    wait_sent(sender, [[1], [2], [3]])


def test_a_stream_ahead_of_postprocessing_waits_and_goes_on_with_one_chunk(bench: Bench) -> None:
    sender, sequence = run_ahead(bench)
    feed(sequence, 3, 4)
    feed(sequence, 5)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2]]
    bench.seen_ns = None
    wait_sent(sender, [[1], [2], [3, 4, 5]])
    feed(sequence, 6)
    wait_sent(sender, [[1], [2], [3, 4, 5], [6]])


def test_the_end_of_a_stream_does_not_wait_for_postprocessing(bench: Bench) -> None:
    sender, sequence = run_ahead(bench)
    feed(sequence, 3)
    feed(sequence, protocol.NO_TOKEN, end=protocol.FINISHED_CANCELLED)
    assert sender.ended.wait(TIMEOUT_S)
    assert sender.ids == [[1], [2], [3]]


def test_streams_that_wait_are_sent_at_the_end(bench: Bench) -> None:
    sender, sequence = run_ahead(bench)
    feed(sequence, 3)
    time.sleep(5 * LOOK_AGAIN_S)
    bench.responder.close()
    assert sender.ids == [[1], [2], [3]]


def test_no_stream_waits_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Postprocessing has noted the older of its last two chunks: the stream would wait for a third."""
    monkeypatch.setattr(responder, "MOST_WAIT_NS", 300_000_000)
    sender, sequence = run_ahead(bench)
    third_waits_a_while(sender, sequence)


def test_a_stream_that_postprocessing_never_gets_waits_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has not requested the text. Should postprocessing only be late, the stream waits again."""
    monkeypatch.setattr(responder, "MOST_WAIT_NS", 300_000_000)
    bench.last_ns = 0
    sender, sequence = run_ahead(bench)
    third_waits_a_while(sender, sequence)
    feed(sequence, 4)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2], [3], [4]]
    bench.last_ns = 1
    feed(sequence, 5)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2], [3], [4]]
    wait_sent(sender, [[1], [2], [3], [4], [5]])


def test_a_client_of_llm_itself_never_waits(bench: Bench) -> None:
    sender, sequence = run_ahead(bench, in_ensemble=False)
    feed(sequence, 3)
    wait_sent(sender, [[1], [2], [3]])


PROMPT = "Once upon a time"
WORD = "<|end_of_text|>\nUser"  # its first token is left out of the text


def generated(
    tokenizer: TextTokenizer, decoder: DeltaDecoder, text: str, **more: Any
) -> tuple[list[str], list[int], list[int]]:
    """Texts of the chunks of a sequence that is `text` and then WORD, where the engine ends it if it was left
    there; the ids of the chunks, and those of text and word."""
    said, word = (tokenizer.encode_batch([words], False)[0] for words in (text, WORD))
    (prompt,) = tokenizer.encode_batch([PROMPT], True)
    params = SamplingParams(max_tokens=50, stop_sequences=[word], log_probs=True)
    wanted = Row(np.array(prompt, np.int32), params, **{"exclude_stop_words": True, **more})
    bench = Bench()
    sender, request = bench.open(wanted)
    request.outputs.update({"output_log_probs", "num_output_tokens"})
    (sequence,) = request.sequences
    assert sequence.follows_text
    left = sequence.match_stop_words(decoder).stop_sequences
    ids = said + word
    for n, token in enumerate(ids, start=1):
        code = protocol.FINISHED_STOP_WORDS if left and n == len(ids) else protocol.RUNNING
        sequence.on_token(token, code, protocol.RowReport(1, log_prob=-1.0))
    assert sender.ended.wait(TIMEOUT_S)
    bench.responder.close()
    chunks = [tensors for tensors, _, _ in sender.sent]
    assert chunks[-1]["finish_reason"].item() == b"stop"
    assert bench.cancelled == ([] if left else [100])
    for tensors in chunks:
        assert tensors["output_log_probs"].size == tensors["output_ids"].size - echoed(wanted)
    sent = [i for tensors in chunks for i in tensors["output_ids"].flatten().tolist()]
    return [chunk_text(decoder, unpack_chunk(t["chunk"][0])) for t in chunks], sent[echoed(wanted) :], ids


def echoed(row: Row) -> int:
    return 0 if row.streaming or row.exclude_input else len(row.prompt)


@pytest.mark.parametrize("words", [[WORD, "never said"], []], ids=["texts and ids", "ids"])
@pytest.mark.parametrize("mode", ["streaming", "whole", "whole with the prompt"])
def test_a_word_found_by_ids_is_left_out(tokenizer: TextTokenizer, words: list[str], mode: str) -> None:
    decoder = DeltaDecoder(tokenizer.backend)
    how = {"streaming": mode == "streaming", "exclude_input": mode == "whole"}
    texts, sent, ids = generated(tokenizer, decoder, " the cat sat.", stop_words=words, **how)
    assert "".join(texts) == (PROMPT if mode.endswith("prompt") else "") + " the cat sat."
    assert sent == ids, "the text is cut, and the ids are those that were generated"


@pytest.mark.parametrize("streaming", [True, False])
def test_special_tokens_that_are_shown_are_counted(tokenizer: TextTokenizer, streaming: bool) -> None:
    decoder = DeltaDecoder(tokenizer.backend, skip_special_tokens=False)
    text = " the cat <|begin_of_text|> sat."
    texts, _, _ = generated(tokenizer, decoder, text, stop_words=[WORD], streaming=streaming)
    assert "".join(texts) == ("" if streaming else "<|begin_of_text|>" + PROMPT) + text


def test_a_stream_holds_back_what_may_begin_a_word(tokenizer: TextTokenizer) -> None:
    (word,) = tokenizer.encode_batch([WORD], False)
    params = SamplingParams(max_tokens=50, stop_sequences=[word])
    wanted = Row(np.array([7], np.int32), params, streaming=True, exclude_stop_words=True)
    no_request: Any = None
    sequence = Sequence(no_request, wanted, ResponseIndices(), lambda _: None)
    assert sequence.match_stop_words(DeltaDecoder(tokenizer.backend)) == params

    def sent(token: int, code: int = protocol.RUNNING) -> list[int] | None:
        sequence.on_token(token, code, None)
        chunk = sequence.take()
        return None if chunk is None else list(chunk.ids)

    assert sent(300) == [300]
    assert [sent(token) for token in word[:-1]] == [None] * (len(word) - 1)
    assert sent(300) == [*word[:-1], 300], "it was another text"
    assert [sent(token) for token in word[:2]] == [None] * 2
    assert sent(protocol.NO_TOKEN, protocol.FINISHED_END_ID) == word[:2], "the end came first"


@pytest.mark.parametrize("engine_fails", [False, True])
def test_a_stopped_sequence_waits_for_the_engines_times(tokenizer: TextTokenizer, engine_fails: bool) -> None:
    asked: list[int] = []
    request: Any = SimpleNamespace(cancel=asked.append)
    params = SamplingParams(max_tokens=50, perf_metrics=True)
    wanted = Row(np.array([7], np.int32), params, streaming=True, stop_words=[" town"])
    sequence = Sequence(request, wanted, ResponseIndices(), lambda _: None)
    sequence.handle = protocol.make_handle(1, 2)
    sequence.match_stop_words(DeltaDecoder(tokenizer.backend))
    (ids,) = tokenizer.encode_batch(["a town by"], False)
    for token in ids:
        sequence.on_token(token, protocol.RUNNING, None)
    assert sequence.take() is None and asked == [sequence.handle]
    perf = protocol.Perf(1, 2, 3, 4, 5, 6, 7, 8)
    if engine_fails:
        sequence.on_failure("the engine ended", refused=False)
    else:
        sequence.on_token(9, protocol.FINISHED_LENGTH, protocol.RowReport(2, perf=perf))
    chunk = sequence.take()
    assert chunk is not None and sequence.ended and chunk.code == protocol.FINISHED_STOP_WORDS
    assert tokenizer.backend.decode(chunk.ids) == "a town"
    assert [report.perf for report in chunk.reports] == ([] if engine_fails else [perf])
    assert sequence.take() is None and len(asked) == 1


def test_words_that_stay_in_the_text_are_left_to_the_engine() -> None:
    """Following the text costs time, and a tokenizer, which a client of ids alone may not have."""
    params = SamplingParams(max_tokens=9, stop_sequences=[[5, 6]])
    no_request: Any = None
    for wanted, follows in (
        (Row(np.array([7], np.int32), params), False),
        (Row(np.array([7], np.int32), params, exclude_stop_words=True), True),
        (Row(np.array([7], np.int32), params, stop_words=["x"]), True),
        (Row(np.array([7], np.int32), SamplingParams(max_tokens=9), exclude_stop_words=True), False),
    ):
        assert Sequence(no_request, wanted, ResponseIndices(), lambda _: None).follows_text == follows
