# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API, /v1/messages and /v1/messages/count_tokens: its requests as conversations, and
answers as its messages and events. Fields are those of anthropic 2.14, its Python package."""

import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.answer import respond, unwrapped_text, wrapped_text
from flashinfer_backend.openai.chat import Answer, Conversation, Turn, add_effort, render
from flashinfer_backend.openai.errors import field_error, wrong_value
from flashinfer_backend.openai.formats.events import ARGUMENTS, CONTENT, REASONING, Event
from flashinfer_backend.openai.items import Change, Items, named_event
from flashinfer_backend.openai.no_effect import check_part
from flashinfer_backend.openai.requests import (
    CountTokensRequest,
    FunctionChoice,
    MessagesRequest,
    OutputConfig,
    Sampling,
    Thinking,
    ToolChoice,
)
from flashinfer_backend.openai.sampling import NO_GUIDE, schema_guide
from flashinfer_backend.openai.served_model import Answering, ServedModel
from flashinfer_backend.openai.template import FieldPaths, part_text, plain_messages, text_of
from flashinfer_backend.openai.tools import AUTO, NONE, REQUIRED, Tools, new_call_id, read_tools
from flashinfer_backend.serving.generation import Chunk
from flashinfer_backend.transport import protocol

CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}
TEXT_BLOCKS = {"text": "text"}
STOPPED = "stop_sequence"  # why an answer ended
# Keys of a tool besides its name and schema, and the values that ask for nothing here.
IDLE_OF_TOOLS: dict[str, tuple[Any, ...]] = {
    "type": (None, "custom"),
    "defer_loading": (None, False),
    "allowed_callers": (None, ["direct"]),
    "input_examples": (None, []),
}
FLAGS_OF_TOOLS = ("defer_loading", "strict", "eager_input_streaming")
FREE_OF_TOOLS = ("name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")


def message(served: ServedModel, request: MessagesRequest) -> Answering:
    turn = Turn(served, conversation_of(served, request), bool(request.stream))
    sampling = Sampling(
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        stream=request.stream,
    )
    turn.prepare(sampling)
    request.messages, request.system = [], None

    async def answer() -> Response:
        await turn.encode()
        # An answer that the model's context cuts before max_tokens has a stop reason that says so.
        room = served.limits.max_seq_len - len(turn.prompt)
        await turn.submit(sampling, 1, request.max_tokens if request.max_tokens <= room else None)
        return respond(served, turn.streams, _Reply(turn, request), request.stream)

    return answer


def count_tokens(served: ServedModel, request: CountTokensRequest) -> Answering:
    text = render(served, conversation_of(served, request))

    async def answer() -> dict[str, Any]:
        (ids,) = await served.encode([text], False, field="messages")
        return {"input_tokens": len(ids)}

    return answer


def conversation_of(served: ServedModel, request: CountTokensRequest) -> Conversation:
    """What the model is asked. Raises ApiError."""
    messages, paths = messages_of(request)
    variables = _reasoning(served, request.thinking) if request.thinking is not None else {}
    config, guide = request.output_config or OutputConfig(), NO_GUIDE
    if config.effort is not None:
        add_effort(served, variables, config.effort, "output_config.effort")
    if config.format is not None:
        guide = schema_guide(config.format.schema, "output_config.format")
    prefilled = messages[-1]["role"] == "assistant"
    if prefilled and messages[-1].get("tool_calls"):
        raise field_error(paths[-1].message, "has a tool_use, but no message with its tool_result follows")
    return Conversation(
        plain_messages(messages, paths),
        _tools(request),
        guide,
        guide_is_for_content=True,
        variables=variables,
        continue_final_message=prefilled,
    )


def messages_of(request: CountTokensRequest) -> tuple[list[dict[str, Any]], list[FieldPaths]]:
    """The system prompt and the messages as a chat has them, and the place of each in the request. Raises
    ApiError."""
    messages: list[dict[str, Any]] = []
    paths: list[FieldPaths] = []

    def add(message: dict[str, Any], place: str) -> None:
        messages.append(message)
        paths.append(FieldPaths(place, f"{place}.content"))

    if not request.messages:
        raise field_error("messages", "is empty; it should have at least one message")
    if request.system:
        add({"role": "system", "content": text_of(request.system, "system", TEXT_BLOCKS)}, "system")
    for n, message in enumerate(request.messages):
        place, role, content = f"messages[{n}]", message.get("role"), message.get("content")
        check_part(message, ("role", "content"), place, "a message")
        if content is None:
            raise field_error(f"{place}.content", "is missing")
        if role == "assistant":
            add(_assistant(content, f"{place}.content"), place)
        elif role == "system":
            add({"role": role, "content": text_of(content, f"{place}.content", TEXT_BLOCKS)}, place)
        elif role == "user":
            texts: list[str] = []
            for block, at in _blocks(content, f"{place}.content"):
                if block["type"] != "tool_result":
                    texts.append(part_text(block, at, TEXT_BLOCKS))
                    continue
                if texts:
                    add({"role": role, "content": "\n".join(texts)}, place)
                    texts = []
                add(_result(block, at), place)
            if texts:
                add({"role": role, "content": "\n".join(texts)}, place)
            elif not content:
                raise field_error(f"{place}.content", "is empty; it should have at least one block")
        else:
            raise wrong_value(f"{place}.role", role, "user, assistant or system")
    return messages, paths


def _blocks(content: Any, place: str) -> list[tuple[dict[str, Any], str]]:
    """The blocks of a message and the place of each. Raises ApiError."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, place)]
    if not isinstance(content, list):
        raise field_error(place, "should be a string or a list of blocks")
    for n, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise field_error(f"{place}[{n}]", "should be a block with a type")
    return [(block, f"{place}[{n}]") for n, block in enumerate(content)]


