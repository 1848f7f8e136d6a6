# SPDX-License-Identifier: Apache-2.0
"""What the stubs and other doors to the engine share needs neither Triton nor CUDA."""

from __future__ import annotations

import subprocess
import sys


def test_a_generation_needs_neither_triton_nor_torch() -> None:
    code = (
        "import sys, flashinfer_backend.serving.generation\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(loaded & {'torch', 'tritonclient', 'flashinfer', 'transformers', 'triton'}))\n"
        "print(*[name for name in sys.modules if name.startswith('flashinfer_backend.triton_server')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr
