# SPDX-License-Identifier: Apache-2.0
"""What several files' tests of the client take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import small_tokenizers
from streaming_server import StreamingServer


@pytest.fixture
def server() -> Iterator[StreamingServer]:
    """A local HTTP server that streams."""
    running = StreamingServer()
    yield running
    running.close()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer.json; nothing else may be put into it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return str(folder)
