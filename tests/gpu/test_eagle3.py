# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head on a GPU: what it drafts, with CUDA kernels and in graphs."""

from pathlib import Path
from typing import Any

import pytest
from test_engine import SETTINGS, SIZES, make_prompts, shortfalls

from checkpoints import make_checkpoint
from eagle3_heads import make_head
from engine.harness import serve, start_core
from engine.test_eagle3 import Expected, Recorded
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import named_folder
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.eagle3 import load_eagle3
from flashinfer_backend.speculate.heads import HeadProposer

pytestmark = pytest.mark.gpu

HEAD: dict[str, Any] = {
    "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128, "vocab": 256, "known": 100,
}  # fmt: skip
STORY = [0, *range(40, 60)]  # of the bundled model's tokens


def maker(head: Path, fp8: bool = False) -> Any:
    def make(config: EngineConfig, model: Transformer) -> HeadProposer:
        return load_eagle3(head, model, 3, config.max_seq_len, fp8=fp8)

    return make


@pytest.mark.parametrize("form", ["safeailab", "nvidia", "speculators", "speculators-qwen3"])
def test_drafts_are_mostly_those_of_float32(form: str, tmp_path: Path):
    """First drafts, in bfloat16: near ties fall either way."""
    target = make_checkpoint("llama", tmp_path / "target", num_hidden_layers=6, **SIZES)
    head = make_head(form, tmp_path / "head", **HEAD)
    made: list[Recorded] = []

    def make(config: EngineConfig, model: Transformer) -> Recorded:
        made.append(Recorded(load_eagle3(head, model, 3, config.max_seq_len)))
        return made[0]

    core = start_core(target, make_proposer=make, **SETTINGS, cuda_graph_batch_sizes="none")
    prompts = make_prompts(12)
    with serve(core, tmp_path / "run") as client:
        found = client.generate(prompts, SamplingParams(max_tokens=32, temperature=0.0))
    sequences = {}
    for prompt, tokens in zip(prompts, found, strict=True):
        whole = prompt + tokens
        sequences |= {(length, whole[length]): whole for length in range(len(prompt), len(whole))}
    expected, right, compared = Expected(target, head), 0, 0
    for _, length, last, drafts in made[0].found[::3]:
        whole = sequences.get((length, last))
        if whole is not None and (wanted := expected.drafts(whole, length, 1)):
            compared += 1
            right += wanted[0] == drafts[0]
    assert compared > 30
    assert right > 0.8 * compared, f"{right} of {compared} drafts"


@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}])
def test_greedy_tokens_stay_the_best_or_nearly(settings: dict[str, str], tmp_path: Path):
    target = make_checkpoint("llama", tmp_path / "target", num_hidden_layers=6, **SIZES)
    head = make_head("speculators", tmp_path / "head", **HEAD)
    largest = {}
    for make in (None, maker(head, fp8="quantization" in settings)):
        core = start_core(target, make_proposer=make, **SETTINGS, **settings)
        with serve(core, tmp_path / f"drafts {make is not None}") as client:
            found = client.generate(make_prompts(12), SamplingParams(max_tokens=32, temperature=0.0))
        core.close()
        largest[make is not None] = shortfalls(target, found).max().item()
    # FP8 rounds so much that only the engine without drafts can tell how far a token may be from the best.
    limit = 0.5 if not settings else 1.5 * largest[False]
    assert largest[True] < limit, f"a token is {largest[True]:.2f} below the best logit, of {largest}"


@pytest.mark.parametrize("graphs", ["none", "auto"])
def test_the_bundled_head_is_accepted(graphs: str, tmp_path: Path):
    make = maker(named_folder("bundled") / "eagle3")
    options: dict[str, Any] = SETTINGS | {"max_seq_len": 512, "cuda_graph_batch_sizes": graphs}
    core = start_core(Path("bundled"), make_proposer=make, **options)
    with serve(core, tmp_path / "run") as client:
        params = SamplingParams(max_tokens=200, temperature=0.0, end_id=-1)
        client.generate([STORY], params)
    # How many there are depends on measured times.
    scheduler = core.scheduler
    assert scheduler.accepted_tokens > 0.3 * scheduler.drafted_tokens > 0
