# SPDX-License-Identifier: Apache-2.0
"""Parts of the OpenAI API without an engine: templates, defaults, tools, chunks of any number of tokens, kept
responses."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.json import encode

from flashinfer_backend.core.bounds import CONVERSATION
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.openai import anthropic, response_store
from flashinfer_backend.openai.answer import Usage
from flashinfer_backend.openai.chat import Answer, Conversation, Turn
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.formats import choice, harmony
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, CONTENT, Event, merged
from flashinfer_backend.openai.link import ClientLeft, EngineLink, Stream, Streams
from flashinfer_backend.openai.log_probs import TokenTexts, chat_log_probs, chat_token
from flashinfer_backend.openai.model import Model
from flashinfer_backend.openai.requests import (
    AllowedChoice,
    AllowedFunctions,
    ChatRequest,
    FunctionChoice,
    ItemsQuery,
    MessagesRequest,
    ResponsesRequest,
    decode,
)
from flashinfer_backend.openai.response_store import ResponseStore
from flashinfer_backend.openai.responses import _input_of, _Reply, input_page, messages_of, without_references
from flashinfer_backend.openai.sampling import Defaults, EngineLimits, Length, NamedTokens, sampling_params
from flashinfer_backend.openai.served_model import ServedModel
from flashinfer_backend.openai.template import ChatTemplate, plain_messages
from flashinfer_backend.openai.tools import AUTO, Tools, read_tools
from flashinfer_backend.serving.generation import Chunk, GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import protocol
from thinned import examples

ASK = [{"role": "user", "content": "Hi"}]
LIMITS = EngineLimits(2048, 100, 99)


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        stem, _, ending = name.rpartition("_")
        file = folder / f"{stem.replace('__', '/')}.{ending}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_what_all_answers_of_a_request_take_is_bounded() -> None:
    metrics: Any = None
    served = ServedModel(Model(["m"], EngineConfig(model_dir="bundled"), max_prompt_bytes=100), metrics)
    assert len(asyncio.run(served.encode(["a" * 100] * 8, False))) == 8
    with pytest.raises(
        ApiError, match="has 801 characters in 9 texts; it should have at most 800 in a request"
    ):
        asyncio.run(served.encode([*["a" * 100] * 8, "a"], False))
    long = np.zeros((1 << 18) + 1, "<i4")
    for row, words in (
        (GenerationRequest(long, SamplingParams(max_tokens=1)), "prompt has 33554560 ids for all answers"),
        (GenerationRequest(long[:1], SamplingParams(max_tokens=1, grammar="a" * (1 << 20))), "the guide has"),
    ):
        with pytest.raises(ApiError, match=words):
            asyncio.run(served.generate([(row, 128)], True))


def test_many_stop_words_are_tokenised_in_a_thread() -> None:
    """4090 of 60 characters take a third of a second, in which streams go on."""
    metrics: Any = None
    served: Any = ServedModel(Model(["m"], EngineConfig(model_dir="bundled")), metrics)
    find, in_main = served.special_stops, []
    served.link = SimpleNamespace(generate=lambda *args: None, check_room=lambda count=1: None)
    served.special_stops = lambda words: (
        in_main.append(threading.current_thread() is threading.main_thread()) or find(words)
    )
    for words in (["the", "<|end_of_text|>"], ["<|end_of_text|>", *("the king" for _ in range(600))]):
        row = GenerationRequest(np.zeros(1, "<i4"), SamplingParams(max_tokens=1), stop_words=words)
        asyncio.run(served.generate([(row, 1)], True))
        assert row.params.stop_sequences == [[1]]
    assert in_main == [True, False]


def test_the_longest_texts_wait_for_one_of_two_threads() -> None:
    """Each takes half a gigabyte while it is encoded: the loop has up to 32 threads."""
    metrics: Any = None
    served: Any = ServedModel(Model(["m"], EngineConfig(model_dir="bundled")), metrics)
    places: list[str] = []
    served.tokenizer.encode_batch = lambda texts, special: places.append(threading.current_thread().name)
    for size in (8, 5000, 1 << 17):
        asyncio.run(served.encode(["a" * size], True))
    assert [place.partition("_")[0] for place in places] == ["MainThread", "asyncio", "longest texts"]


def test_arguments_of_calls_are_counted_before_they_are_parsed() -> None:
    """They are text of the body, which its bounds of values do not see."""

    def messages(arguments: str) -> list[dict[str, Any]]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "tool_calls": [call, call]}]

    half = CONVERSATION.values // 2
    assert len(plain_messages(messages(json.dumps([0] * half)))) == 1
    assert len(plain_messages(messages(json.dumps(["a,b"] * half)))) == 1
    with pytest.raises(ApiError, match="the arguments of all calls in messages have more than 65536 values"):
        plain_messages(messages(json.dumps([0] * (half + 1))))


def test_the_first_request_makes_no_tables_and_compiles_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold up the streams of the process."""
    served = ServedModel(Model(["m"], EngineConfig(model_dir="bundled")), cast(Any, None))
    monkeypatch.setattr("jinja2.Environment.compile", None)
    monkeypatch.setattr(DeltaDecoder, "_fill_tables", None)
    assert served.template is not None and served.template.render([{"role": "user", "content": "Hi"}])
    assert [served.decoder(skip).decode([70]) for skip in (True, False)]


def test_the_first_chat_imports_nothing() -> None:
    # An import of a second would hold up the streams of the process.
    program = (
        "import sys; from pathlib import Path\n"
        "from flashinfer_backend.openai.template import ChatTemplate\n"
        "template = ChatTemplate.load(Path(sys.argv[1])); before = set(sys.modules)\n"
        "template.render([{'role': 'user', 'content': 'Hi'}])\n"
        "late = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not late & {'transformers', 'jinja2', 'torch', 'numpy'}, late\n"
    )
    command = [sys.executable, "-c", program, str(resolve_model_dir("bundled"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_templates_are_found_wherever_checkpoints_keep_them(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]
    write(tmp_path, tokenizer_config_json={"chat_template": named, "bos_token": {"content": "<s>"}})
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(ASK) == "plain"
    for name in ("messages", "add_generation_prompt", "chat_template"):
        with pytest.raises(ApiError, match=f"has {name}, which templates get from"):
            template.render(ASK, variables={name: 5})
    assert template.render(ASK, tools=[{"x": 1}]).startswith("with [{")
    write(tmp_path, chat_template_json={"chat_template": "older"})
    assert ChatTemplate.load(tmp_path).source == "older"  # type: ignore[union-attr]
    write(tmp_path, chat_template_jinja="{{ bos_token }}{{ messages[0].content }}")
    newest = ChatTemplate.load(tmp_path)
    assert newest is not None and newest.render(ASK) == "<s>Hi"
    other = tmp_path / "mine.jinja"
    other.write_text("mine")
    assert ChatTemplate.load(tmp_path, other).source == "mine"  # type: ignore[union-attr]


def test_formats_are_told_from_the_template_that_shows_them(tmp_path: Path) -> None:
    """Hermes 3's template of prompts without tools knows nothing of calls."""
    for file in resolve_model_dir("bundled").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write(tmp_path, chat_template_jinja="{{ messages[0].content }}</think>")
    write(tmp_path, additional_chat_templates__tool_use_jinja="{{ tools }}<tool_call>")
    metrics: Any = None
    served = ServedModel(Model(["m"], EngineConfig(model_dir=str(tmp_path))), metrics)
    assert (served.tool_format, served.reasoning_format) == ("hermes", "think")


def test_ids_of_forced_calls_are_the_models() -> None:
    """Their text is plain JSON, but Mistral's template takes them back with its own ids alone."""
    for choice_of_tools in ("auto", "required"):
        tools = read_tools([{"type": "function", "function": {"name": "f"}}], choice_of_tools, None)
        served: Any = SimpleNamespace(
            tool_format="mistral", reasoning_format="none", decoder=lambda skip: None, template=None
        )
        stream: Any = None
        answer = Answer(Turn(served, Conversation(ASK, tools), False), stream)
        assert len(answer.new_call(Event(CALL, "f"))["id"]) == 9


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for m in",
    ],
)
def test_a_template_can_only_fail(source: str) -> None:
    """One that raises, or reaches for Python's insides, makes an error of the request."""
    try:
        text = ChatTemplate(source, {}).render(ASK)
    except ApiError as error:
        assert error.status == 400
    else:
        assert "class" not in text


CALLS = (
    "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}"
    "{% for call in m.tool_calls %}<{{ call.function.name + ' ' + call.function.arguments }}>{% endfor %}"
    "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)


def test_calls_that_a_template_does_not_show_are_refused() -> None:
    call = {"function": {"name": "look_up", "arguments": "{}"}}
    messages = plain_messages([{"role": "assistant", "content": "I look.", "tool_calls": [call]}])
    for source in ("{{ messages[0].content }}", "{% for m in messages %}{{ m['role'] }}{% endfor %}"):
        with pytest.raises(
            ApiError, match=r'has a call of "look_up", but .* makes no use of calls'
        ) as refused:
            ChatTemplate(source, {}).render(messages, field="input")
        assert refused.value.param == "input"
        ChatTemplate(source, {}).render(plain_messages([{"role": "assistant", "content": "I look."}]))
    assert "look_up" in ChatTemplate("{{ messages | tojson }}", {}).render(messages)


def test_calls_for_templates_that_join_text() -> None:
    """DeepSeek-R1's template has calls where a turn's content is none, and joins their arguments to text."""
    call = {"function": {"name": "f", "arguments": '{"a": "é"}'}}
    cut = {"function": {"name": "g", "arguments": '{"a": '}}
    turn = {"role": "assistant", "tool_calls": [call, cut]}
    template = ChatTemplate(CALLS, {})
    for content in (None, ""):
        assert template.render(plain_messages([turn | {"content": content}])) == '<f {"a": "é"}><g {"a": >'
    assert template.render(plain_messages([turn | {"content": "well"}])) == "[well]"
    assert template.render(plain_messages([{"role": "assistant", "content": ""}])) == "[]"
    # One that asks for none, and yet takes the content for text
    strict = ChatTemplate(
        "{% if 'x' in messages[0].content or messages[0].content is none %}{% endif %}"
        "{% if messages[0].tool_calls %}ok{% endif %}",
        {},
    )
    assert strict.render(plain_messages([turn])) == "ok"
    shown = ChatTemplate("{{ messages[0].content }}|{{ messages[0].tool_calls[0].function.arguments.a }}", {})
    assert shown.render(plain_messages([turn])) == "|é"


STRICT = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{% if m.role != 'tool' and not m.tool_calls and m.role != 'system' %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('by turns') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}[{{ m.role[0] }} {{ m.content }}"
)


def test_neighbours_for_templates_that_want_turns() -> None:
    template = ChatTemplate(STRICT + "]{% endfor %}", {})
    users = [{"role": "user", "content": text} for text in "ab"]
    first = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}]
    assert template.render(plain_messages([*first, *users])) == "[s s\n\nd][u a\n\nb]"
    later = [users[0], {"role": "assistant", "content": "x"}, first[0]]
    assert template.render(plain_messages(later)) == "[u a][a x][u s]"
    with pytest.raises(ApiError, match="system first"):  # the reason that the first form was refused
        template.render(plain_messages([users[0], first[0], later[1], later[1]]))
    free = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    assert free.render(plain_messages([*first, *users])) == "[s][d][a][b]"
    # As DeepSeek-R1's: the last one of the system's
    last = "{{ (messages | selectattr('role', 'equalto', 'system') | list | last).content }}"
    both = ChatTemplate(last + "|{{ messages|length }}", {})
    assert both.render(plain_messages([*first, *users])) == "s\n\nd|3"


