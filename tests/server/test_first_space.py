# SPDX-License-Identifier: Apache-2.0
"""The space before an answer's first word, where the vocabulary is SentencePiece's: the text of prompt and
answer together, less the prompt's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAiServer, events, openai_running
from tokenizers import Tokenizer

from checkpoints import make_checkpoint
from unit.small_tokenizers import sentencepiece

PROMPT, WORDS = "The quick", ("▁brown", "▁fox", "▁jumps", "▁over")
BEGUN = {
    "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROMPT}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return sentencepiece()


@pytest.fixture(scope="module")
def spaced(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    """A model with random weights and the tokenizer."""
    folder: Path = make_checkpoint("llama", tmp_path_factory.mktemp("spaced"), vocab_size=400)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with openai_running(folder, tmp_path_factory.mktemp("server")) as server:
        yield server


def told(server: OpenAiServer, stream: bool, **asked: Any) -> tuple[str, list[int]]:
    """Text and ids of an answer."""
    chats = "messages" in asked
    path = "/v1/chat/completions" if chats else "/v1/completions"
    body = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "stream": stream, **asked}
    status, _, found = server.call(path, body)
    assert status == 200, found
    text, ids = "", []
    for choice in [each["choices"][0] for each in events(found)] if stream else found["choices"]:
        part = choice["delta" if stream else "message"].get("content") if chats else choice["text"]
        text, ids = text + (part or ""), ids + choice["token_ids"]
    return text, ids


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_space_is_kept(spaced: OpenAiServer, tokenizer: Tokenizer, stream: bool) -> None:
    likely = {"logit_bias": {str(tokenizer.token_to_id(word)): 60 for word in WORDS}}
    text, ids = told(spaced, stream, prompt=PROMPT, **likely)
    before = tokenizer.encode(PROMPT).ids
    assert len(ids) == 6 and text == tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]
    assert text[0] == " " and text[1] != " "
    assert told(spaced, stream, prompt=PROMPT, echo=True, **likely)[0] == PROMPT + text
    begun, ids = told(spaced, stream, **BEGUN, **likely)
    assert begun == tokenizer.decode(before + ids)[len(PROMPT) :] and begun[0] == " "
    first = text[: text.index(" ", 1)]
    for asked in ({"prompt": PROMPT}, BEGUN):
        assert told(spaced, stream, **asked, **likely, stop=[first])[0] == ""
        kept = told(spaced, stream, **asked, **likely, stop=[first], include_stop_str_in_output=True)
        assert kept[0] == first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"prompt": PROMPT}, BEGUN], ids=["completion", "chat"])
def test_guides_write_the_first_space(spaced: OpenAiServer, asked: dict[str, Any], stream: bool) -> None:
    for guide, texts in (
        ({"choice": [" fox"]}, {" fox"}),
        ({"regex": " (brown|jumps)"}, {" brown", " jumps"}),
        ({"choice": ["over"]}, {"over"}),
    ):
        text, _ = told(spaced, stream, **asked, max_tokens=40, structured_outputs=guide)
        assert text in texts
