# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT-OSS checkpoint that has learnt answers to some chats by heart, in OpenAI's Harmony format."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F

from checkpoints import make_model
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.openai.template import ChatTemplate, plain_messages
from mxfp4_checkpoints import publish

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
# As GPT-OSS's own: the answer's header is left to the model, and a turn's reasoning is shown only with calls.
TEMPLATE = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}<|end|>\
{% if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}type {{ tool.function.name }} = ({{ tool.function.parameters | tojson }}) => any;
{% endfor %}<|end|>{% endif %}\
{% set last = namespace(name="") %}\
{% for message in messages %}\
{% if message.tool_calls %}\
{% if message.thinking %}\
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>\
{% endif %}\
{% set last.name = message.tool_calls[0].function.name %}\
<|start|>assistant<|channel|>commentary to=functions.{{ last.name }} <|constrain|>json<|message|>\
{{ message.tool_calls[0].function.arguments | tojson }}<|call|>\
{% elif message.role == "tool" %}\
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>\
{{ message.content }}<|end|>\
{% elif message.role == "assistant" %}\
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>\
{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
TEMPLATES = ChatTemplate(TEMPLATE, {})


def function(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    form = {"type": "object", "properties": properties, "required": list(properties)}
    described = {"name": name, "parameters": form | {"additionalProperties": False}}
    return {"type": "function", "function": described | ({"strict": True} if strict else {})}


WEATHER, NOW = function("weather", city={"type": "string"}), function("now")
RAIN: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain in Ulm?"}]
ARGUMENTS = '{"city": "Ulm"}'
CALLED = {"id": "one", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "tool_call_id": "one", "content": "rain"}


@dataclass(frozen=True)
class Chat:
    messages: list[dict[str, Any]]
    answer: str  # with Harmony's tokens
    effort: str | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def prompt(self) -> str:
        variables = {"reasoning_effort": self.effort} if self.effort else None
        return TEMPLATES.render(plain_messages(self.messages), list(self.tools), variables=variables)


SUM: list[dict[str, Any]] = [{"role": "user", "content": "What is two and two?"}]
THOUGHT = "I have to look."
CHATS = {
    "high": Chat(
        SUM,
        "<|channel|>analysis<|message|>The user wants a sum.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is four.<|return|>",
        "high",
    ),
    "low": Chat(SUM, "<|channel|>final<|message|>Four.<|return|>", "low"),
    "call": Chat(
        RAIN,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        tools=(WEATHER, NOW),
    ),
    "result": Chat(
        [*RAIN, {"role": "assistant", "reasoning_content": THOUGHT, "tool_calls": [CALLED]}, RESULT],
        "<|channel|>final<|message|>Yes, it rains.<|return|>",
        tools=(WEATHER, NOW),
    ),
    # With text for the user before a call whose recipient is in the role.
    "preamble": Chat(
        [{"role": "user", "content": "How late is it?"}],
        "<|channel|>commentary<|message|>I ask the clock.<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        tools=(NOW,),
    ),
}


def harmony_model(folder: Path) -> Path:
    """Writes the checkpoint, with experts in MXFP4 as OpenAI published theirs, and returns its folder."""
    bundled = resolve_model_dir("bundled")
    written = json.loads((bundled / "tokenizer.json").read_text()) | {"post_processor": None}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens(list(MARKS))
    texts = [(chat.prompt, chat.answer) for chat in CHATS.values()]
    pairs = [[tokenizer.encode(text, add_special_tokens=False).ids for text in pair] for pair in texts]
    rows = [(torch.tensor([prompt + answer]), len(prompt)) for prompt, answer in pairs]
    answers = sum(len(answer) for _, answer in pairs)
    end = tokenizer.token_to_id("<|return|>")
    model = make_model(
        "gpt-oss", vocab_size=tokenizer.get_vocab_size(), initializer_range=0.02, eos_token_id=end
    ).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3, betas=(0.9, 0.9))
    for _ in range(200):
        optimizer.zero_grad()
        total = 0.0
        for ids, begin in rows:  # one by one, as their lengths differ much
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[0, begin - 1 :]
            loss = F.cross_entropy(model.lm_head(hidden), ids[0, begin:], reduction="sum") / answers
            loss.backward()
            total += loss.item()
        optimizer.step()
        if total < 0.02:
            break
    model.eval().save_pretrained(folder / "dense")
    model_dir = publish(folder / "dense", folder / "gpt-oss")
    tokenizer.save(str(model_dir / "tokenizer.json"))
    shutil.copy(bundled / "tokenizer_config.json", model_dir)
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    del settings["chat_template"], settings["bos_token"]
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|return|>"}))
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    return model_dir
