# SPDX-License-Identifier: Apache-2.0
"""Special tokens that only tokenizer_config.json names are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_tokenizers import byte_level
from tokenizers import Tokenizer

from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer

TEXT = "a <|eot|>b <|turn|> the</s><tool>"
NEW = {"content": "<|eot|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def saved(folder: Path, config: dict[str, Any]) -> TextTokenizer:
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TextTokenizer(folder)


SIZE = max(byte_level().get_vocab().values()) + 1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"additional_special_tokens": ["<|eot|>"]},
        {"extra_special_tokens": ["<|eot|>"]},
        {"added_tokens_decoder": {str(SIZE): {**NEW, "special": True}}},
        {"added_tokens_decoder": {str(SIZE): {**NEW, "special": False}}},
        {
            "eos_token": "</s>",
            "additional_special_tokens": [{**NEW, "__type": "AddedToken", "special": True}],
        },
        {"additional_special_tokens": [{**NEW, "__type": "AddedToken"}]},  # a list's tokens say it themselves
        {"extra_special_tokens": {"image_token": {**NEW, "__type": "AddedToken"}}},
        {"added_tokens_decoder": {str(SIZE): {**NEW, "lstrip": True}}, "extra_special_tokens": ["<|eot|>"]},
        {"extra_special_tokens": [""]},
        {"split_special_tokens": True},
    ],
)
def test_named_tokens_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    ours = saved(tmp_path, config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (ids,) = ours.encode_batch([TEXT], False)
    assert ids == theirs.encode(TEXT, add_special_tokens=False)
    for skip in (True, False):
        text = DeltaDecoder(ours.backend, skip).decode(ids)
        assert text == theirs.decode(ids, skip_special_tokens=skip)


def test_a_token_with_another_id_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives the token '<\|eot\|>' the id 9999"):
        saved(tmp_path, {"added_tokens_decoder": {"9999": {**NEW, "special": True}}})


@pytest.mark.parametrize("wrong", [{"additional_special_tokens": [1]}, {"added_tokens_decoder": {"x": {}}}])
def test_a_list_of_another_form_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="should list tokens as transformers writes them"):
        saved(tmp_path, wrong)


def test_the_file_of_a_tokenizer_is_left_as_it_is(tmp_path: Path) -> None:
    saved(tmp_path, {"additional_special_tokens": ["<|eot|>"]})
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|eot|>") is None
