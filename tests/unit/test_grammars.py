# SPDX-License-Identifier: Apache-2.0
"""Regular expressions and EBNF as grammars, their bounds, masks of rows and along drafts."""

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
import string
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import pytest
from small_tokenizers import KINDS

from flashinfer_backend.core.bounds import GRAMMAR, GrammarBounds
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import CALLS_GUIDE
from flashinfer_backend.structured import masks
from flashinfer_backend.structured.compiler import HEAD, GrammarCompiler, TokenTexts, Vocabulary
from flashinfer_backend.structured.ebnf import lark_grammar
from flashinfer_backend.structured.grammar import Grammar, GrammarError, is_of_the_guide
from flashinfer_backend.structured.json_schema import SchemaChecks
from flashinfer_backend.structured.masks import Move, SequenceGrammars
from flashinfer_backend.structured.regex import literal_names
from flashinfer_backend.text.tokenizer import TextTokenizer
from unit.grammars import admits, advance, matcher, takes_less

ALPHABET = "ab(c\n"
WORDS = ["".join(word) for size in range(5) for word in itertools.product(ALPHABET, repeat=size)]

# The package leaves out this warning of Python's, but pytest brings it back.
NESTED_SETS = pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
# Python's `re` says what each means; `.` is (?s:.) there.
REGEXES = [
    "a|b*c", "(a|ab)(c|bc)?", "^a.b$", "^(a|b$)$", "a{2,3}", "(?:ab){2}c?", "[^a]+", r"[\s\S]{2}", r"\(a?\(",
    "(?P<n>a|b)c", "(?<möglich>a)b", r"\x61[\x62\x63]", r"[\^a]b", "[a-c]{0,2}", "", "^$|a", r"\n[^\n]",
    "a+?b", r"\Db", r"\W+", r"\u0061b", "[(]|[[]", "[]a]", "(^a|^b)c",
]  # fmt: skip


@NESTED_SETS
@pytest.mark.parametrize("regex", REGEXES)
def test_a_regular_expression_means_what_it_means_to_python(regex):
    grammar = matcher("regex", regex)
    plain = re.compile(regex.replace("(?<m", "(?P<m"), re.DOTALL)
    assert [word for word in WORDS if admits(grammar, word) != bool(plain.fullmatch(word))] == []


@NESTED_SETS
@pytest.mark.parametrize("regex", REGEXES)
def test_a_pattern_of_a_schema_is_searched_for(regex):
    grammar = matcher("json_schema", json.dumps({"type": "string", "pattern": regex}))
    plain = re.compile(regex.replace("(?<m", "(?P<m"))
    wrong = [
        word
        for word in WORDS
        if admits(grammar, json.dumps(word)) != bool(plain.search(word)) and not word.endswith("\n")
    ]
    assert wrong == []


@pytest.mark.parametrize("regex", [r"\u{1F600}é", "[é-\U0010ffff]{2}", r"[^\ud800-\udfffa]é", r"\D\W"])
def test_characters_beyond_ascii(regex):
    grammar = matcher("regex", regex)
    assert admits(grammar, "😀é") and not admits(grammar, b"\xed\xa0\x80\xc3\xa9")


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("a^b", "within the text"),
        ("a$b", "within the text"),
        ("(^a)+", "beginning and the end alone"),
        (r"a\b", "within the text"),
        ("(?=a)b", r"\(\?= and \(\?<="),
        ("a(?!b)", r"\(\?! and"),
        ("(?i)a", "flags such as"),
        ("(?i:a)", "flags of groups"),
        (r"(a)\1", "references to groups"),
        ("a++", "possessive"),
        ("a{1,4294967298}", "too large"),
        (f"a{{{'1' * 5000}}}", "repetitions should be at most 100000"),
        (r"\U99999999", r"characters at most \\U0010ffff"),
        ("a{100001}", "beyond 100000"),
        (r"a\z", r"bad escape \\z"),
        (r"\p{L}", r"bad escape \\p"),
        (r"\x6", "incomplete escape"),
        ("([", "unterminated character set"),
        ("[\\ud800-\\udbff]", "half of a surrogate pair"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
        ("(" * 300 + ")" * 300, "nest"),
        ("a" * 20_000, "20000 characters"),
    ],
)
def test_what_a_regular_expression_cannot_say_is_refused(regex, words):
    with pytest.raises(GrammarError, match=words) as refused:
        matcher("regex", regex)
    assert len(str(refused.value)) < 1000


