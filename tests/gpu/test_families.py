# SPDX-License-Identifier: Apache-2.0
"""Families with what Llama has not, on a GPU: each token judged as in test_engine."""

import pytest
from test_engine import SETTINGS, SIZES, TOLERANCE, make_prompts, shortfalls

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

DELTA_NETS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LIMIT = 2 * TOLERANCE  # plain torch in bfloat16 came to 0.6 with delta nets
KINDS = {
    "apertus": {},
    "arcee": {},
    "ernie4.5": {},
    "exaone4-windows": {},
    "gemma2-capped": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0},
    "glm4": {},
    "granite": {"attention_multiplier": 0.1},
    "helium": {"head_dim": 64},
    "llama4": {"intermediate_size_mlp": 512},
    "ministral3": {},
    "mpt": {},
    "hunyuan": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "qwen3-next": DELTA_NETS | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3.5": DELTA_NETS,
    "qwen3.5-moe": DELTA_NETS | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "seed-oss": {},
    "smollm3": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_best_or_nearly(kind, tmp_path):
    folder = make_checkpoint(kind, tmp_path / "model", **(SIZES | KINDS[kind]))
    core = start_core(folder, **SETTINGS, max_seq_len=512)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    with serve(core, tmp_path / "run") as client:
        short = shortfalls(folder, client.generate(make_prompts(12), params))
    # In 16 bits a router sometimes takes another expert: plain torch gives 83 to 92 % best tokens then,
    # and 92 to 98 % with the other kinds.
    mixture = core.runner.state.model.spec.experts is not None
    best = (short == 0).float().mean()
    assert best > (0.75 if mixture else 0.9), f"{(short > 0).sum()} of {len(short)} tokens are not the best"
    assert mixture or short.max() < LIMIT, f"a token is {short.max():.2f} below the best logit"
