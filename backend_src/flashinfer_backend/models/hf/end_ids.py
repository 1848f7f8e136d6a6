# SPDX-License-Identifier: Apache-2.0
"""Which token ends a text, by the files of a tokenizer."""

from pathlib import Path

from flashinfer_backend.core.checkpoint_json import read_object_if_there

# Tokens that end a turn as well as the token that ends a text: Harmony's calls.
ENDS_TOO = {"<|return|>": ("<|call|>",)}
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")


def tokenizer_end_ids(folder: Path) -> list[int]:
    """The id of the token that ends a text by the tokenizer's own files, and of those of ENDS_TOO; none if
    they name none.

    Read without the tokenizer itself, which takes a while and much memory. Raises ValueError for a file
    that is not JSON.
    """
    config, special, tokenizer = (read_object_if_there(folder / name) for name in TOKENIZER_FILES)
    names = [token.get("content") if isinstance(token, dict) else token for token in
             (config.get("eos_token"), special.get("eos_token"))]  # fmt: skip
    names = [name for name in names if isinstance(name, str) and name]
    if not names:
        return []
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab") or {} if isinstance(model, dict) else {}
    try:
        if isinstance(vocabulary, list):  # of [piece, score]
            vocabulary = {piece: i for i, (piece, *_) in enumerate(vocabulary)}
        ids = {token["content"]: int(i) for i, token in (config.get("added_tokens_decoder") or {}).items()}
        ids |= vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(
            f"{folder / 'tokenizer.json'} or tokenizer_config.json does not list tokens as the tokenizers "
            'library writes them: vocab as {"text": id}, added_tokens as [{"id": id, "content": "text"}]'
        ) from None
    name = next((name for name in names if name in ids), None)
    return [] if name is None else [ids[each] for each in (name, *ENDS_TOO.get(name, ())) if each in ids]
