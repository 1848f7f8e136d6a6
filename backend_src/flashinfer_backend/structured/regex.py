# SPDX-License-Identifier: Apache-2.0
"""What xgrammar reads in a regular expression without honouring it is refused here, or written otherwise."""

from __future__ import annotations

import re

from flashinfer_backend.structured.grammar import GrammarError

MOST_REPEATS = 2**31 - 1  # xgrammar counts with 32 bits
QUANTIFIERS = "*+?{"
LETTER_ESCAPES = (
    "dDwWsStnrfv0xuc"  # of the others xgrammar refuses some, and takes the rest for the letter itself
)
REFUSED_BY_XGRAMMAR = "bBpPk"
HEX_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|.)", re.DOTALL)
ESCAPE_OR_CLASS = re.compile(r"\\.|\[(?:\\.|[^]\\])*", re.DOTALL)
ESCAPED_CARET_FIRST = re.compile(r"\[\\(?:\^|x5e|u005e|u\{0*5e\})", re.IGNORECASE)
# xgrammar's ranges and complements have the surrogates U+D800 to U+DFFF, which no UTF-8 text has: what a
# model writes of one becomes several U+FFFD.
SURROGATES = r"\ud800-\udfff"
COMPLEMENTS = {
    r"\D": r"\0-/:-\ud7ff\ue000-\u{10ffff}",
    r"\W": r"\0-/:-@\[-^`{-\ud7ff\ue000-\u{10ffff}",
    r"\S": r"\0-\u0008\u000e-\u001f!-\u009f\u00a1-\ud7ff\ue000-\u{10ffff}",
}
_ESCAPE = r"\\(?:u\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)"
CLASS_OR_CHARACTER = re.compile(rf"\[(\^?)((?:\\.|[^]\\])*)(\]?)|{_ESCAPE}|.", re.DOTALL)
PART_OF_CLASS = re.compile(rf"({_ESCAPE}|.)(?:-({_ESCAPE}|.))?", re.DOTALL)
AROUND = re.compile(r"\((\?<?[=!])")
GROUP = re.compile(r"\((?:\?:|(\?P?<[^\W\d]\w*>)|(?!\?))")
GROUP_ELSEWHERE = re.compile(rf"(?:{ESCAPE_OR_CLASS.pattern})|{GROUP.pattern}", re.DOTALL)
OPTIONAL_GROUP = re.compile(rf"(?:{ESCAPE_OR_CLASS.pattern})|(\)\?)", re.DOTALL)
REPETITION = re.compile(r"\{(\d*),?(\d*)\}")
# Where xgrammar cannot keep a JSON string whole, only what needs no escape in one is let through.
WITHOUT_ESCAPES = re.compile(
    r"(?:\\[dw.+*?()\[\]{}|/-]|\[(?:[A-Z]-[A-Z]|[a-z]-[a-z]|\d-\d|[\w.:@-])+\]|[\w (){}|*+?,:;@^$-])*"
)


def prepare_regex(regex: str) -> str:
    """The regular expression as xgrammar should have it. Raises GrammarError as check_regex does, and for a
    class that begins with an escaped ^, which xgrammar takes for its complement."""
    check_regex(regex)
    for found in ESCAPE_OR_CLASS.finditer(regex):
        if ESCAPED_CARET_FIRST.match(found[0]):
            raise GrammarError(
                f"the class at character {found.start() + 1} begins with an escaped ^, which is not"
                " supported; write it further behind, or outside of a class"
            )
    return without_surrogates(without_names(with_whole_hex_escapes(regex)))


def with_whole_hex_escapes(text: str) -> str:
    """The same with \\u00HH for \\xHH, which xgrammar reads with any number of digits."""
    return HEX_ESCAPE.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)


def check_regex(regex: str) -> None:
    """Raise GrammarError for assertions, flags of groups, anchors that are not at an end of the text, escapes
    of unknown letters, \\x without its two digits and repetitions beyond 2^31. Whatever else is wrong
    xgrammar finds itself."""
    # Of each open group: is its begin the text's, is the current place, has an earlier alternative its $.
    groups = [[True, True, False]]
    anchored = [False]  # of each: has ^ or $ within, so that it cannot be repeated
    ended = [False]  # has the current alternative of each had its $
    place = 0
    while place < len(regex):
        char, size, atom = regex[place], 1, True
        if char == "\\":
            size = 2
            letter = regex[place + 1 : place + 2]
            if letter.isascii() and letter.isalpha() and letter not in LETTER_ESCAPES + REFUSED_BY_XGRAMMAR:
                raise GrammarError(f"\\{letter} at character {place + 1} is not supported; leave it out")
            _refuse_short_hex(regex, place)
        elif char == "[":
            size = _class_length(regex, place)
        elif char == "(":
            if found := AROUND.match(regex, place):
                raise GrammarError(
                    f"({found[1]} at character {place + 1} is not supported: a guide cannot look around"
                )
            group = GROUP.match(regex, place)
            if not group:
                raise GrammarError(
                    f"{regex[place : place + 3]} at character {place + 1} is not supported; groups begin"
                    " with (, (?:, (?<name> or (?P<name>"
                )
            size = len(group[0])
            _refuse_after_end(ended[-1], place)
            begin = groups[-1][1]
            groups.append([begin, begin, False])
            anchored.append(False)
            ended.append(False)
            atom = False
        elif char == ")" and len(groups) > 1:
            _, _, any_ended = groups.pop()
            inner_anchored, inner_ended = anchored.pop(), ended.pop()
            groups[-1][1] = False
            anchored[-1] |= inner_anchored
            ended[-1] |= inner_ended or any_ended
            if inner_anchored and regex[place + 1 : place + 2] in tuple(QUANTIFIERS):
                raise GrammarError(f"the anchor in the group that ends at character {place + 1} is repeated")
            atom = False
        elif char == "|":
            groups[-1][1] = groups[-1][0]
            groups[-1][2] |= ended[-1]
            ended[-1] = False
            atom = False
        elif char == "^":
            if not groups[-1][1]:
                raise GrammarError(
                    f"^ at character {place + 1} is not at the beginning, where it is supported"
                )
            anchored[-1], atom = True, False
        elif char == "$":
            ended[-1] = anchored[-1] = True
            atom = False
        elif char in QUANTIFIERS:
            atom = False
            repetition = REPETITION.match(regex, place)
            for number in repetition.groups() if repetition else ():
                if len(number) > 10 or int(number or 0) > MOST_REPEATS:
                    raise GrammarError(
                        f"the repetition at character {place + 1} is beyond {MOST_REPEATS}; give no limit"
                    )
            size = len(repetition[0]) if repetition else 1
        if atom:
            _refuse_after_end(ended[-1], place)
            groups[-1][1] = False
        place += size


