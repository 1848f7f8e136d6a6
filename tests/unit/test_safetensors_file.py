# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files that anybody may have written, or writes to meanwhile."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flashinfer_backend.models.safetensors_file import read_shapes

MOST = 1 << 16


def written(file: Path, header: Any, behind: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + behind)
    return file


def test_shapes_are_those_that_safetensors_wrote(tmp_path: Path) -> None:
    shapes = {"b": (), "a": (3, 0, 2), "c": (4, 5)}
    save_file(
        {name: np.zeros(shape, "<f2") for name, shape in shapes.items()}, tmp_path / "x", {"format": "pt"}
    )
    assert read_shapes(tmp_path / "x", MOST) == shapes


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "its header is not one of safetensors"),
        (b"[" * 60_000, "its header is not one of safetensors"),
        (b"\xff", "its header is not one of safetensors"),
        ([], "Expected `object`"),
        ({"a": {"shape": [1]}}, "missing required field `data_offsets`"),
        ({"a": {"shape": [-1], "data_offsets": [0, 1]}}, "Expected `int` >= 0"),
        ({"a": {"shape": [1], "data_offsets": [0, 9]}}, "it has 63 bytes; by its header it should have 62"),
        ({"a" * MOST: 0}, f"it should have at most {MOST}"),
    ],
)
def test_what_is_no_header_is_refused(header: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_shapes(written(tmp_path / "x", header, b"0123456789"), MOST)


def test_a_file_that_is_cut_while_it_is_read_ends_no_process(tmp_path: Path) -> None:
    """A signal would, if it were mapped: within some fifty reads."""
    save_file({f"{n}": np.zeros(30, "<f2") for n in range(200)}, tmp_path / "x")
    writes = """if True:
        import os, sys
        file, data = os.open(sys.argv[1], os.O_RDWR), open(sys.argv[1], "rb").read()
        print("begun", flush=True)
        while True:
            os.ftruncate(file, 0)
            os.pwrite(file, data, 0)"""
    reads = """if True:
        import sys
        from pathlib import Path
        from flashinfer_backend.models.safetensors_file import read_shapes
        for _ in range(2000):
            try:
                read_shapes(Path(sys.argv[1]), 1 << 20)
            except ValueError:
                pass"""
    writer = subprocess.Popen([sys.executable, "-c", writes, tmp_path / "x"], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"begun\n"
        assert subprocess.run([sys.executable, "-c", reads, tmp_path / "x"], timeout=120).returncode == 0
    finally:
        writer.kill()
        writer.wait()
