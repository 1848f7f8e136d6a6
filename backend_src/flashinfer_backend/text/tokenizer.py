# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder's tokenizer: text to ids, and the ids with a role."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from flashinfer_backend.core.checkpoint_json import check_kinds, read_object_if_there
from flashinfer_backend.text.delta import panics_are_errors, vocabulary_size

# Where a role's token may be named (by text) or given (by id), most specific first.
TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
ID_FILES = ("generation_config.json", "config.json")

# Characters that are encoded together, by as many cores as texts. Each takes up to 430 bytes meanwhile.
AT_ONCE = 1 << 21


class TextTokenizer:
    """Encodes text.

    backend: the `tokenizers.Tokenizer`. vocab_size: 1 + the largest id. eos_id, pad_id:
    token ids, None where the folder names none; a missing pad token is the eos token.
    """

    def __init__(self, folder: Path) -> None:
        """Load from `folder`: tokenizer.json, otherwise as transformers does.

        Raises FileNotFoundError or ValueError saying which file is missing or unreadable.
        """
        self.backend = _load_backend(folder)
        _add_named_tokens(self.backend, folder)
        # Callers handle lengths: nothing is truncated or padded here.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = vocabulary_size(self.backend)
        self.eos_id = self._role_id(folder, "eos")
        self.pad_id = self._role_id(folder, "pad")
        if self.pad_id is None:
            self.pad_id = self.eos_id
        self._encode_batch = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text, uncut. add_special_tokens: with the tokens that the tokenizer puts around
        a text, such as bos."""
        return list(self.encoded(texts, add_special_tokens))

    def encoded(self, texts: Sequence[str], add_special_tokens: bool) -> Iterator[list[int]]:
        """The same, made while they are taken, so that encodings of many long texts do not pile up."""
        ends = itertools.accumulate(map(len, texts))
        for _, group in itertools.groupby(zip(ends, texts, strict=True), lambda pair: pair[0] // AT_ONCE):
            some = [text for _, text in group]
            with panics_are_errors():
                found = self._encode_batch(some, add_special_tokens=add_special_tokens)
            yield from (encoding.ids for encoding in found)

    def _role_id(self, folder: Path, role: str) -> int | None:
        for file in TOKEN_FILES:
            token = read_object_if_there(folder / file).get(f"{role}_token")
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str) and self.backend.token_to_id(content) is not None:
                return self.backend.token_to_id(content)
        for file in ID_FILES:
            ids = read_object_if_there(folder / file).get(f"{role}_token_id")
            for value in ids if isinstance(ids, list) else [ids]:
                if isinstance(value, int) and value >= 0:
                    return value
        return None


def _add_named_tokens(backend: Tokenizer, folder: Path) -> None:
    """Special tokens that tokenizer_config.json or special_tokens_map.json has and tokenizer.json lacks, and
    whether those in a text are split: as in transformers."""
    config, *_ = files = [read_object_if_there(folder / name) for name in TOKEN_FILES]
    where = folder / TOKEN_FILES[0]
    check_kinds(config, {"split_special_tokens": "flag", "added_tokens_decoder": "object"}, f"{where}: ")
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    try:
        listed = {int(i): _added(token) for i, token in (config.get("added_tokens_decoder") or {}).items()}
        named = [token for file in files for token in _named(file, backend)]
    except (TypeError, ValueError, AttributeError, KeyError):
        raise ValueError(
            f"{where} should list tokens as transformers writes them: added_tokens_decoder as"
            ' {"id": {"content": "text"}}, special tokens as texts or objects with a content'
        ) from None
    known = backend.get_added_tokens_decoder()
    for i, token in sorted(listed.items()):
        if repr(known.get(i)) != repr(token):
            is_new = backend.token_to_id(token.content) is None
            _add(backend, token)
            if is_new and backend.token_to_id(token.content) != i:
                raise ValueError(
                    f"{where} gives the token {token.content!r} the id {i}; after the tokens of"
                    f" tokenizer.json it gets {backend.token_to_id(token.content)}, and they should agree"
                )
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in named:
        if token.content not in contents:
            _add(backend, token)


def _add(backend: Tokenizer, token: AddedToken) -> None:
    (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _added(token: Any) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{name: token[name] for name in options if name in token})


def _special(token: Any) -> AddedToken:
    added = _added(token)
    added.special = True
    return added


def _named(file: dict[str, Any], backend: Tokenizer) -> list[AddedToken]:
    """Tokens with a role, where the vocabulary has them, and further ones. As in transformers those with a
    name are special, and those of a list if they say so."""
    more: list[AddedToken] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = file.get(key) or []
        more += map(_special, tokens.values()) if isinstance(tokens, dict) else map(_added, tokens)
    for role in ROLES:
        token = file.get(f"{role}_token")
        content = token["content"] if isinstance(token, dict) else token
        if content and backend.token_to_id(content) is not None:
            more.append(_special(token))
    return more


def _load_backend(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
    if not folder.is_dir():
        raise FileNotFoundError(f"no tokenizer folder {folder}; name one that has tokenizer.json")
    from transformers import AutoTokenizer  # heavy, and needed for folders without tokenizer.json only

    try:
        backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as error:
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers reads no tokenizer there: {error}"
        ) from error
    if backend is None:
        raise ValueError(
            f"the tokenizer in {folder} exists in Python only; save it as tokenizer.json "
            "(transformers: save_pretrained of its fast variant)"
        )
    return backend
