#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a deployable Triton model repository: `.venv/bin/python build.py --help`, and docs/knobs.md."""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "backend_src"))  # also runs from a checkout that is not installed

try:
    from flashinfer_backend.config_tools.cli import main
except ModuleNotFoundError as missing:
    sys.exit(
        f"build.py: the Python package {missing.name!r} is missing in {sys.executable}. Run it with an"
        " environment that has this project installed: `.venv/bin/python build.py ...` after `make serve`, or"
        " `pip install -e .`"
    )

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(main(ROOT / "model_repo"))
