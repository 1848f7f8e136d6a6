# SPDX-License-Identifier: Apache-2.0
"""What the tests of TensorRT-LLM's contract share: a reference for the servers' model, and requests as its
clients make them."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as grpcclient
from asking import int32, stream
from running import Server
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.harness import shallow_model

PROMPT = "Once upon a time"
LLM = "tensorrt_llm"
TEXT = "text_output"
OUT_OF_VOCABULARY = 1048576  # an end_id that never matches, as sglang sends it
Change = Callable[[list[int], int, torch.Tensor], torch.Tensor]  # (ids, length of prompt, logits [V])


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(shallow_model() / "tokenizer.json"))


@functools.cache
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(shallow_model(), dtype=torch.float32).eval()


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text).ids)


def words(text: str) -> list[int]:
    """Ids of a stop word, bad word or biased word."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def decode(ids: list[int]) -> str:
    return str(tokenizer().decode(ids))


def logits(ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), V]: row n chooses what follows ids[n]."""
    with torch.inference_mode():
        return torch.as_tensor(model()(torch.tensor([ids])).logits[0])


def log_probs(prompt: list[int], produced: list[int]) -> np.ndarray:
    """float32 [len(produced)]: log probability of each produced token."""
    rows = logits(prompt + produced).log_softmax(-1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(produced)), torch.tensor(produced)].numpy()


def greedy(prompt: str, count: int, change: Change | None = None) -> list[int]:
    """transformers' likeliest `count` ids after a prompt, whether an end id is among them or not."""
    ids = encode(prompt)
    start, past = len(ids), None
    for _ in range(count):
        new = ids if past is None else ids[-1:]
        with torch.inference_mode():
            found = model()(torch.tensor([new]), past_key_values=past, use_cache=True)
        row, past = found.logits[0, -1].clone(), found.past_key_values
        ids.append(int((change(ids, start, row) if change else row).argmax()))
    return ids[start:]


def body(max_tokens: int = 24, **more: Any) -> dict[str, Any]:
    """JSON of a request whose answer is the completion alone, of exactly max_tokens tokens."""
    fixed = {"exclude_input_in_output": True, "end_id": OUT_OF_VOCABULARY}
    return {"text_input": PROMPT, "max_tokens": max_tokens, **fixed, **more}


def generate(server: Server, max_tokens: int = 24, **more: Any) -> dict[str, Any]:
    """JSON answer of generate to `body`."""
    status, answer = server.post(body(max_tokens, **more))
    assert status == 200, answer
    return dict(answer)


def events(server: Server, max_tokens: int = 24, **more: Any) -> list[dict[str, Any]]:
    """JSON events of generate_stream to `body`, streaming."""
    found = server.post(body(max_tokens, stream=True, **more), stream=True)
    assert isinstance(found, list) and all(TEXT in event for event in found), found
    return found


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(event[TEXT] for event in chunks)


def flag(*rows: bool) -> np.ndarray:
    return np.array([[row] for row in rows])


def number(*rows: float) -> np.ndarray:
    return np.array([[row] for row in rows], np.float32)


def ids_request(prompt: list[int], max_tokens: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors of a request for the model tensorrt_llm."""
    return {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": int32(len(prompt)),
        "request_output_len": int32(max_tokens),
        "end_id": int32(OUT_OF_VOCABULARY),
        **more,
    }


def answers(server: Server, model_name: str, values: dict[str, np.ndarray], **more: Any) -> list[Any]:
    """The responses with tensors to one request over a gRPC stream; an error fails the test."""
    found = stream(server, model_name, [(more.pop("request_id", ""), values)], **more)
    assert all(error is None for _, error in found), found
    return [result for result, _ in found if result.get_response().outputs]


def refusal(server: Server, model_name: str, values: dict[str, np.ndarray]) -> str:
    """The error with which a request over a gRPC stream is answered."""
    ((_, error),) = stream(server, model_name, [("", values)])
    assert error is not None
    return str(error)


def output_names(result: grpcclient.InferResult) -> set[str]:
    return {tensor.name for tensor in result.get_response().outputs}
