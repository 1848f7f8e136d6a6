# SPDX-License-Identifier: Apache-2.0
"""Folders that several processes have to agree on."""

import os
import re
from pathlib import Path

from flashinfer_backend.core import processes

BUNDLED = "bundled"
CONVERT = "`.venv/bin/python tools/convert_gguf.py FILE.gguf FOLDER`"
SERVE_PID = "FLASHINFER_BACKEND_SERVE_PID"  # set by serve for the server and all that comes of it


def named_folder(name: str) -> Path:
    """Folder of the checkpoint or tokenizer called `name`, there or not: a path, or "bundled" for the small
    model that comes with the package."""
    return Path(__file__).parents[1] / "bundled_model" if name == BUNDLED else Path(name).expanduser()


def resolve_model_dir(name: str) -> Path:
    """named_folder of `name`. Raises FileNotFoundError when there is no such folder."""
    folder = named_folder(name)
    if folder.is_file():
        cure = "name a folder with config.json, tokenizer.json and model.safetensors"
        if folder.suffix.lower() == ".gguf":
            cure += f"; {CONVERT} makes one of a GGUF file"
        raise FileNotFoundError(f"{folder} is a file: {cure}")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no folder {folder}: name a local checkpoint folder, or {BUNDLED!r}; nothing is downloaded here,"
            " but `hf download ORGANISATION/MODEL --local-dir FOLDER` fetches one from the Hugging Face hub"
        )
    return folder


def resolve_drafter_dir(name: str) -> Path:
    """The same of a drafter: "bundled" is the bundled model's."""
    return resolve_model_dir(name) / ("eagle3" if name == BUNDLED else "")


def unservable(path: Path) -> str | None:
    """Why Triton's Python backend cannot start a model from `path`, or None. It puts the path into a shell
    command as it is, and reads it as ASCII."""
    text = str(path.absolute())
    braces = re.search(r"\{.*(,|\.\.).*\}", text)  # a list of words to a shell
    if text.isascii() and not braces and not re.search(r"[^\w./+,:=@%~^{}\]-]", text):
        return None
    return (
        f"Triton's Python backend starts no models from {text}: a path of ASCII letters, digits and"
        " . _ / + , : = @ % ~ ^ - is needed; move it, or name it by a link (ln -s) whose path is such"
    )


def server_pid() -> int:
    """In a stub: tritonserver, which starts its stubs itself.

    Raises RuntimeError if that has ended: the stub then has another parent, which can live indefinitely.
    """
    parent, words = os.getppid(), processes.stub_words("self")
    if words and words[5] != str(parent):
        raise RuntimeError(f"tritonserver (process {words[5]}) has ended while this model was being loaded")
    return parent


def owner_pid() -> int:
    """In a stub: the process that the run directory is named by and that the engine ends with. That is serve,
    which restarts tritonserver when it has to and keeps the engine meanwhile; without serve it is
    tritonserver. Raises as `server_pid`."""
    server = server_pid()
    serve = os.environ.get(SERVE_PID, "")
    if serve.isdigit():
        try:
            _, fields = processes.stat(server)
        except OSError:  # tritonserver has just ended
            return server
        if int(fields[1]) == int(serve):  # not a variable that a server started by hand has inherited
            return int(serve)
    return server


def run_dir(owner: int, llm_model_name: str) -> Path:
    """Folder of the sockets of one server's engine. Every stub of that server derives the same one, from
    `owner_pid`. The folder need not exist yet."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(base) / f"flashinfer-backend-{os.getuid()}" / f"{owner}-{llm_model_name}"


def processes_dir(owner: int) -> Path:
    """Folder of the files by which the processes of one server's models see that the others go on."""
    return run_dir(owner, "processes")


def processes_dirs() -> list[Path]:
    """These folders of all servers of this user."""
    return list(run_dir(0, "").parent.glob("*-processes"))


def engine_dir(run_dir: Path, replica: int) -> Path:
    """Run directory of one of several engines of a model: of the first the model's (`run_dir`), of
    others a folder next to it. No model's name has an @."""
    return run_dir.with_name(f"{run_dir.name}@{replica}") if replica else run_dir


def replica_of(engine_dir: Path) -> tuple[str, int]:
    """(the model's own run directory's name, the engine's number) of an engine's run directory."""
    name, _, number = engine_dir.name.partition("@")
    return name, int(number or 0)