def test_forms_are_tried_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of thousands of messages, in each of 40 forms, takes seconds."""
    users = plain_messages([{"role": "user", "content": text} for text in "ab"])
    strict = ChatTemplate(STRICT + "]{% endfor %}", {})
    assert strict.render(users) == "[u a\n\nb]"  # the second form
    monkeypatch.setattr("flashinfer_backend.openai.template.TRIES_S", 0.0)
    with pytest.raises(ApiError, match=r"by turns\. It was tried for 0 s: of fewer messages"):
        strict.render(users)
    assert strict.render(users[:1]) == "[u a]"  # the first form is always tried


def test_several_calls_for_templates_that_take_one() -> None:
    """Llama 3.1's refuses what the model itself may write."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.tool_calls|length != 1 %}{{ raise_exception('1') }}{% endif %}"
        "<{{ m.tool_calls[0].id }}>{% else %}({{ m.content }}){% endif %}{% endfor %}"
    )
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
    results = [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in "ba"]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    template = ChatTemplate(source, {})
    assert template.render(plain_messages([turn, *results])) == "<a>(of a)<b>(of b)"
    for call in calls:
        del call["id"]
    assert "(of b)(of a)" in template.render(plain_messages([turn, *results]))


# What GPT-OSS's template does with calls and reasoning.
HARMONY = (
    "{% set last = namespace(name='') %}Reasoning: {{ reasoning_effort or 'medium' }}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}{% if message.content and message.thinking %}{{ raise_exception('both') }}"
    "{% endif %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking or message.content }}"
    "<|end|>{% set last.name = message.tool_calls[0].function.name %}<|start|>assistant "
    "to=functions.{{ last.name }}<|channel|>commentary json<|message|>"
    "{{ message.tool_calls[0].function.arguments|tojson }}<|call|>"
    "{% elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ message.content|tojson }}<|end|>{% else %}<|start|>{{ message.role }}<|message|>"
    "{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_calls_and_their_reasoning_for_harmony() -> None:
    """Its template shows the first of several calls alone, and refuses reasoning next to text."""
    calls = [{"id": i, "function": {"name": i, "arguments": '{"a": 1}'}} for i in ("one", "two")]
    results = [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in ("two", "one")]
    turn = {"role": "assistant", "reasoning_content": "Hm.", "content": None, "tool_calls": calls}
    template = ChatTemplate(HARMONY, {})
    ask = {"role": "user", "content": "?"}
    text = template.render(plain_messages([ask, turn, *results]), variables={"reasoning_effort": "high"})
    assert text.startswith("Reasoning: high<|start|>user<|message|>?<|end|>")
    shown = [
        f'to=functions.{name}<|channel|>commentary json<|message|>{{"a": 1}}<|call|><|start|>functions.{name}'
        f' to=assistant<|channel|>commentary<|message|>"of {name}"<|end|>'
        for name in ("one", "two")
    ]
    places = [text.index(each) for each in shown]
    assert places == sorted(places) and text.count("Hm.") == 1 and "analysis<|message|>Hm.<|end|>" in text
    both = template.render(plain_messages([ask, turn | {"content": "I look."}, *results]))
    assert "analysis<|message|>Hm.\nI look.<|end|>" in both
    assert harmony.opened(text) == f"{text}<|channel|>final<|message|>"
    assert harmony.opened("<|start|>user<|message|>") == "<|start|>user<|message|>"


def test_ids_for_templates_that_want_short_ones() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}"
        "{{ raise_exception('9') }}{% endif %}{{ c.id }} {% endfor %}{{ m.tool_call_id }} {% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": "{}"}}
    calls = [call | {"id": "call_" + "0" * 24}, call | {"id": "abcdefgh1"}]
    messages = [{"role": "assistant", "tool_calls": calls}] + [
        {"role": "tool", "tool_call_id": each["id"], "content": "x"} for each in calls
    ]
    first, second, of_first, of_second = ChatTemplate(source, {}).render(plain_messages(messages)).split()
    assert (first, second) == (of_first, of_second) and second == "abcdefgh1" and len(first) == 9
    calls[0]["id"] = "abcdefgh2"
    assert "abcdefgh2 abcdefgh1" in ChatTemplate(source, {}).render(plain_messages(messages))


def test_tools_for_templates_that_need_all_of_them() -> None:
    source = (
        "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
        "{% for p in t.function.parameters.properties|items %}{{ p[0] }}{% endfor %}{% endfor %}"
    )
    tools = read_tools([{"type": "function", "function": {"name": "f"}}], None, None).shown
    assert ChatTemplate(source, {}).render(ASK, tools=tools) == "f: "
    assert "description" not in ChatTemplate("{{ tools }}", {}).render(ASK, tools=tools)


def test_messages_as_templates_take_them() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    user, assistant = plain_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "audio": None},
        ]
    )
    assert user == {"role": "user", "content": "a\nb"}
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": [1]} and assistant["content"] == ""
    said = {"role": "assistant", "refusal": "No.", "reasoning": "Hm"}
    (refusing,) = plain_messages([said])
    assert (refusing["content"], refusing["reasoning_content"]) == ("No.", "Hm")


