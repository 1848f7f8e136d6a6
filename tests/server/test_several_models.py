# SPDX-License-Identifier: Apache-2.0
"""Three models in one server: each by its name through both APIs, each with an engine of its own."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from running import BothApis, both_running, build_repository, wait_for

from checkpoints import make_checkpoint
from client.ready import first_ensemble
from embedding_checkpoints import make_embedder
from engine.test_adapters import make_adapter
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.launch.probe import problem

PROMPT = "The king and the queen"
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], **ASKED}
NAMES = ["chat", "tale", "code", "search"]  # as /v1/models lists them: tale is an adapter of chat


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothApis]:
    folder, bundled = tmp_path_factory.mktemp("several"), resolve_model_dir("bundled")
    code = make_checkpoint("qwen3", folder / "code", vocab_size=2048)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / file, code)
    form = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"]}
    tale = make_adapter(bundled, folder / "adapters" / "tale", form, 0)
    make_adapter(bundled, folder / "adapters" / "late", form, 1)
    repository = build_repository(
        folder,
        "max_seq_len=256",
        "chat.max_loras=2",
        f"chat.lora_modules=tale={tale}",
        kv_tokens=4096,
        models={"chat": "bundled", "code": code, "search": make_embedder(folder / "search")},
    )
    with both_running(repository, folder, ["--openai-lora-root", str(folder / "adapters")]) as started:
        yield started


def asked(server: BothApis, path: str, body: dict[str, Any], status: int = 200) -> Any:
    found, text = server.openai(path, body)
    assert found == status, text
    return json.loads(text)


def completion(server: BothApis, model: str) -> str:
    answer = asked(server, "/v1/completions", {"model": model, "prompt": PROMPT, **ASKED})
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def chats(server: BothApis, model: str) -> set[str]:
    """What a model says to the same chat on each path for chats."""
    chat = asked(server, "/v1/chat/completions", {"model": model, **CHAT})
    message = asked(server, "/v1/messages", {"model": model, **CHAT})
    body = {"model": model, "input": PROMPT, "temperature": 0, "max_output_tokens": 8}
    response = asked(server, "/v1/responses", body)
    assert chat["model"] == message["model"] == response["model"] == model
    texts = chat["choices"][0]["message"], message["content"][0], response["output"][0]["content"][0]
    return {texts[0]["content"], texts[1]["text"], texts[2]["text"]}


def test_each_model_answers_by_its_name_through_both_apis(server: BothApis) -> None:
    _, listed = server.openai("/v1/models")
    entries = {entry["id"]: entry for entry in json.loads(listed)["data"]}
    assert list(entries) == NAMES
    assert entries["tale"]["parent"] == "chat" and entries["search"]["task"] == "embed"
    texts = {name: completion(server, name) for name in ("chat", "tale", "code")}
    assert len(set(texts.values())) == 3
    body = {"text_input": PROMPT, "max_tokens": 8, "exclude_input_in_output": True}
    for name in ("chat", "code"):
        assert server.post(body, name)[1]["text_output"] == texts[name]
        assert json.loads(server.openai(f"/v1/models/{name}")[1]) == entries[name]
    said = {name: chats(server, name) for name in ("chat", "tale", "code")}
    assert all(len(each) == 1 for each in said.values()) and len(set.union(*said.values())) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/tokenize", {"prompt": PROMPT}),
    ],
)
def test_an_unknown_model_is_refused_with_the_names_of_all(
    server: BothApis, path: str, body: dict[str, Any]
) -> None:
    error = asked(server, path, {"model": "other", **body}, 404)["error"]
    assert error["message"] == f"The model `other` does not exist; this server has {', '.join(NAMES)}"
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error = asked(server, path, body, 400)["error"]
    assert error["message"] == f"model is missing; this server has {', '.join(NAMES)}"


def test_an_unknown_model_is_listed_nowhere(server: BothApis) -> None:
    assert server.openai("/v1/models/other")[0] == 404


def test_adapters_are_loaded_for_the_model_that_takes_some(server: BothApis) -> None:
    load = {"lora_name": "late", "lora_path": "late"}
    refused = asked(server, "/v1/load_lora_adapter", {**load, "model": "code"}, 400)
    assert "code was built without max_loras" in refused["error"]["message"]
    refused = asked(server, "/v1/load_lora_adapter", {**load, "lora_name": "code"}, 400)
    assert "`code` is the model code" in refused["error"]["message"]
    assert server.openai("/v1/load_lora_adapter", load)[0] == 200
    refused = asked(server, "/v1/load_lora_adapter", load, 400)  # a second time
    assert refused["error"]["param"] == "lora_name"
    assert completion(server, "late") not in (completion(server, "chat"), completion(server, "tale"))
    assert server.openai("/v1/unload_lora_adapter", {"lora_name": "late"})[0] == 200
    asked(server, "/v1/completions", {"model": "late", "prompt": PROMPT}, 404)


def test_metrics_have_a_series_of_each_model_and_sums_for_routers(server: BothApis) -> None:
    for name in ("chat", "code"):
        completion(server, name)
    text = server.openai("/metrics")[1]
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    series = {key: float(value) for key, _, value in lines}
    for name in ("chat", "code", "search"):
        label = f'{{model_name="{name}"}}'
        assert series[f"flashinfer_backend_openai_engine_up{label}"] == 1
        assert series[f"flashinfer_backend_openai_engine_blocks_total{label}"] > 0
    for name in ("chat", "code"):
        assert series[f'flashinfer_backend_openai_completion_tokens_sum{{model_name="{name}"}}'] >= 8
    blocks = [value for key, value in series.items() if "engine_blocks_total" in key]
    assert series['nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"}'] == sum(blocks)
    assert len([key for key in series if key.startswith("vllm:lora_requests_info")]) == 1


def test_serve_the_probe_and_the_clients_name_all_models(server: BothApis) -> None:
    ready = server.log.partition("\nReady. Try:\n")[2]
    for name in ("chat", "code", "search"):
        assert f"{server.url}/v2/models/{name}/generate_stream" in ready
    assert f":{server.openai_port}/v1, models chat, code, search" in server.log
    assert first_ensemble(server.url) == "chat"
    assert problem(server.url, None, 60) == ""
    assert "nothing does not generate" in problem(server.url, "nothing", 60)


def test_a_model_goes_on_while_the_engine_of_another_is_started_again(server: BothApis) -> None:
    (record,) = server.runs.glob("flashinfer-backend-*/*-code_llm/engine.json")
    pid = json.loads(record.read_text())["pid"]
    tritonserver = server.matching("tritonserver")[0].pid
    psutil.Process(pid).kill()
    wait_for(lambda: server.openai("/health")[0] == 503, "the end of the engine to be noticed")
    completion(server, "chat")
    status, answer = server.openai("/v1/completions", {"model": "code", "prompt": PROMPT})
    if status != 200:  # unless it was faster
        assert (status, json.loads(answer)["error"]["code"]) == (503, "engine_unavailable")
    assert problem(server.url, None, 60) == "", "nothing has to be killed"
    wait_for(lambda: server.openai("/health")[0] == 200, "the next engine")
    completion(server, "code")
    assert server.matching("tritonserver")[0].pid == tritonserver
