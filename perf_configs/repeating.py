# SPDX-License-Identifier: Apache-2.0
"""Texts whose answers repeat their prompts, made from those that the bundled model is trained with: code that
is asked back with a name changed, and documents that answers quote. And chats, which do not.

Texts are cut about as large vocabularies cut them: words with the blank before them, digits, runs of blanks
and of signs. So no tokenizer is needed, and any model can have the ids.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SOURCES = Path(__file__).parents[1] / "tools" / "bundled_model"
PIECE = re.compile(r" ?[A-Za-z]+|\d|\s+|[^A-Za-z\d\s]+")
CODE_CHARACTERS = 1600  # of a piece of a file, about
DOCUMENTS = 6
BETWEEN = (
    "That is what the text has on it.", "There is one more place which matters here:",
    "In other words, both agree, though neither gives a reason.", "So the short answer would be yes.",
    "Nothing else was found about this question.", "It also helps to know how this went on:",
)  # fmt: skip


class Text(NamedTuple):
    """A prompt, and the answer that it has."""

    prompt: str
    answer: str


def code_edit(rng: random.Random) -> Text:
    """A part of a file, with one name changed wherever it stands."""
    while True:
        path = rng.choice(sorted(SOURCES.glob("*.py")))
        parts = path.read_text(encoding="utf-8").split("\n\n\n")
        first = rng.randrange(len(parts))
        code = parts[first]
        for part in parts[first + 1 :]:
            if len(code) + len(part) > CODE_CHARACTERS:
                break
            code += f"\n\n\n{part}"
        names = sorted(set(re.findall(r"\b[a-z]{4,}\b", code)))
        often = [name for name in names if 3 <= len(re.findall(rf"\b{name}\b", code)) <= 12]
        if often and CODE_CHARACTERS / 2 < len(code) < 2 * CODE_CHARACTERS:
            name = rng.choice(often)
            changed = re.sub(rf"\b{name}\b", f"new_{name}", code)
            return Text(f"Call {name} new_{name}, and print the whole file.\n\n{code}\n\n", changed)


def quoted_documents(rng: random.Random) -> Text:
    """An answer that quotes from several documents of its prompt, with sentences of its own between."""
    found = [_story(rng) for _ in range(DOCUMENTS)]
    listed = "\n".join(f"[{number}] {text}" for number, text in enumerate(found, 1))
    parts = []
    for number, between in zip(rng.sample(range(DOCUMENTS), 4), rng.sample(BETWEEN, 4), strict=True):
        sentences = re.split(r"(?<=[.!?]) ", found[number])
        first = rng.randrange(len(sentences) - 3)
        parts.append(f"Document [{number + 1}] says: {' '.join(sentences[first : first + 3])} {between}")
    return Text(f"{listed}\nWhat do the documents say?\n", "\n".join(parts))


def chat(rng: random.Random) -> Text:
    """A story whose prompt has nothing of it."""
    return Text("Please tell me two stories that I do not know.\n", f"{_story(rng)}\n{_story(rng)}")


KINDS: dict[str, Callable[[random.Random], Text]] = {
    "code edits": code_edit, "quotes": quoted_documents, "chats": chat,
}  # fmt: skip


def texts(kind: str) -> Iterator[Text]:
    """Any number of texts of a kind, always the same ones."""
    rng = random.Random(kind)
    while True:
        yield KINDS[kind](rng)


class Pieces:
    """Ids for the pieces of texts, as they come."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids: dict[str, int] = {}

    def ids(self, text: str) -> np.ndarray:
        found = [self._ids.setdefault(piece, len(self._ids)) for piece in PIECE.findall(text)]
        return np.array([3 + number % (self._vocab_size - 3) for number in found], np.int32)


def _story(rng: random.Random) -> str:
    if str(SOURCES) not in sys.path:
        sys.path.append(str(SOURCES))
    import stories

    return str(stories.story(rng))
