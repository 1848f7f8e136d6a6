# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as guides: what their grammars admit satisfies them, by the package jsonschema; the rest is
refused by the keyword's name and place."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
import sys
from typing import Any

import jsonschema
import pytest

from flashinfer_backend.structured.compiler import (
    MOST_BLANKS,
    GrammarCompiler,
    compile_schema,
    is_safe_pattern,
)
from flashinfer_backend.structured.grammar import GrammarError
from flashinfer_backend.structured.json_schema import FORMAT_PATTERNS, FORMATS, MOST_DEPTH, prepare_schema
from flashinfer_backend.structured.lengths import has_lengths, with_counted_lengths
from flashinfer_backend.structured.regex import ascii_regex, check_regex, prepare_regex, without_names

xgrammar = pytest.importorskip("xgrammar")

X = {"const": "x"}
Y = {"const": "y"}
NUMBERS = {"type": "integer"}
CLOSED = {"type": "object", "properties": {"a": NUMBERS}, "additionalProperties": False}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": NUMBERS}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "s": {"type": "string"}}}

# Schemas, values that satisfy them, values that do not.
HONOURED: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [1, "a", None, [{}]], []),
    ({}, [1, "a"], []),
    ({"description": "whatever", "x-other": 1}, [1, "a"], []),
    ({"type": "integer"}, [0, -7, 10**12], ["a", 1.5, True]),
    ({"type": ["integer", "null"], "minimum": 3}, [3, None], [2, "a"]),
    ({"type": "integer", "minLength": 9}, [1], ["a"]),
    ({"enum": ["a", None, 3], "type": ["string", "null"]}, ["a", None], [3]),
    ({"enum": [1, 2.0, 2.5, True], "type": "integer"}, [1, 2], [2.5, True]),
    ({"enum": ["a", "b"], "const": "b"}, ["b"], ["a"]),
    ({"enum": [1, "1"], "allOf": [{"enum": [1.0, True]}]}, [1], ["1", True]),
    ({"const": {"a": [1, "é\n"]}}, [{"a": [1, "é\n"]}], [{}, 1]),
    ({"enum": ["a"], "minimum": 3}, ["a"], [4]),
    ({"minimum": 3}, [3, 4.5], [2]),
    ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3.5}, [1, 3], [0, 4]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, [0.5, 1.5], [0, 1.6]),
    ({"type": "integer", "multipleOf": 3}, [0, -3, 300], [1]),
    ({"type": "integer", "multipleOf": 3, "minimum": 5, "maximum": 20}, [6, 18], [3, 7, 21]),
    ({"minLength": 2}, ["ab", "schön"], ["a"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a b", "😀é"], ["a", "abcd"]),
    ({"type": "string", "maxLength": 2**40}, ["ab"], [1]),
    ({"type": "string", "maxLength": 40}, ["", "a" * 40, "😀é" * 20], ["a" * 41, "é" * 41]),
    ({"maxLength": 300, "minLength": 60}, ["é" * 60, "a" * 300], ["é" * 59, "a" * 301]),
    ({"minLength": 260}, ["😀" * 260, "a" * 400], ["a" * 259]),
    ({"minLength": 260, "maxLength": 270}, ["é" * 260, "a" * 270], ["a" * 259, "a" * 271]),
    ({"items": {"type": "string", "maxLength": 40}}, [["a" * 40, "b" * 40]], [["", "a" * 41]]),
    ({"anyOf": [{"maxLength": 50}, {"minLength": 60, "maxLength": 70}]}, ["a" * 50, "a" * 70], ["a" * 55]),
    ({"type": "object", "propertyNames": {"maxLength": 33}}, [{"a" * 33: 1}], [{"a" * 34: 1}]),
    (  # a character of Latin-1 in front of a hexadecimal digit
        {"properties": {"über": {"enum": ["café0", "é"]}, "b": {"maxLength": 40}}, "type": "object"},
        [{"über": "café0", "b": ""}, {"über": "é"}],
        [{"über": "caf\u0e90"}],
    ),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["b", ""]),
    ({"type": "string", "pattern": "^(?:a|b$)$"}, ["a", "b"], ["ab"]),
    ({"type": "string", "pattern": "^[^é]ü$"}, ["aü"], ["éü", "aé"]),
    ({"type": "string", "pattern": "^[а-я]{2,2000}$"}, ["где"], ["abc"]),
    ({"type": "string", "format": "date"}, ["2020-01-31"], ["2020-13-01", "x"]),
    ({"type": "string", "format": "ipv4"}, ["0.10.250.199"], ["1.2.3", "1.2.3.04", "1.2.3.256", "1.2.3.4.5"]),
    ({"type": "string", "format": "custom"}, ["x"], [1]),
    ({"items": NUMBERS, "maxItems": 2}, [[], [1, 2]], [["a"], [1, 2, 3]]),
    ({"type": "array", "minItems": 1, "maxItems": 2}, [["a"], [1, None]], [[], [1, 2, 3]]),
    ({"type": "array", "items": NUMBERS, "uniqueItems": False}, [[1, 1]], [["a"]]),
    ({"type": "array", "prefixItems": [NUMBERS, True], "items": False}, [[1, "a"]], [["a", 1], [1, 2, 3]]),
    ({"type": "array", "prefixItems": [NUMBERS], "unevaluatedItems": X}, [[1, "x"]], [[1, 2]]),
    ({"type": "array", "minContains": 2, "items": NUMBERS}, [[], [1]], [["a"]]),
    (CLOSED, [{}, {"a": 1}], [{"a": "x"}, {"b": 1}]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    ({"required": ["b"], "properties": {"a": {}}}, [{"a": 1, "b": 2}], [{"a": 1}, {}]),
    (
        {"required": ["b"], "additionalProperties": NUMBERS},
        [{"b": 2}, {"b": 1, "c": 2}],
        [{"b": "x"}, {"c": 1}],
    ),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}, {"a": 1, "b": 2, "c": 3}]),
    ({"type": "object", "patternProperties": {"^x.$": NUMBERS}}, [{"xy": 1}, {}], [{"xy": "a"}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", 1]}}, [{"a": 1}], [{"b": 1}]),
    ({"properties": {"a": X}, "unevaluatedProperties": NUMBERS}, [{"a": "x", "b": 1}], [{"b": "x"}]),
    ({"allOf": [NUMBERS]}, [1], ["a"]),
    ({"allOf": [{"type": "number", "minimum": 1}, {"type": "integer", "minimum": 3}]}, [3], [2, 3.5]),
    (
        {
            "allOf": [{"$ref": "#/$defs/n"}, {"properties": {"b": X}}],
            "$defs": {"n": {"properties": {"a": NUMBERS}}},
        },
        [{"a": 1, "b": "x"}],
        [{"a": "x"}, {"b": 1}],
    ),
    (
        {"properties": {"a": NUMBERS}, "allOf": [{"properties": {"a": {"minimum": 3}}}]},
        [{"a": 3}],
        [{"a": 2}],
    ),
    (
        {"allOf": [{"properties": {"a": X}}, {"properties": {"b": Y}}], "unevaluatedProperties": False},
        [{"a": "x", "b": "y"}],
        [{"a": "y"}, {"c": 1}],
    ),
    ({"$ref": "#/$defs/n", "$defs": {"n": NUMBERS}, "description": "n"}, [1], ["a"]),
    ({"$ref": "#/$defs/n", "$defs": {"n": NUMBERS}, "minimum": 3}, [3], [2, "a"]),
    ({"$ref": "#/$defs/a~1b%20c/allOf/1", "$defs": {"a/b c": {"allOf": [X, NUMBERS]}}}, [1], ["x"]),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}}, [{"n": {"n": {}}}], [{"n": 1}]),
    ({"$defs": {"unused": {"not": {}}}, "type": "integer"}, [1], ["a"]),
    ({"anyOf": [X, NUMBERS]}, ["x", 1], ["y"]),
    ({"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 7}]}, [2, 8], [5, "a"]),
    (
        {"properties": {"a": X, "b": Y}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": "y"}],
        [{}, {"a": 1}],
    ),
    ({"oneOf": [NUMBERS, {"type": "string"}]}, [1, "a"], [None]),
    ({"oneOf": [{"const": 1}, {"enum": [2, True]}]}, [1, 2, True], [3]),
    (
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        [{"kind": "cat", "n": 1}, {"kind": "dog", "s": "a"}],
        [{"kind": "cat", "n": "a"}, {"kind": "cow"}],
    ),
    ({"if": X}, ["x", 1], []),
    ({"then": X}, ["y"], []),
]

# Schemas, the keyword that is refused, its place.
REFUSED: list[tuple[Any, str, str]] = [
    ({"not": X}, "'not'", "#"),
    ({"properties": {"a": {"if": X, "then": Y}}}, "'if'", "#/properties/a"),
    ({"$dynamicRef": "#a"}, "'$dynamicRef'", "#"),
    ({"type": "array", "contains": X}, "'contains'", "#"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "'uniqueItems'", "#/items"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'", "#"),
    ({"type": "object", "dependentSchemas": {"a": X}}, "'dependentSchemas'", "#"),
    ({"dependencies": {"a": ["b"]}}, "'dependencies'", "#"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "'pattern' beside minLength", "#"),
    ({"type": "string", "format": "date", "maxLength": 3}, "'format' beside minLength", "#"),
    ({"type": "string", "format": "date", "pattern": "a"}, "'format' beside pattern", "#"),
    ({"type": "string", "format": "iri"}, "format 'iri'", "#"),
    ({"type": "string", "pattern": "a(?=b)"}, "?= at character 2", "#/pattern"),
    ({"type": "string", "pattern": "a^b"}, "^ at character 2", "#/pattern"),
    ({"type": "string", "pattern": "a{1,99999999999}"}, "beyond 2147483647", "#/pattern"),
    ({"type": "string", "pattern": '^a"b$'}, "an escape in JSON", "#/pattern"),
    ({"type": "string", "pattern": "^.{0,100000}$"}, "an escape in JSON", "#/pattern"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf' 0.5", "#"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "'multipleOf'", "#"),
    ({"type": "integer", "multipleOf": 2000}, "'multipleOf' 2000", "#"),
    ({"type": "string", "minLength": 2**31}, "'minLength' 2147483648", "#"),
    ({"type": "integer", "exclusiveMinimum": True}, "'exclusiveMinimum' is True", "#"),
    ({"properties": {"a": X}, "propertyNames": {"maxLength": 2}}, "'propertyNames' beside 'properties'", "#"),
    ({"propertyNames": {"maxLength": 2}, "additionalProperties": False}, "'propertyNames' beside", "#"),
    ({"properties": {"x": X}, "patternProperties": {"^x": NUMBERS}}, "'patternProperties'", "#"),
    ({"patternProperties": {"^x": NUMBERS, "y$": X}}, "'patternProperties'", "#"),
    ({"additionalProperties": False, "required": ["a"]}, "required 'a'", "#"),
    ({"type": "object", "minProperties": 2}, "'minProperties'", "#"),
    ({"enum": ["a", "bc"], "minLength": 2}, "'minLength' beside 'enum'", "#"),
    ({"enum": ["a"], "anyOf": [X]}, "'anyOf' beside 'enum'", "#"),
    ({"enum": ["a"], "type": "integer"}, "no value of 'enum'", "#"),
    ({"enum": [2**63 + 1]}, "more than 64 bits", "#"),
    ({"allOf": [{"type": "string"}, NUMBERS]}, "no type", "#"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "'pattern' in several schemas", "#"),
    ({"allOf": [CLOSED, {"properties": {"b": X}}]}, "'additionalProperties' apart", "#"),
    ({"anyOf": [X], "oneOf": [Y]}, "'oneOf' beside 'enum'", "#/anyOf/0"),
    ({"anyOf": [X], "allOf": [{"anyOf": [Y]}]}, "'anyOf' in several schemas", "#"),
    ({"oneOf": [NUMBERS, {"minimum": 3}]}, "'oneOf'", "#"),
    ({"oneOf": [{"type": "number"}, NUMBERS]}, "'oneOf'", "#"),
    ({"oneOf": [{"enum": [1, 2]}, {"required": ["a"]}]}, "'oneOf'", "#"),
    ({"$ref": "http://example.org/schema"}, "$ref 'http://example.org/schema'", "#"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$ref '#/$defs/b' names nothing", "#/properties/a"),
    ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "$ref '#anchor'", "#"),
    ({"items": {"$id": "http://a", "type": "integer"}}, "'$id'", "#/items"),
    ({"type": "nonsense"}, 'Unsupported type "nonsense"', "#"),
    ({"properties": {"a": False}}, "'false'", "#/properties/a"),
    ([], "a schema is list", "#"),
]


@pytest.fixture(scope="module")
def compiler() -> Any:
    info = xgrammar.TokenizerInfo(
        [bytes([i]) for i in range(256)] + ["<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def admits(compiled: Any, text: str | bytes) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())


@pytest.mark.parametrize(("schema", "good", "bad"), HONOURED, ids=lambda value: json.dumps(value)[:60])
def test_what_a_grammar_admits_satisfies_its_schema(compiler, schema, good, bad):
    valid = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid
    assert all(valid(value) for value in good) and not any(valid(value) for value in bad), (
        "of the table itself"
    )
    compiled = compile_schema(compiler, prepare_schema(json.dumps(schema), is_safe_pattern))
    for value in good:
        texts = [json.dumps(value, ensure_ascii=False, separators=s) for s in ((",", ":"), (", ", ": "))]
        assert any(admits(compiled, text) for text in texts), value
    for value in bad:
        assert not admits(compiled, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(("schema", "what", "place"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_would_be_dropped_is_refused_by_name_and_place(schema, what, place):
    with pytest.raises(GrammarError) as refused:
        prepare_schema(json.dumps(schema), is_safe_pattern)
    message = str(refused.value)
    assert what in message and f"(at {place})" in message and len(message) < 300


@pytest.mark.parametrize("caret", [r"\^", r"\x5e", r"\u005E", r"\u{5e}"])
def test_a_class_that_begins_with_an_escaped_caret_is_no_complement(caret):
    with pytest.raises(GrammarError, match=r"class at character 3 begins with an escaped \^"):
        GrammarCompiler("bundled", vocab_size=2048).compile("regex", rf"\[[{caret}a]")


@pytest.mark.parametrize("text", ['"\t"', '"\x01"', '"a"b"', '"\\"', '"\n"'])
@pytest.mark.parametrize(
    "string",
    [
        {"maxLength": 9},
        {"maxLength": 99},
        {"minLength": 1},
        {"minLength": 0, "maxLength": 199},
        {"pattern": "^.*$"},
        {"pattern": "^[^é]+$"},
        {"pattern": "^[ -~]+$"},
    ],
)
def test_strings_are_json(compiler, string, text):
    prepared = prepare_schema(json.dumps({"type": "string", **string}), is_safe_pattern)
    compiled = compile_schema(compiler, prepared)
    assert admits(compiled, '"a b"') and not admits(compiled, text)


POINTERS = ["", "/", "/a b/0", "/~0~1/é🙂/", "//]}["]
RELATIVE = ["0", "0#", "12/a/~1", "1", "10#"]


def check_format(compiler, format, good, bad):
    prepared = prepare_schema(json.dumps({"type": "string", "format": format}), is_safe_pattern)
    compiled = compiler.compile_json_schema(prepared, max_whitespace_cnt=MOST_BLANKS)
    for value in good:
        assert admits(compiled, f'"{value}"'), value
    for value in bad:
        assert not admits(compiled, f'"{value}"'), value


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("json-pointer", POINTERS, ["a", "/~", "/~2", '/a"b', "/\n"]),
        ("relative-json-pointer", RELATIVE, ["", "/a", "01", "1#/a", "a", '0/"', "0/\t"]),
    ],
)
def test_pointers_are_json(compiler, format, good, bad):
    """Of a format that jsonschema does not check without another package."""
    check_format(compiler, format, good, bad)


@pytest.mark.parametrize("format", [*FORMATS, *FORMAT_PATTERNS])
def test_texts_of_a_format_are_json(compiler, format, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PLAIN", set(range(128)))
    prepared = prepare_schema(json.dumps({"type": "string", "format": format}), is_safe_pattern)
    compiled = compiler.compile_json_schema(prepared, max_whitespace_cnt=MOST_BLANKS)
    schemas = Schemas(0)
    texts = [text for _ in range(60) if (text := schemas.text(compiled, 200)) is not None]
    assert texts and all(isinstance(json.loads(text), str) for text in texts)


@pytest.mark.parametrize("format", ["date", "date-time", "ipv4", "ipv6"])
def test_texts_of_a_format_are_right(compiler, format, monkeypatch):
    """By Python's own readers; a second of 60 is none there."""
    monkeypatch.setattr(sys.modules[__name__], "PLAIN", set(b"0123456789abcdefABCDEF:.-TZ"))
    prepared = prepare_schema(json.dumps({"type": "string", "format": format}), is_safe_pattern)
    compiled = compiler.compile_json_schema(prepared, max_whitespace_cnt=MOST_BLANKS)
    schemas = Schemas(0)
    texts = {json.loads(text) for _ in range(400) if (text := schemas.text(compiled, 200)) is not None}
    assert len(texts) > 100
    for text in texts:
        if format.startswith("date"):
            day, _, clock = text.partition("T")
            assert day.startswith("0000") or datetime.date.fromisoformat(day)
            assert clock or format == "date"
        else:
            assert str(ipaddress.ip_address(text))


DATES = ["2020-02-29", "2000-02-29", "2021-02-28", "2021-01-31", "2021-11-30", "0000-02-29"]
NO_DATES = ["2021-02-29", "1900-02-29", "2020-02-30", "2021-04-31", "2021-00-01", "2021-13-01", "2021-1-01"]
CLOCKS = ["T00:00:00Z", "T23:59:60.125+23:59"]
IPV6 = [
    "::",
    "::1",
    "1::",
    "1:2:3:4:5:6:7:8",
    "1:2:3:4:5:6:7::",
    "::2:3:4:5:6:7:8",
    "1::3:4:5:6:7:8",
    "ABCD::0",
]
IPV6 += ["1:2:3:4:5:6:1.2.3.4", "::1.2.3.4", "1::1.2.3.4", "1:2:3:4:5::1.2.3.4", "64:ff9b::255.0.10.9"]
NO_IPV6 = [
    "1.2.3.4",
    "1:2:3:4:5:6:7",
    "1:2:3:4:5:6:7:8:9",
    "1::2::3",
    ":1::2",
    "1:",
    ":::",
    "12345::",
    "::1%eth0",
]
NO_IPV6 += [
    "::1.2.3.04",
    "::1.2.3",
    "::1.2.3.256",
    "1:2:3:4:5:6:7:1.2.3.4",
    "1:2:3:4:5:6::1.2.3.4",
    "::1.2.3.4:1",
]


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("date", DATES, [*NO_DATES, "2020-02-29T00:00:00Z"]),
        (
            "date-time",
            [day + clock for day in DATES for clock in CLOCKS],
            [day + CLOCKS[0] for day in NO_DATES],
        ),
        (
            "date-time",
            ["2020-02-29T01:02:03-00:00"],
            ["2020-02-29", "2020-02-29T24:00:00Z", "2020-02-29T01:00:005Z"],
        ),
        ("ipv6", IPV6, NO_IPV6),
    ],
)
def test_days_that_months_have_and_addresses(compiler, format, good, bad):
    check_format(compiler, format, good, bad)


def test_the_older_form_of_tuples(compiler):
    schema = {"type": "array", "items": [NUMBERS, X], "additionalItems": Y}
    compiled = compiler.compile_json_schema(prepare_schema(json.dumps(schema), is_safe_pattern))
    valid = jsonschema.Draft7Validator(schema).is_valid
    for value in ([1, "x"], [1, "x", "y"], ["x", 1], [1, "x", "x"]):
        assert admits(compiled, json.dumps(value)) == valid(value)


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (deep(MOST_DEPTH + 1), "too large"),
        (deep(10 * sys.getrecursionlimit()), "nested too deeply"),
        (json.dumps({"properties": {str(n): {} for n in range(60_000)}}), "too large"),
        (json.dumps({"properties": {str(n): {} for n in range(9999)}, "anyOf": [X] * 9999}), "too large"),
        (
            json.dumps(
                {"$ref": "#/a0", **{f"a{n}": {"allOf": [{"$ref": f"#/a{n + 1}"}] * 2} for n in range(40)}}
            ),
            "names nothing",
        ),
        ('{"allOf": [{"$ref": "#"}, {}]}', "too large"),
        ('{"enum": [1e999]}', "a number that is too large"),
        ('{"minimum": 1e999, "type": "integer"}', "a number that is too large"),
        ('{"const": NaN}', "NaN is not JSON"),
        ("[1,", "Failed to parse JSON"),
    ],
)
def test_what_is_too_large_or_no_json_is_refused(text, message):
    with pytest.raises(GrammarError, match=message) as refused:
        prepare_schema(text, is_safe_pattern)
    assert len(str(refused.value)) < 300


def test_the_deepest_schema_is_taken():
    assert json.loads(prepare_schema(deep(MOST_DEPTH), is_safe_pattern))["type"] == "array"


@pytest.mark.parametrize(
    "regex",
    [
        "^a$",
        "^a|b$",
        "(^a|b$)",
        "a{2,2147483647}",
        r"\^\$",
        "[$^]a",
        "(?<n>a)$",
        "^^a$$",
        "",
        "^$|a",
        "(a|b)c",
    ],
)
def test_regular_expressions_that_are_taken(regex):
    check_regex(regex)


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"\x61b", "ab"),
        (r"\x20a\x2a1", " a*1"),
        (r"[\x611]{3}", "1a1"),
        (r"[\x5d\x61-cA]+", "]bA"),
        (r"\\x61b", r"\x61b"),
        (r"[a\^][^\^]\[\^", "^a[^"),
        (r"\u{61}b\u0061b", "abab"),
    ],
)
def test_characters_by_their_numbers(regex, text):
    compiled = GrammarCompiler("bundled", vocab_size=2048).compile("regex", regex)
    assert re.fullmatch(re.sub(r"\\u\{(..)\}", r"\\x\1", regex), text)  # which re has not
    assert admits(compiled, text)


@pytest.mark.parametrize(
    ("regex", "admitted"),
    [("a.b", "a\nb"), ("a[^x]b", "a\nb"), (r"a[^\n]b", "axb"), (r"a\Sb", "axb")],
)
def test_a_point_admits_a_newline(regex, admitted):
    """Unlike Python's. docs/openai.md and docs/compatibility.md say so."""
    compiled = GrammarCompiler("bundled", vocab_size=2048).compile("regex", regex)
    assert [text for text in ("axb", "a\nb") if admits(compiled, text)][-1] == admitted


@pytest.mark.parametrize(
    "regex", ["(?P<n>a|b)(?<möglich>c)", r"\((?P<n>[(?P<x>]*)\(?", "a(?<_1>(?:(?P<b>b)))c"]
)
def test_names_of_groups_say_nothing(compiler, regex):
    plain = without_names(regex)
    taken = [text for text in ("ac", "bc", "(P<>(", "(<", "abc", "") if re.fullmatch(plain, text)]
    assert taken
    in_schema = prepare_schema(json.dumps({"pattern": f"^{regex}$"}), is_safe_pattern)
    for text in taken:
        assert admits(compiler.compile_regex(prepare_regex(regex)), text)
        assert admits(compiler.compile_json_schema(in_schema), json.dumps(text))


OPTIONAL = ["a(cb+)?", "(ab*)?c", "b(ab*)?c*", "((ab+)?)c", "(ab+)??c", "a(b(ca*)?)?", r"a\)?(c+b*)?[()?]?"]


@pytest.mark.parametrize("pattern", OPTIONAL)
def test_an_optional_group_is_there_or_not(compiler, pattern):
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    compiled = compiler.compile_json_schema(prepare_schema(json.dumps(schema), is_safe_pattern))
    words = ["".join(word) for size in range(5) for word in itertools.product("abc)?", repeat=size)]
    wrong = [word for word in words if admits(compiled, f'"{word}"') != bool(re.fullmatch(pattern, word))]
    assert not wrong


CLASSES = [
    ".", r"\D", r"\W", r"\S", r"\.", "[^a]", "[^a-]", "[^-a]", r"[^\-a-c]", r"[^\W]", r"[^\n\]é]", r"[^\\]",
    r"[^\ud800-\udfffa]", r"[\D]", r"[a\W-]", r"[\s\S]", r"[\dx\D]", "[é-\U0010ffff]", r"[\u0080-\uffff]",
    r"[\x61\u{e9}-\u{10000}z]", r"[a\ud000-\udaff]", r"[\udaff-\uffff-]", "[-a.]",
]  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_classes_admit_no_surrogates(compiler, cls):
    """And of all other characters what they admitted before."""
    expected = {c for c in characters(compiler.compile_regex(cls), "") if not "\ud800" <= c <= "\udfff"}
    assert expected and characters(compiler.compile_regex(prepare_regex(cls)), "") == expected
    schema = {"type": "string", "pattern": ascii_regex(f"^{cls}$")}
    asked = compiler.compile_json_schema(json.dumps(schema))
    expected = {c for c in characters(asked, '"') if not "\ud800" <= c <= "\udfff"}
    prepared = compiler.compile_json_schema(prepare_schema(json.dumps(schema), is_safe_pattern))
    assert characters(prepared, '"') == expected


SAMPLE = [*range(0x180), *range(0x1FF0, 0x2030), *range(0xCFFE, 0xE004, 3), 0xD7FF, 0xD800, 0xDFFF, 0xE000]
SAMPLE += [0xFFFE, 0xFFFF, 0x10000, 0x10001, 0x10FFFF]


def characters(compiled: Any, quote: str) -> set[str]:
    """Those of a sample that it admits, surrogates by the bytes that UTF-8 would have for them."""
    return {
        chr(i) for i in SAMPLE if admits(compiled, f"{quote}{chr(i)}{quote}".encode(errors="surrogatepass"))
    }


@pytest.mark.parametrize(
    "string",
    [{"minLength": 1}, {"minLength": 3, "maxLength": 99}, {"maxLength": 3}, {"format": "json-pointer"}],
)
def test_strings_of_a_length_have_no_surrogates(compiler, string):
    prepared = prepare_schema(json.dumps({"type": "string", **string}), is_safe_pattern)
    compiled = compile_schema(compiler, prepared)
    assert admits(compiled, '"/\ud7ff\ue000"') and not admits(compiled, b'"/\xed\xa0\x80"')


@pytest.mark.parametrize(
    "regex", [r"a\ud83d\ude00", r"[\ud800-\udbff]", "\ud83d", r"\u{dfff}", r"[ab\udc00]"]
)
def test_halves_of_surrogate_pairs_are_refused(regex):
    with pytest.raises(
        GrammarError, match=r"^\\ud[0-9a-f]{3}(-\\udbff)? speaks of halves|^\\u\{dfff\} speaks"
    ):
        prepare_regex(regex)
    with pytest.raises(GrammarError, match=r"halves of surrogate pairs.* \(at #/pattern\)"):
        prepare_schema(json.dumps({"pattern": regex}), is_safe_pattern)


@pytest.mark.parametrize(
    "regex", ["[" * 300_000, r"[\u0041" * 50_000, "[^" * 150_000, "[a" + r"\]" * 150_000]
)
def test_classes_without_an_end_stay_as_they_are(regex):
    assert prepare_regex(regex) == regex


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("a^b", r"\^ at character 2"),
        ("a(b|^c)", r"\^ at character 5"),
        ("^(?:^a)+", "group that ends at character 7 is repeated"),
        ("a$b", r"\$ before character 3"),
        ("(a$|b)c", r"\$ before character 7"),
        ("(a$)+", "group that ends at character 4 is repeated"),
        ("(?=a)b", r"\?= at character 1"),
        ("a(?!b)", r"\?! at character 2"),
        ("(?<=a)b", r"\?<= at character 1"),
        ("(?<!a)b", r"\?<! at character 1"),
        ("a{2147483648}", "beyond 2147483647"),
        ("a{1,4294967298}", "beyond 2147483647"),
        ("a{" + "9" * 50_000 + "}", "beyond 2147483647"),
        (r"\Aa", r"\\A at character 1"),
        (r"(?i)a", r"\(\?i at character 1 is not supported; groups begin with \(, \(\?:"),
        (r"a(?#b)c", r"\(\?# at character 2"),
        (r"(?<n>a)(?P=n)", r"\(\?P at character 8"),
        (r"(?P<1>a)", r"\(\?P at character 1"),
        (r"a\z", r"\\z at character 2"),
        (r"[\q]", r"\\q at character 2"),
        (r"a\x{61}", r"\\x at character 2 should have two hexadecimal digits"),
        (r"[\x6]", r"\\x at character 2 should have two"),
    ],
)
def test_regular_expressions_that_xgrammar_would_change_are_refused(regex, message):
    with pytest.raises(GrammarError, match=message):
        check_regex(regex)


CLOSING, PLAIN = {256, *b'"}]'}, set(b"abc0123,:{[ ")


class Schemas:
    """Random schemas whose keywords get in each other's way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, **choices: Any) -> dict[str, Any]:
        names = self.random.sample(list(choices), self.random.randint(0, min(3, len(choices))))
        return {name: choices[name]() for name in names}

    def schema(self, depth: int = 3) -> Any:
        pick, number = self.random.choice, lambda: self.random.choice([-2, 0, 1, 2.5, 3])
        count = lambda: self.random.randint(0, 3)  # noqa: E731
        inner = lambda: self.schema(depth - 1)  # noqa: E731
        names = lambda: self.random.sample("abc", self.random.randint(0, 2))  # noqa: E731
        several = lambda: [inner() for _ in range(self.random.randint(1, 2))]  # noqa: E731
        groups = [
            self.some(
                minimum=number, maximum=number, exclusiveMinimum=number, multipleOf=lambda: pick([1, 2, 3])
            ),
            self.some(
                minLength=count, maxLength=count, pattern=lambda: pick(["^a*$", "[^é]", "^a|b$", "^(b$|c)$"])
            ),
            {"enum": self.random.sample([1, 2.0, "a", "bc", None, True, [1], {"a": 1}], 4)},
            {"$ref": pick(["#/$defs/d", "#/$defs/e"])},
        ]
        if depth:
            children = lambda: {name: inner() for name in names()}  # noqa: E731
            groups += [
                self.some(items=inner, prefixItems=several, minItems=count, maxItems=count, contains=inner),
                self.some(
                    properties=children, required=names, additionalProperties=inner, minProperties=count
                ),
                self.some(properties=children, maxProperties=count, unevaluatedProperties=lambda: False),
                self.some(
                    patternProperties=lambda: {pick(["^a$", "b"]): inner()},
                    propertyNames=inner,
                    required=names,
                ),
                self.some(allOf=several, anyOf=several, oneOf=several, properties=children),
            ]
        schema = dict(pick(groups) | pick(groups)) if self.random.random() < 0.3 else dict(pick(groups))
        if self.random.random() < 0.5:
            schema["type"] = pick(
                ["integer", "string", "object", "array", ["number", "null"], ["object", "string"]]
            )
        return schema if self.random.random() < 0.95 else self.random.random() < 0.7

    def root(self) -> Any:
        schema = self.schema()
        return (
            {**schema, "$defs": {"d": self.schema(1), "e": self.schema(2)}}
            if isinstance(schema, dict)
            else schema
        )

    def text(self, compiled: Any, longest: int = 120) -> str | None:
        """One that the grammar admits; None if it did not come to an end."""
        matcher = xgrammar.GrammarMatcher(compiled)
        mask = xgrammar.allocate_token_bitmask(1, 257)
        text = b""
        while len(text) < longest:
            matcher.fill_next_token_bitmask(mask)
            bits = mask.numpy().view("uint8")
            allowed = [i for i in range(257) if bits[0, i >> 3] >> (i & 7) & 1]
            if not allowed:
                return None
            closing = [i for i in allowed if i in CLOSING]
            plain = [i for i in allowed if i in PLAIN] or allowed
            token = self.random.choice(closing if closing and self.random.random() < 0.4 else plain)
            if token == 256:
                return text.decode()
            assert matcher.accept_token(token)
            text += bytes([token])
        return None


@pytest.mark.parametrize("seed", range(12))
def test_what_random_schemas_grammars_admit_satisfies_them(compiler, seed):
    schemas = Schemas(seed)
    taken = 0
    for _ in range(20):
        schema = schemas.root()
        try:
            compiled = compiler.compile_json_schema(prepare_schema(json.dumps(schema), is_safe_pattern))
        except (GrammarError, RuntimeError):
            continue
        taken += 1
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(4):
            text = schemas.text(compiled)
            assert text is None or validator.is_valid(json.loads(text)), (schema, text)
    assert taken, "most are refused, not all"


# Tokens of several characters: some leave a string, or cannot be in one; some are parts of a character.
TOKENS = [bytes([i]) for i in range(256)]
TOKENS += [
    b"ab",
    b"abcdefgh",
    b" word",
    b" " * 20,
    b'a"',
    b'"}',
    b'", ',
    b":\n",
    b"<=\\",
    b"xx\t",
    b"\xa9'\n",
]
TOKENS += ["é".encode(), "é😀".encode(), "😀".encode()[1:], b"\xa9\xc3"]
TOKENS += [b"a\xf0\x9f", b"<end>"]
END = len(TOKENS) - 1
LONG = {"type": "string", "maxLength": 45}
LENGTHS = [
    LONG,
    {"type": "string", "minLength": 35, "maxLength": 140},
    {"type": "string", "minLength": 263, "maxLength": 280},
    {"type": "string", "maxLength": 300},
    {
        "type": "object",
        "properties": {"a": LONG, 'ö\n"\\': {"type": "array", "items": LONG, "maxItems": 2}},
        "additionalProperties": LONG,
        "required": ["a", "b"],
    },
    {"type": "string", "pattern": "^[a-z é]{1,200}$"},
    {"type": "string", "pattern": r"^[\w .-]{5,200}$"},
    {"type": "string", "pattern": r"[a-z ]{0,130}"},
    {"type": "object", "patternProperties": {r"^[a-z]{1,140}$": {"type": "null"}}},
    {"type": "object", "propertyNames": LONG, "additionalProperties": {"enum": ["x", "é\n", None]}},
    {"anyOf": [LONG, {"type": "string", "minLength": 50, "maxLength": 60}, {"pattern": "^a[^é]*$"}]},
    {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3, "$defs": {"d": LONG}},
]


@pytest.fixture(scope="module")
def longer_tokens() -> Any:
    info = xgrammar.TokenizerInfo(TOKENS, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def allowed_tokens(matcher: Any) -> list[int]:
    mask = xgrammar.allocate_token_bitmask(1, len(TOKENS))
    matcher.fill_next_token_bitmask(mask)
    bits = mask.numpy().view("uint8")
    return [i for i in range(len(TOKENS)) if bits[0, i >> 3] >> (i & 7) & 1]


@pytest.mark.parametrize("schema", LENGTHS, ids=lambda value: json.dumps(value)[:60])
def test_tokens_of_strings_with_a_length(longer_tokens, schema):
    """Those of the mask are all that the grammar goes on with, up to a string's last character."""
    compiled = compile_schema(longer_tokens, prepare_schema(json.dumps(schema), is_safe_pattern))
    validator = jsonschema.Draft202012Validator(schema)
    ended = 0
    for seed in range(4):
        pick, text = random.Random(seed), b""
        matcher = xgrammar.GrammarMatcher(compiled)
        while not matcher.is_terminated() and len(text) < 3000:
            allowed = allowed_tokens(matcher)
            for i in range(END):
                went_on = matcher.accept_token(i)
                assert went_on == (i in allowed), (TOKENS[i], text)
                if went_on:
                    matcher.rollback(1)
            inside = [i for i in allowed if not {*TOKENS[i]} & {*b'"\\'} and i != END]
            token = pick.choice(inside if inside and pick.random() < 0.97 else allowed)
            assert matcher.accept_token(token)
            text += TOKENS[token] if token != END else b""
        if matcher.is_terminated():
            ended += 1
            assert validator.is_valid(json.loads(text)), text
    assert ended


