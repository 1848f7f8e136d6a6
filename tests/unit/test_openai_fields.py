# SPDX-License-Identifier: Apache-2.0
"""What clients send that has no effect here, and what they may send and ask otherwise: encodings of bodies,
pages of other origins, the description of the API. No engine."""

import asyncio
import gzip
import json
import re
import struct
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai_api import Api

from flashinfer_backend.openai import requests
from flashinfer_backend.openai.app import LARGE_BODY
from flashinfer_backend.openai.chat import add_effort
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.no_effect import NO_EFFECT, OF_FUNCTIONS, OF_PARTS
from flashinfer_backend.openai.sampling import EngineLimits, check_ids, guide_of
from flashinfer_backend.openai.template import ChatTemplate
from scripted_model import QWEN_TEMPLATE

DOCS = Path(__file__).parents[2] / "docs" / "openai.md"
# A body of each kind with the fields that it has to have.
CHAT: Any = (requests.ChatRequest, {"messages": []})
TEXT_ALONE: Any = (requests.CompletionRequest, {"prompt": "x"})
RESPONSE: Any = (requests.ResponsesRequest, {"input": "x"})
MESSAGE: Any = (requests.MessagesRequest, {"messages": [], "max_tokens": 1})
TOKENIZE: Any = (requests.TokenizeRequest, {"prompt": "x"})
CONTINUED: Any = {"messages": [], "continue_final_message": True}
LOGPROBS: Any = {"input": "x", "include": ["message.output_text.logprobs"]}
# What can be added, and what cannot.
ADDED: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"prompt_cache_retention": "24h", "user": "x"}, {}),
    (RESPONSE, {"prompt_cache_options": {"mode": "explicit"}}, {}),
    (CHAT, {"service_tier": "flex"}, {"service_tier": "priority"}),
    (TEXT_ALONE, {"length_penalty": 1.0}, {"length_penalty": 0.5}),
    (TEXT_ALONE, {"use_beam_search": False}, {"use_beam_search": True}),
    (CHAT, {"early_stopping": False}, {"early_stopping": True}),
    (CHAT, {"verbosity": "low"}, {"verbosity": "loud"}),
    (CHAT, {"separate_reasoning": True}, {"separate_reasoning": False}),
    (CHAT, {"include_reasoning": True}, {"include_reasoning": False}),
    (CHAT, {"top_logprobs": 0}, {"top_logprobs": 1}),
    (CHAT, {"prompt_logprobs": 0}, {"prompt_logprobs": -1}),
    (TEXT_ALONE, {"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    (CHAT, {"allowed_token_ids": [1]}, {"allowed_token_ids": []}),
    (CHAT, {"bad_words": ["a"]}, {"bad_words": [""]}),
    (TEXT_ALONE, {"stop": []}, {"stop": ""}),
    (CHAT, {"stop": "a"}, {}),
    ((requests.ChatRequest, CONTINUED), {"add_generation_prompt": None}, {}),
    ((requests.TokenizeRequest, CONTINUED),
     {"add_generation_prompt": False}, {"add_generation_prompt": True}),
    (TOKENIZE, {"add_generation_prompt": False}, {"add_generation_prompt": True}),
    (TOKENIZE, {"continue_final_message": False}, {"continue_final_message": True}),
    (TOKENIZE, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"a": 1}}),
    (TOKENIZE, {"tools": []}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ((requests.CompletionRequest, {"prompt": "x", "max_tokens": 0}), {"min_tokens": 0}, {"min_tokens": 1}),
    (CHAT, {"seed": -(2**63)}, {"seed": -(2**63) - 1}),
    (CHAT, {"seed": 2**64 - 1}, {"seed": 2**64}),
    (CHAT, {"structured_outputs": {"json_object": False}}, {"structured_outputs": {"regex": None}}),
    (CHAT, {"request_id": "a-1"}, {"request_id": "a b"}),
    (CHAT, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 0}),
    (CHAT, {}, {"guided_regex": "a", "guided_json": {}}),
    (CHAT, {}, {"guided_regex": "a", "structured_outputs": {"regex": "a"}}),
    (RESPONSE, {"max_tool_calls": 3}, {"max_tool_calls": 0}),
    (RESPONSE, {"include": ["web_search_call.action.sources", "code_interpreter_call.outputs"]},
     {"include": ["message.input_image.image_url"]}),
    ((requests.ResponsesRequest, LOGPROBS), {"top_logprobs": 20}, {"top_logprobs": 21}),
    (RESPONSE, {"top_logprobs": 0}, {"top_logprobs": 1}),
    (RESPONSE, {"truncation": "auto"}, {"truncation": "middle"}),
    (RESPONSE, {"return_token_ids": False}, {"return_token_ids": True}),
    (MESSAGE, {"service_tier": "standard_only"}, {}),
    (MESSAGE, {"stop_sequences": ["a"]}, {"stop_sequences": ["a", ""]}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "accepted", "refused"), ADDED)