def _result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A tool's result; one that is an error says so to the model."""
    if not isinstance(block.get("tool_use_id"), str):
        raise wrong_value(f"{place}.tool_use_id", block.get("tool_use_id"), "the tool_use's id")
    check_part(block, ("tool_use_id", "content", "is_error"), place, "a tool_result")
    text = text_of(block.get("content"), f"{place}.content", TEXT_BLOCKS)
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _assistant(content: Any, place: str) -> dict[str, Any]:
    """An earlier answer, or the beginning of the one that is asked for."""
    texts, thoughts, calls = [], [], []
    for block, at in _blocks(content, place):
        if block["type"] == "thinking":
            check_part(block, ("thinking", "signature"), at, "a thinking block")
            thought = block.get("thinking") or unwrapped_text(block.get("signature"), f"{at}.signature")
            if not isinstance(thought, str):
                raise field_error(f"{at}.thinking", "should be a string")
            thoughts.append(thought)
        elif block["type"] == "tool_use":
            check_part(block, ("name", "input"), at, "a tool_use")
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                raise field_error(at, "should have a name and, as input, an object")
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            texts.append(part_text(block, at, TEXT_BLOCKS))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _tools(request: CountTokensRequest) -> Tools:
    tools = []
    for n, tool in enumerate(request.tools or []):
        for key, value in tool.items():
            if key in FLAGS_OF_TOOLS and not isinstance(value, bool | None):  # 0 and 1 equal them
                raise wrong_value(f"tools[{n}].{key}", value, "true or false")
            if key not in FREE_OF_TOOLS and value not in IDLE_OF_TOOLS.get(key, (None,)):
                raise field_error(
                    f"tools[{n}].{key}",
                    f"is {shown(value)}, which is not supported: tools are run by the client"
                    " and described by their input_schema",
                )
        schema = tool.get("input_schema")
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise field_error(f"tools[{n}].input_schema", "should be a JSON schema of the type object")
        function = {key: tool.get(key) for key in ("name", "description", "strict")}
        tools.append({"type": "function", "function": {**function, "parameters": schema}})
    given = request.tool_choice or ToolChoice("auto")
    choice: str | FunctionChoice = CHOICES.get(given.type, "")
    if given.type == "tool":
        if given.name is None:
            raise field_error("tool_choice.name", "is missing; it should name a tool")
        choice = FunctionChoice.of(given.name)
    elif given.name is not None:
        raise field_error("tool_choice.name", f"should be left out with the type {given.type}")
    paths = [f"tools[{n}]" for n in range(len(tools))]
    return read_tools(tools, choice, not given.disable_parallel_tool_use, paths)


def _reasoning(served: ServedModel, thinking: Thinking) -> dict[str, Any]:
    """The template's variables for it: its switch and its budget, if it has them."""
    source = served.template.source if served.template else ""
    switch = served.template.switch if served.template else None
    if thinking.type != "enabled":
        if thinking.budget_tokens is not None:
            raise field_error("thinking.budget_tokens", f"should be left out with the type {thinking.type}")
        return {switch: False} if switch and thinking.type == "disabled" else {}
    if thinking.budget_tokens is None:
        raise field_error("thinking.budget_tokens", "is missing")
    if switch is None and served.reasoning_format == NONE:
        raise field_error(
            "thinking.type", "is enabled, but the checkpoint's chat template has no reasoning; leave it out"
        )
    variables: dict[str, Any] = {switch: True} if switch else {}
    if re.search(r"\bthinking_budget\b", source):
        variables["thinking_budget"] = thinking.budget_tokens
    return variables


