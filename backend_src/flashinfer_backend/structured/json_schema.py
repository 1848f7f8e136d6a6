# SPDX-License-Identifier: Apache-2.0
"""Brings a JSON schema into the form that xgrammar honours, or refuses it by keyword and place.

xgrammar reads many keywords and drops them without a word. What comes out of here has none of those: each
subschema is a $ref, an enum, an anyOf, or one type with that type's own keywords. It may admit less than what
went in, as xgrammar's grammars do (properties in their order, no additional ones unless asked for), never
more. Unknown keywords are annotations, as the standard has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from flashinfer_backend.structured.grammar import GrammarError
from flashinfer_backend.structured.regex import (
    ascii_regex,
    check_regex,
    with_counted_options,
    without_names,
    without_surrogates,
)

MOST_DEPTH = 100  # of subschemas in each other: the time to compile them grows with the cube
MOST_SUBSCHEMAS = 10_000  # after the merging of allOf and $ref
MOST_MULTIPLE, MOST_MULTIPLES_RANGE = 1024, 10_000  # xgrammar's, for integers
UNLIMITED = 2**31 - 1  # more than any sequence has tokens; xgrammar counts with 32 bits
# A character that needs no escape in a JSON string, without surrogates. Its last one keeps the class out of
# xgrammar's automaton for ASCII patterns, which takes seconds for a thousand repetitions.
PLAIN_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"

OF_TYPE: dict[str, tuple[str, ...]] = {
    "null": (),
    "boolean": (),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
        "contains", "minContains", "maxContains",
    ),
    "object": (
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
        "required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    ),
}  # fmt: skip
OF_TYPE["number"] = OF_TYPE["integer"]
FORMATS = ("duration", "email", "hostname", "time", "uri", "uri-reference", "uri-template", "uuid")
# Of these xgrammar's own grammars admit too much: quotes and control characters within a pointer, which is no
# JSON then, 010 as a part of an address, 31 days in each month.
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_POINTER = "(/([ !#-.0-\\[\\]-}\U0000007f-\ud7ff\ue000-\U0010ffff]|~[01])*)*"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = rf"({_H16}:{_H16}|{_BYTE}(\.{_BYTE}){{3}})"
# {0,1} for ?: with_counted_options says why.
_IPV6 = (  # as RFC 3986 has it
    f"({_H16}:){{6}}{_LS32}",
    *(f"({_H16}(:{_H16}){{0,{n}}}){{0,1}}::({_H16}:){{{4 - n}}}{_LS32}" for n in range(4)),
    f"({_H16}(:{_H16}){{0,4}}){{0,1}}::{_LS32}",
    f"({_H16}(:{_H16}){{0,5}}){{0,1}}::{_H16}",
    f"({_H16}(:{_H16}){{0,6}}){{0,1}}::",
    f"::({_H16}:){{5}}{_LS32}",
)
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"([0-9]{{4}}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:([0-5][0-9]|60)(\.[0-9]+){{0,1}}(Z|[+-]{_HOUR_MINUTE})"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": f"^({'|'.join(_IPV6)})$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
OTHER_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex")
NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
KEYWORDS = {keyword for group in OF_TYPE.values() for keyword in group}
KEYWORDS |= {"type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", *NEVER}
# That say nothing: {keyword: (values)}.
VACUOUS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "required": ([],), "dependentRequired": ({},), "dependentSchemas": ({},),
    "dependencies": ({},), "patternProperties": ({},), "allOf": ([],), "minLength": (0,), "minItems": (0,),
    "minProperties": (0,), "propertyNames": (True, {}), "prefixItems": ([],),
}  # fmt: skip
TIGHTER: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
# Keywords that speak of what others of the same subschema leave over: two subschemas that have both kinds do
# not mean what one with all of them means.
LEFT_OVER = {
    "additionalProperties": ("properties", "patternProperties"),
    "unevaluatedProperties": ("properties", "patternProperties", "additionalProperties"),
    "items": ("prefixItems",),
    "additionalItems": ("items",),
    "unevaluatedItems": ("prefixItems", "items", "additionalItems"),
}
NO_ADVICE = "leave it out"

Schema = dict[str, Any]


def prepare_schema(text: str, is_safe_pattern: Callable[[str], bool], at: str = "#") -> str:
    """The schema as xgrammar should have it.

    is_safe_pattern: whether all that xgrammar makes of a pattern (in ASCII) is a JSON string. at: JSON
    pointer to the subschema that is meant.

    Raises GrammarError, which names the keyword and its place.
    """
    try:
        root = json.loads(text, parse_constant=_refuse_constant)
        return _Preparation(root, is_safe_pattern).run(at)
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError(
            f"it is nested too deeply; at most {MOST_DEPTH} subschemas in each other"
        ) from None
    except json.JSONDecodeError as error:
        raise GrammarError(f"Failed to parse JSON: {error}") from None
    except (ValueError, OverflowError):
        raise GrammarError("it has a number that is too large") from None


def _refuse_constant(name: str) -> None:
    raise GrammarError(f"Failed to parse JSON: {name} is not JSON")


def _refused(path: str, why: str, advice: str = NO_ADVICE) -> GrammarError:
    return GrammarError(f"{why} (at {_short(path)}); {advice}")


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:60]}...{text[-37:]}"


class _Preparation:
    def __init__(self, root: Any, is_safe_pattern: Callable[[str], bool]) -> None:
        self._root, self._is_safe_pattern = root, is_safe_pattern
        self._names: dict[str, str] = {}  # by pointer
        self._pending: list[str] = []  # pointers whose target is not prepared yet
        self._left = MOST_SUBSCHEMAS

    def run(self, at: str) -> str:
        self._names[at] = "#"
        result = self._schema(self._resolve(at, at), at, 0)
        definitions: dict[str, Any] = {}
        while self._pending:
            pointer = self._pending.pop()
            name = self._names[pointer].removeprefix("#/$defs/")
            definitions[name] = self._schema(self._resolve(pointer, pointer), pointer, 0)
        if definitions:
            result = {**result, "$defs": definitions}
        return json.dumps(result, ensure_ascii=False, allow_nan=False)

    def _schema(self, node: Any, path: str, depth: int) -> Any:
        flat = self._flat(node, path, depth)
        if "$ref" in flat:
            return {"$ref": self._name(flat["$ref"], path)}
        for keyword in NEVER:
            if keyword in flat:
                raise _refused(path, f"{keyword!r} is not supported")
        if "enum" in flat:
            return {"enum": self._values(flat, path)}
        for keyword in ("anyOf", "oneOf"):
            if keyword in flat:
                return self._any_of(flat, keyword, path, depth)
        types = self._types(flat, path)
        if types is None:
            return {}
        prepared = [self._of_type(kind, flat, path, depth) for kind in types]
        return prepared[0] if len(prepared) == 1 else {"anyOf": prepared}

    def _spend(self, subschemas: int, path: str, depth: int = 0) -> None:
        self._left -= subschemas
        if self._left < 0 or depth > MOST_DEPTH:
            raise GrammarError(
                f"it is too large at {_short(path)}: at most {MOST_SUBSCHEMAS} subschemas, {MOST_DEPTH} of"
                " them in each other, counting what $ref and allOf bring together"
            )

    def _flat(self, node: Any, path: str, depth: int) -> Schema:
        """The constraints of a subschema, without allOf and const; a $ref stands alone."""
        self._spend(1, path, depth)
        if node is True:
            return {}
        if node is False:
            raise _refused(path, "'false', which no value satisfies, is not supported here")
        if not isinstance(node, dict):
            raise _refused(path, f"a schema is {type(node).__name__}", "it should be an object or a boolean")
        if "$id" in node and path != "#":
            raise _refused(path, "'$id' below the top, which changes what $ref means, is not supported")
        flat = {k: v for k, v in node.items() if k in KEYWORDS and v not in VACUOUS.get(k, ())}
        if "then" not in node and "else" not in node:
            flat.pop("if", None)  # says nothing
        if "contains" not in flat:
            flat.pop("minContains", None)
            flat.pop("maxContains", None)
        if "const" in flat:
            flat = _merge(flat, {"enum": [flat.pop("const")]}, path)
        parts = [{"$ref": flat.pop("$ref")}] if "$ref" in flat else []
        members = flat.pop("allOf", [])
        if not isinstance(members, list):
            raise _refused(path, "'allOf' is not a list", "it should be one")
        parts += [self._flat(member, f"{path}/allOf/{i}", depth + 1) for i, member in enumerate(members)]
        if len(parts) == 1 and not flat:
            return parts[0]
        return self._merged(flat, [self._inlined(part, path, depth) for part in parts], path)

    def _merged(self, flat: Schema, parts: list[Schema], path: str) -> Schema:
        """What satisfies a subschema and all parts within it."""
        # It speaks of what the parts leave over, too.
        unevaluated = {keyword: value for keyword, value in flat.items() if keyword.startswith("unevaluated")}
        flat = {keyword: value for keyword, value in flat.items() if keyword not in unevaluated}
        for part in parts:
            self._spend(sum(len(v) for v in flat.values() if isinstance(v, (dict, list))), path)
            flat = _merge(flat, part, path)
        for keyword in unevaluated.keys() & flat.keys():
            raise _refused(path, f"{keyword!r} in several schemas for one value is not supported")
        return flat | unevaluated

    def _inlined(self, flat: Schema, path: str, depth: int) -> Schema:
        """The same without a $ref."""
        while "$ref" in flat:
            depth += 1
            flat = self._flat(self._resolve(flat["$ref"], path), path, depth)
        return flat

    def _name(self, pointer: Any, path: str) -> str:
        self._resolve(pointer, path)
        if pointer not in self._names:
            self._names[pointer] = f"#/$defs/d{len(self._names)}"
            self._pending.append(pointer)
        return self._names[pointer]

    def _resolve(self, pointer: Any, path: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise _refused(
                path,
                f"$ref {_short(str(pointer))!r} is not supported",
                "it should begin with #/ and name a part of the schema itself",
            )
        target = self._root
        for part in pointer.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, ValueError, IndexError, TypeError):
                raise _refused(
                    path,
                    f"$ref {_short(pointer)!r} names nothing",
                    "it should name a part of the schema itself",
                ) from None
        return target

    def _values(self, flat: Schema, path: str) -> list[Any]:
        """Those of enum that the type beside it admits."""
        values = flat["enum"]
        if not isinstance(values, list) or not values:
            raise _refused(path, "'enum' is not a list of values", "it should be one")
        if "type" in flat:
            types = set(_type_list(flat["type"], path))
            values = [v for v in values if types & _types_of(v)]
        for keyword in flat:
            of_value = any(keyword in OF_TYPE[kind] for value in values for kind in _types_of(value))
            if keyword not in ("enum", "type") and (of_value or keyword not in KEYWORDS_OF_TYPES):
                raise _refused(
                    path,
                    f"{keyword!r} beside 'enum' or 'const' is not supported",
                    "name the values it admits",
                )
        if not values:
            raise _refused(path, "no value of 'enum' or 'const' is of the type beside it", "name one that is")
        _check_numbers(values, path)
        return values

    def _any_of(self, flat: Schema, keyword: str, path: str, depth: int) -> Schema:
        rest = dict(flat)
        options = rest.pop(keyword)
        if not isinstance(options, list) or not options:
            raise _refused(path, f"{keyword!r} is not a list of schemas", "it should be one")
        flats = [self._flat(option, f"{path}/{keyword}/{i}", depth + 1) for i, option in enumerate(options)]
        if rest:
            flats = [self._merged(rest, [self._inlined(option, path, depth)], path) for option in flats]
        if keyword == "oneOf":
            flats = self._exclusive(flats, path, depth)
        return {"anyOf": [self._schema(f, f"{path}/{keyword}/{i}", depth + 1) for i, f in enumerate(flats)]}

    def _exclusive(self, flats: list[Schema], path: str, depth: int) -> list[Schema]:
        """Options of which no value satisfies two, so that oneOf is anyOf."""
        inlined = [self._inlined(flat, path, depth) for flat in flats]
        self._spend(len(flats) * len(_properties(inlined[0])), path)
        telling = [
            name
            for name in _properties(inlined[0])
            if _all_apart([_finite(self._property(flat, name, path, depth)) for flat in inlined])
        ]
        if telling and all(self._types(flat, path) == ["object"] for flat in inlined):
            if all(telling[0] in flat.get("required", ()) for flat in inlined):
                return flats
            return [_merge(flat, {"required": [telling[0]]}, path) for flat in inlined]  # or none could tell
        if _all_apart([_finite(flat) for flat in inlined]) or _all_apart(
            [self._kinds(f, path) for f in inlined]
        ):
            return flats
        raise _refused(
            path, "'oneOf' of schemas that a value may satisfy together is not supported",
            "use 'anyOf', or give each a required property with a 'const' of its own",
        )  # fmt: skip

    def _property(self, flat: Schema, name: str, path: str, depth: int) -> Schema:
        found = _properties(flat).get(name)
        return {} if found is None else self._inlined(self._flat(found, path, depth + 1), path, depth)

    def _kinds(self, flat: Schema, path: str) -> list[Any] | None:
        """The types of all values that satisfy it; None for any."""
        if "enum" in flat:
            return [kind for value in flat["enum"] for kind in _types_of(value) - {"integer"}]
        types = _type_list(flat["type"], path) if "type" in flat else None
        return None if types is None else list({"number" if kind == "integer" else kind for kind in types})

    def _types(self, flat: Schema, path: str) -> list[str] | None:
        """None for any. Without the keyword, the types that the others speak of, as xgrammar has it."""
        if "type" in flat:
            return _type_list(flat["type"], path)
        types = [
            kind for kind, group in OF_TYPE.items() if kind != "integer" and any(k in flat for k in group)
        ]
        return types or None

    def _of_type(self, kind: str, flat: Schema, path: str, depth: int) -> Schema:
        own = {keyword: flat[keyword] for keyword in OF_TYPE[kind] if keyword in flat}
        for keyword in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            if keyword in own:
                limit = _count(own[keyword], keyword, path)
                if keyword.startswith("min") and limit > UNLIMITED:
                    raise _refused(path, f"{keyword!r} {limit} is more than a sequence can hold", "lower it")
                own[keyword] = limit
                if limit > UNLIMITED:
                    del own[keyword]
        if kind in ("integer", "number"):
            _check_number(own, kind, path)
        elif kind == "string":
            own = self._string(own, path)
        elif kind == "array":
            own = self._array(own, path, depth)
        elif kind == "object":
            own = self._object(own, path, depth)
        return {"type": kind, **own}

    def _string(self, own: Schema, path: str) -> Schema:
        if own.get("format") in OTHER_FORMATS:
            raise _refused(path, f"format {own['format']!r} is not supported", "use 'pattern'")
        if own.get("format") not in (*FORMATS, *FORMAT_PATTERNS):
            own.pop("format", None)
        lengths = "minLength" in own or "maxLength" in own
        several = [keyword for keyword in ("format", "pattern") if keyword in own] + [
            "minLength or maxLength"
        ] * lengths
        if len(several) > 1:
            raise _refused(
                path, f"{several[0]!r} beside {several[1]} is not supported", "say it in one 'pattern'"
            )
        if lengths:
            least, most = own.pop("minLength", 0), own.pop("maxLength", "")
            if most != "" and least > most:
                raise _refused(path, f"minLength {least} is above maxLength {most}", "it should not be")
            own["pattern"] = f"^{PLAIN_CHARACTER}{{{least},{most}}}$"
        elif "pattern" in own:
            own["pattern"] = self._pattern(own["pattern"], f"{path}/pattern")
        elif own.get("format") in FORMAT_PATTERNS:
            own["pattern"] = FORMAT_PATTERNS[own.pop("format")]
        return own

    def _pattern(self, pattern: Any, path: str) -> str:
        if not isinstance(pattern, str):
            raise _refused(path, "the pattern is not a string", "it should be one")
        try:
            check_regex(pattern)
            pattern = with_counted_options(without_names(pattern))
            pattern = without_surrogates(ascii_regex(pattern))
        except GrammarError as error:
            raise GrammarError(f"{error} (at {_short(path)})") from None
        if not self._is_safe_pattern(pattern):
            raise _refused(
                path,
                "a pattern that may ask for characters which need an escape in JSON is not supported",
                "allow others in their place, or fewer repetitions",
            )
        return pattern

    def _array(self, own: Schema, path: str, depth: int) -> Schema:
        if own.pop("uniqueItems", False) and own.get("maxItems", 2) > 1:
            raise _refused(path, "'uniqueItems' is not supported")
        for keyword in ("contains", "minContains", "maxContains"):
            if keyword in own:
                raise _refused(path, f"{keyword!r} is not supported")
        if isinstance(own.get("items"), list):  # until draft 2019-09
            own["prefixItems"] = own.pop("items")
            own["items"] = own.pop("additionalItems", True)
        own.pop("additionalItems", None)  # says nothing without
        if "items" in own:
            own.pop("unevaluatedItems", None)
        elif "unevaluatedItems" in own:
            own["items"] = own.pop("unevaluatedItems")
        elif "minItems" in own or "maxItems" in own:
            own["items"] = True
        if "items" in own and own["items"] is not False:
            own["items"] = self._schema(own["items"], f"{path}/items", depth + 1)
        if "prefixItems" in own:
            if not isinstance(own["prefixItems"], list):
                raise _refused(path, "'prefixItems' is not a list of schemas", "it should be one")
            own["prefixItems"] = [
                self._schema(item, f"{path}/prefixItems/{i}", depth + 1)
                for i, item in enumerate(own["prefixItems"])
            ]
        return own

    def _object(self, own: Schema, path: str, depth: int) -> Schema:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if keyword in own:
                raise _refused(path, f"{keyword!r} is not supported")
        properties = dict(_object_of(own, "properties", path))
        patterns = _object_of(own, "patternProperties", path)
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refused(path, "'required' is not a list of names", "it should be one")
        if "additionalProperties" not in own and "unevaluatedProperties" in own:
            own["additionalProperties"] = own["unevaluatedProperties"]
        own.pop("unevaluatedProperties", None)
        more = own.get("additionalProperties", True)
        for name in required:
            if name not in properties:
                if more is False or patterns:
                    raise _refused(path, f"required {_short(name)!r} is not in 'properties'", "put it there")
                properties[name] = more
        several = [k for k, there in (("properties", properties), ("patternProperties", patterns)) if there]
        if "propertyNames" in own and (several or more is False):
            beside = several[0] if several else "additionalProperties"
            raise _refused(path, f"'propertyNames' beside {beside!r} is not supported")
        if len(patterns) > 1 or (
            patterns and (properties or own.get("additionalProperties", False) is not False)
        ):
            raise _refused(
                path,
                "'patternProperties' with several patterns, or beside 'properties' or 'additionalProperties',"
                " is not supported",
                "name the properties, or use one pattern alone",
            )
        for keyword, schemas in (("properties", properties), ("patternProperties", patterns)):
            prepared = {n: self._schema(s, f"{path}/{keyword}/{n}", depth + 1) for n, s in schemas.items()}
            if keyword == "patternProperties":
                prepared = {self._pattern(n, f"{path}/{keyword}"): s for n, s in prepared.items()}
            if prepared:
                own[keyword] = prepared
        if "propertyNames" in own:
            strings = {"allOf": [{"type": "string"}, own["propertyNames"]]}
            own["propertyNames"] = self._schema(strings, f"{path}/propertyNames", depth + 1)
        if isinstance(more, dict):
            own["additionalProperties"] = self._schema(more, f"{path}/additionalProperties", depth + 1)
        elif (
            ("minProperties" in own or "maxProperties" in own) and not several and "propertyNames" not in own
        ):
            own["additionalProperties"] = more
        any_name = own.get("additionalProperties", False) is not False or patterns or "propertyNames" in own
        if any_name and own.get("minProperties", 0) > len(set(required)) + 1:
            raise _refused(
                path,
                "'minProperties' of more than 'required' and one is not supported beside properties of any"
                " name, which could come twice",
                "lower it, or require the properties",
            )
        return own


KEYWORDS_OF_TYPES = {keyword for group in OF_TYPE.values() for keyword in group}


def _merge(one: Schema, other: Schema, path: str) -> Schema:
    """What satisfies both, where that can be said in one subschema."""
    for first, second in ((one, other), (other, one)):
        for keyword, of in LEFT_OVER.items():
            if first.get(keyword, True) is not True and any(
                k in second and not _within(second[k], first.get(k), k) for k in of
            ):
                raise _refused(
                    path,
                    f"{keyword!r} apart from what it speaks of, in another schema of a value, is unsupported",
                    "write them as one schema",
                )
    merged = dict(one)
    for keyword, value in other.items():
        if keyword not in merged or merged[keyword] == value:
            merged[keyword] = value
        elif keyword in TIGHTER and all(_is_number(v) for v in (merged[keyword], value)):
            merged[keyword] = TIGHTER[keyword](merged[keyword], value)
        elif keyword == "required" and isinstance(value, list) and isinstance(merged[keyword], list):
            merged[keyword] = [*merged[keyword], *(name for name in value if name not in merged[keyword])]
        elif keyword == "enum" and isinstance(value, list) and isinstance(merged[keyword], list):
            admitted = {_key(v) for v in value}
            merged[keyword] = [v for v in merged[keyword] if _key(v) in admitted]
        elif keyword == "type":
            merged[keyword] = _common_types(_type_list(merged[keyword], path), _type_list(value, path), path)
        elif keyword == "properties" and isinstance(value, dict) and isinstance(merged[keyword], dict):
            both = dict(merged[keyword])
            for name, schema in value.items():
                both[name] = (
                    schema if name not in both or both[name] == schema else {"allOf": [both[name], schema]}
                )
            merged[keyword] = both
        elif keyword in ("items", "additionalProperties"):
            both_ways = [v for v in (merged[keyword], value) if v is not True]
            none = any(v is False for v in both_ways)
            merged[keyword] = False if none else both_ways[0] if len(both_ways) == 1 else {"allOf": both_ways}
        else:
            raise _refused(
                path,
                f"{keyword!r} in several schemas for one value is not supported",
                "write them as one schema",
            )
    return merged


def _within(inner: Any, outer: Any, keyword: str) -> bool:
    """Whether the same children are spoken of, or fewer by name."""
    by_name = keyword == "properties" and isinstance(inner, dict) and isinstance(outer, dict)
    return bool(inner == outer) or (by_name and inner.keys() <= outer.keys())


def _common_types(one: list[str], other: list[str], path: str) -> list[str]:
    kept = [t for t in one if t in other or (t == "integer" and "number" in other)]
    kept += [t for t in other if t == "integer" and "number" in one and t not in kept]
    if not kept:
        raise _refused(path, "no type satisfies all 'type' for one value", "write one that does")
    return kept


def _type_list(value: Any, path: str) -> list[str]:
    types = value if isinstance(value, list) else [value]
    for kind in types:
        if not isinstance(kind, str) or kind not in OF_TYPE:
            raise _refused(
                path, f'Unsupported type "{_short(str(kind))}"', f"it should be one of {', '.join(OF_TYPE)}"
            )
    if not types:
        raise _refused(path, "'type' is empty", f"it should have one of {', '.join(OF_TYPE)}")
    return list(dict.fromkeys(types))


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    kinds = {type(None): "null", float: "number", str: "string", list: "array", dict: "object"}
    return {kinds[type(value)]}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _key(value: Any) -> str:
    """Equal for equal values of JSON, in which 1.0 is 1 and true is not."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return int(value) if _is_number(value) and value == value // 1 else value

    return json.dumps(plain(value), sort_keys=True)


