# SPDX-License-Identifier: Apache-2.0
"""From the user's settings to one value for every knob. Problems are collected, not raised one by one."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flashinfer_backend.config_tools.knobs import BY_NAME, KNOBS, LLM, POST, TRT_LLM
from flashinfer_backend.config_tools.trt_names import FOREIGN, refusal
from flashinfer_backend.core.config import EngineConfig, auto_queue_size

# Parameters of a config.pbtxt that are no knobs: of Triton, of its Python backend, and names of other models.
TRITONS_OWN = ("FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH", "TRITON_BATCH_STRATEGY_PATH")
OWN_NAMES = {LLM: ("postprocessing_model_name",), POST: ("llm_model_name",)}
# What auto means of knobs that follow from others, or from the llm model's name. Their order counts: one can
# follow from one above it.
FOLLOWING: dict[str, Callable[[Mapping[str, str], str], str]] = {
    "tokenizer_dir": lambda values, _: values["model_dir"],
    "max_queue_size": lambda values, _: str(auto_queue_size(int(values["max_num_seqs"]))),
    "preferred_batch_size": lambda values, _: values["triton_max_batch_size"],
    "llm_preferred_batch_size": lambda values, _: values["preferred_batch_size"],
    "streamed_log_probs": lambda _, llm_name: "all" if llm_name == TRT_LLM else "chunk",
}


def read_profile(path: Path, problems: list[str]) -> list[tuple[str, str]]:
    """(knob, value as text) pairs of the [knobs] table of a TOML file."""
    try:
        data = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        problems.append(f"profile {path}: cannot be read: {error.strerror}")
        return []
    except (ValueError, msgspec.DecodeError) as error:
        problems.append(f"profile {path}: is not valid TOML: {error}")
        return []
    knobs = data.pop("knobs", None)
    if data or not isinstance(knobs, dict):
        found = f"; found also {', '.join(sorted(data))}" if data else ""
        problems.append(f"profile {path}: should hold one table, [knobs]{found}")
        return []
    pairs = []
    for name, value in knobs.items():
        text = _toml_text(value)
        if text is None:
            problems.append(
                f"profile {path}: {name} should be a string, number, boolean or list of integers, "
                f"not {type(value).__name__}"
            )
        else:
            pairs.append((name, text))
    return pairs


def _toml_text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str):
        return str(value)
    if isinstance(value, list) and all(type(item) is int for item in value):
        return ",".join(map(str, value))
    return None


def engine_parameters(assignments: Iterable[str], own_options: Mapping[str, str]) -> dict[str, str]:
    """Parameters of an engine that runs without Triton, from the knob=value texts of `--set`, with the
    meaning that they have for build.py. own_options: knob -> the program's option for it. Raises ValueError
    that lists all problems."""
    problems: list[str] = []
    pairs = split_assignments(assignments, problems)
    chosen = parse_pairs(pairs, "--set", problems, unset=True, see="docs/knobs.md has all")
    for name in chosen:
        if name in own_options:
            problems.append(f"--set {name}: should be given as {own_options[name]}")
        elif name not in EngineConfig.__struct_fields__:
            problems.append(f"--set {name}: is no knob of the engine, which runs without Triton here")
    if problems:
        raise ValueError("; ".join(problems))
    return chosen


def split_assignments(assignments: Iterable[str], problems: list[str]) -> list[tuple[str, str]]:
    """(knob, value) pairs of "knob=value" texts."""
    pairs = []
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if equals:
            pairs.append((name.strip(), value.strip()))
        else:
            problems.append(f"--set {assignment}: should be knob=value")
    return pairs


def parse_pairs(
    pairs: Iterable[tuple[str, str]],
    source: str,
    problems: list[str],
    unset: bool = False,
    see: str = "--list-knobs shows all",
) -> dict[str, str]:
    """Checked values by knob name. Unknown names, bad values and a knob set twice are problems. unset: an
    empty value is also one. see: where all knobs are listed."""
    values: dict[str, str] = {}
    for name, text in pairs:
        if name in FOREIGN:
            if reason := refusal(name, text.strip()):
                problems.append(f"{source}: {name}={text}: {reason}")
            continue
        if name not in BY_NAME:
            problems.append(f"{source}: unknown knob {name!r}{_did_you_mean(name, see)}")
            continue
        knob = BY_NAME[name]
        try:
            value = knob.parse(text) if text or not unset else ""
        except ValueError as error:
            problems.append(f"{source}: {name}={text}: {error}{_instead(knob.name, text)}")
            continue
        if values.setdefault(knob.name, value) != value:
            problems.append(f"{source}: {name}={text}: already set to {values[knob.name]}; set it once")
    return values


def check_parameters(parameters: Mapping[str, str], model: str) -> None:
    """Raises ValueError for unused parameters of a model's config.pbtxt. TensorRT-LLM's other names may have
    values that ask for what happens anyway. The readers of knobs check their values. model: one of MODELS."""
    problems = []
    for name, text in parameters.items():
        place = f"parameter {name} of the {model} model is {text!r}"
        knob = BY_NAME.get(name)
        if name in TRITONS_OWN or name in OWN_NAMES.get(model, ()):
            continue
        if name in FOREIGN:
            if reason := refusal(name, text):
                problems.append(f"{place}: {reason}")
        elif knob is None:
            problems.append(f"{place}, which has no effect{_did_you_mean(name, 'docs/knobs.md has all')}")
        elif (model, f"parameters.{name}") not in knob.places:
            there = f"build.py --set {name}={text} writes it where it is"
            problems.append(f"{place}, which has no effect there: {there}")
        elif name == "gpt_model_type":  # not checked elsewhere, since it has one meaning
            try:
                knob.parse(text)
            except ValueError as error:
                problems.append(f"{place}; it {error}{_instead(knob.name, text)}")
    if problems:
        raise ValueError("; ".join(problems))


def complete(chosen: dict[str, str], llm_name: str = LLM) -> dict[str, str]:
    """A value for every knob: the chosen ones, defaults, and for auto what follows from these (FOLLOWING)."""
    values = {knob.name: chosen.get(knob.name, knob.default) for knob in KNOBS}
    for name, meant in FOLLOWING.items():
        if values[name] == "auto":
            values[name] = meant(values, llm_name)
    return values


def _did_you_mean(name: str, otherwise: str) -> str:
    close = difflib.get_close_matches(name, [*BY_NAME, *FOREIGN], n=2)
    return f"; did you mean {' or '.join(close)}?" if close else f"; {otherwise}"


def _instead(name: str, text: str) -> str:
    """What to add where a refused value has a meaning in TensorRT-LLM."""
    if name == "batching_strategy" and text.lower() == "v1":
        return "; static batching is not supported"
    return ""
