# SPDX-License-Identifier: Apache-2.0
"""Prompts with output lengths, and arrival times. Everything depends on the arguments and the seed alone, so
two servers given the same arguments get the same prompts, lengths, order and arrivals."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"
Range = tuple[int, int]  # lowest and highest, both included
PART_SEEDS = 1_000_000_007  # from the seed of a part of mixed prompts to the next part's


class TooFewError(ValueError):
    """A file has fewer conversations than were asked for."""


@dataclass(frozen=True)
class Prompt:
    """text is sent; prompt_tokens is its length as a server counts it; output_tokens are asked for.

    later: the further turns of a conversation, each sent once the turn before it is answered, after all that
    was said. Their prompt_tokens are those of their own text."""

    text: str
    prompt_tokens: int
    output_tokens: int
    later: tuple[Prompt, ...] = ()


@dataclass(frozen=True)
class Part:
    """A share of the prompts of `mixed`: its weight relative to the other parts', and its two ranges of
    lengths."""

    weight: float
    input_range: Range
    output_range: Range


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer.json of a checkpoint folder, without truncation or padding. The text "bundled" means the
    backend's small model."""
    if folder == "bundled":
        from flashinfer_backend.core.paths import named_folder  # alone for this: a client needs no backend

        folder = named_folder("bundled")
    path = Path(folder).expanduser() / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; --tokenizer must name a folder that holds tokenizer.json, or be bundled"
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
    return [(texts[0], texts[1]) for row in _read_rows(path) if (texts := _texts(row, 1))]


def _read_rows(path: str | Path) -> list[Any]:
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}); it must be a ShareGPT JSON file") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a ShareGPT JSON file: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a ShareGPT JSON file: it must hold a list of conversations")
    return rows


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
    raise TooFewError(f"{path} has {len(prompts)} usable conversations, {num_prompts} were asked for")


