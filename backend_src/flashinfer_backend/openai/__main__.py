# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API: starts an engine and serves it, without tritonserver."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from flashinfer_backend.config_tools.knobs import LLM
from flashinfer_backend.config_tools.model_config import read_parameters
from flashinfer_backend.config_tools.settings import check_parameters, engine_parameters
from flashinfer_backend.core.arguments import count, port_number, whole, whole_seconds
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import BUNDLED, resolve_model_dir, run_dir
from flashinfer_backend.openai.arguments import API_ARGUMENTS, AUTO, KEYS_VARIABLE
from flashinfer_backend.openai.parent import Parent, metrics_dir
from flashinfer_backend.openai.worker import WorkerOptions, check_packages, room_for_connections
from flashinfer_backend.transport.addresses import STALLED_S, AddressError, check_ports, resolve
from flashinfer_backend.transport.gpus import visible_devices
from flashinfer_backend.transport.restarts import RESTARTS


def main(argv: list[str] | None = None) -> int:
    program = "python -m flashinfer_backend.openai"
    parser = argparse.ArgumentParser(
        prog=program, usage=f"{program} --model DIR [options]", description=__doc__
    )
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument(
        "--model", metavar="DIR", help=f"a checkpoint folder, or {BUNDLED!r} for the small one"
    )
    engine.add_argument(
        "--beside",
        type=whole(1),
        metavar="PID",
        help="use the engine of the tritonserver with this process id (needs --llm-config)",
    )
    parser.add_argument(
        "--llm-config",
        type=Path,
        metavar="FILE",
        help="llm/config.pbtxt of a model repository that build.py wrote: with --beside that of the server,"
        " else the settings of the engine to start",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KNOB=VALUE",
        help="knobs of the engine to start (docs/knobs.md)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port_number, metavar="PORT", default=9000, help="default: 9000")
    for name, settings in API_ARGUMENTS.items():
        parser.add_argument(f"--{name}", **settings)
    parser.add_argument(
        "--restarts",
        type=count,
        metavar="N",
        default=RESTARTS,
        help="give up after a process was replaced so many times in a row and none lived for a minute;"
        " 0: never (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=whole_seconds,
        metavar="S",
        default=30,
        help="seconds that running requests may go on after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--stalled-client-seconds",
        type=whole_seconds,
        metavar="S",
        default=STALLED_S,
        help="cut a client that has read nothing of its answer for so many seconds; 0: never"
        " (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    try:
        check_packages()
        address = resolve(options.host)
        check_ports(address, {"OpenAI port": options.port})
        room_for_connections(options.max_connections)  # the processes inherit the limit
        config, folder, server = _engine(options)
        workers = _worker_options(options, config, folder, server)
        parent = Parent(
            workers,
            address,
            options.port,
            options.workers,
            options.stalled_client_seconds,
            options.restarts,
        )
        return parent.run()
    except (ValueError, OSError, AddressError) as error:
        print(f"openai: {error}", file=sys.stderr)
        return 1


def _engine(options: Any) -> tuple[EngineConfig, Path, int]:
    """The engine's settings, its run directory, and the process that it ends with."""
    if options.beside is not None:
        if options.llm_config is None or options.set:
            raise ValueError("--beside needs --llm-config, and no --set: the server has its own settings")
        name, parameters = _llm_parameters(options.llm_config)
        return EngineConfig.from_parameters(parameters), run_dir(options.beside, name), options.beside
    if (options.model is None) == (options.llm_config is None):
        raise ValueError("give one of --model DIR, --llm-config FILE and --beside PID")
    parameters = (
        _llm_parameters(options.llm_config)[1] if options.llm_config else {"model_dir": options.model}
    )
    config = EngineConfig.from_parameters(
        parameters | engine_parameters(options.set, {"model_dir": "--model"})
    )
    visible_devices(config, os.environ)  # raises what is wrong before a process is started
    return config, run_dir(os.getpid(), "openai"), os.getpid()


def _llm_parameters(file: Path) -> tuple[str, dict[str, str]]:
    """The llm model's name and parameters. Raises ValueError for those that nobody would look at."""
    name, parameters = read_parameters(file)
    check_parameters(parameters, LLM)
    return name, parameters


def _worker_options(options: Any, config: EngineConfig, folder: Path, server: int) -> WorkerOptions:
    checkpoint = resolve_model_dir(config.model_dir)
    name = BUNDLED if config.model_dir == BUNDLED else checkpoint.resolve().name
    if options.chat_template is not None and not options.chat_template.is_file():
        raise ValueError(f"--chat-template {options.chat_template}: there is no such file")
    formats = options.tool_format, options.reasoning_format
    if "harmony" in formats and not {"harmony", "none", AUTO} >= set(formats):
        raise ValueError(
            f"--tool-format {formats[0]} and --reasoning-format {formats[1]}: Harmony writes both, and all"
            " of an answer is read so; give harmony for both, or leave out the other one"
        )
    return WorkerOptions(
        engine=config,
        run_dir=str(folder),
        server_pid=server,
        follow=options.beside is not None,
        names=options.served_model_name or [name],
        template_file=str(options.chat_template.absolute()) if options.chat_template else None,
        created=int(time.time()),
        tool_format=options.tool_format,
        reasoning_format=options.reasoning_format,
        openai_defaults=options.default_sampling == "openai",
        keys=_keys(options.api_key_file),
        max_body_bytes=options.max_request_bytes,
        max_prompt_bytes=options.max_prompt_bytes,
        prompt_logits_bytes=options.prompt_logits_mib << 20,
        drain_s=options.drain_seconds,
        receive_s=options.receive_seconds,
        max_connections=options.max_connections,
        metrics_dir=str(metrics_dir()),
    )


def _keys(file: Path | None) -> list[str]:
    """Raises ValueError for a file without keys, which would let everybody in."""
    keys = os.environ.get(KEYS_VARIABLE, "").split(",")
    if file is not None:
        if not file.is_file():
            raise ValueError(f"--api-key-file {file} is no file; it should name one with a key a line")
        found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        found = [line for line in found if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {file} holds no key; write one a line")
        keys += found
    return [key.strip() for key in keys if key.strip()]


if __name__ == "__main__":
    sys.exit(main())
