# SPDX-License-Identifier: Apache-2.0
"""What tritonserver does not set on its own sockets: more room in the pairs through which its HTTP frontend
tells its threads what to do, and an end of clients that do not read."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from flashinfer_backend.transport.addresses import cut_stalled_clients


def widen_thread_pipes(server_pid: int) -> int:
    """Enlarges the send buffers of the server's Unix socket pairs to what the system allows, as far as this
    process may; how many were enlarged.

    The HTTP frontend tells its threads through such pairs of new connections and of chunks to be sent. They
    hold 278 messages by default; what does not fit is dropped: connections are reset, streams lose tokens or
    never end (docs/triton-notes.md).
    """
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())
        return sum(_widen(sock, most) for sock in _sockets(server_pid))
    return 0


def limit_stalled_clients(server_pid: int, seconds: int) -> int:
    """Has the kernel close connections whose clients read nothing for so long, as far as this process may; to
    how many ports that applies from now on.

    The server keeps all that such a client has not read, without a bound, and goes on taking its requests.
    """
    return sum(_limit(sock, seconds) for sock in _sockets(server_pid))


def _sockets(pid: int) -> Iterator[socket.socket]:
    """A process's sockets, each taken over until the next one."""
    pidfd_getfd = 438  # the number on every architecture; Python has no function for it
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                number = libc.syscall(pidfd_getfd, pidfd, int(name), 0)
                if number < 0:
                    continue
                try:
                    sock = socket.socket(fileno=number)
                except OSError:  # no socket
                    os.close(number)
                    continue
                with sock:
                    yield sock
        finally:
            os.close(pidfd)


def _widen(sock: socket.socket, most: int) -> bool:
    """Whether it is an unnamed Unix stream socket and has a larger buffer now."""
    with contextlib.suppress(OSError):
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or sock.getsockname():
            return False
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        if before >= 2 * most:  # the kernel doubles what it is asked for
            return False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > before
    return False


def _limit(sock: socket.socket, seconds: int) -> bool:
    """Whether it listens for TCP connections."""
    with contextlib.suppress(OSError):
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            cut_stalled_clients(sock, seconds)
            return True
    return False