@pytest.mark.parametrize(
    ("pattern", "counted"),
    [
        (r"^[a-zA-Z0-9_-]{1,256}$", True),
        (r"^[\w.:@ -]{0,1000}$", True),
        (r"\d{2,200}", True),
        (r"^[a-z]{1,64}$", False),  # quick, and quicker at the end
        (r"^[ -~]{1,256}$", False),  # a quote has two characters in JSON
        (r"^[.-a]{1,256}$", False),
        (r"^[^a]{1,256}$", False),
        (r"^[a-z]{1,256}[0-9]$", False),
        (r"^x[a-z]{1,256}$", False),
        (r"^[a-z]{200,256}$", False),
    ],
)
def test_which_patterns_are_counted(pattern, counted):
    schema = prepare_schema(json.dumps({"type": "string", "pattern": pattern}), is_safe_pattern)
    grammar = str(xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=MOST_BLANKS))
    assert ("[max_chars=" in with_counted_lengths(grammar)) == counted
    assert has_lengths(schema) or not counted


def test_equal_lengths_are_compiled_once():
    strings = [{"type": "string", "minLength": n, "maxLength": 300} for n in (60, 60, 61, 60)]
    schema = prepare_schema(json.dumps({"type": "array", "prefixItems": strings}), is_safe_pattern)
    grammar = with_counted_lengths(str(xgrammar.Grammar.from_json_schema(schema)))
    assert grammar.count("[max_chars=300]") == 2
