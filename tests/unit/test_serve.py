# SPDX-License-Identifier: Apache-2.0
"""What `serve` does to the server's process, on stand-in processes."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flashinfer_backend.config_tools import cli
from flashinfer_backend.launch import launcher as serve
from flashinfer_backend.launch import preflight
from flashinfer_backend.launch.openai_api import OpenAiApi
from flashinfer_backend.launch.preflight import ServeError
from flashinfer_backend.launch.server_log import ServerLog
from flashinfer_backend.launch.server_sockets import (
    FRESH_MS,
    close_silent_clients,
    limit_stalled_clients,
    widen_thread_pipes,
)
from flashinfer_backend.openai.arguments import RECEIVE_S
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
        out, _ = child.communicate(b"\n", timeout=120)
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
    child.wait(timeout=120)
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


# Accepts connections and reads from them, with few descriptors.
ACCEPTING = """
import asyncio, resource
async def hold(reader, writer):
    while await reader.read(1000):
        pass
    writer.close()
async def main():
    server = await asyncio.start_server(hold, "127.0.0.1", 0, backlog=200)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
asyncio.run(main())
"""


def test_silent_clients_are_closed_where_no_descriptors_are_left():
    child = subprocess.Popen([sys.executable, "-c", ACCEPTING], stdout=subprocess.PIPE)
    with child, contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        address = ("127.0.0.1", int(child.stdout.readline()))

        def connect(data):
            sock = stack.enter_context(socket.create_connection(address, timeout=120))
            sock.sendall(data)
            return sock

        def is_open(sock):
            sock.setblocking(False)
            try:
                return sock.recv(1) != b""
            except BlockingIOError:
                return True

        asked = [connect(b"x" * 100) for _ in range(10)]
        silent = [connect(b"x" * (n % 8)) for n in range(10)]
        assert close_silent_clients(child.pid) == 0, "there are descriptors"
        late = connect(b"y" * 100)
        until = time.monotonic() + 120
        while (used := len(os.listdir(f"/proc/{child.pid}/fd"))) < 62 and time.monotonic() < until:
            silent.append(connect(b""))
            time.sleep(0.01)
        time.sleep(FRESH_MS / 1000)
        for sock in asked:
            sock.sendall(b"more")  # these are not silent
        closed = close_silent_clients(child.pid)
        if not closed:
            pytest.skip("this system does not let a process take over descriptors of its children")
        assert closed == used - 48, "a quarter is free, and no more"
        assert all(is_open(sock) for sock in [*asked, late])
        assert sum(not is_open(sock) for sock in silent) == closed
        assert not any(is_open(sock) for sock in silent[:8]), "the oldest go first"


def test_an_endless_complaint_is_shown_seldom():
    command = "import sys; print('[warn] accept: Too many open files\\n' * 50_000 + 'other')"
    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    try:
        log = ServerLog()
        log.ready()
        log.popen([sys.executable, "-c", command]).wait(120)
        log.summary()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(write)
    with os.fdopen(read) as shown:
        assert shown.read() == "[warn] accept: Too many open files\nother\n"


def test_a_quarter_of_the_memory_that_a_container_has(tmp_path):
    machine = serve.quarter_of_memory(tmp_path)
    assert machine == psutil.virtual_memory().total // 4 >> 20
    for file in (tmp_path / "memory.max", tmp_path / "memory/memory.limit_in_bytes"):
        file.parent.mkdir(exist_ok=True)
        for text, expected in (("max\n", machine), (f"{1 << 62}\n", machine), (f"{128 << 20}\n", 32)):
            file.write_text(text)
            assert serve.quarter_of_memory(tmp_path) == expected
        file.unlink()
    assert serve.quarter_of_memory() == serve._parser().get_default("restart_after_growth") > 0


def test_the_server_may_open_as_many_files_as_the_system_allows():
    code = """if True:
        import resource
        from flashinfer_backend.transport.addresses import MOST_FILES, raise_open_files
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        assert raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
        resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
        assert raise_open_files() == 90
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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


