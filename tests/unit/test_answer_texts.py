# SPDX-License-Identifier: Apache-2.0
"""Text of the OpenAI API's answers: that of prompt and answer together, less the prompt's."""

import asyncio
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from small_tokenizers import byte_level, metaspace, other_decoder, sentencepiece
from tokenizers import Tokenizer

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import TOP_LOGPROBS
from flashinfer_backend.openai import chat, completions
from flashinfer_backend.openai.answer import take_text
from flashinfer_backend.openai.link import EngineLink, Stream, Streams
from flashinfer_backend.openai.log_probs import (
    TokenLists,
    TokenTexts,
    chat_log_probs,
    chat_token,
    text_of,
)
from flashinfer_backend.openai.model import Model
from flashinfer_backend.openai.served_model import ServedModel
from flashinfer_backend.serving.generation import Chunk, GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import protocol

Answered = Callable[..., tuple[str, str | None]]
KINDS = {"sentencepiece": sentencepiece, "metaspace": metaspace, "regex": lambda: other_decoder("regex")}


class Sent:
    """Engines that take what is submitted."""

    def __init__(self) -> None:
        self.params: list[SamplingParams] = []

    def submit(self, sink: Any, prompt: bytes, params: SamplingParams, *rest: int) -> int:
        self.params.append(params)
        sink.handle = len(self.params)
        return len(self.params)

    def cancel(self, handle: int) -> None:
        pass

    def refusal(self, count: int) -> None:
        pass


@pytest.fixture
def answered(tmp_path: Path) -> Answered:
    def answered(
        tokenizer: Tokenizer,
        prompt: list[int],
        ids: list[int],
        streaming: bool,
        stops: list[str],
        exclude: bool = True,
    ) -> tuple[str, str | None]:
        """The text of an answer of these ids, which ends with them or with a stop word; and that, if its
        text was matched."""
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        metrics: Any = SimpleNamespace(ended=lambda model, stream, chunk: None)
        model = Model(["small"], EngineConfig(model_dir=str(tmp_path)), openai_defaults=True)
        served = ServedModel(model, metrics)

        async def run() -> tuple[str, str | None]:
            served.link = EngineLink(Sent(), asyncio.get_running_loop())  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=99)
            row = GenerationRequest(
                np.array(prompt, "<i4"), params, streaming, True, stops, exclude and bool(stops)
            )
            (stream,) = (await served.generate([(row, 1)], True)).all
            text = ""
            for n, token in enumerate(ids, 1):
                code = protocol.FINISHED_LENGTH if n == len(ids) else protocol.RUNNING
                stream.on_token(token, code, None)
                while (chunk := stream.take()) is not None:
                    text += take_text(served, stream, chunk, served.decoder())
            return text, stream.stop_word

        return asyncio.run(run())

    return answered


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_keeps_the_space_before_its_first_word(
    answered: Answered, kind: str, streaming: bool
) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("The quick brown fox").ids
    cut = next(n for n in range(2, len(ids)) if "▁" in tokenizer.id_to_token(ids[n]))
    whole, prompt = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
    assert whole[len(prompt)] == " "
    assert answered(tokenizer, ids[:cut], ids[cut:], streaming, []) == (whole[len(prompt) :], None)
    word = whole[len(prompt) : len(prompt) + 3]
    assert answered(tokenizer, ids[:cut], ids[cut:], streaming, [word]) == ("", word)
    assert answered(tokenizer, ids[:cut], ids[cut:], streaming, [word], exclude=False) == (word, word)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_that_is_a_special_token_ends_the_answer(answered: Answered, streaming: bool) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("The fox<|turn|>jumps", add_special_tokens=False).ids
    assert answered(tokenizer, [0], ids, streaming, ["<|turn|>"]) == ("The fox", None)
    assert answered(tokenizer, [0], ids, streaming, ["x y", "umps"]) == ("The foxj", "umps")


def test_offsets_are_those_of_the_text() -> None:
    tokenizer = sentencepiece()
    decoder, pieces = DeltaDecoder(tokenizer), DeltaDecoder(tokenizer, skip_special_tokens=False)
    ids = tokenizer.encode("The quick é<|turn|> fox").ids
    lists = TokenLists(TokenTexts(text_of, pieces), decoder)
    for n, token in enumerate(ids):
        assert lists.offset == len(decoder.delta([], ids[:n], last=False))
        lists.add(token, -1.0, ())
    assert lists.offset == len(tokenizer.decode(ids))


