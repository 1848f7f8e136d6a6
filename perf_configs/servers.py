# SPDX-License-Identifier: Apache-2.0
"""Starts a server as perf_configs/servers.toml says, waits until it is healthy, and ends it with all its
children."""

import http.client
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from client.machine import gpu_query
from client.ready import listed_models
from client.wire import OPENAI
from flashinfer_backend.core.parent import end_with_parent

ROOT = Path(__file__).parent.parent
STOP_SECONDS = 30.0
CHECK_SECONDS = 60.0
GPU_FREE_MIB = 4096  # more than before on a GPU counts as memory of a server that ends
REPORT_SECONDS = 30.0  # of a start, between two lines that say what it waits for
KEPT_LOG_BYTES = 300_000


class StartError(RuntimeError):
    """A server could not be prepared or did not become healthy; the message ends with its last output."""


@dataclass(frozen=True)
class Variant:
    """A way to run a server: its flags, and variables laid over the environment. orders_by_priority: it takes
    waiting requests with a smaller priority first; others may refuse requests that have one. prefix_caching:
    it caches prefixes, which all others of a peer's do not."""

    flags: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    orders_by_priority: bool = False
    prefix_caching: bool = False


@dataclass(frozen=True)
class ServerSpec:
    """name is a table of servers.toml. check, prepare and command are bash scripts: is what it needs there,
    what comes before the start, the server. No command means that it is not started here; health and version
    are paths of its HTTP port. variants: what it can be started as; variant: the name of the one that it is,
    "" where there is none to choose."""

    name: str
    backend: str
    health: str
    version: str
    command: str
    start_seconds: float
    prepare: str = ""
    check: str = ""
    model: str | None = None
    variants: dict[str, Variant] = field(default_factory=dict)
    variant: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @property
    def settings(self) -> Variant:
        """The flags and variables of its variant."""
        return self.variants[self.variant] if self.variant else Variant()


def read_servers() -> dict[str, ServerSpec]:
    """All servers of servers.toml by name, each as its first variant."""
    tables = msgspec.toml.decode(Path(__file__).with_name("servers.toml").read_bytes())
    found = {}
    for name, table in tables.items():
        variants = {key: Variant(**value) for key, value in table.pop("variants", {}).items()}
        found[name] = ServerSpec(name=name, **table, variants=variants, variant=next(iter(variants), ""))
    return found


def choose_servers(names: str, known: dict[str, ServerSpec]) -> list[ServerSpec]:
    """What a comma list of NAME, NAME:VARIANT and NAME:all asks for, each once, in its order. Raises
    ValueError for a name or variant that there is not."""
    chosen: dict[str, ServerSpec] = {}
    for item in (item.strip() for item in names.split(",")):
        name, _, variant = item.partition(":")
        if name not in known:
            raise ValueError(f"unknown server {name}; servers are {', '.join(known)}")
        spec = known[name]
        if variant and variant not in spec.variants and (variant != "all" or not spec.variants):
            those = f"variants are {', '.join([*spec.variants, 'all'])}" if spec.variants else "it has none"
            raise ValueError(f"unknown variant {variant} of server {name}; {those}")
        for each in spec.variants if variant == "all" else [variant or spec.variant]:
            one = replace(spec, variant=each)
            chosen[one.label] = one
    return list(chosen.values())


def server_names(names: str) -> list[ServerSpec]:
    """The type of an option: what choose_servers takes."""
    try:
        return choose_servers(names, read_servers())
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Running:
    """A healthy server: its base URL, the seconds it took to start (None if it ran already), what it calls
    itself, and the model to ask for (None: the load generator's default)."""

    url: str
    start_seconds: float | None
    version: str
    model: str | None = None

    @property
    def since(self) -> str:
        """How it came to run, for a line on the terminal."""
        return "running already" if self.start_seconds is None else f"start {self.start_seconds} s"


