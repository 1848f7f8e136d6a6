# SPDX-License-Identifier: Apache-2.0
"""Runs Triton's perf_analyzer with the two libraries that it expects of the system.

    python -m client.perf_analyzer -m ensemble -i grpc --streaming ...
    python -m client.perf_analyzer --with genai-perf profile ...

Every argument goes to perf_analyzer. After --with another program runs, with perf_analyzer on its PATH.
perf_analyzer is in tritonclient's wheels up to 2.60. This project's server brings copies of the libraries,
libb64 and libcudart, under other names.
"""

import ctypes
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROGRAM = "perf_analyzer"
# The name under which perf_analyzer loads a library, and that of the copy in nvidia-pytriton's wheel.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def find_program(scripts: Path | None = None) -> Path:
    """perf_analyzer in a folder of programs (default: this Python's). Raises FileNotFoundError saying how to
    get it."""
    program = (scripts or Path(sysconfig.get_path("scripts"))) / PROGRAM
    if not program.is_file():
        raise FileNotFoundError(
            f"{program} is not there; it comes with tritonclient up to 2.60:"
            " pip install 'tritonclient[all]==2.50.0'"
        )
    return program


def find_libraries(packages: Path | None = None) -> dict[str, Path]:
    """The copies to take, by the name that perf_analyzer loads; none of what the system has. `packages`: the
    folder of installed packages. Raises FileNotFoundError saying how to get what is missing."""
    copies = (packages or Path(sysconfig.get_path("purelib"))) / "nvidia_pytriton.libs"
    found = {}
    for name, pattern in LIBRARIES.items():
        if _loads(name):
            continue
        copy = next(iter(sorted(copies.glob(pattern))), None)
        if copy is None:
            raise FileNotFoundError(
                f"{name} is neither on the system nor in {copies}: pip install nvidia-pytriton==0.7.0, or"
                " apt-get install libb64-0d and CUDA 12's cudart"
            )
        found[name] = copy
    return found


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Runs perf_analyzer with these arguments, or what follows --with; its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        program, libraries = find_program(), find_libraries()
    except FileNotFoundError as missing:
        print(f"client.perf_analyzer: {missing}", file=sys.stderr)
        return EXIT_USAGE
    with tempfile.TemporaryDirectory() as folder:
        for name, path in libraries.items():
            Path(folder, name).symlink_to(path)
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": _in_front(Path(folder), "LD_LIBRARY_PATH"),
            "PATH": _in_front(program.parent, "PATH"),
        }
        command = arguments[1:] if arguments[:1] == ["--with"] else [str(program), *arguments]
        if not command:
            print("client.perf_analyzer: --with needs a program to run", file=sys.stderr)
            return EXIT_USAGE
        try:
            return subprocess.run(command, env=env).returncode
        except FileNotFoundError:
            print(f"client.perf_analyzer: there is no program {command[0]}", file=sys.stderr)
            return EXIT_USAGE
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def _in_front(folder: Path, variable: str) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])


if __name__ == "__main__":
    sys.exit(main())
