# SPDX-License-Identifier: Apache-2.0
"""The engine against transformers: the same greedy ids however a request is scheduled."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from engine.harness import make_prompts, serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.transport import protocol

LONG = 40  # more than the largest block holds
GREEDY = SamplingParams(max_tokens=LONG, temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3-rope", tmp_path_factory.mktemp("llama3"))


def next_ids(model: Any, prompts: list[list[int]], answers: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest id of a transformers model after a prompt and each beginning of its answer. These are the
    answers exactly if they are greedy and have `count` ids. All take one pass together: what fills up the
    shorter ones is behind them."""
    sequences = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    with torch.inference_mode():
        ids = model(pad_sequence(sequences, batch_first=True, padding_value=3)).logits.argmax(-1)
    return [
        own[len(prompt) - 1 : len(sequence)].tolist()[:count]
        for own, prompt, sequence in zip(ids, prompts, sequences, strict=True)
    ]


def reference(
    folder: Path, prompts: list[list[int]], answers: list[list[int]], count: int = LONG
) -> list[list[int]]:
    """The answers, exactly if they are the checkpoint's greedy ones in transformers, `count` ids each."""
    return next_ids(loaded(folder), prompts, answers, count)


@functools.lru_cache(1)  # a test compares several times with one model
def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], list[int]]:
    """Prompts and their continuations, one after the other."""
    prompts = make_prompts(12)
    with serve(start_core(checkpoint, max_num_seqs=1), tmp_path_factory.mktemp("alone")) as client:
        answers = client.generate(prompts, GREEDY)
    assert answers == reference(checkpoint, prompts, answers)
    return dict(zip(map(tuple, prompts), answers, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_seqs": 12, "max_num_tokens": 512}, id="batched"),
        pytest.param(
            {"max_num_seqs": 12, "max_num_tokens": 16, "max_num_tokens_while_decoding": 16}, id="chunked"
        ),
        pytest.param({"max_num_seqs": 12, "max_tokens_in_paged_kv_cache": 400}, id="preempted"),
        pytest.param(
            {
                "max_num_seqs": 12,
                "max_tokens_in_paged_kv_cache": 400,
                "batch_scheduler_policy": "guaranteed_no_evict",
            },
            id="no_evict",
        ),
        pytest.param(
            {"max_num_seqs": 12, "tokens_per_block": 32, "enable_kv_cache_reuse": False}, id="block32"
        ),
        pytest.param(
            {
                "max_num_seqs": 12,
                "enable_chunked_context": False,
                "max_input_len": 128,
                "max_num_tokens": 128,
                "max_num_tokens_while_decoding": 128,
            },
            id="unchunked",
        ),
    ],
)
def test_greedy_ids_equal_transformers(checkpoint, expected, tmp_path, settings):
    core = start_core(checkpoint, **settings)
    small_cache = "max_tokens_in_paged_kv_cache" in settings
    prompts = [list(prompt) for prompt in expected]
    with serve(core, tmp_path) as client:
        assert client.generate(prompts, GREEDY) == list(expected.values())
        reused = core.scheduler.prompt_tokens_reused
        assert client.generate(prompts, GREEDY) == list(expected.values())
        if settings.get("enable_kv_cache_reuse", True) and not small_cache:
            assert core.scheduler.prompt_tokens_reused > reused, (
                "the second round did not use the prefix cache"
            )
        assert {len(times) for times in client.queue_times([*client.tokens])} == {1}  # preempted or not
    preempts = small_cache and "batch_scheduler_policy" not in settings
    assert bool(core.scheduler.preemptions) == bool(preempts)


def test_seeded_sampling_repeats_alone_and_among_64(checkpoint, tmp_path):
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=1234567890123)
    filtered = SamplingParams(max_tokens=24, temperature=1.3, top_k=20, top_p=0.8, seed=99)
    others = [SamplingParams(max_tokens=20 + i % 9, temperature=0.8, seed=i) for i in range(64)]
    prompts = make_prompts(65, 30)
    core = start_core(checkpoint, max_num_seqs=66, max_num_tokens_while_decoding=256, max_num_tokens=256)
    with serve(core, tmp_path) as client:
        alone = client.generate(prompts[:1], params)[0], client.generate(prompts[:1], filtered)[0]
        crowd = client.generate([prompts[0], prompts[0], *prompts[1:]], [params, filtered, *others])
        assert (crowd[0], crowd[1]) == alone
        assert alone[0] != alone[1]
        other_seed = SamplingParams(max_tokens=24, temperature=0.9, seed=1234567890124)
        assert client.generate(prompts[:1], other_seed)[0] != alone[0]


