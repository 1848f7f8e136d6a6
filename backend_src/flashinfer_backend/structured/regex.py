# SPDX-License-Identifier: Apache-2.0
"""Regular expressions as llguidance should have them.

Python's own parser reads them, so that they mean what they mean to `re` and to the package jsonschema. They
are written out in a part of the syntax of Rust's crate regex that leaves nothing open.
"""

import functools
import re
import sys
import warnings
from typing import Any

from flashinfer_backend.core.bounds import GRAMMAR
from flashinfer_backend.structured.grammar import GrammarError

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as parser
else:
    import sre_constants as sre
    import sre_parse as parser

TOO_DEEP = f"it is nested too deeply; it should have at most {GRAMMAR.groups} groups in each other"
TOO_LARGE = (
    f"it has a number that is too large; repetitions should be at most {GRAMMAR.repeats}, and characters at"
    " most \\U0010ffff"
)
# As ECMA-262 has them; of the blanks Python's `re` knows a few more.
DIGITS, WORD = "0-9", "0-9A-Za-z_"
BLANKS = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
CLASSES = {
    sre.CATEGORY_DIGIT: f"[{DIGITS}]", sre.CATEGORY_NOT_DIGIT: f"[^{DIGITS}]",
    sre.CATEGORY_WORD: f"[{WORD}]", sre.CATEGORY_NOT_WORD: f"[^{WORD}]",
    sre.CATEGORY_SPACE: f"[{BLANKS}]", sre.CATEGORY_NOT_SPACE: f"[^{BLANKS}]",
}  # fmt: skip
NAMED_GROUP = re.compile(r"\\.|\(\?<(?=[^\W\d])", re.DOTALL)
_NAME = r"(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\\])*"  # of ordinary characters and escaped special ones
NAMES = re.compile(rf"\^(?:({_NAME})|\((?:\?:)?({_NAME}(?:\|{_NAME})*)\))\$")
CODE_POINT = re.compile(r"\\u\{([0-9A-Fa-f]{1,6})\}|\\.", re.DOTALL)
# Of sets within sets, which Python may have some day. Brackets are characters here, as everywhere today.
warnings.filterwarnings("ignore", "Possible (nested set|set )", FutureWarning)


# A schema can name one expression thousands of times; each takes up to 40 ms.
@functools.lru_cache(maxsize=64)
def rust_regex(regex: str, whole: bool = False) -> str:
    """The expression for llguidance. whole: it is about all of a text, so that anchors at its ends say
    nothing, and its `.` admits a newline.

    Raises GrammarError for what no guide can keep to: assertions, references, flags, anchors elsewhere.
    """
    if len(regex) > GRAMMAR.regex_characters:
        raise GrammarError(
            f"it has {len(regex)} characters; it should have at most {GRAMMAR.regex_characters}"
        )
    try:
        parsed = _parsed(regex)
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None
    except re.error as error:
        raise GrammarError(str(error)) from None
    except (OverflowError, ValueError):
        raise GrammarError(TOO_LARGE) from None
    if parsed.state.flags & ~re.UNICODE:
        raise GrammarError("flags such as (?i) are not supported; write the characters themselves")
    return _Writer(whole).sequence(parsed, True, True)


def _parsed(regex: str) -> Any:
    # ECMA's names of groups and code points, as Python writes them.
    text = NAMED_GROUP.sub(lambda found: found[0] if found[0][0] == "\\" else "(?P<", regex)
    text = CODE_POINT.sub(lambda found: f"\\U{int(found[1], 16):08x}" if found[1] else found[0], text)
    return parser.parse(text)


def literal_names(regex: str) -> set[str]:
    """The names of an expression that lists them, as `^name$` and `^(a|b)$` do; none of any other."""
    if not (listed := NAMES.fullmatch(regex)):
        return set()
    names = re.split(r"(?<!\\)\|", listed[1] or listed[2] or "")
    return {name.replace("\\", "") for name in names}


