# SPDX-License-Identifier: Apache-2.0
"""Guides for answers that may call functions by themselves: text is free, or JSON of a response_format, and
calls match their schemas.

A guide is a structural tag of xgrammar (structured/compiler.py). It reads the text as the format's reader
does (formats/): what the reader takes for a call, the guide holds to one of the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from flashinfer_backend.core.sampling_params import CALLS_GUIDE, CONTENT
from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.formats.calls import HermesReader, Llama3Reader, MistralReader
from flashinfer_backend.openai.formats.choice import WITH_SPECIAL_TOKENS
from flashinfer_backend.openai.formats.harmony import ENDS, MESSAGE
from flashinfer_backend.openai.formats.qwen_xml import (
    END_CALL,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    QwenXmlReader,
    plain_text,
)
from flashinfer_backend.openai.formats.reasoning import CLOSE, OPEN
from flashinfer_backend.openai.sampling import ANY_OBJECT, Guide

Format = dict[str, Any]
Functions = Mapping[str, Mapping[str, Any] | None]  # parameters by name; None: any object
CALLS_OR_JSON = ("hermes", "mistral", "llama3_json", "qwen3_coder")  # formats that go with such a schema
_MARKS: dict[str, tuple[str, ...] | None] = {  # special tokens of calls
    "mistral": (MistralReader.mark, *MistralReader.parts[:2]),
    "llama3_json": (Llama3Reader.mark,),
}
BLANKS = r"[ \n\r\t]{0,8}"
# Keywords of a function's parameters, beside those that are said with a tag for each property.
_NOT_IN_XML = (
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "enum", "const", "allOf", "anyOf", "oneOf",
    "$ref", "not", "if", "$dynamicRef", "$recursiveRef",
)  # fmt: skip


def calls_guide(
    functions: Functions, tool_format: str, reasoning: str, inside: bool, content: str | None = None
) -> Guide:
    """functions: all that may be called, with the schemas of strict ones. inside: the prompt opens the
    reasoning. content: a JSON schema; an answer without calls is JSON of it, for CALLS_OR_JSON and without
    reasoning. Raises ApiError for parameters that are not an object's, and for what the format cannot say."""
    for name, schema in functions.items():
        if schema is not None and schema.get("type") != "object":
            raise ApiError(
                f"the function {name} is strict, so its parameters should be a schema of type object",
                param="tools",
            )
    if reasoning == "harmony":  # then all of the text is read as Harmony
        tool_format = reasoning
    if content is None:
        answer = _FORMATS[tool_format](functions)
    else:
        answer = _either(_json_of(CONTENT), _calls_alone(functions, tool_format))
    if reasoning == "think":
        answer = _after_thinking(answer, inside)
    schemas = {name: ANY_OBJECT if schema is None else schema for name, schema in functions.items()}
    if content is not None:
        schemas[CONTENT] = msgspec.json.decode(content)
    # Which special tokens are text. With all of them, JSON of the content could hold what ends a sequence.
    special = _MARKS.get(tool_format, ())
    if content is None and tool_format in WITH_SPECIAL_TOKENS:
        special = None
    tag = {"special_tokens": special, "functions": schemas, "format": answer}
    return CALLS_GUIDE, msgspec.json.encode(tag).decode()


def _after_thinking(answer: Format, inside: bool) -> Format:
    """What the model thinks is free, also where it looks like a call."""
    rest = _sequence(_text(CLOSE), _optional(_sequence(_const(CLOSE), answer)))
    if inside:
        return rest
    return _either(_sequence(_regex(r"\s*"), _const(OPEN), rest), answer)


def _hermes(functions: Functions) -> Format:
    call = _sequence(
        _regex(BLANKS), _json_call(functions, "arguments"), _regex(BLANKS), _const(HermesReader.close)
    )
    return _free_until(HermesReader.mark, call)


def _mistral(functions: Functions) -> Format:
    call = _json_call(functions, "arguments")
    more = _repeated(_sequence(_regex(f"{BLANKS},{BLANKS}"), call))
    listed = _sequence(_regex(rf"\[{BLANKS}"), call, more, _regex(rf"{BLANKS}\]"))
    call_id, arguments, _ = MistralReader.parts
    named = [
        _sequence(
            _const(name),
            _optional(_sequence(_const(call_id), _regex("[a-zA-Z0-9]+"))),
            _optional(_const(arguments)),
            _json_of(name),
        )
        for name in functions
    ]
    return _free_until(MistralReader.mark, _sequence(_regex(BLANKS), _either(listed, *named)))


def _llama3(functions: Functions) -> Format:
    """The answer is calls, or text that begins with neither a brace nor the mark."""
    call, text = _json_call(functions, "parameters"), _text()
    rest = _optional(_sequence(_regex(r"[^{; \t\r\n]"), text))
    calls = _sequence(call, _repeated(_sequence(_regex(r"[; \t\r\n]*"), call)), _regex(r"[; \t\r\n]*"), rest)
    mark, rest_of_mark = Llama3Reader.mark, Llama3Reader.mark[1:]
    marked = _sequence(_regex(r"[ \t\r\n]*"), _either(calls, _sequence(_regex(r"[^{ \t\r\n]"), text)))
    return _sequence(
        _regex(r"[ \t\r\n]*"),
        _optional(
            _either(
                calls,
                _sequence(_const(mark), _optional(marked)),
                _sequence(_regex(r"[^{< \t\r\n]"), text),
                _sequence(_const(mark[0]), _text(rest_of_mark)),
            )
        ),
    )


