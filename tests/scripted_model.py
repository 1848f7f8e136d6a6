# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that answers by a script, so that an agent's session runs as with a model that is able to call
its tools."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashinfer_backend.core.paths import resolve_model_dir

# By the first tool that is offered and the number of results so far.
AGENTS = {
    "text 0": ["Hello", ", wor", "ld."],
    "thinking 0": ["Let me ", "think.", "\n</think>\n", "It is ", "four."],
    "weather 0": [
        "I look.\n",
        '<tool_call>{"name": "weather", "argu',
        'ments": {"city": "U',
        'lm"}}</tool_call>',
    ],
    "weather 1": ["It rains ", "in Ulm."],
    "exec_command 0": [
        '<tool_call>{"name": "exec_command", ',
        '"arguments": {"cmd": "cat note.txt"}}</tool_call>',
    ],
    "agents__close 0": ['<tool_call>{"name": "agents__close", "arguments": {}}</tool_call>'],
    "agents__close 1": ["It is closed."],
    "write_sql 0": [
        '<tool_call>{"name": "write_sql",',
        ' "arguments": {"input": "SELECT',
        ' \\"a\\";"}}</tool_call>',
    ],
    "write_sql 1": ["It was ", "written."],
    "db__note 0": ['<tool_call>{"name": "db__note", "arguments": {"text": 1}}</tool_call>'],
    "lost 0": ['<tool_call>{"name": "lost", "arguments": {"text":', ' "and so'],
    "exec_command 1": ["The note says: ", "water the plants."],
}
END_ID = 1  # of the bundled tokenizer
WIDTH = 64  # and so many pieces at most
# The prompt ends with the mark of an answer: the first tool's name, and how many results are there already.
TEMPLATE = """\
{% if tools %}Tools, as <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}
{% endif %}\
{% for message in messages %}\
{{ message.role }}: {{ message.reasoning_content }}{{ message.content }}\
{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{% endfor %}\
{% if add_generation_prompt %}{% if enable_thinking %}<think>
{% else %}{# </think> #}{% endif %}\
<|{{ 'thinking' if enable_thinking else tools[0].function.name if tools else 'text' }} \
{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}|>{% endif %}"""
# As Qwen3.5's and later ones: reasoning that the template opens or closes, efforts of three names, calls as
# XML, reasoning of earlier turns unless it is dropped, and the system's message at the beginning alone. The
# mark says whether the answer begins with reasoning, and how many results are there already.
QWEN_TEMPLATE = r"""\
{% set effort = reasoning_effort | default('xhigh') %}
{% if effort not in ['low', 'medium', 'xhigh'] %}{{ raise_exception('no effort ' ~ effort) }}{% endif %}
{% set thinks = enable_thinking is undefined or enable_thinking is true %}
{% set seen = namespace(question=-1, results=0) %}
{% for message in messages %}
{% if message.role == 'user' %}{% set seen.question = loop.index0 %}
{% elif message.role == 'tool' %}{% set seen.results = seen.results + 1 %}
{% elif message.role == 'system' and not loop.first %}{{ raise_exception('the system is late') }}
{% endif %}
{% endfor %}
{% if seen.question < 0 %}{{ raise_exception('nothing is asked') }}{% endif %}
{{- '[effort: ' ~ effort ~ ']\n' if thinks -}}
{% if tools %}
{{- '[tools: ' ~ tools | tojson ~ ' as <tool_call> <function=name> <parameter=name> value]\n' -}}
{% endif %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{{- '[assistant]\n' -}}
{% if preserve_thinking is undefined or preserve_thinking or loop.index0 > seen.question %}
{{- '<think>\n' ~ message.reasoning_content | default('', true) | trim ~ '\n</think>\n\n' -}}
{% endif %}
{{- message.content | trim -}}
{% for call in message.tool_calls or [] %}
{{- '\n\n' if loop.first and message.content else '' if loop.first else '\n' -}}
{{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' -}}
{% for name, value in call.function.arguments | items %}
{{- '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value | tojson) ~ '\n</parameter>\n' -}}
{% endfor %}
{{- '</function>\n</tool_call>' -}}
{% endfor %}
{{- '[end]\n' -}}
{% elif message.role == 'tool' %}
{{- '' if loop.previtem and loop.previtem.role == 'tool' else '[user]' -}}
{{- '\n<tool_response>\n' ~ message.content | trim ~ '\n</tool_response>' -}}
{{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '[end]\n' -}}
{% else %}
{{- '[' ~ message.role ~ ']\n' ~ message.content | trim ~ '[end]\n' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{- '[assistant]\n<think>\n' ~ ('' if thinks else '\n</think>\n\n') -}}
{{- '<|' ~ ('thinking' if thinks else 'quick') ~ ' ' ~ seen.results ~ '|>' -}}
{% endif %}
"""
QWEN: dict[str, list[str]] = {
    "thinking 0": [
        *("I need ", "the weather.\n", "</think>\n", "\nI look.\n\n", "<tool_call>\n<function="),
        *("weather>\n<parameter=city>\nU", "lm\n</para", "meter>\n<parameter=days>\n3\n</parameter>\n"),
        "</function>\n</tool_call>",
    ],
    "thinking 1": ["That was ", "simple.\n</think>\n\n", "It rains ", "in Ulm."],
    "quick 0": ["It is ", "four."],
}


def scripted_model(folder: Path, script: Mapping[str, Sequence[str]], template: str = TEMPLATE) -> Path:
    """Writes the checkpoint and returns its folder. script: by the mark that ends a prompt (its words alone)
    the pieces of the answer, a token each; pieces of all answers differ. Any other token is followed by the
    end."""
    import tokenizers
    import torch
    import transformers

    bundled = resolve_model_dir("bundled")
    tokenizer = tokenizers.Tokenizer.from_file(str(bundled / "tokenizer.json"))
    chains = [[f"<|{mark}|>", *pieces] for mark, pieces in script.items()]
    texts = [text for chain in chains for text in chain]
    assert len(set(texts)) == len(texts) < WIDTH
    for text in texts:
        tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False, special=text.startswith("<|"))])
    size = tokenizer.get_vocab_size()
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=1 << 15,
        eos_token_id=END_ID,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # the layer adds nothing, so a token depends on the one before alone
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
        place = {token: n for n, token in enumerate(map(tokenizer.token_to_id, texts), start=1)}
        for token in range(size):
            model.model.embed_tokens.weight[token, place.get(token, 0)] = 1.0
        model.lm_head.weight[END_ID, 0] = 100.0
        for chain in chains:
            ids = [tokenizer.token_to_id(text) for text in chain]
            for token, following in zip(ids, [*ids[1:], END_ID], strict=True):
                model.lm_head.weight[following, place[token]] = 100.0
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(bundled / "tokenizer_config.json", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder
