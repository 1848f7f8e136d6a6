# SPDX-License-Identifier: Apache-2.0
"""Puts knob values into the protobufs of model_repo and renders the files of a deployable repository."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from flashinfer_backend.config_tools import model_config
from flashinfer_backend.config_tools.knobs import (
    BLS,
    KNOBS,
    LLM,
    MODELS,
    POST,
    REPORT_OUTPUTS,
    SECOND_ENSEMBLE,
)

# The ensemble's outputs that every answer needs; the others are further reports.
_ANSWER_OUTPUTS = (
    *("text_output", "finish_reason", "batch_index", "sequence_index"),
    *("num_input_tokens", "num_output_tokens"),
)
HEADER = """\
# Generated; edit the knobs, not this file: the next build overwrites a changed one only with --force.
#   {command}
"""
COMMAND = ".venv/bin/python build.py"  # as README.md has it
# Around the engine's parameters in the llm model's defaults.
ENGINE_BEGIN = f"# The engine's, by `{COMMAND} --regenerate`; docs/knobs.md explains each.\n"
ENGINE_END = "# End of the engine's.\n"


def load_templates(model_repo: Path) -> dict[str, Any]:
    """ModelConfig of each model of a repository with the default names."""
    return {model: model_config.read(model_repo / model / "config.pbtxt") for model in MODELS}


def names_of(llm_name: str, model: str) -> dict[str, str]:
    """Names of a repository's models, by those in MODELS. model: of one of several models in a repository,
    whose ensemble has its name; its parts' names begin with it."""
    if model:
        return {part: model if part == "ensemble" else f"{model}_{part}" for part in MODELS}
    return {part: llm_name if part == LLM else part for part in MODELS}


def apply(configs: dict[str, Any], values: dict[str, str], llm_name: str, model_name: str = "") -> None:
    """Set every knob of a complete set of values in the ModelConfigs, and the models' names, in place. The
    names are those of `names_of`."""
    for knob in KNOBS:
        for model, field in knob.places:
            if field not in (REPORT_OUTPUTS, SECOND_ENSEMBLE):
                set_field(configs[model], field, values[knob.name])
            elif field == REPORT_OUTPUTS and values[knob.name] == "false":
                _drop_report_outputs(configs[model])
    names = names_of(llm_name, model_name)
    for part, config in configs.items():
        config.name = names[part]
    set_field(configs[POST], "parameters.llm_model_name", names[LLM])
    if names[POST] != POST:
        configs[LLM].parameters["postprocessing_model_name"].string_value = names[POST]
    for step in configs["ensemble"].ensemble_scheduling.step:
        step.model_name = names[step.model_name]


def _drop_report_outputs(ensemble: Any) -> None:
    """Leave out of the ensemble what none but reports need: outputs, and what llm's are mapped to them."""
    dropped = {output.name for output in ensemble.output} - set(_ANSWER_OUTPUTS)
    kept = [output for output in ensemble.output if output.name not in dropped]
    del ensemble.output[:]
    ensemble.output.extend(kept)
    for step in ensemble.ensemble_scheduling.step:
        for name in [name for name, tensor in step.output_map.items() if tensor in dropped]:
            del step.output_map[name]


def set_field(config: Any, field: str, text: str) -> None:
    """Set the field at a dotted path (see Knob.places) from its text.

    Raises KeyError for a parameter and IndexError for a repeated message that the config does not have:
    the templates hold every knob, so that a deployed file differs from them in values only.
    """
    *path, name = field.split(".")
    if path == ["parameters"]:
        if name not in config.parameters:
            raise KeyError(f"{config.name} has no parameter {name}")
        config.parameters[name].string_value = text
        return
    message = _inner(config, path)
    value = getattr(message, name)
    if isinstance(value, bool):
        setattr(message, name, text == "true")
    elif isinstance(value, int):
        setattr(message, name, int(text))
    else:
        value[:] = [int(part) for part in text.split(",")]


def _inner(config: Any, path: list[str]) -> Any:
    """The message that a path of fields leads to; a repeated one stands for its first element."""
    for part in path:
        config = getattr(config, part)
        if not isinstance(config, Message):
            config = config[0]
    return config


def with_engine_knobs(text: str, values: Mapping[str, str]) -> str:
    """The llm model's config.pbtxt with these values of the engine's knobs between its two marks.

    Raises ValueError where a mark is missing.
    """
    before, begin, rest = text.partition(ENGINE_BEGIN)
    _, end, after = rest.partition(ENGINE_END)
    if not begin or not end:
        raise ValueError(f"the llm model's config.pbtxt should have {ENGINE_BEGIN!r} and {ENGINE_END!r}")
    lines = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in values.items()
    ]
    return "".join([before, begin, *lines, end, after])


def render(
    model_repo: Path, values: dict[str, str], llm_name: str, command: str, model_name: str = ""
) -> dict[str, bytes]:
    """Content of each file of the repository, or of one of its several models (`names_of`), by path relative
    to it. Equal arguments give equal bytes."""
    configs = load_templates(model_repo)
    apply(configs, values, llm_name, model_name)
    files = {}

    def add(model: str, config: Any) -> None:
        text = HEADER.format(command=command) + "\n" + to_text(config)
        files[f"{config.name}/config.pbtxt"] = text.encode()
        for path in sorted((model_repo / model / "1").iterdir()):
            if path.is_file():
                files[f"{config.name}/1/{path.name}"] = path.read_bytes()

    for model, config in configs.items():
        add(model, config)
    if values[BLS] == "true":
        configs["ensemble"].name = BLS
        add("ensemble", configs["ensemble"])
    return files


def to_text(config: Any) -> str:
    """A ModelConfig as text: each input, output and parameter on one line, which makes --diff readable."""
    lines = []
    for field, value in config.ListFields():
        if isinstance(value, Message | str | int):
            single = type(config)(**{field.name: value})
            lines.append(text_format.MessageToString(single))
        elif isinstance(value, Mapping):
            singles = [type(config)(**{field.name: {key: value[key]}}) for key in sorted(value)]
            lines += [text_format.MessageToString(single, as_one_line=True) + "\n" for single in singles]
        else:
            singles = [type(config)(**{field.name: [item]}) for item in value]
            lines += [text_format.MessageToString(single, as_one_line=True) + "\n" for single in singles]
    return "".join(lines)