class _Writer:
    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._depth = 0

    def sequence(self, items: Any, first: bool, last: bool) -> str:
        """first, last: nothing comes before or behind, so that an anchor may stand there."""
        self._depth += 1
        if self._depth > GRAMMAR.groups:
            raise GrammarError(TOO_DEEP)
        items = list(items)
        begin, end = 0, len(items)
        while begin < end and _is_anchor(items[begin], sre.AT_BEGINNING):
            begin += 1
        while end > begin and _is_anchor(items[end - 1], sre.AT_END):
            end -= 1
        if (begin and not first) or (end < len(items) and not last):
            raise GrammarError("^ and $ are supported at the beginning and the end alone")
        inner = [
            self._item(item, first and i == begin, last and i == end - 1)
            for i, item in enumerate(items[begin:end], begin)
        ]
        self._depth -= 1
        if self._whole:
            return "".join(inner)
        return "^" * bool(begin) + "".join(inner) + "$" * (end < len(items))

    def _item(self, item: Any, first: bool, last: bool) -> str:
        kind, value = item
        if kind is sre.LITERAL:
            return _character(value)
        if kind is sre.NOT_LITERAL:
            return f"[^{_character(value)}]"
        if kind is sre.ANY:
            return "(?s:.)" if self._whole else r"[^\n]"
        if kind is sre.IN:
            return _class(value)
        if kind is sre.BRANCH:
            return "(?:" + "|".join(self.sequence(option, first, last) for option in value[1]) + ")"
        if kind is sre.SUBPATTERN and not value[1] and not value[2]:
            return f"(?:{self.sequence(value[3], first, last)})"
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = value
            if least > GRAMMAR.repeats or (most > GRAMMAR.repeats and most is not sre.MAXREPEAT):
                raise GrammarError(f"a repetition is beyond {GRAMMAR.repeats}; give no limit")
            # Repeated once, an anchor stands where it stood.
            text = self.sequence(inner, first and most == 1, last and most == 1)
            return f"(?:{text}){{{least},{'' if most is sre.MAXREPEAT else most}}}"
        names = {
            sre.AT: "^, $ and \\b within the text are", sre.ASSERT: "(?= and (?<= are",
            sre.ASSERT_NOT: "(?! and (?<! are", sre.GROUPREF: "references to groups are",
            sre.GROUPREF_EXISTS: "references to groups are", sre.SUBPATTERN: "flags of groups are",
        }  # fmt: skip
        raise GrammarError(f"{names.get(kind, 'possessive repetitions and atomic groups are')} not supported")


def _is_anchor(item: Any, which: Any) -> bool:
    return item[0] is sre.AT and item[1] is which


def _class(parts: Any) -> str:
    negated = "^" if parts and parts[0][0] is sre.NEGATE else ""
    text = ""
    for kind, value in parts[bool(negated) :]:
        if kind in (sre.LITERAL, sre.RANGE):
            low, high = value if kind is sre.RANGE else (value, value)
            if not (negated and 0xD800 <= low <= high <= 0xDFFF):
                text += _range(low, high)
        else:
            text += CLASSES[value]
    return f"[{negated}{text}]"


def _range(low: int, high: int) -> str:
    """Without the surrogates U+D800 to U+DFFF, which no UTF-8 text has."""
    if low < 0xD800 and high > 0xDFFF:
        return f"{_character(low)}-\\x{{d7ff}}\\x{{e000}}-{_character(high)}"
    return _character(low) if low == high else f"{_character(low)}-{_character(high)}"


def escaped(text: str) -> str:
    """An expression for a text. Raises GrammarError for half of a surrogate pair."""
    return "".join(_character(ord(character)) for character in text)


def _character(code: int) -> str:
    if 0xD800 <= code <= 0xDFFF:
        raise GrammarError(
            f"\\u{code:04x} is half of a surrogate pair, which is no character; write the character itself"
        )
    text = chr(code)
    return text if text.isascii() and (text.isalnum() or text in " _") else f"\\x{{{code:x}}}"