def nested(depth: int) -> str:
    return "" if depth == 0 else f"a{nested(depth - 1)}b"


# Grammars, texts of theirs, texts that are not.
GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno", "ye"]),
    ('root ::= item (", " item){1,2} "."\nitem ::= [A-Z] [a-z]{2,3}', ["Abc, Def."], ["Abc.", "Ab, Def."]),
    ('root ::= "a" root "b" | ""', ["", "ab", nested(30)], ["a", "aab"]),
    ("root ::= [^a-c\\n-]+ # comment\n", ["xyz", "é😀"], ["a", "x\n", "-"]),
    (r"root ::= [^\ue000-\uffff] | [\ud7ff-\ue000]{2}", ["\ud7ff", "😀", "\ue000\ud7ff"], ["\ue001"]),
    (r'root ::= "\x41\u00e9\"\\" [\]\-x]', ['Aé"\\]', 'Aé"\\-'], ["Aé"]),
    ('root ::= ("a" |\n  "b")\n  "c"', ["ac", "bc"], ["a"]),
    ('root ::= x{2} y?\nx ::= "a"\ny ::= .', ["aa", "aa\n"], ["a", "aaxx"]),
    ('root::="a"\nunused ::= "b"', ["a"], ["b"]),
    # A longer match would take what is behind it.
    ('root ::= x\nx ::= [a-z]+ "b" | "(" x ")"', ["xxb", "(xbb)"], ["b", "(xb"]),
    ('root ::= ("ab" | x) ("cd" | "e")\nx ::= "abce" | "(" x ")"', ["abcd", "abcee", "(abce)cd"], ["abce"]),
    ('root ::= "if" root | id\nid ::= [a-z]+ ":"', ["ifif:", "ifx:", "if:"], ["if"]),
    ("root ::= e\ne ::= n | e [-+] e | \"(\" e \")\"\nn ::= [0-9]+", ["1", "12+(3-44)"], ["1+", "()"]),
    ('root ::= ("b" "c")+ "b" root | "."', ["bcb.", "bcbcbbcb."], ["bb."]),
    ('root ::= w root | w\nw ::= "a" "a"? "b"*', ["a", "aabab", "abba"], ["b", ""]),
]  # fmt: skip
JSON_GRAMMAR = r"""
root ::= value
value ::= object | array | string | number | "true" ws | "null" ws
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= [ \t\n]*
"""
GRAMMARS.append(
    (JSON_GRAMMAR, ['{"a": [1, -2.5e3, true ,{"b" :"c\\n"}], "é":null}'], ['{"a"}', "[1,]", "01"])
)


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
def test_ebnf(grammar, good, bad):
    made = matcher("ebnf_grammar", grammar)
    assert [text for text in good if not admits(made, text)] == []
    assert [text for text in bad if admits(made, text)] == []


def random_rules(rng: random.Random) -> dict[str, Any]:
    """Trees: ("text" or "set" or "ref", what), ("seq" or "or", parts), ("rep", tree, mark)."""

    def tree(depth: int) -> Any:
        kind = rng.choice(
            ["text", "set", "ref", "text"] if not depth else ["seq", "or", "rep", "text", "ref", "seq"]
        )
        if kind == "text":
            return ("text", "".join(rng.choices("abc", k=rng.randint(0, 3))))
        if kind == "set":
            return ("set", rng.choice(["a", "bc", "ab", "abc"]))
        if kind == "ref":
            return ("ref", rng.choice(["root", "x", "y"]))
        if kind == "rep":
            return ("rep", tree(depth - 1), rng.choice("*+?"))
        return (kind, [tree(depth - 1) for _ in range(2)])

    return {name: tree(3) for name in ("root", "x", "y")}