def test_values_where_a_request_is_silent(tmp_path: Path) -> None:
    write(
        tmp_path, generation_config_json={"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None}
    )
    defaults = Defaults.load(tmp_path)
    silent = decode(ChatRequest, json.dumps({"messages": ASK}).encode())
    tokens = NamedTokens([], [], [], [], [])
    params = sampling_params(silent, defaults, LIMITS, tokens, 2, Length(10))
    assert (params.temperature, params.top_k, params.top_p, params.end_id) == (0.6, 20, 1.0, 2)
    assert params.max_tokens == 90, "all that there is room for"
    body = {"messages": ASK, "temperature": 0, "top_k": -1, "seed": -1, "ignore_eos": True, "min_tokens": 3}
    same = {"min_p": 0.3, "frequency_penalty": 0.5, "presence_penalty": -1.5, "repetition_penalty": 1.2}
    asked = decode(ChatRequest, json.dumps(body | same).encode())
    said = sampling_params(asked, defaults, LIMITS, tokens, 2, Length(10, 5))
    assert (said.temperature, said.top_k, said.seed, said.end_id) == (0.0, 0, 2**64 - 1, -1)
    assert said.min_tokens == 3 and {name: getattr(said, name) for name in same} == same
    other = sampling_params(silent, defaults, LIMITS, tokens, 2, Length(10))
    assert other.seed != params.seed
    write(tmp_path, generation_config_json={"stop_strings": "\nUser:"})
    assert Defaults.load(tmp_path).stop_strings == ["\nUser:"]
    wrongs = ({"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"repetition_penalty": 0})
    for wrong in (*wrongs, {"stop_strings": [""]}, {"stop_strings": 7}):
        write(tmp_path, generation_config_json=wrong)
        with pytest.raises(ValueError, match=rf"generation_config.json.*{next(iter(wrong))}"):
            Defaults.load(tmp_path)
    write(tmp_path, generation_config_json='{"temperature": NaN}')
    with pytest.raises(ValueError, match="generation_config"):
        Defaults.load(tmp_path)


@pytest.mark.parametrize(
    "arguments", ['{"city": "Ro', "[" * 100_000, '{"a": "\\ud83d"}'], ids=["cut off", "deep", "half a pair"]
)
def test_arguments_that_are_no_json_are_shown_as_text(arguments: str) -> None:
    """An agent sends a call that was cut off back with a result that says so."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = plain_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    assert json.loads(template.render([message])) == arguments


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", '{"city": "Rome"}'])
def test_arguments_that_a_template_takes_apart(arguments: str) -> None:
    """Qwen3-Coder's writes a tag for each, so those that are no object need a name."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = plain_messages([{"role": "assistant", "tool_calls": [call, call]}])
    each = "{% for name, value in call.function.arguments | items %}<{{ name }}={{ value }}>{% endfor %}"
    template = ChatTemplate("{% for call in messages[0].tool_calls %}" + each + "{% endfor %}", {})
    shown = "<city=Rome>" if "}" in arguments else f"<arguments={arguments}>"
    assert template.render(messages) == 2 * shown
    refusing = ChatTemplate("{{ raise_exception('not so') }}", {})
    with pytest.raises(ApiError, match="refuses the messages: not so"):
        refusing.render(messages)


def test_tools_that_are_nested_too_deeply_for_a_template() -> None:
    nested: dict[str, Any] = {}
    for _ in range(900):
        nested = {"a": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    with pytest.raises(ApiError, match="messages, tools or chat_template_kwargs are nested too deeply"):
        ChatTemplate("{{ tools | tojson }}", {}).render(ASK, tools=[tool])


def test_a_templates_own_fields_reach_it() -> None:
    """Those that its text names. Others are refused, also where prose, a comment or a variable has it."""
    source = (
        "{% for m in messages %}{% generation %}{{ m.thinking }}{{ m ['recipient'] }}{{ m.get(\"channel\") }}"
        "{% for c in m.tool_calls %}{{ c.note }}{{ c.function.why }}{% endfor %}{% endgeneration %}"
        "{% endfor %}"
        "{% for t in tools %}{{ t.function.gives }}{% endfor %}prose{# m.comment #}{% set variable = 1 %}"
    )
    template = ChatTemplate(source, {})
    function = {"name": "f", "arguments": "{}", "why": "4"}
    call = {"id": "c", "function": function, "note": "3"}
    message = {"role": "assistant", "thinking": "0", "recipient": "1", "channel": "2", "tool_calls": [call]}
    returns = {"type": "function", "function": {"name": "f", "gives": "5", "strict": False}}
    tools = read_tools([returns], None, None, read=template.keys).shown
    messages = plain_messages([message], read=template.keys)
    assert template.render(messages, tools=tools) == "012345prose"
    for name in ("prose", "comment", "variable", "generation", "messages"):
        assert plain_messages([message | {name: empty} for empty in (None, [], {})], read=template.keys)
        with pytest.raises(ApiError, match=rf"^messages\[0\]\.{name} is not a field of a message, which has"):
            plain_messages([message | {name: "x"}], read=template.keys)
    with pytest.raises(ApiError, match="thinking is not a field of a message"):
        plain_messages([message])


def test_what_libraries_note_on_functions_is_not_shown() -> None:
    """agno's on who runs them. What transformers writes of their results is shown."""
    shown = {"name": "f", "return": {"type": "string"}}
    noted = {**shown, "requires_confirmation": True, "external_execution": False, "cache_control": {"a": 1}}
    tools = read_tools([{"type": "function", "function": noted}], None, None)
    assert tools.shown == [{"type": "function", "function": shown}]


def test_allowed_tools_are_all_that_there_are() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    allowed = AllowedChoice(AllowedFunctions("auto", [FunctionChoice.of("b")]))
    taken = read_tools(tools, allowed, None)
    assert (taken.choice, list(taken.schemas)) == (AUTO, ["b"])


def test_parameters_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"type": "object", "additionalProperties": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(ApiError, match="nested too deeply"):
        _ = read_tools([tool], "required", None).guide


TOKENIZER = TextTokenizer(resolve_model_dir("bundled"))
DECODER = DeltaDecoder(TOKENIZER.backend, False)
SCHEMAS: Any = {"weather": {"properties": {"city": {"type": "string"}}}}
HERMES = '<tool_call>{"name": "weather", "arguments": {"city": "Köln 🌧"}}</tool_call>'
XML = "<tool_call><function=weather><parameter=city>\nKöln 🌧\n</parameter></function></tool_call>"
TEXTS = {
    "hermes": f"<think>Ich überlege … 🤔</think>\n\nMoment.\n{HERMES}\n{HERMES}",
    "qwen3_coder": f"<think>Hm</think>{XML}\n{XML} und",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln 🌧"}}',
    "mistral": 'Ja. [TOOL_CALLS]weather[ARGS]{"city": "Köln 🌧"}[TOOL_CALLS]weather{}',
    "none": "Schöne Grüße 🌍 <tool_call>",
    "harmony": "<|channel|>analysis<|message|>Hm 🤔<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.weather<|message|>{"city": "Köln"}<|call|>',
}


IN_CALLS = ("🌧", '"city"', "city>\n")  # of TEXTS


def answered(
    text: str,
    tools: str,
    cuts: set[int],
    streaming: bool,
    stop: list[str],
    one_call: bool = False,
    code: int = protocol.FINISHED_END_ID,
    log_probs: bool = False,
) -> Any:
    """Events, finish reason and number of tokens of an answer whose tokens arrive one by one, and are taken
    after those that `cuts` names. one_call: it ends with its first call. code: why the text ends. log_probs:
    the events have them."""
    cancelled: list[int] = []
    link: Any = SimpleNamespace(
        engines=SimpleNamespace(cancel=cancelled.append), schedule=lambda stream: None
    )
    params = SamplingParams(max_tokens=999, log_probs=log_probs)
    row = GenerationRequest(np.array([5], "<i4"), params, streaming, True, stop, bool(stop))
    streams = Streams(link)
    stream = Stream(row, link, streams)
    stream.handle = protocol.make_handle(1, 2)
    if stream.follows_text:
        stream.match_stop_words(DECODER)
    turn: Any = SimpleNamespace(
        reader=lambda: choice.make_reader(
            tools, "harmony" if tools == "harmony" else "think", SCHEMAS, False
        ),
        served=SimpleNamespace(
            name="m",
            decoder=lambda skip: DECODER,
            chat_tokens=TokenTexts(chat_token, DECODER),
            metrics=SimpleNamespace(ended=lambda model, stream, chunk: None),
        ),
        skip_special_tokens=False,
        tools=Tools(AUTO, [], SCHEMAS),
        one_call=one_call,
        streams=streams,
    )
    answer, events = Answer(turn, stream, 0 if log_probs else None), list[Event]()

    def take(chunk: Chunk) -> None:
        probs = chat_log_probs(chunk, turn.served.chat_tokens, 0) if log_probs else []
        events.extend(answer.take(chunk, probs))

    (ids,) = TOKENIZER.encode_batch([text], False)
    for n, token in enumerate(ids):
        report = protocol.RowReport(2, log_prob=-n / 8) if log_probs else None
        stream.on_token(token, protocol.RUNNING, report)
        if n in cuts and (chunk := stream.take()) is not None:
            take(chunk)
    if not stream.ended:
        stream.on_token(protocol.NO_TOKEN, code, None)
        chunk = stream.take()
        assert chunk is not None and chunk.last
        take(chunk)
    assert bool(cancelled) <= bool(stop or one_call)
    found = [Event(e.kind, e.text, log_probs=e.log_probs) for e in merged(events)]
    return found, answer.finish, stream.timing.sent


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(TEXTS)),
    st.sets(st.integers(0, 90)),
    st.sampled_from([[], ["Moment"], ["🌧"], ['"city"', "city>\n"], ["</tool_call>\n", "never"]]),
)
def test_a_stream_cut_at_any_token_says_the_same(tools: str, cuts: set[int], stop: list[str]) -> None:
    whole = answered(TEXTS[tools], tools, set(), False, stop)
    assert whole[0] and not any(word in event.text for word in stop for event in whole[0])
    assert answered(TEXTS[tools], tools, cuts, True, stop) == whole
    assert answered(TEXTS[tools], tools, set(range(999)), True, stop) == whole
    events, finish, _ = whole
    calls = [n for n, event in enumerate(events) if event.kind == CALL]
    latest = events[calls[-1] + 1 :] if calls else []
    arguments = "".join(event.text for event in latest if event.kind == ARGUMENTS)
    if calls and any(word in TEXTS[tools] and word in IN_CALLS for word in stop):
        assert finish == "stop" and not is_json(arguments)
    elif calls:
        assert finish == "tool_calls" and is_json(arguments)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.sampled_from(sorted(TEXTS)), st.sets(st.integers(0, 90)), st.sampled_from([[], ["Moment"], ["🌧"]]))
def test_content_has_the_log_probs_of_its_own_tokens(tools: str, cuts: set[int], stop: list[str]) -> None:
    """Also where its text was held back; tokens of marks, reasoning and calls have none."""
    plain = answered(TEXTS[tools], tools, cuts, True, stop)
    events, *rest = answered(TEXTS[tools], tools, cuts, True, stop, log_probs=True)
    assert [[Event(each.kind, each.text) for each in events], *rest] == [*plain]
    values = [-1.0]
    for each in events:
        tokens = [json.loads(bytes(raw)) for raw in each.log_probs]
        values += [-token["logprob"] for token in tokens]
        text = bytes(byte for token in tokens for byte in token["bytes"]).decode()
        assert text.strip() == each.text.strip() if each.kind == CONTENT else not tokens
    assert values == sorted(values)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(TEXTS)),
    st.sets(st.integers(0, 90)),
    st.sampled_from([[], ["Moment"], ["🌧"], ["}</tool_call>"]]),
)
def test_an_answer_with_one_call_ends_at_the_same_token(tools: str, cuts: set[int], stop: list[str]) -> None:
    whole = answered(TEXTS[tools], tools, set(), True, stop, one_call=True)
    assert answered(TEXTS[tools], tools, cuts, True, stop, one_call=True) == whole
    assert answered(TEXTS[tools], tools, set(range(999)), True, stop, one_call=True) == whole
    (events, finish, sent), free = whole, answered(TEXTS[tools], tools, set(), True, stop)
    calls = [n for n, event in enumerate(events) if event.kind == CALL]
    assert len(calls) == min(1, sum(event.kind == CALL for event in free[0]))
    assert events == free[0][: len(events)] and (finish, sent <= free[2]) == (free[1], True)
    if calls and not stop:
        assert calls[0] == len(events) - 2 and json.loads(events[-1].text)["city"].startswith("Köln")
        assert sent < free[2] or tools == "llama3_json", "and before what closes it"


