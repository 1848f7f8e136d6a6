# SPDX-License-Identifier: Apache-2.0
"""Strict functions that a model may call by itself: what their guides admit, and what readers make of it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.formats.choice import make_reader
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, CONTENT, REASONING
from flashinfer_backend.openai.strict import calls_guide
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Grammar, GrammarError
from flashinfer_backend.text.tokenizer import TextTokenizer

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
TEXTS = {
    "hermes": ["", "Hello {all}", '{"name": "x"}', "a <tool_cal l> b", "[TOOL_CAL"],
    "mistral": ["", '{"name": 1}', "[TOOL_CALL", "<tool_call>x"],
    "llama3_json": ["", " \n", "Hello {all}", "<b>x</b>", "<|python_tag|>search(1)", '["a"]'],
    "harmony": ["", "<|channel|>final<|message|>a to=b {", "Hello", "<|channel|>analysis<|message|>x<|end|>"],
}
OPENINGS = [(name, *each) for name, calls in CALLS.items() for each in calls]


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
def compiled(folder: Path, tokenizer: TextTokenizer) -> Any:
    """(format, reasoning, inside) -> a guide in its first state."""
    compiler = GrammarCompiler(str(folder), tokenizer.backend.get_vocab_size(with_added_tokens=True))
    known: dict[Any, Any] = {}

    def make(*key: Any) -> Grammar:
        if key not in known:
            known[key] = compiler.compile(*calls_guide(FUNCTIONS, *key))
        size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        return Grammar(known[key], tokenizer.eos_id or 0, size)

    return make


def follows(guide: Grammar, tokenizer: TextTokenizer, text: str) -> bool:
    """Whether the text's tokens are all allowed; the guide is where they end."""
    for token in tokenizer.backend.encode(text, add_special_tokens=False).ids:
        if not allowed(guide, token):
            return False
        guide.accept(token)
    return True


def allowed(guide: Grammar, token: int) -> bool:
    return bool(int(guide.mask_without(-1)[token >> 5]) >> (token & 31) & 1)


def read(tool_format: str, text: str, reasoning: str = "none", inside: bool = False) -> Any:
    """Content, reasoning and the calls' names and arguments."""
    reader = make_reader(tool_format, reasoning, SCHEMAS, inside, whole_arguments=True)
    found: dict[str, str] = {CONTENT: "", REASONING: ""}
    calls: list[list[str]] = []
    for each in [*reader.feed(text), *reader.finish()]:
        if each.kind == CALL:
            calls.append([each.text, ""])
        elif each.kind == ARGUMENTS:
            calls[-1][1] += each.text
        else:
            found[each.kind] += each.text
    return found[CONTENT], found[REASONING], calls


@pytest.mark.parametrize("name, begin, end", OPENINGS)
def test_calls_follow_their_schemas(
    compiled: Any, tokenizer: TextTokenizer, name: str, begin: str, end: str
) -> None:
    whole = begin.format("get.weather") + GOOD + end.format()
    guide = compiled(name, "none", False)
    assert follows(guide, tokenizer, whole) and allowed(guide, tokenizer.eos_id or 0)
    assert read(name, whole)[2] == [["get.weather", GOOD]]
    for arguments in (FREE, FREE.replace("[0]", "<|end|>")):
        free = begin.format("now") + arguments + end.format()
        # Hermes has no special tokens in its text.
        if arguments == FREE or name != "hermes":
            assert follows(compiled(name, "none", False), tokenizer, free)
            assert read(name, free)[2] == [["now", arguments]]
    for bad in BAD:
        assert not follows(compiled(name, "none", False), tokenizer, begin.format("get.weather") + bad), bad
    unfinished = compiled(name, "none", False)
    assert follows(unfinished, tokenizer, begin.format("get.weather") + GOOD[:-1])
    assert not allowed(unfinished, tokenizer.eos_id or 0)
    for unknown in ("get_weather", "get.weathers", "no"):
        assert not follows(compiled(name, "none", False), tokenizer, begin.format(unknown) + "{"), unknown


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_free(compiled: Any, tokenizer: TextTokenizer, name: str) -> None:
    for text in TEXTS[name]:
        guide = compiled(name, "none", False)
        assert follows(guide, tokenizer, text) and allowed(guide, tokenizer.eos_id or 0), text
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
            ids = [i for i in range(tokenizer.backend.get_vocab_size()) if allowed(guide, i)]
            if len(ids) > 1500 or (tokenizer.eos_id or 0) in ids:
                break
            token = rng.choice(ids)
            guide.accept(token)
            text += tokenizer.backend.decode([token], skip_special_tokens=False)
        ((called, arguments),) = read(name, text)[2][:1]
        assert called == "get.weather"
        if "\ufffd" not in arguments:  # bytes of one character in two tokens, decoded one by one
            jsonschema.validate(json.loads(arguments, strict=False), WEATHER)
            seen.add(arguments)
    assert len(seen) > 1


def test_what_the_model_thinks_is_free(compiled: Any, tokenizer: TextTokenizer) -> None:
    thought = "I could <tool_call>nothing</tool_call>, {}."
    call = '<tool_call>{"name": "get.weather", "arguments": '
    for inside, before in ((False, "\n<think>"), (True, "")):
        text = f"{before}{thought}</think>\n{call}{GOOD}}}</tool_call>"
        guide = compiled("hermes", "think", inside)
        assert follows(guide, tokenizer, text) and allowed(guide, tokenizer.eos_id or 0)
        assert read("hermes", text, "think", inside) == ("", thought, [["get.weather", GOOD]])
        wrong = f"{before}{thought}</think>\n{call}" + '{"days"'
        assert not follows(compiled("hermes", "think", inside), tokenizer, wrong)
        cut = compiled("hermes", "think", inside)
        assert follows(cut, tokenizer, before + thought) and allowed(cut, tokenizer.eos_id or 0)
    assert not follows(compiled("hermes", "think", False), tokenizer, call + '{"days"')


def test_what_cannot_be_strict_is_refused(folder: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(
        ApiError, match=r"not supported for the format qwen3_coder.*leave strict out, or force"
    ):
        calls_guide(FUNCTIONS, "qwen3_coder", "none", False)
    with pytest.raises(
        ApiError, match=r"the function f is strict, so its parameters should be .* type object"
    ):
        calls_guide({"f": {"anyOf": []}}, "hermes", "none", False)
    odd = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}, "not": {}}
    compiler = GrammarCompiler(str(folder), tokenizer.backend.get_vocab_size())
    with pytest.raises(GrammarError, match=r"strict functions: the parameters of f: .*'not'.*strict out"):
        compiler.compile(*calls_guide({"f": odd}, "hermes", "none", False))
