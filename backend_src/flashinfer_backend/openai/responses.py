# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: text, reasoning and calls of tools. Responses are kept only with --store-mib."""

import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw
from starlette.responses import Response

from flashinfer_backend.core.bounds import CONVERSATION, NAME
from flashinfer_backend.core.output import say_once
from flashinfer_backend.core.values import shown, some
from flashinfer_backend.openai.answer import encode, respond, unwrapped_text, wrapped_text
from flashinfer_backend.openai.bounds import check_field, values
from flashinfer_backend.openai.chat import Conversation, Turn, add_effort
from flashinfer_backend.openai.errors import ApiError, field_error, wrong_value
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, CONTENT, Event
from flashinfer_backend.openai.items import Change, Items, named_event
from flashinfer_backend.openai.no_effect import check_part, check_value
from flashinfer_backend.openai.requests import (
    ENCRYPTED_REASONING,
    AllowedChoice,
    AllowedFunctions,
    CustomToolName,
    FunctionChoice,
    ItemsQuery,
    ResponseFormat,
    ResponsesRequest,
    ToolName,
)
from flashinfer_backend.openai.response_store import ResponseStore
from flashinfer_backend.openai.sampling import Guide, guide_of, shortened
from flashinfer_backend.openai.served_model import Answering, ServedModel
from flashinfer_backend.openai.template import TEXT_PARTS, FieldPaths, plain_messages, text_of
from flashinfer_backend.openai.tools import AUTO, new_call_id, read_tools
from flashinfer_backend.structured.grammar import GrammarError
from flashinfer_backend.structured.regex import rust_regex

# Tools that OpenAI's servers run, or whose calls are items of their own.
LEFT_OUT = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
    *("computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search"),
)
LARK = "custom with a Lark grammar"  # which nothing can keep to inside JSON
INPUT = "input"  # of a custom tool, the one parameter of the function that the model sees in its place
BEGUN_INPUT = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
LONGEST_ESCAPE = 12  # characters: two halves of one character outside the first 65536
CALL_FIELDS = {"function_call": "arguments", "custom_tool_call": INPUT}
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
# Items' parts, and the names of their events.
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
THOUGHTS = {**TEXT_PARTS, "summary_text": "text", "reasoning_text": "text"}
_CALLED = ("call_id", "name", "namespace")
ITEMS = {  # and their fields, beside those of OF_PARTS
    "message": ("role", "content"),
    **{kind: (*_CALLED, field) for kind, field in CALL_FIELDS.items()},
    **dict.fromkeys(CALL_OUTPUTS, (*_CALLED, "output")),
    "reasoning": ("summary", "content", "encrypted_content", "signature"),  # Anthropic's
}
REFERENCE = "item_reference"  # in the input, to an item of an earlier response


class Offered(NamedTuple):
    """A function or a custom tool: its namespace, the function that a chat has for it, whose name begins with
    the namespace, and its place in the request."""

    namespace: str | None
    tool: dict[str, Any]
    place: str
    custom: bool


def responses(served: ServedModel, request: ResponsesRequest) -> Answering:
    turn, lists = _read(served, request)

    async def answer() -> Response:
        most = request.max_output_tokens
        await turn.submit(request, 1, most, "max_output_tokens", request.log_probs, request.top_logprobs or 0)
        return respond(served, turn.streams, _Reply(turn, request, lists), request.stream)

    return answer


def input_tokens(served: ServedModel, request: ResponsesRequest) -> Answering:
    """/v1/responses/input_tokens, which takes the body of a response. Raises ApiError."""
    turn, _ = _read(served, request)

    async def answer() -> dict[str, Any]:
        await turn.encode()
        prompt = shortened(turn.prompt, request, served.limits)
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    return answer


def reads_kept(request: ResponsesRequest) -> bool:
    """Whether the work grows with kept responses, which can be large whatever the request's own size is."""
    listed = request.input if isinstance(request.input, list) else []
    return request.previous_response_id is not None or any(map(_refers, listed))


