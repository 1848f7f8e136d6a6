# SPDX-License-Identifier: Apache-2.0
"""Structured outputs and tool calls of the OpenAI API."""

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai_server import CALL_TOKEN, OpenAiServer, events, said
from running import wait_for

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CITIES = ["Paris", "Ulm", "Rome"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "enum": [1, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"City": {"type": "string", "enum": CITIES}},
        },
    },
}
PLACE = {"parameters": WEATHER["function"]["parameters"]}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
CANCELLED = 'sequences_finished_total{finish_reason="cancelled"}'


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


def openai_format(kind: type[pydantic.BaseModel]) -> dict[str, Any]:
    """A response_format for JSON of this kind."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": kind.model_json_schema()}}


def ask(client: openai.OpenAI, **more: Any) -> Any:
    body = {"model": "tiny-chat", "messages": ASK, "max_tokens": 200, "temperature": 0.0, **more}
    return client.chat.completions.create(**body)


def told(client: openai.OpenAI, stream: bool = False, **more: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish reason."""
    answer = ask(client, stream=stream, **more)
    return said(part.to_dict() for part in (answer if stream else [answer]))[1:]


def both(client: openai.OpenAI, **more: Any) -> tuple[str, list[tuple[str, str]], str]:
    """The same, of a whole answer and of a stream, which agree."""
    whole = told(client, **more)
    assert told(client, stream=True, **more) == whole
    return whole


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert found["city"] in CITIES and found["days"] in (1, 3) and len(found) == 2


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    content, ((name, arguments),), finish = both(client, tools=[NOW, WEATHER], tool_choice=NAMED)
    assert (content, name, finish) == ("", "weather", "stop")
    check_weather(arguments)
    assert ask(client, tools=[NOW, WEATHER], tool_choice=NAMED).choices[0].message.content is None


@pytest.mark.parametrize(("temperature", "seed", "called"), [(2.0, 3, "now"), (1.0, 0, "weather")])
def test_some_function_has_to_be_called(
    client: openai.OpenAI, temperature: float, seed: int, called: str
) -> None:
    more = {"tools": [WEATHER, NOW], "tool_choice": "required", "temperature": temperature, "seed": seed}
    content, ((name, arguments),), finish = both(client, **more, parallel_tool_calls=False)
    assert (content, name, finish) == ("", called, "tool_calls")
    if name == "weather":
        check_weather(arguments)
    else:
        assert json.loads(arguments) == {}


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


def saying(text: str) -> dict[str, Any]:
    """Has the model say this."""
    return {"structured_outputs": {"grammar": f"root ::= {json.dumps(text)}"}}


def test_calls_that_the_model_chose(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"tools": [WEATHER, NOW], "extra_body": saying(f"Let me see.\n{CALL}\n{CALL}")}
    weather = ("weather", '{"city": "Ulm"}')
    assert both(client, **more) == ("Let me see.", [weather] * 2, "tool_calls")
    assert both(client, **more, parallel_tool_calls=False) == ("Let me see.", [weather], "tool_calls")