def as_ebnf(node: Any) -> str:
    kind, what = node[0], node[1]
    if kind in ("text", "set", "ref"):
        return {"text": f'"{what}"', "set": f"[{what}]", "ref": what}[kind]
    if kind == "rep":
        return f"({as_ebnf(what)}){node[2]}"
    return "(" + (" | " if kind == "or" else " ").join(map(as_ebnf, what)) + ")"


def language(rules: dict[str, Any], longest: int) -> set[str]:
    """All words of up to so many characters, by a fixpoint over the rules."""
    words: dict[str, set[str]] = {name: set() for name in rules}

    def of(node: Any) -> set[str]:
        kind, what = node[0], node[1]
        if kind in ("text", "ref"):
            return {what} if kind == "text" else words[what]
        if kind == "set":
            return set(what)
        if kind == "or":
            return of(what[0]) | of(what[1])
        if kind == "seq":
            return {a + b for a in of(what[0]) for b in of(what[1]) if len(a + b) <= longest}
        once, found = of(what), {""} if node[2] != "+" else set(of(what))
        if node[2] == "?":
            return found | once
        while more := {a + b for a in found for b in once if len(a + b) <= longest} - found:
            found |= more
        return found

    before = None
    while before != (before := {name: set(found) for name, found in words.items()}):
        words |= {name: {w for w in of(node) if len(w) <= longest} for name, node in rules.items()}
    return words["root"]


@pytest.mark.parametrize(
    ("regex", "names"),
    [
        ("^a b$", {"a b"}),
        ("^(a|b|)$", {"a", "b", ""}),
        (r"^(?:a\.|\|-b)$", {"a.", "|-b"}),
        *((other, set()) for other in ("a", "^a|b$", "^[ab]$", "^a?$", "^(a)|(b)$", r"^a\d$", "^(a.|b)$")),
    ],
)
def test_names_that_an_expression_lists_are_known(regex, names):
    assert literal_names(regex) == names


def test_an_optional_part_of_ebnf_stays_one_terminal():
    """A terminal for each character takes milliseconds a mask."""
    text = lark_grammar('root ::= "(" ([a-z]+ ("," root)?)? ")"')
    assert r"T1: (/[\x{61}-\x{7a}]/){1,}" in text.splitlines()


@pytest.mark.parametrize("seed", range(4))
def test_random_ebnf_admits_its_language(seed):
    rng, tried = random.Random(seed), 0
    words = ["".join(word) for size in range(6) for word in itertools.product("abc", repeat=size)]
    for _ in range(60):
        rules = random_rules(rng)
        expected = language(rules, 5)
        if not expected - {""}:
            continue
        made = matcher(
            "ebnf_grammar", "\n".join(f"{name} ::= {as_ebnf(rule)}" for name, rule in rules.items())
        )
        tried += 1
        wrong = [word for word in words if admits(made, word) != (word in expected)]
        assert wrong == [], (rules, wrong[:5])
    assert tried > 20


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("ebnf_grammar", 'root ::= "a" b', 'Rule "b" is not defined'),
        ("ebnf_grammar", 'x ::= "a"', 'Rule "root" is not defined'),
        ("ebnf_grammar", 'root ::= "a"\nroot ::= "b"', 'line 2: Rule "root" is defined twice'),
        ("ebnf_grammar", 'root ::= ("a"', r"a \) is missing"),
        ("ebnf_grammar", "root ::= 'a'", "is not understood"),
        ("ebnf_grammar", "root ::= *", "nothing stands before"),
        ("ebnf_grammar", 'root ::= "a"{3,2}', "wrong way round"),
        ("ebnf_grammar", "root ::= [z-a]", "from a higher to a lower"),
        ("ebnf_grammar", "root ::= []", "no characters"),
        ("ebnf_grammar", r"root ::= [^\x00-\U0010ffff]", "no characters"),
        ("ebnf_grammar", r'root ::= "\ud800"', "no character"),
        ("ebnf_grammar", "root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested more than 100 deep"),
        ("ebnf_grammar", 'root ::= "a"{200000}', "beyond 100000"),
        ("ebnf_grammar", f'root ::= "a"{{{"1" * 5000}}}', "line 1: a repetition is beyond 100000"),
        ("ebnf_grammar", f'root ::= "a"{{0,{"1" * 5000}}}', "line 1: a repetition is beyond 100000"),
        ("ebnf_grammar",
         "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | [a-z]\n" for i in range(GRAMMAR.rules)),
         f"more than {GRAMMAR.rules} rules"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_wrong_and_too_large_grammars_are_refused(kind, text, words):
    with pytest.raises(GrammarError, match=words):
        matcher(kind, text)


REPEATED = "*" * 800
SLOW = {
    "blanks": 'root ::= "a"{1,' + " " * 60_000 + "x",
    "repetitions": f"""root ::= "(" root ")" | ({"|".join(['"a"'] * 8000)}){REPEATED}""",
    "empty": 'root ::= x root | "."\nx ::= ' + '"a"? ' * 12_000,
    "characters": 'root ::= "(" root ")" | "' + "".join(map(chr, range(0x4E00, 0x9E00))) + '"',
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW.keys())
def test_no_ebnf_takes_long_to_read(text):
    def read() -> None:
        with contextlib.suppress(GrammarError):
            lark_grammar(text)

    assert takes_less(2, read), "which docs/notes/guides.md promises"


def test_zeros_in_front_of_a_repetition_say_nothing():
    assert admits(matcher("ebnf_grammar", f'root ::= "a"{{{"0" * 5000}2, 003 }}'), "aaa")


@pytest.mark.parametrize("kind", ["regex", "ebnf_grammar", "json_schema"])
def test_reasons_can_be_sent_whatever_they_quote(compiler, kind):
    texts = {"regex": "[\udc00-a]", "ebnf_grammar": 'root ::= "\ud800"', "json_schema": '{"type": "\ud800"}'}
    with pytest.raises(GrammarError, match=r"\\ud[8c]00") as refused:
        compiler.compile(kind, texts[kind], 1)
    assert str(refused.value).encode()


def test_documents_of_one_guide_share_the_steps_of_their_checks(compiler, monkeypatch):
    names = [f"p{i}" for i in range(50)]
    parameters = {
        "properties": {name: {"$ref": "#/$defs/d"} for name in names},
        "$defs": {"d": {"prefixItems": [{"x": 1}] * 9000}},
    }
    guide = {
        "lark": "start: j0\nj0: %json 0",
        "schemas": [{"function": "f", "at": f"#/properties/{name}"} for name in names],
        "functions": {"f": parameters},
        "special_tokens": [],
        "refusal": "{}",
    }
    check, checked = SchemaChecks.check, []
    monkeypatch.setattr(
        SchemaChecks, "check", lambda own, root, at: checked.append(at) or check(own, root, at)
    )
    with pytest.raises(GrammarError, match="the parameters of f: it is too large"):
        compiler.compile(CALLS_GUIDE, json.dumps(guide), 1)
    assert 1 < len(checked) < 10


def test_a_choice_is_one_of_its_texts():
    texts = ["a", "ab", "/x|y/", '"é\\n"', "\n", "(🙂)*", "$^"]
    grammar = matcher("choice", json.dumps(texts))
    assert all(admits(grammar, text) for text in texts)
    assert not any(admits(grammar, text) for text in ("", "b", "y/", "abb", "aab", "(🙂)"))
    with pytest.raises(GrammarError, match="surrogate"):
        matcher("choice", json.dumps(["\ud800"]))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler("bundled", 2048)


def chain(length: int) -> dict[str, Any]:
    """A schema of definitions, each of which names the next one in its elements."""
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {}}}


def patterns(count: int) -> list[Any]:
    return [{"pattern": "^a"}] * count


