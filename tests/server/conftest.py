# SPDX-License-Identifier: Apache-2.0
"""One tritonserver for all tests that leave it as it was."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from metering import BLOCKS, metrics_port_open
from openai_server import KEY, OpenAiServer, model_with_template, openai_running
from running import (
    JSON_LOGITS_MIB,
    LLM_LOGITS_MIB,
    NGRAM,
    EngineWatch,
    Server,
    build_repository,
    running,
    wait_for,
)

from flashinfer_backend.openai.arguments import KEYS_VARIABLE
from scripted_model import AGENTS, scripted_model

if TYPE_CHECKING:
    import openai

Started = TypeVar("Started")
SHARED = contextlib.ExitStack()  # ends the servers of the group that runs


@contextlib.contextmanager
def shared(server: AbstractContextManager[Started]) -> Iterator[Started]:
    """The server, until the last test of its group has run or the session ends. An idle one takes some 6 % of
    a core."""
    with contextlib.ExitStack() as stack:
        SHARED.callback(stack.close)
        yield stack.enter_context(server)


@pytest.hookimpl(trylast=True)  # after the test's own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A worker of pytest-xdist runs all tests of a group one after the other."""
    if item.config.getoption("loadgroup", False) and (nextitem is None or _group(nextitem) != _group(item)):
        SHARED.close()


def _group(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("xdist_group")
    return marker and marker.args[0]


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_repository(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with shared(running(repository, tmp_path_factory.mktemp("server"))) as started:
        yield started


@pytest.fixture(scope="session")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The token model under TensorRT-LLM's name for it, and the ensemble under its BLS model's too. There is
    little room for logits, so that few requests fill it."""
    folder = tmp_path_factory.mktemp("contract")
    knobs = ["tensorrt_llm_bls=true", f"max_logits_mib={LLM_LOGITS_MIB}"]
    knobs += [f"max_json_logits_mib={JSON_LOGITS_MIB}"]
    repository = build_repository(folder, *knobs, "--llm-name", "tensorrt_llm")
    with shared(running(repository, folder)) as started:
        yield started


@pytest.fixture(scope="session")
def unary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same without decoupled mode, for two sequences at a time and four that wait; ids outside of the
    vocabulary are folded into it, and few logits may be asked for in JSON."""
    folder = tmp_path_factory.mktemp("unary")
    knobs = ["decoupled_mode=false", "max_num_seqs=2", "max_queue_size=4", "llm_instance_count=1"]
    knobs += ["fold_input_ids=true", "max_json_logits_mib=1"]
    with shared(running(build_repository(folder, *knobs, "--llm-name", "tensorrt_llm"), folder)) as started:
        yield started


@pytest.fixture(scope="session")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests of the metrics, which look at what they change."""
    folder = tmp_path_factory.mktemp("metered")
    with shared(
        running(build_repository(folder, "max_seq_len=512", kv_tokens=16 * BLOCKS), folder)
    ) as started:
        # The metrics port opens after the one that says ready.
        wait_for(lambda: metrics_port_open(started), "the metrics port")
        yield started


@pytest.fixture
def watch(server: Server) -> Iterator[EngineWatch]:
    watching = EngineWatch(server)
    yield watching
    watching.close()


@pytest.fixture
def watch_contract(contract: Server) -> Iterator[EngineWatch]:
    watching = EngineWatch(contract)
    yield watching
    watching.close()


@pytest.fixture
def watch_unary(unary: Server) -> Iterator[EngineWatch]:
    watching = EngineWatch(unary)
    yield watching
    watching.close()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a chat template that knows tools and reasoning."""
    return model_with_template(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def api(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    """The OpenAI API with an engine of its own that drafts, for tests that leave it as it was."""
    with shared(openai_running(chat_model, tmp_path_factory.mktemp("openai"), *NGRAM)) as started:
        yield started


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    """The OpenAI API with a model that says what agents' tests need, calls of tools above all."""
    folder = tmp_path_factory.mktemp("scripted")
    model = scripted_model(folder / "scripted", AGENTS)
    with shared(openai_running(model, folder, "--store-mib", "1", **{KEYS_VARIABLE: KEY})) as started:
        yield started


@pytest.fixture
def client(api: OpenAiServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own, which checks every answer against its types."""
    import openai

    options = {"base_url": f"{api.url}/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**options, _strict_response_validation=True) as made:
        yield made
