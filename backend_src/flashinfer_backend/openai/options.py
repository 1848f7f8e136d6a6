# SPDX-License-Identifier: Apache-2.0
"""From the API's arguments (openai/arguments.py) to what its processes are told."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_backend.config_tools.knobs import LLM
from flashinfer_backend.config_tools.model_config import ENSEMBLE, ensembles, read_parameters
from flashinfer_backend.config_tools.settings import check_parameters
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import BUNDLED, processes_dir, resolve_model_dir
from flashinfer_backend.core.processes import usable_cores
from flashinfer_backend.openai.arguments import AUTO, KEYS_VARIABLE
from flashinfer_backend.openai.model import Model, WorkerOptions
from flashinfer_backend.openai.supervisor import metrics_dir

# An engine of 8B on an H200 makes some 25 000 tokens/s. Four processes carry them with a quarter of a core
# each, so that a request's first token waits for few others.
WORKERS_PER_ENGINE = 4
CORES_PER_WORKER = 4  # the others are for engines, tritonserver and tokenizers


def llm_parameters(file: Path) -> tuple[str, dict[str, str]]:
    """The llm model's name and parameters. Raises ValueError for unused ones."""
    name, parameters = read_parameters(file)
    check_parameters(parameters, LLM)
    return name, parameters


def built_name(file: Path, llm_name: str) -> str:
    """The name that build.py was given for the model of a repository's llm model, that of its ensemble; empty
    where it was given none. file: the llm model's config.pbtxt."""
    found = ensembles(file.absolute().parents[1])
    name = next((name for name, steps in found.items() if llm_name in steps), ENSEMBLE)
    return "" if name == ENSEMBLE else name


def worker_count(options: Any, configs: Sequence[EngineConfig]) -> int:
    """How many processes the API has: as many as asked for, else as its engines and cores can use. An engine
    on the CPU needs the cores itself."""
    if options.workers is not None:
        return int(options.workers)
    if options.store_mib or any(config.device == "cpu" for config in configs):
        return 1
    engines = sum(config.replicas for config in configs)
    return max(1, min(WORKERS_PER_ENGINE * engines, usable_cores() // CORES_PER_WORKER))


def worker_options(
    options: Any, models: Sequence[tuple[str, EngineConfig, Path]], server: int, drain_s: int
) -> WorkerOptions:
    """options: the parsed API_ARGUMENTS. models: name, settings and run directory of each; an empty name is
    that of its checkpoint. server: the process that the run directories are named by. Takes the keys out of
    this process's environment, so that no process that it starts has them. Raises ValueError or OSError."""
    lora_root = _lora_root(options.lora_root, [config for _, config, _ in models])
    served = [
        Model(
            options.served_model_name or [name or _checkpoint_name(config)], config, str(folder),
            created=int(time.time()),
            template_file=str(options.chat_template.absolute()) if options.chat_template else None,
            tool_format=options.tool_format, reasoning_format=options.reasoning_format,
            openai_defaults=options.default_sampling == "openai", ignore_effort=options.ignore_effort,
            lora_root=lora_root, max_prompt_bytes=options.max_prompt_bytes,
        )
        for name, config, folder in models
    ]  # fmt: skip
    if len(served) > 1:
        has = "the repository has several models, " + ", ".join(model.names[0] for model in served)
        if options.served_model_name:
            raise ValueError(f"--served-model-name: {has}, and each has the name that build.py was given")
        if options.chat_template is not None:
            raise ValueError(f"--chat-template: {has}; put chat_template.jinja into a checkpoint's folder")
    _check_names(served)
    if options.chat_template is not None and not options.chat_template.is_file():
        raise ValueError(f"--chat-template {options.chat_template}: there is no such file")
    formats = options.tool_format, options.reasoning_format
    if "harmony" in formats and not {"harmony", "none", AUTO} >= set(formats):
        raise ValueError(
            f"--tool-format {formats[0]} and --reasoning-format {formats[1]}: Harmony writes both, and all"
            " of an answer is read so; give harmony for both, or leave out the other one"
        )
    if options.store_mib and (options.workers or 1) > 1:
        raise ValueError(
            f"--store-mib {options.store_mib} with {options.workers} processes: a response is kept by the"
            " process that made it, and the next request can come to another one; use one process"
        )
    return WorkerOptions(
        models=served,
        allowed_origins=options.allowed_origins or [],
        keys=_keys(options.api_key_file),
        max_body_bytes=options.max_request_bytes,
        store_bytes=options.store_mib << 20,
        drain_s=drain_s,
        receive_s=options.receive_seconds,
        max_connections=options.max_connections,
        metrics_dir=str(metrics_dir()),
        apis=str(processes_dir(server)),
    )


def _checkpoint_name(config: EngineConfig) -> str:
    folder = resolve_model_dir(config.model_dir)
    return BUNDLED if config.model_dir == BUNDLED else folder.resolve().name


def _check_names(served: Sequence[Model]) -> None:
    """Raises ValueError where a request's `model` could mean two models or adapters."""
    adapters = [model.engine.lora_modules for model in served]
    names = [name for model in served for name in model.names]
    names += [name for modules in adapters if modules != "none" for name in modules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"two models or adapters (lora_modules) are called {twice[0]}, and requests to the OpenAI API"
            " name one; give each a different name"
        )


def _lora_root(root: Path | None, configs: Sequence[EngineConfig]) -> str | None:
    if root is None:
        return None
    if not any(config.max_loras for config in configs):
        raise ValueError("--lora-root needs a model that was built with max_loras")
    if not root.is_dir():
        raise ValueError(f"--lora-root {root}: there is no such folder")
    return str(root.resolve())


def _keys(file: Path | None) -> list[str]:
    """Raises ValueError for a file without keys, which would let everyone in."""
    keys = os.environ.pop(KEYS_VARIABLE, "").split(",")
    if file is not None:
        if not file.is_file():
            raise ValueError(f"--api-key-file {file} is no file; it should name one with a key a line")
        found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        found = [line for line in found if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {file} holds no key; write one a line")
        keys += found
    return [key.strip() for key in keys if key.strip()]
