# SPDX-License-Identifier: Apache-2.0
"""Layers with and without a sliding window through the whole engine, against transformers."""

from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from engine.harness import make_prompts, serve, start_core
from engine.test_generate import reference
from flashinfer_backend.core.sampling_params import SamplingParams

WINDOW = 21  # no multiple of a block, and shorter than the prompts and the answers
LONG = 24  # tokens of an answer
GREEDY = SamplingParams(max_tokens=LONG, temperature=0.0)
SETTINGS = {"max_num_seqs": 6, "check_invariants": True, "max_seq_len": 160}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"num_hidden_layers": 4, "use_sliding_window": True, "layer_types": kinds}
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("windows"), sliding_window=WINDOW, **options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(7)


@pytest.fixture(scope="module")
def expected(
    folder: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """The answers, one after the other."""
    core = start_core(folder, **SETTINGS | {"max_num_seqs": 1})
    with serve(core, tmp_path_factory.mktemp("alone")) as client:
        answers = client.generate(prompts, GREEDY)
    assert answers == reference(folder, prompts, answers, LONG)
    return answers


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_tokens": 512, "max_num_tokens_while_decoding": 512}, id="batched"),
        pytest.param({"max_num_tokens": 16, "max_num_tokens_while_decoding": 16}, id="chunked"),
        pytest.param({"max_tokens_in_paged_kv_cache": 256}, id="preempted"),
        pytest.param(
            {"max_tokens_in_paged_kv_cache": 256, "batch_scheduler_policy": "guaranteed_no_evict"},
            id="no_evict",
        ),
    ],
)
def test_two_groups_give_the_ids_of_transformers(
    folder: Path, prompts: Any, expected: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    core = start_core(folder, **SETTINGS | settings)
    assert [(group.window, group.layers) for group in core.runner.state.groups] == [
        (None, (1, 3)),
        (WINDOW, (0, 2)),
    ]
    with serve(core, tmp_path) as client:
        assert client.generate(prompts, GREEDY) == expected
        reused = core.scheduler.prompt_tokens_reused
        assert client.generate(prompts, GREEDY) == expected
        small = "max_tokens_in_paged_kv_cache" in settings
        assert small or core.scheduler.prompt_tokens_reused > reused, "no prefix was found again"
    assert bool(core.scheduler.preemptions) == (settings.keys() == {"max_tokens_in_paged_kv_cache"})


def test_windows_in_every_layer_keep_less_than_a_sequence(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral", tmp_path / "model", sliding_window=WINDOW)
    prompts = make_prompts(6)
    step = {"max_num_tokens": 32, "max_num_tokens_while_decoding": 32}
    core = start_core(folder, **SETTINGS, **step, max_tokens_in_paged_kv_cache=128)
    assert [group.window for group in core.runner.state.groups] == [WINDOW]
    assert core.config.max_seq_len == 160 > 128 == 16 * core.scheduler.kv_manager.pools[0].num_blocks
    with serve(core, tmp_path / "run") as client:
        answers = client.generate(prompts, GREEDY)
    assert answers == reference(folder, prompts, answers, LONG)
    assert not core.scheduler.preemptions


def test_a_chat_goes_on_from_its_last_turn(folder: Path, tmp_path: Path) -> None:
    """Of layers with a window, the cache has the end of the turn alone."""
    core = start_core(folder, **SETTINGS | {"max_seq_len": 256})
    prompts = make_prompts(2)
    with serve(core, tmp_path) as client:
        answers = client.generate(prompts, GREEDY)
        prompts = [prompt + answer + [9, 8] for prompt, answer in zip(prompts, answers, strict=True)]
        answers = client.generate(prompts, GREEDY)
    assert answers == reference(folder, prompts, answers, LONG)
    # The last id of an answer was never fed.
    assert core.scheduler.prompt_tokens_reused == sum((len(prompt) - 3) // 16 * 16 for prompt in prompts)
