# SPDX-License-Identifier: Apache-2.0
"""More room in the socket pairs through which tritonserver's HTTP frontend tells its threads what to do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path


def widen_thread_pipes(server_pid: int) -> int:
    """Enlarges the send buffers of the server's Unix socket pairs to what the system allows, as far as this
    process may; how many were enlarged.

    The HTTP frontend tells its threads through such pairs of new connections and of chunks to be sent. They
    hold 278 messages by default; what does not fit is dropped: connections are reset, streams lose tokens or
    never end (docs/triton-notes.md).
    """
    pidfd_getfd = 438  # the number on every architecture; Python has no function for it
    libc = ctypes.CDLL(None, use_errno=True)
    widened = 0
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())
        pidfd = os.pidfd_open(server_pid)
        try:
            for name in os.listdir(f"/proc/{server_pid}/fd"):
                number = libc.syscall(pidfd_getfd, pidfd, int(name), 0)
                if number >= 0 and _widen(number, most):
                    widened += 1
        finally:
            os.close(pidfd)
    return widened


def _widen(number: int, most: int) -> bool:
    """Takes over a file descriptor; whether it was an unnamed Unix stream socket and has a larger buffer."""
    try:
        with socket.socket(fileno=number) as sock:
            if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or sock.getsockname():
                return False
            before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            if before >= 2 * most:  # the kernel doubles what it is asked for
                return False
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > before
    except OSError:  # no socket
        with contextlib.suppress(OSError):
            os.close(number)
        return False