def _harmony(functions: Functions) -> Format:
    """Messages: a header, which names a function or none, and a body."""
    header = _text("to=", MESSAGE, *ENDS)
    # What follows a function's name in the header; `<|message|>` ends it at once.
    to_body = _either(
        _const(MESSAGE),
        _sequence(_const(" "), _text("to=", MESSAGE, *ENDS), _const(MESSAGE)),
        _sequence(_const("<|"), _text("to=", MESSAGE, MESSAGE[2:], *ENDS), _const(MESSAGE)),
    )
    calls = [_sequence(_const(name), to_body, _json_of(name), _regex(BLANKS)) for name in functions]
    message = _sequence(
        header,
        _optional(
            _either(
                _sequence(_const(MESSAGE), _text(*ENDS)),
                _sequence(_const("to=functions."), _either(*calls)),
            )
        ),
    )
    return _sequence(message, _repeated(_sequence(_either(*map(_const, ENDS)), message)))


def _qwen3_coder(functions: Functions) -> Format:
    """xgrammar's own `qwen_xml` admits blanks that become part of a text, texts with `</parameter>` in them
    where the schema bounds them, and, for a choice of text and number, texts that read as numbers."""
    calls = [
        _sequence(
            _const(f"{FUNCTION}{name}>"),
            _regex(BLANKS),
            *(_ANY_PARAMETERS if schema is None else _xml_parameters(name, schema)),
            _const(END_FUNCTION),
        )
        for name, schema in functions.items()
    ]
    call = _sequence(_regex(BLANKS), _either(*calls), _regex(BLANKS), _const(END_CALL))
    return _free_until(QwenXmlReader.mark, call)


def _xml_parameters(function: str, schema: Mapping[str, Any]) -> list[Format]:
    """Each property in its order, those that are not required perhaps."""
    unsupported = [keyword for keyword in _NOT_IN_XML if schema.get(keyword)]
    if schema.get("additionalProperties", False) is not False:
        unsupported.append("additionalProperties")
    if unsupported:
        raise _not_in_xml(function, f"have {unsupported[0]!r} at the top")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _not_in_xml(function, "should have an object of 'properties' and a list of those 'required'")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise _not_in_xml(function, f"require {shown(name)}, which is not in 'properties'")
    elements = []
    for name in properties:
        if not name or name != name.strip() or ">" in name:
            raise _not_in_xml(function, f"have a property {shown(name)}, a name that a tag cannot hold")
        element = _xml_parameter(_const(name), _xml_value(function, name, schema))
        elements.append(element if name in required else _optional(element))
    return elements


def _not_in_xml(function: str, what: str) -> ApiError:
    return ApiError(
        f"the parameters of {function} {what}; that cannot be kept to in the format qwen3_coder. Write them"
        " without, or leave strict out",
        param="tools",
    )


def _xml_value(function: str, name: str, schema: Mapping[str, Any]) -> Format:
    """Text as it is, where the reader takes any text for one that the schema admits; else JSON."""
    text = plain_text(schema["properties"][name], schema)
    if text is None:
        part = name.replace("~", "~0").replace("/", "~1")
        return {"type": "json_schema", "function": function, "at": f"#/properties/{quote(part)}"}
    if text.values is None:
        return _text(END_PARAMETER)  # null, too
    return _either(*map(_const, (*text.values, *(("null",) if text.null else ()))))


def _xml_parameter(name: Format, value: Format) -> Format:
    """A value has a line of its own; the reader takes one line break off each end."""
    begin, end = [_const(PARAMETER), name, _const(">\n")], [_const("\n" + END_PARAMETER), _regex(BLANKS)]
    return _sequence(*begin, value, *end)


_FORMATS: dict[str, Callable[[Functions], Format]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "llama3_json": _llama3,
    "harmony": _harmony,
    "qwen3_coder": _qwen3_coder,
}


def _json_call(functions: Functions, key: str) -> Format:
    """{"name": ..., key: ...} of one of the functions."""
    calls = []
    for name in functions:
        head = [r"\{", '"name"', ":", f'"{re.escape(name)}"', ",", f'"{key}"', ":", ""]
        calls.append(_sequence(_regex(BLANKS.join(head)), _json_of(name), _regex(BLANKS + r"\}")))
    return _either(*calls)


def _json_of(name: str) -> Format:
    """JSON of a function's arguments, or of the content; structured/compiler.py puts the schema in."""
    return {"type": "json_schema", "function": name, "at": "#"}


def _calls_alone(functions: Functions, tool_format: str) -> Format:
    """One call after the other, and nothing else."""
    if tool_format == "llama3_json":
        call = _json_call(functions, "parameters")
        mark = _optional(_sequence(_const(Llama3Reader.mark), _regex(BLANKS)))
        return _sequence(mark, call, _repeated(_sequence(_regex(rf"{BLANKS};?{BLANKS}"), call)))
    ((mark, call),) = _FORMATS[tool_format](functions)["rules"]
    marked = _sequence(_const(mark), call)
    return _sequence(marked, _repeated(_sequence(_regex(BLANKS), marked)))


def _free_until(mark: str, call: Format) -> Format:
    return {"type": "dispatch", "rules": [[mark, call]], "loop": True}


def _text(*without: str) -> Format:
    return {"type": "any_text", "excludes": list(without)}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _repeated(content: Format) -> Format:
    return {"type": "star", "content": content}


# Without a bound, as every repetition up to one is compiled by itself: 128 took 5 to 10 s of a thread.
_NAME = r"[^<>\r\n\t ][^<>\r\n]*"
_ANY_PARAMETERS = [_repeated(_xml_parameter(_regex(_NAME), _text(END_PARAMETER)))]
