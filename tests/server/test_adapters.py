# SPDX-License-Identifier: Apache-2.0
"""Adapters through both APIs of one server: by name, by TensorRT-LLM's task ids, loaded at run time."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from asking import int32, stream, strings
from running import BothApis, both_running, build_repository

from engine.test_adapters import make_adapter, with_adapter
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import BUNDLED, resolve_model_dir
from flashinfer_backend.models.adapters import AdapterError
from flashinfer_backend.serving.adapters import AdapterNames
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.triton_server.adapters import chosen_adapters

PROMPT, TOKENS = "The king and the queen", 12
# TensorRT-LLM's numbers of modules.
NUMBERS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
MODEL = resolve_model_dir(BUNDLED)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    forms = {
        "named": ["q_proj", "down_proj"],
        "loaded": ["v_proj", "gate_proj"],
        "task": ["k_proj", "o_proj", "up_proj", "gate_proj"],
    }
    return {
        name: make_adapter(MODEL, root / name, {"r": 4, "lora_alpha": 64, "target_modules": modules}, seed)
        for seed, (name, modules) in enumerate(forms.items())
    }


@pytest.fixture(scope="module")
def texts(adapters: dict[str, Path]) -> dict[str, str]:
    """What the model says with each adapter merged into it, and alone ("")."""
    tokenizer = TextTokenizer(MODEL)
    (prompt,) = tokenizer.encode_batch([PROMPT], True)
    found = {}
    for name, folder in {"": None, **adapters}.items():
        model = with_adapter(MODEL, folder)
        model.generation_config.stop_strings = None
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )[0]
        found[name] = tokenizer.backend.decode(ids.tolist()).removeprefix(PROMPT)
    assert len(set(found.values())) == len(found)
    return found


@pytest.fixture(scope="module")
def server(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothApis]:
    folder = tmp_path_factory.mktemp("server")
    knobs = ["max_loras=1", "dtype=float32", f"lora_modules=named={adapters['named']}"]
    repository = build_repository(folder, *knobs, model=BUNDLED)
    with both_running(repository, folder, ["--openai-lora-root", str(adapters["named"].parent)]) as server:
        yield server


def ensemble(server: BothApis, **more: Any) -> str:
    body = {"text_input": PROMPT, "max_tokens": TOKENS, "end_id": -1, "exclude_input_in_output": True}
    status, answer = server.post(body | more)
    return str(answer["text_output"] if status == 200 else answer["error"])


def infer(server: BothApis, task: int, **tensors: np.ndarray) -> str:
    """The same by tensors, with a task id."""
    values = {
        **{"text_input": strings(PROMPT), "max_tokens": int32(TOKENS), "end_id": int32(-1)},
        "exclude_input_in_output": np.array([[True]]),
        "lora_task_id": np.array([[task]], np.uint64),
    } | tensors
    result, error = stream(server, "ensemble", [("", values)])[0]
    return str(error or result.as_numpy("text_output").item().decode())


def completion(server: BothApis, model: str) -> tuple[int, str]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    status, text = server.openai("/v1/completions", body)
    answer = json.loads(text)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def trt_tensors(folder: Path, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """lora_weights and lora_config, as hf_lora_convert.py writes them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    rows, entries = [], []
    for name, down in tensors.items():
        if "lora_A" in name:
            up = tensors[name.replace("lora_A", "lora_B")] * (config["lora_alpha"] / config["r"])
            rows.append(np.concatenate([down.ravel(), up.ravel()]))
            parts = name.split(".")
            entries.append([NUMBERS[parts[-3]], int(parts[parts.index("layers") + 1]), len(down)])
    longest = max(map(len, rows)) + padding
    weights = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    return weights.astype(np.float16)[None], np.array(entries, np.int32)[None]


def test_by_name_through_both_apis(server: BothApis, texts: dict[str, str]) -> None:
    for name in ("named", "", "named"):
        named = {"lora_name": name} if name else {}
        assert ensemble(server, **named) == texts[name]
        assert completion(server, name) == (200, texts[name])
    models = {each["id"]: each for each in json.loads(server.openai("/v1/models")[1])["data"]}
    assert models["named"]["parent"] == BUNDLED and models["named"]["root"].endswith("named")
    assert 'lora_name is "other"; the adapters are: named' in ensemble(server, lora_name="other")
    assert completion(server, "other")[0] == 404


def test_task_ids(server: BothApis, adapters: dict[str, Path], texts: dict[str, str]) -> None:
    weights, config = trt_tensors(adapters["task"], padding=5)
    assert "lora_task_id is 7, whose weights this server does not have" in infer(server, 7)
    sent = {"lora_weights": weights, "lora_config": config}
    assert infer(server, 7, **sent) == texts["task"]
    assert ensemble(server) == texts[""]
    assert infer(server, 7) == texts["task"] == ensemble(server, lora_task_id=7)
    module, layer, rank = (config.copy() for _ in range(3))
    module[0, 0, 0], layer[0, 0, 1], rank[0, 0, 2] = 17, 99, 4000
    for wrong, said in (
        ({"lora_config": config}, "lora_config needs lora_weights"),
        ({**sent, "lora_config": module}, "names module 17 of layer 0, which this model lacks"),
        ({**sent, "lora_config": layer}, "of layer 99, which this model lacks"),
        ({**sent, "lora_config": rank}, "has rank 4000; it should be 1 to"),
        ({**sent, "lora_weights": weights[:, 1:]}, "should be [1, modules, n] and [1, modules, 3]"),
        ({**sent, "lora_config": np.pad(config, [(0, 0), (0, 0), (0, 1)])}, "unexpected shape for input"),
    ):
        assert said in infer(server, 8, **wrong)