def _read(served: ServedModel, request: ResponsesRequest) -> tuple[Turn, tuple[bytes, ...]]:
    """The turn, prepared, and if the response is to be kept, the conversation as JSON lists, of which the
    first is the store's own: open requests that go on from a large response share it. Raises ApiError."""
    kept, earlier = b"[]", list[dict[str, Any]]()
    if request.store:
        store_of(served, "store")
    if request.previous_response_id is not None:
        kept = store_of(served, "previous_response_id").items(
            request.previous_response_id, "previous_response_id"
        )
        earlier = _earlier_items(kept, request)
    if isinstance(request.input, list):
        request.input = without_references(served, request.input)
    variables = dict(request.chat_template_kwargs or {})
    reasoning = {name: value for name, value in (request.reasoning or {}).items() if value is not None}
    reasoning.pop("summary", None)  # reasoning is there whole
    if "effort" in reasoning:
        add_effort(served, variables, reasoning.pop("effort"), "reasoning.effort")
    if reasoning:
        raise ApiError(f"reasoning.{next(iter(reasoning))} is not supported", param="reasoning")
    offered = offered_tools(request.tools or [])
    if request.tools and not offered and request.tool_choice not in (None, "auto", "none"):
        types = some(sorted({str(left_out(tool)) for tool in request.tools}))
        raise field_error("tool_choice", f"is set, but this server leaves out all of the tools: {types}")
    conversation = Conversation(
        plain_messages(*messages_of(request, earlier), field="input"),
        read_tools(
            [one.tool for one in offered],
            _tool_choice(request, offered),
            request.parallel_tool_calls,
            [one.place for one in offered],
        ),
        _guide(request),
        request.structured_outputs is None,
        variables,
        field="input",
    )
    turn = Turn(served, conversation, bool(request.stream))
    turn.prepare(request)
    lists: tuple[bytes, ...] = ()
    if served.store is not None and request.store is not False:  # OpenAI's API keeps by default
        lists = kept, _kept_list(input_items(request))
    request.input = ""
    return turn, lists


def _kept_list(items: Sequence[dict[str, Any]]) -> bytes:
    """Items as a JSON list, without log probabilities, which would be most of a conversation's values."""

    def plain(part: Any) -> Any:
        return {**part, "logprobs": []} if isinstance(part, dict) and part.get("logprobs") else part

    return encode(
        [
            {**item, "content": list(map(plain, item["content"]))}
            if isinstance(item.get("content"), list)
            else item
            for item in items
        ]
    )


def _joined(lists: Iterable[bytes]) -> bytes:
    """JSON lists as one."""
    return b"[" + b",".join(inner for each in lists if (inner := each[1:-1])) + b"]"


def _earlier_items(kept: bytes, request: ResponsesRequest) -> list[dict[str, Any]]:
    """The items of the response before a request. Raises ApiError where they and the input are more than a
    conversation may have."""
    most, new = CONVERSATION.values, input_items(request)
    if (found := values(kept, most)) + values(encode(new), most) > most:
        raise ApiError(
            f"the conversation has {found} values before input; with input it should have at most {most}",
            param="previous_response_id",
        )
    earlier: list[dict[str, Any]] = msgspec.json.decode(kept)
    if len(earlier) + len(new) > (CONVERSATION.items or 0):
        raise ApiError(
            f"the conversation has {len(earlier)} items before input; with input it should have at most"
            f" {CONVERSATION.items}",
            param="previous_response_id",
        )
    return earlier


def store_of(served: ServedModel, param: str | None = None) -> ResponseStore:
    """Raises ApiError where responses are not kept."""
    if served.store is None:
        raise ApiError(
            f"{param or 'the path'} needs kept responses: this server keeps none (--store-mib)",
            404 if param is None else 400,
            param,
        )
    return served.store


