# SPDX-License-Identifier: Apache-2.0
"""The first steps of a start are ones that the engine can plan, and leave nothing behind."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops.weight import Weight
from flashinfer_backend.worker import trace, warm_up

PROMPTS = [list(range(5, 5 + length)) for length in (3, 17, 40)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bundled", {}),
        ("bundled", {"speculative_method": "ngram"}),
        ("bundled", {"speculative_method": "eagle3", "draft_model": "bundled"}),
        ("gemma3", {}),  # layers with windows
    ],
)
def test_sequences_after_a_warm_up_have_the_tokens_of_those_before(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    model = Path("bundled") if kind == "bundled" else make_checkpoint(kind, tmp_path / "model")
    core = start_core(model, max_num_seqs=12, enable_kv_cache_reuse=False, **settings)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with serve(core, tmp_path / "run") as client:
        before = client.generate(PROMPTS * 4, params)
    warm_up.warm_up_prompts(core.config, core.runner)
    warm_up.warm_up_products(core.config, core.runner)
    warm_up.warm_up_mixed(core.config, core.runner)
    warm_up.warm_up_sampling(core.config, core.runner)
    with serve(core, tmp_path / "again") as client:
        assert client.generate(PROMPTS * 4, params) == before
    core.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "olmo2", "qwen3-moe", "qwen3.5-moe", "gpt-oss", "mpt"])
def test_each_product_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    core = start_core(make_checkpoint(kind, tmp_path / "model"))
    model, read = core.runner.state.model, set()

    def noted(weight: Weight, name: str) -> Any:
        read.add(id(weight))
        return nn.Module.__getattr__(weight, name)

    monkeypatch.setattr(Weight, "__getattr__", noted)
    model.compute_products(3, head=True)
    monkeypatch.undo()
    kinds: dict[tuple[str, tuple[int, ...]], list[Weight]] = {}
    for layer in model.layers:
        for product in layer.spec.products:
            kinds.setdefault((product.name, product.shape), []).append(getattr(layer, product.name))
    for each, weights in [*kinds.items(), ("head", [model.lm_head])]:
        assert read & set(map(id, weights)), f"nothing reads {each}"
    core.close()


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1, "max_num_tokens": 64, "max_num_tokens_while_decoding": 64},
        {"max_num_seqs": 16, "max_seq_len": 300, "max_input_len": 299},
    ],
)
def test_steps_of_several_rows_keep_to_the_limits(limits: dict[str, int]) -> None:
    config = EngineConfig(model_dir="bundled", **({"max_seq_len": 16384, "max_input_len": 16383} | limits))
    steps = warm_up.mixed_steps(config)
    for step in steps:
        assert step.num_rows <= config.max_num_seqs and step.num_tokens <= config.max_num_tokens
        assert (step.starts + step.lengths).max() < config.max_seq_len and step.lengths.min() > 0
    if limits:
        assert len(steps) > 2
    else:
        assert len(steps) == len(warm_up.MIXED)
        assert max(step.num_decodes for step in steps) == 200
        assert max(step.starts.max() for step in steps) == warm_up.FAR


def test_where_traces_are_allowed_their_profiler_is_loaded_at_start(tmp_path: Path, monkeypatch: Any) -> None:
    loads: list[bool] = []
    monkeypatch.setattr(trace, "warm_up", lambda: loads.append(True))
    for folder, expected in (("none", []), (str(tmp_path), [True])):
        start_core(Path("bundled"), profile_dir=folder)
        assert loads == expected
