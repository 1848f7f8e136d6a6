# SPDX-License-Identifier: Apache-2.0
"""Arguments of the OpenAI API's process that are refused before anything is started."""

from __future__ import annotations

import pytest

from flashinfer_backend.openai.__main__ import main


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is no file; it should name one with a key a line"), ("# none yet\n\n", "holds no key")],
)
def test_a_file_without_keys_does_not_open_the_api(tmp_path, capsys, content, message):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    arguments = ["--model", "bundled", "--set", "device=cpu", "--api-key-file", str(path)]
    assert main(arguments) == 1
    assert f"--api-key-file {path} {message}" in capsys.readouterr().err