# Guides that ask for n of what GrammarBounds has under a name; schemas as such.
ASKING: dict[str, Callable[[int], Any]] = {
    "characters": lambda n: f'{{"title": "{"x" * (n - 13)}"}}',
    "written": lambda n: {"prefixItems": [{"pattern": "-" * 5461}] * (n // (7 * 5461) + n % 2)},
    "ebnf_characters": lambda n: ("ebnf_grammar", f'root ::= "{"a" * (n - 11)}"'),
    "rules": lambda n: ("ebnf_grammar", "root ::= r0\n" + "".join(f'r{i} ::= "a"\n' for i in range(n - 1))),
    "regex_characters": lambda n: ("regex", "a" * n),
    "repeats": lambda n: ("regex", f"a{{1,{n}}}"),
    "groups": lambda n: ("regex", "(" * (n - 1) + "a" + ")" * (n - 1)),
    "subschemas": lambda n: {"prefixItems": [{}] * (n - 1)},
    "nesting": lambda n: functools.reduce(
        lambda inner, i: [{"items": inner}, {"anyOf": [inner]}, {"properties": {"a": inner}}][i % 3],
        range(n),
        {},
    ),
    "levels": lambda n: chain((n - 1) // 2 + n % 2),
    "optional": lambda n: {"properties": {f"p{i}": {} for i in range(n)}},
    "multiple_of": lambda n: {"multipleOf": n, "type": "integer"},
    "patterns": lambda n: {
        "properties": {"a": {"pattern": "b"}},
        "allOf": [{"properties": {"a": {"allOf": patterns(n - 1)}}}],
    },
    "tested": lambda n: {"allOf": [*patterns(2), {"enum": [f"a{i}" for i in range((n + 1) // 2)]}]},
    "count": lambda n: {"type": "string", "minLength": n},
}


@pytest.mark.parametrize("bound", dataclasses.fields(GrammarBounds), ids=lambda bound: bound.name)
def test_a_guide_may_ask_for_what_the_bounds_say_and_no_more(bound):
    most = getattr(GRAMMAR, bound.name)

    def compiled(n: int) -> Any:
        guide = ASKING[bound.name](n)
        guide = guide if isinstance(guide, tuple) else ("json_schema", guide)
        text = guide[1] if isinstance(guide[1], str) else json.dumps(guide[1])
        return GrammarCompiler("bundled", 2048).compile(guide[0], text, 1)

    assert compiled(most)
    with pytest.raises(GrammarError, match=f"{most}|beyond|more than a sequence|{most + 1}"):
        compiled(most + 1)


def doubling(count: int) -> str:
    """Each rule is twice the next one."""
    return (
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(count)) + f'r{count} ::= "b"'
    )


def product(options: int, factors: int) -> str:
    """Each value satisfies one option of each factor."""
    of = [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(options)]} for i in range(factors)]
    return json.dumps({"allOf": of})


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("ebnf_grammar", doubling(30), "too big"),
        ("json_schema", product(4, 6), "too big"),
        ("json_schema", product(2, 9), "Too many items"),
        ("json_schema", product(8, 8), "schema too large"),
        ("json_schema", json.dumps({"enum": [[i] for i in range(2001)]}), "too large"),
        ("json_schema", json.dumps({"const": functools.reduce(lambda x, _: [x], range(900), 1)}), "nested"),
        ("regex", "".join(f"{c}*" for c in string.ascii_letters) * 100, "fuel"),
        ("yaml", "a", "'yaml'; it should be one of json, json_schema, regex,"),
        ("x" * 100_000, "a", "should be one of json, json_schema, regex,"),
        ("ebnf_grammar", 'root ::= "a" ' + "b" * 60_000, "not a valid ebnf_grammar: EBNF parser error"),
        ("json_schema", '{"type": "objec', "not a valid json_schema: Failed to parse JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_wrong_or_would_take_too_much_time_or_memory_is_refused_in_few_words(
    compiler, kind, text, words
):
    with pytest.raises(GrammarError, match=words) as refused:
        compiler.compile(kind, text, 1)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("kind", "text", "begin", "words"),
    [
        ("json_schema", product(4, 4), "{", "Current row has"),
        ("regex", "(.{1,300}b){1,300}", "ba" * 99, "too many expressions"),
    ],
)
def test_a_matcher_ends_with_words_where_following_takes_too_much(compiler, kind, text, begin, words):
    grammar, tokens = compiler.compile(kind, text, 1), TextTokenizer(resolve_model_dir("bundled")).backend
    problem = None
    for token in tokens.encode(begin, add_special_tokens=False).ids:
        if (problem := advance(grammar, [token])) is not None:
            break
    assert re.search(f"after [0-9]+ tokens: .*{words}.*write it with fewer", str(problem))
    assert is_of_the_guide(str(problem))


def test_sequences_that_share_the_host_have_fewer_states_each():
    """Of 4096 slots one in ten of what one slot has, so a text ends there that goes on here."""
    text = "".join(random.Random(0).choices("ab", k=4000))
    tokens = TextTokenizer(resolve_model_dir("bundled")).backend.encode(text, add_special_tokens=False).ids

    def problem(slots: int) -> str | None:
        grammar = GrammarCompiler("bundled", 2048, slots).compile("regex", "(a|b)*a(a|b){14}c", 1)
        return next((found for token in tokens if (found := advance(grammar, [token])) is not None), None)

    assert problem(256) is None
    assert re.search("after [0-9]+ tokens: .*too many states: 5000.*with fewer", str(problem(4096)))


@pytest.mark.parametrize("back", ["", ' | "(" root ")"'])
def test_the_longest_chain_of_rules_is_taken_or_refused(back):
    chain = [f'r{i} ::= r{i + 1} | "ab"{back if i == 7 else ""}' for i in range(498)]
    grammar = "\n".join(["root ::= r0", *chain, 'r498 ::= "x"'])
    try:
        assert admits(matcher("ebnf_grammar", grammar), "x")
    except GrammarError as error:
        assert back and "too deep" in str(error)


def test_what_takes_too_long_to_look_through_is_characters():
    """Slower to follow, and right as before."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=8)) for _ in range(600)]
    grammar = matcher("ebnf_grammar", 'root ::= "(" root ")" | ' + " | ".join(f'"{word}"' for word in words))
    assert admits(grammar, f"(({words[7]}))") and not admits(grammar, f"({words[7]}")


def tokens_of(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


FOLLOWED = [
    ("json", ""),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}'),
    ("regex", r"[\w .-]{3,12}é*"),
    ("ebnf_grammar", 'root ::= "a" root "b" | [0-9]+'),
]


@pytest.mark.parametrize("text", ['{"a": [1, null]}', "[]", '"x"', "3"])
def test_any_json_is_json(text):
    assert admits(matcher("json", ""), text) and not admits(matcher("json", ""), text + "}")


@pytest.mark.parametrize(("kind", "text"), FOLLOWED)
def test_a_mask_has_the_tokens_that_the_matcher_takes(compiler, kind, text):
    rng, grammar = random.Random(0), compiler.compile(kind, text, 1)
    for _ in range(25):
        mask = tokens_of(grammar.masks[0])
        taken = [i for i in range(2048) if i != 1 and grammar.matcher.validate_tokens([i])]
        assert [i for i in mask if i != 1] == taken and (1 in mask) == grammar.matcher.is_accepting()
        if not taken:
            break
        assert advance(grammar, [rng.choice(taken)]) is None


def test_rows_move_on_together(compiler):
    grammars, alone = [[compiler.compile(*each, 1) for each in FOLLOWED] for _ in range(2)]
    rows, rng = SequenceGrammars(2048), random.Random(3)
    for _ in range(10):
        moves = []
        for grammar, other in zip(grammars, alone, strict=True):
            choices = [i for i in tokens_of(grammar.masks[0]) if i != 1]
            if choices:
                moves.append(Move(grammar, [rng.choice(choices)]))
                assert advance(other, moves[-1].tokens) is None
        rows.advance(moves)
        masks = rows.stacked([(grammar, -1) for grammar in grammars])
        assert (masks.view(np.uint32) == np.concatenate([other.masks for other in alone])).all()


def test_a_row_that_fails_leaves_the_others_alone(compiler):
    rows = SequenceGrammars(2048)
    good, wrong = compiler.compile("regex", "a{5}", 1), compiler.compile("regex", "a{5}", 1)
    (token,) = [i for i in tokens_of(good.masks[0]) if good.matcher.validate_tokens([i] * 5) == 5][:1]
    rows.advance([Move(good, [token]), Move(wrong, [5])])
    rows.wait()
    assert good.problem is None and good.tokens == 1
    assert "after 0 tokens" in str(wrong.problem)
    rows.advance([Move(good, [token])])
    rows.wait()
    assert good.problem is None and good.tokens == 2


def test_costly_masks_end_where_steps_wait_long_for_them(compiler, monkeypatch):
    """But not before, and no others; where none is costly, they are not looked for again at once."""
    looked = []

    def cost_s(grammar):
        looked.append(grammar)
        return costs[id(grammar)]

    monkeypatch.setattr(Grammar, "cost_s", cost_s)
    rows = SequenceGrammars(2048)
    cheap, dear, dearer = found = [compiler.compile("regex", "[a-z]*", 1) for _ in range(3)]
    costs = dict(zip(map(id, found), (0.004, 0.03, 0.04), strict=True))

    def steps(count, slow):
        monkeypatch.setattr(masks, "SLOW_S", -0.1 if slow else 60.0)  # a step is slow by 0.1 s and more
        for _ in range(count):
            rows.advance([Move(grammar, [letter]) for grammar in found if grammar.problem is None])
            rows.wait()

    letter = next(i for i in tokens_of(cheap.masks[0]) if cheap.matcher.validate_tokens([i, i]) == 2)
    steps(20, slow=False)
    steps(5, slow=True)
    steps(1, slow=False)
    steps(5, slow=True)
    assert not looked
    steps(6, slow=True)
    assert looked == found and not any(grammar.problem for grammar in found)  # one mask can be an exception
    steps(1, slow=True)
    assert looked == 2 * found and cheap.problem is None
    for grammar, words in ((dear, "takes 30 ms of a core"), (dearer, "takes 40 ms of a core")):
        assert words in grammar.problem and is_of_the_guide(grammar.problem)
    looked.clear()
    steps(masks.PAUSE_STEPS, slow=True)
    assert looked == [cheap] and cheap.problem is None and cheap.tokens > masks.PAUSE_STEPS


def test_a_mask_has_a_cost_and_stays_as_it_is(compiler):
    grammar = compiler.compile("regex", "[a-z]*", 1)
    before = grammar.masks.copy()
    assert grammar.cost_s() >= 0 and (grammar.masks == before).all()
    assert grammar.fill() is None and (grammar.masks == before).all()


def masks_along(grammar: Grammar, draft: list[int], end_id: int) -> list[list[int]]:
    """The tokens allowed next and behind each of a draft's, one by one; the last ones again behind one that
    does not follow or ends the text."""
    matcher, found = grammar.matcher.deep_copy(), [tokens_of(grammar.masks[0])]
    for token in draft:
        if token in (1, end_id) or not matcher.try_consume_tokens([token]):
            break
        allowed = set(tokens_of(np.frombuffer(matcher.compute_bitmask(), np.uint32))) - {1, end_id}
        allowed |= {end_id} if end_id >= 0 and matcher.is_accepting() else set()
        found.append(sorted(allowed) or found[-1])
    return found + found[-1:] * (1 + len(draft) - len(found))


@pytest.mark.parametrize("end_id", [1, -1, 40])
def test_rows_have_a_mask_for_each_token_of_their_drafts(compiler, end_id):
    """Drafts that follow, that stray, and that go on behind an end; none leaves a trace."""
    rng, rows = random.Random(end_id), SequenceGrammars(2048)
    text = TextTokenizer(resolve_model_dir("bundled")).backend.encode("cat 12", add_special_tokens=False).ids
    kinds = [*FOLLOWED, ("regex", "cat [0-9]{2}")]
    grammars, alone = [[compiler.compile(*kind, end_id) for kind in kinds] for _ in range(2)]
    for turn in range(len(text)):
        moves = []
        for grammar, other in zip(grammars, alone, strict=True):
            accepted, draft = [text[turn]], [*text[turn + 1 :], end_id, 5]
            if grammar is not grammars[-1]:
                accepted, draft = [], rng.choices(range(2048), k=rng.randint(0, 2))
                for _ in range(rng.randint(0, 3)):
                    if choices := [i for i in tokens_of(other.masks[0]) if i not in (1, end_id)]:
                        accepted.append(rng.choice(choices))
                        assert advance(other, accepted[-1:]) is None
                draft = [*rng.choices(tokens_of(other.masks[0]) or [5], k=rng.randint(0, 2)), *draft]
            else:
                assert advance(other, accepted) is None
            moves.append(Move(grammar, accepted, draft))
        rows.advance(moves)
        assert rows.followed() == [len(move.tokens) for move in moves]
        assert [grammar.ended for grammar in grammars] == [other.ended for other in alone]
        counts = [1 + len(move.draft) for move in moves]
        masks = rows.stacked([(grammar, -1) for grammar in grammars], counts).view(np.uint32)
        expected = [masks_along(other, move.draft, end_id) for other, move in zip(alone, moves, strict=True)]
        assert [tokens_of(mask) for mask in masks] == list(itertools.chain(*expected))
        firsts = rows.stacked([(grammar, 1) for grammar in grammars]).view(np.uint32)
        for mask, (first, *_) in zip(firsts, expected, strict=True):
            assert tokens_of(mask) == ([i for i in first if i != 1] or first)
        assert [grammar.tokens for grammar in grammars] == [other.tokens for other in alone]


def test_tokens_behind_the_end_of_a_text_are_not_followed(compiler):
    rows, tokens = SequenceGrammars(2048), TextTokenizer(resolve_model_dir("bundled")).backend
    text = tokens.encode("cat 12", add_special_tokens=False).ids
    whole, stray = [compiler.compile("regex", "cat [0-9]{2}", -1) for _ in range(2)]
    rows.advance([Move(whole, [*text, 7, 7]), Move(stray, [*text[:2], text[0], 7])])
    assert rows.followed() == [len(text), 2]
    rows.wait()
    assert whole.ended and whole.problem is None
    assert not stray.ended and "after 2 tokens" in str(stray.problem)


def test_forced_tokens_spell_the_only_text(compiler):
    tokens = TextTokenizer(resolve_model_dir("bundled")).backend
    schema = {
        "type": "object",
        "properties": {"temperature": {"enum": ["cold", "warm"]}},
        "required": ["temperature"],
    }
    grammar = compiler.compile("json_schema", json.dumps(schema), 1)
    assert advance(grammar, tokens.encode('{"temp', add_special_tokens=False).ids) is None
    before, at = grammar.masks.copy(), grammar.tokens
    forced = grammar.forced(20)
    assert tokens.decode(forced) == 'erature":' and grammar.forced(2) == forced[:2]
    assert grammar.fill() is None and (grammar.masks == before).all() and grammar.tokens == at
    assert advance(grammar, [*forced, *tokens.encode('"w', add_special_tokens=False).ids]) is None
    assert tokens.decode(grammar.forced(20)).startswith('arm"')
    free = compiler.compile("regex", "[ab]+", 1)
    assert free.forced(5) == []


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_tokens_are_the_bytes_that_they_write(tmp_path, kind):
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    made = TokenTexts(tmp_path, 3000).tokenizer()
    ids = KINDS[kind]().encode("The fox é", add_special_tokens=False).ids
    assert made.decode_bytes(ids).decode().strip() == "The fox é" and len(ids) > 3


def test_special_tokens_are_no_text_unless_asked_for():
    folder = resolve_model_dir("bundled")
    for as_text, expected in (((), False), (None, True)):
        made = TokenTexts(folder, 2048).tokenizer(as_text)
        grammar = Grammar(llguidance.LLMatcher(made, "start: /[a-z_<>|]+/"), made, -1, 2048)
        assert bool(grammar.matcher.validate_tokens([2])) == expected


def test_without_an_end_of_its_own_a_vocabulary_has_one():
    made = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(Vocabulary([b"a", b"b", b"<2>"], [2], 2)), n_vocab=3
    )
    grammar = Grammar(llguidance.LLMatcher(made, HEAD + 'start: "a"'), made, -1, 3)
    assert tokens_of(grammar.masks[0]) == [0]
    assert advance(grammar, [0]) is None
    assert grammar.ended and not grammar.masks.any()
