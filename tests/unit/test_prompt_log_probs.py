# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of prompts: how they are computed, sent, kept and written; and how logits are sent."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.link import EngineLink
from flashinfer_backend.openai.log_probs import (
    PromptLogProbs,
    TokenTexts,
    prompt_lists,
    prompt_log_probs,
    text_of,
)
from flashinfer_backend.sampling import logprobs
from flashinfer_backend.serving.generation import Chunk, GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import protocol

VOCAB = 2048
DECODER = DeltaDecoder(TextTokenizer(resolve_model_dir("bundled")).backend, skip_special_tokens=False)
TEXTS = TokenTexts(text_of, DECODER)


def test_of_a_prompt_whose_first_sequence_is_refused_no_others_are_tried() -> None:
    submitted, cancelled = [], []

    def submit(sink: Any, *rest: Any) -> int:
        submitted.append(sink)
        sink.on_failure(protocol.QUEUE_FULL, True)
        return 0

    engines: Any = SimpleNamespace(submit=submit, cancel=cancelled.append, refusal=lambda count: None)

    async def run() -> None:
        link = EngineLink(engines, asyncio.get_running_loop())
        plain = GenerationRequest(np.arange(1, dtype="<i4"), SamplingParams(max_tokens=1))
        streams = link.generate([(plain, 100), (plain, 1)], DECODER)
        with pytest.raises(ApiError, match=protocol.QUEUE_FULL) as error:
            async for _ in streams:
                pass
        assert error.value.status == 429 and len(submitted) == 1 and not cancelled

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


class Head:
    """A model of which the hidden states are the logits."""

    collectives = SimpleNamespace(shard=SimpleNamespace(rank=0))

    def logits(self, hidden: torch.Tensor, chosen: None) -> torch.Tensor:
        return hidden


def found(prompt: np.ndarray, logits: np.ndarray, top: int) -> PromptLogProbs:
    """What is told of a prompt, computed in two chunks."""
    model: Any = Head()
    chunk, parts = Chunk(), []
    for begin, end in ((0, 20), (20, len(prompt))):
        following = torch.from_numpy(prompt[begin + 1 : end + 1])
        hidden = torch.from_numpy(logits[begin : begin + len(following)])
        told = logprobs.prompt_log_probs(following, top, model, hidden)
        assert told is not None
        parts.append(told.numpy())
    chunk.add(protocol.RowReport(1, prompt_log_probs=np.concatenate(parts).tobytes()))
    assert not chunk.reports and chunk.size == (len(prompt) - 1) * (8 + 8 * min(top, logits.shape[1]))
    return PromptLogProbs(prompt, chunk.prompt_log_probs)


def test_log_probs_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CONTEXT_ROWS", 7)
    tokens = 200
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(tokens, VOCAB)).astype(np.float32)
    prompt = generator.integers(3, VOCAB, tokens).astype(np.int32)
    answer = json.loads(
        msgspec.json.encode(prompt_lists(found(prompt, logits, 20), 20, TEXTS, DECODER).json())
    )
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))[:, None]
    assert answer["token_logprobs"][0] is None and answer["top_logprobs"][0] is None
    chosen = exact[np.arange(tokens - 1), prompt[1:]]
    np.testing.assert_allclose(answer["token_logprobs"][1:], chosen, atol=1e-5)
    for place, (token, begin) in enumerate(zip(answer["tokens"], answer["text_offset"], strict=True)):
        assert begin == len(DECODER.delta([], prompt[:place].tolist(), last=False))
        assert token == DECODER.piece(int(prompt[place])).decode(errors="replace")
    for best, values in zip(answer["top_logprobs"][1:], exact, strict=False):
        assert max(best.values()) == pytest.approx(values.max(), abs=1e-5) and len(best) <= 21


@pytest.mark.parametrize("vocab", [VOCAB, 5])
def test_log_probs_of_a_prompt_by_id(vocab: int) -> None:
    generator = np.random.default_rng(6)
    logits = generator.normal(size=(50, vocab)).astype(np.float32)
    logits[3, 4] = -np.inf
    prompt = generator.integers(3, vocab, 50).astype(np.int32)
    prompt[4], prompt[6] = 4, logits[5].argmax()
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))[:, None]
    for top in (0, 3, 8):
        told = found(prompt, logits, 8)
        first, *others = json.loads(bytes(prompt_log_probs(told, top, TEXTS)))
        assert first is None and len(others) == 49
        for each, values, token in zip(others, exact, prompt[1:].tolist(), strict=False):
            order = np.argsort(-values).tolist()
            assert [int(name) for name in each] == list(dict.fromkeys([token, *order[:top]]))
            for name, own in each.items():
                assert own["rank"] == order.index(int(name)) + 1
                assert own["logprob"] == pytest.approx(max(values[int(name)], -9999.0), abs=1e-5)
                assert own["decoded_token"] == DECODER.piece(int(name)).decode(errors="replace")
        assert others[3]["4"]["logprob"] == -9999.0 and len(others[5]) == max(1, min(top, vocab))


def test_a_prompt_that_begins_again_is_told_of_once() -> None:
    """It had to leave its slot."""
    request = Request(1, np.arange(40, dtype=np.int32), SamplingParams(max_tokens=1), max_new=1)
    for start, found in ((0, "first"), (16, "second"), (0, "again"), (16, "then")):
        request.keep_log_probs(start, found)
    assert request.prompt_log_probs == ["again", "then"]


def test_nothing_is_told_of_a_prompt_of_one_token() -> None:
    alone = PromptLogProbs(np.array([7], "<i4"), b"")
    assert bytes(prompt_log_probs(alone, 3, TEXTS)) == b"[null]"
    assert bytes(prompt_lists(alone, 3, TEXTS, DECODER).json()["token_logprobs"]) == b"[null]"
