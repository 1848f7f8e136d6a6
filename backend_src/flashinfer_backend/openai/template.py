# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's chat template: messages to the text of a prompt."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flashinfer_backend.core.bounds import CONVERSATION
from flashinfer_backend.core.checkpoint_json import read_object_if_there
from flashinfer_backend.core.values import shown
from flashinfer_backend.openai import message_forms
from flashinfer_backend.openai.bounds import values
from flashinfer_backend.openai.errors import ApiError, field_error, wrong_value
from flashinfer_backend.openai.no_effect import check_part

Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
# Processor time after which no further form of a conversation is tried. One may have 40 forms, and a try of
# as many messages as there may be takes 0.1 s.
TRIES_S = 2.0
# Names by which templates ask whether the model is to reason: Qwen 3 and GLM; DeepSeek V3.1 and Granite.
SWITCHES = {
    "enable_thinking": r"\benable_thinking\b",
    "thinking": r"\bthinking is (not )?defined|\bif thinking\b",
}
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning, from little to much
# Variables that a request gives by fields of its own, and others that rendering takes.
OF_REQUEST = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("conversations", "chat_template", "return_assistant_tokens_mask"),
)
# Of a message; further ones are a template's own.
OF_MESSAGES = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "reasoning_content"),
)
# Types of content's parts, and the field of each that has the text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ChatTemplate:
    """Jinja, rendered in transformers' sandbox."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """special_tokens: such as bos_token, which templates may use. tool_source: the template for prompts
        with tools, where the checkpoint has another one for them."""
        self.source, self.tool_source = source, tool_source or source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """The template of a checkpoint folder, or of `file`; None where the folder has none.

        Raises ValueError for files that cannot be read.
        """
        config = read_object_if_there(folder / "tokenizer_config.json")
        special = {**read_object_if_there(folder / "special_tokens_map.json"), **config}
        tokens = {name: _content(value) for name, value in special.items() if name.endswith("_token")}
        tokens = {name: value for name, value in tokens.items() if isinstance(value, str)}
        found = {"default": file.read_text(encoding="utf-8")} if file else _find(folder, config)
        default = found.get("default", found.get("tool_use"))
        if default is None:
            return None
        # It takes a second, in which the first chat would hold up every stream of the process.
        import transformers.utils.chat_template_utils  # noqa: F401

        return cls(default, tokens, found.get("tool_use"))

    def reads(self, name: str) -> bool:
        """Whether prompts with tools and without make use of a variable."""
        return all(_uses(name, source) for source in (self.source, self.tool_source))

    @cached_property
    def keys(self) -> frozenset[str]:
        """What its text can read of a message, a call or a function: names behind a dot, and all texts. One
        that shows a whole object as JSON need not name its keys, and such keys are not here."""
        from jinja2 import Environment, TemplateSyntaxError

        found, before = set[str](), ""
        for source in (self.source, self.tool_source):
            with contextlib.suppress(TemplateSyntaxError):  # which rendering tells of
                for _, kind, text in Environment().lex(source):
                    if kind == "string":
                        found.add(text[1:-1])
                    elif kind == "name" and before == ".":
                        found.add(text)
                    before = text if kind != "whitespace" else before
        return frozenset(found)

    @property
    def switch(self) -> str | None:
        """The variable that switches reasoning."""
        return next((name for name, use in SWITCHES.items() if re.search(use, self.source)), None)

    def effort(self, effort: str) -> str:
        """The effort as the template takes it: the next higher one where it refuses the name, or else the
        next lower one. Names that are none of EFFORTS stay."""
        if effort not in EFFORTS or not self._efforts:
            return effort
        rank = EFFORTS.index(effort)
        return min(self._efforts, key=lambda name: ((n := EFFORTS.index(name)) < rank, abs(n - rank)))

    @cached_property
    def _efforts(self) -> list[str]:
        """Those that the template does not refuse."""
        found = []
        for effort in EFFORTS:
            with contextlib.suppress(ApiError):
                self.render([{"role": "user", "content": "?"}], variables={"reasoning_effort": effort})
                found.append(effort)
        return found

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        field: str = "messages",
    ) -> str:
        """The prompt's text. field: the request's field that holds the messages. Raises ApiError for what the
        template cannot take."""
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.tool_source if tools else self.source
        given = [name for name, value in (("tools", tools), ("documents", documents)) if value]
        if taken := [name for name in variables or {} if name in OF_REQUEST]:
            raise field_error(
                "chat_template_kwargs",
                f"has {taken[0]}, which templates get from the request's own fields;"
                " it should be left out there",
            )
        for name in given + list(variables or {}):
            if not _uses(name, source):
                known = name in ("tools", "documents")
                param = name if known else "chat_template_kwargs"
                told = name if known else f"{name} of {param}"
                raise ApiError(f"the checkpoint's chat template makes no use of {told}", param=param)

        def rendered(messages: list[dict[str, Any]], tools: Any) -> str:
            found: Any = render_jinja_template(
                [messages],
                tools=tools,
                documents=[dict(document) for document in documents] if documents else None,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **(variables or {})},
            )
            return str(found[0][0])

        errors: list[Exception] = []
        given_tools = [dict(tool) for tool in tools] if tools else None
        whole_tools = [message_forms.whole_tool(tool) for tool in tools] if tools else None
        each_tools = (given_tools, whole_tools)[: 1 if given_tools == whole_tools else 2]
        advice, until = "", time.thread_time() + TRIES_S
        forms = message_forms.forms(messages, source)
        for form, shown_tools in ((form, own) for form in forms for own in each_tools):
            if errors and time.thread_time() > until:
                advice = f". It was tried for {TRIES_S:g} s: of fewer messages it may take another form"
                break
            try:
                text = rendered(form, shown_tools)
                if message_forms.leaves_out(form, text):
                    text = rendered(message_forms.with_joined_neighbours(form, ("system",)), shown_tools)
            except RecursionError:  # tojson of one of them
                raise ApiError(
                    f"{field}, tools or chat_template_kwargs are nested too deeply for the chat template",
                    param=field,
                ) from None
            except Exception as error:  # a template may raise anything, on purpose or not
                errors.append(error)
                continue
            if "tool_calls" not in source and (name := message_forms.unnamed_call(messages, text)):
                raise field_error(
                    field,
                    f"has a call of {shown(name)}, but the checkpoint's chat template makes no use of calls;"
                    " write them and their results as content",
                )
            return text
        raise ApiError(
            f"the checkpoint's chat template refuses the messages: {errors[0]}{advice}", param=field
        ) from errors[0]


class FieldPaths(NamedTuple):
    """Where a message and its content are in the request, for errors."""

    message: str
    content: str


def plain_messages(
    messages: Messages,
    paths: Sequence[FieldPaths] | None = None,
    field: str = "messages",
    read: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Messages as templates take them: text as one string, arguments of calls as objects. paths: of each
    message (default: in `messages`). field: the request's that holds them. read: keys that the template
    reads (ChatTemplate.keys), besides the API's. Raises ApiError."""
    if not messages:
        raise field_error(field, "is empty; it should have at least one message")
    left = CONVERSATION.values
    for arguments in _written_arguments(messages):  # JSON in texts of a body, which nothing has counted
        left -= values(arguments.encode(errors="replace"), CONVERSATION.values)
        if left < 0:
            raise ApiError(
                f"the arguments of all calls in {field} have more than {CONVERSATION.values} values; they"
                " should have at most as many",
                param=field,
            )
    if paths is None:
        paths = [FieldPaths(f"messages[{n}]", f"messages[{n}].content") for n in range(len(messages))]
    return [_plain_message(message, *path, read) for message, path in zip(messages, paths, strict=True)]


