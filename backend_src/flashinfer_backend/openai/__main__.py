# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API: starts an engine and serves it, without tritonserver."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from flashinfer_backend.config_tools.settings import engine_parameters
from flashinfer_backend.core.arguments import count, port_number, program, whole_seconds
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import BUNDLED, run_dir
from flashinfer_backend.openai.arguments import API_ARGUMENTS
from flashinfer_backend.openai.model import check_packages, room_for_connections
from flashinfer_backend.openai.options import built_name, llm_parameters, worker_count, worker_options
from flashinfer_backend.openai.supervisor import Supervisor
from flashinfer_backend.transport.addresses import STALLED_S, check_ports, resolve
from flashinfer_backend.transport.keeper_handle import EngineStartError, KeeperHandle
from flashinfer_backend.transport.restarts import RESTARTS


def main(argv: list[str] | None = None) -> int:
    parser = program("flashinfer_backend.openai", __doc__, "--model DIR [options]")
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument(
        "--model", metavar="DIR", help=f"a checkpoint folder, or {BUNDLED!r} for the small one"
    )
    engine.add_argument(
        "--llm-config", type=Path, metavar="FILE",
        help="llm/config.pbtxt of a model repository that build.py wrote: the engine's settings",
    )  # fmt: skip
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE",
        help="knobs of the engine to start (docs/knobs.md)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port_number, metavar="PORT", default=9000, help="default: 9000")
    for name, settings in API_ARGUMENTS.items():
        parser.add_argument(f"--{name}", **settings)
    parser.add_argument(
        "--restarts", type=count, metavar="N", default=RESTARTS,
        help="give up after a process was restarted N times in a row without living for a minute;"
        " 0: never (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-seconds", type=whole_seconds, metavar="S", default=30,
        help="seconds that running requests can go on after SIGTERM (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--stalled-client-seconds", type=whole_seconds, metavar="S", default=STALLED_S,
        help="cut a client that has read nothing of its answer for S seconds; 0: never"
        " (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        check_packages()
        address = resolve(options.host)
        check_ports(address, {"OpenAI port": options.port})
        room_for_connections(options.max_connections)  # the processes inherit the limit
        name, config = _engine(options)
        owner = os.getpid()
        folder = run_dir(owner, "openai")
        supervisor = Supervisor(
            worker_options(options, [(name, config, folder)], owner, options.drain_seconds),
            address,
            options.port,
            worker_count(options, [config]),
            options.stalled_client_seconds,
            options.restarts,
            KeeperHandle(folder, owner, config, stays=True),
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, supervisor.stop)
        return supervisor.run()
    except (ValueError, OSError, EngineStartError) as error:
        print(f"openai: {error}", file=sys.stderr)
        return 1


def _engine(options: Any) -> tuple[str, EngineConfig]:
    """The name of the model to start, empty without one, and its engine's settings."""
    if (options.model is None) == (options.llm_config is None):
        raise ValueError("give one of --model DIR and --llm-config FILE")
    name, parameters = "", {"model_dir": options.model}
    if options.llm_config:
        llm_name, parameters = llm_parameters(options.llm_config)
        name = built_name(options.llm_config, llm_name)
    config = EngineConfig.from_parameters(
        parameters | engine_parameters(options.set, {"model_dir": "--model"})
    )
    return name, config


if __name__ == "__main__":
    sys.exit(main())
