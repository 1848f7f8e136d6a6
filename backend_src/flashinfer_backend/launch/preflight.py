# SPDX-License-Identifier: Apache-2.0
"""What has to be so before tritonserver is started: its libraries, its version, the repository."""

import contextlib
import fcntl
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib import util as importlib_util
from pathlib import Path
from typing import Any

from flashinfer_backend.config_tools import model_config
from flashinfer_backend.openai.arguments import KEYS_VARIABLE

IMAGE_ROOT = Path("/opt/tritonserver")  # in nvcr.io/nvidia/tritonserver
# The server's threads build and free hundreds of small objects for each streamed token. By default glibc
# gives the memory back and asks for it again, thousands of times a second, and caches few objects a thread.
MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "tcache_count": 127,
        "top_pad": 16 << 20,
        "trim_threshold": 32 << 20,
        "mmap_threshold": 32 << 20,  # it would grow to this, but not once the others are set
    }.items()
)
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

Version = tuple[int, int]  # 2.51: (2, 51)
WHEEL_SERVERS: dict[str, Version] = {"0.7.0": (2, 51)}  # nvidia-pytriton: its tritonserver
NUMPY_1_UNTIL: Version = (2, 51)
FEWEST_FILES = 128  # that a process may have open: tritonserver has 68 before the first connection
# Releases 25.09 to 26.07: with several instances, preserve_ordering answers in the order of completion.
UNORDERED: tuple[Version, Version] = ((2, 61), (2, 71))


class ServeError(RuntimeError):
    """The server cannot be started; the text says what to do."""


@dataclass(frozen=True)
class Installation:
    """Where a tritonserver is. `backends` and `libraries`: None where the server finds them itself.
    `version`: None where it is not known."""

    binary: Path
    backends: Path | None = None
    libraries: Path | None = None
    version: Version | None = None

    @property
    def stub(self) -> Path:
        """The program that runs a Python model."""
        return (self.backends or IMAGE_ROOT / "backends") / "python" / "triton_python_backend_stub"


def find_server(backends_copy: Path | None) -> Installation:
    """The server of NVIDIA's image when there is one, else the wheel's.

    The wheel has a stub for each Python, and the backend uses the one next to its library: the
    backend is copied to a folder in `backends_copy` (None: in ~/.cache) with the right stub. Raises
    ServeError.
    """
    if (IMAGE_ROOT / "bin" / "tritonserver").exists():
        return Installation(IMAGE_ROOT / "bin" / "tritonserver", version=image_version(IMAGE_ROOT))
    spec = importlib_util.find_spec("pytriton")
    if spec is None or spec.submodule_search_locations is None:
        raise ServeError(
            "no tritonserver: neither /opt/tritonserver (NVIDIA's image) nor the wheel nvidia-pytriton is"
            " here; install the latter with `pip install -e '.[server]'` in this project's folder"
        )
    root = Path(spec.submodule_search_locations[0]) / "tritonserver"
    stub = root / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        known = sorted(path.parent.name for path in stub.parents[1].glob("*/triton_python_backend_stub"))
        raise ServeError(f"tritonserver has no stub for Python {PYTHON}, only for {', '.join(known)}")
    wheel = metadata.version("nvidia-pytriton")
    try:
        if backends_copy is None:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            backends_copy = cache / "flashinfer-backend" / "backends"
        folder = backends_copy / f"{wheel}-python{PYTHON}"
        if not folder.exists():  # never written to again: a running server may have it open
            _copy_backends(root / "backends", stub, folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        # A folder's copy has an error for each file: the first one is told.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise ServeError(
            f"no place for a copy of Triton's Python backend: {reason}; name a folder that this user"
            " can write to with --backends DIR, or in XDG_CACHE_HOME"
        ) from None
    return Installation(
        binary=root / "bin" / "tritonserver",
        backends=folder,
        libraries=root.parents[1] / "nvidia_pytriton.libs",
        version=WHEEL_SERVERS.get(wheel),
    )


