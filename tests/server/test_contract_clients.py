# SPDX-License-Identifier: Apache-2.0
"""The requests of benchmark tools and clients written for TensorRT-LLM, sent as those tools send them and
read as they read the answers. Those for the model tensorrt_llm and for unary calls are in the other
test_contract_*.py."""

import concurrent.futures
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import int32, strings
from contract import (
    OUT_OF_VOCABULARY,
    PROMPT,
    TEXT,
    answers,
    decode,
    encode,
    flag,
    generate,
    greedy,
    number,
    output_names,
)
from running import Server

from flashinfer_backend.core.paths import resolve_model_dir

N = 24
GIRL, MANY = "A little girl", 200  # more tokens than the model writes behind it before its end id


def lines(server: Server, request: dict[str, Any]) -> list[str]:
    """text_output of every line of generate_stream, read as sglang's and vLLM's benchmarks do."""
    status, headers, text = server.raw(json.dumps(request).encode(), verb="generate_stream")
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data:"))[TEXT] for line in text.splitlines() if line.strip()]


SGLANG = {
    **{"accumulate_tokens": True, "temperature": 0.000001, "top_p": 1.0, "stream": True},
    **{"end_id": OUT_OF_VOCABULARY},
}
VLLM = {"accumulate_tokens": True, "temperature": 0.0, "top_p": 1.0, "stream": True}


def test_sglang_bench_serving(contract: Server) -> None:
    requests = [
        {**SGLANG, "text_input": f"{PROMPT}, {n}", "max_tokens": N, "min_length": N} for n in range(8)
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda request: lines(contract, request), requests))
    for request, pieces in zip(requests, found, strict=True):
        assert len(pieces) <= N
        assert "".join(pieces) == generate(contract, N, text_input=request["text_input"])[TEXT]
    full = {**SGLANG, "text_input": GIRL, "max_tokens": MANY, "min_length": MANY}
    text = "".join(lines(contract, full))
    assert text == decode(greedy(GIRL, MANY))
    ended = {name: value for name, value in full.items() if name not in ("min_length", "end_id")}
    assert len("".join(lines(contract, ended))) < len(text)


def test_vllm_bench_serving(contract: Server) -> None:
    assert "".join(lines(contract, {**VLLM, "text_input": PROMPT, "max_tokens": N})) == decode(
        greedy(PROMPT, N)
    )
    # --ignore-eos sends min_length alone: the end id is kept away until then.
    full = {**VLLM, "text_input": GIRL, "max_tokens": MANY, "min_length": MANY}
    status, counted = contract.post({**full, "stream": False, "return_num_output_tokens": True})
    assert status == 200 and counted["num_output_tokens"] == MANY
    assert GIRL + "".join(lines(contract, full)) == counted[TEXT]


def test_genai_perf(contract: Server) -> None:
    values = {
        "text_input": strings(PROMPT), "max_tokens": int32(N), "exclude_input_in_output": flag(True),
        "stream": flag(True), "min_length": int32(N),
    }  # fmt: skip
    found = answers(contract, "ensemble", values)
    assert b"".join(r.as_numpy(TEXT)[0] for r in found).decode() == decode(greedy(PROMPT, N))
    (whole,) = answers(contract, "ensemble", {**values, "stream": flag(False), "temperature": number(0.0)})
    assert whole.as_numpy(TEXT)[0].decode() == decode(greedy(PROMPT, N))
    # --endpoint-type generate: a list for the prompt.
    _, answer = contract.post({"text_input": [PROMPT], "max_tokens": N, "stream": False})
    assert answer[TEXT] == PROMPT + decode(greedy(PROMPT, N))


def test_openai_frontend(contract: Server) -> None:
    values = {
        "text_input": strings(PROMPT), "stream": flag(True), "max_tokens": int32(N),
        "stop_words": np.array([[b"never said", b"nor this"]], np.object_), "top_p": number(1.0),
        "frequency_penalty": number(0.0), "presence_penalty": number(0.0), "temperature": number(0.8),
        "seed": np.array([[3]], np.uint64), "exclude_input_in_output": flag(True),
        "return_num_input_tokens": flag(True), "return_num_output_tokens": flag(True),
    }  # fmt: skip
    found = answers(contract, "ensemble", values)
    assert all(r.as_numpy(TEXT).shape == (1,) for r in found)
    assert sum(r.as_numpy("num_output_tokens").item() for r in found) <= N
    assert {r.as_numpy("num_input_tokens").item() for r in found} == {len(encode(PROMPT))}
    (whole,) = answers(contract, "ensemble", {**values, "stream": flag(False)})
    assert whole.as_numpy(TEXT)[0] == b"".join(r.as_numpy(TEXT)[0] for r in found)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("streaming", [False, True])
def test_end_to_end_grpc_client(contract: Server, streaming: bool, model: str) -> None:
    always = {"beam_width": int32(1), "temperature": number(1.0), "exclude_input_in_output": flag(False)}
    one = {"text_input": strings(PROMPT), "max_tokens": int32(N), "stream": flag(streaming), **always}
    text = b"".join(r.as_numpy(TEXT)[0] for r in answers(contract, model, one, request_id="e2e"))
    assert text.decode() == ("" if streaming else PROMPT) + decode(greedy(PROMPT, N))
    # --batch-inputs
    prompts = [PROMPT, "The cat is", "This is a test"]
    rows = len(prompts)
    batch = {
        "text_input": strings(*prompts), "max_tokens": int32(*[5] * rows),
        "stream": flag(*[streaming] * rows), "beam_width": int32(*[1] * rows),
        "temperature": number(*[1.0] * rows),
        "exclude_input_in_output": flag(*[True] * rows), "return_log_probs": flag(*[True] * rows),
    }  # fmt: skip
    texts = [""] * rows
    for result in answers(contract, model, batch):
        assert "output_log_probs" in output_names(result)
        texts[result.as_numpy("batch_index")[0][0]] += result.as_numpy(TEXT)[0].decode()
    assert texts == [decode(greedy(prompt, 5)) for prompt in prompts]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_the_real_sglang_bench_serving(contract: Server, tmp_path: Path) -> None:
    """docs/clients.md says which release to install for this, and how."""
    result = tmp_path / "result.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "trt", "--host", "127.0.0.1"),
        *("--port", contract.url.rpartition(":")[2], "--model", str(resolve_model_dir("bundled"))),
        *("--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", str(N)),
        *("--random-range-ratio", "1", "--num-prompts", "12", "--request-rate", "inf"),
        *("--output-file", str(result)),
    ]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    assert json.loads(result.read_text().splitlines()[-1])["completed"] == 12
