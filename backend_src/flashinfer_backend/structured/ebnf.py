# SPDX-License-Identifier: Apache-2.0
"""EBNF grammars as xgrammar and llama.cpp write them, as Lark grammars of llguidance.

llguidance splits a text into terminals before it parses it, each as long as it can be. A rule that cannot
contain itself is one terminal, a regular expression. In others each part without recursion is one, unless a
longer match could take what the grammar has behind: then its characters are terminals of their own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flashinfer_backend.core.bounds import GRAMMAR
from flashinfer_backend.structured.grammar import GrammarError

MOST_WORK = 100_000  # looks at parts of rules, character by character: some 0.3 s
MOST_LOOKS = 300_000  # at parts of rules, before that: some 0.2 s
MOST_STATES = 500  # of all terminals at once, before their characters are terminals instead
LAST = 0x10FFFF
SURROGATES = 0xD800, 0xDFFF  # which no text has
TOKEN = re.compile(
    r'\s+|\#[^\n]*|(?P<name>[A-Za-z_][\w.-]*)(?=(?P<defined>\s*::=)?)|(?P<text>"(?:\\.|[^"\\\n])*")'
    r"|(?P<cls>\[(?:\\.|[^\]\\])*\])|(?P<repeat>[*+?]|\{\s*[0-9]+\s*(?:,\s*(?:[0-9]+\s*)?)?\})|(?P<mark>::=|[()|.])",
    re.DOTALL,
)
ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "b": 8, "a": 7, "0": 0, "e": 27}
ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|u\{([0-9a-fA-F]{1,6})\}|(.))", re.S
)
CHARACTER = re.compile(rf"{ESCAPE.pattern}|.", re.DOTALL)

Ranges = tuple[tuple[int, int], ...]  # of code points, sorted and apart


@dataclass(eq=False)
class Node:
    """kind: "set" (one character of `ranges`), "seq", "or", "repeat" (least to most; -1: no end) or "ref"."""

    kind: str
    parts: list[Node] = field(default_factory=list)
    ranges: Ranges = ()
    least: int = 0
    most: int = 0
    name: str = ""


def lark_grammar(text: str) -> str:
    """The Lark grammar of an EBNF grammar whose first rule is `root`. Raises GrammarError."""
    if len(text) > GRAMMAR.ebnf_characters:
        raise GrammarError(f"it has {len(text)} characters; it should have at most {GRAMMAR.ebnf_characters}")
    try:
        return _Lark(_Parser(text).rules()).text()
    except RecursionError:
        raise GrammarError("its rules are nested too deeply; write it with shorter chains of them") from None


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._scan()
        self._next()

    def _scan(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(self._text):
            found = TOKEN.match(self._text, at)
            if found is None:
                raise self._wrong(at, f"{self._text[at : at + 20]!r} is not understood")
            kind = found.lastgroup or ""
            kind = "defined" if found["defined"] is not None else "name" if found["name"] else kind
            if kind:
                yield kind, found[0], at
            at = found.end()
        yield "end", "", at

    def _next(self) -> None:
        self._kind, self._token, self._at = next(self._tokens)

    def _wrong(self, at: int, what: str) -> GrammarError:
        return GrammarError(f"EBNF parser error at line {self._text.count(chr(10), 0, at) + 1}: {what}")

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind != "end":
            name = self._token
            if self._kind != "defined":
                raise self._wrong(
                    self._at, f"a rule should begin here, as in name ::= ..., not {name[:20]!r}"
                )
            if name in rules:
                raise self._wrong(self._at, f'Rule "{name[:50]}" is defined twice')
            self._next()
            self._next()
            rules[name] = self._choice(0)
            if len(rules) > GRAMMAR.rules:
                raise GrammarError(f"it has more than {GRAMMAR.rules} rules; it should have fewer")
        return rules

    def _choice(self, depth: int) -> Node:
        if depth > GRAMMAR.groups:
            raise self._wrong(self._at, f"groups are nested more than {GRAMMAR.groups} deep")
        options = [self._sequence(depth)]
        while self._token == "|" and self._kind == "mark":
            self._next()
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Node("or", options)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while True:
            kind, token = self._kind, self._token
            if kind == "name":
                part = Node("ref", name=token)
            elif kind == "text":
                codes = map(_code, CHARACTER.finditer(token[1:-1]))
                part = _joined([Node("set", ranges=((code, code),)) for code in codes])
            elif kind == "cls":
                part = self._class(token)
            elif kind == "mark" and token == ".":
                part = _set([(0, LAST)])
            elif kind == "mark" and token == "(":
                self._next()
                part = self._choice(depth + 1)
                if self._token != ")":
                    raise self._wrong(self._at, "a ) is missing")
            elif kind == "repeat":
                raise self._wrong(self._at, f"nothing stands before {token}")
            else:
                return _joined(parts)
            self._next()
            while self._kind == "repeat":
                part = self._repeated(part)
                self._next()
            parts.append(part)

    def _repeated(self, part: Node) -> Node:
        token = self._token
        if token[0] == "{":
            low, comma, high = token[1:-1].partition(",")
            least = self._count(low)
            most = self._count(high) if high.strip() else -1 if comma else least
        else:
            least, most = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}[token]
        if -1 < most < least:
            raise self._wrong(self._at, f"{token} has its numbers the wrong way round")
        return Node("repeat", [part], least=least, most=most)

    def _count(self, digits: str) -> int:
        digits = digits.strip().lstrip("0") or "0"
        # Python refuses to read a number of thousands of digits.
        if len(digits) > len(str(GRAMMAR.repeats)) or int(digits) > GRAMMAR.repeats:
            raise self._wrong(self._at, f"a repetition is beyond {GRAMMAR.repeats}; give no limit")
        return int(digits)

    def _class(self, token: str) -> Node:
        body = token[1:-1]
        negated = body.startswith("^")
        found = [(m[0], m) for m in CHARACTER.finditer(body[negated:])]
        ranges: list[tuple[int, int]] = []
        i = 0
        while i < len(found):
            low = high = _code(found[i][1])
            if i + 2 < len(found) and found[i + 1][0] == "-":
                high = _code(found[i + 2][1])
                i += 2
            if high < low:
                raise self._wrong(self._at, f"{token[:30]} has a range from a higher to a lower character")
            ranges.append((low, high))
            i += 1
        return _set(_complement(_sorted([*ranges, SURROGATES])) if negated else ranges)


def _code(found: re.Match[str]) -> int:
    digits = found[1] or found[2] or found[3] or found[4]
    code = int(digits, 16) if digits else ESCAPES.get(found[5], ord(found[5])) if found[5] else ord(found[0])
    if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
        raise GrammarError(f"{found[0]} is no character")
    return code


def _set(ranges: list[tuple[int, int]]) -> Node:
    return Node("set", ranges=_sorted(ranges))


def _joined(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node("seq", parts)


def _sorted(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> list[tuple[int, int]]:
    edges = [-1, *(edge for pair in ranges for edge in pair), LAST + 1]
    return [(a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a + 1 <= b - 1]


def _walk(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += node.parts


class _Lark:
    """Sets of characters are integers here: bit i is what lies between two edges of the grammar's ranges."""

    def __init__(self, rules: dict[str, Node]) -> None:
        if "root" not in rules:
            raise GrammarError('EBNF parser error: Rule "root" is not defined')
        self._rules = rules
        self._names = self._reached()
        self._recursive = self._find_recursive()
        sets = [node for name in self._names for node in _walk(rules[name]) if node.kind == "set"]
        edges = sorted({edge for node in sets for low, high in node.ranges for edge in (low, high + 1)})
        self._mask = {node: _bits(node.ranges, edges) for node in sets}
        self._stars: dict[Node, Node] = {}
        self._nullable: dict[str, bool] = dict.fromkeys(self._names, False)
        self._first: dict[str, int] = dict.fromkeys(self._names, 0)
        self._follow: dict[Node, int] = defaultdict(int)
        self._leaves: dict[Node, str] = {}  # parts that are terminals of their own in rules
        self._looping: dict[Node, bool] = {}  # whether parts name a recursive rule, as of the last look
        self._work = 0

    def text(self) -> str:
        lines = [
            f"{self._names[name].upper()}: {self._regular(self._rules[name])}"
            for name in self._names
            if name not in self._recursive
        ]
        if "root" not in self._recursive:
            return "\n".join(["start: R0", *lines])
        self._find_sets()
        self._split()
        for name in self._recursive:
            lines.append(f"{self._names[name]}: {self._rule(self._rules[name])}")
        lines += [f"{t}: {self._regular(node)}" for node, t in self._leaves.items() if node.kind != "ref"]
        return "\n".join(["start: r0", *lines])

    def _reached(self) -> dict[str, str]:
        """Names in the Lark grammar of the rules that root needs."""
        names, pending = {"root": "r0"}, ["root"]
        while pending:
            for node in _walk(self._rules[pending.pop()]):
                if node.kind == "ref" and node.name not in names:
                    if node.name not in self._rules:
                        raise GrammarError(f'EBNF parser error: Rule "{node.name[:50]}" is not defined')
                    names[node.name] = f"r{len(names)}"
                    pending.append(node.name)
        return names

    def _find_recursive(self) -> set[str]:
        """Rules that contain themselves, or others that do."""
        needs = {n: {x.name for x in _walk(self._rules[n]) if x.kind == "ref"} for n in self._names}
        users: dict[str, list[str]] = defaultdict(list)
        for name, used in needs.items():
            for each in used:
                users[each].append(name)
        free = [name for name, used in needs.items() if not used]
        left = set(self._names)
        while free:
            left.discard(done := free.pop())
            for user in users[done]:
                needs[user].discard(done)
                if not needs[user]:
                    free.append(user)
        return left

    def _find_sets(self) -> None:
        """Which rules may be empty, what they begin with, and what comes behind each part."""
        before = None
        while before != (before := (dict(self._nullable), dict(self._first))):
            for name in self._names:
                self._nullable[name] = self._is_nullable(self._rules[name])
                self._first[name] = self._first_of(self._rules[name])
        self._grown = True
        while self._grown:
            self._grown = False
            for name in self._names:
                self._visit(self._rules[name], self._follow[self._rules[name]])
        self._work = 0

    def _look(self) -> None:
        self._work += 1
        if self._work > MOST_LOOKS:
            raise GrammarError("its rules are too many and too deep in each other; write it with fewer")

    def _is_nullable(self, node: Node) -> bool:
        self._work += 1
        if node.kind == "ref":
            return self._nullable[node.name]
        if node.kind == "repeat":
            return node.least == 0 or self._is_nullable(node.parts[0])
        return node.kind != "set" and (any if node.kind == "or" else all)(map(self._is_nullable, node.parts))

    def _first_of(self, node: Node) -> int:
        self._look()
        if node.kind in ("set", "ref"):
            return self._mask[node] if node.kind == "set" else self._first[node.name]
        first = 0
        for part in node.parts:
            first |= self._first_of(part)
            if node.kind == "seq" and not self._is_nullable(part):
                break
        return first

    def _visit(self, node: Node, follow: int) -> None:
        self._look()
        for each in [node, self._rules[node.name]] if node.kind == "ref" else [node]:
            self._grown |= bool(follow & ~self._follow[each])
            self._follow[each] |= follow
        for part in reversed(node.parts):
            again = self._first_of(part) if node.kind == "repeat" and node.most != 1 else 0
            self._visit(part, follow | again)
            if node.kind == "seq":
                follow = self._first_of(part) | (follow if self._is_nullable(part) else 0)

    def _split(self) -> None:
        """Find the parts of rules that can be terminals."""
        opened: set[Node] = set()
        while True:
            self._leaves, self._looping = {}, {}
            for name in self._recursive:
                self._collect(self._rules[name], opened)
            torn = {node for node in self._conflicts() if node.kind != "set"}
            if not torn:
                return
            if self._work > MOST_WORK:  # then all characters are terminals
                self._recursive |= set(self._names)
                opened = {
                    node for name in self._names for node in _walk(self._rules[name]) if node.kind != "set"
                }
                continue
            opened |= torn
            self._recursive |= {node.name for node in torn if node.kind == "ref"}

    def _collect(self, node: Node, opened: set[Node]) -> None:
        if node not in opened and not self._is_looping(node):
            self._leaves[node] = (
                self._names[node.name].upper() if node.kind == "ref" else f"T{len(self._leaves)}"
            )
        else:
            for part in node.parts:
                self._collect(part, opened)

    def _is_looping(self, node: Node) -> bool:
        if node not in self._looping:
            inner = any(map(self._is_looping, node.parts))
            self._looping[node] = inner or (node.kind == "ref" and node.name in self._recursive)
        return self._looping[node]

    def _conflicts(self) -> set[Node]:
        """Terminals that a longer match could take characters from which stand behind them, and those that it
        could be of. All of them are followed at once, character by character."""
        start: frozenset[tuple[Node, tuple[Node, ...]]] = frozenset((leaf, (leaf,)) for leaf in self._leaves)
        seen, pending = {start}, [start]
        width = max((mask.bit_length() for mask in self._mask.values()), default=0)
        torn: set[Node] = set()
        while pending:
            state = pending.pop()
            accepted = (
                [leaf for leaf, rest in state if all(map(self._is_nullable, rest))] if state != start else []
            )
            steps: dict[frozenset[tuple[Node, tuple[Node, ...]]], int] = {}
            for bit in range(width):
                if self._work > MOST_WORK:
                    break
                new = frozenset((leaf, rest) for leaf, parts in state for rest in self._behind(parts, bit))
                if new:
                    steps[new] = steps.get(new, 0) | 1 << bit
            for new, mask in steps.items():
                for leaf in accepted:
                    if self._follow[leaf] & mask:
                        torn |= {leaf, *(other for other, _ in new)}
                if new not in seen:
                    seen.add(new)
                    pending.append(new)
            if len(seen) > MOST_STATES or self._work > MOST_WORK:
                self._work = MOST_WORK + 1
                return set(self._leaves)
        return torn

    def _behind(self, parts: tuple[Node, ...], bit: int) -> set[tuple[Node, ...]]:
        """What may be left of parts in a sequence behind one character. Repetitions are not counted."""
        left: set[tuple[Node, ...]] = set()
        for i, node in enumerate(parts):
            rest = parts[i + 1 :]
            self._work += 1 + len(rest) // 16
            if self._work > MOST_WORK:
                break
            if node.kind == "set":
                left |= {rest} if self._mask[node] >> bit & 1 else set()
            elif node.kind == "seq":
                left |= {more + rest for more in self._behind(tuple(node.parts), bit)}
            else:
                again = (self._star(node),) if node.kind == "repeat" and node.most != 1 else ()
                for part in [self._rules[node.name]] if node.kind == "ref" else node.parts:
                    left |= {more + again + rest for more in self._behind((part,), bit)}
            if not self._is_nullable(node):
                break
        return left

    def _star(self, node: Node) -> Node:
        if node not in self._stars:
            self._stars[node] = star = Node("repeat", node.parts, most=-1)
            self._stars[star] = star
        return self._stars[node]

    def _regular(self, node: Node) -> str:
        """A part without recursion as an expression of terminals."""
        if node.kind == "seq" and node.parts and all(map(_is_character, node.parts)):
            return "/" + "".join(f"\\x{{{part.ranges[0][0]:x}}}" for part in node.parts) + "/"
        return _written(node, lambda ref: self._names[ref.name].upper(), self._regular)

    def _rule(self, node: Node) -> str:
        if node in self._leaves:
            return self._leaves[node]
        return _written(node, lambda ref: self._names[ref.name], self._rule)


def _bits(ranges: Ranges, edges: list[int]) -> int:
    return sum((1 << bisect_left(edges, high + 1)) - (1 << bisect_left(edges, low)) for low, high in ranges)


def _written(node: Node, ref: Callable[[Node], str], part: Callable[[Node], str]) -> str:
    if node.kind == "set":
        return f"/{_class(node.ranges)}/"
    if node.kind == "ref":
        return ref(node)
    if node.kind == "repeat":
        return f"({part(node.parts[0])}){{{node.least},{'' if node.most < 0 else node.most}}}"
    if node.kind == "or":
        return f"({' | '.join(map(part, node.parts))})"
    return " ".join(map(part, node.parts)) or '""'


def _is_character(node: Node) -> bool:
    return len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise GrammarError("EBNF parser error: a class has no characters")
    parts = [f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges]
    return f"[{''.join(parts)}]"
