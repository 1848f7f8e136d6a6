# SPDX-License-Identifier: Apache-2.0
"""What several files' tests of the client take."""

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


@pytest.fixture
def load(server: StreamingServer, tokenizer_folder: str) -> list[str]:
    """Arguments of `client bench` for a load on the server that begins at once."""
    at_once = "--workers 1 --warm-up 0 --ready-timeout 0"
    return f"--url {server.url} --tokenizer {tokenizer_folder} {at_once}".split()
