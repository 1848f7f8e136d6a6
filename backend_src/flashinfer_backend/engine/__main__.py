# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m flashinfer_backend.engine`, started by its keeper (launch/keeper.py)."""

import gc

gc.disable()  # imports leave hardly any garbage: collecting it would take a quarter of their time

import contextlib
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec
import torch

from flashinfer_backend.core.arguments import program
from flashinfer_backend.core.config import AUTO, EngineConfig
from flashinfer_backend.core.progress import note_in
from flashinfer_backend.engine.loop import EngineLoop
from flashinfer_backend.engine.start import Core, start
from flashinfer_backend.scheduler.invariants import BrokenInvariantError
from flashinfer_backend.transport.engine_socket import EngineSocket
from flashinfer_backend.transport.gpus import DEVICES_VARIABLE

gc.freeze()
gc.enable()

log = logging.getLogger("flashinfer_backend.engine")

DRIVER = Path("/dev/nvidiactl")  # there is a GPU where it is
# For the engine to end once it is told to, or when its parent has gone. Its ranks may hang, and a
# step of its own with them. What then has to be done takes a second at most, and LAST_S ends the process also
# where a library keeps the interpreter's lock: the parent kills an engine, which leaves everything behind,
# after records.STOP_S.
GRACE_S = 3.0
LAST_S = 1.2
# How long another thread, such as one that checks a grammar, keeps the interpreter lock that the loop lets go
# in each operation of torch. With Python's 5 ms a step of 30 operations took 190 ms during such a check, with
# this 7.
SWITCH_S = 1e-4


def main() -> int:
    parser = program("flashinfer_backend.engine", __doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for the socket")
    parser.add_argument("--parent-pid", type=int, required=True, help="the engine ends with this process")
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("--replica", type=int, help="its number, where the model has several engines")
    options = parser.parse_args()
    name = "engine" if options.replica is None else f"engine {options.replica}"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"[{name}] %(levelname)s %(message)s")
    try:
        end = _End(options.parent_pid)
    except ProcessLookupError:
        log.error("cannot start: its parent, process %d, has ended", options.parent_pid)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server tells us to end
    sys.setswitchinterval(SWITCH_S)
    try:
        note_in(options.run_dir)
        config = msgspec.json.decode(options.config.read_bytes(), type=EngineConfig)
        check_gpus(config)
        core = start(config, options.run_dir, name=name, number=options.replica or 0)
        socket = EngineSocket(options.run_dir, options.parent_pid)
    except (ValueError, OSError, torch.cuda.OutOfMemoryError) as error:
        log.error("cannot start: %s", error)
        return 1
    end.of(core, socket)
    loop = EngineLoop(core, socket)
    gc.collect()
    gc.freeze()  # a full collection over the model's objects would show as a slow step
    try:
        loop.run()
    except BrokenInvariantError as error:
        log.critical(
            "%s. The engine ends, as answers could have what belongs to other requests; please report this",
            error,
        )
        return 1
    except Exception:
        core.wait_loss()
        raise
    finally:
        socket.close()
        core.close()
    log.info("ended after %d steps", loop.iteration)
    return 0


def check_gpus(config: EngineConfig) -> None:
    """Raises ValueError where this engine does not see the GPUs that it was given; on a machine without any,
    device=auto is the CPU."""
    named = os.environ.get(DEVICES_VARIABLE, "")
    given = config.replicas > 1 or config.gpu_device_ids != AUTO
    if config.device == "cpu" or not given or not named:
        return
    seen, wanted = torch.cuda.device_count(), len(named.split(","))
    if seen >= wanted or (config.device == "auto" and config.gpu_device_ids == AUTO and not DRIVER.exists()):
        return
    asked = f"replicas={config.replicas}"
    if config.gpu_device_ids != AUTO:
        asked += " with gpu_device_ids"
    raise ValueError(
        f"{asked} gives this engine the GPU {named}, and torch sees {seen} of {wanted}: set replicas to the "
        "number of GPUs that `nvidia-smi -L` lists, or gpu_device_ids to their numbers, or device=cpu"
    )


class _End:
    """The engine's end, in bounded time: once it gets SIGTERM or its parent has gone, the loop has GRACE_S to
    come to its own end. Then a thread ends the process, wherever it is: while a model loads or kernels
    compile, or in a step that waits for a rank which hangs. Before `of`, SIGTERM ends the process at once."""

    def __init__(self, parent_pid: int) -> None:
        """Raises ProcessLookupError where the parent has ended."""
        self._core: Core | None = None
        # The main thread runs a signal's handler only when it comes back from the call that it is in.
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write)
        watched = [os.pidfd_open(parent_pid), read]
        threading.Thread(target=self._watch, args=(watched,), name="end", daemon=True).start()

    def of(self, core: Core, socket: EngineSocket) -> None:
        """From now on it is this engine's."""
        self._core = core
        signal.signal(signal.SIGTERM, lambda *_: setattr(socket, "closed", True))

    def _watch(self, watched: list[int]) -> None:
        select.select(watched, [], [])
        faulthandler.dump_traceback_later(GRACE_S + LAST_S, exit=True)
        time.sleep(GRACE_S)
        main = sys._current_frames()[threading.main_thread().ident or 0]
        where = "".join(traceback.format_stack(main)[-3:])
        log.warning("not ended %.0f s after it was asked to: ending where it is:\n%s", GRACE_S, where)
        if self._core is not None:
            self._core.kill()
        _leave(1)


def _leave(status: int) -> None:
    with contextlib.suppress(OSError):  # the parent, which passes both on, may have been killed
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: a thread that comes back from a library while the interpreter ends would abort.
    os._exit(status)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # a device that has failed, say: the next engine gets a new context
        traceback.print_exc()
        status = 1
    _leave(status)