def test_loaded_and_unloaded(server: BothApis, adapters: dict[str, Path], texts: dict[str, str]) -> None:
    assert completion(server, "mine")[0] == 404
    (adapters["named"].parent / "loop").symlink_to("loop")
    asked = {"lora_name": "mine", "lora_path": str(adapters["loaded"])}
    status, said = server.openai("/v1/load_lora_adapter", asked)
    assert status == 200 and "added successfully" in str(said)
    assert completion(server, "mine") == (200, texts["loaded"])
    assert ensemble(server, lora_name="mine") == texts["loaded"]
    status, metrics = server.openai("/metrics")
    assert 'vllm:lora_requests_info{max_lora="1"' in str(metrics)
    for path, change, code in (
        ("/v1/load_lora_adapter", {}, 400),  # the name is taken
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}, 403),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../.."}, 403),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "none"}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "a,b", "lora_path": str(adapters["loaded"])}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "a\nb", "lora_path": str(adapters["loaded"])}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "a\0"}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "loop"}, 400),
        ("/v1/load_lora_adapter", {"lora_name": BUNDLED}, 400),
    ):
        assert server.openai(path, asked | change)[0] == code, (path, change)
    assert server.openai("/v1/unload_lora_adapter", {"lora_name": "mine"})[0] == 200
    assert completion(server, "mine")[0] == 404
    assert server.openai("/v1/unload_lora_adapter", {"lora_name": "named"})[0] == 404


def test_processes_that_store_task_ids_at_once(adapters: dict[str, Path], tmp_path: Path) -> None:
    """Each has a task whose weights take the place of those of the others, for there is room for one."""
    weights, numbers = (each[0] for each in trt_tensors(adapters["task"]))
    config = EngineConfig(
        model_dir=BUNDLED, tokenizer_dir=BUNDLED, max_loras=1, lora_cache_host_memory_bytes=weights.nbytes
    )
    run_dir = tmp_path / "user" / "run"

    def store(task: int) -> None:
        names = AdapterNames(config, run_dir)
        for turn in range(8):
            folder = names.keep_task(task, weights + np.float16((8 * task + turn) / 100), numbers)
            assert folder.startswith(str(run_dir))

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(store, task) for task in range(4)]:
            done.result(timeout=120)
    left = sorted((each.name for each in (run_dir / "adapters").iterdir()), key=len)
    assert len(left) == 2  # a task id, and its weights
    assert AdapterNames(config, run_dir).task(int(left[0])).endswith(left[1])


def test_wrong_weights_of_task_ids_are_refused_and_their_number_is_bounded(
    adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, numbers = (each[0] for each in trt_tensors(adapters["task"], padding=5))
    names = AdapterNames(EngineConfig(model_dir=BUNDLED, tokenizer_dir=BUNDLED, max_loras=1), tmp_path / "u")
    twice, wrong = numbers.copy(), weights.copy()
    twice[1], wrong[1, 3] = twice[0], np.nan
    for changed, said in (
        ((weights, twice), "more than once"),
        ((wrong, numbers), "lora_weights holds NaN or infinity"),
    ):
        with pytest.raises(AdapterError, match=said):
            names.keep_task(5, *changed)
    rows = {"lora_task_id": np.array([[5], [6], [5]], np.uint64), "lora_config": np.stack([numbers] * 3)}
    same = chosen_adapters({**rows, "lora_weights": np.stack([weights] * 3)}, 3, "", names)
    assert same[0] == same[2] and [name for _, name in same] == ["5", "6", "5"]
    with pytest.raises(ValueError, match="rows 0 and 2 have different weights for lora_task_id 5"):
        chosen_adapters({**rows, "lora_weights": np.stack([weights, weights, 2 * weights])}, 3, "", names)
    monkeypatch.setattr("flashinfer_backend.serving.adapters.MOST_TASKS", 3)
    for task in (7, 8):  # all with the same weights
        names.keep_task(task, weights, numbers)
    assert sorted(file.name for file in (tmp_path / "u" / "adapters").glob("?")) == ["6", "7", "8"]


def test_two_models_do_not_take_the_same_name_at_once(adapters: dict[str, Path], tmp_path: Path) -> None:
    config = EngineConfig(model_dir=BUNDLED, max_loras=1)

    def load(model: str, other: str, turn: int) -> bool:
        own, others = (AdapterNames(config, tmp_path / each) for each in (model, other))
        try:
            own.load(f"name-{turn}", adapters["named"], others=[others])
        except AdapterError as error:
            assert "is an adapter of another model; take another name" in str(error)
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        for turn in range(20):
            done = [threads.submit(load, *each, turn) for each in (("a", "b"), ("b", "a"))]
            assert sorted(each.result(timeout=60) for each in done) == [False, True]


def test_build_refuses_what_does_not_fit(
    adapters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(adapters["named"], broken)
    (broken / "adapter_model.safetensors").unlink()
    for knobs, said in (
        ([f"lora_modules=a={broken}", "max_loras=1"], "has no adapter_model.safetensors"),
        ([f"lora_modules=a={adapters['named']}"], "lora_modules needs max_loras"),
        ([f"lora_modules=a={adapters['named']}", "max_loras=1", "max_lora_rank=2"], "has rank 4"),
        (["lora_modules=a"], "NAME=FOLDER"),
    ):
        with pytest.raises(AssertionError):
            build_repository(tmp_path / "repository", *knobs)
        assert said in capsys.readouterr().err
