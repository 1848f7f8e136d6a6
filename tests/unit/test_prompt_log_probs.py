# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of prompts: how they are computed, kept and written."""

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
from flashinfer_backend.openai.log_probs import (
    PromptLogProbs,
    TokenTexts,
    prompt_lists,
    prompt_log_probs,
    text_of,
)
from flashinfer_backend.sampling import logprobs
from flashinfer_backend.serving.generation import Chunk
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import protocol

VOCAB = 2048
DECODER = DeltaDecoder(TextTokenizer(resolve_model_dir("bundled")).backend, skip_special_tokens=False)
TEXTS = TokenTexts(text_of, DECODER)


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
        parts.append(told)
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
    chunks = [np.full((16, 1, 2), number, np.int32) for number in range(4)]
    for start, found in zip((0, 16, 0, 16), chunks, strict=True):
        request.keep_log_probs(start, found)
    assert [each[0, 0, 0] for each in request.prompt_log_probs] == [2, 3]


def test_nothing_is_told_of_a_prompt_of_one_token() -> None:
    alone = PromptLogProbs(np.array([7], "<i4"), b"")
    assert bytes(prompt_log_probs(alone, 3, TEXTS)) == b"[null]"
    assert bytes(prompt_lists(alone, 3, TEXTS, DECODER).json()["token_logprobs"]) == b"[null]"
