# SPDX-License-Identifier: Apache-2.0
"""What was measured, in a form that goes into results: names and hashes, and no folder of the machine."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

LEFT_OUT = ("PYTHON", "SITE", "LD_LIBRARY_PATH")  # folders of one machine
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def checkpoint_identity(model_dir: Path) -> dict[str, str]:
    """The folder's own name and the hash of its config.json: equal hashes mean the same shape of model."""
    # Not resolve(): the name that the user gave, not the one that a link leads to.
    name = Path(os.path.abspath(model_dir)).name
    return {"name": name, "config_sha256": _short_hash(model_dir / "config.json")}


def file_identity(path: Path) -> dict[str, str]:
    """A file's name and the hash of its content."""
    return {"name": path.name, "sha256": _short_hash(path)}


def peer_variables(server: str, environment: Mapping[str, str]) -> dict[str, str]:
    """A peer's variables, VLLM_* for vllm, but for those that hold a path; a path inside of a value
    (VLLM_FLAGS) keeps its last part only."""
    prefix = server.upper() + "_"
    return {
        name: re.sub(r"(?<![^\s='\",:\[({])~?/+(?:[^\s/='\",]+/)*", "", value)
        for name, value in sorted(environment.items())
        if name.startswith(prefix) and name.removeprefix(prefix) not in LEFT_OUT
        if not value.startswith(("/", "~"))
        if not any(word in name for word in SECRET)
    }


def _short_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
