# SPDX-License-Identifier: Apache-2.0
"""Reads config.pbtxt files."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENSEMBLE = "ensemble"  # where a repository has one model without a name


def read(file: Path) -> Any:
    """The ModelConfig of a config.pbtxt. Fields that our release of the format does not know are left out:
    the server that serves the file may be newer. Raises OSError, and ValueError for other content."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2  # brings grpc in, which few callers need otherwise

    try:
        text = file.read_text(encoding="utf-8")
        return text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except (text_format.ParseError, UnicodeError) as error:
        raise ValueError(f"{file} is not a model's configuration: {error}") from None


def read_parameters(file: Path) -> tuple[str, dict[str, str]]:
    """(the model's name, its string parameters that are set) of a config.pbtxt. Raises as `read` does."""
    config = read(file)
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    return config.name or file.parent.name, set_parameters(parameters)


def ensembles(repository: Path) -> dict[str, list[str]]:
    """The ensembles of a model repository, each with the models of its steps; one of those with the same
    steps. Files that cannot be read have none: tritonserver says what is wrong with them."""
    found: dict[tuple[str, ...], str] = {}
    for file in sorted(repository.glob("*/config.pbtxt")):
        with contextlib.suppress(OSError, ValueError):
            config = read(file)
            steps = tuple(step.model_name for step in config.ensemble_scheduling.step)
            if steps and found.get(steps) != ENSEMBLE:
                found[steps] = config.name or file.parent.name
    return {name: list(steps) for steps, name in found.items()}


def set_parameters(texts: Mapping[str, str]) -> dict[str, str]:
    """Parameters that are set: neither empty nor still an unfilled `${...}`."""
    stripped = {name: text.strip() for name, text in texts.items()}
    return {name: text for name, text in stripped.items() if text and not text.startswith("${")}
