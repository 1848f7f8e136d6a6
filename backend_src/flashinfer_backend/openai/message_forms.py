# SPDX-License-Identifier: Apache-2.0
"""The ways in which chat templates take messages: what one refuses, or would leave out, another form may say.

Messages are plain ones (template.plain_messages): content is text, arguments of calls are objects.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_ASKS_FOR_NONE = re.compile(r"content\W{0,2} is (not )?none", re.IGNORECASE)
_ASKS_FOR_IDS = re.compile(r"\bid\W{0,4}\|\s*length|call_id\W{0,4}\|\s*length")
_COUNTS_CALLS = re.compile(r"tool_calls\W{0,4}\|\s*length")
_SHOWS_FIRST_CALL = re.compile(r"tool_calls\[0\]")
_SHOWS_ALL_CALLS = re.compile(r"\bin \w+(\.|\[.)tool_calls\b")
INSTRUCTING = ("system", "developer")  # roles
_NAMES_THINKING = re.compile(r"\bmessage(\.|\[.)thinking\b")


def forms(messages: Sequence[Mapping[str, Any]], source: str) -> Iterator[list[dict[str, Any]]]:
    """The messages in the ways that templates take them, most of them the first one."""
    first = [dict(message) for message in messages]
    for message in first:
        if message["role"] == "developer" and "developer" not in source:
            message["role"] = "system"
        if "reasoning_content" in message and _NAMES_THINKING.search(source):  # GPT-OSS
            message.setdefault("thinking", message.pop("reasoning_content"))
    if _SHOWS_FIRST_CALL.search(source) and not _SHOWS_ALL_CALLS.search(source):
        first = _with_single_calls(first)
    seen: list[list[dict[str, Any]]] = []
    for mended in _mended(first, source):
        found = [mended]
        if _ASKS_FOR_NONE.search(source):  # as DeepSeek-R1's does of calls; others would write "None"
            found.insert(0, [_without_content(message) for message in mended])
        for form in found:
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
        if any(message.get("thinking") for message in messages):
            yield (messages := [_with_all_thought(message) for message in messages])
        for form in (messages, _with_late_instructions_by_user(messages)):
            yield form
            yield (joined := with_joined_neighbours(form))
            if _COUNTS_CALLS.search(source):
                yield _with_single_calls(joined)


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with ids of nine characters, as Mistral's templates demand: another server's are longer."""

    def short(message: dict[str, Any], place: int = 0) -> dict[str, Any]:
        """place: the call's number among those of its message."""
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
        own: dict[Any, list[dict[str, Any]]] = {call["id"]: [] for call in calls if _is_id(call.get("id"))}
        others: list[dict[str, Any]] = []
        for result in results:
            given = result.get("tool_call_id")
            (own[given] if _is_id(given) and given in own else others).append(result)
        without = {**message, "content": ""}
        without.pop("thinking", None)
        for n, call in enumerate(calls):
            changed.append({**(without if n else message), "tool_calls": [call]})
            if _is_id(call.get("id")):
                changed += own.pop(call["id"], [])
        changed += others
    return changed


def _with_all_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A turn of calls with its text as a part of its reasoning, for templates that take one of them, as
    GPT-OSS's."""
    if not (message.get("tool_calls") and message.get("thinking") and message["content"]):
        return message
    return {**message, "thinking": f"{message['thinking']}\n{message['content']}", "content": ""}


def _with_late_instructions_by_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the system that come later than at the beginning become the user's, in their places, for
    templates that refuse them there, as Qwen3.5's. Agents send such messages."""
    first = next((n for n, m in enumerate(messages) if m["role"] not in INSTRUCTING), len(messages))
    late = [{**m, "role": "user"} if m["role"] in INSTRUCTING else m for m in messages[first:]]
    return messages[:first] + late


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int)


def unnamed_call(messages: Sequence[Mapping[str, Any]], text: str) -> str:
    """The name of the first function that was called, where `text` has neither it nor the last one's; else
    "". To look for many in a long text would take seconds."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = [str(call["function"]["name"]) for call in (*calls[:1], *calls[-1:])]
    return "" if any(name in text for name in names) else "".join(names[:1])


def leaves_out(messages: list[dict[str, Any]], text: str) -> bool:
    """Whether one of several messages of the system at the beginning is not shown: DeepSeek-R1's template
    shows the last one only, others the first."""
    said = [m["content"].strip() for m in itertools.takewhile(lambda m: m["role"] == "system", messages)]
    at = 0
    for each in said if len(said) > 1 else ():  # each one's search goes on where the one before was found
        at = text.find(each, at)
        if at < 0:
            return True
    return False


def with_joined_neighbours(
    messages: list[dict[str, Any]], roles: Sequence[str] = ("system", "user")
) -> list[dict[str, Any]]:
    """Several turns of the user as one, for templates that want user and assistant by turns, as Mistral's;
    and those of the system at the beginning."""
    runs: list[list[dict[str, Any]]] = []
    for message in messages:
        role, before = message["role"], runs[-1][0]["role"] if runs else ""
        if role in roles and role == before and (role == "user" or len(runs) == 1):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [
        {**run[0], "content": "\n\n".join(m["content"] for m in run)} if len(run) > 1 else run[0]
        for run in runs
    ]


def whole_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
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
