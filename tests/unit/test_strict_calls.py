# SPDX-License-Identifier: Apache-2.0
"""Strict functions that a model may call by itself: what their guides admit, and what readers make of it."""

import itertools
import json
import random
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.formats.choice import make_reader
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, CONTENT, REASONING, Reader
from flashinfer_backend.openai.strict import CALLS_OR_JSON, calls_guide, forced_guide
from flashinfer_backend.structured.compiler import GrammarCompiler, TokenTexts
from flashinfer_backend.structured.grammar import Grammar, GrammarError
from flashinfer_backend.structured.preparation import GrammarPreparation
from flashinfer_backend.text.tokenizer import TextTokenizer
from unit.grammars import advance

MARKS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>", "<|start|>"]
MARKS += ["<|end|>", "<|call|>", "<|return|>"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "days": {"type": "integer", "minimum": 1, "maximum": 12},
        "unit": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Ulm"]}},
}
FUNCTIONS: dict[str, Any] = {"get.weather": WEATHER, "now": None}
SCHEMAS: dict[str, Any] = {"get.weather": WEATHER, "now": {"type": "object"}}
GOOD = '{"city": "Ulm", "days": 3, "unit": null}'
FREE = '{"zone": [1, {"a": "[0]"}]}'  # arguments of a function that is not strict
BAD = ('{"city": "Bonn"', '{"days"', '{"city": "Ulm", "days": 13', '{"city": "Ulm", "days": 3}', '["', "{}")
HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
# Format: what opens a call of a function, and what ends it.
CALLS: dict[str, list[tuple[str, str]]] = {
    "hermes": [
        ('<tool_call>\n{{"name": "{}", "arguments": ', "}}\n</tool_call>"),
        ('I look.<tool_call>{{ "name":"{}","arguments":', "}}</tool_call> done"),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{{"name": "{}", "arguments": ', "}}]"),
        ("I look.[TOOL_CALLS]{}[ARGS]", ""),
        ("[TOOL_CALLS]{}[CALL_ID]abcdefghi[ARGS]", ""),
        ("[TOOL_CALLS]{}", " done"),
    ],
    "llama3_json": [
        ('{{"name": "{}", "parameters": ', "}}"),
        ('<|python_tag|>{{"name": "{}", "parameters": ', "}}; "),
    ],
    "harmony": [
        (HARMONY, "<|call|>"),
        (" to=functions.{}<|channel|>commentary<|message|>", "<|call|>"),
        ("<|channel|>analysis<|message|>to=5<|end|><|start|>assistant" + HARMONY, "<|end|>"),
    ],
}
XML_CALLS = [
    ("<tool_call>\n<function={}>\n", "</function>\n</tool_call>"),
    ("I look.<tool_call><function={}>", "</function></tool_call> done"),
]
CALLS["qwen3_coder"] = XML_CALLS
# The same arguments with a tag for each.
XML = {
    GOOD: "<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=unit>\nnull\n</parameter>\n",
    FREE: '<parameter=zone>\n[1, {"a": "[0]"}]\n</parameter>\n',
}
XML_BAD = (
    "<parameter=city>\nBonn",
    "<parameter=city>\n Ulm",
    "<parameter=city>\nUlm\n\n",
    "<parameter=city>Ulm",
    "<parameter=days>",
    "<parameter=city>\nUlm\n</parameter><parameter=days>\n13",
    "<parameter=city>\nUlm\n</parameter><parameter=days>\n3\n</parameter></",
    "<parameter=city>\nUlm\n</parameter><parameter=city>",
    XML[GOOD].replace("null", "km"),
    XML[GOOD].replace("null", '"miles"'),
    "</function>",
    "{",
)
END_ID = 1  # of the bundled tokenizer
TEXTS = {
    "qwen3_coder": ["", "Hello {all}", "<function=x>", "a <tool_cal l> b </tool_call>"],
    "hermes": ["", "Hello {all}", '{"name": "x"}', "a <tool_cal l> b", "[TOOL_CAL"],
    "mistral": ["", '{"name": 1}', "[TOOL_CALL", "<tool_call>x"],
    "llama3_json": ["", " \n", "Hello {all}", "<b>x</b>", "<|python_tag|>search(1)", '["a"]'],
    "harmony": ["", "<|channel|>final<|message|>a to=b {", "Hello", "<|channel|>analysis<|message|>x<|end|>"],
}
OPENINGS = [(name, *each) for name, calls in CALLS.items() for each in calls]


def written(*asked: Any) -> tuple[str, str]:
    """A guide's type and text, as the compiler takes them."""
    return calls_guide(*asked)[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled tokenizer with the formats' marks as special tokens."""
    made = tmp_path_factory.mktemp("marks") / "model"
    shutil.copytree(resolve_model_dir("bundled"), made)
    backend = TextTokenizer(made).backend
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    backend.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


@pytest.fixture(scope="module")
def compiler(folder: Path, tokenizer: TextTokenizer) -> GrammarCompiler:
    return GrammarCompiler(str(folder), tokenizer.backend.get_vocab_size(with_added_tokens=True))


@pytest.fixture(scope="module")
def guide_of(compiler: GrammarCompiler) -> Any:
    """(functions, format, schema of other answers) -> a guide in its first state."""
    return lambda functions, name, *schema: compiler.compile(
        *written(functions, name, "none", False, *schema), END_ID
    )


@pytest.fixture(scope="module")
def compiled(compiler: GrammarCompiler) -> Any:
    """(format, reasoning, inside) -> a guide of FUNCTIONS in its first state."""
    return lambda *key: compiler.compile(*written(FUNCTIONS, *key), END_ID)


def follows(guide: Grammar, tokenizer: TextTokenizer, text: str) -> bool:
    """Whether the text's tokens are all allowed; the guide is where they end."""
    for token in tokenizer.backend.encode(text, add_special_tokens=False).ids:
        if not allowed(guide, token):
            return False
        accept(guide, token)
    return True


def allowed(guide: Grammar, token: int) -> bool:
    return bool(int(guide.masks[0, token >> 5]) >> (token & 31) & 1)


def all_allowed(guide: Grammar, tokenizer: TextTokenizer) -> list[int]:
    bits = np.unpackbits(guide.masks[0].view(np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits[: tokenizer.backend.get_vocab_size()]).tolist()
    return ids


def accept(guide: Grammar, token: int) -> None:
    assert advance(guide, [token]) is None


def read(tool_format: str, text: str, reasoning: str = "none", inside: bool = False) -> Any:
    """Content, reasoning and the calls' names and arguments."""
    return gathered(make_reader(tool_format, reasoning, SCHEMAS, inside, FUNCTIONS), [text])


def gathered(reader: Reader, pieces: Iterable[str]) -> Any:
    found: dict[str, str] = {CONTENT: "", REASONING: ""}
    calls: list[list[str]] = []
    events = [event for piece in pieces for event in reader.feed(piece)]
    for each in [*events, *reader.finish()]:
        if each.kind == CALL:
            calls.append([each.text, ""])
        elif each.kind == ARGUMENTS:
            calls[-1][1] += each.text
        else:
            found[each.kind] += each.text
    return found[CONTENT], found[REASONING], calls


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "llama3_json", "harmony", "qwen3_coder"])
def test_long_strings_of_arguments_have_their_length(guide_of, tokenizer, tool_format):
    """Their limits are counted, beside whatever else a format's grammar has."""
    schema = {**WEATHER, "properties": {**WEATHER["properties"], "unit": {"type": "string", "maxLength": 40}}}
    opening, closing = CALLS[tool_format][0]
    for length in (40, 41):
        arguments = XML[GOOD] if tool_format == "qwen3_coder" else GOOD
        unit = f'"{"é" * length}"'
        text = opening.format("get.weather") + arguments.replace("null", unit) + closing.format()
        guide = guide_of({"get.weather": schema, "now": None}, tool_format)
        assert follows(guide, tokenizer, text) == (length == 40)


def test_texts_with_nul_stay_whole_beside_counted_strings(guide_of, tokenizer):
    properties = {"kind": {"enum": ["a\0b"]}, "note": {"type": ["integer", "string"], "maxLength": 40}}
    schema = {"type": "object", "properties": properties, "required": ["kind"]}
    begin, end = CALLS["qwen3_coder"][0]
    for kind in ("a\0b", "a"):
        text = f"{begin.format('f')}<parameter=kind>\n{kind}\n</parameter>\n{end.format()}"
        assert follows(guide_of({"f": schema}, "qwen3_coder"), tokenizer, text) == (kind == "a\0b")


@pytest.mark.parametrize("name, begin, end", OPENINGS)
def test_calls_follow_their_schemas(
    compiled: Any, tokenizer: TextTokenizer, name: str, begin: str, end: str
) -> None:
    good, free, bad = (XML[GOOD], XML[FREE], XML_BAD) if name == "qwen3_coder" else (GOOD, FREE, BAD)
    whole = begin.format("get.weather") + good + end.format()
    guide = compiled(name, "none", False)
    assert follows(guide, tokenizer, whole) and allowed(guide, END_ID)
    assert read(name, whole)[2] == [["get.weather", GOOD]]
    for inner in ("[0]", "<|end|>"):
        text = begin.format("now") + free.replace("[0]", inner) + end.format()
        # Hermes and Qwen3-Coder have no special tokens in their text.
        if inner == "[0]" or name not in ("hermes", "qwen3_coder"):
            assert follows(compiled(name, "none", False), tokenizer, text)
            assert read(name, text)[2] == [["now", FREE.replace("[0]", inner)]]
    for each in bad:
        assert not follows(compiled(name, "none", False), tokenizer, begin.format("get.weather") + each), each
    unfinished = compiled(name, "none", False)
    assert follows(unfinished, tokenizer, begin.format("get.weather") + good[:-1])
    assert not allowed(unfinished, END_ID)
    for unknown in ("get_weather", "get.weathers", "no"):
        text = begin.format(unknown) + ("" if name == "qwen3_coder" else "{")
        assert not follows(compiled(name, "none", False), tokenizer, text), unknown


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_free(compiled: Any, tokenizer: TextTokenizer, name: str) -> None:
    for text in TEXTS[name]:
        guide = compiled(name, "none", False)
        assert follows(guide, tokenizer, text) and allowed(guide, END_ID), text
        assert not read(name, text)[2]


@pytest.mark.parametrize("name, begin, end", OPENINGS)
def test_whatever_the_guide_admits_is_read_as_calls_of_the_schemas(
    compiled: Any, tokenizer: TextTokenizer, name: str, begin: str, end: str
) -> None:
    rng = random.Random(f"{name} {begin}")
    seen = set()
    for _ in range(5):
        guide, text = compiled(name, "none", False), begin.format("get.weather")
        assert follows(guide, tokenizer, text)
        for _ in range(400):
            ids = all_allowed(guide, tokenizer)
            if len(ids) > 1500 or END_ID in ids:
                break
            token = rng.choice(ids)
            accept(guide, token)
            text += tokenizer.backend.decode([token], skip_special_tokens=False)
        ((called, arguments),) = read(name, text)[2][:1]
        assert called == "get.weather"
        if "\ufffd" not in arguments:  # bytes of one character in two tokens, decoded one by one
            jsonschema.validate(json.loads(arguments, strict=False), WEATHER)
            seen.add(arguments)
    assert len(seen) > 1


@pytest.mark.parametrize(
    "name, call, end",
    [
        ("hermes", '{"name": "get.weather", "arguments": ' + GOOD, "}</tool_call>"),
        ("qwen3_coder", "<function=get.weather>\n" + XML[GOOD], "</function></tool_call>"),
    ],
)
def test_what_the_model_thinks_is_free(
    compiled: Any, tokenizer: TextTokenizer, name: str, call: str, end: str
) -> None:
    thought = "I could <tool_call>nothing</tool_call>, {}."
    for inside, before in ((False, "\n<think>"), (True, "")):
        text = f"{before}{thought}</think>\n<tool_call>{call}{end}"
        guide = compiled(name, "think", inside)
        assert follows(guide, tokenizer, text) and allowed(guide, END_ID)
        assert read(name, text, "think", inside) == ("", thought, [["get.weather", GOOD]])
        assert not follows(compiled(name, "think", inside), tokenizer, text.replace("Ulm", "Bonn"))
        cut = compiled(name, "think", inside)
        assert follows(cut, tokenizer, before + thought) and allowed(cut, END_ID)
    assert not follows(compiled(name, "think", False), tokenizer, f"<tool_call>{call}".replace("Ulm", "Bonn"))


@pytest.mark.parametrize("name, begin, end", OPENINGS)
def test_calls_behind_reasoning_are_read_alike_between_any_two_tokens(
    compiled: Any, tokenizer: TextTokenizer, name: str, begin: str, end: str
) -> None:
    """And the grammar admits each token, with its masks those of the matcher."""
    thought, reasoning = "<think>\nI could [call] {}.</think>\n", "think"
    if name == "harmony":
        thought, reasoning = "<|channel|>analysis<|message|>Hm {}.<|end|><|start|>assistant", "harmony"
    good = XML[GOOD] if name == "qwen3_coder" else GOOD
    text = thought + begin.format("get.weather") + good + end.format()
    tokens = tokenizer.backend.encode(text, add_special_tokens=False).ids
    pieces = [tokenizer.backend.decode([token], skip_special_tokens=False) for token in tokens]
    assert "".join(pieces) == text
    grammar, rng = compiled(name, reasoning, False), random.Random(text)
    for token in tokens:
        for each in (token, *rng.choices(range(2, tokenizer.vocab_size), k=20)):
            assert each == END_ID or allowed(grammar, each) == grammar.matcher.validate_tokens([each])
        assert allowed(grammar, token)
        accept(grammar, token)
    assert allowed(grammar, END_ID)

    def told(*parts: str) -> Any:
        return gathered(make_reader(name, reasoning, SCHEMAS, False, FUNCTIONS), parts)

    whole = told(text)
    assert whole[1].strip() and whole[2][0] == ["get.weather", GOOD] and told(*pieces) == whole
    for cut in range(len(pieces)):
        assert told("".join(pieces[:cut]), "".join(pieces[cut:])) == whole, pieces[:cut]


def forced(functions: dict[str, Any], *calls: tuple[str, Any]) -> tuple[dict[str, Any], str]:
    return functions, json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


def of_x(kind: str) -> dict[str, Any]:
    reference = {"$ref": "#/$defs/X"}
    return {
        "type": "object",
        "properties": {"x": reference, "y": {"anyOf": [reference]}},
        "required": ["x", "y"],
        "additionalProperties": False,
        "$defs": {"X": {"type": kind}},
    }


SEVERAL = {"a": of_x("string"), "b": of_x("integer")}
# References to any part of their own schema, also to the whole. What only looks like one stays: a value, and
# a property of that name.
SELF = {
    "f": {
        "$id": "https://example.com/f",
        "type": "object",
        "properties": {
            "from": {"type": "object", "properties": {"x": {"enum": [1, {"$ref": "#/properties/from"}]}}},
            "to": {"$ref": "#/properties/from"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
            "$ref": {"type": "integer"},
        },
        "required": ["from", "to", "next"],
    }
}
LEAF = {"from": {"x": {"$ref": "#/properties/from"}}, "to": {"x": 1}, "next": None}


@pytest.mark.parametrize(
    ("asked", "parallel", "right"),
    [
        (forced(SEVERAL, ("a", {"x": "1", "y": "2"})), False, True),
        (forced(SEVERAL, ("b", {"x": 1, "y": 2}), ("a", {"x": "1", "y": "2"})), True, True),
        (forced(SEVERAL, ("b", {"x": 1, "y": 2}), ("a", {"x": "1", "y": "2"})), False, False),
        (forced(SEVERAL), True, False),
        (forced(SEVERAL, ("a", {"x": 1, "y": 2})), True, False),
        (forced(SEVERAL, ("b", {"x": 1, "y": "2"})), True, False),
        (forced(SEVERAL, ("c", {})), True, False),
        (forced(SELF, ("f", LEAF)), True, True),
        (forced(SELF, ("f", {**LEAF, "next": {**LEAF, "$ref": 5}})), True, True),
        (forced(SELF, ("f", {**LEAF, "next": {}})), True, False),
        (forced(SELF, ("f", {**LEAF, "to": {"x": 2}})), True, False),
    ],
)
def test_forced_calls_follow_the_schemas_of_their_functions(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, asked: Any, parallel: bool, right: bool
) -> None:
    functions, text = asked
    guide = compiler.compile(*forced_guide(functions, parallel)[:2], END_ID)
    assert (follows(guide, tokenizer, text) and allowed(guide, END_ID)) == right


def test_what_forced_calls_cannot_follow_is_named_with_its_function(compiler: GrammarCompiler) -> None:
    guide = forced_guide({"f": {"properties": {"a": {"not": {}}}}}, True)
    with pytest.raises(GrammarError, match=r"^guided_decoding_guide: the parameters of f: 'not' .*#/prop"):
        compiler.compile(*guide[:2], END_ID)


ANIMAL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "legs": {"enum": [2, 4]}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
ALONE = {
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{{"name": "{}", "arguments": {}}}]',
    "llama3_json": '{{"name": "{}", "parameters": {}}}',
    "qwen3_coder": "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", CALLS_OR_JSON)
def test_calls_or_json_of_a_schema(guide_of: Any, tokenizer: TextTokenizer, name: str) -> None:
    """The guide of tools beside a response_format: one or the other is all of the answer."""

    def whole(text: str) -> bool:
        guide = guide_of(FUNCTIONS, name, json.dumps(ANIMAL))
        return follows(guide, tokenizer, text) and allowed(guide, END_ID)

    def told(text: str, pieces: Iterable[str]) -> Any:
        content, _, calls = gathered(make_reader(name, "none", SCHEMAS, False, FUNCTIONS, True), pieces)
        return content, calls

    good, free = (XML[GOOD], XML[FREE]) if name == "qwen3_coder" else (GOOD, FREE)
    call, other = ALONE[name].format("get.weather", good), ALONE[name].format("now", free)
    answers = ['{"name": "Rex", "legs": 4}']
    if name in ("hermes", "qwen3_coder"):  # the others' marks are special tokens
        answers.append(json.dumps({"name": call, "legs": 4}))
    for text in answers:
        assert whole(text)
        assert told(text, [text]) == told(text, text) == (text, [])
    for text, calls in (
        (call, [["get.weather", GOOD]]),
        (other, [["now", FREE]]),
        (f"{call}\n{other}", [["get.weather", GOOD], ["now", FREE]]),
    ):
        assert whole(text), text
        assert told(text, [text]) == told(text, text) == ("", calls)
    for text in ("Hello", '{"name": "Rex", "legs": 3}', f"I look. {call}", call.replace("Ulm", "Bonn"), ""):
        assert not whole(text), text
    assert not whole(f"{call} done") and not whole(answers[0] + call)
    with pytest.raises(GrammarError, match="response_format: "):
        guide_of(FUNCTIONS, name, '{"not": {}}')


def test_no_request_waits_for_a_vocabulary(
    folder: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = GrammarPreparation(str(folder), tokenizer.vocab_size, 4, enabled=True)
    preparation._threads.shutdown()
    compiler = preparation._compiler
    monkeypatch.delattr(TokenTexts, "tokenizer")
    for name in CALLS:
        compiler.compile(*written(FUNCTIONS, name, "none", False), 0)
    for name in CALLS_OR_JSON:
        compiler.compile(*written(FUNCTIONS, name, "none", False, json.dumps(ANIMAL)), 0)
    compiler.compile("json", "", 0)


@pytest.mark.parametrize("name", CALLS_OR_JSON)
def test_json_of_a_schema_holds_no_special_tokens(guide_of: Any, tokenizer: TextTokenizer, name: str) -> None:
    """Some of them end a sequence, as <|eom_id|> does with Llama 3, and would cut the JSON off."""
    guide = guide_of(FUNCTIONS, name, json.dumps(ANIMAL))
    assert follows(guide, tokenizer, '{"name": "R')
    special = [token for token in map(tokenizer.backend.token_to_id, MARKS) if allowed(guide, token)]
    marks = {"mistral": 3, "llama3_json": 1}  # of calls; they are text
    assert len(special) == marks.get(name, 0)


@pytest.mark.parametrize("pieces", ["whole", "characters"])
def test_json_that_has_a_functions_name_is_no_call(
    guide_of: Any, tokenizer: TextTokenizer, pieces: str
) -> None:
    """Llama 3 writes calls as JSON objects, and those of a response_format may have a name, too."""
    any_object = json.dumps({"type": "object", "additionalProperties": True})
    call = '{ "name":"now" , "parameters": {"a": 1}}'
    for text, calls in (
        ('{"name": "now", "legs": 4}', []),
        ('{"legs": 4, "name": "now"}', []),
        ('{"name": "now"}', []),
        ('{"parameters": {"city": "Bonn"}, "name": "get.weather"}', []),
        ('{"name": "now", "parameters": null}', []),
        ('{"name": "no', None),  # cut off
        ("{", None),
        (call, [["now", '{"a": 1}']]),
        (f"<|python_tag|>{call}; {call}", 2 * [["now", '{"a": 1}']]),
    ):
        guide = guide_of(FUNCTIONS, "llama3_json", any_object)
        assert follows(guide, tokenizer, text)
        assert allowed(guide, END_ID) == (calls is not None)
        reader = make_reader("llama3_json", "none", SCHEMAS, False, FUNCTIONS, True)
        content, _, found = gathered(reader, text if pieces == "characters" else [text])
        assert (content, found) == ("" if calls else text, calls or [])


@pytest.mark.parametrize(
    "name, call",
    [
        ("qwen3_coder", "<tool_call><function=now><parameter={}>\nx\n</parameter></function></tool_call>"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]{}[ARGS]{{}}"),
    ],
)
def test_what_a_model_names_itself_has_no_bound(
    guide_of: Any, tokenizer: TextTokenizer, name: str, call: str
) -> None:
    """One would be compiled as so many states, each over all of the vocabulary: seconds of a large one."""
    assert follows(guide_of({"now": None}, name), tokenizer, call.format("a" * 500))


def test_what_cannot_be_strict_is_refused(guide_of: Any) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}, "not": {}}
    with pytest.raises(GrammarError, match=r"strict functions: the parameters of f: .*'not'.*strict out"):
        guide_of({"f": odd}, "hermes")


NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "any"},
        "also": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}], "default": None},
        "kind": {"type": ["string", "null"], "enum": ["", "a\n", '"b"', "null", None]},
        "code": {"type": "string", "pattern": "^[a-z<>/]{1,12}$"},
        "either": {"type": ["string", "integer"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "at~/%": {"$ref": "#/$defs/At"},
    },
    "required": ["text", "kind", "code", "either", "tags"],
    "$defs": {"Text": {"type": "string"}, "At": {"$ref": "#/properties/tags"}},
}
NOTED = {
    "text": '"123" </param>\n',
    "also": "null and more",
    "kind": "a\n",
    "code": "a</b>",
    "either": "12",
    "tags": ["</parameter>\n</function>"],
    "at~/%": ["\n"],
}


