# SPDX-License-Identifier: Apache-2.0
"""Grammars for answers that may call functions: text is free, or JSON of a response_format, and calls match
their schemas. Or all of the answer is calls.

A grammar is in llguidance's Lark, with numbers in place of its schemas, which structured/compiler.py puts in.
It reads the text as the format's reader does (formats/): what the reader takes for a call, it holds to one of
the functions. llguidance splits the text into terminals, each as long as it can be. So free text is one
terminal with the mark that ends it, and no other terminal that could stand there goes on behind that.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from flashinfer_backend.openai.link import OTHER_GUIDE, STRICT_FUNCTIONS
from flashinfer_backend.openai.sampling import ANY_OBJECT, Guide
from flashinfer_backend.structured.compiler import LLAMA_MARKS, MISTRAL_MARKS
from flashinfer_backend.structured.regex import escaped

Functions = Mapping[str, Mapping[str, Any] | None]  # parameters by name; None: any object
CALLS_OR_JSON = ("hermes", "mistral", "llama3_json", "qwen3_coder")  # formats that go with such a schema
_MARKS = {"mistral": MISTRAL_MARKS, "llama3_json": LLAMA_MARKS}  # special tokens of calls
# Keywords of a function's parameters that are not written with a tag for each property.
_NOT_IN_XML = (
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "enum", "const", "allOf", "anyOf", "oneOf",
    "$ref", "not", "if", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
# What a model may write between the parts of a call, and what it names itself, which has no bound.
BLANKS = r"/[ \n\r\t]{1,8}/?"
_NAME = r"/[^<>\r\n\t ][^<>\r\n]*/"


def calls_guide(
    functions: Functions, tool_format: str, reasoning: str, inside: bool, content: str | None = None
) -> Guide:
    """functions: all that may be called, with the schemas of strict ones. inside: the prompt opens the
    reasoning. content: a JSON schema; an answer without calls is JSON of it, for CALLS_OR_JSON and without
    reasoning. Raises ApiError for what the format cannot say."""
    if reasoning == "harmony":  # then all of the text is read as Harmony
        tool_format = reasoning
    grammar = _Grammar(functions, OPEN if reasoning == "think" and not inside else "")
    answer = grammar.answer(tool_format, content is not None)
    if reasoning == "think":
        answer = grammar.after_thinking(answer, tool_format, content is not None)
    schemas = {name: ANY_OBJECT if schema is None else schema for name, schema in functions.items()}
    if content is not None:
        schemas[CONTENT] = msgspec.json.decode(content)
    # Which special tokens are text. With all of them, JSON of the content could hold what ends a sequence.
    special: tuple[str, ...] | None = _MARKS.get(tool_format, ())
    if content is None and tool_format in WITH_SPECIAL_TOKENS:
        special = None
    beside = "" if content is None else " and response_format"
    refusal = f"{STRICT_FUNCTIONS}{beside}: {{}}; leave such keywords or strict out"
    return _guide(schemas, grammar.schemas, [f"start: {answer}", *grammar.lines], special, refusal)


def forced_guide(functions: Functions, parallel: bool) -> Guide:
    """The answer is a JSON array of calls. Raises ApiError."""
    most = {} if parallel else {"maxItems": 1}
    listed = {"type": "array", "minItems": 1, **most, "items": _call_schema(functions, "parameters")}
    return _guide(functions, [listed], ["start: %json 0"], (), f"{OTHER_GUIDE}: {{}}")


def _guide(
    functions: Functions, schemas: list[Any], lark: list[str], special: Sequence[str] | None, refusal: str
) -> Guide:
    """refusal: of what cannot be followed, with a place for the reason."""
    guide = {"special_tokens": special, "functions": functions, "schemas": schemas, "refusal": refusal}
    guide["lark"] = "\n".join(['%llguidance {"no_forcing": true}', *lark])
    try:
        return Guide(CALLS_GUIDE, msgspec.json.encode(guide).decode(), "tools")
    except RecursionError:
        raise ApiError("the parameters of a function are nested too deeply", param="tools") from None


class _Grammar:
    """Expressions of Lark, and the terminals and schemas that they name."""

    def __init__(self, functions: Functions, opening: str) -> None:
        """opening: where it begins the answer, perhaps behind blanks, it is no text of the answer."""
        self.lines: list[str] = []
        self.schemas: list[Any] = []
        self._functions = functions
        self._names: dict[str, str] = {}  # of terminals, by their definitions
        self._rules: dict[bytes, str] = {}  # by their schemas
        # What must not begin an answer's first text.
        self._not_first = rf"~/\s*{escaped(opening)}(?s:.*)/" if opening else ""

    def answer(self, tool_format: str, or_content: bool) -> str:
        if or_content:
            return f"({self._json_of(CONTENT)} | {self._calls_alone(tool_format)})"
        if tool_format == "llama3_json":
            return self._llama3()
        return self._harmony() if tool_format == "harmony" else self._marked(tool_format)

    def after_thinking(self, answer: str, tool_format: str, or_content: bool) -> str:
        """What the model thinks is free, also where it looks like a call."""
        thought, not_first = self._text(CLOSE), self._not_first
        if not not_first:
            return f"({thought}? | {self._terminal(thought, _literal(CLOSE))} ({answer})?)"
        self._not_first = ""
        rest = self.answer(tool_format, or_content)
        # The same blanks stand before calls of llama3_json, where they are a terminal.
        blanks = "" if tool_format == "llama3_json" or or_content else r"/\s*/"
        opened = [blanks, _literal(OPEN), thought]
        cut, whole = self._terminal(*opened), self._terminal(*opened, _literal(CLOSE))
        before = "" if blanks else r"/[ \t\r\n]+/?"
        return f"({before} ({cut} | {whole} ({rest})?) | {answer})"

    def _terminal(self, *parts: str) -> str:
        definition = " ".join(filter(None, parts))
        if definition not in self._names:
            self._names[definition] = f"T{len(self._names)}"
            self.lines.append(f"{self._names[definition]}: {definition}")
        return self._names[definition]

    def _text(self, *without: str, first: bool = False) -> str:
        """A terminal of free text, perhaps none, without some texts in it."""
        marks = "|".join(map(escaped, without))
        limits = [f"~/(?s:.*)(?:{marks})(?s:.*)/"] if without else []
        limits += [self._not_first] if first and self._not_first else []
        return self._terminal(" & ".join(["/(?s:.*)/", *limits]))

    def _json(self, schema: Any) -> str:
        """A rule, so that the library makes each schema once."""
        key = msgspec.json.encode(schema)
        if key not in self._rules:
            self._rules[key] = f"j{len(self.schemas)}"
            self.lines.append(f"{self._rules[key]}: %json {len(self.schemas)}")
            self.schemas.append(schema)
        return self._rules[key]

    def _json_of(self, function: str) -> str:
        return self._json({"function": function, "at": "#"})

    def _json_call(self, key: str) -> str:
        return self._json(_call_schema(self._functions, key))

    def _marked(self, tool_format: str) -> str:
        """Free text, and calls behind a mark."""
        mark, call = self._call(tool_format)
        first = self._terminal(self._text(mark, first=True), _literal(mark))
        later = self._terminal(self._text(mark), _literal(mark))
        return f"({self._text(mark, first=True)}? | {first} {call} ({later} {call})* {self._text(mark)}?)"

    def _call(self, tool_format: str) -> tuple[str, str]:
        """The mark before a call, and what is behind it."""
        if tool_format == "hermes":
            call = f"{BLANKS} {self._json_call('arguments')} {BLANKS} {_literal(HermesReader.close)}"
            return HermesReader.mark, call
        if tool_format == "mistral":
            call = self._json_call("arguments")
            listed = f"/\\[/ {BLANKS} {call} ({BLANKS} /,/ {BLANKS} {call})* {BLANKS} /\\]/"
            call_id, arguments, _ = MistralReader.parts
            named = [
                f"{_literal(name)} ({_literal(call_id)} /[a-zA-Z0-9]+/)? {_literal(arguments)}?"
                f" {self._json_of(name)}"
                for name in self._functions
            ]
            return MistralReader.mark, f"{BLANKS} ({' | '.join([listed, *named])})"
        calls = [
            f"{_literal(FUNCTION + name + '>')} {BLANKS} {self._parameters(name, schema)}"
            f" {_literal(END_FUNCTION)}"
            for name, schema in self._functions.items()
        ]
        return QwenXmlReader.mark, f"{BLANKS} ({' | '.join(calls)}) {BLANKS} {_literal(END_CALL)}"

    def _llama3(self) -> str:
        """The answer is calls, or text that begins with neither a brace nor the mark."""
        call, blanks, mark = self._json_call("parameters"), r"/[ \t\r\n]+/?", Llama3Reader.mark
        calls = f"{call} (/[; \\t\\r\\n]+/? {call})* /[; \\t\\r\\n]+/? /[^{{; \\t\\r\\n](?s:.*)/?"
        text = " & ".join(
            filter(None, (r"/[^{ \t\r\n](?s:.*)/", rf"~/{escaped(mark)}(?s:.*)/", self._not_first))
        )
        marked = f"{_literal(mark)} ({blanks} ({calls} | /[^{{ \\t\\r\\n](?s:.*)/)?)"
        return f"{blanks} ({calls} | {marked} | {self._terminal(text)})?"

    def _harmony(self) -> str:
        """Messages: a header, which names a function or none, and a body."""
        header, body = self._text("to=", MESSAGE, *ENDS), self._text(*ENDS)
        ends, message = "(" + " | ".join(map(_literal, ENDS)) + ")", _literal(MESSAGE)
        # What follows a function's name in the header; `<|message|>` ends it at once.
        odd = self._text("to=", MESSAGE, MESSAGE[2:], *ENDS)
        to_body = self._terminal(f"({message} | / / {header} {message} | {_literal('<|')} {odd} {message})")
        calls = " | ".join(f"{_literal(name)} {to_body} {self._json_of(name)}" for name in self._functions)
        said = self._terminal(header, message)
        call = f"{self._terminal(header, _literal('to=functions.'))} ({calls}) {BLANKS}"
        empty, whole, end = self._terminal(header, ends), self._terminal(body, ends), self._terminal(ends)
        return f"({empty} | {said} {whole} | {call} {end})* ({header}? | {said} {body}? | {call})"

    def _calls_alone(self, tool_format: str) -> str:
        """One call after the other, and nothing else."""
        if tool_format == "llama3_json":
            call = self._json_call("parameters")
            between = r"/[ \n\r\t]{0,8};?[ \n\r\t]{0,8}/"
            return f"({_literal(Llama3Reader.mark)} {BLANKS})? {call} ({between} {call})*"
        mark, call = self._call(tool_format)
        return f"{_literal(mark)} {call} ({BLANKS} {_literal(mark)} {call})*"

    def _parameters(self, function: str, schema: Mapping[str, Any] | None) -> str:
        """Each property in its order, those that are not required perhaps."""
        end = _literal("\n" + END_PARAMETER)
        text = f"{self._text(END_PARAMETER)} {end}"
        if schema is None:
            return f"({self._terminal(_literal(PARAMETER), _NAME, _literal('>' + chr(10)), text)} {BLANKS})*"
        parts = []
        for name in _xml_names(function, schema):
            begin = _literal(f"{PARAMETER}{name}>\n")
            plain = plain_text(schema["properties"][name], schema)
            if plain is None:
                pointer = name.replace("~", "~0").replace("/", "~1")
                value = self._json({"function": function, "at": f"#/properties/{quote(pointer)}"})
                part = f"{begin} {value} {end} {BLANKS}"
            elif plain.values is None:
                part = f"{self._terminal(begin, text)} {BLANKS}"  # or null
            else:
                values = (*plain.values, *(("null",) if plain.null else ()))
                part = f"{self._terminal(begin, '(' + ' | '.join(map(_literal, values)) + ')', end)} {BLANKS}"
            parts.append(part if name in (schema.get("required") or ()) else f"({part})?")
        return " ".join(parts)


def _call_schema(functions: Iterable[str], key: str) -> dict[str, Any]:
    """{"name": ..., key: ...} of one of the functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"function": name, "at": "#"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in functions
    ]
    return {"anyOf": calls}


def _xml_names(function: str, schema: Mapping[str, Any]) -> list[str]:
    """The properties of a function's parameters. Raises ApiError for what tags cannot say."""
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
    for name in properties:
        if not name or name != name.strip() or ">" in name:
            raise _not_in_xml(function, f"have a property {shown(name)}, a name that a tag cannot hold")
    return list(properties)


def _not_in_xml(function: str, what: str) -> ApiError:
    return ApiError(
        f"the parameters of {function} {what}; that cannot be kept to in the format qwen3_coder. Write them"
        " without, or leave strict out",
        param="tools",
    )


def _literal(text: str) -> str:
    return f"/{escaped(text)}/" if text else '""'
