# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API beside tritonserver: a process that uses the same engine (openai/parent.py)."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

from flashinfer_backend.config_tools.model_config import read_parameters
from flashinfer_backend.core.arguments import port_number
from flashinfer_backend.core.parent import end_with_parent
from flashinfer_backend.openai.arguments import API_ARGUMENTS, CONNECTIONS
from flashinfer_backend.openai.worker import check_packages, room_for_connections
from flashinfer_backend.serve.preflight import ServeError
from flashinfer_backend.transport.addresses import Address, reachable_at

PREFIX = "--openai-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--openai-port and what belongs to it."""
    group = parser.add_argument_group("the OpenAI API, on the same engine")
    group.add_argument(
        "--openai-port", type=port_number, metavar="PORT", help="default: there is no such API"
    )
    for name, settings in API_ARGUMENTS.items():
        group.add_argument(PREFIX + name, **{**settings, "default": None})  # the API has its own


class OpenAiDoor:
    """The API's process, or none."""

    def __init__(self, options: argparse.Namespace, address: Address) -> None:
        """options: the launcher's. Raises ServeError."""
        self.port: int | None = options.openai_port
        self.url = "" if self.port is None else reachable_at(address, self.port)  # on this machine
        self._process: subprocess.Popen[bytes] | None = None
        self._drain_s = 0
        self._asked_at = 0.0  # when the process was told to end; 0: not yet
        given = {name: getattr(options, f"openai_{name.replace('-', '_')}") for name in API_ARGUMENTS}
        self._arguments = [
            word
            for name, value in given.items()
            if value is not None
            for each in (value if isinstance(value, list) else [value])
            for word in (f"--{name}", str(each))
        ]
        if self.port is None:
            if self._arguments:
                raise ServeError(f"{PREFIX}{self._arguments[0][2:]} needs --openai-port")
            return
        try:
            check_packages()
            room_for_connections(given[CONNECTIONS] or 0)  # the API's processes inherit the limit
        except ValueError as error:
            raise ServeError(f"--openai-port: {error}") from None
        self._arguments += ["--host", str(address), "--port", str(self.port)]
        self._drain_s = math.ceil(options.drain_seconds)
        self._arguments += ["--drain-seconds", str(self._drain_s)]
        self._arguments += ["--restarts", str(options.restarts)]
        self._arguments += ["--stalled-client-seconds", str(options.stalled_client_seconds)]

    def configure(self, repository: Path) -> None:
        """Finds the engine's settings in the model repository. Raises ServeError."""
        if self.port is not None:
            self._arguments += ["--llm-config", str(_llm_config(repository))]

    def start(self, server_pid: int) -> None:
        """Opens the API on the engine of the server with this pid. It ends with the server, and with us."""
        if self.port is not None:
            command = [sys.executable, "-m", "flashinfer_backend.openai", "--beside", str(server_pid)]
            self._process = subprocess.Popen(
                [*command, *self._arguments], start_new_session=True, preexec_fn=end_with_parent
            )

    @property
    def status(self) -> int | None:
        """Exit status of the process; None while it runs, and where there is none."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Has it end; running requests have the time for it that those of the server have."""
        if self._process is not None:
            self._asked_at = self._asked_at or time.monotonic()
            self._process.terminate()

    def close(self) -> None:
        """The server has ended: waits for the process, which ends with it."""
        self.terminate()
        if self._process is not None:
            left = self._asked_at + self._drain_s - time.monotonic()
            try:
                self._process.wait(max(left, 0.0) + 1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _llm_config(repository: Path) -> Path:
    """The config.pbtxt of the model that has the engine. Raises ServeError."""
    found = [file for file in sorted(repository.glob("*/config.pbtxt")) if _has_engine(file)]
    if len(found) != 1:
        names = ", ".join(file.parent.name for file in found) or "none"
        raise ServeError(
            f"--openai-port needs one model with an engine (a parameter model_dir) in {repository}; it has"
            f" {names}"
        )
    return found[0]


def _has_engine(file: Path) -> bool:
    try:
        return "model_dir" in read_parameters(file)[1]
    except ValueError as error:
        raise ServeError(str(error)) from None