def test_json_of_a_response_format_is_all_content_in_harmony() -> None:
    served: Any = SimpleNamespace(tool_format="harmony", reasoning_format="harmony")
    tools = Tools(AUTO, [], SCHEMAS)
    turn = Turn(served, Conversation([], tools, ("json_schema", "{}"), guide_is_for_content=True), False)
    text = '{"how": "<|start|>assistant to=functions.weather<|message|>{}"}'
    reader = turn.reader()
    assert [*reader.feed(text), *reader.finish()] == [Event(CONTENT, text)]


@pytest.mark.parametrize("one_call", [False, True])
def test_a_call_that_the_limit_of_tokens_cut_is_not_said_to_be_whole(one_call: bool) -> None:
    """Between two parameters: what is there is JSON, with those that were written."""
    text = XML.removesuffix("</function></tool_call>")
    for code, reason in ((protocol.FINISHED_LENGTH, "length"), (protocol.FINISHED_END_ID, "tool_calls")):
        events, finish, _ = answered(text, "qwen3_coder", set(), True, [], one_call, code)
        assert [event.kind for event in events] == [CALL, ARGUMENTS] and finish == reason


def test_log_probabilities_of_many_tokens_go_out_with_one_piece_of_text() -> None:
    """As of line breaks that were held back. Put in front of each other they would take minutes here."""
    probs = [(Raw(b"%d" % n), Raw(b"x")) if n % 2 else (Raw(b"%d" % n),) for n in range(200_000)]
    answer: Any = SimpleNamespace(_top=0, _unsaid=[(7, (Raw(b"of a mark"),)), *((1, each) for each in probs)])
    (told,) = Answer._told(answer, [Event(CONTENT, "\n" * len(probs))])
    assert list(told.log_probs) == [each for own in probs for each in own] and not answer._unsaid


