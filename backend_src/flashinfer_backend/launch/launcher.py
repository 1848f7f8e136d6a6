# SPDX-License-Identifier: Apache-2.0
"""Runs tritonserver on a model repository in the foreground.

Finds the server (NVIDIA's image, or the wheel nvidia-pytriton), gives it the environment that its
Python backend needs, and says when it is ready. The server ends with this process.
"""

import argparse
import contextlib
import math
import os
import secrets
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from flashinfer_backend.config_tools.model_config import ensembles
from flashinfer_backend.core.arguments import count, port_number, program, seconds, whole_seconds
from flashinfer_backend.core.bounds import MIB
from flashinfer_backend.core.headers import forwarding
from flashinfer_backend.core.paths import unservable
from flashinfer_backend.launch.openai_api import OpenAiApi, add_arguments
from flashinfer_backend.launch.preflight import (
    Installation,
    ServeError,
    check_batch_sizes,
    check_numpy,
    check_open_files,
    check_ordering,
    environment,
    find_server,
    serving,
)
from flashinfer_backend.launch.server_run import DRAIN_S, Policy
from flashinfer_backend.launch.watchdog import Watchdog
from flashinfer_backend.transport.addresses import STALLED_S, Address, AddressError, check_ports, resolve
from flashinfer_backend.transport.restarts import RESTARTS

# The APIs through which a client could read other clients' requests in shared memory, or write files on this
# machine. The server refuses them to all clients, unless they are opened by name.
CLOSED = ("shared-memory", "trace", "logging")
# The server opens an API to clients that send a header, and every local user can read its name and value on
# the command line. No client can send this one: HTTP's names end at the colon, gRPC's have no capitals.
UNSENDABLE = "Closed:to-everybody=no"


