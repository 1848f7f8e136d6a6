# SPDX-License-Identifier: Apache-2.0
"""Training text of the bundled model: documents from this folder's own grammar plus its own fixed paragraphs.

Run as a program it prints documents, separated by empty lines.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import answers
import stories

from client.arguments import integer

# Share of each kind of document.
KINDS = [
    (stories.story, 30), (answers.request, 10), (answers.questions, 32), (answers.reading_questions, 15),
    (answers.facts, 3), (answers.introduction, 5), (answers.dialogue, 5), (answers.card, 2),
    (answers.listing, 2),
]  # fmt: skip
PARAGRAPHS_SHARE = 6


def paragraphs() -> list[str]:
    """The fixed paragraphs, which the model learns by heart."""
    text = (Path(__file__).parent / "paragraphs.txt").read_text(encoding="utf-8")
    return [p.strip() for p in text.split("\n\n") if p.strip()]


def documents(seed: int, count: int, with_paragraphs: bool = True, reading: int = 1) -> Iterator[str]:
    """`count` documents, the same ones for the same arguments.

    Without paragraphs only the grammar speaks. `reading` multiplies the share of reading tasks: they are the
    shortest way to learn that a text goes on with the names and things that it has introduced.
    """
    rng = random.Random(seed)
    fixed = paragraphs()
    shares = {make: share * (reading if make is answers.reading_questions else 1) for make, share in KINDS}
    if with_paragraphs:
        shares[lambda r: r.choice(fixed)] = PARAGRAPHS_SHARE
    for make in rng.choices(list(shares), list(shares.values()), k=count):
        yield make(rng)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--documents", type=integer(1), default=20)
    parser.add_argument("--seed", type=integer(0), default=1)
    args = parser.parse_args()
    print("\n\n".join(documents(args.seed, args.documents)))


if __name__ == "__main__":
    main()