@pytest.mark.parametrize("behind", ["", CALL[:-20], CALL, " Done."])
def test_an_answer_with_one_call_ends_with_it(api: OpenAiServer, behind: str) -> None:
    """Whatever the model would say behind it, which would take its 900 tokens. What is told of tokens is the
    same both ways."""
    grammar = f"root ::= {json.dumps(f'Hm.{CALL}{behind}')} [a-z]{{2000}}"
    body = {
        **{"messages": ASK, "tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 900},
        **{"structured_outputs": {"grammar": grammar}, "temperature": 0.0},
        **{"return_token_ids": True, "logprobs": True},
    }
    ended = api.metric(CANCELLED)
    (choice,), usage = (answer := api.call("/v1/chat/completions", body)[2])["choices"], answer["usage"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Hm."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Ulm"}'
    ids, probs = choice["token_ids"], choice["logprobs"]["content"]
    said = api.call("/detokenize", {"tokens": ids})[2]["prompt"]
    assert f"Hm.{CALL}".startswith(said) and said.rstrip("}").endswith('"Ulm"')
    assert usage["completion_tokens"] == len(ids) == len(probs)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *parts, last = events(api.call("/v1/chat/completions", streamed)[2])
    assert last["usage"]["completion_tokens"] == usage["completion_tokens"]
    found = [part["choices"][0] for part in parts]
    assert [i for part in found for i in part["token_ids"]] == ids
    told = [part["logprobs"]["content"] for part in found if part["logprobs"]]
    assert [one["token"] for some in told for one in some] == [one["token"] for one in probs]
    wanted = {key: body[key] for key in ("structured_outputs", "parallel_tool_calls", "temperature")}
    wanted |= {"input": "Paris?", "tools": [{"type": "function", "name": "weather", **PLACE}]}
    response = api.call("/v1/responses", {**wanted, "max_output_tokens": 900})[2]
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    streamed = {**wanted, "max_output_tokens": 900, "stream": True}
    final = api.call("/v1/responses", streamed)[2].strip().rpartition("\ndata: ")[2]
    assert json.loads(final)["response"]["usage"]["output_tokens"] == response["usage"]["output_tokens"]
    wait_for(lambda: api.metric(CANCELLED) == ended + 4, "the four to be counted")


@pytest.mark.parametrize("word", ['"Ulm"', "</tool_call>"])
def test_a_stop_word_in_a_call(client: openai.OpenAI, word: str) -> None:
    """Where the arguments are whole already, it ends a call; else it leaves one that is none to be run."""
    more: dict[str, Any] = {"tools": [WEATHER], "stop": [word], "extra_body": saying(CALL)}
    expected = ('{"city": ', "stop") if word == '"Ulm"' else ('{"city": "Ulm"}', "tool_calls")
    assert both(client, **more) == ("", [("weather", expected[0])], expected[1])
    response = client.responses.create(
        model="tiny-chat",
        input="Paris?",
        tools=[{"type": "function", "name": "weather", "strict": False, **PLACE}],
        extra_body={"stop": [word], **saying(CALL)},
    )
    status = "completed" if expected[1] == "tool_calls" else "incomplete"
    assert [(item.type, item.status) for item in response.output] == [("function_call", status)]  # type: ignore[union-attr]


def test_a_call_that_the_model_does_not_end(client: openai.OpenAI, api: OpenAiServer) -> None:
    """No client may take it for a finished call and run the function."""
    said = saying(f"Let me see.\n{CALL[: CALL.index('Ulm') + 2]}")
    content, calls, finish = both(client, tools=[WEATHER], extra_body=said)
    assert (content, calls, finish) == ("Let me see.", [("weather", '{"city": "Ul')], "stop")
    function = {"type": "function", **WEATHER["function"]}
    answer = api.call("/v1/responses", {"input": "?", "tools": [function], **said})[2]
    call = answer["output"][-1]
    assert (call["arguments"], call["status"]) == ('{"city": "Ul', "incomplete")


@pytest.mark.parametrize("seed", range(2))
def test_strict_calls_that_the_model_chose(client: openai.OpenAI, seed: int) -> None:
    """The bias has the model, which writes anything else after it, open a call."""
    opening: dict[str, Any] = {"logit_bias": {str(CALL_TOKEN): 100}, "parallel_tool_calls": False}
    now = {"type": "function", "function": {"name": "now", "strict": True}}
    more: dict[str, Any] = {"tools": [now, WEATHER], "temperature": 1.0, "seed": seed, **opening}
    content, ((name, arguments),), finish = both(client, **more)
    assert (content, finish) == ("", "tool_calls")
    if name == "weather":
        check_weather(arguments)
    else:
        assert (name, json.loads(arguments)) == ("now", {})
    loose = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}
    free = ask(client, **{**more, "tools": [NOW, loose], "max_tokens": 12})
    assert not free.choices[0].message.tool_calls


def test_what_strict_functions_cannot_be_held_to_names_the_tools(api: OpenAiServer) -> None:
    function = {**WEATHER["function"], "parameters": {"type": "object", "properties": {"a": {"type": "foo"}}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{**WEATHER, "function": function}]}
    status, message, param, _ = api.error("/v1/chat/completions", body)
    assert (status, param) == (400, "tools") and message.startswith(
        "strict functions: the parameters of weather"
    )


