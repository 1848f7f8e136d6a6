# SPDX-License-Identifier: Apache-2.0
"""What the doors refuse: the door, the input, words of the error. What comes after them goes on.

Statuses of Triton's endpoints are in test_contract_errors.py, values of tensors in
tests/unit/test_requests.py.
"""

import queue
import re
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from asking import inputs, int32, strings
from contract import LLM, PROMPT, answers, encode, flag, greedy, ids_request, logits, number, refusal
from openai_server import OpenAiServer
from running import Server

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 3},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2},
    RESPONSES: {"input": PROMPT},
}
FLAT = {"type": "function", "name": "weather"}
WEATHER, NOW = ({"type": "function", "function": {"name": name}} for name in ("weather", "now"))


def strictly(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


# The words come last, of some after the field that the error names.
OPENAI: list[tuple[Any, ...]] = [
    (CHAT, {"temprature": 1}, "temprature", "Unrecognized request argument supplied: temprature"),
    (CHAT, {"stream_options": {"x": 1}}, "stream_options.x", "Unrecognized"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream true"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options",
     "not supported"),
    (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options",
     "needs include_usage"),
    (CHAT, {"temperature": "hot"}, "temperature", "Expected"),
    (CHAT, {"temperature": -1}, "temperature", ">= 0"),
    (CHAT, {"temperature": 1e308, "structured_outputs": {"regex": "[ab]+"}}, "temperature", "<= 3e+38"),
    (CHAT, {"repetition_penalty": 1e308}, "repetition_penalty", "<= 3e+38"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty", ">= 1e-38"),
    (CHAT, {"top_p": 1.5}, "top_p", "<= 1"),
    (CHAT, {"n": 0}, "n", ">= 1"),
    (CHAT, {"max_tokens": 0}, "max_tokens", ">= 1"),
    (CHAT, {"max_tokens": 5000}, "max_tokens", "maximum context length is 2048"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens", "context length"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "one of them"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs true"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "0..2047"),
    (CHAT, {"logit_bias": {"5": 100.0001}}, "logit_bias", "holds 100.0001; it should lie in -100..100"),
    (CHAT, {"stop_token_ids": [99999]}, "stop_token_ids", "0..2047"),
    (CHAT, {"stop": ["x"] * 4097}, "stop", "4097 words; it should have at most 4096"),
    (CHAT, {"stop": "x" * 16385}, "stop", "16385 bytes in a word; it should have at most 16384"),
    (CHAT, {"priority": 1.5}, "priority", "Expected"),
    (CHAT, {"queue_timeout": -1}, "queue_timeout", ">= 1e-06"),
    (CHAT, {"queue_timeout": "soon"}, "queue_timeout", "Expected"),
    (CHAT, {"store": True}, "store", "keeps nothing"),
    (CHAT, {"functions": []}, "functions", "use tools"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", 'is ["text", "audio"]'),
    (CHAT, {"service_tier": "priority"}, "service_tier", '"priority"'),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "no use of"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "no use of reasoning_effort"),
    (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
     "reasoning_effort", 'says "high"; give one of them'),
    (CHAT, {"documents": [{"text": "x"}]}, "documents", "no use of documents"),
    (CHAT, {"messages": []}, "messages", "empty"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "robot"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "only text"),
    (CHAT, {"messages": None}, "messages", "Expected"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]", "messages[0].role is null; it should be one of"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, None, "type null; only text is"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": None}}]}, "tools", "function.name is null;"),
    (CHAT, {"top_k": 2**64}, "top_k", "<= 2147483647"),
    (CHAT, {"min_tokens": 4}, "min_tokens", "at most 3 tokens"),
    (CHAT, {"min_tokens": 2**64}, "min_tokens", "<= 2147483647"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "only functions"),
    (CHAT, {"tools": [WEATHER, WEATHER]}, "has two of the name weather"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "true or false"),
    (CHAT, {"tools": [strictly({"oneOf": [{}]})]}, "schema of type object"),
    (CHAT, {"tools": [strictly({"type": "object", "not": {}})]}, "the parameters of f: "),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "the tools are"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "required"}}},
     "tool_choice names required; the tools are weather"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}, "x": 1}},
     "tool_choice.x", "Unrecognized request argument supplied: tool_choice.x"),
    (CHAT, {"tool_choice": "required"}, "there are no tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "letters"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "JSON schema"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs: there are 2 guides"),
    (CHAT, {"structured_outputs": {"regex": "(("}}, "structured_outputs is not a valid regex: "),
    (CHAT, {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "drop one"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "at least n"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "cannot be streamed"),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True}, "cannot be streamed"),
    (COMPLETIONS, {"prompt": []}, "empty"),
    (COMPLETIONS, {"prompt": [[]]}, "empty"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt should be"),
    (COMPLETIONS, {"prompt": [1, 99999]}, "0..2047"),
    (COMPLETIONS, {"prompt": [[1, True]]}, "prompt[0][1]: Expected `int`"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"n": 100, "prompt": ["a", "b"]}, "several requests"),
    (RESPONSES, {"previous_response_id": "x"}, "previous_response_id needs kept responses"),
    (RESPONSES, {"include": ["message.input_image.image_url"]}, "include holds"),
    (RESPONSES, {"top_logprobs": 2}, "top_logprobs needs message.output_text.logprobs in include"),
    (RESPONSES, {"store": True}, "store needs kept responses"),
    (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity"),
    (RESPONSES,
     {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "x"}]}]},
     "input[0].content[1] is of type"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "needs kept responses"),
    (RESPONSES, {"truncation": "middle"}, "truncation"),
    (RESPONSES, {"stream": True, "stream_options": {"include_usage": True}}, "the last event has it"),
    (RESPONSES, {"text": {"format": "json_object"}}, "text.format is"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 1}]}, "input[0].content should be a list"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [{"text": None}]}]},
     "input[0].content should be a list"),
    (RESPONSES,
     {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**FLAT, "x": 1}]}},
     "tool_choice.tools[0].x", "Unrecognized"),
    (RESPONSES, {"tools": [{"type": "function", "name": {}}], "tool_choice": FLAT},
     "tools", "tools[0].name is"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {**FLAT, "type": "custom"}},
     "tool_choice.type", "is custom; it should be function, as that of weather is"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "words"), [(path, more, words) for path, more, *words in OPENAI])