def command(
    server: Installation,
    repository: Path,
    address: Address,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    opened: Collection[str] = (),
    drain_s: float = DRAIN_S,
    shm_prefix: str = "",
) -> list[str]:
    """Command line of the server for a model repository. opened: those of CLOSED that clients may use.
    drain_s: how long running requests may go on after SIGTERM. shm_prefix: of the names of its shared memory.
    """
    v6 = address.version == 6
    http, grpc = (f"ipv6:{address}", f"[{address}]") if v6 else (str(address), str(address))
    args = [
        str(server.binary),
        *("--model-repository", str(repository)),
        *("--model-control-mode", "none"),  # no client loads models, all can list them
        *("--disable-auto-complete-config",),  # a process more for each model, only to learn nothing new
        *("--reuse-http-port", "true"),  # with the maintenance server
        *("--exit-timeout-secs", str(math.ceil(drain_s) + 1)),
    ]
    if closed := ",".join(name for name in CLOSED if name not in opened):
        args += ["--http-restricted-api", f"{closed}:{UNSENDABLE}"]
        args += ["--grpc-restricted-protocol", f"{closed}:{UNSENDABLE}"]
    for name, at, port in (
        ("http", http, http_port), ("grpc", grpc, grpc_port), ("metrics", http, metrics_port),
    ):  # fmt: skip
        args += [f"--{name}-address", at, f"--{name}-port", str(port)]
    if shm_prefix:
        args += ["--backend-config", f"python,shm-region-prefix-name={shm_prefix}"]
    if server.backends is not None:
        args += ["--backend-directory", str(server.backends)]
    if shutil.which("nvidia-smi") is None:
        args += ["--allow-gpu-metrics", "false"]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = program("flashinfer_backend.serve", __doc__, "--model-repository DIR [options]")
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR", required=True, help="a folder that build.py wrote"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, IPv4, IPv6 or a name (default: 127.0.0.1, this machine only)",
    )
    port: dict[str, Any] = {"type": port_number, "metavar": "PORT", "help": "default: %(default)s"}
    parser.add_argument("--http-port", default=8000, **port)
    parser.add_argument("--grpc-port", default=8001, **port)
    parser.add_argument("--metrics-port", default=8002, **port)
    parser.add_argument(
        "--backends", type=Path, metavar="DIR", help="where to copy the Python backend (default: in ~/.cache)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check that the server could start, then end; the repository need not exist yet",
    )
    parser.add_argument(
        "--open", action="append", choices=CLOSED, default=[],
        help="open an API that is closed by default (docs/security.md); repeat it for several",
    )  # fmt: skip
    parser.add_argument(
        "--drain-seconds", type=seconds, metavar="S", default=DRAIN_S,
        help="seconds that running requests can go on after SIGTERM (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--restarts", type=count, metavar="N", default=RESTARTS,
        help="give up after tritonserver was restarted N times in a row without living for a"
        " minute; 0: never (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--restart-after-growth", type=count, default=quarter_of_memory(), metavar="MIB",
        help="restart tritonserver when its memory has grown by MIB since it was ready; 0: never (default:"
        " a quarter of this machine's memory, %(default)s MiB; docs/security.md says why it grows)",
    )  # fmt: skip
    parser.add_argument(
        "--stalled-client-seconds", type=whole_seconds, metavar="S", default=STALLED_S,
        help="cut a client of either API that has read nothing of its answer for S seconds; 0: never"
        " (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--shm-prefix", metavar="NAME", default=f"flashinfer-backend-{os.getpid()}-{secrets.token_hex(8)}_",
        help="beginning of the names of this server's shared memory, which is removed when the server has"
        " ended; it must differ from other servers' (default: the process's number and a random one)",
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("server_args", nargs="*", help="after --: further arguments for tritonserver")
    return parser


def quarter_of_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """In MiB, of the machine's memory, or of its container's where that has less. groups: control groups."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # none, or max
            least = min(least, int((groups / name).read_text()))
    return least // 4 // MIB


def _check_models(path: Path) -> None:
    """Raise ServeError for a folder without models: tritonserver would be ready, and serve none."""
    try:
        next(path.iterdir(), None)  # glob takes a folder that cannot be read for an empty one
    except OSError as error:
        raise ServeError(str(error)) from None
    if not any(path.glob("*/config.pbtxt")) and not any(path.glob("*/[0-9]*")):
        model = f" --model {path}" if (path / "config.json").is_file() else ""
        raise ServeError(
            f"{path} is not a model repository: no folder in it has a config.pbtxt or a version. Write one"
            f" with build.py --output DIR{model}"
        )


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    repository: Path = options.model_repository
    try:
        if not options.check and not repository.is_dir():
            raise ServeError(f"no folder {repository}: write one with build.py --output")
        server = find_server(options.backends)
        if options.backends is not None and server.backends is None:
            raise ServeError(
                f"--backends is where the wheel's Python backend is copied to, and {server.binary} has its"
                " own: leave it out"
            )
        for place in (repository, server.backends):
            if place is not None and (reason := unservable(place)):
                raise ServeError(reason)
        if not options.check:
            _check_models(repository)
        ports = {
            "HTTP port": options.http_port,
            "gRPC port": options.grpc_port,
            "metrics port": options.metrics_port,
        }
        address = resolve(options.host)
        openai_api = OpenAiApi(options, address)
        ports |= {"OpenAI port": openai_api.port} if openai_api.port is not None else {}
        check_ports(address, ports)
        check_numpy(server, np.__version__)
        check_open_files()
        env = environment(server)
        if options.check:
            return 0
        check_batch_sizes(repository)
        check_ordering(server, repository)
        args = command(
            server, repository, address, options.http_port, options.grpc_port, options.metrics_port,
            opened=options.open, drain_s=options.drain_seconds, shm_prefix=options.shm_prefix,
        )  # fmt: skip
        openai_api.configure(repository)
    except (ServeError, AddressError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    policy = Policy(
        options.drain_seconds,
        options.restarts,
        options.restart_after_growth,
        options.shm_prefix,
        options.stalled_client_seconds,
    )
    with serving(repository):
        args += [*options.server_args, *forwarding(options.server_args)]
        names = list(ensembles(repository))
        return Watchdog(args, env, address, options.http_port, policy, openai_api, names).run()
