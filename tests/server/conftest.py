# SPDX-License-Identifier: Apache-2.0
"""One tritonserver for all tests that leave it as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running import EngineWatch, Server, build_repository, running


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_repository(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(repository, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def watch(server: Server) -> Iterator[EngineWatch]:
    watching = EngineWatch(server)
    yield watching
    watching.close()
