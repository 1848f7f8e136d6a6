# SPDX-License-Identifier: Apache-2.0
"""The string parameters of a Triton model's config.pbtxt."""

import json
from typing import Any

from flashinfer_backend.config_tools.knobs import BY_NAME
from flashinfer_backend.config_tools.model_config import set_parameters
from flashinfer_backend.config_tools.settings import check_parameters
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.text.tokenizer import TextTokenizer


def read_parameters(model_config: str, model: str) -> dict[str, str]:
    """Parameters of a model configuration (JSON, as Triton hands it to initialize()) that are set. model: one
    of MODELS. Raises ValueError for unused ones."""
    parameters = json.loads(model_config).get("parameters", {})
    found = set_parameters({name: value["string_value"] for name, value in parameters.items()})
    check_parameters(found, model)
    return found


def knob_value(parameters: dict[str, str], name: str) -> Any:
    """The value of a knob, its default where the parameter is unset: a bool, an int or a text. Raises
    ValueError for what the knob does not take."""
    knob = BY_NAME[name]
    text = parameters.get(name, knob.default)
    try:
        value = knob.parse(text)
    except ValueError as error:
        raise ValueError(f"parameter {name} is {text!r}; it {error}") from None
    if knob.values.kind == "bool":
        return value == "true"
    return int(value) if knob.values.kind == "int" else value


def read_tokenizer(parameters: dict[str, str]) -> TextTokenizer:
    """The tokenizer in the folder that tokenizer_dir names. Raises ValueError where it is unset, and what
    TextTokenizer raises."""
    if "tokenizer_dir" not in parameters:
        raise ValueError(
            "parameter tokenizer_dir is not set; it should be the folder of the tokenizer, or 'bundled'"
        )
    return TextTokenizer(resolve_model_dir(parameters["tokenizer_dir"]))
