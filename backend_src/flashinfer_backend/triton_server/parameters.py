# SPDX-License-Identifier: Apache-2.0
"""The string parameters of a Triton model's config.pbtxt."""

import json

from flashinfer_backend.config_tools.knobs import BY_NAME
from flashinfer_backend.config_tools.model_config import set_parameters
from flashinfer_backend.config_tools.settings import check_parameters
from flashinfer_backend.core.values import Values


def read_parameters(model_config: str, model: str) -> dict[str, str]:
    """Parameters of a model configuration (JSON, as Triton hands it to initialize()) that are set. model: one
    of MODELS. Raises ValueError for unused ones."""
    parameters = json.loads(model_config).get("parameters", {})
    found = set_parameters({name: value["string_value"] for name, value in parameters.items()})
    check_parameters(found, model)
    return found


def required_parameter(parameters: dict[str, str], name: str, meaning: str) -> str:
    """A parameter that has no default. Raises ValueError when it is unset."""
    if name not in parameters:
        raise ValueError(f"parameter {name} is not set; it should be {meaning}")
    return parameters[name]


def choice_parameter(parameters: dict[str, str], name: str, words: tuple[str, ...]) -> str:
    """A parameter that is one of `words`, the first when unset. Raises ValueError for anything else."""
    text = parameters.get(name, words[0])
    if text not in words:
        raise ValueError(f"parameter {name} is {text!r}; it should be {' or '.join(words)}")
    return text


def number_parameter(parameters: dict[str, str], name: str, default: int) -> int:
    """A whole number within the bounds of the knob of that name. Raises ValueError for anything else."""
    if name not in parameters:
        return default
    try:
        return int(BY_NAME[name].parse(parameters[name]))
    except ValueError as error:
        raise ValueError(f"parameter {name} is {parameters[name]!r}; it {error}") from None


def flag_parameter(parameters: dict[str, str], name: str, default: bool) -> bool:
    """A boolean parameter, in the words of knobs. Raises ValueError for anything else."""
    if name not in parameters:
        return default
    try:
        return Values("bool").parse(parameters[name]) == "true"
    except ValueError as error:
        raise ValueError(f"parameter {name} is {parameters[name]!r}; it {error}") from None
