# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as grammars: what they admit satisfies the schema, by the package jsonschema; the rest is
refused by the keyword's name and place."""

import datetime
import ipaddress
import json
import random
import sys
from typing import Any

import jsonschema
import pytest

from flashinfer_backend.core.bounds import GRAMMAR
from flashinfer_backend.structured.compiler import lark_source
from flashinfer_backend.structured.grammar import GrammarError
from flashinfer_backend.structured.json_schema import (
    FORMAT_PATTERNS,
    NATIVE_FORMATS,
    checked_schema,
    parse_schema,
)
from unit.grammars import END, admits, allowed, matcher, takes_less

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
    ({"type": "number", "exclusiveMinimum": 1.25, "maximum": 1.5}, [1.375, 1.5], [1.25, 1.625]),
    ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 1.5}]}, [0.5, 1.5], [0, 1.6]),
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
    ({"items": {"uniqueItems": True, "maxItems": 0}, "uniqueItems": True, "maxItems": 1}, [[[]]], [[[1]]]),
    ({"type": "array", "prefixItems": [NUMBERS, True], "items": False}, [[1, "a"]], [["a", 1], [1, 2, 3]]),
    ({"type": "array", "prefixItems": [NUMBERS], "unevaluatedItems": X}, [[1, "x"]], [[1, 2]]),
    ({"type": "array", "minContains": 2, "items": NUMBERS}, [[], [1]], [["a"]]),
    (CLOSED, [{}, {"a": 1}], [{"a": "x"}, {"b": 1}]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    ({"required": ["b"], "properties": {"a": {}}}, [{"a": 1, "b": 2}], [{"a": 1}, {}]),
    ({"required": ["b"], "additionalProperties": NUMBERS}, [{"b": 2}, {"b": 1, "c": 2}],
     [{"b": "x"}, {"c": 1}]),
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
    ({"properties": {"a": NUMBERS}, "allOf": [{"properties": {"a": {"minimum": 3}}}]}, [{"a": 3}],
     [{"a": 2}]),
    ({"allOf": [{"properties": {"a": X}}, {"properties": {"b": Y}}], "unevaluatedProperties": False},
     [{"a": "x", "b": "y"}], [{"a": "y"}, {"c": 1}]),
    ({"$ref": "#/$defs/n", "$defs": {"n": NUMBERS}, "description": "n"}, [1], ["a"]),
    ({"$ref": "#/$defs/n", "$defs": {"n": NUMBERS}, "minimum": 3}, [3], [2, "a"]),
    ({"$ref": "#/$defs/a~1b%20c/allOf/1", "$defs": {"a/b c": {"allOf": [X, NUMBERS]}}}, [1], ["x"]),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}}, [{"n": {"n": {}}}], [{"n": 1}]),
    ({"$defs": {"unused": {"not": {}}}, "type": "integer"}, [1], ["a"]),
    ({"anyOf": [X, NUMBERS]}, ["x", 1], ["y"]),
    ({"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 7}]}, [2, 8], [5, "a"]),
    ({"properties": {"a": X, "b": Y}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": "x"}, {"b": "y"}], [{}, {"a": 1}]),
    ({"oneOf": [NUMBERS, {"type": "string"}]}, [1, "a"], [None]),
    ({"oneOf": [{"const": 1}, {"enum": [2, True]}]}, [1, 2, True], [3]),
    ({"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
     [{"kind": "cat", "n": 1}, {"kind": "dog", "s": "a"}], [{"kind": "cat", "n": "a"}, {"kind": "cow"}]),
    ({"if": X}, ["x", 1], []),
    ({"then": X}, ["y"], []),
    ({"type": "string", "pattern": "a", "minLength": 3}, ["abc", "xay"], ["ab", "xyz"]),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["ab", "ba"], ["a", "b"]),
    ({"type": "string", "pattern": '^a"b$'}, ['a"b'], ["ab"]),
    ({"type": "string", "pattern": "^.{0,100000}$"}, ["", 'a\\"'], ["a\nb"]),
    ({"type": "string", "format": "date", "pattern": "^20"}, ["2020-02-29"], ["1999-01-01", "2021-02-29"]),
    ({"type": "number", "multipleOf": 0.5}, [0.5, -1.0, 3], [0.25, 1.7]),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, [3, 300], [0, 4]),
    ({"type": "integer", "multipleOf": 2000}, [4000], [2001]),
    ({"type": "integer", "maximum": 2**63 - 1}, [2**53 - 1, -7], [2**63, 2**64]),
    ({"properties": {"x": {"maximum": 5}}, "patternProperties": {"^x": NUMBERS}}, [{"x": 3, "xy": 9}],
     [{"x": 7}, {"xy": "a"}]),
    ({"enum": ["a", "bc"], "minLength": 2}, ["bc"], ["a"]),
    ({"enum": [2**53 - 1, 1 - 2**53]}, [2**53 - 1, 1 - 2**53], [2**53 - 2, 0]),
    ({"allOf": [CLOSED, {"properties": {"b": X}}]}, [{"a": 1}], [{"b": "x"}]),
    ({"properties": {"a": False}, "additionalProperties": True}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "propertyNames": {"type": "string"}}, [{"a": 1}], [1]),
]  # fmt: skip

# Schemas, what the refusal says, the place that it names.
REFUSED: list[tuple[Any, str, str]] = [
    ({"not": X}, "'not'", "#"),
    ({"properties": {"a": {"if": X, "then": Y}}}, "'if'", "#/properties/a"),
    ({"$dynamicRef": "#a"}, "'$dynamicRef'", "#"),
    ({"type": "array", "contains": X}, "'contains'", "#"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "'uniqueItems'", "#/items"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'", "#"),
    ({"type": "object", "dependentSchemas": {"a": X}}, "'dependentSchemas'", "#"),
    ({"dependencies": {"a": ["b"]}}, "'dependencies'", "#"),
    ({"type": "string", "format": "date", "maxLength": 3}, "Regex is empty", ""),
    ({"type": "string", "format": "date", "pattern": "a"}, "Regex is empty", ""),
    ({"type": "string", "format": "iri"}, "format 'iri'", "#"),
    ({"type": "string", "pattern": "a(?=b)"}, "(?= and (?<= are not", "#/pattern"),
    ({"type": "string", "pattern": "a^b"}, "within the text are not", "#/pattern"),
    ({"type": "string", "pattern": "a{1,99999999999}"}, "too large", "#/pattern"),
    ({"type": "string", "minLength": 2**31}, "'minLength' 2147483648", "#"),
    ({"type": "integer", "exclusiveMinimum": True}, "'exclusiveMinimum' is True", "#"),
    ({"propertyNames": {"pattern": {}}}, "'propertyNames' of this kind", "#"),
    ({"properties": {"a": X}, "propertyNames": {"maxLength": 2}}, "'propertyNames' next to", "#"),
    ({"propertyNames": {"maxLength": 2}, "additionalProperties": False}, "'propertyNames' next to", "#"),
    ({"patternProperties": {"^x": NUMBERS, "y$": X}}, "not disjoint", ""),
    ({"additionalProperties": False, "required": ["a"]}, "required property 'a' is unsatisfiable", ""),
    ({"type": "object", "minProperties": 2}, "'minProperties'", "#"),
    ({"enum": ["a"], "anyOf": [X]}, "Regex is empty", ""),
    ({"enum": ["a"], "type": "integer"}, "Unsatisfiable", ""),
    ({"allOf": [{"type": "string"}, NUMBERS]}, "Unsatisfiable", ""),
    ({"anyOf": [X], "oneOf": [Y]}, "Regex is empty", ""),
    ({"anyOf": [X], "allOf": [{"anyOf": [Y]}]}, "Regex is empty", ""),
    ({"oneOf": [NUMBERS, {"minimum": 3}]}, "'oneOf'", "#"),
    ({"oneOf": [{"type": "number"}, NUMBERS]}, "'oneOf'", "#"),
    ({"oneOf": [{"enum": [1, 2]}, {"required": ["a"]}]}, "'oneOf'", "#"),
    ({"$ref": "http://example.org/schema"}, "$ref 'http://example.org/schema'", "#"),
    ({"$ref": "b", "$defs": {"b": {}}}, "$ref 'b' is not supported", "#"),
    ({"$ref": 1}, "$ref '1' is not supported", "#"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$ref '#/$defs/b' names nothing", "#/properties/a"),
    *(
        ({"anyOf": [X, NUMBERS], "properties": {"a": {"$ref": f"#/anyOf/{index}"}}}, "names nothing",
         "#/properties/a")
        for index in ("-1", "01", "+1", "%201", "1_0", "\u0661", "2", "1" * 5000, "")
    ),
    ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "$ref '#anchor'", "#"),
    ({"items": {"$id": "http://a", "type": "integer"}}, "'$id'", "#/items"),
    ({"type": "string", "format": []}, "the format is not a string", "#"),
    ({"allOf": 1}, "'allOf' is not a list", "#"),
    ({"type": "nonsense"}, 'Unsupported type "nonsense"', "#"),
    ({"type": []}, "'type' is empty", "#"),
    ({"prefixItems": X}, "'prefixItems' is not a list of schemas", "#"),
    ({"items": []}, "'items' is not a list of schemas", "#"),
    ({"properties": [X]}, "'properties' is not an object", "#"),
    ({"minItems": -1}, "'minItems' is -1", "#"),
    ({"maxLength": 1.5}, "'maxLength' is 1.5", "#"),
    ({"minLength": True}, "'minLength' is True", "#"),
    ({"enum": []}, "'enum' is not a list of values", "#"),
    ({"pattern": 1}, "the pattern is not a string", "#/pattern"),
    ({"properties": {"a": {"required": "name"}}}, "'required' is not a list of names", "#/properties/a"),
    ({"required": [1]}, "'required' is not a list of names", "#"),
    ([], "a schema is list", "#"),
    ({"type": "integer", "multipleOf": 999_983}, "'multipleOf' 999983", "#"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, "with a range below 1", "#"),
    ({"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.4}]}, "with a range below 1", "#/allOf/1"),
    ({"allOf": [{"minimum": 1.5}, {"exclusiveMaximum": 2}]}, "with a range below 1", "#/allOf/1"),
    ({"allOf": [{"multipleOf": 4093}, {"multipleOf": 4091}]}, "least common multiple", "#/allOf/1"),
    ({"allOf": [{"pattern": f"a{{{n}}}.*b"} for n in range(17)]}, "more than 16 patterns", "#/allOf/16"),
    ({"prefixItems": [{"multipleOf": 4001 + n} for n in range(3)]}, "together are above 8192",
     "#/prefixItems/2"),
    ({"type": "number", "multipleOf": 0.01}, "'multipleOf' 0.01", "#"),
    ({"enum": [0.7135582457995734]}, "too many digits", "#"),
    ({"type": "number", "minimum": 5e-324}, "too many digits", "#"),
    ({"enum": [2**53]}, "beyond 2^53", "#"),
    ({"const": {"a": [-(2**63)]}}, "beyond 2^53", "#"),
    ({"type": "integer", "minimum": 2**60}, "beyond 2^53", "#"),
    ({"items": {"properties": {str(n): {} for n in range(401)}}}, "401 properties that are not", "#/items"),
    ({"properties": {"a": NUMBERS}, "anyOf": [X], "unevaluatedProperties": False}, "'unevaluated", "#"),
    ({"allOf": [{"properties": {"b": X}, "patternProperties": {"a": X}}], "unevaluatedProperties": False},
     "'unevaluatedProperties' next to 'allOf'", "#"),
    ({"oneOf": [{"$ref": "#/$defs/a"}, X], "$defs": {"a": {"enum": 5}}}, "'oneOf' of schemas", "#"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "leads back to itself", "#"),
    ({"properties": {str(n): {} for n in range(30)}, "minProperties": 2}, "min/maxProperties only", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (r'{"type": "\ud800"}', "#/type"),
        (r'{"minimum": "\ud800"}', "#/minimum"),
        (r'{"properties": {"a": {"minLength": "a\ud800b"}}}', "#/properties/a/minLength"),
        (r'{"properties": {"\ud800": 5}}', "#/properties"),
        (r'{"$defs": {"\udfff": {"not": {}}}, "$ref": "#/$defs/a"}', "#/$defs"),
        (r'{"type": "string", "pattern": "[\udc00-a]"}', "#/pattern"),
        (r'{"items": {"anyOf": [{}, {"enum": [1, ["\ude00\ud83d"]]}]}}', "#/items/anyOf/1/enum/1/0"),
    ],
)
def test_half_a_character_is_refused_by_name_and_place(text, place):
    with pytest.raises(
        GrammarError, match=r"u(d800|dfff|dc00|de00) is half .* the character itself"
    ) as refused:
        parse_schema(text)
    assert str(refused.value).isascii() and f"(at {place}" in str(refused.value)
    assert parse_schema(r'{"const": "\ud83d\ude00"}') == {"const": "😀"}


def chained(names: int, options: int, links: int) -> Any:
    """Options that are one object, whose properties are the same chain of $ref."""
    chain = {f"c{i}": {"$ref": f"#/d/c{i + 1}"} for i in range(links)}
    properties = {str(i): {"$ref": "#/d/c0"} for i in range(names)}
    d = {**chain, f"c{links}": NUMBERS, "0": {"type": "object", "properties": properties}}
    return {"oneOf": [{"$ref": "#/d/0"}] * options, "d": d}


def spelt(count: int, node: Any) -> Any:
    """A schema that $ref names in different ways."""
    names = ["".join("%64" if i >> k & 1 else "d" for k in range(13)) for i in range(count)]
    return {"prefixItems": [{"$ref": f"#/{name}"} for name in names], "d" * 13: node}


def nested_words(levels: int) -> Any:
    """Each level has the next one four times."""
    inner: Any = {}
    for _ in range(levels):
        inner = {"patternProperties": {"^(a|b|c|d)$": inner}}
    return {"allOf": [inner, {}]}


NAMES = [str(i) for i in range(4000)]
SLOW = {  # to check, if work that they ask for again is done again
    "names of options": chained(6000, 6000, 58),
    "long chains": {
        "properties": {name: {"$ref": "#/d/0"} for name in NAMES},
        "required": NAMES,
        "d": {str(i): {"$ref": f"#/d/{i + 1}"} for i in range(5000)} | {"5000": NUMBERS},
    },
    "an enum of options": {"oneOf": [{"$ref": "#/d"}] * 2000, "d": {"enum": [1] * 20_000}},
    "an enum of names": {
        "oneOf": [{"$ref": "#/d"}] * 2,
        "e": {"enum": list(range(15_000))},
        "d": {"type": "object", "properties": {name: {"$ref": "#/e"} for name in NAMES}},
    },
    "long pointers": {
        "oneOf": [{"$ref": "#/e"}] * 8000,
        "e": {"$ref": "#/d" + "/not" * 900},
        "d": json.loads('{"not":' * 900 + '{"enum":[1]}' + "}" * 900),
    },
    "lists of allOf": {
        "prefixItems": [{"$ref": "#/d"}] * 5000,
        "d": {"allOf": [{"$ref": "#/e"}] * 8000},
        "e": {},
    },
    "names within names": nested_words(11),
    "patterns of names": {
        "allOf": [
            {"prefixItems": [{"patternProperties": {f"^(a|b|{i})$": {}}} for i in range(4000)]},
            {},
        ]
    },
    "bounds": {
        "allOf": [
            {"additionalProperties": {"anyOf": [{"minimum": i} for i in range(5000)]}},
            {"properties": {name: {"minimum": 1} for name in NAMES}},
        ],
        "required": NAMES,
    },
    **{
        f"spellings of {next(iter(node))}": spelt(990, node)
        for node in (
            {"enum": list(range(10_000))},
            {"const": "x" * 150_000},
            {"required": NAMES},
            {"type": ["string"] * 10_000},
            {"pattern": "a" * 16_000},
            {"x-other": 1, **dict.fromkeys(NAMES, 1)},
            {"propertyNames": {"enum": ["a"] * 3000}},
        )
    },
}


@pytest.mark.parametrize("schema", SLOW.values(), ids=SLOW.keys())
def test_no_schema_takes_long_to_check(schema):
    text = json.dumps(schema, separators=(",", ":"))
    assert len(text) <= GRAMMAR.characters

    def check() -> None:
        try:
            lark_source("json_schema", text)
        except GrammarError as error:
            assert len(str(error)) < 300

    assert takes_less(2, check), "which docs/security.md promises"


def test_what_a_pattern_of_several_names_copies_is_counted():
    """Here the smallest schema stands 4^11 times, which takes gigabytes to write."""
    assert checked_schema(nested_words(3))
    with pytest.raises(GrammarError, match="it is too large at #/allOf/0/patternProperties"):
        checked_schema(nested_words(11))


def test_large_schemas_are_taken():
    """Each names many times what is there once."""
    option = {"properties": {f"p{i}": {"$ref": "#/$defs/text"} for i in range(20)}}
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{i}"}, **option["properties"]},
            "required": ["kind"],
        }
        for i in range(200)
    ]
    schema = {"oneOf": options, "$defs": {"text": {"enum": [f"text {i}" for i in range(500)]}}}
    assert admits(compiled(schema), '{"kind":"k199","p3":"text 499"}')
    assert checked_schema({"prefixItems": [{"$ref": "#/$defs/text"}] * 9000, "$defs": schema["$defs"]})
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(900)}
    assert checked_schema({"prefixItems": [{"$ref": "#/$defs/0"}] * 5000, "$defs": {**chain, "900": NUMBERS}})


SEPARATE = [  # values that no two of the combined schemas speak of
    {"allOf": [{"properties": {f"p{n}": {"pattern": "^a"}}} for n in range(17)]},
    {"allOf": [CLOSED, {"properties": {f"p{n}": {"items": {"multipleOf": 4001}} for n in range(2)}}]},
    {"allOf": [{"properties": {"a": {"maximum": 5}}}, {"properties": {"b": {"exclusiveMinimum": 5}}}]},
]


@pytest.mark.parametrize("schema", SEPARATE)
def test_bounds_of_combined_schemas_are_for_each_value(schema):
    assert admits(compiled(schema), "{}")


def compiled(schema: Any) -> Any:
    return matcher("json_schema", json.dumps(schema))


@pytest.mark.parametrize(("schema", "good", "bad"), HONOURED, ids=lambda value: json.dumps(value)[:60])
def test_what_a_grammar_admits_satisfies_its_schema(schema, good, bad):
    valid = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid
    assert all(valid(value) for value in good) and not any(valid(value) for value in bad), (
        "of the table itself"
    )
    grammar = compiled(schema)
    for value in good:
        texts = [json.dumps(value, ensure_ascii=False, separators=s) for s in ((",", ":"), (", ", ": "))]
        assert all(admits(grammar, text) for text in texts), value
    for value in bad:
        assert not admits(grammar, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(("schema", "what", "place"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_kept_to_is_refused_by_name_and_place(schema, what, place):
    with pytest.raises(GrammarError) as refused:
        compiled(schema)
    message = str(refused.value)
    assert what in message and (not place or f"(at {place})" in message) and "\n" not in message


@pytest.mark.parametrize("text", ['"\t"', '"\x01"', '"a"b"', '"\\"', '"\n"', b'"\xed\xa0\x80"'])
@pytest.mark.parametrize(
    "string",
    [{"maxLength": 9}, {"minLength": 1}, {"pattern": "^.*$"}, {"pattern": "^[^é]+$"}, {"format": "uri"}],
)
def test_strings_are_json(string, text):
    assert not admits(compiled({"type": "string", **string}), text)


def test_blanks_between_elements_have_an_end():
    assert admits(compiled({"type": "array"}), f"[{' ' * 20}]")
    assert not admits(compiled({"type": "array"}), f"[{' ' * 21}]")


def test_options_of_the_library_in_a_schema_say_nothing():
    schema = {"type": "array", "uniqueItems": False, "x-guidance": {"lenient": True, "item_separator": ";"}}
    assert admits(compiled(schema), "[1,2]") and not admits(compiled(schema), "[1;2]")
    with pytest.raises(GrammarError, match="'not'"):
        compiled({**schema, "not": {}})


POINTERS = ["", "/", "/a b/0", "/~0~1/é🙂/", "//]}["]
RELATIVE = ["0", "0#", "12/a/~1", "1", "10#"]


def check_format(format, good, bad):
    grammar = compiled({"type": "string", "format": format})
    for value in good:
        assert admits(grammar, f'"{value}"'), value
    for value in bad:
        assert not admits(grammar, f'"{value}"'), value


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("json-pointer", POINTERS, ["a", "/~", "/~2", '/a"b', "/\n"]),
        ("relative-json-pointer", RELATIVE, ["", "/a", "01", "1#/a", "a", '0/"', "0/\t"]),
    ],
)
def test_pointers_are_json(format, good, bad):
    """Of a format that jsonschema does not check without another package."""
    check_format(format, good, bad)


@pytest.mark.parametrize("format", [*NATIVE_FORMATS, *FORMAT_PATTERNS])
def test_texts_of_a_format_are_right(format, monkeypatch):
    """They are JSON; by Python's own readers, days and addresses are some (a second of 60 is none there)."""
    plain = set(b"0123456789abcdefABCDEF:.-TZ") if format.startswith(("ip", "date")) else set(range(128))
    monkeypatch.setattr(sys.modules[__name__], "PLAIN", plain)
    grammar, schemas = compiled({"type": "string", "format": format}), Schemas(0)
    texts = {json.loads(text) for _ in range(150) if (text := schemas.text(grammar, 200)) is not None}
    assert texts
    for text in texts:
        if format.startswith("date"):
            day, _, clock = text.partition("T")
            assert day.startswith("0000") or datetime.date.fromisoformat(day)
            assert clock or format == "date"
        elif format.startswith("ip"):
            assert str(ipaddress.ip_address(text))


DATES = ["2020-02-29", "2000-02-29", "2021-02-28", "2021-01-31", "2021-11-30", "0000-02-29"]
NO_DATES = ["2021-02-29", "1900-02-29", "2020-02-30", "2021-04-31", "2021-00-01", "2021-13-01", "2021-1-01"]
CLOCKS = ["T00:00:00Z", "T23:59:60.125+23:59"]
IPV6 = [
    "::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::3:4:5:6:7:8", "ABCD::0",
]  # fmt: skip
IPV6 += ["1:2:3:4:5:6:1.2.3.4", "::1.2.3.4", "1::1.2.3.4", "1:2:3:4:5::1.2.3.4", "64:ff9b::255.0.10.9"]
NO_IPV6 = [
    "1.2.3.4", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1::2::3", ":1::2", "1:", ":::", "12345::", "::1%eth0",
]  # fmt: skip
NO_IPV6 += [
    "::1.2.3.04", "::1.2.3", "::1.2.3.256", "1:2:3:4:5:6:7:1.2.3.4", "1:2:3:4:5:6::1.2.3.4", "::1.2.3.4:1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("date", DATES, [*NO_DATES, "2020-02-29T00:00:00Z"]),
        ("date-time", [day + clock for day in DATES for clock in CLOCKS],
         [day + CLOCKS[0] for day in NO_DATES]),
        ("date-time", ["2020-02-29T01:02:03-00:00"],
         ["2020-02-29", "2020-02-29T24:00:00Z", "2020-02-29T01:00:005Z"]),
        ("ipv6", IPV6, NO_IPV6),
    ],
)  # fmt: skip
def test_days_that_months_have_and_addresses(format, good, bad):
    check_format(format, good, bad)


def test_the_older_form_of_tuples():
    schema = {"type": "array", "items": [NUMBERS, X], "additionalItems": Y}
    valid = jsonschema.Draft7Validator(schema).is_valid
    for value in ([1, "x"], [1, "x", "y"], ["x", 1], [1, "x", "x"]):
        assert admits(compiled(schema), json.dumps(value)) == valid(value)


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (deep(GRAMMAR.nesting + 1), "too large"),
        (deep(10 * sys.getrecursionlimit()), "nested too deeply"),
        (json.dumps({"required": [], "anyOf": [X] * 60_000}), "too large"),
        (json.dumps({"patternProperties": {f"^{n}x": {} for n in range(101)}}), "too large"),
        ('{"allOf": [{"$ref": "#"}, {}]}', "leads back to itself"),
        ('{"enum": [1e999]}', "a number that is too large"),
        ('{"minimum": 1e999, "type": "integer"}', "a number that is too large"),
        *(
            (json.dumps({"type": "integer", keyword: 10**400}), "a number that is too large")
            for keyword in ("minimum", "multipleOf", "const", "minLength")
        ),
        ('{"minLength": 1%s}' % ("0" * 300), "more than a sequence can hold"),
        ('{"const": NaN}', "NaN is not JSON"),
        ("[1,", "Failed to parse JSON"),
        ("false", "no value satisfies"),
    ],
)
def test_what_is_too_large_or_no_json_is_refused(text, message):
    with pytest.raises(GrammarError, match=message) as refused:
        matcher("json_schema", text)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("schema", [{"maximum": 10**400}, {"enum": [10**400]}, {"const": {"a": -(10**400)}}])
