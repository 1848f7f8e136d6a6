# SPDX-License-Identifier: Apache-2.0
"""What `serve` does to the server's process, on stand-in processes."""

import subprocess
import sys

import pytest

from flashinfer_backend.thread_pipes import widen_thread_pipes

# Messages that fit into a pair of sockets nobody reads from, counted once a line is read from stdin.
CHILD = """
import socket
pair = socket.socketpair()
pair[0].setblocking(False)
datagrams = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
print("ready", flush=True)
input()
count = 0
try:
    while True:
        pair[0].send(b"x" * 17)
        count += 1
except BlockingIOError:
    print(count, flush=True)
"""


def capacity(widen):
    """Messages a stand-in server's pair holds, and what widening said."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"ready\n"
        widened = widen_thread_pipes(child.pid) if widen else 0
        out, _ = child.communicate(b"\n", timeout=20)
    return int(out), widened


def test_thread_pipes_of_the_server_are_widened():
    plain, _ = capacity(widen=False)
    wide, widened = capacity(widen=True)
    if not widened:
        pytest.skip("this system does not let a process take over descriptors of its children")
    assert widened == 2  # both ends of the stream pair, not the datagrams
    assert wide > 1.9 * plain


def test_a_server_that_ended_is_left_alone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=20)
    assert widen_thread_pipes(child.pid) == 0
