# SPDX-License-Identifier: Apache-2.0
"""How the servers of perf_configs.run were set: what tells two runs of one server apart, and a short name for
each.

A run's configuration is a tuple of its aspects in the order of ASPECTS, each a sorted tuple of words such as
("replicas=2", "tensor_parallel_size=2"). Files of before an aspect was recorded have no words there, and
random weights.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

Run = dict[str, Any]
Configuration = tuple[tuple[str, ...], ...]

# Labels say how knobs, checkpoints and weights differ; of the others only what it takes to tell two apart.
ASPECTS = ("knobs", "checkpoint", "weights", "profile", "start", "flags", "environment")
ALWAYS_SHOWN = 3
SHORT_HASH = 6


def base_label(run: Run) -> str:
    return f"{run['server']}:{run['variant']}" if run.get("variant") else str(run["server"])


def configuration(run: Run) -> Configuration:
    """What the run's server was set to; commits and versions do not count."""
    knobs = dict(word.partition("=")[::2] for word in run["knobs"].split() if word != "--set")
    checkpoint, profile = run.get("checkpoint"), run.get("profile")
    environment = run.get("environment") or {}
    words = {
        "knobs": [f"{name}={value}" for name, value in knobs.items()],
        "checkpoint": [checkpoint["config_sha256"]] if checkpoint else [],
        "weights": ["the checkpoint's weights"] if run.get("load_format") == "auto" else [],
        "profile": [f"{profile['name'].removesuffix('.toml')} {profile['sha256'][:SHORT_HASH]}"]
        if profile
        else [],
        "start": ["running already"] if run["start_seconds"] is None else [],
        "flags": _options(run.get("flags") or ""),
        "environment": [
            word
            for name, value in environment.items()
            for word in (
                [f"{name} {option}" for option in _options(value)]
                if name.endswith("_FLAGS")
                else [f"{name}={value}"]
            )
        ],
    }
    return tuple(tuple(sorted(words[aspect])) for aspect in ASPECTS)


def labels(runs: Iterable[Run]) -> dict[tuple[str, Configuration], str]:
    """(base_label, configuration) -> a name that no other of these runs' has: server and variant, and in
    brackets what the configurations of that one do not have in common."""
    found: dict[str, dict[Configuration, None]] = {}
    names: dict[str, str] = {}  # of checkpoints, by the hash of their config.json
    for run in runs:
        found.setdefault(base_label(run), {})[configuration(run)] = None
        if checkpoint := run.get("checkpoint"):
            names.setdefault(checkpoint["config_sha256"], checkpoint["name"])
    several = {name for name in names.values() if list(names.values()).count(name) > 1}
    shown = {sha: f"{name} {sha[:SHORT_HASH]}" if name in several else name for sha, name in names.items()}
    made = {}
    for label, configurations in found.items():
        words: dict[Configuration, tuple[str, ...]] = dict.fromkeys(configurations, ())
        for number in range(len(ASPECTS)):
            before = dict(words)
            for each in configurations:
                others = [o for o in configurations if number < ALWAYS_SHOWN or before[o] == before[each]]
                words[each] += _not_common(each[number], [other[number] for other in others])
        for each, told in words.items():
            text = ", ".join(shown.get(word, word) for word in told)
            made[label, each] = f"{label} ({text})" if told else label
    return made


def _not_common(words: tuple[str, ...], all_words: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(word for word in words if not all(word in each for each in all_words))


def _options(flags: str) -> list[str]:
    """A command line's options, each with its values."""
    return re.split(r"\s+(?=-)", flags.strip()) if flags.strip() else []
