# SPDX-License-Identifier: Apache-2.0
"""An answer without streaming is kept until it ends: packed, and its log probabilities up to a bound."""

import asyncio
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flashinfer_backend.core.bounds import MOST_LOG_PROBS, MOST_PROMPT_LOG_PROBS
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import StepOutput
from flashinfer_backend.openai import chat, completions
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.link import EngineLink
from flashinfer_backend.openai.model import Model
from flashinfer_backend.openai.requests import ChatRequest, CompletionRequest, decode
from flashinfer_backend.openai.served_model import ServedModel
from flashinfer_backend.sampling.logprobs import Report
from flashinfer_backend.serving.generation import Generation, GenerationRequest
from flashinfer_backend.transport import protocol

TOP = 20


def reports(tokens: int) -> list[bytes]:
    """What the engine sends for each of many tokens."""
    generator = np.random.default_rng(5)
    rows: Any = SimpleNamespace(log_prob_rows=[*range(tokens)], top_counts=[TOP] * tokens, logits_rows=[])
    likely = torch.from_numpy(generator.normal(size=(tokens, TOP)).astype(np.float32))
    ids = torch.from_numpy(generator.integers(0, 100_000, (tokens, TOP)))
    output = StepOutput(np.zeros(tokens, np.int32))
    Report(rows, None, (likely, ids)).read(likely[:, 0].numpy().view(np.int32), output)
    found = zip(output.log_probs, output.top_logprobs, strict=True)
    return [
        msgspec.msgpack.encode(protocol.RowReport(1000, log_prob=value, top_logprobs=top))
        for (_, value), (_, top) in found
    ]


@pytest.mark.parametrize(("log_probs", "most"), [(False, 12), (True, 300)])
def test_what_is_kept_of_a_token_is_packed(log_probs: bool, most: int) -> None:
    """It took 42 bytes, 2900 with 20 alternatives: 128 answers of 32 000 tokens each were 170 MB or 12 GB of
    an API process."""
    params = SamplingParams(max_tokens=9999, log_probs=log_probs, top_logprobs=TOP * log_probs)
    row = GenerationRequest(np.array([5], "<i4"), params)
    sequence = Generation(row, lambda handle: None, lambda own: None)
    sent = reports(10_000)
    tracemalloc.start()
    for token, data in enumerate(sent, 5000):
        report = msgspec.msgpack.decode(data, type=protocol.RowReport) if log_probs else None
        sequence.on_token(token, protocol.RUNNING, report)
        assert sequence.take() is None
    del report
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < most * len(sent)


LONG = 131_072  # tokens of the context
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
CHAT = {**MESSAGES, "top_logprobs": 20, "n": 16}
TEXT = {"prompt": "Hi", "logprobs": 5}
MANY = {**TEXT, "prompt": ["Hi"] * 128}


async def submitted(body: dict[str, Any]) -> int:
    """The number of sequences that a request brings to the engine."""
    handed: list[SamplingParams] = []

    def submit(sink: Any, prompt: bytes, params: SamplingParams, *rest: int) -> int:
        handed.append(params)
        sink.handle = len(handed)
        return len(handed)

    status = SimpleNamespace(vocab_size=2048, max_seq_len=LONG, max_input_len=LONG - 1)
    engines: Any = SimpleNamespace(
        up=True, status=status, submit=submit, cancel=lambda handle: None, refusal=lambda count: None
    )
    model = Model(["small"], EngineConfig(model_dir=str(resolve_model_dir("bundled"))), openai_defaults=True)
    served = ServedModel(model, Any)
    served.link = EngineLink(engines, asyncio.get_running_loop())
    data = json.dumps({"model": "small", **body}).encode()
    if "messages" in body:
        await chat.chat(served, decode(ChatRequest, data))()
    else:
        await completions.completions(served, decode(CompletionRequest, data))()
    return len(handed)


@pytest.mark.parametrize(
    ("body", "found", "fields"),
    [
        ({**CHAT, "max_tokens": 60_000}, 16 * 60_000 * 21, ["top_logprobs", "max_tokens", "n"]),
        ({**CHAT, "max_completion_tokens": 60_000}, 16 * 60_000 * 21, ["max_completion_tokens"]),
        (CHAT, 16 * 21 * (LONG - 8), ["top_logprobs", "n"]),
        ({**MANY, "max_tokens": 32_000}, 128 * 32_000 * 6, ["logprobs", "number of prompts"]),
        ({**TEXT, "best_of": 128, "max_tokens": 32_000}, 128 * 32_000 * 6, ["logprobs", "best_of"]),
        (
            {"prompt": [[5] * 12_000] * 70, "prompt_logprobs": 20, "max_tokens": 1},
            70 * 12_000 * 21,
            ["prompt_logprobs", "number of prompts"],
        ),
    ],
)
def test_more_than_the_bound_are_refused(body: dict[str, Any], found: int, fields: list[str]) -> None:
    """Where max_tokens is missing, what the answer could become counts."""
    with pytest.raises(ApiError) as raised:
        asyncio.run(submitted(body))
    message = raised.value.message
    assert raised.value.status == 400 and raised.value.param in message
    assert str(MOST_LOG_PROBS) in message and str(found) in message
    assert all(field in message for field in fields)
    assert ("set stream to true" in message) == ("best_of" not in body and "prompt_logprobs" not in body)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"prompt": [5] * 13_000, "prompt_logprobs": 20}, 13_000 * 21),
        ({"prompt": [[5], [5] * 44_000], "echo": True, "logprobs": 5}, 44_000 * 6),
        ({"prompt": [5] * 100_000, "echo": True, "logprobs": 0, "prompt_logprobs": 1}, 100_000 * 3),
    ],
)
def test_more_of_one_prompt_than_the_bound_are_refused(body: dict[str, Any], found: int) -> None:
    """They are written at once: of 131 072 tokens with 20 alternatives a process grew by 600 MB."""
    with pytest.raises(
        ApiError, match=f"would have {found} log probabilities, .* {MOST_PROMPT_LOG_PROBS}"
    ) as e:
        asyncio.run(submitted({**body, "max_tokens": 1}))
    assert e.value.status == 400 and e.value.param in body


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({**CHAT, "max_tokens": 32_000}, 16),
        ({**CHAT, "max_tokens": 60_000, "stream": True}, 16),
        ({**MESSAGES, "n": 16}, 16),
        ({**MESSAGES, "logprobs": False, "n": 128}, 128),
        ({**MANY, "max_tokens": 8000}, 128),
        ({"prompt": "Hi", "best_of": 128}, 128),
        ({"prompt": [5] * 131_000, "echo": True, "logprobs": 1, "max_tokens": 1}, 1),
        ({"prompt": [[5] * 8000] * 8, "echo": True, "logprobs": 5, "max_tokens": 1}, 8),
    ],
)
def test_what_clients_ask_for_is_within_the_bound(body: dict[str, Any], sequences: int) -> None:
    assert asyncio.run(submitted(body)) == sequences