def check(spec: ServerSpec, port: int) -> None:
    """Raises StartError where what the server needs is not installed, found out without starting it."""
    if not spec.check:
        return
    with tempfile.TemporaryDirectory(prefix=f"perf-{spec.name}-") as work:
        environment = os.environ | _variables(spec, port, Path(work))
        try:
            done = subprocess.run(
                ["bash", "-ec", spec.check], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=CHECK_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise StartError(f"{spec.label}: its check took more than {CHECK_SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stdout.decode(errors="replace").strip()
        raise StartError(f"{spec.label} cannot be started{_where_to_find(spec)}: {said}")


def _where_to_find(spec: ServerSpec) -> str:
    """What to set for a server that lives in an environment of its own; "" for one of this interpreter."""
    python, site = (f"{spec.name.upper()}_{name}" for name in ("PYTHON", "SITE"))
    if python not in spec.check:
        return ""
    return (
        f" ({python} should name the interpreter that has {spec.name}, or {site} the folder where it is"
        " installed)"
    )


def _variables(spec: ServerSpec, port: int, work: Path) -> dict[str, str]:
    """What all of a server's scripts have in their environment."""
    return {
        "PORT": str(port), "GRPC_PORT": str(port + 1), "METRICS_PORT": str(port + 2), "WORK": str(work),
        "PYTHON": sys.executable, "FLAGS": spec.settings.flags,
        "PREFIX_CACHING": "on" if spec.settings.prefix_caching else "off", **spec.settings.environment,
    }  # fmt: skip


@contextmanager
def serve(
    spec: ServerSpec, variables: dict[str, str], work: Path, port: int, limit: float, kept: Path
) -> Iterator[Running]:
    """Prepares and starts the server, yields it once healthy and stops it. limit bounds preparation and
    start, in seconds, beside the spec's own bound. The end of its log goes to kept, which stderr names, where
    the start fails or anything is raised before the server is stopped. Raises StartError."""
    work.mkdir(parents=True, exist_ok=True)
    environment = os.environ | variables | _variables(spec, port, work)
    url = f"http://127.0.0.1:{port}"
    if _answers(url + spec.health):
        raise StartError(f"{url}{spec.health} answers already; is another server running on port {port}?")
    cut = ", all that was left of --time-limit" if limit < spec.start_seconds else ""
    seconds = max(0.0, min(limit, spec.start_seconds))
    start = _Start(spec.label, work / f"{spec.name}.log", seconds, cut)
    process: subprocess.Popen[bytes] | None = None
    used_before = used_mib()
    with start.log_path.open("wb") as log:
        try:
            if spec.prepare:
                _prepare(spec, environment, log, start)
            process = _spawn(spec.command, environment, log)
            while not _answers(url + spec.health):
                if process.poll() is not None:
                    said = tail(start.log_path)
                    raise StartError(f"{spec.name} ended with status {process.returncode}\n{said}")
                start.wait(f"{spec.name} not healthy after {{limit:.0f}} s")
            yield Running(url, round(start.seconds, 1), server_version(url, spec), spec.model)
        except BaseException:
            # Before the server is stopped: what ends this call may not wait for that.
            try:
                keep_log(start.log_path, kept)
                where = f"the end of its log is in {kept}"
            except OSError as error:
                where = f"its log cannot be kept in {kept}: {error.strerror}"
            print(f"{spec.label}: {where}", file=sys.stderr, flush=True)
            raise
        finally:
            if process is not None:
                _stop(process)
                wait_for_free_gpus(used_before)


def serve_each(
    specs: Sequence[ServerSpec], variables: dict[str, str], port: int, program: str,
    measure: Callable[[ServerSpec, Running], None],
) -> None:  # fmt: skip
    """Starts servers one after the other, each to be measured. Logs of failed ones are kept under the
    program's name. Raises StartError, before the first start where one of them cannot be started."""
    for spec in specs:
        check(spec, port)
    for spec in specs:
        with tempfile.TemporaryDirectory(prefix=f"perf-{spec.name}-") as work:
            kept = Path(f"{program}-{spec.name}.log").resolve()
            with serve(spec, variables, Path(work), port, math.inf, kept) as running:
                measure(spec, running)


class _Start:
    """A server's start: what of its time has passed, and a line about it now and then. cut: what a problem
    adds where the limit is shorter than the server may take."""

    def __init__(self, label: str, log_path: Path, limit: float, cut: str) -> None:
        self.label, self.log_path, self.limit, self.cut = label, log_path, limit, cut
        self.began = self.said = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    def wait(self, problem: str) -> None:
        """A moment. Raises StartError with the problem ({limit} replaced) once the time is up."""
        if self.seconds > self.limit:
            problem = problem.format(limit=self.limit) + self.cut
            raise StartError(f"{problem}\n{tail(self.log_path)}")
        if time.monotonic() - self.said >= REPORT_SECONDS:
            self.said = time.monotonic()
            passed = f"{self.seconds:.0f} s, of at most {self.limit:.0f}"
            print(
                f"{self.label}: still starting ({passed}), its log's last line: {last_line(self.log_path)}",
                flush=True,
            )
        time.sleep(0.25)


def running_at(url: str, spec: ServerSpec) -> Running:
    """The server that runs at url already. Raises StartError if it is not healthy."""
    url = url.rstrip("/")
    if not _answers(url + spec.health):
        raise StartError(f"{url}{spec.health} does not answer with status 200; is {spec.name} running there?")
    return Running(url, None, server_version(url, spec), _model_at(url, spec))


def _model_at(url: str, spec: ServerSpec) -> str | None:
    """The model to ask a server for that was started elsewhere: of an OpenAI server the first that it lists,
    unless it has one of the spec's name or lists none."""
    if spec.backend not in OPENAI:
        return spec.model
    try:
        listed = listed_models(url)
    except (OSError, ValueError):
        return spec.model
    return spec.model if spec.model in listed else listed[0]


def server_version(url: str, spec: ServerSpec) -> str:
    """What the server says about itself (`version` of its version path), or "unknown"."""
    try:
        with urllib.request.urlopen(url + spec.version, timeout=5) as response:
            return str(json.load(response)["version"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "unknown"


def tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def last_line(path: Path, characters: int = 200) -> str:
    """The log's last line that is not empty, cut to its beginning; "(none)" where there is none."""
    lines = _end_of(path, 20_000).decode(errors="replace").splitlines()
    return next((line.strip()[:characters] for line in reversed(lines) if line.strip()), "(none)")


def keep_log(path: Path, kept: Path) -> None:
    """Copies the last KEPT_LOG_BYTES of a log, and says in the copy what is left out."""
    data, size = _end_of(path, KEPT_LOG_BYTES), path.stat().st_size
    kept.parent.mkdir(parents=True, exist_ok=True)
    note = f"[the first {size - len(data)} bytes are left out]\n" if size > len(data) else ""
    kept.write_bytes(note.encode() + data)


def _end_of(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size)


def used_mib() -> list[float]:
    """Memory in use on each of this machine's GPUs, nan where it is not said; none without nvidia-smi."""
    words = [line.split()[0] for line in gpu_query("memory.used")]
    return [float(word) if word.isdigit() else math.nan for word in words]


def wait_for_free_gpus(before: Sequence[float], seconds: float = 30.0) -> None:
    """Waits until a stopped server's memory is back on every GPU. before: used_mib() when it was started;
    what other programs had by then is theirs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pairs = zip(used_mib(), before, strict=False)  # none where nvidia-smi failed once
        if not any(now > was + GPU_FREE_MIB for now, was in pairs):
            return
        time.sleep(0.5)


def _prepare(spec: ServerSpec, environment: dict[str, str], log: IO[bytes], start: _Start) -> None:
    process = _spawn(spec.prepare, environment, log)
    try:
        while process.poll() is None:
            start.wait(f"preparing {spec.name} took more than {{limit:.0f}} s")
    finally:
        _stop(process)
    if process.returncode != 0:
        message = f"preparing {spec.name} ended with status {process.returncode}"
        raise StartError(f"{message}\n{tail(start.log_path)}")


def _spawn(script: str, environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    # Its own process group, so that what it starts can be ended with it. A benchmark that is killed must not
    # leave a server on the GPU.
    return subprocess.Popen(
        ["bash", "-ec", script], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent,
    )  # fmt: skip


def _stop(process: subprocess.Popen[Any]) -> None:
    """SIGTERM to the server, then SIGKILL to whatever of its group is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader while it has members
    process.wait(5)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False