def test_each_end_id_of_the_checkpoint_ends_what_ends_with_one_of_them(checkpoint, expected, tmp_path):
    prompt, continuation = next((p, c) for p, c in expected.items() if c[5] not in [*c[:5], c[6]])
    named = next(token for token in range(3, 100) if token not in continuation)
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [named, -1, continuation[5]]}))
    with serve(start_core(folder), tmp_path / "run") as client:

        def submit(end_id: int, **more: int) -> int:
            params = SamplingParams(max_tokens=7, temperature=0.0, end_id=end_id, **more)
            return client.submit(list(prompt), params)

        ended, longer = submit(named), submit(named, min_tokens=6)
        nothing, stranger = submit(-1), submit(1 << 20)
        alone = submit(continuation[5], min_tokens=6)
        client.wait([ended, longer, alone, nothing, stranger])
        assert client.tokens[ended] == continuation[:5]
        assert client.code[ended] == protocol.FINISHED_END_ID
        # Until its minimum of tokens it is none of them that is chosen.
        assert client.tokens[longer][:5] == continuation[:5] and len(client.tokens[longer]) >= 6
        assert client.tokens[longer][5] != continuation[5] and client.tokens[longer] == client.tokens[alone]
        for one in (nothing, stranger):
            assert client.tokens[one] == continuation[:7] and client.code[one] == protocol.FINISHED_LENGTH


def test_output_is_cut_where_max_seq_len_ends(checkpoint, tmp_path):
    with serve(start_core(checkpoint, max_seq_len=40), tmp_path) as client:
        assert len(client.generate([[5] * 30], GREEDY)[0]) == 10


def test_sequences_of_one_request_share_prompt_blocks(checkpoint, tmp_path):
    """Even with the prefix cache off; each continues on its own seed."""
    core = start_core(checkpoint, enable_kv_cache_reuse=False)
    prompt = list(range(3, 103))
    with serve(core, tmp_path) as client:
        leader = client._next
        ids = [
            client.submit(
                prompt, SamplingParams(max_tokens=16, temperature=1.0, seed=i, perf_metrics=True), leader
            )
            for i in range(3)
        ]
        client.wait(ids)
        assert len({tuple(client.tokens[i]) for i in ids}) == 3
        reused = [client.reports[i][-1].perf.reused_blocks for i in ids]
        assert reused == [0, 6, 6]
        single = client.generate([prompt], SamplingParams(max_tokens=16, temperature=1.0, seed=2))
        assert single[0] == client.tokens[ids[2]]
        assert core.scheduler.prompt_tokens_reused == 2 * 96


def test_the_end_token_that_only_the_tokenizer_names_ends_a_sequence(tmp_path, checkpoint, expected):
    """With a tokenizer_dir it is that one's; a request that asks for another end has it alone."""
    prompt, ids = max(expected.items(), key=lambda item: len(set(item[1])))
    ended_by = next(token for token in ids[3:] if token not in ids[:3])
    model_dir, tokenizer_dir = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(checkpoint, model_dir)
    tokenizer_dir.mkdir()
    for folder, end_id in ((model_dir, 255), (tokenizer_dir, ended_by)):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        vocabulary = {"added_tokens": [{"id": end_id, "content": "<end>"}]}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    of_config = json.loads((model_dir / "config.json").read_text())["eos_token_id"]
    with serve(start_core(model_dir, tokenizer_dir=str(tokenizer_dir)), tmp_path / "run") as client:
        one = client.submit(list(prompt), SamplingParams(max_tokens=LONG, temperature=0.0, end_id=of_config))
        other = client.submit(list(prompt), SamplingParams(max_tokens=LONG, temperature=0.0, end_id=254))
        client.wait([one, other])
        assert client.tokens[one] == ids[: ids.index(ended_by)]
        assert client.code[one] == protocol.FINISHED_END_ID
        assert client.tokens[other] == (ids[: ids.index(254)] if 254 in ids else ids)