def _properties(flat: Schema) -> Schema:
    found = flat.get("properties")
    return found if isinstance(found, dict) else {}


def _finite(flat: Schema) -> list[Any] | None:
    """All values that satisfy it, or more; None where they are not listed."""
    values = flat.get("enum")
    return values if isinstance(values, list) else None


def _all_apart(sets: Iterable[list[Any] | None]) -> bool:
    """Whether no value is in two of the sets; False if one is not known."""
    seen: set[str] = set()
    for values in sets:
        if values is None:
            return False
        keys = {_key(value) for value in values}
        if keys & seen:
            return False
        seen |= keys
    return True


def _object_of(own: Schema, keyword: str, path: str) -> Schema:
    value = own.get(keyword, {})
    if not isinstance(value, dict):
        raise _refused(path, f"{keyword!r} is not an object", "it should be one")
    return value


def _count(value: Any, keyword: str, path: str) -> int:
    if not _is_number(value) or value != value // 1 or value < 0:
        raise _refused(path, f"{keyword!r} is {_short(str(value))}", "it should be an integer of at least 0")
    return int(value)


def _check_number(own: Schema, kind: str, path: str) -> None:
    """Bounds of integers become integers."""
    for keyword in OF_TYPE[kind]:
        if keyword in own and not _is_number(own[keyword]):
            raise _refused(path, f"{keyword!r} is {_short(str(own[keyword]))}", "it should be a number")
    if kind == "integer":
        for keyword, whole in (("minimum", math.ceil), ("exclusiveMinimum", math.floor),
                               ("maximum", math.floor), ("exclusiveMaximum", math.ceil)):  # fmt: skip
            if keyword in own:
                own[keyword] = whole(own[keyword])
    if "multipleOf" not in own:
        return
    step = own["multipleOf"]
    if kind == "number" or step != step // 1 or not 0 < step <= MOST_MULTIPLE:
        raise _refused(
            path, f"'multipleOf' {step} of type {kind} is not supported",
            f"it should be an integer of 1 to {MOST_MULTIPLE}, of type integer",
        )  # fmt: skip
    low = max((own[k] for k in ("minimum", "exclusiveMinimum") if k in own), default=None)
    high = min((own[k] for k in ("maximum", "exclusiveMaximum") if k in own), default=None)
    if (low is None) != (high is None) or (low is not None and high - low >= MOST_MULTIPLES_RANGE):
        raise _refused(
            path, "'multipleOf' with this range is not supported",
            f"give both bounds, less than {MOST_MULTIPLES_RANGE} apart, or none",
        )  # fmt: skip


def _check_numbers(value: Any, path: str) -> None:
    """Integers that xgrammar would write as another number."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_numbers(item, path)
        elif isinstance(item, int) and not -(2**63) <= item < 2**63 and not _is_float(item):
            raise _refused(
                path, f"{_short(str(item))} in 'enum' or 'const' has more than 64 bits", "use a string"
            )


def _is_float(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False
