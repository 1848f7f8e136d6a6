# SPDX-License-Identifier: Apache-2.0
"""What a setting may be, as text: one reader for build.py's knobs and for the engine's own parameters."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TRUE_WORDS = ("True", "true", "TRUE", "1")
FALSE_WORDS = ("False", "false", "FALSE", "0")

MOST_SHOWN = 60  # characters of a wrong value
INT32_MAX = 2**31 - 1

Kind = Literal["int", "float", "bool", "choice", "sizes", "groups", "path", "folders", "text"]


@dataclass(frozen=True)
class Values:
    """words: accepted as they are; for a choice, all there are. low, high: bounds, both included, of an int,
    a float, each of sizes or each of groups, which are lists with semicolons between: 0,1;2,3."""

    kind: Kind
    words: tuple[str, ...] = ()
    low: float = 0
    high: float = INT32_MAX
    text: str = ""  # what a text is

    def expected(self) -> str:
        """What the value can be, for tables and error messages."""
        words = ", ".join(self.words)
        span = f">= {self.low:g}" if self.high >= INT32_MAX else f"{self.low:g}..{self.high:g}"
        match self.kind:
            case "choice":
                return " or ".join(filter(None, (", ".join(self.words[:-1]), self.words[-1])))
            case "bool":
                return "true or false"
            case "path":
                return f"a folder, or {words}"
            case "text":
                return f"{words}, or {self.text}" if words else self.text
            case "folders":
                return f"{words}, or NAME=FOLDER with different names, separated by commas"
            case "sizes":
                return f"{words}, or integers {span} separated by commas"
            case "groups":
                return f"{words}, or integers {span} separated by commas, and by semicolons between groups"
            case _:
                number = f"{'an integer' if self.kind == 'int' else 'a number'} {span}"
                return f"{words}, or {number}" if words else number

    def parse(self, text: str) -> str:
        """The value in its one spelling; a folder as it is. Raises ValueError saying what it should be."""
        text = text.strip()
        if text in self.words:
            return text
        value: str | None = None
        match self.kind:
            case "bool":
                value = "true" if text in TRUE_WORDS else "false" if text in FALSE_WORDS else None
            case "int":
                value = self._int(text)
            case "float":
                value = self._float(text)
            case "sizes":
                sizes = [self._int(part.strip()) for part in text.split(",")]
                if all(sizes):
                    value = ",".join(sorted({size for size in sizes if size}, key=int))
            case "groups":
                groups = [[self._int(part.strip()) for part in group.split(",")] for group in text.split(";")]
                if all(all(group) for group in groups):
                    value = ";".join(",".join(str(number) for number in group) for group in groups)
            case "folders":
                pairs = [[part.strip() for part in entry.split("=", 1)] for entry in text.split(",")]
                names = [pair[0] for pair in pairs]
                whole = all(len(pair) == 2 and all(pair) for pair in pairs) and text.isprintable()
                if whole and len(set(names)) == len(names):
                    value = ",".join(f"{name}={folder}" for name, folder in pairs)
            case "path" | "text":
                value = text if text and text.isprintable() else None
        if value is None:
            raise ValueError(f"should be {self.expected()}")
        return value

    def _int(self, text: str) -> str | None:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not self.low <= int(text) <= self.high:
            return None
        return str(int(text))

    def _float(self, text: str) -> str | None:
        try:
            number = float(text)
        except ValueError:
            return None
        return repr(number) if math.isfinite(number) and self.low <= number <= self.high else None


def encodable(text: str) -> str:
    """A text whose halves of surrogate pairs, which UTF-8 has not, are their escapes."""
    return text.encode(errors="backslashreplace").decode()


def some(names: Sequence[str]) -> str:
    """The first four, and how many more there are, for an error message."""
    first = ", ".join(names[:4])
    return first if len(names) <= 4 else f"{first} and {len(names) - 4} more"


def shown(value: object) -> str:
    """A value as JSON, at most some 60 characters of it, for an error's text."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
