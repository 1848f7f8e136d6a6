# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver with layers of the bundled model, as `make serve` starts it."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from email.message import Message
from pathlib import Path
from typing import Any, TypeVar

import psutil
import zmq

from engine.harness import shallow_model
from flashinfer_backend.config_tools import cli
from flashinfer_backend.launch import launcher as serve
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.addresses import resolve
from ports import free_ports
from waiting import wait_for

ROOT = Path(__file__).parents[2]
START_S = 240
TIMEOUT_S = 120
KEY = "a-key"  # of the OpenAI API, where it asks for one
LLM_LOGITS_MIB = 8  # max_logits_mib of the server `contract`
NGRAM = ("speculative_method=ngram", "max_draft_len=4")  # knobs
JSON_LOGITS_MIB = 4  # its max_json_logits_mib


def build_repository(
    folder: Path,
    *knobs: str,
    kv_tokens: int = 32768,
    model: Path | str | None = None,
    models: Mapping[str, Path | str] | None = None,
) -> Path:
    """A model repository with a model (without one: two layers of the bundled one), or `models` by name, and
    a KV cache of `kv_tokens` tokens; knobs override these."""
    defaults = ["device=cpu", f"max_tokens_in_paged_kv_cache={kv_tokens}"]
    defaults += [] if models else [f"model_dir={model or shallow_model()}"]
    given = {knob.partition("=")[0] for knob in knobs}
    defaults = [knob for knob in defaults if knob.partition("=")[0] not in given]
    named = [f"--model={name}={model}" for name, model in (models or {}).items()]
    arguments = ["--output", str(folder / "repository"), *named, "--set", *defaults, *knobs]
    assert cli.main(ROOT / "model_repo", arguments) == 0
    return folder / "repository"


