# SPDX-License-Identifier: Apache-2.0
"""Command lines: their parser, and types of options. Each returns the value, or has the parser say what would
be right."""

from __future__ import annotations

import json
import math
import os
import re
import urllib.parse
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.datasets import Part, Ramp

INT32 = (-(2**31), 2**31 - 1)
UINT64 = (0, 2**64 - 1)
LONGEST_SECONDS = 1e6  # waiting for pipes and sockets takes no more than 2^31 ms


def argument_parser(module: str | None, description: str | None, usage: str | None = None) -> ArgumentParser:
    """Of `python -m module`, or of the script that runs. The description keeps its lines; options may not be
    cut short. usage: what follows the program's name."""
    program = None if module is None else f"python -m {module}"
    return ArgumentParser(
        prog=program,
        usage=usage and f"{program} {usage}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number from low to high, both included."""
    span = f"of at least {low}" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise ArgumentTypeError(f"{text!r} must be a whole number {span}")
        return value

    return convert


def number(wanted: str, good: Callable[[float], bool]) -> Callable[[str], float]:
    """A number for which `good` holds; wanted: in words."""

    def convert(text: str) -> float:
        if not good(value := _number(text)):
            raise ArgumentTypeError(f"{text!r} must be {wanted}")
        return value

    return convert


finite = number("a number", math.isfinite)  # JSON has no other
positive = number("a number over 0", lambda value: 0 < value < math.inf)
seconds = number(  # a time to wait
    f"a number of seconds over 0, at most {LONGEST_SECONDS:.0f}", lambda value: 0 < value <= LONGEST_SECONDS
)
request_rate = number("a number of requests/s over 0, or inf", lambda value: value > 0)
burstiness = number(
    "a number over 0, or inf for fixed gaps", lambda value: value > 0
)  # of a gamma distribution


def rates(text: str) -> list[float]:
    return [request_rate(each) for each in text.split(",")]


def integers(low: int) -> Callable[[str], list[int]]:
    """Whole numbers of at least low, separated by commas."""
    return lambda text: [integer(low)(each) for each in text.split(",")]


def tuples(form: str) -> Callable[[str], list[list[int]]]:
    """The whole numbers of each case, separated by commas. form: a case's, with N for a number from 1 and n
    for one from 0, such as N/Nxn; [xN] may be left out, and is 0 then."""
    pattern = form.replace("[", "(?:").replace("]", ")?")
    pattern = pattern.replace("N", "([1-9][0-9]*)").replace("n", "([0-9]+)")

    def convert(text: str) -> list[list[int]]:
        found = [re.fullmatch(pattern, each) for each in text.split(",")]
        if not all(found):
            ranges = [f"{letter} is {low} or more" for letter, low in (("N", 1), ("n", 0)) if letter in form]
            wanted = f"the form {form}, with commas between: {', '.join(ranges)}"
            raise ArgumentTypeError(f"{text!r} must have {wanted}")
        return [[int(n or 0) for n in each.groups()] for each in found if each]

    return convert


def zero_or_more(text: str) -> float:
    """A time that may be 0."""
    return 0.0 if _number(text) == 0 else seconds(text)


def rate_span(text: str) -> tuple[float, float]:
    """`LOW:HIGH`, two rates."""
    low, _, high = text.partition(":")
    span = _number(low), _number(high)
    if not 0 < span[0] <= span[1] < math.inf:
        raise ArgumentTypeError(f"{text!r} must be two rates LOW:HIGH with 0 < LOW <= HIGH, such as 1:64")
    return span


def ramp(text: str) -> Ramp:
    """`FROM:TO`, along a line, or `FROM:TO:exponential`."""
    from client.datasets import Ramp

    first, _, rest = text.partition(":")
    last, _, kind = rest.partition(":")
    try:
        if kind not in ("", "linear", "exponential"):
            raise ValueError
        return Ramp(_number(first), _number(last), kind == "exponential")
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} must be two rates over 0, such as 5:50 or 5:50:exponential"
        ) from None


def percentiles(text: str) -> list[float]:
    """Numbers from 0 to 100, separated by commas."""
    values = [_number(each) for each in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise ArgumentTypeError(f"{text!r} must be numbers from 0 to 100, such as 50,90,99")
    return values


def goodput_limit(text: str) -> tuple[str, float]:
    """`ttft=200`: a time of a request and its limit in ms."""
    name, _, value = text.partition("=")
    if name not in ("ttft", "tpot", "latency") or not 0 < _number(value) < math.inf:
        raise ArgumentTypeError(f"{text!r} must have the form ttft=200: ttft, tpot or latency, and ms over 0")
    return name, _number(value)


def part(text: str) -> Part:
    """`WEIGHT,IN,OUT`: a kind of prompt among mixed ones, its lengths as in length_range."""
    words = text.split(",")
    if len(words) != 3 or not 0 < _number(words[0]) < math.inf:
        raise ArgumentTypeError(f"{text!r} must have the form WEIGHT,IN,OUT, such as 9,64:256,128")
    from client.datasets import Part

    return Part(_number(words[0]), length_range(words[1]), length_range(words[2]))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def length_range(text: str) -> tuple[int, int]:
    """`LOW:HIGH` or one number for both."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise ArgumentTypeError(f"{text!r} must be a length such as 128, or LOW:HIGH with 1 <= LOW <= HIGH")
    return bounds


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, without the NaN and Infinity that Python's parser takes."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'{text!r} must be a JSON object such as {{"top_k": 1}}')
    return value


def http_url(text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port or a name that is none
        good = False
    if not good or " " in text or not text.isprintable():
        raise ArgumentTypeError(f"{text!r} must have the form http://host:port")
    return text


def output_file(text: str) -> Path:
    """A file that can be written, found out before there is something to write."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder; it must be a file")
    if path.exists():
        good = os.access(path, os.W_OK)
    else:
        good = path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)
    if not good:
        raise ArgumentTypeError(f"{text!r} cannot be written; it must be in a folder that exists, writable")
    return path
