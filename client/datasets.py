# SPDX-License-Identifier: Apache-2.0
"""Prompts with output lengths, and arrival times. Everything depends on the arguments and the seed alone, so
two servers given the same arguments get the same prompts, lengths, order and arrivals."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Prompt:
    """text is sent; prompt_tokens is its length as a server counts it; output_tokens are asked for."""

    text: str
    prompt_tokens: int
    output_tokens: int


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer.json of a checkpoint folder, without truncation or padding."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; --tokenizer must name a folder that holds tokenizer.json"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer that can be read here: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_turns(path: str | Path) -> list[tuple[str, str]]:
    """The texts of the first two turns of each conversation that has two, in the order of the file, which is
    ShareGPT's JSON. Raises OSError or ValueError for a file of another form."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}); it must be a ShareGPT JSON file") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a ShareGPT JSON file: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a ShareGPT JSON file: it must hold a list of conversations")
    return [pair for row in rows if (pair := _first_turns(row)) is not None]


def load_sharegpt(
    path: str | Path,
    tokenizer: Tokenizer,
    num_prompts: int,
    seed: int,
    *,
    max_prompt_tokens: int = 1024,
    max_total_tokens: int = 2048,
    min_tokens: int = 4,
) -> list[Prompt]:
    """num_prompts conversations of a ShareGPT JSON file, shuffled by seed: first turn as prompt, second
    turn's length as output length. Conversations with fewer than two turns of text, a turn under min_tokens,
    a prompt over max_prompt_tokens or a sum over max_total_tokens are left out (the limits of vLLM's
    benchmark). Raises ValueError for a file of another form, or if too few remain."""
    turns = read_turns(path)
    random.Random(seed).shuffle(turns)
    prompts: list[Prompt] = []
    batch = 512
    for first in range(0, len(turns), batch):
        part = turns[first : first + batch]
        asked = tokenizer.encode_batch([prompt for prompt, _ in part])
        answered = tokenizer.encode_batch([answer for _, answer in part], add_special_tokens=False)
        for (text, _), prompt_ids, answer_ids in zip(part, asked, answered, strict=True):
            p, a = len(prompt_ids), len(answer_ids)
            if min(p, a) < min_tokens or p > max_prompt_tokens or p + a > max_total_tokens:
                continue
            prompts.append(Prompt(text, p, a))
            if len(prompts) == num_prompts:
                return prompts
    raise ValueError(f"{path} has {len(prompts)} usable conversations, {num_prompts} were asked for")


def _first_turns(row: Any) -> tuple[str, str] | None:
    """The texts of a row's first two turns, or None where it has not both."""
    turns = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    asked, answered = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    return (asked, answered) if isinstance(asked, str) and isinstance(answered, str) else None


def random_prompts(
    tokenizer: Tokenizer,
    num_prompts: int,
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    seed: int,
) -> list[Prompt]:
    """Prompts of random tokens; both lengths uniform in their inclusive range. Each text encodes to exactly
    its length, special tokens included. Raises ValueError for an empty range or one that leaves no room for a
    prompt."""
    for name, (low, high) in (("input", input_range), ("output", output_range)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} length range {low}:{high} must satisfy 1 <= low <= high")
    special = len(tokenizer.encode("").ids)
    if input_range[0] <= special:
        raise ValueError(f"input length {input_range[0]} leaves no room beside {special} special tokens")
    rng = random.Random(seed)
    vocabulary = _stable_tokens(tokenizer, rng)
    prompts = []
    for _ in range(num_prompts):
        length, output_tokens = rng.randint(*input_range), rng.randint(*output_range)
        prompts.append(Prompt(_text_of_length(tokenizer, vocabulary, rng, length), length, output_tokens))
    return prompts


def _stable_tokens(tokenizer: Tokenizer, rng: random.Random, wanted: int = 4096) -> list[int]:
    """Up to `wanted` random ordinary tokens that encode back to themselves; where the vocabulary has enough
    that begin a word (text with a leading blank), only those, since they rarely merge with a neighbour."""
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.get_added_tokens_decoder()))
    rng.shuffle(ids)
    ids = ids[: wanted * 8]
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    stable = [
        (i, text)
        for i, text, encoding in zip(ids, texts, encodings, strict=True)
        if encoding.ids == [i] and REPLACEMENT_CHARACTER not in text
    ]
    words = [i for i, text in stable if text.startswith(" ")]
    chosen = words if len(words) >= 64 else [i for i, _ in stable]
    if not chosen:
        raise ValueError(
            "no token of this tokenizer survives decoding and encoding; random prompts cannot be made"
        )
    return chosen[:wanted]


def _text_of_length(tokenizer: Tokenizer, vocabulary: Sequence[int], rng: random.Random, length: int) -> str:
    """Random text that encodes (special tokens included) to exactly `length` tokens."""
    special = len(tokenizer.encode("").ids)
    for _ in range(32):
        ids = [rng.choice(vocabulary) for _ in range(length - special)]
        for _ in range(8):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            excess = len(tokenizer.encode(text).ids) - length
            if excess == 0:
                return text
            if excess > 0:
                ids = ids[: max(1, len(ids) - excess)]
            else:
                ids = ids + [rng.choice(vocabulary) for _ in range(-excess)]
    raise ValueError(f"no random text of {length} tokens found with this tokenizer")


def load_prompts(
    spec: str, tokenizer: Tokenizer, num_prompts: int, seed: int, **lengths: Any
) -> list[Prompt]:
    """spec is `sharegpt:FILE` (lengths: as load_sharegpt) or `random` (lengths: input_range,
    output_range)."""
    kind, _, path = spec.partition(":")
    if kind == "sharegpt" and path:
        return load_sharegpt(path, tokenizer, num_prompts, seed, **lengths)
    if spec == "random":
        return random_prompts(tokenizer, num_prompts, seed=seed, **lengths)
    raise ValueError(f"dataset {spec!r} must be sharegpt:FILE or random")


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due: all 0 for an infinite rate, else a Poisson
    process scaled so that the last arrival falls at count / rate (the offered rate is exact, as in vLLM's
    benchmark)."""
    if not rate > 0:  # nan too
        raise ValueError(f"request rate {rate} must be positive (or inf)")
    if math.isinf(rate) or count == 0:
        return [0.0] * count
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0, count))
    return [float(t) for t in times * (count / rate / times[-1])]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over texts and lengths in order: equal fingerprints mean equal work."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(f"{p.prompt_tokens},{p.output_tokens},{len(p.text)}\n{p.text}\n".encode())
    return digest.hexdigest()