def test_fields_that_ask_for_nothing(body: Any, accepted: Any, refused: Any) -> None:
    kind, base = body
    requests.decode(kind, json.dumps({**base, **accepted}).encode())
    if refused:
        with pytest.raises(ApiError) as wrong:
            requests.decode(kind, json.dumps({**base, **refused}).encode())
        assert wrong.value.param in refused and wrong.value.message.startswith(wrong.value.param)


@pytest.mark.parametrize("body", [CHAT, TEXT_ALONE, RESPONSE, MESSAGE, TOKENIZE])
def test_clients_may_send_every_field_they_know(body: Any) -> None:
    """Where it says nothing: unknown ones that are empty, and null where absence alone is the default."""
    kind, base = body
    expected = requests.decode(kind, json.dumps(base).encode())
    optional = {
        "model": None,
        "min_tokens": None,
        "ignore_eos": None,
        "skip_special_tokens": None,
        "priority": None,
    }
    optional = {name: value for name, value in optional.items() if name in kind.__struct_fields__}
    for empty in (None, False, "", [], {}):
        sent = {"foo": empty, **optional, **base, "bär": empty}
        assert requests.decode(kind, json.dumps(sent, ensure_ascii=False).encode()) == expected
    for value in (0, 1, True, " ", [None], {"a": None}, 0.0):
        with pytest.raises(ApiError, match="Unrecognized request argument supplied: foo"):
            requests.decode(kind, json.dumps({"bar": None, "foo": value, **base}).encode())
    for name in base:
        with pytest.raises(ApiError, match=name):
            requests.decode(kind, json.dumps({**base, "foo": None, name: 5.5}).encode())
    large = json.dumps({**base, "foo": None, "a" * requests.MOST_LOOSE: None}).encode()
    with pytest.raises(ApiError, match="Unrecognized"):  # to look at all fields would take long
        requests.decode(kind, large)


def test_null_can_say_more_than_a_fields_absence() -> None:
    asked = [{}, {"max_tokens": None}, {"max_tokens": None, "foo": None}]
    found = [
        requests.decode(requests.CompletionRequest, json.dumps({"prompt": "x", **a}).encode()) for a in asked
    ]
    assert [each.max_tokens for each in found] == [16, None, None]


@pytest.mark.parametrize(("kind", "given"), [
    ("text", {"schema": None}),
    ("json_object", None),
    ("json_schema", {"name": "a", "schema": {}, "strict": True, "description": None}),
])  # fmt: skip
def test_formats_of_answers_and_what_they_can_have(kind: Any, given: Any) -> None:
    request = requests.decode(RESPONSE[0], json.dumps(RESPONSE[1]).encode())
    guide = guide_of(requests.ResponseFormat(kind, given), request)
    assert guide.kind == ("" if kind == "text" else "json_schema")
    assert kind != "json_object" or json.loads(guide.text)["type"] == "object"


@pytest.mark.parametrize("key", ["1_0", "010", "+10", " 10", "１０", "-0"])
def test_an_id_is_written_in_one_way(key: str) -> None:
    """Else two keys of a bias could be one id, and one of them be without effect."""
    limits = EngineLimits(2048, 64, 63)
    assert check_ids("logit_bias", {"10": 1.0, "0": 1.0}, limits) == [10, 0]
    with pytest.raises(ApiError, match=r'^logit_bias holds ".*"; it should be "1?0"$'):
        check_ids("logit_bias", {"10": 1.0, key: -1.0}, limits)


def test_the_page_shows_the_table() -> None:
    shown = DOCS.read_text().partition("## Fields without effect")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z_.]+)`", "".join(re.findall(r"^\| (`.*?) \|", shown, re.MULTILINE))))
    assert listed == NO_EFFECT.keys() | {"text.verbosity", "reasoning.summary"}
    rows = re.findall(r"^\| (of parts.*?) \|", shown, re.MULTILINE)
    of_parts = set(re.findall(r"`([a-z_]+)`", "".join(rows)))
    assert of_parts == {*OF_PARTS, "signature"} - {"type"}
    (row,) = re.findall(r"^\| of functions: (.*?) \|", shown, re.MULTILINE)
    assert tuple(re.findall(r"`([a-z_]+)`", row)) == OF_FUNCTIONS


