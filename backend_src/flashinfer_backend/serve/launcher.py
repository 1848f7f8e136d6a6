# SPDX-License-Identifier: Apache-2.0
"""Runs tritonserver on a model repository in the foreground: `python -m flashinfer_backend.serve`.

Finds the server (NVIDIA's image, or the wheel nvidia-pytriton), gives it the environment that its
Python backend needs, and says when it is ready. The server ends with this process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np

from flashinfer_backend.core.paths import run_dir, unservable
from flashinfer_backend.serve.addresses import Address, AddressError, check_ports, reachable_at, resolve
from flashinfer_backend.serve.preflight import (
    Installation,
    ServeError,
    check_numpy,
    check_ordering,
    environment,
    find_server,
    serving,
)
from flashinfer_backend.serve.server_log import ServerLog, memory_of_stubs
from flashinfer_backend.serve.thread_pipes import widen_thread_pipes
from flashinfer_backend.transport import rundir
from flashinfer_backend.transport.orphans import Stub, end_orphans, stubs_of

STOP_S = 9.0  # from the first signal until the server is killed
DRAIN_S = 4  # of these, how long running requests may go on


def command(
    server: Installation,
    repository: Path,
    address: Address,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
) -> list[str]:
    """Command line of the server for a model repository."""
    v6 = address.version == 6
    http, grpc = (f"ipv6:{address}", f"[{address}]") if v6 else (str(address), str(address))
    # Explicit control lets the llm model take itself out of service while its engine is restarted
    # (docs/triton-notes.md). It would let every client load models too: only who knows the secret may.
    secret = secrets.token_hex(16)
    args = [
        str(server.binary),
        *("--model-repository", str(repository)),
        *("--model-control-mode", "explicit"),
        *("--load-model", "*"),
        *("--http-restricted-api", f"model-repository:admin-key={secret}"),
        *("--grpc-restricted-protocol", f"model-repository:admin-key={secret}"),
        *("--exit-timeout-secs", str(DRAIN_S)),
    ]
    for name, at, port in (
        ("http", http, http_port), ("grpc", grpc, grpc_port), ("metrics", http, metrics_port),
    ):  # fmt: skip
        args += [f"--{name}-address", at, f"--{name}-port", str(port)]
    if server.backends is not None:
        args += ["--backend-directory", str(server.backends)]
    if shutil.which("nvidia-smi") is None:
        args += ["--allow-gpu-metrics", "false"]
    return args


def run(args: list[str], env: dict[str, str], url: str) -> int:
    """Runs the server until it ends or this process gets SIGINT or SIGTERM; its exit status."""
    # A group of its own: Ctrl-C comes to us alone, and we pass on one signal (a second one makes the
    # server leave everything as it is). Whatever ends us ends the server.
    log = ServerLog()
    child = log.popen(args, env=env, start_new_session=True, preexec_fn=_end_with_parent)
    asked_at: list[float] = []
    stubs: set[Stub] = set()  # that ran while the server was ending
    memory: set[Path] = set()  # of stubs that have not taken it over
    announced = False

    def stop(*_: object) -> None:
        if not asked_at:
            asked_at.append(time.monotonic())
            log.stopping()
            if not announced:  # it ends at once, and must not make more meanwhile
                child.send_signal(signal.SIGSTOP)
                memory.update(memory_of_stubs(child.pid))
            stubs.update(stubs_of(child.pid))
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGCONT)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    while child.poll() is None:
        if asked_at and time.monotonic() - asked_at[0] > STOP_S:
            child.kill()
        if not asked_at and log.cannot_start(child.pid):
            memory.update(memory_of_stubs(child.pid))
            child.kill()
        if not announced and not asked_at and _ready(url):
            announced = True
            log.ready()
            widen_thread_pipes(child.pid)
            _announce(url)
        if asked_at:  # a model that is being loaded still starts some
            stubs.update(stubs_of(child.pid))
        time.sleep(0.1)
    end_orphans(child.pid, stubs)
    for region in memory:
        region.unlink(missing_ok=True)
    if not asked_at and not announced and (reason := log.summary()):
        print(f"serve: {reason}", file=sys.stderr)
    for folder in run_dir(child.pid, "").parent.glob(f"{child.pid}-*"):
        rundir.remove(folder)  # of an engine whose last stub was ended while it was doing that
    return 0 if asked_at else abs(child.returncode) or 1


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v2/health/ready", timeout=1) as answer:
        return bool(answer.status == 200)
    return False


def _announce(url: str) -> None:
    body = json.dumps({"text_input": "Once upon a time", "max_tokens": 32, "stream": True})
    print(
        f"\nReady. Try:\n\n  curl -N {url}/v2/models/ensemble/generate_stream -d '{body}'\n\n"
        "Ctrl-C stops the server.\n",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashinfer_backend.serve", description=__doc__)
    parser.add_argument("--model-repository", type=Path, required=True, help="as written by build.py")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, IPv4 or IPv6 (default: 127.0.0.1, this machine only)",
    )
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--backends", type=Path, help="where to copy the Python backend (default: in ~/.cache)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only look whether the server could start; the repository need not exist yet",
    )
    parser.add_argument("server_args", nargs="*", help="after --: further arguments for tritonserver")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashinfer-backend"
    repository: Path = options.model_repository
    try:
        if not options.check and not repository.is_dir():
            raise ServeError(f"no folder {repository}: write one with build.py --output")
        server = find_server(options.backends or cache / "backends")
        for place in (repository, server.backends):
            if place is not None and (reason := unservable(place)):
                raise ServeError(reason)
        ports = {
            "HTTP port": options.http_port,
            "gRPC port": options.grpc_port,
            "metrics port": options.metrics_port,
        }
        address = resolve(options.host)
        check_ports(address, ports)
        check_numpy(server, np.__version__)
        env = environment(server)
        if options.check:
            return 0
        check_ordering(server, repository)
        args = command(server, repository, address, *ports.values())
    except (ServeError, AddressError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    with serving(repository):
        return run([*args, *options.server_args], env, reachable_at(address, options.http_port))