def files_below(folder: Path) -> list[str]:
    """Paths of all files and folders in it, while others may remove some."""
    return [str(Path(at) / name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]


def fetch(
    url: str,
    body: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[int, Message, str]:
    """Status, headers and text of an answer; a POST if there is a body. options: of urlopen."""
    request = urllib.request.Request(url, body, dict(headers or {}))
    try:
        with urllib.request.urlopen(request, **{"timeout": TIMEOUT_S, **options}) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def answers_well(url: str, **options: Any) -> bool:
    """Whether somebody answers there, and with status 200."""
    with contextlib.suppress(OSError):
        return fetch(url, **options)[0] == 200
    return False


def request_bytes(path: str, body: Any) -> bytes:
    """A POST as it is sent."""
    data = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode()


class Launched:
    """A server that was started in a session and with run directories of its own. `launcher`: its process."""

    def __init__(self, command: Sequence[str], log_path: Path, **environment: str) -> None:
        self.log_path = log_path
        self.runs = Path(tempfile.mkdtemp(prefix="runs-"))  # unix sockets take no long paths
        env = {**os.environ, "XDG_RUNTIME_DIR": str(self.runs), "OMP_NUM_THREADS": "1", **environment}
        with log_path.open("w") as log:
            self.launcher = psutil.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.launcher.poll() is None, f"the server ended:\n{self.log[-5000:]}"
            return self.ready()

        wait_for(ready, "the server to be ready", START_S)

    def ready(self) -> bool:
        raise NotImplementedError

    def owns(self, process: psutil.Process, line: str) -> bool:
        """Whether a process with this command line is one of the server's."""
        return str(self.runs) in line

    def commands(self) -> dict[psutil.Process, str]:
        """The server's processes by command line; zombies do not count."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if self.owns(process, line) and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = line
        return found

    def leftovers(self) -> list[str]:
        """What is left of the server: processes, files of the run directory."""
        return [f"{process.pid} {line}" for process, line in self.commands().items()] + files_below(self.runs)

    def close(self) -> None:
        raise NotImplementedError


Started = TypeVar("Started", bound=Launched)


@contextlib.contextmanager
def while_ready(server: Started) -> Iterator[Started]:
    """The server once it is ready; it is closed at the end."""
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


class Server(Launched):
    """`launcher` is the process of flashinfer_backend.serve."""

    def __init__(
        self, repository: Path, folder: Path, command: list[str] | None = None, options: Sequence[str] = ()
    ) -> None:
        """command: what to run instead of the launcher; {http}, {grpc} and {metrics} stand for ports.
        options: further ones of the launcher."""
        http, grpc, self.metrics_port = free_ports(3)
        self.url, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.shm_prefix = f"fib{uuid.uuid4().hex[:8]}_"
        shm = ["--backend-config", f"python,shm-region-prefix-name={self.shm_prefix}"]
        self._by_serve = command is None
        if command is None:
            shm = []
            command = [sys.executable, "-m", "flashinfer_backend.serve"]
            command += ["--model-repository", str(repository)]
            command += ["--http-port", "{http}", "--grpc-port", "{grpc}", "--metrics-port", "{metrics}"]
            command += ["--shm-prefix", self.shm_prefix, *options, "--"]
        ports = {"http": http, "grpc": grpc, "metrics": self.metrics_port}
        words = [word.format(**ports) for word in command]
        super().__init__([*words, *shm], folder / "server.log")

    def wait_ready(self) -> None:
        super().wait_ready()
        if self._by_serve:  # from then on it watches what may die
            wait_for(lambda: "Ready. Try" in self.log, "serve to notice")

    def ready(self, path: str = "health") -> bool:
        """Readiness of the server, or of a model with path "models/NAME"."""
        return answers_well(f"{self.url}/v2/{path}/ready", timeout=20)

    def connection(self) -> http.client.HTTPConnection:
        """To the HTTP port."""
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=TIMEOUT_S)

    def raw(self, body: bytes, model: str = "ensemble", verb: str = "generate") -> tuple[int, Message, str]:
        """Status, headers and text of the answer to a POST."""
        return fetch(f"{self.url}/v2/models/{model}/{verb}", body)

    def sent(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a POST to a model has been sent."""
        host, port = self.url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        client.sendall(request_bytes(f"/v2/models/{path}", body))
        return client

    def post(self, body: dict[str, Any], model: str = "ensemble", stream: bool = False) -> Any:
        """Status and JSON of generate, or the list of JSON events of generate_stream."""
        verb = "generate_stream" if stream else "generate"
        status, _, text = self.raw(json.dumps(body).encode(), model, verb)
        if stream and text.startswith("data: "):  # with an error status as well
            return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        return status, json.loads(text)

    def text(self, prompt: str, max_tokens: int, **more: Any) -> str:
        """The completion, without its prompt."""
        body = {"text_input": prompt, "max_tokens": max_tokens, "exclude_input_in_output": True, **more}
        status, answer = self.post(body)
        assert status == 200, answer
        return str(answer["text_output"])

    def answers(self, prompt: str) -> bool:
        """Whether a request gets its text."""
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            return bool(self.post({"text_input": prompt, "max_tokens": 2})[0] == 200)
        return False

    def engine_status(self) -> protocol.Status:
        """The state that the engine tells."""
        watching = EngineWatch(self)
        try:
            return watching.status()
        finally:
            watching.close()

    def owns(self, process: psutil.Process, line: str) -> bool:
        """tritonserver, its stubs, the engine and its keeper."""
        return self.shm_prefix in line or super().owns(process, line)

    def matching(self, part: str) -> list[psutil.Process]:
        """The processes whose command line holds `part`."""
        return [process for process, line in self.commands().items() if part in line]

    @property
    def run_dir(self) -> Path:
        found = self.runs.glob("flashinfer-backend-*/*-*")
        (own,) = (path for path in found if not path.name.endswith("-processes"))
        return own

    def engine_pid(self) -> int:
        return int(json.loads((self.run_dir / "engine.json").read_text())["pid"])

    def leftovers(self) -> list[str]:
        """Its shared memory as well."""
        return super().leftovers() + [str(path) for path in Path("/dev/shm").glob(f"{self.shm_prefix}*")]

    def interrupt(self) -> int:
        """Ctrl-C: SIGINT to the launcher's process group. Returns its exit status."""
        os.killpg(self.launcher.pid, signal.SIGINT)
        return int(self.launcher.wait(TIMEOUT_S))

    def close(self) -> None:
        """Kills what is left of it, which takes no time: how a server ends is asked by tests of its own."""
        if self.launcher.poll() is None:
            self.launcher.kill()
        self.launcher.wait(TIMEOUT_S)

        def killed() -> bool:
            found = self.commands()  # a stub may just have started another engine
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return not found

        wait_for(killed, "the end of the server's processes")
        for region in Path("/dev/shm").glob(f"{self.shm_prefix}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(self.runs, ignore_errors=True)


class BothApis(Server):
    """The same with the OpenAI API beside tritonserver."""

    def __init__(self, repository: Path, folder: Path, options: Sequence[str] = ()) -> None:
        (self.openai_port,) = free_ports(1)
        super().__init__(repository, folder, options=["--openai-port", str(self.openai_port), *options])

    def wait_ready(self) -> None:
        super().wait_ready()
        wait_for(lambda: self.openai("/health")[0] == 200, "the OpenAI API", START_S)

    @property
    def run_dir(self) -> Path:
        (found,) = self.runs.glob("flashinfer-backend-*/*-llm")  # beside it are the metrics of the API
        return found

    def openai(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of an answer of the OpenAI API; status 0 where there is none."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.openai_port}{path}"
        with contextlib.suppress(OSError):
            return fetch(url, data, {"Authorization": f"Bearer {KEY}"})[::2]
        return 0, ""

    def owns(self, process: psutil.Process, line: str) -> bool:
        """The API's processes as well, whose command lines do not tell whose they are."""
        if "flashinfer_backend.openai" in line:
            return process.environ().get("XDG_RUNTIME_DIR") == str(self.runs)
        return super().owns(process, line)


def both_running(
    repository: Path, folder: Path, options: Sequence[str] = ()
) -> AbstractContextManager[BothApis]:
    """A server with both APIs that is ready."""
    return while_ready(BothApis(repository, folder, options))


def running(
    repository: Path, folder: Path, command: list[str] | None = None, options: Sequence[str] = ()
) -> AbstractContextManager[Server]:
    """A server that is ready."""
    return while_ready(Server(repository, folder, command, options))


def plain_command(repository: Path, tmp_path: Path) -> list[str]:
    """tritonserver as it is started by hand: without serve, and no explicit model control."""
    found = serve.find_server(tmp_path / "backends")
    args = serve.command(found, repository, resolve("127.0.0.1"), 1, 2, 3)
    names = {"--http-port": "{http}", "--grpc-port": "{grpc}", "--metrics-port": "{metrics}"}
    dropped = ("--model-control-mode", "--http-restricted-api", "--grpc-restricted-protocol")
    args.remove("--disable-auto-complete-config")
    pairs = [(name, names.get(name, value)) for name, value in zip(args[1::2], args[2::2], strict=True)]
    environment = serve.environment(found)
    setting = [f"{name}={environment[name]}" for name in ("PATH", "LD_LIBRARY_PATH")]
    return ["env", *setting, args[0]] + [word for pair in pairs if pair[0] not in dropped for word in pair]


class EngineWatch:
    """Reads the engine's status, as a stub does."""

    def __init__(self, server: Server) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(protocol.socket_address(server.run_dir))
        self._greet()

    def _greet(self) -> None:
        self._socket.send(protocol.encode(protocol.Hello(os.getpid())))

    def status(self) -> protocol.Status:
        """The next status that the engine sends."""
        while self._socket.poll(0):
            self._socket.recv_multipart()
        deadline = time.monotonic() + TIMEOUT_S
        while not self._socket.poll(2000):
            assert time.monotonic() < deadline, "the engine sends no status"
            self._greet()  # the goodbye of a watch before, of this process too, may have come after it
        return protocol.decode_status(self._socket.recv_multipart()[1])

    def close(self) -> None:
        self._socket.send(protocol.encode(protocol.Goodbye(os.getpid())))
        self._socket.close(linger=100)