def random_prompts(
    tokenizer: Tokenizer, num_prompts: int, input_range: Range, output_range: Range, seed: int
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


def mixed_prompts(tokenizer: Tokenizer, num_prompts: int, parts: Sequence[Part], seed: int) -> list[Prompt]:
    """Random prompts of several kinds, shuffled; each part has its share of them, rounded. Raises ValueError
    as random_prompts does, and without parts."""
    if not parts:
        raise ValueError("dataset mixed needs parts: weight, input and output lengths of each kind of prompt")
    bounds = np.cumsum([part.weight for part in parts])
    ends = [round(num_prompts * bound / bounds[-1]) for bound in bounds]
    prompts = []
    for number, (part, first, end) in enumerate(zip(parts, [0, *ends], ends, strict=False)):
        ranges = part.input_range, part.output_range
        # Far from the seeds of neighbouring runs, of which another part would have the same texts.
        prompts += random_prompts(tokenizer, end - first, *ranges, seed + number * PART_SEEDS)
    random.Random(seed).shuffle(prompts)
    return prompts


def shared_prefix_prompts(
    tokenizer: Tokenizer,
    num_prompts: int,
    input_range: Range,
    output_range: Range,
    seed: int,
    *,
    prefixes: int,
    prefix_tokens: int,
) -> list[Prompt]:
    """Random prompts that begin with one of `prefixes` texts of prefix_tokens tokens, each as often as the
    others; input_range is of what follows the prefix. Lengths are those of the whole text, as it encodes."""
    if prefixes < 1:
        raise ValueError(f"prefixes {prefixes} must be at least 1")
    heads = random_prompts(tokenizer, prefixes, (prefix_tokens, prefix_tokens), (1, 1), seed + 1)
    special = len(tokenizer.encode("").ids)
    low, high = input_range
    tails = random_prompts(tokenizer, num_prompts, (low + special, high + special), output_range, seed)
    texts = [heads[i % prefixes].text + tail.text for i, tail in enumerate(tails)]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    prompts = [
        Prompt(text, length, tail.output_tokens)
        for text, length, tail in zip(texts, lengths, tails, strict=True)
    ]
    random.Random(seed).shuffle(prompts)
    return prompts


def conversation_prompts(
    tokenizer: Tokenizer, num_prompts: int, input_range: Range, output_range: Range, seed: int, *, turns: int
) -> list[Prompt]:
    """num_prompts conversations of `turns` turns of random text; input_range is of each turn's own text."""
    if turns < 1:
        raise ValueError(f"turns {turns} must be at least 1")
    flat = random_prompts(tokenizer, num_prompts * turns, input_range, output_range, seed)
    special = len(tokenizer.encode("").ids)  # only once in what is sent
    flat = [
        prompt if i % turns == 0 else replace(prompt, prompt_tokens=prompt.prompt_tokens - special)
        for i, prompt in enumerate(flat)
    ]
    return [_conversation(flat[first : first + turns]) for first in range(0, len(flat), turns)]


def load_conversations(
    path: str | Path,
    tokenizer: Tokenizer,
    num_prompts: int,
    seed: int,
    *,
    turns: int,
    max_total_tokens: int = 2048,
) -> list[Prompt]:
    """num_prompts conversations of a ShareGPT JSON file, shuffled by seed, with up to `turns` turns each: the
    texts of the one side are sent, the other side's lengths are asked for. Conversations with a turn of no
    text or more than max_total_tokens in sum are left out. Raises ValueError if too few remain."""
    rows = [texts for row in _read_rows(path) if (texts := _texts(row, turns))]
    random.Random(seed).shuffle(rows)
    prompts: list[Prompt] = []
    for texts in rows:
        lengths = [len(tokenizer.encode(text, add_special_tokens=i == 0)) for i, text in enumerate(texts)]
        if min(lengths) < 1 or sum(lengths) > max_total_tokens:
            continue
        pairs = zip(texts[::2], lengths[::2], lengths[1::2], strict=True)
        prompts.append(_conversation([Prompt(*pair) for pair in pairs]))
        if len(prompts) == num_prompts:
            return prompts
    raise TooFewError(f"{path} has {len(prompts)} usable conversations, {num_prompts} were asked for")


def _conversation(turns: Sequence[Prompt]) -> Prompt:
    first, *later = turns
    return Prompt(first.text, first.prompt_tokens, first.output_tokens, tuple(later))


def _texts(row: Any, turns: int) -> list[str]:
    """The texts of a row's first turns: as many as have an answer, at most `turns` pairs; none if one
    lacks."""
    said = row.get("conversations") if isinstance(row, dict) else None
    said = said[: min(len(said) // 2, turns) * 2] if isinstance(said, list) else []
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in said]
    return [t for t in texts if isinstance(t, str)] if all(isinstance(t, str) for t in texts) else []


# What each kind of data takes besides its number and seed.
DATASETS = {
    "random": ("input_range", "output_range"),
    "sharegpt:FILE": ("max_prompt_tokens", "max_total_tokens", "min_tokens"),
    "mixed": ("parts",),
    "shared-prefix": ("input_range", "output_range", "prefixes", "prefix_tokens"),
    "multi-turn": ("input_range", "output_range", "turns"),
    "conversations:FILE": ("turns", "max_total_tokens"),
}


def kind_of(spec: str) -> str:
    """Which of DATASETS it is. Raises ValueError for none of them."""
    name, _, path = spec.partition(":")
    kind = f"{name}:FILE" if path else name
    if kind not in DATASETS:
        raise ValueError(f"dataset {spec!r} must be {', '.join([*DATASETS][:-1])} or {[*DATASETS][-1]}")
    return kind


def load_prompts(
    spec: str, tokenizer: Tokenizer, num_prompts: int, seed: int, **lengths: Any
) -> list[Prompt]:
    """spec is one of DATASETS, with a file's name for FILE; lengths: what it takes."""
    kind, path = kind_of(spec), spec.partition(":")[2]
    if kind == "sharegpt:FILE":
        return load_sharegpt(path, tokenizer, num_prompts, seed, **lengths)
    if kind == "conversations:FILE":
        return load_conversations(path, tokenizer, num_prompts, seed, **lengths)
    makers: dict[str, Any] = {
        "random": random_prompts,
        "mixed": mixed_prompts,
        "shared-prefix": shared_prefix_prompts,
        "multi-turn": conversation_prompts,
    }
    return list(makers[kind](tokenizer, num_prompts, seed=seed, **lengths))


@dataclass(frozen=True)
class Ramp:
    """A request rate that goes from start to end, in requests/s: along a line, or by the same factor each
    second."""

    start: float
    end: float
    exponential: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.start < math.inf and 0 < self.end < math.inf):
            raise ValueError(f"ramp {self.start}:{self.end} must be between two rates over 0")

    def seconds(self, count: float) -> float:
        """When `count` requests are due, or the time at which a run of that many ends."""
        return count / self.mean

    @property
    def mean(self) -> float:
        """Requests/s over the whole ramp."""
        if self.start == self.end or not self.exponential:
            return (self.start + self.end) / 2
        return (self.end - self.start) / math.log(self.end / self.start)

    def times(self, due: np.ndarray, count: int) -> np.ndarray:
        """When that many requests are due, of `count` in all: the inverse of the rate's integral."""
        total, rise = self.seconds(count), self.end - self.start
        if rise == 0:
            return np.asarray(due / self.start)
        if self.exponential:
            growth = math.log(self.end / self.start) / total
            return np.asarray(np.log1p(due * growth / self.start) / growth)
        slope = rise / total
        return np.asarray((np.sqrt(self.start**2 + 2 * slope * due) - self.start) / slope)


def arrival_times(
    count: int, rate: float, seed: int, *, burstiness: float = 1.0, ramp: Ramp | None = None
) -> list[float]:
    """Seconds after the start at which each request is due: all 0 for an infinite rate, else a process with
    gamma-distributed gaps scaled so that the last arrival falls at count / rate (the offered rate is exact,
    as in vLLM's benchmark).

    burstiness is the gaps' shape: 1 is Poisson, less comes in bursts, more is more even, inf is a fixed gap.
    With a ramp, the rate is the ramp's instead of `rate`."""
    if not rate > 0:  # nan too
        raise ValueError(f"request rate {rate} must be positive (or inf)")
    if not burstiness > 0:
        raise ValueError(f"burstiness {burstiness} must be positive (or inf)")
    if count == 0 or (math.isinf(rate) and ramp is None):
        return [0.0] * count
    random_gaps = np.random.default_rng(seed)
    if math.isinf(burstiness):
        gaps = np.ones(count)
    elif burstiness == 1:
        gaps = random_gaps.exponential(1.0, count)
    else:
        gaps = random_gaps.gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    if not times[-1] > 0:
        raise ValueError(f"burstiness {burstiness:g} leaves no gap of the {count} above 0: take a larger one")
    if ramp is not None:
        return [float(t) for t in ramp.times(times * (count / times[-1]), count)]
    return [float(t) for t in times * (count / rate / times[-1])]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over texts and lengths in order: equal fingerprints mean equal work."""
    digest = hashlib.sha256()
    for p in prompts:
        for turn in (p, *p.later):
            digest.update(
                f"{turn.prompt_tokens},{turn.output_tokens},{len(turn.text)}\n{turn.text}\n".encode()
            )
    return digest.hexdigest()
