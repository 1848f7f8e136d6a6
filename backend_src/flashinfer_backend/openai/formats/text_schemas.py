# SPDX-License-Identifier: Apache-2.0
"""JSON schemas that only texts satisfy, and perhaps null: their values can be written without quotes."""

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

# Beside a type or a list of values these say more of a text.
_MORE = ("minLength", "maxLength", "pattern", "format", "not", "if", "$dynamicRef", "$recursiveRef")
_LISTS = ("const", "enum")
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf")
MOST_REFERENCES = 20  # in a row


class Text(NamedTuple):
    """A schema's constraints on texts. values: the allowed ones; None: not listed. null: null is
    also allowed. bounded: the schema has further constraints."""

    values: tuple[str, ...] | None
    null: bool
    bounded: bool


def text_of(schema: Any, root: Mapping[str, Any]) -> Text | None:
    """The constraints, or None if a value can be something else than text and null, or that is unclear. root:
    the schema that a $ref points into."""
    schema = _meant(schema, root)
    if not isinstance(schema, Mapping):
        return None
    options = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(options, list) or any(keyword in schema for keyword in ("type", *_LISTS)):
        found = _of_one(schema)
    else:
        texts = [_of_one(_meant(option, root)) for option in options]
        values: tuple[str, ...] | None = ()
        for text in texts:
            if text is None:
                return None
            values = None if values is None or text.values is None else values + text.values
        # Of oneOf a value must not satisfy two.
        bounded = any(keyword in schema for keyword in ("oneOf", "$ref", "allOf", *_MORE))
        bounded = bounded or any(text.bounded for text in texts if text)
        found = Text(values, any(text.null for text in texts if text), bounded)
    return found if found is not None and found.values != () else None


def _of_one(schema: Any) -> Text | None:
    """The texts that a type or a list of values allows; for null alone, no texts."""
    if not isinstance(schema, Mapping):
        return None
    known = schema.get("type", ["string", "null"] if any(k in schema for k in _LISTS) else None)
    types = known if isinstance(known, list) else [known]
    if not types or any(kind not in ("string", "null") for kind in types):
        return None
    bounded = any(keyword in schema for keyword in (*_MORE, *_ELSEWHERE))
    bounded = bounded or all(keyword in schema for keyword in _LISTS)
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return Text(None if "string" in types else (), "null" in types, bounded)
    if "type" not in schema and any(value is not None and not isinstance(value, str) for value in listed):
        return None
    values = tuple(value for value in listed if isinstance(value, str) and "string" in types)
    return Text(values, None in listed and "null" in types, bounded)


def _meant(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema itself, or the one that a lone $ref, or a lone allOf of one, stands for."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return None
        said = [keyword for keyword in ("type", *_LISTS, *_MORE, *_ELSEWHERE) if keyword in schema]
        if said == ["$ref"]:
            schema = _at(schema["$ref"], root)
        elif said == ["allOf"] and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        else:
            return schema
    return None


def _at(pointer: Any, root: Mapping[str, Any]) -> Any:
    """What a JSON pointer into the schema names; None for nothing."""
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    found: Any = root
    for part in pointer.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