def test_tokens_that_a_request_has_made_itself_are_not_cached_ones() -> None:
    """Its second sequence finds what the first has made of their prompt, and may end before it. Drafts of
    all its sequences count."""
    link: Any = SimpleNamespace(engines=SimpleNamespace(cancel=None), schedule=None)
    streams = Streams(link)
    row = GenerationRequest(np.arange(40, dtype="<i4"), SamplingParams(max_tokens=9))
    first, second = (Stream(row, link, streams) for _ in range(2))
    usage = Usage(streams)
    for stream, found in ((second, 32), (first, 16), (first, 16)):
        perf = protocol.Perf(1, 2, 3, 4, 5, 6, 7, cached_tokens=found)
        usage.note(stream, Chunk([5], reports=[protocol.RowReport(1, perf=perf)]))
    details = usage.body()
    assert (details["prompt_tokens"], details["prompt_tokens_details"]) == (40, {"cached_tokens": 16})
    assert "completion_tokens_details" not in details
    for stream, drafted, right in ((first, 2, 1), (second, 5, 0), (first, 9, 4)):  # each says: so far
        perf = protocol.Perf(1, 2, 3, 4, 5, 6, 7, 16, drafted, right)
        usage.note(stream, Chunk([5], reports=[protocol.RowReport(1, perf=perf)]))
    told = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 10}
    assert usage.body()["completion_tokens_details"] == told


def test_reasoning_may_come_first() -> None:
    """Also without text."""
    items = [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": "Yes."}]
    messages, places = messages_of(ResponsesRequest(input=items))
    assert messages == [{"role": "assistant", "content": "Yes."}]
    assert [place.content for place in places] == ["input[1].content"]
    with pytest.raises(ApiError, match="input holds only reasoning without text"):
        messages_of(ResponsesRequest(input=items[:1]))


def test_a_summary_is_the_reasoning_where_there_is_nothing_else() -> None:
    """As in conversations that another server began."""
    summary = [{"type": "summary_text", "text": text} for text in ("First.", "Then.")]
    item: dict[str, Any] = {"type": "reasoning", "summary": summary}
    said = {"role": "assistant", "content": "Yes."}
    (message,), _ = messages_of(ResponsesRequest(input=[item, said]))
    assert (message["reasoning_content"], message["content"]) == ("First.\n\nThen.", "Yes.")
    whole = {"content": [{"type": "reasoning_text", "text": "Hm"}]}
    (message,), _ = messages_of(ResponsesRequest(input=[item | whole, said]))
    assert message["reasoning_content"] == "Hm"
    for field, place in (("summary", r"input\[0\]\.summary"), ("content", r"input\[0\]\.content")):
        odd = {"type": "reasoning", field: [{"type": "text", "text": "a", "weight": 2}]}
        with pytest.raises(ApiError, match=rf"^{place}\[0\]\.weight is not a field of a part of type"):
            messages_of(ResponsesRequest(input=[odd, said]))
        with pytest.raises(ApiError, match=rf"^{place}\[0\] is of type null"):
            messages_of(ResponsesRequest(input=[{"type": "reasoning", field: [{"text": "a"}]}, said]))
        (message,), _ = messages_of(ResponsesRequest(input=[{"type": "reasoning", field: "Hm"}, said]))
        assert message["reasoning_content"] == "Hm"


def test_an_answer_has_all_of_its_calls_and_reasoning() -> None:
    calls = [
        {"type": "function_call", "name": name, "arguments": "{}", "call_id": name}
        for name in ("f", "g", "h")
    ]
    items = [*calls[:2], {"role": "assistant", "content": "Wait."}, calls[2]]
    (message,), (place,) = messages_of(ResponsesRequest(input=items))
    assert message["content"] == "Wait." and place.message == "input[3]"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g", "h"]
    thoughts = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in "ab"]
    (message,), _ = messages_of(ResponsesRequest(input=[*thoughts, items[2]]))
    assert (message["reasoning_content"], message["content"]) == ("a\nb", "Wait.")


