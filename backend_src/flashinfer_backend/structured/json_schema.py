# SPDX-License-Identifier: Apache-2.0
"""Checks a JSON schema before llguidance enforces it, and brings it into a form that means the same there.

What comes out means to llguidance what it means to the package jsonschema, or less; a keyword that cannot be
kept to is refused by its name and place. Unknown keywords are annotations, as the standard has it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import unquote

from flashinfer_backend.core.bounds import GRAMMAR
from flashinfer_backend.structured.grammar import GrammarError
from flashinfer_backend.structured.regex import literal_names, rust_regex

ITEM_LIMIT_COST = 6  # subschemas that a limit of items counts for: 2900 took 3.4 s and 481 MB
CHECK_COST = 10  # steps to check a subschema: some 20 us
CONTAINER_COST = 5  # and a list or object in a constant: 6000 took 1.5 s, and no mask has room for 2000
EXACT = 2**53 - 1  # llguidance rounds larger numbers, and ends the process with -2^63
TOO_DEEP = f"it is nested too deeply; at most {GRAMMAR.nesting} subschemas in each other"
TOO_LARGE = "it has a number that is too large; write it as a string, or use one up to 2^53"
DIGITS = "give at most 15, all of them within 15 places behind the point"
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
OF_TYPE: dict[str, tuple[str, ...]] = {
    "null": (),
    "boolean": (),
    "integer": NUMBERS,
    "number": NUMBERS,
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "object": ("properties", "patternProperties", "additionalProperties", "required", "minProperties",
               "maxProperties", "propertyNames"),
}  # fmt: skip
# Keywords that are refused unless they have one of these values, with which they say nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (), "if": (), "$dynamicRef": (), "$recursiveRef": (), "contains": (), "uniqueItems": (False,),
    "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},),
    "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}),
}  # fmt: skip
PARTS = ("allOf", "anyOf", "oneOf", "$ref")
OBJECT = ("properties", "patternProperties", "additionalProperties", "required")
NAMING = {"type", "properties", "required", "title", "description"}  # say at most which properties there are
COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "enum", "const")  # that say what type a value has
# Keywords that hold no schemas, or none that is checked as one.
KEPT = ("type", "enum", "const", *NUMBERS, *COUNTS, "format", "required", "propertyNames")
NATIVE_FORMATS = ("duration", "email", "hostname", "time", "uri", "uuid", "ipv4")
REFUSED_FORMATS = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template",
)  # fmt: skip
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_POINTER = "(/([^/~]|~[01])*)*"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = rf"({_H16}:{_H16}|{_BYTE}(\.{_BYTE}){{3}})"
_IPV6 = (  # as RFC 3986 has it
    f"({_H16}:){{6}}{_LS32}",
    *(f"({_H16}(:{_H16}){{0,{n}}})?::({_H16}:){{{4 - n}}}{_LS32}" for n in range(4)),
    f"({_H16}(:{_H16}){{0,4}})?::{_LS32}",
    f"({_H16}(:{_H16}){{0,5}})?::{_H16}",
    f"({_H16}(:{_H16}){{0,6}})?::",
    f"::({_H16}:){{5}}{_LS32}",
)
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"([0-9]{{4}}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
FORMAT_PATTERNS = {  # of formats that llguidance has not, or has with a 29 February of every year
    "date": f"^{_DATE}$",
    "date-time": rf"^{_DATE}T{_CLOCK}:([0-5][0-9]|60)(\.[0-9]+)?(Z|[+-]{_CLOCK})$",
    "ipv6": f"^({'|'.join(_IPV6)})$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}

HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
INDEX = re.compile("0|[1-9][0-9]*")  # of an element, as RFC 6901 has it

Schema = dict[str, Any]


def parse_schema(text: str) -> Any:
    """The JSON of a schema. Raises GrammarError."""
    try:
        schema = json.loads(text, parse_int=_checked_int, parse_constant=_refuse_constant)
        json.dumps(schema, ensure_ascii=False).encode()
        return schema
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None
    except UnicodeEncodeError:
        raise _half_a_pair(schema) from None
    except GrammarError:
        raise
    except json.JSONDecodeError as error:
        raise GrammarError(f"Failed to parse JSON: {error}") from None
    except (ValueError, OverflowError):
        raise GrammarError(TOO_LARGE) from None


def _half_a_pair(root: Any) -> GrammarError:
    """What is wrong with a schema that has half of a surrogate pair somewhere."""
    pending: list[tuple[str, Any]] = [("#", root)]
    while True:
        path, node = pending.pop()
        texts = [node] if isinstance(node, str) else node if isinstance(node, dict) else ()
        if found := next(filter(None, map(HALF.search, texts)), None):
            half = f"\\u{ord(found[0]):04x} is half of a surrogate pair, which is no character"
            return _refused(path, half, "write the character itself")
        children = (
            node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ())
        )
        pending += [(_short(f"{path}/{name}"), child) for name, child in children]


def _checked_int(text: str) -> int:
    """An integer that is a float as well, as limits and steps are compared with some."""
    float(number := int(text))
    return number


def _refuse_constant(name: str) -> None:
    raise GrammarError(f"Failed to parse JSON: {name} is not JSON")


def checked_schema(root: Any) -> Any:
    """The schema for llguidance. Raises GrammarError, which names the keyword and its place."""
    checks = SchemaChecks()
    checked = checks.check(root)
    return {**checked, "$defs": checks.definitions} if checks.definitions else checked


@dataclass
class _Value:
    """What combined schemas say of one value together."""

    keywords: ClassVar = ("pattern", "format", "enum", "const", *NUMBERS)
    path: str = ""  # of the last one
    multiple: int = 1
    patterns: int = 0
    constants: int = 0
    # The rounded bounds on one side, and the exclusive ones on the other.
    above: tuple[set[float], set[float]] = field(default_factory=lambda: (set(), set()))
    below: tuple[set[float], set[float]] = field(default_factory=lambda: (set(), set()))

    @classmethod
    def of(cls, checked: Schema, path: str) -> _Value:
        # As in _check_values: a whole bound and one less than 1 beyond it.
        limits = []
        for other, exclusive, whole in (
            (("maximum", "exclusiveMaximum"), "exclusiveMinimum", math.floor),
            (("minimum", "exclusiveMinimum"), "exclusiveMaximum", math.ceil),
        ):
            rounded = {whole(checked[keyword]) for keyword in other if keyword in checked}
            strict = exclusive in checked and checked.get("type") != "integer"
            limits.append((rounded, {checked[exclusive]} if strict else set()))
        return cls(
            path,
            max(1, int(checked.get("multipleOf", 1))),
            ("pattern" in checked) + (str(checked.get("format")) in FORMAT_PATTERNS),
            len(checked.get("enum", ())) + ("const" in checked),
            *limits,
        )

    def add(self, other: _Value) -> None:
        self.path = other.path or self.path
        # Beyond the bound it is too large already.
        self.multiple = math.lcm(min(self.multiple, GRAMMAR.multiple_of + 1), other.multiple)
        self.patterns += other.patterns
        self.constants += other.constants
        for mine, others in zip(self.above + self.below, other.above + other.below, strict=True):
            mine |= others

    def check(self, general: _Value) -> None:
        """What is said of it, and what `general` says of it as well. Raises GrammarError."""
        path = self.path or general.path
        patterns, constants = self.patterns + general.patterns, self.constants + general.constants
        if math.lcm(min(general.multiple, GRAMMAR.multiple_of + 1), self.multiple) > GRAMMAR.multiple_of:
            raise _refused(
                path,
                "the least common multiple of 'multipleOf' in combined schemas is above"
                f" {GRAMMAR.multiple_of}",
                "lower them",
            )
        if patterns > GRAMMAR.patterns:
            raise _refused(path, f"combined schemas have more than {GRAMMAR.patterns} patterns", "join them")
        if patterns * constants > GRAMMAR.tested:
            raise _refused(
                path,
                f"{patterns} patterns are for {constants} values of 'enum', more than {GRAMMAR.tested} tests",
                "drop the patterns or the values that do not match",
            )
        for exclusive, (rounded, strict), (others, other_strict) in (
            ("exclusiveMinimum", self.above, general.above),
            ("exclusiveMaximum", self.below, general.below),
        ):
            if rounded & strict or rounded & other_strict or others & strict:
                raise _refused(
                    path,
                    f"{exclusive!r} with a range below 1 in combined schemas is not supported",
                    "give a bound that is not whole",
                )


class SchemaChecks:
    """Checks schemas that become parts of one document: what $ref names in them goes to its `definitions`.
    `steps` bounds the time of that: all that grows with a schema, or with what it says twice, takes some, of
    at most 2 us each. The characters that are written do, so it also bounds these."""

    def __init__(self, steps: int = GRAMMAR.written) -> None:
        """steps: those that are left, of a guide with several documents."""
        self.steps = steps
        self.definitions: Schema = {}
        self.named = 0
        self.multiples = 0.0  # the sum of all multipleOf
        self._left = GRAMMAR.subschemas
        self._levels = 0
        # By "/" and the name of the property that has the value, "[]" of an element. "" are values at the top
        # of what $ref names and properties of any name: each can be one of the others.
        self._values: dict[str, _Value] = {"": _Value()}

    def check(self, root: Any, at: str = "#") -> Any:
        """The subschema that the pointer `at` names. Raises GrammarError as checked_schema does."""
        try:
            checked = _Root(self, root).check(at)
        except RecursionError:
            raise GrammarError(TOO_DEEP) from None
        general = self._values[""]
        for value in self._values.values():
            value.check(_Value() if value is general else general)
        return checked

    def combine(self, checked: Schema, path: str, value: str) -> None:
        """Note a schema that may speak of the same value as others."""
        if not checked.keys().isdisjoint(_Value.keywords):
            self._values.setdefault(value, _Value()).add(_Value.of(checked, path))

    def deepen(self, levels: int, pointer: str) -> None:
        """Count the levels of what $ref names."""
        self._levels += levels
        if self._levels > GRAMMAR.levels:
            raise _refused(
                pointer, f"what $ref names has more than {GRAMMAR.levels} levels together", "use fewer"
            )

    def take(self, path: str, steps: int) -> None:
        """Count steps."""
        self.steps -= steps
        if self.steps < 0:
            raise GrammarError(
                f"it is too large at {_short(path)}: with what $ref names, a schema should take at most"
                f" {GRAMMAR.written} steps to check, one for each character, keyword and $ref"
            )

    def spend(self, path: str, depth: int, subschemas: int = 1) -> None:
        """Count subschemas."""
        self.take(path, CHECK_COST * subschemas)
        self._left -= subschemas
        if self._left < 0 or depth > GRAMMAR.nesting:
            raise GrammarError(
                f"it is too large at {_short(path)}: at most {GRAMMAR.subschemas} subschemas,"
                f" {GRAMMAR.nesting} of them in each other"
            )


class _Root:
    def __init__(self, checks: SchemaChecks, root: Any) -> None:
        self._checks, self._root = checks, root
        self._named: dict[str, Any] = {}  # by pointer
        self._ending: set[str] = set()  # pointers whose schemas are not themselves by allOf or $ref alone
        self._names: dict[tuple[str, bool], str] = {}  # of definitions, by pointer and whether it is merged
        self._pending: list[tuple[str, bool]] = []
        self._deepest = 0  # level of the schema at work

    def check(self, at: str) -> Any:
        checked = self._schema(self._resolve(at, at), at, 0)
        while self._pending:
            pointer, merged = self._pending.pop()
            self._deepest = 0
            target = self._schema(self._resolve(pointer, pointer), pointer, 0, merged)
            self._checks.deepen(self._deepest + 1, pointer)
            self._checks.definitions[self._names[pointer, merged]] = target
        return checked

    def _schema(self, node: Any, path: str, depth: int, merged: bool = False, value_of: str = "") -> Any:
        """merged: other schemas speak of the same value, whose properties may be theirs. value_of: which
        value, as SchemaChecks.combine has it."""
        path = _short(path)  # else long names take the time to copy them for each subschema
        self._checks.spend(path, depth)
        self._deepest = max(self._deepest, depth)
        if isinstance(node, bool):
            return {} if node else False
        if not isinstance(node, dict):
            raise _refused(path, f"a schema is {type(node).__name__}", "it should be an object or a boolean")
        if "$id" in node and path != "#":
            raise _refused(path, "'$id' below the top, which changes what $ref means, is not supported")
        self._checks.take(path, len(node))
        node = _without_vacuous(node)
        for keyword in PARTS[:3]:
            if keyword in node and not (isinstance(node[keyword], list) and node[keyword]):
                raise _refused(path, f"{keyword!r} is not a list of schemas", "it should be one")
        for keyword, nothing in REFUSED.items():
            if keyword in node and not _is_one_of(node[keyword], nothing):
                node = _evaluated(node, keyword, path)
        combined = [keyword for keyword in PARTS if keyword in node]
        apart = bool(
            merged or len(combined) > 1 or any(k in node for k in OBJECT) or len(node.get("allOf", ())) > 1
        )
        merged = bool(merged or combined)
        checked: Schema = {}
        for keyword, value in node.items():  # in their order, which properties of several parts have
            below = f"{path}/{keyword}"
            if keyword in KEPT:
                self._checks.take(path, len(json.dumps(value)))
                checked[keyword] = value
            elif keyword == "pattern":
                checked[keyword] = self._pattern(value, below)
            elif keyword == "$ref":
                checked[keyword] = f"#/$defs/{self._name(value, path, apart)}"
            elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems") or (
                keyword == "items" and isinstance(value, list)
            ):
                if not isinstance(value, list) or not value:
                    raise _refused(path, f"{keyword!r} is not a list of schemas", "it should be one")
                inner, of = (apart, value_of) if keyword in PARTS else (merged, "[]")
                checked[keyword] = [
                    self._schema(v, f"{below}/{i}", depth + 1, inner, of) for i, v in enumerate(value)
                ]
            elif keyword in ("properties", "patternProperties"):
                if not isinstance(value, dict):
                    raise _refused(path, f"{keyword!r} is not an object", "it should be one")
                self._checks.take(path, sum(map(len, value)))
                checked[keyword] = {
                    n: self._schema(
                        v, f"{below}/{n}", depth + 1, merged, f"/{n}" if keyword == "properties" else ""
                    )
                    for n, v in value.items()
                }
            elif keyword in ("items", "additionalItems", "additionalProperties"):
                of = "" if keyword == "additionalProperties" else "[]"
                checked[keyword] = self._schema(value, below, depth + 1, merged, of)
        self._checks.spend(path, depth, CONTAINER_COST * _check_values(checked, path))
        if merged:
            self._checks.combine(checked, path, value_of)
        else:
            _Value.of(checked, path).check(_Value())
        self._checks.multiples += checked.get("multipleOf", 0)
        if self._checks.multiples > 2 * GRAMMAR.multiple_of:
            raise _refused(
                path, f"all 'multipleOf' together are above {2 * GRAMMAR.multiple_of}", "lower them"
            )
        pairs = len(checked.get("patternProperties", ())) ** 2  # which are compared
        self._checks.spend(path, depth, pairs)
        if max(checked.get("minItems", 0), checked.get("maxItems", 0)) > 1:
            self._checks.spend(path, depth, ITEM_LIMIT_COST)
        self._checks.take(path, len(_check_format(checked, path)))
        if not merged:
            _close(checked)
        self._check_object(checked, path, merged)
        if "oneOf" in checked:
            self._check_one_of(node["oneOf"], checked, path)
        _add_type(checked)
        return checked

    def _name(self, pointer: Any, path: str, merged: bool) -> str:
        self._resolve(pointer, path)
        self._check_end(pointer, path)
        if (pointer, merged) not in self._names:
            self._checks.named += 1
            self._names[pointer, merged] = f"d{self._checks.named}"
            self._pending.append((pointer, merged))
        return self._names[pointer, merged]

    def _check_end(self, pointer: str, path: str) -> None:
        """Schemas that are one another by allOf or $ref alone have no end."""
        entered: set[str] = set()
        pending = [(pointer, False)]
        while pending:
            pointer, left = pending.pop()
            if left:
                entered.remove(pointer)
                self._ending.add(pointer)
            elif pointer in entered:
                raise _refused(path, f"$ref {_short(pointer)!r} leads back to itself")
            elif pointer not in self._ending:
                entered.add(pointer)
                pending.append((pointer, True))
                node = self._resolve(pointer, path)
                parts = node.get("allOf") if isinstance(node, dict) else None
                parts = [node, *(parts if isinstance(parts, list) else [])]
                self._checks.take(path, len(parts))
                further = [part.get("$ref") for part in parts if isinstance(part, dict)]
                pending += [(each, False) for each in further if isinstance(each, str)]

    def _resolve(self, pointer: Any, path: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise _refused(
                path,
                f"$ref {_short(str(pointer))!r} is not supported",
                "it should begin with #/ and name a part of the schema itself",
            )
        if pointer not in self._named:
            target = self._root
            for part in pointer.split("/")[1:]:
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                try:
                    at = int(part) if isinstance(target, list) and INDEX.fullmatch(part) else part
                    target = target[at]
                except (KeyError, ValueError, IndexError, TypeError):
                    raise _refused(
                        path,
                        f"$ref {_short(pointer)!r} names nothing",
                        "it should name a part of the schema itself",
                    ) from None
            self._named[pointer] = target
        return self._named[pointer]

    def _check_one_of(self, options: list[Any], checked: Schema, path: str) -> None:
        """oneOf becomes anyOf where no value satisfies two options: each has a constant of its own, or in a
        property that all of them have; or another type."""
        flats = [self._target(option, path) for option in options]
        apart = _all_apart(self._constants(flats, path)) or _all_apart(
            _types(flat, constants)
            for flat, constants in zip(flats, self._constants(flats, path), strict=True)
        )
        if not apart and all(flat.get("type") == "object" for flat in flats):
            for name in _properties(flats[0]):
                named = (self._target(_properties(flat).get(name), path) for flat in flats)
                if not _all_apart(self._constants(named, path)):
                    continue
                for option in checked["oneOf"]:
                    option["required"] = [*option.get("required", ()), name]
                apart = True
                break
        if not apart:
            raise _refused(
                path,
                "'oneOf' of schemas that a value may satisfy together is not supported",
                "use 'anyOf', or give each a property with a 'const' of its own",
            )
        if "anyOf" in checked:
            checked["allOf"] = [*checked.get("allOf", ()), {"anyOf": checked.pop("oneOf")}]
        else:
            checked["anyOf"] = checked.pop("oneOf")

    def _constants(self, flats: Iterable[Schema], path: str) -> Iterator[list[Any] | None]:
        """The values of each schema that names them."""
        for flat in flats:
            values = [flat["const"]] if "const" in flat else flat.get("enum")
            self._checks.take(path, len(json.dumps(values)))
            yield values if isinstance(values, list) else None

    def _target(self, node: Any, path: str) -> Schema:
        for _ in range(GRAMMAR.nesting):
            self._checks.take(path, 1)
            if not isinstance(node, dict) or "$ref" not in node:
                break
            node = self._resolve(node["$ref"], path)
        return node if isinstance(node, dict) else {}

    def _pattern(self, pattern: Any, path: str) -> str:
        if not isinstance(pattern, str):
            raise _refused(path, "the pattern is not a string", "it should be one")
        try:
            written = rust_regex(pattern)
        except GrammarError as error:
            raise GrammarError(f"{error} (at {_short(path)})") from None
        self._checks.take(path, len(written))
        return written

    def _check_object(self, checked: Schema, path: str, merged: bool) -> None:
        required, properties = checked.get("required", []), checked.get("properties", {})
        optional = len(properties.keys() - set(required))
        if optional > GRAMMAR.optional:
            raise _refused(
                path,
                f"an object has {optional} properties that are not required",
                f"at most {GRAMMAR.optional}",
            )
        if "propertyNames" in checked:
            _check_names(checked, path)
        patterns = checked.pop("patternProperties", {})
        # A pattern that lists names becomes properties: with no name left for it, it lets a comma through and
        # nothing follow. Other schemas of a merged one may have the names.
        for pattern, schema in patterns.items():
            written = self._pattern(pattern, f"{path}/patternProperties")
            names = literal_names(pattern)
            if names and (merged or names <= {*properties, *required}):
                self._checks.take(path, sum(map(len, names)) + len(names) * len(json.dumps(schema)))
                named = {
                    n: {"allOf": [properties[n], schema]} if n in properties else schema
                    for n in sorted(names)
                }
                checked["properties"] = properties = {**properties, **named}
            else:
                checked.setdefault("patternProperties", {})[written] = schema
        patterns = checked.get("patternProperties")
        any_name = checked.get("additionalProperties", True) is not False or patterns
        if any_name and checked.get("minProperties", 0) > len(set(required)) + 1:
            raise _refused(
                path,
                "'minProperties' of more than 'required' and one is not supported where properties have any"
                " name, which could come twice",
                "lower it, or require the properties",
            )


def _refused(path: str, why: str, advice: str = "leave it out") -> GrammarError:
    return GrammarError(f"{why} (at {_short(path)}); {advice}")


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:60]}...{text[-37:]}"


def _without_vacuous(node: Schema) -> Schema:
    """Without empty lists and objects, and keywords that need another one."""
    dropped = {
        k for k in ("allOf", "required", "patternProperties", "prefixItems") if node.get(k) in ([], {})
    }
    if "then" not in node and "else" not in node:
        dropped.add("if")
    if node.get("propertyNames") in (True, {}, {"type": "string"}):  # names are strings
        dropped.add("propertyNames")
    if node.get("uniqueItems") is True and node.get("maxItems") in (0, 1):
        dropped.add("uniqueItems")
    if "items" in node and not isinstance(node["items"], list):
        dropped |= {"unevaluatedItems", "additionalItems"}
    if "additionalProperties" in node:
        dropped.add("unevaluatedProperties")
    return {k: v for k, v in node.items() if k not in dropped}


def _evaluated(node: Schema, keyword: str, path: str) -> Schema:
    """unevaluatedX is additionalX where no other schema speaks of the same value."""
    other = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}.get(keyword)
    if other is None or isinstance(node.get(other), list):
        raise _refused(path, f"{keyword!r} is not supported")
    named: Schema = {}
    for member in node.get("allOf", ()) if keyword == "unevaluatedProperties" else ():
        if isinstance(member, dict) and member.keys() <= NAMING:
            named |= dict.fromkeys(_properties(member), True)
        else:
            named = {}
            break
    beside = [k for k in ("allOf", "anyOf", "oneOf", "$ref") if k in node and not (k == "allOf" and named)]
    if beside:
        raise _refused(
            path, f"{keyword!r} next to {beside[0]!r} is not supported", "write them as one schema"
        )
    changed = {k: v for k, v in node.items() if k != keyword}
    if named:
        changed["properties"] = named | _properties(node)
    return {**changed, other: node[keyword]}


def _check_values(checked: Schema, path: str) -> int:
    """Types, numbers, counts, constants and names. Returns how many lists and objects these have."""
    kinds = checked.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in OF_TYPE:
            wrong = _short(str(kind))
            raise _refused(path, f'Unsupported type "{wrong}"', f"it should be one of {', '.join(OF_TYPE)}")
    if checked.get("type") == []:
        raise _refused(path, "'type' is empty", f"it should have one of {', '.join(OF_TYPE)}")
    for keyword in NUMBERS:
        value = checked.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refused(path, f"{keyword!r} is {_short(str(value))}", "it should be a number")
        if abs(value) > sys.float_info.max:
            raise GrammarError(TOO_LARGE)
        if abs(value) > EXACT:  # a bound that is far out moves in
            if (value > 0) != keyword.endswith("aximum"):
                raise _refused(path, f"{keyword!r} {_short(str(value))} is beyond 2^53", "use a string")
            checked[keyword] = EXACT if value > 0 else -EXACT
        elif _is_rounded(value):
            raise _refused(path, f"{keyword!r} {value!r} has too many digits", DIGITS)
    low = max(checked.get("minimum", -EXACT), checked.get("exclusiveMinimum", -EXACT))
    high = min(checked.get("maximum", EXACT), checked.get("exclusiveMaximum", EXACT))
    # Above 1 and below 1.5, llguidance admits 1.
    whole = [
        k for k in ("exclusiveMinimum", "exclusiveMaximum") if checked.get(k, 0.5) == checked.get(k, 0) // 1
    ]
    if kinds != "integer" and whole and high - low < 1:
        raise _refused(
            path, f"{whole[0]!r} with a range below 1 is not supported", "give a bound that is not whole"
        )
    step = checked.get("multipleOf", 1)
    # jsonschema divides in floating point, which is exact for integers and powers of two alone.
    if not (0 < step <= GRAMMAR.multiple_of and (step == int(step) or math.frexp(step)[0] == 0.5)):
        raise _refused(
            path,
            f"'multipleOf' {_short(str(step))} is not supported",
            f"it should be an integer of 1 to {GRAMMAR.multiple_of}, or 0.5, 0.25 and so on",
        )
    for keyword in COUNTS:
        value = checked.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value // 1:
            what = _short(str(value))
            raise _refused(path, f"{keyword!r} is {what}", "it should be an integer of at least 0")
        if keyword in checked:
            checked[keyword] = int(value)
        if value > GRAMMAR.count:
            if keyword.startswith("min"):
                raise _refused(
                    path, f"{keyword!r} {_short(str(value))} is more than a sequence can hold", "lower it"
                )
            del checked[keyword]
    values = checked.get("enum", [])
    if "enum" in checked and (not isinstance(values, list) or not values):
        raise _refused(path, "'enum' is not a list of values", "it should be one")
    required = checked.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(path, "'required' is not a list of names", "it should be one")
    return _check_constants([*values, checked.get("const")], path, 0) - 1


def _is_rounded(value: Any) -> bool:
    """Whether llguidance may read a number as the one next to it."""
    return isinstance(value, float) and not float(f"{value:.15g}") == value == round(value, 15)


def _check_constants(value: Any, path: str, depth: int) -> int:
    """Refuse numbers that llguidance would write as others. Returns how many lists and objects there are."""
    if depth > GRAMMAR.nesting:
        raise _refused(
            path, f"'enum' or 'const' is nested more than {GRAMMAR.nesting} deep", "write it flatter"
        )
    containers = 1
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            containers += _check_constants(item, path, depth + 1)
        elif isinstance(item, (int, float)) and abs(item) > EXACT:
            if abs(item) > sys.float_info.max:
                raise GrammarError(TOO_LARGE)
            what = _short(str(item))
            raise _refused(path, f"{what} in 'enum' or 'const' is beyond 2^53", "use a string")
        elif _is_rounded(item):
            raise _refused(path, f"{item!r} in 'enum' or 'const' has too many digits", DIGITS)
    return containers


def _check_format(checked: Schema, path: str) -> str:
    """Returns the pattern that it became, if any."""
    name = checked.get("format")
    if name is not None and not isinstance(name, str):
        raise _refused(path, "the format is not a string", "it should be one")
    if name in REFUSED_FORMATS:
        raise _refused(path, f"format {name!r} is not supported", "use 'pattern'")
    if name in FORMAT_PATTERNS:
        pattern = rust_regex(FORMAT_PATTERNS[checked.pop("format")])
        if "pattern" in checked:
            strings = {"type": "string", "pattern": pattern}
            checked["allOf"] = [*checked.get("allOf", ()), strings]
        else:
            checked["pattern"] = pattern
        return pattern
    if name is not None and name not in NATIVE_FORMATS:
        del checked["format"]  # an annotation
    return ""


def _close(checked: Schema) -> None:
    """Without additionalProperties, an object has the properties that its schema names. A model would go on
    with others."""
    named = [keyword for keyword in ("properties", "patternProperties") if checked.get(keyword)]
    if named and "additionalProperties" not in checked:
        properties = checked.get("properties", {})
        names = [name for name in checked.get("required", ()) if name not in properties]
        checked["properties"] = {**properties, **{name: {} for name in names}}
        checked["additionalProperties"] = False


def _check_names(checked: Schema, path: str) -> None:
    """propertyNames becomes patternProperties, where a pattern can say the same of all properties."""
    names = checked.pop("propertyNames")
    beside = [k for k in ("properties", "patternProperties", "required") if checked.get(k)]
    if checked.get("additionalProperties", True) is False:
        beside.append("additionalProperties")
    if beside:
        raise _refused(path, f"'propertyNames' next to {beside[0]!r} is not supported")
    names = (
        {k: v for k, v in names.items() if (k, v) != ("type", "string")} if isinstance(names, dict) else {}
    )
    if set(names) == {"pattern"} and isinstance(names["pattern"], str):
        pattern = names["pattern"]
    elif set(names) == {"enum"} and isinstance(names["enum"], list):
        pattern = f"^({'|'.join(re.escape(name) for name in names['enum'] if isinstance(name, str))})$"
    elif names and set(names) <= {"minLength", "maxLength"}:
        _check_values(names, f"{path}/propertyNames")
        pattern = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    else:
        raise _refused(
            path, "'propertyNames' of this kind is not supported", "use a 'pattern' or an 'enum' there"
        )
    checked["patternProperties"] = {pattern: checked.get("additionalProperties", {})}
    checked["additionalProperties"] = False


def _add_type(checked: Schema) -> None:
    """Without a type, the types that the other keywords speak of: an object is meant where properties are."""
    if "type" in checked or any(keyword in checked for keyword in COMBINED):
        return
    kinds = [k for k, of in OF_TYPE.items() if k != "integer" and any(keyword in checked for keyword in of)]
    if kinds:
        checked["type"] = kinds[0] if len(kinds) == 1 else kinds


def _properties(node: Any) -> Schema:
    found = node.get("properties") if isinstance(node, dict) else None
    return found if isinstance(found, dict) else {}


def _types(node: Schema, constants: list[Any] | None) -> list[Any] | None:
    """The types of all values that satisfy it; None for any."""
    if constants is not None:
        return list({_type_of(value) for value in constants})
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not all(isinstance(kind, str) for kind in kinds):
        return None
    return list({"number" if kind == "integer" else kind for kind in kinds})


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _all_apart(sets: Iterable[list[Any] | None]) -> bool:
    """Whether no value is in two of the sets; False if one is not known."""
    seen: set[str] = set()
    for values in sets:
        if values is None:
            return False
        keys = {json.dumps(float(v) if type(v) is int else v, sort_keys=True) for v in values}
        if keys & seen:
            return False
        seen |= keys
    return True


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == each and type(value) is type(each) for each in values)