class _Reply(Items):
    def __init__(self, turn: Turn, request: MessagesRequest) -> None:
        super().__init__(turn)
        self._request, self._model = request, request.model or turn.served.name
        self.id = f"msg_{secrets.token_hex(12)}"
        self._hidden = request.thinking is not None and request.thinking.type == "disabled"
        self._omitted = request.thinking is not None and request.thinking.display == "omitted"

    def _message(self, stop: tuple[str, str | None] | None) -> dict[str, Any]:
        reason, sequence = stop or (None, None)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._items if stop else [],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._tokens(whole=stop is not None),
        }

    def _tokens(self, whole: bool) -> dict[str, Any]:
        """Usage so far. whole: the answer is complete."""
        usage = self._usage.body()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
        if whole:
            thought = usage["completion_tokens_details"]["reasoning_tokens"]
            tokens["output_tokens_details"] = {"thinking_tokens": thought}
        return tokens

    async def body(self) -> dict[str, Any]:
        stops = [stop async for _, stop in self._changes()]
        return self._message(stops[-1])

    async def events(self) -> AsyncIterator[bytes]:
        begun = False
        async for changes, stop in self._changes():
            if not begun:  # once the engine has taken the request
                begun = True
                yield named_event({"type": "message_start", "message": self._message(None)})
                yield named_event({"type": "ping"})
            for change in changes:
                yield named_event(change)
            if stop is not None:
                delta = dict(zip(("stop_reason", "stop_sequence"), stop, strict=True))
                yield named_event(
                    {"type": "message_delta", "delta": delta, "usage": self._tokens(whole=True)}
                )
        yield named_event({"type": "message_stop"})

    async def _changes(self) -> AsyncIterator[tuple[list[Change], tuple[str, str | None] | None]]:
        """Events of blocks, and with the last of them why the answer ended."""
        async for changes, answer, chunk in self._chunks():
            if answer.finish is None:
                yield changes, None
            else:
                stop = self._stop(answer, chunk)
                yield changes + self._close(), (stop, self._stream.stop_word if stop == STOPPED else None)

    def _stop(self, answer: Answer, chunk: Chunk) -> str:
        called = answer.finish == "tool_calls" or self._turn.tools.named is not None
        if answer.finish == "length":
            full = self._stream.timing.sent >= self._request.max_tokens
            return "max_tokens" if full else "model_context_window_exceeded"
        if answer.calls and called and not answer.stopped_in_call:
            return "tool_use"
        # The checkpoint's own stop words end a turn.
        own = set(self._turn.served.defaults.stop_strings) - set(self._request.stop_sequences or ())
        stopped = chunk.code == protocol.FINISHED_STOP_WORDS and self._stream.stop_word not in own
        return STOPPED if stopped else "end_turn"

    def _kind(self, each: Event) -> str:
        return {CONTENT: "text", REASONING: "thinking"}.get(each.kind, "tool_use")

    def _take(self, each: Event) -> list[Change]:
        if each.kind == REASONING and self._hidden:
            return []
        return super()._take(each)

    def _begin(self, kind: str, each: Event) -> list[Change]:
        block: dict[str, Any] = {"type": kind, kind: ""}
        if kind == "thinking":
            block["signature"] = ""
        elif kind == "tool_use":
            made = each.call_id or new_call_id(self._turn.served.tool_format)
            block = {"type": kind, "id": made, "name": each.text, "input": {}}
        self._items.append(block)
        return [{"type": "content_block_start", "index": len(self._items) - 1, "content_block": dict(block)}]

    def _grow(self, each: Event) -> list[Change]:
        if each.kind == ARGUMENTS:
            return [self._delta("input_json_delta", partial_json=each.text)]
        if each.kind == CONTENT:
            return [self._delta("text_delta", text=each.text)]
        return [] if self._omitted else [self._delta("thinking_delta", thinking=each.text)]

    def _end(self, whole: bool) -> list[Change]:
        block, changes = self._items[-1], list[Change]()
        if block["type"] == "text":
            block["text"] = self._written
        elif block["type"] == "thinking":
            block["thinking"] = "" if self._omitted else self._written
            block["signature"] = wrapped_text(self._written)
            changes.append(self._delta("signature_delta", signature=block["signature"]))
        else:
            block["input"] = _input(self._written)
        return [*changes, {"type": "content_block_stop", "index": len(self._items) - 1}]

    def _delta(self, kind: str, **fields: str) -> Change:
        at = len(self._items) - 1
        return {"type": "content_block_delta", "index": at, "delta": {"type": kind, **fields}}


def _input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """A call's arguments as the model wrote them, like a stream's; none where they are no object of JSON:
    those of a call that was cut."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:  # numbers of any length
        value = json.loads(arguments, parse_int=str, parse_float=str, parse_constant=refuse)
    except (ValueError, RecursionError):
        return {}
    return msgspec.Raw(arguments.encode()) if isinstance(value, dict) else {}
