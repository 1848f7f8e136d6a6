# SPDX-License-Identifier: Apache-2.0
"""Families through the whole engine against transformers: in chunks, preempted, from cached prefixes."""

from pathlib import Path

import pytest

from checkpoints import KINDS, make_checkpoint
from engine.harness import fewer, make_prompts, serve, start_core
from engine.test_generate import reference
from flashinfer_backend.core.sampling_params import SamplingParams
from thinned import some

# One of each kind of layer; what all families have in common is tested with Llama's.
FEW = [
    "apertus", "arcee", "exaone4-windows", "gemma3", "glm4", "gpt-oss", "granite", "hunyuan", "llama4",
    "mpt", "olmo3", "phi3", "qwen2-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe", "smollm3",
]  # fmt: skip

ASKED = 24  # tokens of an answer, which are in several blocks
# transformers takes other factors for short sequences, an engine one kind for all.
EVERY = [kind for kind in KINDS if kind != "phi3-long"]


@pytest.mark.parametrize("kind", some(EVERY, FEW))
def test_the_engine_gives_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    sizes = {} if kind == "qwen3.5" else fewer(kind)
    folder, prompts = make_checkpoint(kind, tmp_path / "model", **sizes), make_prompts(6)
    few = {"max_num_tokens": 24, "max_num_tokens_while_decoding": 24, "max_tokens_in_paged_kv_cache": 256}
    core = start_core(folder, max_num_seqs=6, max_seq_len=160, check_invariants=True, **few)
    greedy = SamplingParams(max_tokens=ASKED, temperature=0.0)
    longest = max(range(6), key=lambda index: len(prompts[index]))
    with serve(core, tmp_path / "run") as client:
        answers = client.generate(prompts, greedy)
        assert client.generate([prompts[longest]] * 2, greedy) == [answers[longest]] * 2
    assert answers == reference(folder, prompts, answers, ASKED)
    windows = core.runner.state.model.spec.windows(160)
    assert bool(core.scheduler.preemptions) == (None in windows), "blocks of windows do not run out"
    assert core.scheduler.prompt_tokens_reused