def test_what_libraries_add_to_earlier_answers_is_taken() -> None:
    """OpenAI's for Node sends back what it has read into objects, as do older ones for Anthropic; LangChain
    gives one provider's reasoning to the other; LiteLLM says it twice."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}, "provider_specific_fields": {"a": 1}}
    calls = [{"id": "c", "type": "function", "index": 0, "function": function}]
    said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls, "parsed": {"a": 1}}
    twice = {
        "reasoning_content": "Hm",
        "provider_specific_fields": {"reasoning": "Hm"},
        "function_call": None,
    }
    blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": "Hm"}]
    other = {"reasoning_details": [{"text": "Why?"}], "reasoning_opaque": "x", "is_error": False, "note": ""}
    (message,) = plain_messages(
        [said | twice | other | {"thinking_blocks": blocks, "images": [], "audio": None}]
    )
    assert message["reasoning_content"] == "Hm" and len(message["tool_calls"]) == 1
    text = {"type": "output_text", "text": "{}", "annotations": [], "logprobs": [], "parsed": {"city": "Ulm"}}
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "a"}], "signature": "YQ=="},
        {"type": "message", "role": "assistant", "status": "completed", "phase": None, "content": [text]},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c", "parsed_arguments": {}},
    ]
    messages, _ = messages_of(ResponsesRequest(input=items))
    (message,) = plain_messages(messages)
    assert (message["reasoning_content"], message["content"]) == ("a", "{}")
    blocks = [{"type": "text", "text": "Yes.", "citations": None, "parsed_output": {"a": 1}}]
    asked = MessagesRequest(max_tokens=1, messages=[{"role": "assistant", "content": blocks}])
    (message,), _ = anthropic.messages_of(asked)
    assert plain_messages([message])[0]["content"] == "Yes."


def kept_of(store: ResponseStore, *names: str) -> list[bool]:
    found = []
    for name in names:
        try:
            found.append(json.loads(store.response(name))["id"] == name)
        except ApiError as error:
            assert error.status == 404
            found.append(False)
    return found


def put(store: ResponseStore, name: str, size: int = 0) -> None:
    store.put(name, json.dumps([{"text": "x" * size}]).encode(), {"id": name})


def test_bytes_and_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(400)
    put(store, "a", 150)
    put(store, "b", 150)
    assert kept_of(store, "b", "a") == [True, True]
    put(store, "c", 150)  # b has not been used for the longest time
    assert kept_of(store, "a", "b", "c") == [True, False, True]
    put(store, "large", 400)
    assert kept_of(store, "a", "large", "c") == [True, False, True]
    assert json.loads(store.items("a", "p")) == [{"text": "x" * 150}]
    store.delete("a")
    put(store, "d", 150)
    put(store, "e", 20)
    assert kept_of(store, "a", "c", "d", "e") == [False, True, True, True]
    monkeypatch.setattr(response_store, "MOST_STORED", 3)
    put(store, "f")
    assert kept_of(store, "c", "d", "e", "f") == [False, True, True, True]


@pytest.mark.parametrize("deleted", [False, True])
def test_a_response_that_streams_can_be_deleted_and_not_be_read(deleted: bool) -> None:
    """One that was deleted while it streamed is not stored when it ends."""
    store = ResponseStore(10_000)

    async def no_tokens(text: str) -> int:
        return 0

    link: Any = SimpleNamespace(
        engines=SimpleNamespace(cancel=None), schedule=lambda stream: streams.arrived(stream)
    )
    streams = Streams(link)
    row = GenerationRequest(np.array([5], "<i4"), SamplingParams(max_tokens=9), True)
    stream = Stream(row, link, streams)
    served = SimpleNamespace(
        name="m",
        store=store,
        decoder=lambda skip: DECODER,
        count=no_tokens,
        metrics=SimpleNamespace(ended=lambda model, stream, chunk: None),
    )
    turn: Any = SimpleNamespace(
        reader=lambda: choice.make_reader("none", "think", {}, False),
        served=served,
        skip_special_tokens=False,
        tools=Tools(AUTO, [], {}),
        one_call=False,
        streams=streams,
    )

    async def told() -> dict[str, Any]:
        reply = _Reply(turn, ResponsesRequest(input="Hi"), (b"[]", b"[]"))
        stream.on_token(TOKENIZER.encode_batch(["Yes"], False)[0][0], protocol.RUNNING, None)
        events = reply.events()
        begun = json.loads((await anext(events)).partition(b"data: ")[2])["response"]
        assert begun["store"] and begun["id"] == reply.id
        for asked in (store.response, store.input):
            with pytest.raises(ApiError, match="has not ended") as refused:
                asked(reply.id)
            assert refused.value.status == 404
        if deleted:
            store.delete(reply.id)
            with pytest.raises(ApiError, match="not found"):
                store.delete(reply.id)
        stream.on_token(protocol.NO_TOKEN, protocol.FINISHED_END_ID, None)
        *_, last = [event async for event in events]
        return json.loads(last.partition(b"data: ")[2])["response"]

    response = asyncio.run(told())
    assert response["status"] == "completed" and response["store"] is not deleted
    assert kept_of(store, response["id"]) == [not deleted]


def test_a_response_that_failed_is_not_found() -> None:
    store, response = ResponseStore(1000), type("Unfinished", (), {"store": None})()
    store.begin("a", response)
    with pytest.raises(ApiError, match="has not ended"):
        store.response("a")
    del response
    with pytest.raises(ApiError, match="not found"):
        store.response("a")


def test_references_to_items_of_kept_responses() -> None:
    store = ResponseStore(1000)
    served: Any = SimpleNamespace(store=store)
    message, call = {"id": "msg_1", "type": "message"}, {"id": "fc_1", "type": "function_call"}
    store.put("a", b"[]", {"id": "a", "output": [message, call]})
    user = {"role": "user", "content": "Hi"}

    def referring(*ids: object) -> list[dict[str, Any]]:
        return without_references(served, [user, *({"type": "item_reference", "id": each} for each in ids)])

    assert referring() == [user]
    assert referring("fc_1", "msg_1") == [user, call, message]
    assert without_references(served, [{"id": "fc_1"}, {"id": "msg_1", "type": None}]) == [call, message]
    for ids, told in (
        (("msg_1", "fc_1", "msg_1"), "input[3] refers to the same item as input[1]"),
        (("msg_1", "msg_2"), 'input[2] refers to "msg_2", which is not kept'),
        ((None,), "input[1].id is null; it should be a text"),
    ):
        with pytest.raises(ApiError) as refused:
            referring(*ids)
        assert refused.value.message.startswith(told)
    store.delete("a")
    with pytest.raises(ApiError, match="is not kept"):
        referring("msg_1")
    served.store = None
    with pytest.raises(ApiError, match=r"^input\[1\] needs kept responses: .*--store-mib"):
        referring("msg_1")


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_of_items_with_the_same_id_come_to_an_end(order: Any) -> None:
    """As where a client sends an item of an earlier response once more. Each has an id of its own there."""
    store, given = ResponseStore(10_000), [*("ab"), None, *("ab"), 5, ["a"]]
    items = [{"role": "user", "content": str(n), "id": each} for n, each in enumerate(given)]
    store.put("resp_x", encode(items), {"output": []})
    found: list[dict[str, Any]] = []
    more = True
    while more:
        after = found[-1]["id"] if found else None
        page = input_page(store, "resp_x", ItemsQuery(limit=2, order=order, after=after))
        found, more = found + page["data"], page["has_more"]
        assert len(found) <= len(items)
    if order == "desc":
        found.reverse()
    assert [item["content"][0]["text"] for item in found] == [str(n) for n in range(len(items))]
    assert [item["id"] for item in found][:2] == ["a", "b"] and len({item["id"] for item in found}) == 7


def test_a_requests_sequences_go_with_it_without_a_search_for_circles() -> None:
    link: Any = SimpleNamespace(engines=SimpleNamespace(cancel=None), schedule=None)
    row = GenerationRequest(np.arange(4, dtype="<i4"), SamplingParams(max_tokens=9))
    streams = Streams(link)
    stream = Stream(row, link, streams)
    own, one = weakref.ref(streams), weakref.ref(stream)
    gc.disable()
    try:
        assert stream.streams is streams
        del streams
        assert own() is None and stream.streams is None
        del stream
        assert one() is None
    finally:
        gc.enable()


def test_a_request_whose_client_has_left_goes_without_a_search_for_circles() -> None:
    """With its answer: that has its fields, megabytes of them, and the store says that it has not ended."""
    link: Any = SimpleNamespace(engines=SimpleNamespace(cancel=None), schedule=None)
    streams = Streams(link)
    Stream(GenerationRequest(np.arange(4, dtype="<i4"), SamplingParams(max_tokens=9)), link, streams)
    own = weakref.ref(streams)

    async def answer(streams: Streams) -> None:
        try:
            async for _ in streams:
                pass
        except ClientLeft:
            return
        raise AssertionError("the streams did not end with the client")

    gc.disable()
    try:
        streams.leave()
        asyncio.run(answer(streams))
        del streams
        assert own() is None
    finally:
        gc.enable()


def test_the_input_of_a_cut_custom_tool_call_is_what_was_written_of_it() -> None:
    text = 'SELECT "a\\n", "\N{GRINNING FACE}";\n'
    for arguments in (json.dumps({"input": text}), json.dumps({"input": text}, ensure_ascii=False)):
        found = [_input_of(arguments[:end]) for end in range(len('{"input": "'), len(arguments) + 1)]
        assert found[0] == "" and found[-1] == text
        assert all(text.startswith(one) for one in found), found
        assert [len(one) for one in found] == sorted(len(one) for one in found)
    for other in ('{"inp', '{"text": "a', "", "[1"):
        assert _input_of(other) == other


@pytest.mark.parametrize(
    "text", ['{"x": "\\ud800"}', '{"a\\ud834": 1e999}', '{"n": ' + "9" * 5001 + "}", ' {"a": [1]}']
)
def test_input_of_a_call_is_what_the_model_wrote(text: str) -> None:
    """As a stream has it: half of a surrogate pair stays an escape."""
    assert encode({"input": anthropic._input(text)}) == f'{{"input":{text}}}'.encode()


@pytest.mark.parametrize(
    "text", ['{"x": "y', "[1]", "", '{"a": NaN}', '{"a": 1} b', '{"a":' * 9000 + "1" + "}" * 9000]
)
def test_input_of_a_call_that_is_no_object_is_empty(text: str) -> None:
    assert anthropic._input(text) == {}


def test_of_a_prompt_whose_first_sequence_is_refused_no_others_are_tried() -> None:
    submitted, cancelled = [], []

    def submit(sink: Any, *rest: Any) -> int:
        submitted.append(sink)
        sink.on_failure(protocol.QUEUE_FULL, True)
        return 0

    engines: Any = SimpleNamespace(submit=submit, cancel=cancelled.append, refusal=lambda count: None)

    async def run() -> None:
        link = EngineLink(engines, asyncio.get_running_loop())
        plain = GenerationRequest(np.arange(1, dtype="<i4"), SamplingParams(max_tokens=1))
        streams = link.generate([(plain, 100), (plain, 1)], DECODER)
        with pytest.raises(ApiError, match=protocol.QUEUE_FULL) as error:
            async for _ in streams:
                pass
        assert error.value.status == 429 and len(submitted) == 1 and not cancelled

    asyncio.run(asyncio.wait_for(run(), 30))
