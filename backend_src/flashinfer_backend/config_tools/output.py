# SPDX-License-Identifier: Apache-2.0
"""Writes a built repository as a whole or not at all, and never over files that somebody else made."""

import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashinfer_backend.config_tools.knobs import LLM

RECORD = "build.json"


def with_record(
    files: dict[str, bytes], command: str, llm_name: str, several: Mapping[str, dict[str, str]]
) -> dict[str, bytes]:
    """The files and a record of them, by which a later build knows its own output again. several: every
    knob's value of each model by its name, which is "" where there is one model."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    record: dict[str, Any] = {"command": command, "llm_name": llm_name, "files": digests}
    record |= {"values": several[""]} if "" in several else {"models": list(several)}
    return files | {RECORD: (json.dumps(record, indent=2) + "\n").encode()}


def obstacle(output: Path, force: bool) -> str | None:
    """Why `output` must not be replaced, or None. force: files that were changed by hand may be lost."""
    if not output.exists() and not output.is_symlink():
        return None
    if output.is_symlink() or not output.is_dir():
        return f"{output} is not a folder; name a folder, new or made by an earlier build"
    if not any(output.iterdir()):
        return None
    record = _record(output)
    if record is None:
        return (
            f"{output} was not made by build.py (it has no valid {RECORD}) and is left alone; name another "
            "folder or remove it"
        )
    digests, found = record["files"], _found_files(output)
    changed = [
        name
        for name in found
        if name != RECORD and digests.get(name) != hashlib.sha256((output / name).read_bytes()).hexdigest()
    ]
    if changed and not force:
        return (
            f"{output} holds files changed or added since it was built: {', '.join(changed)}; turn "
            "the changes into knobs and overwrite these files with --force, or name another folder"
        )
    return None


def built_llm_name(output: Path) -> str | None:
    """Name of the llm model in a folder that build.py wrote; None for another, or none."""
    record = _record(output)
    return str(record["llm_name"]) if record else None


def built_values(output: Path) -> dict[str, str]:
    """The knobs' values in a folder of one model that build.py wrote; none in another, and where an older
    build.py did not record them."""
    record = _record(output)
    return dict(record.get("values", {})) if record else {}


def built_models(output: Path) -> list[str]:
    """Names of the several models in a folder that build.py wrote; none in another."""
    record = _record(output)
    return [str(name) for name in record.get("models", [])] if record else []


def _record(output: Path) -> dict[str, Any] | None:
    """The record that with_record wrote, None where there is none."""
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    known = isinstance(record, dict) and isinstance(record.get("files"), dict)
    known = known and isinstance(record.get("values", {}), dict)
    return record if known and isinstance(record.get("llm_name"), str) else None


@contextlib.contextmanager
def unserved(output: Path) -> Iterator[None]:
    """While it is open, no server is started on the folder. Raises OSError (EBUSY) where one serves it."""
    if not output.is_dir():
        yield
        return
    fd = os.open(output, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = "it is being served; stop that server first, or name another folder"
            raise OSError(errno.EBUSY, busy) from None
        except OSError:  # some file systems have no locks
            pass
        yield
    finally:
        os.close(fd)


def replace_folder(output: Path, files: dict[str, bytes]) -> None:
    """Write all files next to `output` and rename them into its place. Raises OSError, EBUSY if a server uses
    the folder."""
    parent = output.parent
    parent.mkdir(parents=True, exist_ok=True)
    with unserved(output), tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        for name, data in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
        if output.exists():
            output.rename(old)
        try:
            new.rename(output)
        except BaseException:
            if old.exists():
                old.rename(output)
            raise


def diff(output: Path, defaults: dict[str, bytes], files: dict[str, bytes], llm_name: str) -> str:
    """Unified diff from the existing files, or from the defaults without any, to `files`. Comments,
    which repeat the command, do not count. The llm model is compared with itself across a change of name."""
    before, old_llm_name = defaults, LLM
    if output.is_dir() and (record := _record(output)):
        before = {name: (output / name).read_bytes() for name in _found_files(output)}
        old_llm_name = record["llm_name"]
    renamed = {_renamed(name, old_llm_name, llm_name): name for name in before}
    lines: list[str] = []
    for name in sorted(renamed.keys() | files.keys()):
        if name == RECORD:
            continue
        old_name = renamed.get(name, "")
        old, new = _lines(before.get(old_name, b"")), _lines(files.get(name, b""))
        from_label = f"a/{old_name}" if old_name else "/dev/null"
        to_label = f"b/{name}" if name in files else "/dev/null"
        lines += difflib.unified_diff(old, new, from_label, to_label)
    return "".join(lines)


def _renamed(name: str, old_folder: str, new_folder: str) -> str:
    folder, slash, rest = name.partition("/")
    return new_folder + slash + rest if folder == old_folder else name


def _lines(data: bytes) -> list[str]:
    lines = data.decode(errors="replace").splitlines(keepends=True)
    return [line for line in lines if not line.startswith("#")]


def _found_files(folder: Path) -> list[str]:
    """Relative paths of the files below a folder, without Python's caches."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    )
