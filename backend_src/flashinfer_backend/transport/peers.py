# SPDX-License-Identifier: Apache-2.0
"""The stubs of one model know each other by the sockets in `<run dir>/stubs/`, named by their pid.

A `stop` request reaches any stub, not the one that runs the request it means, so its id is told to
all of them in one datagram each: STOP and the id. Before serve ends tritonserver it has all of them answer
what is open with an error: FAIL and the text.
"""

import contextlib
import os
import socket
from pathlib import Path

from flashinfer_backend.transport.rundir import process_alive

LONGEST = 65536  # bytes of a message
STOP, FAIL = b"S", b"F"


class PeerSocket:
    """This stub's datagram socket; it exists as long as the stub takes part."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "stubs" / f"{os.getpid()}.sock"
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self._path))
        # Sends on its own socket: a full queue at the other end is waited for, reading never waits.
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.settimeout(1.0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def tell_all(self, message: bytes) -> None:
        """Sends `message` to every stub, this one included. Raises TimeoutError naming those that take none;
        all others have it then."""
        deaf = []
        for path in self._path.parent.glob("*.sock"):
            try:
                self._sender.sendto(message, str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                pass  # one that has died or just leaves runs no request that could be meant
            except TimeoutError:
                deaf.append(path.stem)
        if deaf:
            raise TimeoutError(
                f"process {' and '.join(deaf)} of the model takes no messages: requests that run there go on"
            )

    def receive(self) -> list[bytes]:
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self._socket.recv(LONGEST))
        return messages

    def close(self) -> None:
        """Takes this stub off the list."""
        self._sender.close()
        self._socket.close()
        self._path.unlink(missing_ok=True)


def tell_all(run_dir: Path, message: bytes) -> None:
    """Sends `message` to every stub of a run directory, waiting for none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        for path in (run_dir / "stubs").glob("*.sock"):
            with contextlib.suppress(OSError):  # it has ended, or is stopped with a full queue
                sender.sendto(message, str(path))


def living_stubs(run_dir: Path) -> list[int]:
    """pids of the stubs that take part."""
    pids = [int(path.stem) for path in (run_dir / "stubs").glob("*.sock")]
    return [pid for pid in pids if process_alive(pid)]