def test_an_empty_argument_of_the_openai_api_is_not_dropped():
    # `--openai-api-key-file "$KEYS"` with KEYS unset must not open the API to everybody.
    options = serve._parser().parse_args(["--model-repository", "r", "--openai-api-key-file", ""])
    with pytest.raises(ServeError, match="--openai-api-key-file needs --openai-port"):
        OpenAiApi(options, addresses.resolve("127.0.0.1"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "repository"
    assert (
        cli.main(Path(__file__).parents[2] / "model_repo", ["--output", str(folder), "--set", "device=cpu"])
        == 0
    )
    return folder


def passed_on(repository, *given):
    """What the OpenAI API's processes are told."""
    options = serve._parser().parse_args(["--model-repository", "r", "--openai-port", "9000", *given])
    api = OpenAiApi(options, addresses.resolve("127.0.0.1"))
    api.configure(repository)
    return api._supervisor._options


def test_several_names_of_the_model_are_passed_on(repository):
    names = "--openai-served-model-name"
    told = passed_on(repository, names, "one", names, "two", "--openai-max-prompt-bytes", "0")
    model = told.models[0]
    assert (model.names, model.max_prompt_bytes, told.receive_s) == (["one", "two"], 0, RECEIVE_S)


def test_requests_of_the_openai_api_have_the_time_to_end_that_those_of_the_server_have(repository):
    assert passed_on(repository).drain_s == 4
    assert passed_on(repository, "--drain-seconds", "19.5").drain_s == 20


def test_places_that_the_backend_cannot_start_from_are_refused(tmp_path, capsys):
    for name in ("sp ace", "accé"):
        (tmp_path / name).mkdir()
        assert serve.main(["--model-repository", str(tmp_path / name)]) == 1
        assert f"starts no models from {tmp_path / name}: " in capsys.readouterr().err
    arguments = ["--model-repository", str(tmp_path), "--backends", str(tmp_path / "sp ace")]
    assert serve.main(arguments) == 1
    assert f"starts no models from {tmp_path / 'sp ace'}/" in capsys.readouterr().err


def test_a_place_for_backends_is_refused_where_none_are_copied(tmp_path, capsys, monkeypatch):
    """In NVIDIA's image."""
    binary = tmp_path / "image/bin/tritonserver"
    binary.parent.mkdir(parents=True)
    binary.touch()
    monkeypatch.setattr(preflight, "IMAGE_ROOT", tmp_path / "image")
    arguments = ["--model-repository", str(tmp_path), "--backends", str(tmp_path), "--check"]
    assert serve.main(arguments) == 1
    said = f"serve: --backends is where the wheel's Python backend is copied to, and {binary} has its own"
    assert capsys.readouterr().err.startswith(said)


def test_a_folder_that_holds_no_models_is_refused(tmp_path, capsys):
    said = f"serve: {tmp_path} is not a model repository: no folder in it has a config.pbtxt or a version."
    for make in (lambda: None, (tmp_path / "results").mkdir):  # first an empty one
        make()
        assert serve.main(["--model-repository", str(tmp_path)]) == 1
        assert capsys.readouterr().err == f"{said} Write one with build.py --output DIR\n"
    (tmp_path / "config.json").write_text("{}")  # a checkpoint's folder
    assert serve.main(["--model-repository", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{said} Write one with build.py --output DIR --model {tmp_path}\n"
    (tmp_path / "model" / "1").mkdir(parents=True)  # Triton completes the config of one that has none
    serve._check_models(tmp_path)


def test_a_repository_that_cannot_be_listed_is_named(tmp_path, capsys, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.iterdir", denied)
    assert serve.main(["--model-repository", str(tmp_path)]) == 1
    said = f"serve: [Errno 13] Permission denied: '{tmp_path}'\n"
    assert capsys.readouterr().err == said


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
        with pytest.raises(
            addresses.AddressError, match=rf"gRPC port {port} on 127[.]0[.]0[.]1 .*in use; end what"
        ):
            addresses.check_ports(addresses.resolve("127.0.0.1"), {"gRPC port": port})
        addresses.check_ports(addresses.resolve("::1"), {"gRPC port": port})  # another place
        client = socket.create_connection(("127.0.0.1", port))
        taken.accept()[0].close()
        client.close()
    addresses.check_ports(addresses.resolve("127.0.0.1"), {"gRPC port": port})  # though a connection lingers
    with pytest.raises(addresses.AddressError, match=r"HTTP port 70000 .*1 to 65535$"):
        addresses.check_ports(addresses.resolve("127.0.0.1"), {"HTTP port": 70000})
    with pytest.raises(addresses.AddressError, match=r"HTTP port is 0: name one of 1 to 65535"):
        addresses.check_ports(addresses.resolve("127.0.0.1"), {"HTTP port": 0})


def test_two_services_do_not_share_a_port(capsys, tmp_path):
    # tritonserver's HTTP port and the OpenAI API would both listen, and answer each other's requests.
    with contextlib.ExitStack() as stack:
        unused = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        port, grpc, metrics = (str(each.getsockname()[1]) for each in unused)
    arguments = ["--model-repository", str(tmp_path), "--backends", str(tmp_path), "--check"]
    arguments += ["--grpc-port", grpc, "--metrics-port", metrics]
    assert serve.main([*arguments, "--http-port", port, "--openai-port", port]) == 1
    assert f"HTTP port and OpenAI port are both {port}: use different ones" in capsys.readouterr().err
