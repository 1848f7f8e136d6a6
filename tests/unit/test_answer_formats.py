# SPDX-License-Identifier: Apache-2.0
"""Reasoning and tool calls read from a model's text: the same for any cut of the text."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_backend.openai.formats import calls, choice
from flashinfer_backend.openai.formats.events import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    Event,
    Reader,
    merged,
)
from flashinfer_backend.openai.formats.reasoning import ThinkReader, is_opened
from thinned import examples

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "when": {},
            "unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
        },
        "$defs": {"Unit": {"type": "string", "maxLength": 9}},
    },
    "now": {"type": "object", "properties": {}},
}
Make = Callable[[], Reader]


def maker(tools: str, reasoning: str = "none", inside: bool = False) -> Make:
    return lambda: choice.make_reader(tools, reasoning, SCHEMAS, inside)


def read(make: Make, text: str, cuts: list[int]) -> list[Event]:
    reader = make()
    events: list[Event] = []
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(edges):
        events += reader.feed(text[begin:end])
    return merged(events + reader.finish())


def called(name: str, arguments: str, call_id: str = "") -> list[Event]:
    return [Event(CALL, name, call_id), Event(ARGUMENTS, arguments)]


def content(text: str) -> Event:
    return Event(CONTENT, text)


PARIS = '{"city": "Paris \\"}]\\\\", "days": 3}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
XML = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nPa"ris\n</parameter>\n<parameter=days>\n3\n'
    '</parameter>\n<parameter=when>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>'
)
XML_ARGUMENTS = '{"city": "Pa\\"ris", "days": 3, "when": {"a": [1]}}'
CASES: dict[str, tuple[Make, str, list[Event]]] = {
    "plain": (maker("none"), "a <tool_call> b", [content("a <tool_call> b")]),
    "hermes": (maker("hermes"), HERMES, called("weather", PARIS)),
    "hermes, text before, two calls": (maker("hermes"),
     f'Let me see. \n\n{HERMES}\n<tool_call>{{"arguments": {{}}, "name": "now"}}</tool_call>',
     [content("Let me see."), *called("weather", PARIS), *called("now", "{}")]),
    "hermes, arguments in a string": (maker("hermes"),
     '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}</tool_call>',
     called("weather", '{"city": "Ulm"}')),
    "hermes, halves of surrogate pairs": (maker("hermes"),
     '<tool_call>{"name": "no\\ud83dw", "arguments": "{\\"city\\": \\"\\udf27\\"}"}</tool_call>',
     called("no\\ud83dw", '{"city": "\\udf27"}')),
    "hermes, no arguments, text after": (maker("hermes"), '<tool_call>{"name": "now"}</tool_call>\nDone. ',
     [*called("now", "{}"), content("Done. ")]),
    "hermes, a closing mark missing": (maker("hermes"),
     '<tool_call>{"name": "now"}\nDone. <tool_call>{"name": "now"}</tool_call>',
     [*called("now", "{}"), content("Done."), *called("now", "{}")]),
    "hermes, text between calls": (maker("hermes"),
     f'\nFirst. \n{HERMES}\n\nThen this. <tool_call>{{"name": "now"}}</tool_call> '
      '<tool_call>{"name": "now"}\nDone. \n',
     [content("\nFirst."), *called("weather", PARIS), content(" \n\n\nThen this."), *called("now", "{}"),
      *called("now", "{}"), content("  \nDone. \n")]),
    "hermes, blanks around calls alone": (maker("hermes"), f" \n{HERMES}\n\n<tool_call>1 {HERMES} \n",
     [*called("weather", PARIS), content("<tool_call>1"), *called("weather", PARIS)]),
    "hermes, cut off": (maker("hermes"), '<tool_call>{"name": "weather", "arguments": {"city": "Par',
     called("weather", '{"city": "Par')),
    "hermes, no call": (maker("hermes"), 'See <tool_call>{"x": 1}</tool_call> <tool_c',
     [content('See <tool_call>{"x": 1}</tool_call> <tool_c')]),
    "hermes, reasoning": (maker("hermes", "think"),
     f"\n<think>\nI need </thin the weather.\n\n</think>\n\n{HERMES}",
     [Event(REASONING, "I need </thin the weather."), *called("weather", PARIS)]),
    "reasoning that the prompt began": (maker("none", "think", inside=True), "\nHm. \n</think>\n\nYes.\n",
     [Event(REASONING, "Hm."), content("Yes.\n")]),
    "reasoning cut off": (maker("none", "think"), "<think>Hm. </thi", [Event(REASONING, "Hm. </thi")]),
    "no reasoning": (maker("none", "think"), " <thinner> ", [content(" <thinner> ")]),
    "xml": (maker("qwen3_coder"), "I look.\n\n" + XML,
     [content("I look."), *called("weather", XML_ARGUMENTS)]),
    "xml, text between calls": (maker("qwen3_coder"), f"One.\n{XML}\nTwo.\n{XML}\n",
     [content("One."), *called("weather", XML_ARGUMENTS), content("\n\nTwo."),
      *called("weather", XML_ARGUMENTS)]),
    "xml, no parameters": (maker("qwen3_coder"),
     "<tool_call>\n<function=now>\n</function>\n</tool_call>" + XML,
     [*called("now", "{}"), *called("weather", XML_ARGUMENTS)]),
    "xml, texts that may be null": (maker("qwen3_coder"),
     "".join(
         f"<tool_call><function=weather><parameter=unit>\n{unit}\n</parameter></function></tool_call>"
         for unit in ("null", "None", "nul", "12")
     ),
     [event for unit in ("null", "null", '"nul"', '"12"')
      for event in called("weather", f'{{"unit": {unit}}}')]),
    "xml, cut off in a tag": (maker("qwen3_coder"),
     "<tool_call><function=weather><parameter=city>\nUlm\n</parameter>\n<parameter=da",
     called("weather", '{"city": "Ulm"')),
    "xml, ends left out": (maker("qwen3_coder"),
     "<tool_call><function=weather><parameter=city>\nUlm\n</parameter>\n</func",
     called("weather", '{"city": "Ulm"}')),
    "xml, cut off": (maker("qwen3_coder"), "<tool_call><function=weather><parameter=city>\nPa\nris</para",
     called("weather", '{"city": "Pa\\nris</para')),
    "xml, a text that may be null, cut off": (maker("qwen3_coder"),
     "<tool_call><function=weather><parameter=unit>\nParis</para",
     called("weather", '{"unit": "Paris</para')),
    "xml, no call": (maker("qwen3_coder"), "A \n<tool_call>hello", [content("A \n<tool_call>hello")]),
    **{
        f"{tools}, a call in reasoning that is not closed": (
            maker(tools, "think"),
            f"<think>Hm. I use <tools>.\n{call}",
            [Event(REASONING, "Hm. I use <tools>."), *called("weather", arguments)],
        )
        for tools, call, arguments in (
            ("hermes", HERMES, PARIS),
            ("qwen3_coder", XML, XML_ARGUMENTS),
            ("qwen3_coder", XML.removeprefix("<tool_call>\n"), XML_ARGUMENTS),
            ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}", PARIS),
            ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', PARIS),
        )
    },
    "what could begin a mark before a call in reasoning": (maker("hermes", "think"), f"<think>1 <{HERMES}",
     [Event(REASONING, "1 <"), *called("weather", PARIS)]),
    "a call in reasoning that is closed": (maker("hermes", "think"),
     f"<think>I write {HERMES}, no?</think>Yes.",
     [Event(REASONING, f"I write {HERMES}, no?"), content("Yes.")]),
    "a mark in reasoning that is cut off": (maker("hermes", "think"), "<think>I write <tool_call> and",
     [Event(REASONING, "I write <tool_call> and")]),
    "xml, without the opening mark": (maker("qwen3_coder"), "I look.\n\n" + XML.removeprefix("<tool_call>\n"),
     [content("I look."), *called("weather", XML_ARGUMENTS)]),
    "xml, without the opening mark, another function": (maker("qwen3_coder"),
     "See <function=other> and <function=weath", [content("See <function=other> and <function=weath")]),
    "xml, without the ends of parameters": (maker("qwen3_coder"), XML.replace("</parameter>\n", "") + XML,
     [*called("weather", XML_ARGUMENTS), *called("weather", XML_ARGUMENTS)]),
    "xml, without the last end of a parameter": (maker("qwen3_coder"),
     "<tool_call><function=weather><parameter=city>\nUlm\n</function>\n</tool_call>\n",
     called("weather", '{"city": "Ulm"}')),
    "xml, a value with the function's end in it": (maker("qwen3_coder"),
     "<tool_call><function=weather><parameter=city>\na\n</function>\n</tool_call>\nb\n</parameter>\n"
      "</function>\n</tool_call>", called("weather", '{"city": "a\\n</function>\\n</tool_call>\\nb"}')),
    "xml, two functions in one tag": (maker("qwen3_coder"),
     "<tool_call>\n<function=now>\n</function>\n" + XML.removeprefix("<tool_call>\n") + "\nDone",
     [*called("now", "{}"), *called("weather", XML_ARGUMENTS), content("Done")]),
    "hermes, cut off before a name": (maker("hermes"), "A <tool_call>{", [content("A <tool_call>{")]),
    "hermes, a call that breaks off": (maker("hermes"),
     '<tool_call>{"name": "now", "arguments": null, x}, or</tool_call> So <tool_call>{"name": "now"',
     [*called("now", "{}"), content("So"), Event(CALL, "now")]),
    "llama, cut off before a name": (maker("llama3_json"), ' {"name": "no', [content(' {"name": "no')]),
    "mistral, no name": (maker("mistral"), 'A [TOOL_CALLS] {"a": 1}', [content('A [TOOL_CALLS] {"a": 1}')]),
    "mistral, a list that breaks off": (maker("mistral"), '[TOOL_CALLS][{"name": "now", "arguments": {}}; 1',
     [*called("now", "{}"), content("; 1")]),
    "mistral, a list cut off": (maker("mistral"), "A [TOOL_CALLS] [ {", [content("A [TOOL_CALLS] [ {")]),
    "xml, a number cut off": (maker("qwen3_coder"), "<tool_call><function=weather><parameter=days>\n12",
     called("weather", '{"days": 12')),
    "xml, text in place of an end": (maker("qwen3_coder"), "<tool_call><function=now></function> Done.",
     [*called("now", "{}"), content("Done.")]),
    "mistral, cut off before a name": (maker("mistral"), "A [TOOL_CALLS]wea", [content("A [TOOL_CALLS]wea")]),
    "qwen3_coder, cut off before a name": (maker("qwen3_coder"), "A <tool_call> <func",
     [content("A <tool_call> <func")]),
    "llama": (maker("llama3_json"), f'{{"name": "weather", "parameters": {PARIS}}}',
     called("weather", PARIS)),
    "llama, two behind the tag": (maker("llama3_json"),
     f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
     [*called("weather", PARIS), *called("now", "{}")]),
    "llama, text behind a call": (maker("llama3_json"),
     '<|python_tag|>{"name": "now", "parameters": {}} ; So', [*called("now", "{}"), content("So")]),
    "llama, other JSON": (maker("llama3_json"), ' {"name": "Bob", "parameters": 1}',
     [content(' {"name": "Bob", "parameters": 1}')]),
    "llama, text": (maker("llama3_json"), "<|python_ no", [content("<|python_ no")]),
    "llama, its own tools": (maker("llama3_json"), '<|python_tag|>search.call(query="x")',
     [content('<|python_tag|>search.call(query="x")')]),
    "mistral": (maker("mistral"),
     f'Well. [TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, '
     '{"name": "now", "arguments": {}}]',
     [content("Well."), *called("weather", PARIS), *called("now", "{}")]),
    "mistral, names before arguments": (maker("mistral"),
     f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}",
     [*called("weather", PARIS), *called("now", "{}", "abcdefghi")]),
    "mistral, text between calls": (maker("mistral"),
     "One. [TOOL_CALLS]now[ARGS]{} Two. [TOOL_CALLS]now[ARGS]{}",
     [content("One."), *called("now", "{}"), content("  Two."), *called("now", "{}")]),
    "mistral, no call": (maker("mistral"), "A [TOOL_CALLS][1]", [content("A [TOOL_CALLS][1]")]),
    "harmony": (maker("harmony", "harmony"),
     "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
      "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
      f"{PARIS}<|call|>",
     [Event(REASONING, "Hm."), content("I look."), *called("weather", PARIS)]),
    "harmony, several messages of a kind": (maker("harmony", "harmony"),
     "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
      "<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>"
      "<|start|>assistant<|channel|>analysis<|message|>Ah.<|end|>"
      "<|start|>assistant<|channel|>final<|message|><|end|><|start|>assistant<|channel|>final<|message|>Noon",
     [*(Event(REASONING, "Hm."), content("I look."), *called("now", "{}")),
      *(Event(REASONING, "\nAh."), content("\nNoon"))]),
    "harmony, a call behind reasoning without its end": (maker("harmony", "harmony"),
     "<|channel|>analysis<|message|>Hm.<|channel|>commentary to=functions.weather<|message|>"
      f"{PARIS}<|call|>", [Event(REASONING, "Hm."), *called("weather", PARIS)]),
    "harmony, recipient in the role": (maker("harmony", "harmony"),
     f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", called("weather", PARIS)),
    "harmony, a call where none is possible": (maker("none", "harmony"),
     "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
      f" to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
     [Event(REASONING, "Hm."), content(PARIS)]),
    "harmony, final": (maker("harmony", "harmony"),
     "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>"
      "Yes <|.<|return|>", [Event(REASONING, "a < b"), content("Yes <|.")]),
    "harmony, goes on": (maker("harmony", "harmony"), "Yes.", [content("Yes.")]),
    "named": (lambda: calls.NamedReader("weather"), PARIS, called("weather", PARIS)),
    "list": (calls.ListReader,
     f'[{{"name": "weather", "parameters": {PARIS}}} , {{"name": "now", "parameters": {{}}}}]',
     [*called("weather", PARIS), *called("now", "{}")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_format_is_read(name: str) -> None:
    make, text, expected = CASES[name]
    found = read(make, text, [])
    assert found == merged(expected)
    for event in found:
        event.text.encode()  # as an answer does
    assert read(make, text, list(range(len(text)))) == merged(expected), "a character at a time"


ALPHABET = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<function=now>", "<function=weather>", "</function>", "<parameter=city>", "<parameter=days>"),
    "<parameter=unit>\n",
    *("</parameter>", "<|python_tag|>", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>"),
    *("<|start|>assistant", " to=functions.now", "<|call|>", '{"name": "now", "arguments": {"a": 1}}'),
    *('{"name": "weather", ', '"parameters": ', '"arguments": ', '{"city": "x', '"}'),
    *("}", "]", "[", ",", ";"),
    *("\n", " ", '"', "\\", "<", "a", "é", "name", "null", ":"),
]
BOUND = {"weather": SCHEMAS["weather"], "now": None}
READERS: dict[str, Make] = {
    "xml, guided": lambda: choice.make_reader("qwen3_coder", "none", SCHEMAS, False, BOUND),
    **{
        f"{tools}-{reasoning}-{inside}": maker(tools, reasoning, inside)
        for tools in choice.TOOL_FORMATS
        for reasoning in choice.REASONING_FORMATS
        for inside in (False, True)
    },
    "list": calls.ListReader,
    "named": lambda: calls.NamedReader("now"),
}


@settings(max_examples=examples(700), deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(READERS)),
    st.one_of(
        st.lists(st.sampled_from(ALPHABET), max_size=14).map("".join),
        st.sampled_from([text for _, text, _ in CASES.values()]),
    ),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_any_cut_gives_the_same(name: str, text: str, cuts: list[int]) -> None:
    make = READERS[name]
    whole = read(make, text, [])
    assert read(make, text, cuts) == whole
    assert read(make, text, list(range(len(text)))) == whole


def test_arguments_nested_too_deeply_for_a_look_pass_as_they_are() -> None:
    deep = "[" * 5000 + "]" * 5000
    text = f'<tool_call>{{"arguments": {deep}, "name": "now"}}</tool_call>'
    assert read(maker("hermes"), text, []) == called("now", deep)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "[" * 5000])
def test_what_is_no_json_is_text(value: str) -> None:
    text = f"<tool_call><function=weather><parameter=days>\n{value}\n</parameter></function></tool_call>"
    assert read(maker("qwen3_coder"), text, []) == called("weather", f'{{"days": "{value}"}}')


def test_the_template_tells_the_format() -> None:
    for template, tools, reasoning in (
        ("... <tool_call> ... </think>", "hermes", "think"),
        ("<tool_call>\n<function=example>", "qwen3_coder", "none"),
        ("[TOOL_CALLS]", "mistral", "none"),
        ("<|python_tag|>", "llama3_json", "none"),
        ("<|start|>assistant<|channel|>", "harmony", "harmony"),
        ("{{ messages }}", "none", "none"),
    ):
        assert (choice.detect_tools(template), choice.detect_reasoning(template)) == (tools, reasoning)


@pytest.mark.parametrize(
    ("answer", "opened"),
    [("<think>\n", True), ("<think>\nI look", True), ("<think>\n\n</think>\n\n", False), ("", False)],
)
def test_a_prompt_opens_the_reasoning(answer: str, opened: bool) -> None:
    for asked in ("What is <think>?", "hi", "t", "<think>", "</think>", "I look", "k>\nI"):
        for prompt in ("user {} assistant ", "<think>{}</s>", "hi, <think>. user {} assistant "):
            shown = (prompt + answer).format
            assert is_opened(shown(asked), asked, shown) == opened, (asked, prompt)
    assert not is_opened("user <think> I", "", str)


def test_reasoning_that_mentions_a_call_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is held back: each token would take as long as all tokens before it."""
    searched = []
    find = ThinkReader._call
    monkeypatch.setattr(ThinkReader, "_call", lambda reader: searched.append(1) or find(reader))
    reader = maker("hermes", "think", inside=True)()
    text = "I call <tool_call>" + "<no" * 100 + "</thin"
    events = [event for char in text for event in reader.feed(char)]
    assert merged(events) == [Event(REASONING, "I call")] and len(searched) <= len("I call <tool_call>")
    events = [event for char in "k> Hi" for event in reader.feed(char)]
    assert merged(events) == [Event(REASONING, text[6:-6]), Event(CONTENT, "Hi")]


