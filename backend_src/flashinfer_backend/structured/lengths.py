# SPDX-License-Identifier: Apache-2.0
"""Limits of strings' lengths, counted while a grammar is followed instead of written into its rules.

Of a character that comes up to n times xgrammar makes rules for each of up to 128 times, and finds the tokens
that each admits when it compiles: seconds with a large vocabulary. Of more times it also admits tokens of
which only the first characters are of the class. A rule with `max_chars` has one state, and the tokens'
lengths are looked at where few characters are left.
"""

from __future__ import annotations

import json
import re

from flashinfer_backend.structured.json_schema import PLAIN_CHARACTER
from flashinfer_backend.structured.regex import with_whole_hex_escapes

# As in PLAIN_CHARACTER. xgrammar allows no wrong tokens for a complement, however often it comes.
CHARACTER = r"[^\0-\x1f\"\\\ud800-\udfff]"
PRINTED_CHARACTER = r"(([ !#-[\]-\ud7ff\ue000-\U0010ffff]))"  # as xgrammar writes PLAIN_CHARACTER's rule
IN_SCHEMA = json.dumps(PLAIN_CHARACTER, ensure_ascii=False)[1:-1]
# Of at most so many characters rules are quick to compile, and to follow at the end of the string.
MOST_UNCOUNTED = 32
MOST_WRITTEN_OUT = 256  # characters at the least; of more xgrammar makes no rules for each
REPEATED = re.compile(r"^(\w+) ::= \(\((\w+)\{(\d+), (-?\d+)\}\)\)$", re.MULTILINE)
# A pattern of one class, with characters alone that need no escape in JSON, as xgrammar writes it.
_CLASS = r"(?:\[(?:[A-Z]-[A-Z]|[a-z]-[a-z]|\d-\d|\\\\[dw]|[\w.:@ ])*-?\]|\\\\[dw])"
PATTERN = re.compile(
    rf'^(\w+) ::= Regex\("\^?({_CLASS})\{{(\d+),(\d+)\}}\$?", json_string=true\)$', re.ASCII | re.MULTILINE
)
IN_PATTERN = re.compile(r'\{\d+,\d{3,}\}\$?"')
MOST_UNROLLED = 128  # repetitions in a pattern; of more xgrammar looks through all tokens for each mask


def has_lengths(schema: str) -> bool:
    """Whether a schema as prepare_schema writes it has minLength or maxLength, or such a pattern."""
    return IN_SCHEMA in schema or bool(IN_PATTERN.search(schema))


def with_counted_lengths(grammar: str) -> str:
    """xgrammar's grammar of such a schema, with its limits of lengths counted."""
    characters = {
        name
        for name, separator, body in (line.partition(" ::= ") for line in grammar.splitlines())
        if separator and body == PRINTED_CHARACTER
    }
    rules: dict[tuple[int, int], str] = {}  # the first of each: equal ones would be compiled again

    def counted(found: re.Match[str]) -> str:
        rule, character, least, most = found[1], found[2], int(found[3]), int(found[4])
        if character not in characters or max(least, most) <= MOST_UNCOUNTED:
            return found[0]
        if (first := rules.setdefault((least, most), rule)) != rule:
            return f"{rule} ::= (({first}))"
        limit = f"[max_chars={most}]" if most >= 0 else ""
        if least > MOST_WRITTEN_OUT:
            return f"{rule}{limit} ::= (({CHARACTER}{{{least}, -1}}))"
        return f"{rule}{limit} ::= (({' '.join([CHARACTER] * least + [CHARACTER + '*'])}))"

    changed = PATTERN.sub(_counted_pattern, REPEATED.sub(counted, grammar))
    # It prints é as \xe9, and in front of a digit or one of a to f reads that as another character.
    return grammar if changed == grammar else with_whole_hex_escapes(changed)


def _counted_pattern(found: re.Match[str]) -> str:
    rule, of_class, least, most = found[1], found[2], int(found[3]), int(found[4])
    if most <= MOST_UNROLLED or least > MOST_UNROLLED:
        return found[0]
    return f'{rule}[max_chars={most}] ::= Regex("^{of_class}{{{least},}}$", json_string=true)'