def test_what_is_wrong_is_named(
    door: OpenAiServer, path: str, more: dict[str, Any], words: list[str | None]
) -> None:
    """Also before a stream has begun."""
    *param, said = words
    for stream in [{}, {"stream": True}] if path == CHAT and not more.keys() & STREAMED else [{}]:
        status, message, found, _ = door.error(path, {**GOOD[path], **more, **stream})
        assert status == 400 and said and said in message
        assert param in ([], [None], [found])


STREAMED = {"stream", "stream_options"}
ENSEMBLE: list[tuple[str, np.ndarray, str]] = [
    ("beam_width", int32(2), "beam_width is 2"),
    ("decoder_text_input", strings("a"), "(decoder_text_input)"),
    ("prompt_embedding_table", np.ones((1, 2, 4), np.float16), "prompt_embedding_table"),
    ("prompt_table_extra_id", np.array([[7]], np.uint64), "prompt_table_extra_ids"),
    ("prompt_vocab_size", int32(2), "prompt_vocab_size"),
    ("lora_task_id", np.array([[1]], np.uint64), "lora_task_id"),
    ("lora_weights", np.ones((1, 2, 4), np.float16), "lora_weights"),
    ("lora_config", np.ones((1, 2, 3), np.int32), "lora_config"),
]
TOKENS: dict[str, np.ndarray] = {
    "encoder_input_features": np.ones((1, 2, 2), np.float16),
    "encoder_output_lengths": int32(1),
    "decoder_input_ids": np.ones((1, 2), np.int32),
    "cross_attention_mask": np.ones((1, 2, 2), bool),
    "skip_cross_attn_blocks": flag(True),
    "mrope_rotary_cos_sin": np.ones((1, 2), np.float32),
    "mrope_position_deltas": np.array([[1]], np.int64),
    "prompt_embedding_table": np.ones((1, 2, 2), np.float16),
    "prompt_table_extra_ids": np.ones((1, 2), np.uint64),
    "prompt_vocab_size": int32(1),
    "lora_task_id": np.array([[1]], np.uint64),
    "lora_weights": np.ones((1, 2, 2), np.float16),
    "lora_config": np.ones((1, 2, 3), np.int32),
    "draft_input_ids": int32(1),
    "draft_logits": np.ones((1, 2, 2), np.float32),
    "draft_acceptance_threshold": number(0.5),
    **{f"lookahead_{name}_size": int32(2) for name in ("window", "ngram", "verification_set")},
    "context_phase_params": np.ones((1, 2), np.uint8),
    **{
        f"retention_token_range_{name}": int32(1) for name in ("starts", "ends", "priorities", "durations_ms")
    },
    **{f"retention_decode_{name}": int32(1) for name in ("priority", "duration_ms")},
    "beam_width": int32(2),
    "runtime_top_p_decay": number(0.5),
}
PREPROCESSING: dict[str, np.ndarray] = {
    "DECODER_QUERY": strings("a"),
    "IMAGE_BYTES": np.ones((1, 1, 2, 2, 3), np.uint8),
    "IMAGE_URL": strings("https://example.com/a.png"),
    "VIDEO_BYTES": np.ones((1, 1, 2, 2, 3), np.uint8),
    "PROMPT_TABLE_EXTRA_ID": np.array([[1]], np.uint64),
}
TRITON = [
    *(("ensemble", *row) for row in ENSEMBLE),
    *((LLM, name, value, name) for name, value in TOKENS.items()),
    *(("preprocessing", name, value, name) for name, value in PREPROCESSING.items()),
]
ASKED: dict[str, dict[str, np.ndarray]] = {
    "ensemble": {"text_input": strings(PROMPT), "max_tokens": int32(4)},
    LLM: ids_request([5, 6], 4),
    "preprocessing": {"QUERY": strings(PROMPT), "REQUEST_OUTPUT_LEN": int32(4)},
}


