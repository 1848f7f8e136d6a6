# SPDX-License-Identifier: Apache-2.0
"""The machine that a load generator runs on, for its results; no name of it and no folder."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("flashinfer-backend", "aiohttp", "grpcio", "numpy", "uvloop")


def facts(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Processor, cores that this process may use, memory, GPUs, kernel, Python and packages."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "gpus": gpu_query("name,driver_version"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name))},
    }


def _field(file: str, name: str) -> str:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def gpu_query(fields: str) -> list[str]:
    """Lines of `nvidia-smi --query-gpu=<fields>`, one for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in ran.stdout.splitlines() if line.strip()]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
