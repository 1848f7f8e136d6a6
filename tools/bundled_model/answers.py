# SPDX-License-Identifier: Apache-2.0
"""Seeded questions with answers, small talk, lists, and cards in JSON for the bundled model."""

import json
import random

import stories
import words as w


def a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def fact(rng: random.Random) -> tuple[str, str]:
    """A question in lower case without its question mark, and its answer as a sentence."""
    kind = rng.randrange(12)
    if kind == 0:
        thing, colour = rng.choice(list(w.THING_COLOURS.items()))
        if thing in ("sky", "sun", "sea", "moon", "night"):
            subject = f"the {thing}"
        else:
            subject = thing if thing in ("snow", "grass", "milk", "coal", "chocolate") else a(thing)
        spelling = rng.choice(["colour", "colour", "color"])
        return f"what {spelling} is {subject}", f"{subject[0].upper()}{subject[1:]} is {colour}."
    if kind == 1:
        animal, sound = rng.choice(list(w.SOUNDS.items()))
        return f"what sound does {a(animal)} make", f"{a(animal).capitalize()} {sound}."
    if kind == 2:
        who, home = rng.choice(list(w.HOMES.items()))
        return f"where does {a(who)} live", f"{a(who).capitalize()} lives {home}."
    if kind == 3:
        animal, legs = rng.choice(list(w.LEGS.items()))
        return f"how many legs does {a(animal)} have", f"{a(animal).capitalize()} has {legs} legs."
    if kind == 4:
        i, j = rng.sample(range(len(w.SIZES)), 2)
        one, two = w.SIZES[i], w.SIZES[j]
        verdict = "Yes" if i > j else "No"
        return (f"is {a(one)} bigger than {a(two)}",
                f"{verdict}, {a(one)} is {'bigger' if i > j else 'smaller'} than {a(two)}.")  # fmt: skip
    if kind == 5:
        pair = list(rng.choice(w.OPPOSITES))
        rng.shuffle(pair)
        return f"what is the opposite of {pair[0]}", f"The opposite of {pair[0]} is {pair[1]}."
    if kind == 6:
        country, city = rng.choice(w.CAPITALS)
        return f"what is the capital of {country}", f"The capital of {country} is {city}."
    if kind == 7:
        tool, use = rng.choice(w.USES)
        return f"what do we use {tool} for", f"We use {tool} to {use}."
    if kind == 8:
        cycle, noun = rng.choice([(w.DAYS, "day"), (w.MONTHS, "month"), (w.NUMBERS, "number")])
        i = rng.randrange(len(cycle) - 1)
        return f"which {noun} comes after {cycle[i]}", f"After {cycle[i]} comes {cycle[i + 1]}."
    return rng.choice(w.WHYS)


