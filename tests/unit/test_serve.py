# SPDX-License-Identifier: Apache-2.0
"""What `serve` does to the server's process, on stand-in processes."""

import socket
import subprocess
import sys
import time

import pytest

from flashinfer_backend.serve import launcher as serve
from flashinfer_backend.serve.server_sockets import limit_stalled_clients, widen_thread_pipes
from flashinfer_backend.transport import addresses

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
    assert widen_thread_pipes(child.pid) == limit_stalled_clients(child.pid, 1) == 0


# Sends without an end to the first client, and says how that ended.
SENDER = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
input()
sock, _ = listener.accept()
try:
    while True:
        sock.send(b"x" * 4096)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_does_not_read_is_cut(reads):
    child = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child, socket.socket() as client:
        port = int(child.stdout.readline())
        if not limit_stalled_clients(child.pid, 1):
            child.kill()
            pytest.skip("this system does not let a process take over descriptors of its children")
        client.connect(("127.0.0.1", port))
        child.stdin.write(b"\n")
        child.stdin.close()
        if reads:
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                assert client.recv(1 << 16)
            client.close()
        assert (
            child.stdout.readline().strip()
            in ((b"TimeoutError",), (b"BrokenPipeError", b"ConnectionResetError"))[reads]
        )


def test_hosts_are_resolved_as_the_server_takes_addresses_only():
    assert str(addresses.resolve("localhost")) == "127.0.0.1"  # IPv4 where a name has both
    assert str(addresses.resolve("::1")) == "::1"
    for wrong in ("a..b", "x" * 70, ""):
        with pytest.raises(addresses.AddressError, match="give an address of this machine"):
            addresses.resolve(wrong)
    with pytest.raises(addresses.AddressError, match="address with a scope"):
        addresses.resolve("fe80::1%lo")
    with pytest.raises(addresses.AddressError, match=r"--host no[.]such[.]host[.]invalid: .*give an address"):
        addresses.resolve("no.such.host.invalid")
    urls = {
        host: addresses.reachable_at(addresses.resolve(host), 8000) for host in ("0.0.0.0", "::", "127.0.0.2")
    }
    assert urls == {
        "0.0.0.0": "http://127.0.0.1:8000",
        "::": "http://[::1]:8000",
        "127.0.0.2": "http://127.0.0.2:8000",
    }


def test_places_that_the_backend_cannot_start_from_are_refused(tmp_path, capsys):
    for name in ("sp ace", "accé"):
        (tmp_path / name).mkdir()
        assert serve.main(["--model-repository", str(tmp_path / name)]) == 1
        assert f"starts no models from {tmp_path / name}: " in capsys.readouterr().err
    arguments = ["--model-repository", str(tmp_path), "--backends", str(tmp_path / "sp ace")]
    assert serve.main(arguments) == 1
    assert f"starts no models from {tmp_path / 'sp ace'}/" in capsys.readouterr().err


def test_the_preferred_address_of_a_host_is_taken(monkeypatch):
    def answer(*places):
        found = [(family, socket.SOCK_STREAM, 6, "", (text, 0, 0, 0)) for family, text in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        return str(addresses.resolve("host"))

    v4, v6 = socket.AF_INET, socket.AF_INET6
    assert answer((v6, "fd00::1"), (v4, "10.0.0.5"), (v4, "172.17.0.1")) == "10.0.0.5"
    assert answer((v6, "fd00::2"), (v6, "fd00::3")) == "fd00::2"


def test_ports_that_cannot_be_used_are_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(addresses.AddressError, match=rf"gRPC port {port} on 127[.]0[.]0[.]1 .*in use"):
            addresses.check_ports(addresses.resolve("127.0.0.1"), {"gRPC port": port})
    with pytest.raises(addresses.AddressError, match=r"HTTP port 70000 .*0 to 65535"):
        addresses.check_ports(addresses.resolve("127.0.0.1"), {"HTTP port": 70000})