def input_page(store: ResponseStore, name: str, query: ItemsQuery) -> dict[str, Any]:
    """A page of the items that a kept response was made of. Raises ApiError."""
    digits = name.removeprefix("resp_")
    items: dict[str, dict[str, Any]] = {}  # by id, of which clients can have given the same one twice
    for n, item in enumerate(store.input(name)):
        own = f"{digits}{n:04x}"
        named = _with_id(item, own)
        if named["id"] in items:  # pages go on behind an id
            named = _with_id({**item, "id": None}, own)
        items[named["id"]] = named
    ids = list(items)
    if query.order == "desc":
        ids.reverse()
    begin = 0
    if query.after is not None:
        if query.after not in ids:
            raise field_error("after", f"is {shown(query.after)}, which is no item of {name}")
        begin = ids.index(query.after) + 1
    page = [items[each] for each in ids[begin : begin + query.limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(items),
    }


def _with_id(item: dict[str, Any], name: str) -> dict[str, Any]:
    """An item as answers have it, with its id, or where it has none, with one that ends with `name`."""
    kind, content, own = item.get("type", "message"), item.get("content"), item.get("id")
    if kind == "message" and isinstance(content, str):
        text = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": text, "text": content}]}
    if not own or not isinstance(own, str):
        own = f"{ID_PREFIXES.get(kind, 'item')}_{name}"
    return {**item, "id": own, "type": kind}


def _refers(item: Mapping[str, Any]) -> bool:
    """Whether it stands for a kept item. Its type may be left out."""
    kind = item.get("type")
    return kind == REFERENCE or (kind is None and "id" in item and item.keys() <= {"id", "type"})


def without_references(served: ServedModel, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input with kept items in place of references to them. Raises ApiError."""
    numbers: dict[str, int] = {}
    for n, item in enumerate(items):
        if isinstance(own := item.get("id"), str):
            check_field(f"input[{n}].id", len(own), NAME.size, "characters")
        if _refers(item):
            if not isinstance(name := item.get("id"), str):
                raise wrong_value(f"input[{n}].id", name, "a text")
            if name in numbers:  # each once, so that a small body stands for no more than what is kept
                raise field_error(
                    f"input[{n}]", f"refers to the same item as input[{numbers[name]}]; drop one"
                )
            numbers[name] = n
    if not numbers:
        return items
    found = store_of(served, f"input[{min(numbers.values())}]").outputs(numbers)
    for name, n in numbers.items():
        if name not in found:
            raise field_error(
                f"input[{n}]",
                f"refers to {shown(name)}, which is not kept: its response was not stored, was deleted, or"
                " gave way to newer ones (--store-mib). Send the item itself",
            )
    return [found[item["id"]] if _refers(item) else item for item in items]


def messages_of(
    request: ResponsesRequest, earlier: Sequence[dict[str, Any]] = ()
) -> tuple[list[dict[str, Any]], list[FieldPaths]]:
    """The input as messages of a chat, behind the items of earlier responses, and the place of each in the
    request. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    paths: list[FieldPaths] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
        paths.append(FieldPaths("instructions", "instructions"))
    if isinstance(request.input, str) and not earlier:
        return [*messages, {"role": "user", "content": request.input}], [*paths, FieldPaths("input", "input")]
    if request.input == []:
        raise field_error("input", "is empty; it should have at least one item")
    # Earlier items, which were right when they came, have numbers below 0.
    for n, item in enumerate([*earlier, *input_items(request)], start=-len(earlier)):
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in ITEMS:
            raise wrong_value(f"input[{n}].type", kind, f"one of {', '.join((*ITEMS, REFERENCE))}")
        check_part(item, ITEMS[kind], f"input[{n}]", f"an item of type {kind}")
        if kind == "message":
            _add(messages, {"role": item.get("role"), "content": item.get("content")})
        elif kind in CALL_FIELDS:
            name, namespace, said = item.get("name"), item.get("namespace"), item.get(CALL_FIELDS[kind])
            custom = kind == "custom_tool_call"
            for field, value, taken in (
                ("name", name, str),
                ("namespace", namespace, str | None),
                (CALL_FIELDS[kind], said, str if custom else str | dict | None),
            ):
                if not isinstance(value, taken):
                    raise wrong_value(f"input[{n}].{field}", value, "a text")
            _check_call_id(item, n)
            if custom:
                said = encode({INPUT: said}).decode()
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": flat_name(namespace, str(name)), "arguments": said},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in CALL_OUTPUTS:
            _check_call_id(item, n)
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(output)
        else:
            # All three may be there: the whole text, the same encoded, and a summary by another server.
            summary = text_of(item.get("summary"), f"input[{n}].summary", THOUGHTS, "\n\n")
            text = text_of(item.get("content"), f"input[{n}].content", THOUGHTS, "")
            text = text or unwrapped_text(item.get("encrypted_content"), f"input[{n}].encrypted_content")
            text = text or summary
            if not text:
                continue
            _add(messages, {"role": "assistant", "content": None, "reasoning_content": text})
        content = "output" if kind in CALL_OUTPUTS else "content"
        paths[len(messages) - 1 :] = [FieldPaths(f"input[{n}]", f"input[{n}].{content}")]
    if not messages:
        raise field_error("input", "holds only reasoning without text; it should have a message")
    return messages, paths


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Reasoning belongs to the answer that follows it."""
    before = messages[-1] if messages else {}
    if message["role"] == "assistant" == before.get("role") and before["content"] is None:
        thoughts = [each["reasoning_content"] for each in (before, message) if "reasoning_content" in each]
        before.update({key: value for key, value in message.items() if value is not None})
        if thoughts:
            before["reasoning_content"] = "\n".join(thoughts)
    else:
        messages.append(message)


def _check_call_id(item: Mapping[str, Any], number: int) -> None:
    if not isinstance(call_id := item.get("call_id"), str | None):
        raise wrong_value(f"input[{number}].call_id", call_id, "a text")


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input, text as an item."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> list[Offered]:
    """Functions and custom tools, those in namespaces as well. Tools that OpenAI runs are left out: agents
    offer them to every server. Raises ApiError."""
    found: list[Offered] = []
    for tool, namespace, place in _flat(tools):
        kind = tool.get("type")
        if (reason := left_out(tool)) is not None:
            say_once(f"openai: tools of type {reason} are left out of requests to /v1/responses")
        elif kind in ("function", "custom"):
            found.append(_offered(tool, namespace, place))
        else:
            raise wrong_value(f"{place}.type", kind, "function, custom or namespace")
    return found


def _flat(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str | None, str]]:
    """Each tool, its namespace and its place. Raises ApiError."""
    for n, tool in enumerate(tools):
        name, inner, place = tool.get("name"), tool.get("tools"), f"tools[{n}]"
        if tool.get("type") != "namespace":
            yield tool, None, place
            continue
        if not isinstance(name, str) or not name:
            raise wrong_value(f"{place}.name", name, "a text that is not empty")
        if not isinstance(inner, list):
            raise wrong_value(f"{place}.tools", inner, "a list of functions and custom tools")
        for k, one in enumerate(inner):
            if not isinstance(one, dict) or one.get("type") not in ("function", "custom"):
                raise field_error(f"{place}.tools[{k}]", "should be a function or a custom tool")
            yield one, name, f"{place}.tools[{k}]"


def left_out(tool: Mapping[str, Any]) -> str | None:
    """What a tool is that is left out; None for others."""
    kind, form = tool.get("type"), tool.get("format")
    if kind == "custom" and isinstance(form, dict) and form.get("syntax") == "lark":
        return LARK
    return kind if kind in LEFT_OUT else None


def _offered(tool: Mapping[str, Any], namespace: str | None, place: str) -> Offered:
    custom = tool["type"] == "custom"
    function = {key: value for key, value in tool.items() if key not in ("type", "defer_loading")}
    if function.get("allowed_callers") == ["direct"]:  # the model, and no code that it wrote
        del function["allowed_callers"]
    if custom:
        form = function.pop("format", None)
        if unknown := sorted(function.keys() - {"name", "description"}):
            raise ApiError(f"{place}.{unknown[0]} is not a field of a custom tool", param="tools")
        function |= _custom_function(form, place)
    if isinstance(tool.get("name"), str):
        function["name"] = flat_name(namespace, tool["name"])
    return Offered(namespace, {"type": "function", "function": function}, place, custom)


def _custom_function(form: Any, place: str) -> dict[str, Any]:
    """The parameters of the function in place of a custom tool whose input has a format. Raises ApiError."""
    text: dict[str, Any] = {"type": "string"}
    if form is not None and not isinstance(form, dict):
        raise wrong_value(f"{place}.format", form, "an object with a type")
    form = form or {"type": "text"}
    kind = form.get("type")
    if kind == "grammar":
        regex = form.get("definition")
        if form.get("syntax") != "regex" or not isinstance(regex, str):
            raise ApiError(
                f"{place}.format should have the syntax regex and a text as definition", param="tools"
            )
        text["pattern"] = f"^(?:{regex})$"
        try:
            rust_regex(regex)  # alone: inside the group `a)|(?:b` would be valid
            rust_regex(text["pattern"])
        except GrammarError as error:
            raise ApiError(f"{place}.format.definition: {error}", param="tools") from None
    elif kind != "text":
        raise wrong_value(f"{place}.format.type", kind, "text or grammar")
    known = {"type", "syntax", "definition"} if kind == "grammar" else {"type"}
    if unknown := sorted(form.keys() - known):
        raise ApiError(f"{place}.format.{unknown[0]} is not a field of the format {kind}", param="tools")
    return {
        "strict": kind == "grammar",
        "parameters": {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }


def _input_of(arguments: str) -> str:
    """The input of a custom tool's call, as far as it goes if the call was cut; all that the model wrote
    where that is no object with one."""
    begun = BEGUN_INPUT.match(arguments)
    ends = range(len(arguments), max(begun.end(), len(arguments) - LONGEST_ESCAPE) - 1, -1) if begun else ()
    for text in (arguments, *(f'{arguments[:end]}"}}' for end in ends)):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, KeyError):
            return msgspec.json.decode(text, type=dict[str, str])[INPUT]
    return arguments


def shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool in an answer, with the fields that all functions have there."""
    return {"strict": None, "parameters": None, **tool} if tool.get("type") == "function" else tool


def flat_name(namespace: str | None, name: str) -> str:
    """A function's name for the model."""
    return f"{namespace}__{name}" if namespace else name


def _tool_choice(
    request: ResponsesRequest, offered: Sequence[Offered]
) -> str | FunctionChoice | AllowedChoice:
    """tool_choice as a chat has it. Raises ApiError."""
    choice = request.tool_choice or AUTO
    if isinstance(choice, str):
        return choice
    kinds = {str(one.tool["function"].get("name")): "custom" if one.custom else "function" for one in offered}

    def function(named: ToolName, place: str) -> FunctionChoice:
        name, given = flat_name(named.namespace, named.name), "function"
        if isinstance(named, CustomToolName):
            given = "custom"
        if (kind := kinds.get(name, given)) != given:
            raise field_error(f"{place}.type", f"is {given}; it should be {kind}, as that of {named.name} is")
        return FunctionChoice.of(name)

    if isinstance(choice, ToolName):
        return function(choice, "tool_choice")
    allowed = [function(named, f"tool_choice.tools[{n}]") for n, named in enumerate(choice.tools)]
    return AllowedChoice(AllowedFunctions(choice.mode, allowed))


def _guide(request: ResponsesRequest) -> Guide:
    text = {name: value for name, value in (request.text or {}).items() if value is not None}
    form = text.pop("format", None)
    check_value("verbosity", text.pop("verbosity", None), "text.verbosity")
    if text:
        raise ApiError(f"text.{next(iter(text))} is not supported", param="text")
    if form is None:
        return guide_of(None, request)
    if not isinstance(form, dict):
        raise wrong_value("text.format", form, "an object with a type")
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong_value("text.format.type", kind, "text, json_object or json_schema")
    schema = {key: value for key, value in form.items() if key != "type"}
    return guide_of(ResponseFormat(kind, schema or None), request, "text.format")


class _Reply(Items):
    def __init__(self, turn: Turn, request: ResponsesRequest, lists: Sequence[bytes]) -> None:
        super().__init__(turn)
        self._request, self._lists = request, lists
        self._model = request.model or turn.served.name
        self.id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._offered = {one.tool["function"]["name"]: one for one in offered_tools(request.tools or [])}
        self._number = 0  # of events
        self._top = request.top_logprobs or 0 if request.log_probs else None
        self._log_probs: list[Raw] = []  # of the last item
        self._finish: str | None = None
        self.store = turn.served.store if lists else None
        if self.store is not None:
            self.store.begin(self.id, self)

    def _done(self) -> dict[str, Any]:
        """The whole response, kept if it is to be."""
        response = self._response("incomplete" if self._finish == "length" else "completed", self._finish)
        if self.store is not None:
            self.store.put(self.id, _joined((*self._lists, _kept_list(self._items))), response)
        return response

    def _response(self, status: str, finish: str | None = None) -> dict[str, Any]:
        request = self._request
        body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": self.store is not None,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "top_logprobs": request.top_logprobs or 0,
            "tools": [shown_tool(tool) for tool in request.tools or [] if left_out(tool) is None],
            "top_p": request.top_p,
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "usage": None,
        }
        if finish is not None:
            usage = self._usage.body()
            details = usage["completion_tokens_details"]
            body["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": details["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            }
        return body

    async def body(self) -> dict[str, Any]:
        async for _ in self._changes():
            pass
        return self._done()

    async def events(self) -> AsyncIterator[bytes]:
        begun = False
        async for changes in self._changes():
            if not begun:  # once the engine has taken the request
                begun = True
                for kind in ("response.created", "response.in_progress"):
                    response = {**self._response("in_progress"), "output": []}
                    yield self._event({"type": kind, "response": response})
            for change in changes:
                yield self._event(change)
        response = self._done()
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, change: Change) -> bytes:
        self._number += 1
        return named_event({**change, "sequence_number": self._number - 1})

    async def _changes(self) -> AsyncIterator[list[Change]]:
        async for changes, answer, _ in self._chunks():
            if answer.finish is not None:
                self._finish = answer.finish
                changes += self._close(answer.finish != "length" and not answer.stopped_in_call)
            yield changes

    def _kind(self, each: Event) -> str:
        if each.kind == ARGUMENTS:
            return str(self._items[-1]["type"])
        if each.kind == CALL:
            offered = self._offered.get(each.text)
            return "custom_tool_call" if offered is not None and offered.custom else "function_call"
        return "message" if each.kind == CONTENT else "reasoning"

    def _begin(self, kind: str, each: Event) -> list[Change]:
        item: dict[str, Any] = {"type": kind, "id": f"{ID_PREFIXES[kind]}_{secrets.token_hex(16)}"}
        if kind in CALL_FIELDS:
            item |= {"name": each.text, CALL_FIELDS[kind]: ""}
            offered = self._offered.get(each.text)
            if offered is not None and (space := offered.namespace):
                item |= {"namespace": space, "name": each.text[len(flat_name(space, "")) :]}
            item["call_id"] = each.call_id or new_call_id(self._turn.served.tool_format)
        else:
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            item |= {**more, "content": []}
        item["status"] = "in_progress"
        self._items.append(item)
        self._log_probs = []
        changes: list[Change] = [
            {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": {**item}}
        ]
        if kind in TEXTS:
            changes.append(
                {"type": "response.content_part.added", **self._place(), "part": self._part(kind, "")}
            )
        return changes

    def _grow(self, each: Event) -> list[Change]:
        kind = self._items[-1]["type"]
        if kind == "custom_tool_call":  # its input is known at its end
            return []
        what = TEXTS.get(kind, "function_call_arguments")
        change = {"type": f"response.{what}.delta", **self._place(), "delta": each.text}
        self._log_probs += each.log_probs
        return [change | ({"logprobs": each.log_probs} if kind == "message" else {})]

    def _end(self, whole: bool) -> list[Change]:
        item, text, place = self._items[-1], self._written, self._place()
        item["status"] = "completed" if whole else "incomplete"
        changes: list[Change] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            changes.append({"type": "response.function_call_arguments.done", **place, **done})
        elif item["type"] == "custom_tool_call":
            text = item[INPUT] = _input_of(text)
            kind = "response.custom_tool_call_input"
            changes += [{"type": f"{kind}.delta", **place, "delta": text}] * bool(text)
            changes.append({"type": f"{kind}.done", **place, INPUT: text})
        else:
            kind = item["type"]
            item["content"] = [self._part(kind, text)]
            if kind == "reasoning" and ENCRYPTED_REASONING in (self._request.include or []):
                item["encrypted_content"] = wrapped_text(text)
            more: dict[str, Any] = {"logprobs": self._log_probs} if kind == "message" else {}
            changes.append({"type": f"response.{TEXTS[kind]}.done", **place, "text": text, **more})
            changes.append({"type": "response.content_part.done", **place, "part": self._part(kind, text)})
        last = {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": {**item}}
        return [*changes, last]

    def _place(self) -> dict[str, Any]:
        """Where the last item is, and in it its text."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if item["type"] in TEXTS else {})

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        """The one part of the content of an item."""
        part = {"type": TEXTS[kind], "text": text}
        return part | ({"annotations": [], "logprobs": [*self._log_probs]} if kind == "message" else {})