def _refuse_after_end(ended: bool, place: int) -> None:
    if ended:
        raise GrammarError(f"$ before character {place + 1} is not at the end, where it is supported")


def _refuse_short_hex(regex: str, place: int) -> None:
    escape = HEX_ESCAPE.match(regex, place)
    if escape and escape[0] == r"\x":
        raise GrammarError(
            rf"\x at character {place + 1} should have two hexadecimal digits; others are \u{{...}}"
        )


def _class_length(regex: str, place: int) -> int:
    end = place + 1
    while end < len(regex) and regex[end] != "]":
        if regex[end] == "\\":
            letter = regex[end + 1 : end + 2]
            if letter.isascii() and letter.isalpha() and letter not in LETTER_ESCAPES + "b":
                raise GrammarError(f"\\{letter} at character {end + 1} is not supported; leave it out")
            _refuse_short_hex(regex, end)
            end += 1
        end += 1
    return end + 1 - place


def ascii_regex(regex: str) -> str:
    """The same in ASCII: xgrammar keeps a JSON string whole only then."""
    return "".join(
        c if c.isascii() else f"\\u{ord(c):04x}" if ord(c) < 65536 else f"\\u{{{ord(c):x}}}" for c in regex
    )


def without_names(regex: str) -> str:
    """The same, its groups without names, which say nothing: a guide has no references."""
    return GROUP_ELSEWHERE.sub(lambda found: "(" if found[1] else found[0], regex)


def with_counted_options(regex: str) -> str:
    """The same with {0,1} for a ? behind a group. Of a JSON string's pattern xgrammar's automaton may go on
    in the last loop of a group that it leaves out: of a(-b+)? it admits abb."""
    return OPTIONAL_GROUP.sub(lambda found: "){0,1}" if found[1] else found[0], regex)


def without_surrogates(regex: str) -> str:
    """The same for all text, but bytes that UTF-8 would have for a surrogate are not admitted.

    Raises GrammarError for what asks for surrogates alone."""
    return CLASS_OR_CHARACTER.sub(_without_surrogates, regex)


def _without_surrogates(found: re.Match[str]) -> str:
    text, (negated, body, end) = found[0], found.groups()
    if body is None:
        if text == ".":
            return f"[^{SURROGATES}]"
        return f"[^{text.lower()}{SURROGATES}]" if text in COMPLEMENTS else _clipped(text, "")
    if not end:
        return text  # which xgrammar refuses
    parts = PART_OF_CLASS.findall(body)
    if negated:
        parts = [(rf"\{low}" if low == "-" and not high else low, high) for low, high in parts]
        return f"[^{''.join(map(_part, parts))}{SURROGATES}]"
    lone = {low for low, high in parts if not high}
    if any({escape, escape.lower()} <= lone for escape in COMPLEMENTS):
        return f"[^{SURROGATES}]"
    return f"[{''.join(COMPLEMENTS.get(_part(ends)) or _clipped(*ends) for ends in parts)}]"


def _part(ends: tuple[str, str]) -> str:
    return "-".join(filter(None, ends))


def _clipped(low: str, high: str) -> str:
    """A character, or a range of a class, without the surrogates in it."""
    text = _part((low, high))
    first, last = _number(low), _number(high or low)
    if first > 0xDFFF or last < 0xD800:
        return text
    if first >= 0xD800 and last <= 0xDFFF:
        raise GrammarError(
            f"{ascii_regex(text)} speaks of halves of surrogate pairs, which are no characters; write the"
            " characters themselves, or \\u{...}"
        )
    return (rf"{low}-\ud7ff" if first < 0xD800 else "") + (rf"\ue000-{high}" if last > 0xDFFF else "")


def _number(character: str) -> int:
    """Of a character, or of its escape; of those without digits, the letter's."""
    digits = re.fullmatch(r"\\[ux]\{?([0-9A-Fa-f]+)\}?", character)
    return int(digits[1], 16) if digits else ord(character[-1])
