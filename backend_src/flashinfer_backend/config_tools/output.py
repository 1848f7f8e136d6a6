# SPDX-License-Identifier: Apache-2.0
"""Writes a built repository as a whole or not at all, and never over files that somebody else made."""

from __future__ import annotations

import difflib
import hashlib
import json
import tempfile
from pathlib import Path

RECORD = "build.json"


def with_record(files: dict[str, bytes], command: str) -> dict[str, bytes]:
    """The files and a record of them, by which a later build knows its own output again."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    record = {"command": command, "files": digests}
    return files | {RECORD: (json.dumps(record, indent=2) + "\n").encode()}


def obstacle(output: Path) -> str | None:
    """Why `output` must not be replaced, or None."""
    if not output.exists() and not output.is_symlink():
        return None
    if output.is_symlink() or not output.is_dir():
        return f"{output} is not a folder; name a folder, new or made by an earlier build"
    found = _found_files(output)
    if not found:
        return None
    try:
        digests = json.loads((output / RECORD).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return (
            f"{output} was not made by build.py (it has no {RECORD}) and is left alone; name another folder "
            "or remove it"
        )
    changed = [
        name
        for name in found
        if name != RECORD and digests.get(name) != hashlib.sha256((output / name).read_bytes()).hexdigest()
    ]
    if changed:
        return (
            f"{output} holds files changed or added since it was built: {', '.join(changed)}; turn "
            "the changes into knobs and remove these files, or name another folder"
        )
    return None


def replace_folder(output: Path, files: dict[str, bytes]) -> None:
    """Write all files beside `output` and put them in its place by renaming."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
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


def diff(output: Path, defaults: dict[str, bytes], files: dict[str, bytes]) -> str:
    """Unified diff from what is there, or from the defaults where nothing is there, to `files`. Comments,
    which repeat the command, do not count."""
    if output.is_dir() and _found_files(output):
        before = {name: (output / name).read_bytes() for name in _found_files(output)}
    else:
        before = defaults
    lines: list[str] = []
    for name in sorted(before.keys() | files.keys()):
        if name == RECORD:
            continue
        old, new = _lines(before.get(name, b"")), _lines(files.get(name, b""))
        from_name = f"a/{name}" if name in before else "/dev/null"
        to_name = f"b/{name}" if name in files else "/dev/null"
        lines += difflib.unified_diff(old, new, from_name, to_name)
    return "".join(lines)


def _lines(data: bytes) -> list[str]:
    lines = data.decode(errors="replace").splitlines(keepends=True)
    return [line for line in lines if not line.startswith("#")]


def _found_files(folder: Path) -> list[str]:
    """Relative paths of the files below a folder, without what Python caches beside a model.py."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    )
