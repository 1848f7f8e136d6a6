# SPDX-License-Identifier: Apache-2.0
"""What tritonserver does not do for its own sockets: more room in the pairs through which its HTTP frontend
tells its threads what to do, an end of clients that do not read, and of silent ones where there are too many.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashinfer_backend.transport.addresses import cut_stalled_clients

ESTABLISHED = 1
# A request's line and headers have more bytes than this.
FEW_BYTES = 64
FRESH_MS = 1000
TCP_INFO_BYTES = 136


@dataclass(frozen=True)
class _Client:
    """A connection. descriptor, port: the server's. silent_ms: since anything was sent or received."""

    descriptor: int
    port: int
    received_bytes: int
    silent_ms: int


def widen_thread_pipes(server_pid: int) -> int:
    """Enlarges the send buffers of the server's Unix socket pairs to what the system allows, as far as this
    process may; how many were enlarged.

    The HTTP frontend tells its threads through such pairs of new connections and of chunks to be sent. They
    hold 278 messages by default; what does not fit is dropped: connections are reset, streams lose tokens or
    never end (docs/triton-notes.md).
    """
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())
        return sum(_widen(sock, most) for _, sock in _sockets(server_pid))
    return 0


def limit_stalled_clients(server_pid: int, seconds: int) -> int:
    """Has the kernel close connections whose clients read nothing for so long, as far as this process may; to
    how many ports that applies from now on.

    The server keeps all that such a client has not read, without a bound, and goes on taking its requests.
    """
    limited = 0
    for _, sock in _sockets(server_pid):
        if _listens(sock):
            cut_stalled_clients(sock, seconds)
            limited += 1
    return limited


def close_silent_clients(server_pid: int) -> int:
    """Closes connections of a server that has used 15 of 16 of its descriptors, until a quarter of them is
    free, as far as this process may; how many were closed.

    The server has no time limits, and without a free descriptor it answers no client, asks the kernel for
    connections without a pause and logs each failure. Connections whose clients have sent less than a request
    are closed first, then those that have been silent for longest.
    """
    try:
        most, _ = resource.prlimit(server_pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{server_pid}/fd"))
    except OSError:  # it has ended
        return 0
    if most == resource.RLIM_INFINITY or used * 16 < most * 15:
        return 0
    ports: set[int] = set()
    clients: list[_Client] = []
    for number, sock in _sockets(server_pid):
        if _listens(sock):
            ports.add(sock.getsockname()[1])
        elif client := _client(number, sock):
            clients.append(client)
    clients = [each for each in clients if each.port in ports]
    clients.sort(key=lambda each: (each.received_bytes >= FEW_BYTES, -each.silent_ms))
    closed = 0
    for number, sock in _sockets(server_pid, [each.descriptor for each in clients[: used - most * 3 // 4]]):
        if _client(number, sock):  # not another one with this number, which has just come
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def has_unsent(server_pid: int) -> bool | None:
    """Whether a client of a server has not taken all that was sent to it yet; None where this process may not
    look."""
    looked = False
    for _, sock in _sockets(server_pid):
        looked = True
        if sock.family in (socket.AF_INET, socket.AF_INET6) and not _listens(sock):
            with contextlib.suppress(OSError):  # it has just been closed
                (unsent,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4))
                if unsent:
                    return True
    return False if looked else None


def _sockets(pid: int, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, socket.socket]]:
    """A process's sockets by their descriptors there, each taken over until the next one. numbers: of those
    that are wanted; without it all of them."""
    pidfd_getfd = 438  # the number on every architecture; Python has no function for it
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for number in map(int, os.listdir(f"/proc/{pid}/fd")) if numbers is None else numbers:
                ours = libc.syscall(pidfd_getfd, pidfd, number, 0)
                if ours < 0:
                    continue
                try:
                    sock = socket.socket(fileno=ours)
                except OSError:  # no socket
                    os.close(ours)
                    continue
                with sock:
                    yield number, sock
        finally:
            os.close(pidfd)


def _client(number: int, sock: socket.socket) -> _Client | None:
    """An open TCP connection that is silent, or has not asked for anything."""
    with contextlib.suppress(OSError):
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return None
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        sent_ms, received_ms = struct.unpack_from("<I4xI", info, 44)  # of struct tcp_info, as is the next
        (received,) = struct.unpack_from("<Q", info, 128)
        client = _Client(number, sock.getsockname()[1], received, min(sent_ms, received_ms))
        if info[0] == ESTABLISHED and (client.silent_ms >= FRESH_MS or received < FEW_BYTES):
            return client
    return None


def _listens(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


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