def test_strict_functions_leave_text_as_it_is(client: openai.OpenAI, api: OpenAiServer) -> None:
    loose = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}
    free, strict = (ask(client, tools=[tool], max_tokens=16) for tool in (loose, WEATHER))
    assert strict.choices[0].message.content == free.choices[0].message.content
    tool = {"type": "function", "name": "weather", "strict": True, **PLACE}
    body = {
        "input": "Paris?",
        "tools": [tool],
        "logit_bias": {str(CALL_TOKEN): 100},
        "max_output_tokens": 400,
    }
    found = api.call("/v1/responses", {**body, "parallel_tool_calls": False})[2]["output"]
    assert [item["type"] for item in found] == ["function_call"]
    check_weather(found[0]["arguments"])


def test_tools_that_may_not_be_called(client: openai.OpenAI, api: OpenAiServer) -> None:
    """The model is not told of them, so the prompt is another one, and its text is content."""
    answer = ask(client, tools=[WEATHER], tool_choice="none", extra_body=saying(CALL))
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (CALL, None)
    shown = api.call("/tokenize", {"messages": ASK, "tools": [WEATHER]})[2]["count"]
    assert answer.usage.prompt_tokens < shown - 50


def test_the_clients_own_models_of_answers(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny-chat", messages=ASK, response_format=Animal, max_tokens=200, temperature=0.0
    )
    animal = parsed.choices[0].message.parsed
    assert animal is not None and animal.legs == 4
    tool = openai.pydantic_function_tool(Animal)
    called = client.chat.completions.parse(
        model="tiny-chat", messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Animal)
    with client.chat.completions.stream(
        model="tiny-chat", messages=ASK, response_format=Animal, max_tokens=200, temperature=0.0
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == animal


@pytest.mark.parametrize("stream", [False, True])
def test_guided_answers(client: openai.OpenAI, stream: bool) -> None:
    def text(**more: Any) -> str:
        return told(client, stream, **more)[0]

    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    listed = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema, "strict": True}}
    assert len(json.loads(text(response_format=listed))) == 2
    guides = {
        "json": (schema, lambda said: len(json.loads(said)) == 2),
        "regex": ("[ab]{3}-[0-9]", lambda said: re.fullmatch("[ab]{3}-[0-9]", said)),
        "choice": (['say "yes"', "né\n"], lambda said: said in ('say "yes"', "né\n")),
        "grammar": ('root ::= "up" | "down"', lambda said: said in ("up", "down")),
    }
    for kind, (guide, fits) in guides.items():
        assert fits(text(extra_body={"structured_outputs": {kind: guide}})), kind


@pytest.mark.parametrize("strict", [False, True])
def test_calls_that_the_model_chose_beside_a_response_format(
    client: openai.OpenAI, api: OpenAiServer, strict: bool
) -> None:
    """Agents with typed answers send both: the model calls functions until it writes the answer."""
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    more: dict[str, Any] = {"tools": [tool], "response_format": openai_format(Animal)}
    opening: dict[str, Any] = {"logit_bias": {str(CALL_TOKEN): 100}, "parallel_tool_calls": False}
    (brace,) = api.call("/tokenize", {"prompt": "{", "add_special_tokens": False})[2]["tokens"]
    answering = {"logit_bias": {str(brace): 100}}
    content, calls, finish = both(client, **more, **answering)
    assert Animal.model_validate_json(content).legs == 4 and (calls, finish) == ([], "stop")
    content, ((name, arguments),), finish = both(client, **more, **opening)
    assert (content, name) == ("", "weather") and arguments.startswith("{")
    if strict:  # else the bias goes on in the arguments' texts
        assert finish == "tool_calls"
        check_weather(arguments)
    form = {"format": {"type": "json_schema", "name": "a", "schema": Animal.model_json_schema()}}
    flat = {"type": "function", "name": "weather", "strict": strict, **PLACE}
    body = {"input": "Paris?", "tools": [flat], "text": form, "max_output_tokens": 400}
    for also, kind in ((answering, "message"), (opening, "function_call")):
        found = api.call("/v1/responses", {**body, **also})[2]["output"]
        assert [item["type"] for item in found] == [kind]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_beside_a_response_format(client: openai.OpenAI, choice: Any) -> None:
    """The format is of the content, and such an answer has none. Instructor sends both."""
    more = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    content, ((name, arguments),), _ = both(client, **more, response_format=openai_format(Animal))
    assert (content, name) == ("", "weather")
    check_weather(arguments)
