#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a deployable Triton model repository; `python3 build.py --help` and docs/knobs.md tell how."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "backend_src"))  # also runs from a checkout that is not installed

from flashinfer_backend.config_tools.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(ROOT / "model_repo"))