def test_log_probabilities_are_written_as_an_encoder_writes_them() -> None:
    """Of parts of characters, marks of printf, special tokens, tokens that look alike and ids beyond the
    vocabulary."""
    tokenizer = byte_level()
    decoder = DeltaDecoder(tokenizer, skip_special_tokens=False)
    ids = [
        *tokenizer.encode('50% "é\\" \U0001f642<|turn|>', add_special_tokens=False).ids,
        1 << 20,
        (1 << 20) + 1,
    ]
    chats, lists = TokenTexts(chat_token, decoder), TokenLists(TokenTexts(text_of, decoder), decoder)

    def value(n: int) -> float:
        return -math.inf if n % 4 == 3 else -20000.0 if n % 4 == 2 else -float(np.float32(n / 7))

    def one(token: int, found: float) -> dict[str, Any]:
        data = decoder.piece(token)
        return {"token": data.decode(errors="replace"), "logprob": max(found, -9999.0), "bytes": list(data)}

    for turn in range(2):  # the second time from what is kept
        for n, token in enumerate(ids):
            top = [(other, value(n + k)) for k, other in enumerate(ids[n:] + ids[:n])]
            chunk = reported([token], value(n), top)
            for most in (0, 3, len(ids)):
                (raw,) = chat_log_probs(chunk, chats, most)
                alternatives = [one(*pair) for pair in top[:most]]
                expected = one(token, value(n)) | {"top_logprobs": alternatives}
                assert bytes(raw) == msgspec.json.encode(expected)
            lists.add_chunk(chunk, len(ids))
            best: dict[str, float] = {}
            for other, found in top:
                best.setdefault(decoder.piece(other).decode(errors="replace"), max(found, -9999.0))
            best[decoder.piece(token).decode(errors="replace")] = max(value(n), -9999.0)
            told = json.loads(bytes(lists.json()["top_logprobs"]))[turn * len(ids) + n]
            assert list(told.items()) == list(best.items())


def reported(ids: list[int], value: float, top: list[tuple[int, float]]) -> Chunk:
    """A chunk of these ids, for each of which the same was reported."""
    chunk = Chunk(ids)
    for _ in ids:
        packed = np.array(top, TOP_LOGPROBS).tobytes()
        chunk.add(protocol.RowReport(1, log_prob=value, top_logprobs=packed))
    return chunk


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_many_log_probabilities_are_written_in_a_thread(kind: str) -> None:
    """Else all others of the process would wait, 1.6 s for 32 answers of 1500 tokens."""
    decoder, threads = DeltaDecoder(byte_level(), skip_special_tokens=False), []

    class Texts(dict[int, Any]):
        def __missing__(self, token: int) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return "a" if kind == "completion" else chat_token(b"a")

    served: Any = SimpleNamespace(chat_tokens=Texts(), completion_tokens=Texts())
    request = SimpleNamespace(logprobs=20, max_tokens=None)
    reply: Any = SimpleNamespace(_request=request, _served=served, _decoder=decoder)
    for tokens in (1, 100):
        chunk = reported([5] * tokens, -1.0, [(token, -2.0) for token in range(20)])
        made: Any
        if kind == "chat":
            made = chat.token_log_probs(served, chunk, 20)
        else:
            made = completions._Reply._lists(reply, chunk, [], 0)
        threads.clear()
        asyncio.run(made)
        assert set(threads) == {tokens == 1}


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_kept_for_a_client_that_does_not_read_is_counted(streaming: bool) -> None:
    link: Any = SimpleNamespace(engines=Sent(), schedule=lambda stream: None)
    params = SamplingParams(max_tokens=99, log_probs=True, top_logprobs=20)
    streams = Streams(link)
    stream = Stream(GenerationRequest(np.array([5], "<i4"), params, streaming), link, streams)
    report = np.zeros(20, TOP_LOGPROBS).tobytes()
    for n in range(100):
        code = protocol.FINISHED_LENGTH if n == 99 else protocol.RUNNING
        stream.on_token(n, code, protocol.RowReport(1, log_prob=-1.0, top_logprobs=report))
        if n == 50:
            streams.arrived(stream)
    assert streams.held() >= 100 * len(report)
    streams.arrived(stream)
    assert len(asyncio.run(anext(streams))[1].ids) == 100
    assert (streams.held() >= 100 * len(report)) == (not streaming)  # a whole answer is kept until it is sent
