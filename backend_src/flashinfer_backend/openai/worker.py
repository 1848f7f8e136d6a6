# SPDX-License-Identifier: Apache-2.0
"""A worker of the OpenAI API, started by openai/supervisor.py: `python -m flashinfer_backend.openai.worker`.

Its options come as JSON on standard input, since they hold keys, which a command line would show to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from flashinfer_backend.core.output import say
from flashinfer_backend.openai.app import make_app
from flashinfer_backend.openai.connection import limited_config
from flashinfer_backend.openai.link import EngineLink
from flashinfer_backend.openai.metrics import Metrics
from flashinfer_backend.openai.model import NO_MODEL, WorkerOptions, room_for_connections
from flashinfer_backend.openai.response_store import ResponseStore
from flashinfer_backend.openai.served_model import ServedModel
from flashinfer_backend.serving.adapters import AdapterNames
from flashinfer_backend.serving.engines import Engines

# Until a process that has no engine yet answers all the same, and refuses. One that replaces another attaches
# to the running engine meanwhile, so that connections which waited for it are served.
ATTACH_S = 5.0
BEAT_S = 1.0
GC_ALLOCATIONS = 50_000  # of containers between collections of garbage, of the youngest alone
# How long the event loop's thread keeps the interpreter lock that the link's thread asks for, several times
# for each message of an engine. In a model of the two, the loop busy for 70 % of the time, messages waited
# for 1.3 ms (99 %: 6 ms) with Python's 5 ms, and for 0.5 ms (1.9 ms) with this.
SWITCH_S = 5e-4


def main() -> int:
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerOptions)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = options.metrics_dir
    sys.setswitchinterval(SWITCH_S)
    return uvloop.run(_run(options))


async def _run(options: WorkerOptions) -> int:
    try:
        names = [model.names[0] for model in options.models]
        metrics = Metrics(Path(options.metrics_dir), Path(options.apis), names, options.number)
        models = _read_models(options, metrics)
    except (OSError, ValueError) as error:
        say(f"openai: {error}")
        return NO_MODEL
    server = _make_server(options, models, metrics)

    def end(*_: object) -> None:
        """uvicorn has its own handlers while it serves, and raises their signals again at its end."""
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    _link_engines(options, models, metrics)
    attached = threading.Event()

    def tell(kind: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # the supervisor does not read
            os.write(options.notify, kind + b"%d\n" % os.getpid())

    async def beat() -> None:
        while True:
            tell(b".")
            await asyncio.sleep(BEAT_S)

    def attach() -> None:
        try:
            for served in models:
                served.link.engines.wait_ready()
            tell(b"+")
        except AssertionError:  # closed before there was an engine
            pass
        attached.set()

    gc.collect()
    gc.freeze()  # a full collection over the tokenizer's and libraries' objects would hold streams up
    # A request has up to thousands of sequences, each of some objects that live long: searching them for
    # circles again and again took three quarters of a process that refused most of what came.
    gc.set_threshold(GC_ALLOCATIONS)
    beating = asyncio.create_task(beat())
    threading.Thread(target=attach, name="wait for the engine", daemon=True).start()
    deadline = time.monotonic() + ATTACH_S
    while not attached.is_set() and not server.should_exit and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    await server.serve(sockets=[socket.socket(fileno=options.listener)])
    for served in models:
        await asyncio.to_thread(served.link.engines.close)
    beating.cancel()
    return 0


def _read_models(options: WorkerOptions, metrics: Metrics) -> list[ServedModel]:
    store = ResponseStore(options.store_bytes) if options.store_bytes else None
    models = []
    for model in options.models:
        has_adapters = model.engine.max_loras > 0
        adapters = AdapterNames(model.engine, Path(model.run_dir)) if has_adapters else None
        models.append(ServedModel(model, metrics, adapters, store))
    return models


def _make_server(options: WorkerOptions, models: list[ServedModel], metrics: Metrics) -> uvicorn.Server:
    app = make_app(models, options.max_body_bytes, options.keys, options.allowed_origins)
    return uvicorn.Server(
        limited_config(
            app,
            options.receive_s,
            room_for_connections(options.max_connections),
            metrics.error,
            ws="none",
            lifespan="off",
            log_level="error",  # of warnings any client could cause any number
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=options.drain_s,
        )
    )


def _link_engines(options: WorkerOptions, models: list[ServedModel], metrics: Metrics) -> None:
    for served in models:
        config = served.model.engine
        engines = Engines(
            Path(served.model.run_dir),
            config.replicas,
            reuse=config.enable_kv_cache_reuse,
            period_s=config.stats_check_period_ms / 1000,
        )
        served.link = EngineLink(engines, asyncio.get_running_loop())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that wait for the engine must not hold it up
