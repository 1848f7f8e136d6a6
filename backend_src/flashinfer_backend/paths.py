# SPDX-License-Identifier: Apache-2.0
"""Folders that several processes have to agree on."""

from __future__ import annotations

import os
from pathlib import Path

BUNDLED = "bundled"


def resolve_model_dir(name: str) -> Path:
    """Folder of the checkpoint or tokenizer called `name`: a path, or "bundled" for the small model
    that comes with the package.

    Raises FileNotFoundError when there is no such folder.
    """
    folder = Path(__file__).parent / "bundled_model" if name == BUNDLED else Path(name).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: name a local checkpoint folder, or {BUNDLED!r}")
    return folder


def run_dir(server_pid: int, llm_model_name: str) -> Path:
    """Folder of the sockets of one server's engine. Every stub of that server derives the same one;
    a stub's server is its parent process. The folder need not exist yet."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(base) / f"flashinfer-backend-{os.getuid()}" / f"{server_pid}-{llm_model_name}"
