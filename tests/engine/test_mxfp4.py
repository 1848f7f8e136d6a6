# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS with experts in MXFP4 through the engine, against transformers with the same numbers in float32."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.harness import serve, start_core
from engine.ranks_in_threads import start_ranks
from engine.test_generate import GREEDY, make_prompts, reference
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import WeightsError, load_weights
from flashinfer_backend.ops import torch_ops
from mxfp4_checkpoints import make_mxfp4


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (2, 2)])
def test_published_checkpoints_give_the_ids_of_transformers(ranks, groups, tmp_path, monkeypatch):
    """On two ranks an expert's columns are cut between groups of 32, and one rank adds its bias; or each rank
    has whole experts."""
    folder, dense = make_mxfp4(tmp_path, intermediate_size=96 if groups == 2 else 128)
    prompts = make_prompts(4)
    if ranks == 1:
        core = start_core(folder, max_num_seqs=4, max_seq_len=160)
    else:
        core = start_ranks(folder, ranks, monkeypatch, expert_groups=groups)
    with serve(core, tmp_path / "run") as client:
        assert client.generate(prompts, GREEDY) == reference(dense, prompts)
    core.close()


def test_transformers_reads_the_same_numbers(tmp_path):
    """So the layout is the published one."""
    folder, dense = make_mxfp4(tmp_path)
    how = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how
    )
    expected = load_file(dense / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    found = dict(model.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0)


def test_what_cannot_be_read_is_refused(tmp_path):
    folder, _ = make_mxfp4(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"down_proj would have 48 columns on each of 2 ranks; in"
    ):
        read_spec(folder).share(Shard(0, 2))
    config = folder / "config.json"
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"down_proj_scales has scales above 128 \(2"):
        load_weights(Transformer(read_spec(folder), torch_ops, "float32", "cpu"), folder)
    written = json.loads(config.read_text())
    written["quantization_config"]["modules_to_not_convert"].pop(0)
    config.write_text(json.dumps(written))
    with pytest.raises(
        UnsupportedModelError, match=r"q_proj.* should not be in MXFP4.*modules_to_not_convert"
    ):
        read_spec(folder)