def _copy_backends(backends: Path, stub: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        shutil.copytree(backends, unfinished, dirs_exist_ok=True)
        shutil.copy(stub, unfinished / "python")
        with contextlib.suppress(OSError):  # someone else was faster
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def image_version(root: Path) -> Version | None:
    """Version of the server in NVIDIA's image: a file next to it has it, or the environment."""
    text = os.environ.get("TRITON_SERVER_VERSION", "")
    with contextlib.suppress(OSError):
        text = (root / "TRITON_VERSION").read_text()
    found = re.match(r"\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def environment(server: Installation) -> dict[str, str]:
    """Environment of the server. Its stubs take the first python3 on PATH for theirs and need libpython.

    Raises ServeError where the loader finds no libpython.
    """
    env = {name: value for name, value in os.environ.items() if name != KEYS_VARIABLE}
    env.setdefault("GLIBC_TUNABLES", MALLOC)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if server.libraries is None:
        return env
    folders = [str(server.libraries)]
    folders += [env["LD_LIBRARY_PATH"]] if env.get("LD_LIBRARY_PATH") else []
    env["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    own = sysconfig.get_config_var("LIBDIR") or ""
    if missing_libraries(server.stub, env) and Path(own, f"libpython{PYTHON}.so.1.0").exists():
        env["LD_LIBRARY_PATH"] = os.pathsep.join([folders[0], own, *folders[1:]])
    if missing := missing_libraries(server.stub, env):
        raise ServeError(
            f"{', '.join(missing)} is missing, which Triton's Python backend is linked with. On Debian or"
            f" Ubuntu: apt-get install libpython{PYTHON}; with pyenv: build Python {PYTHON} again with"
            " PYTHON_CONFIGURE_OPTS=--enable-shared"
        )
    return env


def missing_libraries(program: Path, env: dict[str, str]) -> list[str]:
    """Shared libraries that the loader does not find for a program. A separate process is asked, since this
    one's libraries are found by their names whatever their folder."""
    answer = subprocess.run(
        [program], env={**env, "LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True, text=True, check=False
    )
    return re.findall(r"^\s*(\S+) => not found", answer.stdout, re.MULTILINE)


def check_numpy(server: Installation, numpy_version: str) -> None:
    """Raises ServeError for a numpy whose strings the server's Python backend cannot read: the models load,
    and their processes end at the first request."""
    if server.version and server.version <= NUMPY_1_UNTIL and int(numpy_version.partition(".")[0]) >= 2:
        raise ServeError(
            f"numpy {numpy_version} is installed, and tritonserver {_text(server.version)} ends at the first"
            f" request with numpy 2: `{sys.executable} -m pip install 'numpy<2'`"
        )


def check_open_files() -> None:
    """Raises ServeError where the server would accept connections without ever being ready."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        raise ServeError(
            f"a process may have only {hard} files open here (ulimit -Hn), and tritonserver needs at least"
            f" {FEWEST_FILES}, one more for each connection: start the shell, service or container with more,"
            " Docker for one by --ulimit nofile=65536"
        )


def check_ordering(server: Installation, repository: Path) -> None:
    """Raises ServeError for several instances of postprocessing on a server that swaps their answers."""
    if server.version is None or not UNORDERED[0] <= server.version <= UNORDERED[1]:
        return
    for file, model in _configs(repository).items():
        count = sum(max(group.count, 1) for group in model.instance_group)
        if model.dynamic_batching.preserve_ordering and count > 1:
            raise ServeError(
                f"tritonserver {_text(server.version)} (of the releases 25.09 to 26.07) does not keep the"
                f" order of answers of several instances, and {file.parent.name} has {count}: chunks of a"
                " stream could be swapped. Build with postprocessing_instance_count=1, or take 26.08 or later"
            )


def check_batch_sizes(repository: Path) -> None:
    """Raises ServeError for sizes of batches, changed by hand, with which tritonserver loads no model."""
    models = _configs(repository)
    sizes = {model.name or file.parent.name: model.max_batch_size for file, model in models.items()}
    for file, model in models.items():
        size = model.max_batch_size
        cure = "build again with triton_max_batch_size="
        if (preferred := max(model.dynamic_batching.preferred_batch_size, default=0)) > size:
            raise ServeError(
                f"{file}: max_batch_size is {size}, and preferred_batch_size {preferred} is above it;"
                f" {cure}{size}, which sets all of them"
            )
        for step in model.ensemble_scheduling.step:
            if (least := sizes.get(step.model_name, size)) < size:
                raise ServeError(
                    f"{file}: max_batch_size is {size}, and {step.model_name}, a step of it, has {least};"
                    f" {cure}{least}, which sets all of them"
                )


def _configs(repository: Path) -> dict[Path, Any]:
    """The ModelConfig of each config.pbtxt. Raises ServeError."""
    try:
        return {file: model_config.read(file) for file in sorted(repository.glob("*/config.pbtxt"))}
    except ValueError as error:
        raise ServeError(str(error)) from None


@contextlib.contextmanager
def serving(repository: Path) -> Iterator[None]:
    """While it is open, build.py does not replace the repository. Several servers may serve one."""
    fd = os.open(repository, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
