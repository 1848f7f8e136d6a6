# SPDX-License-Identifier: Apache-2.0
"""Which formats a checkpoint writes, told from its chat template."""

from collections.abc import Mapping
from typing import Any

from flashinfer_backend.openai.formats.calls import (
    CallsOrContentReader,
    HermesReader,
    Llama3Reader,
    MarkedReader,
    MistralReader,
)
from flashinfer_backend.openai.formats.events import BlanksTogether, PlainReader, Reader
from flashinfer_backend.openai.formats.harmony import HarmonyReader
from flashinfer_backend.openai.formats.qwen_xml import QwenXmlReader
from flashinfer_backend.openai.formats.reasoning import ThinkReader

TOOL_FORMATS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "harmony", "none")
REASONING_FORMATS = ("think", "harmony", "none")
# Their marks are special tokens, which must be in the text.
WITH_SPECIAL_TOKENS = ("llama3_json", "mistral", "harmony")

Schemas = Mapping[str, Mapping[str, Any]]


def detect_tools(template: str) -> str:
    """The format of tool calls that a template's text shows, "none" for none."""
    if "<|channel|>" in template:
        return "harmony"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("ipython" in template and "parameters" in template):
        return "llama3_json"
    return "none"


def detect_reasoning(template: str) -> str:
    """The format of reasoning that a template's text shows, "none" for none."""
    if "<|channel|>" in template:
        return "harmony"
    return "think" if "</think>" in template else "none"


def make_reader(
    tools: str,
    reasoning: str,
    schemas: Schemas,
    inside: bool,
    bound: Mapping[str, Mapping[str, Any] | None] | None = None,
    or_content: bool = False,
) -> Reader:
    """tools: the format of calls, "none" if calls are impossible. schemas: of the functions' parameters.
    inside: the prompt opens the reasoning. bound: the functions of the answer's guide (openai/strict.py), if
    it has one: all calls are of these, with whole arguments that match the schemas given here. or_content:
    the guide admits an answer of calls only or of content only."""
    if "harmony" in (tools, reasoning):
        return BlanksTogether(HarmonyReader(calls=tools == "harmony", whole_arguments=bool(bound)))
    reader: Reader
    if tools == "hermes":
        reader = HermesReader()
    elif tools == "qwen3_coder":
        guided = [name for name, schema in (bound or {}).items() if schema is not None]
        reader = QwenXmlReader(schemas, guided)
    elif tools == "llama3_json":
        reader = Llama3Reader(schemas)
    elif tools == "mistral":
        reader = MistralReader()
    else:
        reader = PlainReader()
    marks: tuple[str, ...] = ()
    if not bound and isinstance(reader, MarkedReader | Llama3Reader):  # a guide leaves reasoning free
        marks = tuple(filter(None, (reader.mark, getattr(reader, "slip", ""))))
    if or_content and isinstance(reader, MarkedReader | Llama3Reader):
        reader = CallsOrContentReader(reader)
    if reasoning == "think":
        reader = ThinkReader(reader, inside, marks)
    return reader if isinstance(reader, PlainReader) else BlanksTogether(reader)
