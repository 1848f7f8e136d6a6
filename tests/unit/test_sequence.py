# SPDX-License-Identifier: Apache-2.0
"""Stop words that the engine finds by their ids, left out of the text of a sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from responder_bench import TIMEOUT_S, Bench

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.text.chunk import unpack_chunk
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server.outputs import Place
from flashinfer_backend.triton_server.postprocessing import chunk_text
from flashinfer_backend.triton_server.requests import Row
from flashinfer_backend.triton_server.sequence import Sequence

PROMPT = "Once upon a time"
WORD = "<|end_of_text|>\nUser"  # its first token is left out of the text


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(resolve_model_dir("bundled"))


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
    nobody: Any = None
    sequence = Sequence(nobody, wanted, Place(), lambda _: None)
    assert sequence.match_stop_words(DeltaDecoder(tokenizer.backend)) == params

    def sent(token: int, code: int = protocol.RUNNING) -> list[int] | None:
        sequence.on_token(token, code, None)
        chunk = sequence.take()
        return None if chunk is None else chunk.ids

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
    sequence = Sequence(request, wanted, Place(), lambda _: None)
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
    nobody: Any = None
    for wanted, follows in (
        (Row(np.array([7], np.int32), params), False),
        (Row(np.array([7], np.int32), params, exclude_stop_words=True), True),
        (Row(np.array([7], np.int32), params, stop_words=["x"]), True),
        (Row(np.array([7], np.int32), SamplingParams(max_tokens=9), exclude_stop_words=True), False),
    ):
        assert Sequence(nobody, wanted, Place(), lambda _: None).follows_text == follows
