# SPDX-License-Identifier: Apache-2.0
"""Seeded short stories: every plot is a chain of sentences, each drawn from a few wordings over one cast."""

import random
import re
from pathlib import Path

import words as w


def read_plots(path: Path) -> dict[str, list[list[str]]]:
    """The plots of a file by name: a plot is a list of steps, a step a list of alternative wordings."""
    plots: dict[str, list[list[str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            steps = plots.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            steps.append(line.split(" | "))
    return plots


PLOTS = read_plots(Path(__file__).parent / "plots.txt")
OPENINGS = [
    "Once upon a time, there was a {hero} named {name}.",
    "Once upon a time, a {hero} named {name} lived in {house}.",
    "Once upon a time there lived a {hero} called {name}.",
    "There was once a {hero} called {name}, who lived in {house}.",
    "{name} was a {hero} who lived in {house}.",
    "Long ago, in {house}, there lived a {hero} named {name}.",
    "In {house} lived a {hero}. {His} name was {name}.",
]
EXTRAS = [
    "{He} was never in a hurry.", "{He} was {age} years old and liked to {hobby}.",
    "{His} best friend was {friend}.", "{He} lived with {his} {parent}.",
    "Everybody liked {him}.", "Most of all {he} liked {food}.",
]  # fmt: skip
ENDINGS = [
    "And they all lived happily ever after.", "The end.", "It was a good day.",
    "And if you pass {place}, you may still see them there.", "What a day that was!",
]  # fmt: skip


def with_articles(text: str) -> str:
    """Write "an old hat" for "a old hat"."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def make_cast(rng: random.Random, animal: str | None = None, toy: str | None = None) -> dict[str, str]:
    """The names and things of one story; the hero's pronouns agree with the name."""
    girl = rng.random() < 0.5
    name = rng.choice(w.GIRLS if girl else w.BOYS)
    friend = rng.choice([n for n in w.GIRLS + w.BOYS if n != name])
    helper, parent = rng.choice(w.HELPERS), rng.choice(w.PARENTS)
    he, his, him = ("she", "her", "her") if girl else ("he", "his", "him")
    return {
        "name": name, "friend": friend,
        "he": he, "his": his, "him": him, "He": he.title(), "His": his.title(),
        "hero": f"{rng.choice(w.HERO_TRAITS)} {'girl' if girl else 'boy'}",
        "helper": helper, "Helper": helper[0].upper() + helper[1:],
        "parent": parent, "parent_cap": f"The {parent} of {name}",
        "animal": animal or rng.choice(w.ANIMALS), "trait": rng.choice(w.ANIMAL_TRAITS),
        "pet": rng.choice(w.PET_NAMES), "toy": toy or rng.choice(w.TOYS), "colour": rng.choice(w.COLOURS),
        "food": rng.choice(w.FOODS), "sweet": rng.choice(w.SWEETS), "ingredient": rng.choice(w.INGREDIENTS),
        "place": rng.choice(w.PLACES), "hiding": rng.choice(w.HIDING_PLACES),
        "hiding_boat": rng.choice(["behind a stone", "under a big tree", "in the tall grass"]),
        "house": rng.choice(w.HOUSES), "time": rng.choice(w.TIMES), "day": rng.choice(w.DAYS),
        "weather": rng.choice(w.WEATHER), "project": rng.choice(w.PROJECTS), "seed": rng.choice(w.SEEDS),
        "hobby": rng.choice(w.HOBBIES), "age": rng.choice(w.NUMBERS[5:13]),
        "number": rng.choice(w.NUMBERS[3:11]),
    }  # fmt: skip


def story(rng: random.Random, animal: str | None = None, toy: str | None = None) -> str:
    """One story; with `animal` or `toy` (at most one of them) it is about that."""
    names = ["animal", "night"] if animal else ["lost", "sharing", "gift"] if toy else list(PLOTS)
    cast = make_cast(rng, animal, toy)
    steps = [rng.choice(OPENINGS)]
    steps += rng.sample(EXTRAS, rng.choice([0, 1, 1, 2]))
    steps += [rng.choice(wordings) for wordings in PLOTS[rng.choice(names)]]
    if rng.random() < 0.5:
        steps.append(rng.choice(ENDINGS))
    return with_articles(" ".join(steps).format_map(cast))