def test_numbers_beyond_floating_point_in_a_schema_that_is_no_text_are_refused(schema):
    with pytest.raises(GrammarError, match="a number that is too large"):
        checked_schema(schema)


def test_the_deepest_schema_is_taken():
    assert admits(
        matcher("json_schema", deep(GRAMMAR.nesting)), "[" * GRAMMAR.nesting + "]" * GRAMMAR.nesting
    )


CLOSING, PLAIN = {END, *b'"}]'}, set(b"abc0123,:{[ ")


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

    def text(self, grammar: Any, longest: int = 120) -> str | None:
        """One that the grammar admits; None if it did not come to an end."""
        walked, text = grammar.deep_copy(), b""
        while len(text) < longest:
            tokens = allowed(walked)
            if not tokens:
                return None
            closing = [i for i in tokens if i in CLOSING]
            plain = [i for i in tokens if i in PLAIN] or tokens
            token = self.random.choice(closing if closing and self.random.random() < 0.4 else plain)
            if token == END:
                return text.decode()
            assert walked.consume_token(token)
            text += bytes([token])
        return None


@pytest.mark.parametrize("seed", range(12))
def test_what_random_schemas_grammars_admit_satisfies_them(seed):
    schemas = Schemas(seed)
    taken = 0
    for _ in range(20):
        schema = schemas.root()
        try:
            grammar = compiled(schema)
        except GrammarError:
            continue
        taken += 1
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(4):
            text = schemas.text(grammar)
            assert text is None or validator.is_valid(json.loads(text)), (schema, text)
    assert taken > 5, "many are taken"