def _written_arguments(messages: Messages) -> Iterator[str]:
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield function["arguments"]


def _plain_message(
    message: Mapping[str, Any], place: str, content_place: str, read: Collection[str]
) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(f"{place}.role is {shown(role)}; it should be one of {', '.join(ROLES)}", param=place)
    plain = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if role == "assistant":  # a refusal as OpenAI answers it, reasoning as vLLM does
        content = plain.pop("refusal", None) if content is None else content
        if isinstance(plain.get("reasoning"), str):
            plain.setdefault("reasoning_content", plain["reasoning"])
        if plain.pop("prefix", False) is not False:  # as other servers are asked to go on with a message
            set_both = "`continue_final_message` to true and `add_generation_prompt` to false"
            told = f"is not supported; to go on with the last message, set {set_both}"
            raise field_error(f"{place}.prefix", told)
    if content is None and role != "assistant":
        raise field_error(content_place, "is missing")
    plain["content"] = text_of(content, content_place)
    for name in ("audio", "function_call"):
        if plain.pop(name, None):
            raise field_error(f"{place}.{name}", "is not supported")
    check_part(plain, OF_MESSAGES, place, "a message", read)
    if plain.get("tool_calls"):
        calls = plain["tool_calls"]
        if role != "assistant" or not isinstance(calls, list):
            raise ApiError(f"{place}.tool_calls should be a list, of an assistant", param=place)
        place = f"{place}.tool_calls"
        plain["tool_calls"] = [_plain_call(call, f"{place}[{n}]", read) for n, call in enumerate(calls)]
    else:
        plain.pop("tool_calls", None)
    return plain


def text_of(content: Any, place: str, types: Mapping[str, str] = TEXT_PARTS, between: str = "\n") -> str:
    """The text of content, which is a string, a list of parts or None. types: those of parts, as TEXT_PARTS
    has them. Raises ApiError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise field_error(place, "should be a string or a list of parts")
    return between.join(part_text(part, f"{place}[{n}]", types) for n, part in enumerate(content))


def part_text(part: Any, place: str, types: Mapping[str, str]) -> str:
    """The text of one part. Raises ApiError."""
    if not isinstance(part, dict):
        raise wrong_value(place, part, "an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in types:
        raise field_error(
            place, f'is of type {shown(kind)}; only text is supported: {{"type": "text", "text": ...}}'
        )
    field = types[kind]
    if not isinstance(text := part.get(field), str):
        raise wrong_value(f"{place}.{field}", text, "a text")
    check_part(part, (field,), place, f"a part of type {kind}")
    return text


def _plain_call(call: Any, place: str, read: Collection[str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise field_error(place, "should hold a function with a name and arguments")
    if call.get("type") not in (None, "function"):
        raise wrong_value(f"{place}.type", call["type"], "function")
    check_part(call, ("id", "function"), place, "a call", read)
    check_part(function, ("name", "arguments"), f"{place}.function", "a call's function", read)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = _value_of(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _value_of(arguments: str) -> Any:
    """A call's arguments as templates show them. What is no JSON stays text: agents send a call that was cut
    off back, to let the model try again."""
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # ValueError: also for half a surrogate pair
        return arguments
    return value


def _uses(name: str, source: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _find(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, the newest way of storing them first."""
    if (folder / "chat_template.jinja").is_file():
        found = {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            found[file.stem] = file.read_text(encoding="utf-8")
        return found
    for holder in (read_object_if_there(folder / "chat_template.json"), config):
        template = holder.get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        if isinstance(template, list):
            return {each["name"]: each["template"] for each in template}
    return {}


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value