@pytest.mark.parametrize("rest", ["Hi", '{"name": "x"}', "<|python_tag|>Hi", ""])
def test_blanks_before_an_answer_that_is_no_call_are_content(rest: str) -> None:
    text = "\n " * 50 + rest
    assert read(maker("llama3_json"), text, list(range(len(text)))) == [Event(CONTENT, text)]


@pytest.mark.parametrize(
    ("tools", "reasoning", "begin"),
    [
        ("hermes", "none", "Hi"),
        ("hermes", "none", '<tool_call>{"name": "now", "arguments": {}}'),
        ("qwen3_coder", "none", "Hi"),
        ("qwen3_coder", "none", "<tool_call><function=weather>"),
        ("qwen3_coder", "none", "<tool_call><function=weather><parameter=city>Ulm"),
        ("mistral", "none", "Hi"),
        ("mistral", "none", "[TOOL_CALLS]"),
        ("llama3_json", "none", "<|python_tag|>"),
        ("none", "think", ""),
        ("none", "think", "<think>Hm"),
        ("harmony", "harmony", "<|channel|>"),
    ],
)
def test_many_line_breaks_are_looked_at_once(tools: str, reasoning: str, begin: str) -> None:
    """One by one they would take minutes here, the square of their number."""
    reader = maker(tools, reasoning)()
    events = reader.feed(begin)
    for _ in range(30_000):
        events += reader.feed("\n" * 100)
    events += [*reader.feed("x"), *reader.finish()]
    assert merged(events) == read(maker(tools, reasoning), begin + "\n" * 3_000_000 + "x", [])


def test_a_value_that_goes_on_behind_the_end_of_a_function_is_not_held_for_long() -> None:
    """All of it was looked at with each token, for minutes here."""
    reader = maker("qwen3_coder")()
    value = "Ulm\n</function>" + "x" * 50 * 30_000
    events = reader.feed("<tool_call><function=weather><parameter=city>")
    for begin in range(0, len(value), 50):
        events += reader.feed(value[begin : begin + 50])
    assert len(reader._reader._text) < 100
    events += [*reader.feed("\n</parameter></function></tool_call>"), *reader.finish()]
    assert merged(events) == called("weather", json.dumps({"city": value}))
