# SPDX-License-Identifier: Apache-2.0
"""What the OpenAI API refuses: the path, the input, words of the error. The application of one process,
without an engine; what an engine refuses is in tests/engine and tests/server."""

import gzip
import json
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from openai_api import Api
from openai_server import TEMPLATE

from embedding_checkpoints import make_embedder, make_reranker
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.response_store import ResponseStore

CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, RERANK, SCORE = (
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "responses", "messages", "embeddings", "rerank", "score")
)
ASK = [{"role": "user", "content": "Hi"}]
WRITING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
GOOD: dict[str, dict[str, Any]] = {
    "/tokenize": {"messages": ASK},
    CHAT: {"messages": ASK, "max_tokens": 3},
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 2},
    RESPONSES: {"input": "Once upon a time"},
    MESSAGES: {"messages": ASK, "max_tokens": 3},
    EMBEDDINGS: {"input": "a"},
    RERANK: {"query": "Who is the king?", "documents": ["a"]},
    SCORE: {},
}
# Each also with one of these, where that is not what is wrong: before a stream has begun, and with
# instructions, which are no part of the input.
ALSO = {CHAT: {"stream": True}, RESPONSES: {"instructions": "Be brief."}}
FLAT = {"type": "function", "name": "weather"}
SPACE = {"type": "namespace", "name": "n", "tools": []}
WEATHER, NOW = ({"type": "function", "function": {"name": name}} for name in ("weather", "now"))
FUNCTION = {"name": "weather", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}
CALLED = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]}]
# Parameters: of a value, of any value, of none, and no schema.
NO_OBJECTS: list[Any] = [{"type": "string", "maxLength": 5}, {"enum": [5]}, {"oneOf": [{}]}, "x"]
NO_OBJECTS += ["", [], 0, False]
CALLED_ONE = {"id": "c", "type": "function", "function": {"name": "x", "arguments": "{}"}}
CALLS, RESULT = {**FLAT, "type": "function_call"}, {"type": "function_call_output", "call_id": "1"}


