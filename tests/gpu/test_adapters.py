# SPDX-License-Identifier: Apache-2.0
"""Adapters on a GPU: the kernels, and an engine whose steps are graphs."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from engine.harness import make_prompts, serve, start_core
from engine.test_adapters import FORMS, asks, make_adapter
from flashinfer_backend.ops import device, torch_ops

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from test_triton_adapters import FUSED, SHAPES, Sample, busy, check, check_embedded, check_fused, close

pytestmark = pytest.mark.gpu
# 8B's shapes: decodes, prompts, and a large rank.
LARGE = [
    (1, 4096, (4096, 1024, 1024), 4, 16),
    (64, 4096, (14336, 14336), 8, 64),
    (2048, 14336, (4096,), 8, 16),
    (32, 4096, (4096,), 2, 256),
]


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_the_kernels_add_what_torch_adds(shape: tuple[Any, ...]) -> None:
    check(*shape, "cuda", torch.bfloat16)


@pytest.mark.parametrize("case", [*FUSED, busy(device.sms())], ids=str)
def test_products_add_what_torch_adds(case: tuple[Any, ...]) -> None:
    check_fused(*case, "cuda", torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 700])
def test_embeddings_add_what_torch_adds(tokens: int) -> None:
    check_embedded(3 * tokens, "cuda", torch.bfloat16)


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("tokens", [1, 7, 32, 64, 200, 700])
def test_operations_of_an_8b_model(tokens: int, rank: int) -> None:
    """Whichever kernels this device takes for so many tokens; alone and in a graph."""
    from flashinfer_backend.ops import cuda_ops

    for role, columns, rows in (
        ("qkv", 4096, (4096, 1024, 1024)),
        ("gate_up", 4096, (14336, 14336)),
        ("down", 14336, (4096,)),
        ("head", 4096, (32000,)),
    ):
        own = Sample(tokens, columns, rows, 8, rank, "cuda", torch.bfloat16, role)
        chosen = cuda_ops.group_adapters(own.places, 8)

        def computed(ops: Any, own: Sample = own, chosen: Any = chosen, role: str = role) -> torch.Tensor:
            if role in ("qkv", "head"):
                return ops.norm_linear(own.x, own.norm, 1e-5, own.weight, None, chosen=chosen)
            if role == "gate_up":
                return ops.norm_gate_up_silu(own.x, own.norm, 1e-5, own.weight, chosen)
            return ops.linear_add(own.x, own.weight, own.residual.clone(), chosen)

        found, graph = computed(cuda_ops), torch.cuda.CUDAGraph()
        close(found, computed(torch_ops), torch.bfloat16)
        with torch.cuda.graph(graph):
            again = computed(cuda_ops)
        graph.replay()
        assert torch.equal(again, found)
        torch.manual_seed(tokens)
        for _ in range(20):  # what another launch left behind changes nothing
            own.x.copy_(torch.randn_like(own.x) * 0.25)
            own.places.copy_(own.places.roll(1))
            graph.replay()
            close(again, computed(torch_ops), torch.bfloat16)


def test_steps_with_and_without_adapters(tmp_path: Path) -> None:
    """Graphs compute what steps without them do. Rows without an adapter have the model's own tokens."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    model = make_checkpoint("llama", tmp_path / "model", intermediate_size=1024, **sizes)
    whole = {**FORMS[1], "target_modules": [*FORMS[1]["target_modules"], "embed_tokens", "lm_head"]}
    adapters = [make_adapter(model, tmp_path / str(i), form, i) for i, form in enumerate([FORMS[0], whole])]
    prompts = make_prompts(6)
    each = [asks(None), asks(adapters[0]), asks(adapters[1])] * 2
    found = []
    for graphs, room in (("none", 2), ("auto", 2), ("auto", 0)):
        settings = {
            "device": "cuda",
            "dtype": "bfloat16",
            "cuda_graph_batch_sizes": graphs,
            "max_loras": room,
            "lora_vocabulary": room > 0,
        }
        core = start_core(model, max_seq_len=256, **settings)
        with serve(core, tmp_path / f"{graphs}{room}") as client:
            own = each if room else [asks(None)] * len(each)
            found.append(client.generate(prompts, own))
        core.close()
    for index, row in enumerate(found[0] + found[1]):
        short, allowed = shortfall(model, ([None, *adapters] * 2)[index % 6], prompts[index % 6], row)
        # With a random head, bfloat16 has 0.8 of 24 tokens right in plain torch as well.
        assert (short == 0).float().mean() > 0.6 and (short <= allowed).all(), index
    assert found[1][0::3] == found[2][0::3]
    assert found[1][1] != found[2][1] and found[1][2] != found[2][2]


def shortfall(
    model: Path, adapter: Path | None, prompt: list[int], tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """By how much each token's logit is below the best one, in float32 with PEFT's adapter; and twice the
    largest error that transformers' logits of its position have in bfloat16."""
    from peft import PeftModel

    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        if adapter is not None:
            loaded = PeftModel.from_pretrained(loaded, adapter).to(dtype)
        with torch.inference_mode():
            logits.append(loaded(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float())
    exact, rounded = logits
    return (
        exact.amax(-1) - exact.gather(-1, torch.tensor(tokens)[:, None])[:, 0],
        2 * (exact - rounded).abs().amax(-1),
    )
