# SPDX-License-Identifier: Apache-2.0
"""A rank other than 0 of an engine: `python -m flashinfer_backend.worker`, started by rank 0.

It runs its share of each step that rank 0 plans, and samples nothing.
"""

from __future__ import annotations

import gc

gc.disable()  # as in engine/__main__.py

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from flashinfer_backend.core.arguments import program
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.progress import note_in
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.worker.ranks import RankLink
from flashinfer_backend.worker.start import start_runner

gc.freeze()
gc.enable()


def main() -> int:
    parser = program("flashinfer_backend.worker", __doc__)
    parser.add_argument("--rank", type=int, required=True, help="1 or more")
    parser.add_argument("--name", default="engine", help="of the engine, for the log")
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of the socket to rank 0")
    parser.add_argument("--rendezvous", required=True, help="file by which the ranks find each other")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; rank 0 ends this one
        signal.signal(number, signal.SIG_IGN)
    link = RankLink(options.socket)
    link.beat()
    form = f"[{options.name} rank {options.rank}] %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form)
    log = logging.getLogger("flashinfer_backend.worker")
    data = link.receive()
    if data is None:
        return 0
    note_in(Path(options.rendezvous).parent)  # each rank's progress is its engine's
    config = msgspec.json.decode(data, type=EngineConfig)
    shard = Shard(options.rank, config.tensor_parallel_size, config.expert_parallel_size)
    try:
        _, runner = start_runner(config, shard, options.rendezvous)
    except (ValueError, OSError, torch.cuda.OutOfMemoryError) as error:
        log.error("cannot start: %s", error)
        return 1
    gc.collect()
    gc.freeze()
    link.ready()
    while data := link.receive():
        runner.obey(data, link.send)
    if data is not None:
        runner.state.model.collectives.settle()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: collectives that wait for others would be waited for