OBJECT = {"properties": {"a": NUMBERS}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        (OBJECT, {"a": 1, "b": None}),
        ({"$ref": "#/$defs/o", "$defs": {"o": OBJECT}}, {"b": 1}),
        ({"anyOf": [OBJECT, NUMBERS]}, {"b": 1}),
        ({"items": {"allOf": [OBJECT]}}, [{"b": 1}]),
        ({"properties": {"x": OBJECT}}, {"x": {"b": 1}}),
    ],
)
def test_objects_have_the_properties_that_are_named(schema, good):
    """Others satisfy the schema, too, and a model that begins with them finds no end."""
    grammar, more = compiled(schema), json.dumps(good).replace('"b"', '"c": 1, "b"')
    assert admits(grammar, json.dumps(good)) and not admits(grammar, more)
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(more))


@pytest.mark.parametrize(
    ("schema", "text", "bad"),
    [
        ({"required": ["a"], "patternProperties": {"^a$": NUMBERS}}, '{"a": 1', '{"a": "'),
        ({"properties": {"a": {}, "b": {}}, "patternProperties": {"^(?:a|b)$": NUMBERS}},
         '{"a": 1, "b": 2', '{"b": "'),
        ({"required": ["a"], "allOf": [{"propertyNames": {"enum": ["a"]}}]}, '{"a": 1', '{"b'),
        ({"required": ["a.|"], "allOf": [{"propertyNames": {"enum": ["a.|"]}}]}, '{"a.|": 1', '{"ab'),
        ({"allOf": [{"required": ["a"]}, {"patternProperties": {"^a$": NUMBERS}}]}, '{"a": 1', '{"a": "'),
    ],
)  # fmt: skip
def test_no_comma_follows_where_no_name_is_left(schema, text, bad):
    grammar = matcher("json_schema", json.dumps({"type": "object", **schema}))
    assert admits(grammar, text + "}") and not admits(grammar, bad + '"}')
    for comma in (",", ", "):
        walked = grammar.deep_copy()
        if walked.try_consume_tokens(list((text + comma).encode())) == len(text + comma):
            assert walked.try_consume_tokens(list(b'"')) == 1  # a name can begin
            assert set(allowed(walked)) - set(b"\t\n\r ")
