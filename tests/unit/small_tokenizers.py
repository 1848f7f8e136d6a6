# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the kinds that language models use, trained on a few mixed-language lines."""

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. 12345 times, isn't it?",
    "Größe, Straße, Äpfel und Öl; voilà, ça déjà été.",
    "Привет, как дела? Καλημέρα κόσμε. שלום עולם.",
    "東京は日本の首都です。你好，世界！안녕하세요.",
    "def f(x):\n\treturn x  +  1\n\n  # два пробела",
    "😀 smile 👩‍👩‍👧 family 🇩🇪 flag",
] * 4
SPECIAL = ["<s>", "</s>", "<pad>"]


def _add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True)])
    # Not special: shown in the text. The second holds characters that stand for no byte.
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("<éa b>")])
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    """GPT-2, Llama-3 and Qwen style."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    return _add_tokens(tokenizer)


@cache
def byte_level_replace() -> Tokenizer:
    """Whose text is a difference of two decodes."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("q", "k")])
    return tokenizer


@cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    """Llama-2 and Mistral style; without `strip`, Gemma style."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if strip else []) + [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    # Only the characters of the first two lines get tokens: the others are spelled in bytes.
    tokenizer.train_from_iterator(
        [line for line in TEXT if line.isascii() or "ö" in line],
        trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", *SPECIAL, *bytes_]),
    )
    # Byte tokens are trained as special ones for their ids; they are ordinary tokens of the vocabulary.
    plain = Tokenizer.from_str(_without_special(tokenizer.to_str(), bytes_))
    plain.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return _add_tokens(plain)


def _without_special(state: str, names: list[str]) -> str:
    content = json.loads(state)
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in names]
    return json.dumps(content)


BYTES = decoders.ByteFallback()
MARK = decoders.Replace("▁", " ")
# Other orders and kinds of steps over SentencePiece's tokens.
OTHER_DECODERS = {
    "replace last": [BYTES, decoders.Fuse(), MARK],
    "replace last, strip": [BYTES, decoders.Fuse(), MARK, decoders.Strip(" ", 1, 0)],
    "metaspace": [BYTES, decoders.Metaspace()],
    "metaspace, no first": [BYTES, decoders.Metaspace(prepend_scheme="never")],
    "strip two": [MARK, BYTES, decoders.Fuse(), decoders.Strip(" ", 2, 0)],
    "strip the end": [MARK, BYTES, decoders.Fuse(), decoders.Strip(" ", 0, 1)],
    "regex": [decoders.Replace(Regex("▁"), " "), BYTES, decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    "regex last": [BYTES, decoders.Fuse(), decoders.Replace(Regex("^▁"), ""), MARK],
    "strip each": [MARK, BYTES, decoders.Strip("q", 1, 0)],
}


@cache
def other_decoder(name: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(sentencepiece().to_str())
    tokenizer.decoder = decoders.Sequence(OTHER_DECODERS[name])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """T5 style: Unigram with the Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXT, trainers.UnigramTrainer(vocab_size=250, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>")
    )
    return _add_tokens(tokenizer)


@cache
def word_level() -> Tokenizer:
    """A decoder of another kind: WordPiece."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=250, special_tokens=["<unk>"]))
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_level_replace": byte_level_replace,
    "sentencepiece": sentencepiece,
    "sentencepiece_no_strip": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
}