def as_xml(arguments: dict[str, str]) -> str:
    """A call of `note`. arguments: as they are written."""
    parts = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=note>\n{parts}</function>\n</tool_call>"


@pytest.fixture(scope="module")
def note(guide_of: Any) -> Any:
    """() -> a guide of the function `note` in its first state."""
    return partial(guide_of, {"note": NOTE}, "qwen3_coder")


def noted(text: str, cuts: Iterable[int] = ()) -> Any:
    edges = [0, *sorted(cuts), len(text)]
    reader = make_reader("qwen3_coder", "none", {"note": NOTE}, False, {"note": NOTE})
    return gathered(reader, [text[begin:end] for begin, end in itertools.pairwise(edges)])


def test_values_are_text_or_json_by_their_schemas(note: Any, tokenizer: TextTokenizer) -> None:
    plain = ("text", "also", "kind")
    written = {name: value if name in plain else json.dumps(value) for name, value in NOTED.items()}
    text = as_xml(written)
    guide = note()
    assert follows(guide, tokenizer, text) and allowed(guide, END_ID)
    content, _, ((name, arguments),) = noted(text)
    assert (content, name, json.loads(arguments)) == ("", "note", NOTED)
    assert noted(text, range(1, len(text))) == noted(text), "a character at a time"
    for key, value, read_as in (
        ("also", "null", None),
        ("also", "None", None),
        ("also", "nul", "nul"),
        ("kind", "null", None),
        ("kind", "", ""),
        ("either", "12", 12),
        ("at~/%", '["x", "y"]', ["x", "y"]),
    ):
        text = as_xml({**written, key: value})
        assert follows(note(), tokenizer, text), (key, value)
        for cuts in ([], range(1, len(text))):
            assert json.loads(noted(text, cuts)[2][0][1]) == {**NOTED, key: read_as}
    for key, value in (("either", "x"), ("kind", "a"), ("code", '"A"'), ("tags", "[]"), ("at~/%", "null")):
        assert not follows(note(), tokenizer, as_xml({**written, key: value})), (key, value)
    del written["also"], written["at~/%"]
    assert follows(note(), tokenizer, as_xml(written)), "these are not required"
    del written["either"]
    assert not follows(note(), tokenizer, as_xml(written))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_guide_of_tags_admits_is_read_alike_wherever_it_is_cut(
    note: Any, tokenizer: TextTokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    texts = ["\n</parameter>", "</parameter", "\n", "null", "1", '"', '"]', "</function>"]
    pieces = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
    guide, text = note(), "<tool_call><function=note>"
    assert follows(guide, tokenizer, text)
    for _ in range(600):
        if text.endswith("</tool_call>"):
            break
        ids = rng.choice(pieces)
        if rng.random() < 0.5 or not allowed(guide, ids[0]):
            ids = [rng.choice(all_allowed(guide, tokenizer))]
        for token in ids:
            if not allowed(guide, token):
                break
            accept(guide, token)
            text += tokenizer.backend.decode([token], skip_special_tokens=False)
    else:
        pytest.fail(f"no end: {text}")
    ((name, arguments),) = noted(text)[2]
    assert name == "note"
    jsonschema.validate(json.loads(arguments), NOTE)
    assert noted(text, range(1, len(text))) == noted(text)


@pytest.mark.parametrize(
    "parameters, words",
    [
        ({"minProperties": 1}, "have 'minProperties' at the top"),
        ({"additionalProperties": {"type": "string"}}, "have 'additionalProperties' at the top"),
        ({"required": ["a"]}, "require \"a\", which is not in 'properties'"),
        ({"required": [["a"]]}, "require .*a.*, which is not in 'properties'"),
        ({"properties": {"a>b": {}}}, 'have a property "a>b", a name that a tag cannot hold'),
        ({"properties": [1]}, "should have an object of 'properties'"),
    ],
)
def test_what_tags_cannot_say_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=f"the parameters of f {words}.*qwen3_coder.*leave strict out"):
        calls_guide({"f": {"type": "object", **parameters}}, "qwen3_coder", "none", False)