@pytest.mark.parametrize(("model", "name", "value", "words"), TRITON, ids=lambda value: str(value)[:40])
def test_what_is_not_served_is_refused_by_name(
    contract: Server, model: str, name: str, value: np.ndarray, words: str
) -> None:
    message = refusal(contract, model, {**ASKED[model], name: value})
    assert words in message and "not supported" in message


def test_ids_outside_the_vocabulary_are_refused_and_nothing_else_happens(contract: Server) -> None:
    for wrong in (2**31 - 1, -1, len(logits([1])[0])):
        message = refusal(contract, LLM, ids_request([5, wrong], 4))
        assert f"input_ids holds {wrong}; token ids should lie in 0.." in message
        assert "fold_input_ids" in message
    (result,) = answers(contract, LLM, ids_request(encode(PROMPT), 9, end_id=int32(2**31 - 1)))
    assert result.as_numpy("output_ids")[0, 0].tolist() == encode(PROMPT) + greedy(PROMPT, 9)


def test_inputs_that_are_missing_are_named(contract: Server) -> None:
    for name in ("input_ids", "input_lengths", "request_output_len"):
        values = {key: value for key, value in ids_request([5], 4).items() if key != name}
        message = refusal(contract, LLM, values)
        # The server counts inputs only: with an optional one in its place, a mandatory one may be absent.
        assert re.search(f"{name}.* is missing|missing required input.*'{name}'", message)


def test_disaggregated_requests_are_refused(contract: Server) -> None:
    answer: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(contract.grpc) as client:
        client.start_stream(lambda result, error: answer.put((result, error)))
        for kind in ("context_only", "context_and_generation"):
            client.async_stream_infer(LLM, inputs(ids_request([5], 2)), parameters={"request_type": kind})
        (_, error), (result, none) = (answer.get(timeout=120) for _ in range(2))
    assert 'request_type is "context_only"' in str(error)
    assert none is None and result.as_numpy("output_ids").shape == (1, 1, 3)
