# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API next to tritonserver, on the same engines (openai/supervisor.py)."""

import argparse
import math
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from flashinfer_backend.config_tools.model_config import read_parameters
from flashinfer_backend.core.arguments import port_number
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.output import say
from flashinfer_backend.core.paths import run_dir
from flashinfer_backend.launch.preflight import ServeError
from flashinfer_backend.openai.arguments import API_ARGUMENTS, CONNECTIONS, KEYS_VARIABLE
from flashinfer_backend.openai.model import check_packages, room_for_connections
from flashinfer_backend.openai.options import built_name, llm_parameters, worker_count, worker_options
from flashinfer_backend.openai.supervisor import Supervisor
from flashinfer_backend.transport.addresses import Address, reachable_at

PREFIX = "--openai-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the OpenAI API, on the same engine")
    group.add_argument(
        "--openai-port", type=port_number, metavar="PORT", help="default: there is no such API"
    )
    for name, settings in API_ARGUMENTS.items():
        # None: not given. Its help says the default.
        group.add_argument(PREFIX + name, **{**settings, "default": None})


class OpenAiApi:
    """The API's processes, which a separate thread keeps running independently of tritonserver, or none."""

    def __init__(self, options: argparse.Namespace, address: Address) -> None:
        """options: the launcher's. Raises ServeError."""
        self.port: int | None = options.openai_port
        self.url = "" if self.port is None else reachable_at(address, self.port)  # on this machine
        self.failed = False  # the API could not serve and was given up
        self._address = address
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._drain_s = math.ceil(options.drain_seconds) if self.port is not None else 0
        self._stalled_s = options.stalled_client_seconds if self.port is not None else 0
        given = {name: getattr(options, f"openai_{name.replace('-', '_')}") for name in API_ARGUMENTS}
        if self.port is None:
            os.environ.pop(KEYS_VARIABLE, None)  # no process needs it
            for name, value in given.items():
                if value is not None:
                    raise ServeError(f"{PREFIX}{name} needs --openai-port")
            return
        self._options = argparse.Namespace(
            **{
                name.replace("-", "_"): API_ARGUMENTS[name].get("default") if value is None else value
                for name, value in given.items()
            }
        )
        try:
            check_packages()
            room_for_connections(given[CONNECTIONS] or 0)  # the API's processes inherit the limit
        except ValueError as error:
            raise ServeError(f"--openai-port: {error}") from None

    def configure(self, repository: Path) -> None:
        """Finds the models and their engines' settings in the model repository. Raises ServeError."""
        if self.port is None:
            return
        serve, models = os.getpid(), []
        try:
            files = sorted(repository.glob("*/config.pbtxt"))
            with_engine = [file for file in files if "model_dir" in read_parameters(file)[1]]
            if not with_engine:
                raise ValueError(f"no model in {repository} has an engine (a parameter model_dir)")
            for file in with_engine:
                llm_name, parameters = llm_parameters(file)
                config = EngineConfig.from_parameters(parameters)
                models.append((built_name(file, llm_name), config, run_dir(serve, llm_name)))
            told = worker_options(self._options, models, serve, self._drain_s)
        except (ValueError, OSError) as error:
            raise ServeError(f"--openai-port: {error}") from None
        self._supervisor = Supervisor(
            told,
            self._address,
            self.port,
            worker_count(self._options, [config for _, config, _ in models]),
            self._stalled_s,
        )

    def start(self, told: Callable[[bool, int], None]) -> None:
        """Opens the API. It ends with this process. told: as Supervisor.run has it."""
        if self._supervisor is not None:
            self._thread = threading.Thread(target=self._run, args=(told,), name="OpenAI API", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Has it end; running requests have the time for it that those of the server have."""
        if self._supervisor is not None:
            self._supervisor.stop()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self, told: Callable[[bool, int], None]) -> None:
        assert self._supervisor is not None
        try:
            self.failed = self._supervisor.run(told) != 0
        except Exception as error:
            if not isinstance(error, OSError):
                traceback.print_exc()
            say(f"serve: the OpenAI API: {error}")
            self.failed = True