@pytest.mark.parametrize(
    ("source", "effort", "ignored", "variables"),
    [
        ("{{ reasoning_effort }}", "low", False, {"reasoning_effort": "low"}),
        ("{{ reasoning_effort }}", "none", False, {"reasoning_effort": "none"}),
        ("x", "none", False, {}),
        ("{% if enable_thinking %}{% endif %}", "none", False, {"enable_thinking": False}),
        (QWEN_TEMPLATE, "none", False, {"enable_thinking": False}),
        (QWEN_TEMPLATE, "minimal", False, {"reasoning_effort": "low"}),
        (QWEN_TEMPLATE, "medium", False, {"reasoning_effort": "medium"}),
        (QWEN_TEMPLATE, "high", False, {"reasoning_effort": "xhigh"}),
        (QWEN_TEMPLATE, "max", False, {"reasoning_effort": "xhigh"}),
        (QWEN_TEMPLATE, "extreme", False, {"reasoning_effort": "extreme"}),
        ("x", "low", True, {}),
        ("x", "low", False, None),
        ("x", 5, True, None),
    ],
)
def test_an_effort_that_the_template_has_not(
    source: str, effort: Any, ignored: bool, variables: dict[str, Any] | None
) -> None:
    served: Any = SimpleNamespace(
        template=ChatTemplate(source, {}), model=SimpleNamespace(ignore_effort=ignored)
    )
    found: dict[str, Any] = {}
    if variables is None:
        with pytest.raises(ApiError, match=r"^reasoning\.effort is ") as wrong:
            add_effort(served, found, effort, "reasoning.effort")
        assert wrong.value.param == "reasoning.effort"
    else:
        add_effort(served, found, effort, "reasoning.effort")
        assert found == variables


MOST = 1000
TEXT = json.dumps({"prompt": "ab " * 20}).encode()
EMPTY = gzip.compress(b"", mtime=0)
RAW = zlib.compressobj(wbits=-15)
RAW_TEXT = RAW.compress(TEXT) + RAW.flush()
# A stored block, whose padding may be anything, and an empty last one: the first byte is as in zlib's header.
STORED = struct.pack("<BHH", 8, len(TEXT), len(TEXT) ^ 0xFFFF) + TEXT + b"\1\0\0\xff\xff"


@pytest.mark.parametrize(
    ("encoding", "body", "status", "words"),
    [
        ("gzip", gzip.compress(TEXT, mtime=0), 200, ""),
        ("x-gzip", gzip.compress(TEXT, mtime=0), 200, ""),
        ("deflate", zlib.compress(TEXT), 200, ""),
        ("deflate", RAW_TEXT, 200, ""),
        ("deflate", STORED, 200, ""),
        ("identity", TEXT, 200, ""),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-5], 400, "ends too early"),
        ("gzip", gzip.compress(TEXT, mtime=0) + EMPTY, 400, "has 20 bytes behind its end"),
        ("gzip", b"\0" + gzip.compress(TEXT, mtime=0), 400, "not in gzip"),
        ("gzip", gzip.compress(TEXT, mtime=0) + b"more", 400, "has 4 bytes behind its end"),
        ("deflate", zlib.compress(TEXT) + b"more", 400, "has 4 bytes behind its end"),
        ("deflate", zlib.compress(TEXT)[:-1], 400, "ends too early"),
        ("gzip", TEXT, 400, "not in gzip"),
        ("gzip", gzip.compress(b" " * (MOST - len(TEXT)) + TEXT, mtime=0), 200, ""),
        ("gzip", gzip.compress(b" " * (MOST - len(TEXT) + 1) + TEXT, mtime=0), 413, "larger than 1000 bytes"),
        ("br", TEXT, 415, "is br; it should be gzip, deflate or identity"),
        ("gzip, gzip", TEXT, 415, "gzip, gzip"),
    ],
)
def test_compressed_bodies(encoding: str, body: bytes, status: int, words: str) -> None:
    found, _, answer = Api(max_body_bytes=MOST).call("/tokenize", body, content_encoding=encoding)
    assert found == status and words in json.dumps(answer)


def test_a_body_that_is_coded_for_its_way_is_refused() -> None:
    call = Api(max_body_bytes=MOST).call
    assert call("/tokenize", TEXT, transfer_encoding="chunked")[0] == 200
    found, _, answer = call("/tokenize", gzip.compress(TEXT), transfer_encoding="gzip, chunked")
    assert found == 501 and "Transfer-Encoding is gzip, chunked; it should be chunked" in json.dumps(answer)


