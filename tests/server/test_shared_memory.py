# SPDX-License-Identifier: Apache-2.0
"""Responses that do not fit into shared memory, as with what Docker gives a container by default."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from asking import PROMPT, inputs, int32
from running import EngineWatch, Server, wait_for
from tritonclient.utils import InferenceServerException

WORDS = 900  # their logits have some 7 MiB, a stub's shared memory has 1 MiB at first


@contextlib.contextmanager
def no_more_memory(server: Server) -> Iterator[None]:
    """The llm stubs' shared memory cannot grow."""
    stubs = [stub for stub in server.matching("/1/model.py") if "/preprocessing/" not in stub.cmdline()[1]]
    stubs = [stub for stub in stubs if "/postprocessing/" not in stub.cmdline()[1]]
    assert stubs
    for stub in stubs:
        size = Path("/dev/shm", stub.cmdline()[2]).stat().st_size
        resource.prlimit(stub.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    yield
    for stub in stubs:
        resource.prlimit(stub.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


@pytest.mark.parametrize("stream", [True, False])
def test_logits_that_do_not_fit_are_answered_with_an_error(
    server: Server, watch: EngineWatch, stream: bool
) -> None:
    body = {
        "text_input": "word " * WORDS, "max_tokens": 4, "return_context_logits": True, "stream": stream,
    }  # fmt: skip
    with no_more_memory(server):
        answer = server.post(body, stream=stream)
        assert "cannot send a response: Failed to increase the shared memory" in str(answer)
    status, answer = server.post({"text_input": PROMPT, "max_tokens": 4, "return_context_logits": True})
    assert status == 200 and answer["text_output"]
    wait_for(lambda: watch.status().logits_bytes == 0, "their room to be free")


def test_without_decoupled_mode_such_a_request_ends(unary: Server) -> None:
    values = {
        "input_ids": np.full((1, WORDS), 5, np.int32), "input_lengths": int32(WORDS),
        "request_output_len": int32(4), "return_context_logits": np.array([[True]]),
    }  # fmt: skip
    with grpcclient.InferenceServerClient(unary.grpc) as client:
        with no_more_memory(unary), pytest.raises(InferenceServerException) as failed:
            client.infer("tensorrt_llm", inputs(values), client_timeout=20)
        assert "Deadline" not in str(failed.value)
        result = client.infer("tensorrt_llm", inputs(values), client_timeout=20)
    assert result.as_numpy("context_logits").shape[:2] == (1, WORDS)
