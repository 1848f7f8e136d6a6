# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of an answer without streaming are kept until it ends."""

import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import StepOutput
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


def test_a_token_with_twenty_alternatives_takes_three_hundred_bytes() -> None:
    """It took 2900: 128 answers of 32 000 tokens each would be 12 GB of an API process."""
    params = SamplingParams(max_tokens=9999, log_probs=True, top_logprobs=TOP)
    row = GenerationRequest(np.array([5], "<i4"), params)
    sequence = Generation(row, lambda handle: None, lambda: None)
    sent = reports(2000)
    tracemalloc.start()
    for token, data in enumerate(sent, 5000):
        report = msgspec.msgpack.decode(data, type=protocol.RowReport)
        sequence.on_token(token, protocol.RUNNING, report)
        assert sequence.take() is None
    del report
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 300 * len(sent)