def test_pages_of_other_origins() -> None:
    page = "https://chat.example"
    asks = {"origin": page, "access_control_request_method": "POST"}
    allowed = "access-control-allow-origin"
    sent = {"origin": page, "content_type": "application/json"}
    assert allowed not in Api(keys=["k"]).call("/tokenize", TEXT, authorization="Bearer k", **sent)[1]
    api = Api(keys=["k"], origins=[page])
    asks["access_control_request_headers"] = "authorization"
    status, headers, _ = api.call("/v1/chat/completions", method="OPTIONS", **asks)
    assert (status, headers[allowed]) == (200, page)
    assert "authorization" in headers["access-control-allow-headers"].lower()
    for key, status in (("k", 200), ("other", 401)):
        found, headers, _ = api.call("/tokenize", TEXT, origin=page, authorization=f"Bearer {key}")
        assert (found, headers[allowed]) == (status, page)
        assert "x-request-id" in headers["access-control-expose-headers"]
    asks["origin"] = "https://other.example"
    assert allowed not in api.call("/tokenize", method="OPTIONS", **asks)[1]


def test_pages_of_other_origins_cannot_send_what_browsers_do_not_ask_about() -> None:
    """Any page that a user of the machine opens could have the server generate, though it reads no answer."""
    page = "https://chat.example"
    for kind in ({}, {"content_type": "text/plain"}, {"content_type": "Multipart/Form-Data; boundary=1"}):
        status, _, answer = Api().call("/tokenize", TEXT, origin=page, **kind)
        assert status == 403 and page in answer["error"]["message"]
        assert Api().call("/tokenize", TEXT, **kind)[0] == 200, "no browser"
        for origins in ([page], ["*"]):
            assert Api(origins=origins).call("/tokenize", TEXT, origin=page, **kind)[0] == 200
    for kind in ("application/json", "application/json; charset=utf-8"):  # a browser asks first
        assert Api().call("/tokenize", TEXT, origin=page, content_type=kind)[0] == 200
    assert Api().call("/v1/models", method="GET", origin=page)[0] == 200


def test_the_models_are_listed_with_a_slash_behind() -> None:
    api = Api()
    for path in ("/v1/models", "/models"):
        assert api.call(path + "/", method="GET")[2] == api.call(path, method="GET")[2]
        assert api.call(path, method="GET")[2]["object"] == "list"


def test_the_description_has_the_fields_of_the_structs() -> None:
    found = Api(keys=["k"]).call("/openapi.json", method="GET", authorization="Bearer k")[2]
    body = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    schema = found["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    assert schema["properties"].keys() == set(requests.ChatRequest.__struct_fields__)
    assert schema["required"] == ["messages"] and schema["additionalProperties"] is False
    assert (
        found["paths"]["/v1/responses/{name}"].keys() == {"get", "delete"}
        and "/openapi.json" in found["paths"]
    )
    ids = [one["operationId"] for path in found["paths"].values() for one in path.values()]
    assert len(set(ids)) == len(ids) and found["security"] == [{"key": []}]


def test_what_large_bodies_need_is_done_in_threads() -> None:
    """Streams of other clients go on meanwhile."""
    api = Api(max_body_bytes=1 << 24)
    seen: list[bool] = []  # whether a body was read in the loop's thread

    def watched(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(threading.current_thread() is threading.main_thread())
            return function(*arguments, **named)

        return call

    template: Any = api.served.template
    template.render, api.served.decoder = watched(template.render), watched(api.served.decoder)  # type: ignore[method-assign]
    for size, in_loop in ((8, True), (LARGE_BODY, False)):
        chat = {"messages": [{"role": "user", "content": "ab " * (size // 3)}]}
        found = api.call("/tokenize", json.dumps(chat).encode())[2]
        assert found["count"] > size // 4
        tokens = {"tokens": found["tokens"][:5] + [300] * (size // 4)}
        assert api.call("/detokenize", json.dumps(tokens).encode())[2]["prompt"]
        assert seen == [in_loop, in_loop]
        seen.clear()
    backend = api.served.tokenizer.backend
    named = SimpleNamespace(encode_batch=api.served.tokenizer.encode_batch, backend=backend)
    api.served.tokenizer, named.backend = named, SimpleNamespace(id_to_token=watched(backend.id_to_token))  # type: ignore[assignment]
    for size, in_loop in ((8, True), (LARGE_BODY, False)):
        asked = {"prompt": "ab " * (size // 3), "return_token_strs": True}
        assert len(api.call("/tokenize", json.dumps(asked).encode())[2]["token_strs"]) > size // 4
        assert {*seen} == {in_loop}
        seen.clear()


def test_a_request_waits_for_an_engine_that_is_not_seen_yet() -> None:
    api = Api()
    status, api.engines.status, api.engines.up = api.engines.status, None, False

    def appear() -> None:
        api.engines.status, api.engines.up = status, True

    async def asked_before() -> Any:
        asyncio.get_running_loop().call_later(0.1, appear)
        return await api.ask("/tokenize", TEXT)

    assert asyncio.run(asked_before())[2]["count"]
