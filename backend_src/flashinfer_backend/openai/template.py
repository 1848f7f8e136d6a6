# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's chat template: messages to the text of a prompt."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_backend.core.checkpoint_json import read_object_if_there
from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.errors import ApiError

Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
_ASKS_FOR_NONE = re.compile(r"content\W{0,2} is (not )?none", re.IGNORECASE)
_ASKS_FOR_IDS = re.compile(r"\bid\W{0,4}\|\s*length|call_id\W{0,4}\|\s*length")
_COUNTS_CALLS = re.compile(r"tool_calls\W{0,4}\|\s*length")
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

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises ApiError for what the template cannot take."""
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.tool_source if tools else self.source
        given = [name for name, value in (("tools", tools), ("documents", documents)) if value]
        for name in given + list(variables or {}):
            if not re.search(rf"\b{re.escape(name)}\b", source):
                param = name if name in ("tools", "documents") else "chat_template_kwargs"
                raise ApiError(f"the checkpoint's chat template makes no use of {name}", param=param)

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
        whole_tools = [_whole_tool(tool) for tool in tools] if tools else None
        for form in _forms(messages, source):
            for shown_tools in (given_tools, whole_tools)[: 1 if given_tools == whole_tools else 2]:
                try:
                    text = rendered(form, shown_tools)
                    if _leaves_out(form, text):
                        text = rendered(_with_joined_neighbours(form, ("system",)), shown_tools)
                    return text
                except Exception as error:  # a template may raise anything, on purpose or not
                    errors.append(error)
        raise ApiError(
            f"the checkpoint's chat template refuses the messages: {errors[0]}", param="messages"
        ) from errors[0]


def _forms(messages: Messages, source: str) -> Iterator[list[dict[str, Any]]]:
    """The messages in the ways that templates take them, most of them the first one."""
    first = [dict(message) for message in messages]
    for message in first:
        if message["role"] == "developer" and "developer" not in source:
            message["role"] = "system"
    seen: list[list[dict[str, Any]]] = []
    for mended in _mended(first, source):
        forms = [mended]
        if _ASKS_FOR_NONE.search(source):  # as DeepSeek-R1's does of calls; others would write "None"
            forms.insert(0, [_without_content(message) for message in mended])
        for form in forms:
            for change in (dict, _with_named_arguments, _with_written_arguments):
                changed = [change(message) for message in form]
                if changed not in seen:
                    seen.append(changed)
                    yield changed


def _mended(messages: list[dict[str, Any]], source: str) -> Iterator[list[dict[str, Any]]]:
    """The messages, and then what stands for them with a template that may refuse them."""
    yield messages
    if _ASKS_FOR_IDS.search(source):
        messages = _with_short_ids(messages)
        yield messages
    if "raise_exception" in source:
        if _COUNTS_CALLS.search(source):
            yield _with_single_calls(messages)
        yield (messages := _with_joined_neighbours(messages))
        if _COUNTS_CALLS.search(source):
            yield _with_single_calls(messages)


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with ids of nine characters, as Mistral's templates demand: another server's are longer."""

    def short(message: dict[str, Any], place: int = 0) -> dict[str, Any]:
        """place: of the call among its message's."""
        name = "tool_call_id" if message.get("role") == "tool" else "id"
        given = message.get(name)
        if isinstance(given, str) and re.fullmatch("[a-zA-Z0-9]{9}", given):
            return message
        # The same one for a call and its result; calls without any do not share one.
        said = f"{place}" if given is None else str(given)
        return {**message, name: hashlib.sha256(said.encode(errors="replace")).hexdigest()[:9]}

    changed = []
    for message in messages:
        if message["role"] == "tool":
            message = short(message)
        elif calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [short(call, n) for n, call in enumerate(calls)]}
        changed.append(message)
    return changed


def _with_single_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One call a turn, with its result behind it, for templates that take no more, as Llama 3.1's."""
    changed: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            changed.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for n, call in enumerate(calls):
            own = [r for r in results if "id" in call and r.get("tool_call_id") == call["id"]]
            changed.append({**message, "content": message["content"] if n == 0 else "", "tool_calls": [call]})
            changed += own
            results = [result for result in results if result not in own]
        changed += results
    return changed


def _leaves_out(messages: list[dict[str, Any]], text: str) -> bool:
    """Whether one of several messages of the system at the beginning is not shown: DeepSeek-R1's template
    shows the last one only, others the first."""
    said = [m["content"].strip() for m in itertools.takewhile(lambda m: m["role"] == "system", messages)]
    return len(said) > 1 and any(each not in text for each in said)


def _with_joined_neighbours(
    messages: list[dict[str, Any]], roles: Sequence[str] = ("system", "user")
) -> list[dict[str, Any]]:
    """Several turns of the user as one, for templates that want user and assistant by turns, as Mistral's;
    and those of the system at the beginning."""
    changed: list[dict[str, Any]] = []
    for message in messages:
        before = changed[-1] if changed else {}
        role = message["role"]
        alike = role in roles and role == before.get("role") and (role == "user" or len(changed) == 1)
        if alike:
            changed[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
        else:
            changed.append(message)
    return changed


def _whole_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with what OpenAI lets out, for templates that need it, as Hermes': a description and
    parameters."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _without_content(message: dict[str, Any]) -> dict[str, Any]:
    """A turn of calls alone has none, rather than no text."""
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages as templates take them: text as one string, arguments of calls as objects. Raises ApiError."""
    if not messages:
        raise ApiError("messages is empty; it should have at least one message", param="messages")
    return [_plain_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(f"{place}.role is {shown(role)}; it should be one of {', '.join(ROLES)}", param=place)
    plain = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if content is None and role != "assistant":
        raise ApiError(f"{place}.content is missing", param=f"{place}.content")
    plain["content"] = _text(content, f"{place}.content")
    for name in ("audio", "function_call"):
        if plain.pop(name, None):
            raise ApiError(f"{place}.{name} is not supported", param=f"{place}.{name}")
    if plain.get("tool_calls"):
        calls = plain["tool_calls"]
        if role != "assistant" or not isinstance(calls, list):
            raise ApiError(f"{place}.tool_calls should be a list, of an assistant", param=place)
        plain["tool_calls"] = [_plain_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
    else:
        plain.pop("tool_calls", None)
    return plain


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{place} should be a string or a list of parts", param=place)
    texts = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise ApiError(
                f"{place}[{n}] is of type {shown(kind)}; only text is supported: "
                '{"type": "text", "text": ...}',
                param=place,
            )
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{place} should hold a function with a name and arguments", param=place)
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
    except (ValueError, RecursionError):  # ValueError: of half a surrogate pair, too
        return arguments
    return value


def _with_named_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls' arguments are all objects, for templates that take them apart, as Qwen3-Coder's:
    what is none becomes the one member of one."""
    return _with_arguments(message, lambda a: a if isinstance(a, Mapping) else {"arguments": a})


def _with_written_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls' arguments are all text, for templates that join them to text, as DeepSeek's."""
    return _with_arguments(message, lambda a: a if isinstance(a, str) else json.dumps(a, ensure_ascii=False))


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


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
