# SPDX-License-Identifier: Apache-2.0
"""Text of the OpenAI API's answers: that of prompt and answer together, less the prompt's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_tokenizers import byte_level, metaspace, other_decoder, sentencepiece
from tokenizers import Tokenizer

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.openai.answer import take_text
from flashinfer_backend.openai.door import Door
from flashinfer_backend.openai.link import EngineLink, LogitsRoom
from flashinfer_backend.openai.model import Model
from flashinfer_backend.openai.token_lists import TokenLists
from flashinfer_backend.serving.generation import GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import protocol

Answered = Callable[..., str]
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


@pytest.fixture
def answered(tmp_path: Path) -> Answered:
    def answered(
        tokenizer: Tokenizer,
        prompt: list[int],
        ids: list[int],
        streaming: bool,
        stops: list[str],
        exclude: bool = True,
    ) -> str:
        """The text of an answer of these ids, which ends with them or with a stop word."""
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        metrics: Any = SimpleNamespace(ended=lambda model, stream, chunk: None)
        model = Model(["small"], EngineConfig(model_dir=str(tmp_path)), openai_defaults=True)
        door = Door(model, metrics)

        async def run() -> str:
            door.link = EngineLink(Sent(), asyncio.get_running_loop(), LogitsRoom())  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=99)
            row = GenerationRequest(
                np.array(prompt, "<i4"), params, streaming, True, stops, exclude and bool(stops)
            )
            (stream,) = door.generate([(row, 1)], True).all
            text = ""
            for n, token in enumerate(ids, 1):
                code = protocol.FINISHED_LENGTH if n == len(ids) else protocol.RUNNING
                stream.on_token(token, code, None)
                while (chunk := stream.take()) is not None:
                    text += take_text(door, stream, chunk, door.decoder())
            return text

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
    assert answered(tokenizer, ids[:cut], ids[cut:], streaming, []) == whole[len(prompt) :]
    word = whole[len(prompt) : len(prompt) + 3]
    assert answered(tokenizer, ids[:cut], ids[cut:], streaming, [word]) == ""
    assert answered(tokenizer, ids[:cut], ids[cut:], streaming, [word], exclude=False) == word


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_that_is_a_special_token_ends_the_answer(answered: Answered, streaming: bool) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("The fox<|turn|>jumps", add_special_tokens=False).ids
    assert answered(tokenizer, [0], ids, streaming, ["<|turn|>"]) == "The fox"
    assert answered(tokenizer, [0], ids, streaming, ["umps"]) == "The foxj"


def test_offsets_are_those_of_the_text() -> None:
    tokenizer = sentencepiece()
    decoder, pieces = DeltaDecoder(tokenizer), DeltaDecoder(tokenizer, skip_special_tokens=False)
    ids = tokenizer.encode("The quick é<|turn|> fox").ids
    lists = TokenLists(pieces, decoder)
    for n, token in enumerate(ids):
        assert lists.offset == len(decoder.delta([], ids[:n], last=False))
        lists.add(token, -1.0, ())
    assert lists.offset == len(tokenizer.decode(ids))
