# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's JSON files: read, and their values checked. Errors name the file and what it should hold."""

import json
import math
from pathlib import Path
from typing import Any, Literal

from flashinfer_backend.core.values import shown

Kind = Literal["text", "number", "integer", "flag", "object", "texts", "ids"]
WORDS: dict[Kind, str] = {
    "text": "a text",
    "number": "a finite number",
    "integer": "an integer",
    "flag": "true or false",
    "object": "an object",
    "texts": "a list of texts",
    "ids": "a token id or a list of them",
}


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises OSError, or ValueError where it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {shown(value)}; it should hold an object")
    return value


def read_object_if_there(path: Path) -> dict[str, Any]:
    """The same, and an empty object where there is no such file."""
    return read_object(path) if path.is_file() else {}


def check_kinds(raw: dict[str, Any], kinds: dict[str, Kind], where: str = "") -> None:
    """Raise ValueError for a value that is there, is not null, and is of another kind than its key has in
    `kinds`. where: put before the key in the error."""
    for key, kind in kinds.items():
        value = raw.get(key)
        if value is not None and not _is(value, kind):
            raise ValueError(f"{where}{key} is {shown(value)}; it should be {WORDS[kind]}")


def _is(value: Any, kind: Kind) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "text":
            return isinstance(value, str)
        case "integer":
            return is_integer
        case "number":
            return (is_integer and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value))
        case "flag":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
    each = value if isinstance(value, list) else [value]  # ids
    return all(isinstance(item, int) and not isinstance(item, bool) for item in each)


def shards(index: Path) -> list[str]:
    """Names of the files that an index names, sorted. Raises OSError, ValueError."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: it is not an index of safetensors files")
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise ValueError(
                f"{index}: weight_map.{tensor} is {shown(file)}; it should be the name of a file"
            )
    return sorted(set(weight_map.values()))
