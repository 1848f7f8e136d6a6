# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API with an engine of its own, as `python -m flashinfer_backend.openai` starts it."""

import contextlib
import http.client
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from email.message import Message
from pathlib import Path
from typing import Any

import psutil
from running import TIMEOUT_S, Launched, fetch, while_ready

from engine.harness import shallow_model
from ports import free_ports

KEY = "sk-one"  # of the server with the scripted model
CALL_TOKEN = 2  # of model_with_template
# Shows tools, reasoning and a system prompt to the bundled model in its own form of questions and answers.
TEMPLATE = """\
{{ bos_token }}\
{% if tools %}Tools, as <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}
{% endif %}\
{% for message in messages %}\
{% if message.role == 'user' %}Question: {{ message.content }}
Answer:\
{% elif message.role == 'assistant' %} {{ message.content }}\
{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }})\
{% endfor %}{% if not loop.last or not continue_final %}{{ '\\n' }}{% endif %}\
{% elif message.role == 'tool' %}{{ message.content }}
{% else %}{{ message.content }}
{% endif %}\
{% endfor %}\
{% if add_generation_prompt and think_first %}<think>
{% else %}{# <think></think> #}{% endif %}"""


def model_with_template(folder: Path, model: Path | None = None) -> Path:
    """A copy of a model with the bundled one's tokenizer, of shallow_model without one, with TEMPLATE."""
    copy = folder / "tiny-chat"
    shutil.copytree(model or shallow_model(), copy)
    file = copy / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"], config["pad_token"]
    file.write_text(json.dumps(config))
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    # As in Qwen's and Hermes' vocabularies, a token opens a call: CALL_TOKEN.
    found = json.loads((copy / "tokenizer.json").read_text())
    added, vocab = found["added_tokens"][CALL_TOKEN], found["model"]["vocab"]
    vocab["<tool_call>"] = vocab.pop(added["content"])
    added |= {"content": "<tool_call>", "special": False}
    (copy / "tokenizer.json").write_text(json.dumps(found))
    return copy


class OpenAiServer(Launched):
    """`parent` is the process of flashinfer_backend.openai. Knobs may stand before other arguments."""

    def __init__(self, model: Path | str, folder: Path, *arguments: str, **environment: str) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        settings = ["device=cpu", "max_tokens_in_paged_kv_cache=32768", "max_num_seqs=64"]
        given = {argument.partition("=")[0] for argument in arguments}
        settings = [knob for knob in settings if knob.partition("=")[0] not in given]
        command = [sys.executable, "-m", "flashinfer_backend.openai", "--model", str(model)]
        command += ["--port", str(port), "--set", *settings, *arguments]
        super().__init__(command, folder / f"openai-{port}.log", **environment)
        self.parent = self.launcher

    def ready(self) -> bool:
        return "OpenAI API ready" in self.log

    def call(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Message, Any]:
        """Status, headers and JSON (or text) of an answer; a POST if there is a body."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        status, found, text = fetch(self.url + path, data, headers)
        with contextlib.suppress(ValueError):
            return status, found, json.loads(text)
        return status, found, text

    def error(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, str, str | None, Any]:
        """Status, message, param and code of an answer in OpenAI's form of errors."""
        status, _, answer = self.call(path, body, key)
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"], answer
        assert not re.search(r"\b(None|True|False|NoneType)\b", error["message"]), answer
        return status, error["message"], error["param"], error["code"]

    @contextlib.contextmanager
    def asked(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
        """A connection with a request sent; it is closed at the end, answered or not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body))
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def opened(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """A streamed answer, once it has begun."""
        with self.asked(path, body) as connection:
            yield connection.getresponse()

    def metric(self, name: str) -> float:
        """A gauge or counter of /metrics."""
        _, _, text = self.call("/metrics")
        lines = [line.rpartition(" ") for line in text.splitlines()]
        return sum(float(value) for key, _, value in lines if key == f"flashinfer_backend_openai_{name}")

    def workers(self) -> list[psutil.Process]:
        """The processes that answer requests."""
        found = []
        for process in self.parent.children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "flashinfer_backend.openai.worker" in process.cmdline():
                    found.append(process)
        return found

    def engine(self) -> psutil.Process:
        (record,) = self.runs.glob("flashinfer-backend-*/*-openai/engine.json")
        return psutil.Process(json.loads(record.read_text())["pid"])

    def close(self) -> None:
        """Kills what is left of it, which takes no time: how the API ends is asked by tests of its own."""
        children = self.parent.children() if self.parent.poll() is None else []
        for process in [self.parent, *children, *self.commands()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.parent.wait(TIMEOUT_S)
        shutil.rmtree(self.runs, ignore_errors=True)


def openai_running(
    model: Path | str, folder: Path, *arguments: str, **environment: str
) -> AbstractContextManager[OpenAiServer]:
    """A server that is ready."""
    return while_ready(OpenAiServer(model, folder, *arguments, **environment))


def said(parts: Iterable[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Reasoning, content, calls and why it ended, of a chat's answer. parts: its chunks, or the whole one."""
    reasoning, content, finish = "", "", ""
    calls: dict[int, list[str]] = {}  # id, name, arguments
    for choice in (choice for part in parts for choice in part["choices"]):
        message = choice.get("delta") or choice.get("message") or {}
        reasoning += message.get("reasoning_content") or ""
        content += message.get("content") or ""
        for place, call in enumerate(message.get("tool_calls") or []):
            function = call["function"]
            known = calls.setdefault(call.get("index", place), [call.get("id"), function.get("name"), ""])
            known[2] += function.get("arguments") or ""
        finish = choice["finish_reason"] or finish
    ids = [call_id for call_id, _, _ in calls.values()]
    assert all(ids) and len({*ids}) == len(ids), ids
    return reasoning, content, [(name, arguments) for _, name, arguments in calls.values()], finish


def events(text: str) -> list[Any]:
    """The events of a stream, without the [DONE] that ends it."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text[-500:]
    return [json.loads(line) for line in lines[:-1]]