def reading(rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """A few sentences, and questions about them with their answers."""
    count = rng.randint(2, 4)
    people = rng.sample(w.GIRLS + w.BOYS, count)
    toys, colours, places = (rng.sample(pool, count) for pool in (w.TOYS, w.COLOURS, w.PLACES))
    facts = []
    pairs = []
    for who, toy, colour, place in zip(people, toys, colours, places, strict=True):
        if rng.random() < 0.7:
            facts.append(f"{who} has {a(colour + ' ' + toy)}.")
            pairs.append((f"who has the {toy}", f"{who} has the {colour} {toy}."))
            pairs.append((f"what does {who} have", f"{who} has {a(colour + ' ' + toy)}."))
            pairs.append((f"what colour is the {toy} of {who}", f"The {toy} of {who} is {colour}."))
        else:
            facts.append(f"{who} went to {place}.")
            pairs.append((f"where is {who}", f"{who} is at {place}."))
            pairs.append((f"who is at {place}", f"{who} is at {place}."))
    return " ".join(facts), rng.sample(pairs, rng.randint(1, min(4, len(pairs))))


def ask(rng: random.Random, question: str, answer: str) -> str:
    """The question and its answer in one of the shapes that people type."""
    capital = question[0].upper() + question[1:]
    return rng.choice([
        f"Question: {question}? Answer: {answer}", f"Question: {capital}? Answer: {answer}",
        f"Question: {question}?\nAnswer: {answer}", f"Question: {capital}?\nAnswer: {answer}",
        f"Question: {capital}?\nAnswer: {answer}", f"{capital}? {answer}",
    ])  # fmt: skip


def questions(rng: random.Random) -> str:
    """Questions with answers, mostly one."""
    return "\n".join(ask(rng, *fact(rng)) for _ in range(rng.choice([1, 1, 1, 1, 1, 1, 2, 3])))


def reading_questions(rng: random.Random) -> str:
    """A short text and questions about it."""
    text, pairs = reading(rng)
    return rng.choice([" ", "\n"]).join([text, *(ask(rng, *pair) for pair in pairs)])


def facts(rng: random.Random) -> str:
    """Answers alone, as running text."""
    return " ".join(fact(rng)[1] for _ in range(rng.randint(3, 7)))


def request(rng: random.Random) -> str:
    """A wish for a story, and the story."""
    topic: dict[str, str] = {}
    if rng.random() < 0.5:
        topic["animal"] = rng.choice(w.ANIMALS)
    else:
        topic["toy"] = rng.choice(w.TOYS)
    thing = a(next(iter(topic.values())))
    wish = rng.choice(["Tell me a story about", "Write a short story about", "Please tell me a story about"])
    lead = rng.choice(["{} {}.\n", "{} {}. ", "Question: {} {}.\nAnswer: "]).format(wish, thing)
    return lead + stories.story(rng, **topic)


def introduction(rng: random.Random) -> str:
    """Somebody introduces herself or himself."""
    c = stories.make_cast(rng)
    lines = [
        f"Hello, my name is {c['name']}.", f"I am {c['age']} years old and I live in {c['house']}.",
        f"My {c['parent']} is {a(rng.choice(w.JOBS))}.",
        f"I like {c['food']}, and I like to {c['hobby']}.",
        f"My best friend is {c['friend']}.", f"I have a {c['trait']} {c['animal']} named {c['pet']}.",
        f"When I grow up, I want to be {a(rng.choice(w.JOBS))}.",
        f"On {c['day']} we will go to {c['place']}.",
    ]  # fmt: skip
    return stories.with_articles(" ".join(lines[:1] + rng.sample(lines[1:], rng.randint(3, 6))))


def dialogue(rng: random.Random) -> str:
    """Two people talk, a line each in turn."""
    c = stories.make_cast(rng)
    one, two = c["name"], c["friend"]
    parts = [
        [f"Hello, {two}! How are you?", f"I am well, thank you, {one}. And you?"],
        [f"Where are you going with that {c['colour']} {c['toy']}?",
         f"I am going to {c['place']}. Will you come?"],
        ["Yes, I would like to. What will we do there?", f"We can {c['hobby']} and eat {c['food']}."],
        [f"Have you seen my {c['animal']}?", f"Yes, the {c['animal']} is {c['hiding']}."],
        [f"It is a {c['weather']} day today.", f"That is good. On {c['day']} it was raining."],
        ["What would you like to eat?", f"Some {c['food']}, please."],
    ]  # fmt: skip
    middle = rng.sample(parts[1:2] + parts[3:], rng.randint(1, 3))
    turns = [parts[0], *middle, ["Goodbye!", "See you tomorrow!"]]
    if parts[1] in turns:
        turns.insert(turns.index(parts[1]) + 1, parts[2])
    return stories.with_articles("\n".join(f"{one}: {x}\n{two}: {y}" for x, y in turns))


def card(rng: random.Random) -> str:
    """A person as JSON."""
    c = stories.make_cast(rng)
    record = {"name": c["name"], "age": rng.randint(5, 12), "likes": c["food"],
              "pet": {"kind": c["animal"], "name": c["pet"]}, "friends": [c["friend"]]}  # fmt: skip
    keys = ["name", "age", *rng.sample(["likes", "pet", "friends"], rng.randint(1, 3))]
    return f"A card about {c['name']} in JSON: " + json.dumps({k: record[k] for k in keys})


def listing(rng: random.Random) -> str:
    """A list that is known by heart, or counting."""
    if rng.random() < 0.5:
        i = rng.randint(0, 12)
        j = rng.randint(i + 3, 20)
        count = ", ".join(w.NUMBERS[i : j + 1])
        return f"Count from {w.NUMBERS[i]} to {w.NUMBERS[j]}: {count}."
    name, items = rng.choice([
        ("days of the week", w.DAYS), ("months of the year", w.MONTHS), ("seasons of the year", w.SEASONS),
        ("first five numbers", w.NUMBERS[1:6]),
    ])  # fmt: skip
    return f"The {name} are {', '.join(items[:-1])} and {items[-1]}."