# The words come last. The error's `param` is the first of its own words, or none, where it does not come here
# before the words.
REFUSED: list[tuple[Any, ...]] = [
    (CHAT, {"messages": ...}, "messages is missing"),
    (CHAT, {"response_format": {}}, "response_format.type is missing"),
    (CHAT, {"temprature": 1}, "temprature", "Unrecognized request argument supplied: temprature"),
    (CHAT, {"stream_options": {"x": 1}}, "stream_options.x", "Unrecognized"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream true"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options", "not supported"),
    (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}},
     "stream_options", "needs include_usage"),
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
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "no use of"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "no use of reasoning_effort"),
    (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
     "reasoning_effort", 'says "high"; give one of them'),
    (CHAT, {"documents": [{"text": "x"}]}, "documents", "no use of documents"),
    (CHAT, {"messages": []}, "messages", "empty"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "robot"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0]", "only text"),
    (CHAT, {"messages": None}, "messages", "Expected"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]", "messages[0].role is null; it should be one of"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
     "messages[0].content[0]", "type null; only text is"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "weight": 2}]}]},
     "messages[0].content[0].weight", "is not a field of a part of type text"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": None}}]}, "tools", "function.name is null;"),
    (CHAT, {"tools": [{"type": "function", "function": "f"}]}, "tools", 'function is "f"; it should be'),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "auto"}}]}, "tools", "a word of tool_choice"),
    *((CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
       "tools", "tools[0].function.parameters should be a JSON schema of the type object")
      for schema in NO_OBJECTS),
    *((RESPONSES, {"tools": [{**FLAT, "parameters": schema}], "tool_choice": FLAT},
       "tools", "tools[0].parameters should be a JSON schema of the type object") for schema in NO_OBJECTS),
    *((MESSAGES, {"tools": [{**FUNCTION, "input_schema": schema}]},
       "tools[0].input_schema should be a JSON schema of the type object") for schema in (*NO_OBJECTS, {})),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list"),
    (CHAT, {"messages": [{**ASK[0], "audio": {"id": "x"}}]}, "messages[0].audio", "is not supported"),
    *((path, {"messages": [{**ASK[0], "tool_cals": [1]}]}, "messages[0].tool_cals is not a field of a mess")
      for path in (CHAT, MESSAGES, "/tokenize")),
    (MESSAGES, {"messages": [{**ASK[0], "name": "Ann"}]}, "messages[0].name is not a field of a message"),
    *((CHAT, {"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]}, place, said)
      for place, call, said in (
          ("messages[1].tool_calls[0].type", {**CALLED_ONE, "type": "bar"}, 'is "bar"; it should be func'),
          ("messages[1].tool_calls[0].zap", {**CALLED_ONE, "zap": 1}, "is not a field of a call, which has"),
          ("messages[1].tool_calls[0].function.foo", {"function": {"name": "x", "foo": 3}},
           "is not a field of a call's function, which has name, arguments"))),
    *((path, {"tools": [{"type": "function", "function": {"name": "x", "parametrs": {"type": "object"}}}]},
       "tools[0].function.parametrs", "is not a field of a function, which has name, description, param")
      for path in (CHAT, "/tokenize")),
    (RESPONSES, {"tools": [{**FLAT, "foo": 1}]}, "tools[0].foo is not a field of a function"),
    (RESPONSES, {"tools": [{**FLAT, "allowed_callers": ["programmatic"]}]},
     "tools[0].allowed_callers is not a field of a function"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "x", "description": 5}}]},
     "tools", "tools[0].function.description is 5; it should be a text"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "x", "strict": 1}}]},
     "tools", "tools[0].function.strict is 1; it should be true or false"),
    *((MESSAGES, {"tools": [{**FUNCTION, flag: value}]},
       f"tools[0].{flag} is {value}; it should be true or false")
      for flag, value in (("strict", 1), ("defer_loading", 0), ("eager_input_streaming", 5))),
    (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty; it should"),
    (CHAT, {"tools": [{**WEATHER, "strict": True}]}, "tools", "it stands in tools[0].function"),
    (CHAT, {"tools": [{**WEATHER, "more": 1}]}, "tools", 'has "more", which is not a field of a tool'),
    (CHAT, {"messages": [*ASK, {"role": "assistant", "content": "It", "prefix": True}]},
     "messages[1].prefix", "continue_final_message"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
     "response_format.json_schema.name", "should be a text"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"strict": "no", "schema": {}}}},
     "response_format.json_schema.strict", "true, false or null"),
    (CHAT, {"messages": [{**ASK[0], "tool_calls": [{}]}]}, "messages[0]", "a list, of an assistant"),
    (CHAT, {"messages": [*ASK, {"role": "assistant", "tool_calls": [{}]}]},
     "messages[1].tool_calls[0]", "should hold a function with a name"),
    (CHAT, {"stop": ["a", ""]}, "stop", "holds an empty text"),
    *((path, {"request_id": name}, "request_id should be 1 to 180 printable ASCII characters without blanks")
      for path in (CHAT, COMPLETIONS) for name in ("a b", "", "ü", "x" * 181, "a\n")),
    (CHAT, {"audio": {"voice": "x"}}, "audio", "should be left out: only text"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True},
     "add_generation_prompt", "should be false or left out with"),
    (CHAT, {"top_k": 2**64}, "top_k", "<= 2147483647"),
    (CHAT, {"min_tokens": 4}, "min_tokens", "at most 3 tokens"),
    (CHAT, {"min_tokens": 2**64}, "min_tokens", "<= 2147483647"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools", "only functions"),
    (CHAT, {"tools": [WEATHER, WEATHER]}, "has two of the name weather"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
     "tools", "true or false"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "the tools are"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "required"}}},
     "tool_choice names required; the tools are weather"),
    (CHAT, {"tool_choice": "required"}, "there are no tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "JSON schema"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs: there are 2 guides"),
    (CHAT, {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
     "structured_outputs", "drop one"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "at least n"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "cannot be streamed"),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True}, "cannot be streamed"),
    (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs cannot be streamed"),
    (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs cannot be streamed"),
    (COMPLETIONS, {"allowed_token_ids": [2048]},
     "allowed_token_ids holds 2048; token ids should lie in 0..2047"),
    (COMPLETIONS, {"prompt": []}, "empty"),
    (COMPLETIONS, {"prompt": [[]]}, "empty"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt should be"),
    (COMPLETIONS, {"prompt": [1, 99999]}, "0..2047"),
    (COMPLETIONS, {"prompt": [[1, True]]}, "prompt[0][1]: Expected `int`"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"n": 100, "prompt": ["a", "b"]}, "prompt", "several requests"),
    (CHAT, {"tool_choice": "maybe"},
     "tool_choice", "or required or an object of the type function or allowed"),
    (CHAT, {"tool_choice": {"type": "x"}}, "tool_choice.type", "it should be function or allowed_tools"),
    (CHAT, {"tool_choice": {"type": "function", "function": "f"}},
     "tool_choice.function", "Expected `object`, got `str`"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}, "name": "f"}},
     "tool_choice.name", "Unrecognized request argument supplied: tool_choice.name"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
     "tool_choice.function.x", "Unrecognized"),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
     "tool_choice.allowed_tools.mode", "it should be auto or required"),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools", "of length >= 1"),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}},
     "tool_choice.allowed_tools.tools[0]", "Expected `object`, got `str`"),
    (RESPONSES, {"previous_response_id": "x"}, "previous_response_id needs kept responses"),
    (RESPONSES, {"store": True}, "store needs kept responses"),
    (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "needs kept responses"),
    (RESPONSES, {"stream": True, "stream_options": {"include_usage": True}},
     "stream_options", "the last event has it"),
    (RESPONSES, {"text": {"format": "json_object"}}, "text.format is"),
    (RESPONSES, {"text": {"seed": 5}}, "text", "text.seed is not supported"),
    (RESPONSES, {"reasoning": {"budget": 5}}, "reasoning", "reasoning.budget is not supported"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type is"),
    (RESPONSES, {"input": [ASK[0] | {"id": "m" * 4097}]},
     "input[0].id has 4097 characters; it should have at most 4096"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 1}]},
     "input[0].content should be a string or a list of parts"),
    (RESPONSES, {"input": [ASK[0] | {"weight": 2}]}, "weight is not a field of an item of type message"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": None}]}]},
     "input[0].content[0].text is null; it should be a text"),
    (RESPONSES,
     {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**FLAT, "x": 1}]}},
     "tool_choice.tools[0].x", "Unrecognized"),
    (RESPONSES, {"tools": [{"type": "function", "name": {}}], "tool_choice": FLAT},
     "tools", "tools[0].name is"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {**FLAT, "type": "custom"}},
     "tool_choice.type", "is custom; it should be function, as that of weather is"),
    (RESPONSES, {"tool_choice": "maybe"},
     "tool_choice", "it should be auto or none or required or an object of the type"),
    (RESPONSES, {"tool_choice": {"type": "custom", "name": "f", "x": 1}}, "tool_choice.x", "Unrecognized"),
    (RESPONSES, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice.function", "Unrecognized"),
    (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
     "tool_choice.tools[0].type", "it should be function or custom"),
    (RESPONSES, {"tools": [{"type": "namespace", "tools": []}]},
     "tools[0].name is null; it should be a text"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "", "tools": []}]},
     'tools[0].name is ""; it should be a text that is'),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n"}]},
     "tools[0].tools is null; it should be a list of functions and"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
     "tools[0].tools[0] should be a function or a custom tool"),
    (RESPONSES, {"tools": [{"type": "x"}]},
     'tools[0].type is "x"; it should be function, custom or namespace'),
    (RESPONSES, {"tools": [{"type": "custom", "name": "c", "format": 5}]},
     "tools[0].format is 5; it should be an object with"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "c", "format": {"type": "x"}}]},
     "tools[0].format.type is"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "c", "format": {"type": "text", "syntax": "regex"}}]},
     "tools", "tools[0].format.syntax is not a field of the format text"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "c", "strict": True}]},
     "tools", "tools[0].strict is not a field of a custom tool"),
    (RESPONSES, {"tools": [{"type": "mcp"}, {**SPACE, "tools": [{**FLAT, "name": "a b"}]}]},
     "tools", "tools[1].tools[0].name is"),
    (RESPONSES, {"tools": [{**SPACE, "tools": [SPACE]}]}, "tools[0].tools[0] should be a function or"),
    (RESPONSES, {"tools": [{"type": "mcp"}], "tool_choice": "required"},
     "tool_choice is set, but this server leaves out all of the tools: mcp"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "peg"}}]},
     "tools", "tools[0].format should have the syntax regex"),
    *((RESPONSES,
     {"tools": [{"type": "custom", "name": "c",
                 "format": {"type": "grammar", "syntax": "regex", "definition": definition}}]},
     "tools", "tools[0].format.definition: ")
    for definition in ("(", "a)|(?:b")),
    (RESPONSES,
     {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "x"}]}]},
     'input[0].content[1] is of type "x"'),
    (RESPONSES, {"input": [*ASK, {"type": "reasoning", "content": []}, {"role": "user"}]},
     "input[2].content is missing"),
    (RESPONSES,
     {"input": [*ASK, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": [{"type": "x"}]}]},
     'input[2].content[0] is of type "x"'),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "reasoning_text", "text": "a"}]}]},
     'input[0].content[0] is of type "reasoning_text"'),
    (RESPONSES, {"input": [*ASK, {**CALLS, "call_id": "1"}, {**RESULT, "output": [{"type": "x"}]}]},
     'input[2].output[0] is of type "x"'),
    (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "1", "name": "c"}]},
     "input[0].input is null; it should be a text"),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "gAAAA?"}]},
     "input[0].encrypted_content is not of this server"),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "/w=="}]},
     "input[0].encrypted_content is not of this server"),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": 5}]},
     "input[0].encrypted_content is not of this server"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "1"}]},
     "input[0].name is null; it should be a text"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "namespace": 5}]},
     "input[0].namespace is 5; it should be a text"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": 5}]},
     "input[0].arguments is 5; it should be a text"),
    (RESPONSES, {"input": [{**RESULT, "call_id": 5, "output": ""}]},
     "input[0].call_id is 5; it should be a text"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
     "input[0].content[0].text is null; it should be a text"),
    (RESPONSES, {"input": [{"role": "user", "content": [5]}]},
     "input[0].content[0] is 5; it should be an object with a type"),
    (RESPONSES, {"input": [{"type": []}]},
     "input[0].type is []; it should be one of message, function_call,"),
    (RESPONSES, {"input": [{"role": "oracle", "content": "a"}]},
     "input[0]", 'input[0].role is "oracle"; it should be one of'),
    (RESPONSES, {"input": []}, "input is empty; it should have at least one item"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": json.dumps([0] * 70000)}]},
     "input", "the arguments of all calls in input have more than"),
    (RESPONSES, {"guided_choice": []}, "guided_choice should hold"),
    (RESPONSES, {"structured_outputs": {"choice": [""]}},
     "structured_outputs", "structured_outputs.choice should hold"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format of type json_schema should hold"),
    (RESPONSES, {"text": {"format": {"type": "text", "schema": {}}}},
     'text.format of type text should have no "sch'),
    (RESPONSES, {"text": {"format": {"type": "json_object", "schema": {}}}},
     "text.format of type json_object should"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}},
     "text.format of type json_schema"),
    (RESPONSES, {"guided_json": {}, "text": {"format": {"type": "json_object"}}},
     "guided_json", "text.format and guided_json: "),
    (RESPONSES, {"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs: there are 2"),
    (MESSAGES, {"messages": [{"role": "user", "content": [ASK[0], IMAGE]}]},
     "messages[0].content[0] should be a block"),
    (MESSAGES, {"messages": [{"role": "user", "content": [IMAGE]}]},
     'messages[0].content[0] is of type "image"'),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, 'messages[0].role is "tool"'),
    (MESSAGES, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content should be a string"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "weight": 2}]}]},
     "messages[0].content[0].weight is not a field of a part of type text"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{**CALL, "strict": True}]}]},
     "messages[0].content[0].strict is not a field of a tool_use"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text is null; it should be a text"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"},
                                                          {"type": "input_text", "text": "x"}]}]},
     'messages[0].content[1] is of type "input_text"'),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [CALL, {"type": "output_text", "text": "x"}]}]},
     'messages[0].content[1] is of type "output_text"'),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                           "content": [{"type": "refusal"}]}]}]},
     'messages[0].content[0].content[0] is of type "refusal"'),
    (MESSAGES, {"messages": [{"role": "system"}]}, "messages[0].content is missing"),
    (MESSAGES, {"system": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
     'system[1] is of type "input_text"'),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
     "messages[0].content[0].tool_use_id is null; it should be the tool_use's id"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]},
     "messages[0].content[0].thinking should be a string"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{**CALL, "input": None}]}]},
     "messages[0].content[0] should have a name and, as input, an object"),
    (MESSAGES, {"messages": CALLED}, "messages[1] has a tool_use, but no"),
    (MESSAGES, {"messages": []}, "messages is empty"),
    (MESSAGES, {"system": [IMAGE]}, 'system[0] is of type "image"'),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     'tools[0].type is "web_search_20250305"'),
    (MESSAGES, {"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name is"),
    (MESSAGES, {"tools": [{"name": "weather"}]}, "tools[0].input_schema should be"),
    (MESSAGES, {"tools": [FUNCTION], "tool_choice": {"type": "some"}},
     "it should be any or auto or none or tool"),
    (MESSAGES, {"tools": [FUNCTION], "tool_choice": {"type": "any", "name": "weather"}},
     "tool_choice.name should be left out"),
    (MESSAGES, {"tools": [FUNCTION], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 9}},
     "thinking.budget_tokens should be left out"),
    (MESSAGES, {"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
    (MESSAGES, {"thinking": {"type": "between_tools"}}, "it should be adaptive or disabled or enabled"),
    (MESSAGES, {"output_config": {"format": {"type": "text"}}}, "'text'; it should be json_schema"),
    (MESSAGES, {"context_management": {"edits": [{"type": "compact_20260112"}]}},
     "'compact_20260112'; it should be clear_thinking_20251015"),
    (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
    (MESSAGES, {"container": "c"}, "container: Expected `null`"),
    (MESSAGES, {"thread": {"id": "t"}}, "thread is not supported: this server keeps no messages"),
    (MESSAGES, {"speed": "fast"}, 'speed is "fast"'),
    (MESSAGES, {"fallbacks": ["a"]}, "Unrecognized request argument supplied: fallbacks"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens: "),
    (MESSAGES, {"stop_sequences": ["x" * 20000]}, "stop_sequences has 20000 bytes"),
    (EMBEDDINGS, {"input": ["a", "b", "", "c"]}, 'input[2] is ""; it should be a text that is not empty'),
    (EMBEDDINGS, {"input": ["a", 5]}, "input[0]", "input[0]"),
    (EMBEDDINGS, {"input": [[1], [2, "x"]]}, "input[1]", "input[1]"),
    (EMBEDDINGS, {"input": []}, "input has 0 elements; it should have 1 to 2048"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input has 2049 elements; it should have 1 to 2048"),
    (EMBEDDINGS, {"input": [[1], [2], [9, 2048]]}, "input[2] holds 2048; token ids should lie in 0..2047"),
    (EMBEDDINGS, {"input": [[5], [5] * 2048]}, "input[1] has 2048 tokens; it should have 1 to 2047"),
    (EMBEDDINGS, {"dimensions": 65}, "dimensions is 65; the model's embeddings have 64"),
    (EMBEDDINGS, {"prompt_name": "passage"}, "the checkpoint's prompts are: query, document"),
    (EMBEDDINGS, {"input": [5], "prompt_name": "query"}, "prompt_name goes with texts"),
    (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format"),
    (EMBEDDINGS, {"queue_timeout": 0}, "queue_timeout"),
    (RERANK, {"documents": ["a", None]}, "documents[1] is null; it should be a text that is not empty"),
    (RERANK, {"query": ""}, 'query is ""; it should be a text that is not empty'),
    (RERANK, {"documents": []}, "documents has 0 elements; it should have 1 to 2048"),
    (RERANK, {"documents": ["a", "word " * 2100]}, "documents[1] makes, with its query, a prompt of "),
    (RERANK, {"query": "a" * 10_000, "documents": ["b"] * 1000},  # each brings the query
     "documents has 10001000 characters, with the query"),
    (SCORE, {"queries": ["a", "b"], "documents": ["a"] * 3},
     "queries has 2 texts and documents has 3; give one"),
    (SCORE, {"text_2": "a"}, "queries or text_1 should be there, and not both"),
]  # fmt: skip


@pytest.fixture(scope="module")
def apis(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Api]:
    """By path, of a model that has it."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chat = Api(str(folder / "chat_template.jinja"), 2048)
    embedding, reranking = (
        Api(None, 2048, str(make(folder / make.__name__))) for make in (make_embedder, make_reranker)
    )
    return dict.fromkeys(GOOD, chat) | {EMBEDDINGS: embedding, RERANK: reranking, SCORE: reranking}


@pytest.mark.parametrize(("path", "more", "words"), [(path, more, words) for path, more, *words in REFUSED])
def test_what_is_wrong_is_named(
    apis: dict[str, Api], path: str, more: dict[str, Any], words: list[str | None]
) -> None:
    *param, said = words
    also = ALSO.get(path, {})
    for others in ({}, also) if also and not more.keys() & {*also, "stream_options"} else ({},):
        body = {name: value for name, value in {**GOOD[path], **others, **more}.items() if value is not ...}
        status, _, answer = apis[path].call(path, json.dumps(body).encode())
        error = answer["error"]
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert said and said in error["message"]
        named = param or [None, error["message"].partition(" ")[0].rstrip(":")]
        assert error.get("param") in named


@pytest.mark.parametrize(
    ("model", "path", "words"),
    [
        (CHAT, EMBEDDINGS, f"writes text, and {EMBEDDINGS} needs an embedding model"),
        (CHAT, RERANK, f"writes text, and {RERANK} needs a reranker"),
        *((EMBEDDINGS, path, "is an embedding model, which writes no text; send texts") for path in WRITING),
        (EMBEDDINGS, RERANK, ""),
        (RERANK, EMBEDDINGS, "is a reranker, which writes no text; send queries and documents"),
    ],
)
def test_what_another_model_has_is_named(apis: dict[str, Api], model: str, path: str, words: str) -> None:
    status, _, answer = apis[model].call(path, json.dumps(GOOD[path]).encode())
    assert status == 404 and words in answer["error"]["message"]


def test_a_byte_that_is_no_text_is_counted_in_the_body(apis: dict[str, Api]) -> None:
    """Also behind longer characters; half a surrogate is in no text either."""
    for text in (b"\xff", b"\xed\xa0\x80"):
        body = '{"messages": [{"role": "user", "content": "ü'.encode()
        answer = apis[CHAT].call(CHAT, body + text + b'"}]}')[2]
        assert answer["error"]["message"] == f"the body is not valid JSON: no UTF-8 at byte {len(body)}"
    for half, told in (('"\\ud83d"', True), ('"\\ud83d\\ude00', False)):
        answer = apis[CHAT].call(CHAT, f'{{"messages": [{{"role": "user", "content": {half}}}]}}'.encode())[2]
        assert ("half of a surrogate pair" in answer["error"]["message"]) == told


def test_errors_have_the_form_of_their_api(apis: dict[str, Api]) -> None:
    """Also of paths that Anthropic's API has, and this server has not."""
    for path in ("/v1/messages/batches", "/messages/batches/b_1"):
        status, headers, answer = apis[MESSAGES].call(path, b"{}")
        told = {"type": "not_found_error", "message": f"there is no {path}"}
        assert (status, answer["type"], answer["error"]) == (404, "error", told)
        assert answer["request_id"] == headers["request-id"]
    assert "type" not in apis[MESSAGES].call("/v1/messages_of", b"{}")[2]


def test_what_a_client_asked_that_has_left_goes_to_no_engine(
    apis: dict[str, Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Api has none: it would be an error."""
    monkeypatch.setattr("flashinfer_backend.openai.served_model.client_left", lambda: True)
    for path in (*WRITING, EMBEDDINGS, RERANK):
        assert apis[path].call(path, json.dumps(GOOD[path]).encode())[0] == 499


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_an_open_request_holds_no_more_than_its_answer_needs(path: str, tmp_path: Path) -> None:
    """The body, and keys of messages that no template shows, are gone when the engine gets the prompt."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    api, held, before = Api(str(template)), list[int](), 0

    def generate(*asked: Any) -> None:
        time.sleep(0.2)  # the thread that has read the body lets go of it
        held.append(tracemalloc.get_traced_memory()[0] - before)
        raise ApiError("that is all")

    api.served.link.generate = generate  # type: ignore[assignment]
    listed = "input" if path == RESPONSES else "messages"
    asked = {**GOOD[path], listed: [{**ASK[0], "phase": "x" * (16 << 20)}]}
    body = gzip.compress(json.dumps(asked).encode(), 1)
    del asked
    api.call(path, json.dumps(GOOD[path]).encode())  # what the first request loads is no part of it
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        status, _, answer = api.call(path, body, content_encoding="gzip")
    finally:
        tracemalloc.stop()
    assert (status, answer["error"]["message"]) == (400, "that is all")
    assert held[-1] < 4 << 20


def test_a_kept_conversation_has_the_bounds_of_one_that_is_sent() -> None:
    api, readers = Api(), set[str]()
    api.served.store = ResponseStore(64 << 20)
    for name, items in (("values", [{**ASK[0], "unshown": [0] * 60_000}]), ("items", ASK * 4096)):
        api.served.store.put(name, json.dumps(items).encode(), {"id": name})
    more = [{**ASK[0], "unshown": [0] * 6_000}]
    read = api.served.store.items

    def items(*asked: str) -> bytes:
        readers.add(threading.current_thread().name)
        return read(*asked)

    api.served.store.items = items  # type: ignore[method-assign]
    for name, given, told in (
        ("values", more, "60002 values before input; with input it should have at most 65536"),
        ("items", "Hi", "4096 items before input; with input it should have at most 4096"),
        ("items", ASK, "4096 items before input; with input it should have at most 4096"),
    ):
        status, _, answer = api.call(
            RESPONSES, json.dumps({"input": given, "previous_response_id": name}).encode()
        )
        assert status == 400 and told in answer["error"]["message"], answer
    # Other requests go on while a small one has a large conversation read.
    assert all(name.startswith("large bodies") for name in readers)


@pytest.mark.parametrize("wrong", [{"y" * 100_000: 1}, {"logit_bias": {"y" * 100_000: 1}}])
def test_errors_are_short_whatever_is_wrong(wrong: dict[str, Any]) -> None:
    status, _, answer = Api().call(COMPLETIONS, json.dumps({**GOOD[COMPLETIONS], **wrong}).encode())
    assert status == 400 and "yyy..." in answer["error"]["message"]
    assert len(json.dumps(answer)) < 500
