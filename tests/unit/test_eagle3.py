# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads: which are read, which are refused and why, and where their tensors go."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import make_checkpoint
from eagle3_heads import FORMS, make_head
from editing import edit_config, edit_tensors
from flashinfer_backend.core.paths import BUNDLED, resolve_model_dir
from flashinfer_backend.models.hf import read_drafter, read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import WeightsError, load_weights
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.speculate.eagle3 import load_eagle3
from flashinfer_backend.speculate.heads import HeadProposer

SIZES: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256, "known": 100}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6)
    model = Transformer(read_spec(folder), torch_ops, "float32", "cpu", 128)
    load_weights(model, folder)
    return model


def load(folder: Path, target: Transformer, **options: Any) -> HeadProposer:
    return load_eagle3(folder, target, count=3, positions=128, **options)


@pytest.mark.parametrize("form", FORMS)
def test_published_forms_are_read(form: str, target: Transformer, tmp_path: Path):
    folder = make_head(form, tmp_path, **SIZES, target=target.embed_tokens)
    proposer = load(folder, target)
    behind = {"safeailab": (1, 2, 2), "nvidia": (1, 2), "speculators": (0, 1, 2), "speculators-qwen3": (0, 2)}
    assert proposer.layers == behind[form]
    assert (proposer.count, proposer.cache_layers) == (3, 1)
    head, tensors = proposer.head, load_file(folder / "model.safetensors")
    prefix = "midlayer" if form == "safeailab" else "layers.0"
    assert torch.equal(head.layers[0].qkv.data[-32:], tensors[f"{prefix}.self_attn.v_proj.weight"])
    assert torch.equal(head.ids.long(), tensors["t2d"].nonzero().squeeze(1))
    own = form == "speculators-qwen3"
    assert (head.embed_tokens is not None) == own
    if head.embed_tokens is not None:
        assert torch.equal(head.embed_tokens, tensors["embed_tokens.weight"])


def test_a_head_of_several_layers_is_read(target: Transformer, tmp_path: Path):
    proposer = load(make_head("speculators", tmp_path, **SIZES, layers=2), target)
    assert proposer.cache_layers == 2
    assert [layer.qkv.shape[1] for layer in proposer.head.layers] == [128, 64]


def test_random_weights_leave_the_target_alone(target: Transformer, tmp_path: Path):
    before = target.embed_tokens.clone()
    head = load(make_head("safeailab", tmp_path, **SIZES), target, load_format="dummy").head
    assert torch.equal(target.embed_tokens, before)
    assert 0.01 < float(head.lm_head.data.std()) < 0.03


def test_weights_are_quantised_on_load(target: Transformer, tmp_path: Path):
    head = load(make_head("speculators", tmp_path, **SIZES | {"known": 96}), target, fp8=True).head
    formats = {product.name: getattr(head.layers[0], product.name).format.name for product in
               head.layers[0].spec.products}  # fmt: skip
    assert set(formats.values()) == {"fp8_on_load"}
    assert head.fc.format.name == head.lm_head.format.name == "fp8_on_load"
    odd = load(make_head("speculators", tmp_path / "odd", **SIZES), target, fp8=True).head
    assert odd.fc.format.name == "fp8_on_load" and odd.lm_head.format.name == "dense"
    made = make_head("speculators", tmp_path / "random", **SIZES | {"known": 96})
    random = load(made, target, load_format="dummy", fp8=True).head
    assert 0.01 < float((random.fc.data.float() * random.fc.scale.view(-1, 1)).std()) < 0.03


NESTED = "transformer_layer_config"
# form, changes of config.json, what the refusal names
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("safeailab", {"draft_vocab_size": None}, "this is no EAGLE-3 drafter"),
    ("safeailab", {"tie_word_embeddings": True}, "tie_word_embeddings true is not supported"),
    ("safeailab", {"rope_scaling": {"rope_type": "proportional", "factor": 32.0}},
     "rope type 'proportional'"),
    ("safeailab", {"attention_bias": True}, "attention_bias true"),
    ("safeailab", {"model_type": "gemma"}, 'model_type "gemma" is not supported; supported: llama, qwen3'),
    ("safeailab", {"logit_scale": 0.5}, "logit_scale is 0.5, which is not known of EAGLE-3 drafters"),
    ("safeailab", {"draft_vocab_size": 0}, "draft_vocab_size is 0; it should be"),
    ("safeailab", {"draft_vocab_size": 300}, "draft_vocab_size is 300, more than the target's 256"),
    ("nvidia", {"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step 4"),
    ("nvidia", {"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm true"),
    ("nvidia", {"eagle_config": {"new": 1}}, "eagle_config.new is not known"),
    ("nvidia", {"fc_norm": True}, "norm_before_fc and fc_norm are both true"),
    ("speculators", {"speculators_model_type": "dflash"}, 'speculators_model_type "dflash"'),
    ("speculators", {"norm_before_residual": None}, "norm_before_residual is missing"),
    ("speculators", {NESTED: None}, "transformer_layer_config"),
    ("speculators", {"norm_before_fc": 1}, "norm_before_fc is 1; it should be true or false"),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": [3, 2]}, "should be ascending"),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": [0, 2]}, "should be 1 or more"),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": "2"}, "should be a list"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "changes", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_config_refusals_name_the_key(form: str, changes: dict[str, Any], reason: str, tmp_path: Path):
    edit_config(make_head(form, tmp_path, **SIZES), **changes)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        read_drafter(tmp_path)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("safeailab", {"hidden": 32}, "hidden states of 32, and the target 64"),
        ("safeailab", {"vocab": 128}, "vocab_size 128, and the target 256"),
        ("speculators", {"heads": 2}, "num_attention_heads 2, and the target 4"),
        ("speculators", {"kv_heads": 1}, "num_key_value_heads 1, and the target 2"),
        ("speculators", {"head_dim": 32}, "head_dim 32, and the target 16"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [2, 7]}, "in front of layer 7"),
    ],
)
def test_heads_for_other_targets_are_refused(
    form: str, changes: dict[str, Any], reason: str, target: Transformer, tmp_path: Path
):
    make_head(form, tmp_path, **SIZES | changes)
    with pytest.raises(ValueError, match="the drafter") as caught:
        read_drafter(tmp_path).check_fits(target.spec, 128)
    assert reason in str(caught.value)
    assert "trained for this target" in str(caught.value) or "deeper target" in str(caught.value)


def test_the_head_of_gpt_oss(target: Transformer, tmp_path: Path):
    """NVIDIA's form: YaRN and states of two layers are read; the last layer's are refused by name."""
    make_head("nvidia", tmp_path, **SIZES)
    eagle = json.loads((tmp_path / "config.json").read_text())["eagle_config"]
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 64}
    layers = "eagle_aux_hidden_state_layer_ids"
    edit_config(
        tmp_path, **{"rope_scaling": yarn, "eagle_config": eagle | {layers: [2, 4], "norm_before_fc": True}}
    )
    head = read_drafter(tmp_path)
    head.check_fits(target.spec, 128)
    assert head.taken == (2, 4) and head.fc_norms == "whole" and head.attention.rope.scaling.factor == 32
    edit_config(tmp_path, eagle_config=eagle | {layers: [2, 4, 6]})
    with pytest.raises(ValueError, match=r"behind the target's last layer .* has 6.* of earlier"):
        read_drafter(tmp_path).check_fits(target.spec, 128)


def test_windows_of_a_head_bound_sequences(target: Transformer, tmp_path: Path):
    make_head("speculators", tmp_path, **SIZES)
    raw = json.loads((tmp_path / "config.json").read_text())
    layer = raw[NESTED] | {"layer_types": ["sliding_attention"], "sliding_window": 64}
    edit_config(tmp_path, **{NESTED: layer})
    read_drafter(tmp_path).check_fits(target.spec, 64)
    with pytest.raises(ValueError, match="set max_seq_len to at most 64, which is 65"):
        read_drafter(tmp_path).check_fits(target.spec, 65)


def test_a_shallow_target_wants_layers_named(tmp_path: Path):
    shallow = read_spec(make_checkpoint("llama", tmp_path / "target", num_hidden_layers=4))
    drafter = read_drafter(make_head("safeailab", tmp_path / "head", **SIZES))
    with pytest.raises(ValueError, match="names no layers of its target"):
        drafter.check_fits(shallow, 128)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("d2t", torch.zeros(100, dtype=torch.int64), "t2d names other tokens than d2t"),
        ("d2t", torch.full((100,), 200), "d2t gives ids outside of the target's 256 tokens"),
        ("d2t", None, "lacks tensors .*: d2t"),
        ("fc.weight", torch.zeros(64, 64), "fc.weight has shape"),
        ("midlayer.hidden_norm.weight", None, "lacks tensors .*: midlayer.hidden_norm.weight"),
        ("midlayer.self_attn.q_proj.bias", torch.zeros(64), "tensors that config.json does not account for"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, tensor: torch.Tensor | None, reason: str, target: Transformer, tmp_path: Path
):
    folder = make_head("safeailab", tmp_path, **SIZES)
    edit_tensors(folder, lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
    with pytest.raises(WeightsError, match=reason):
        load(folder, target)


ROOT = Path(__file__).parents[2]


def test_a_head_is_trained_on_the_targets_own_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import train_eagle3

    sampled: list[list[int]] = []
    own_chats = train_eagle3.own_chats

    def kept(*args: Any) -> list[list[int]]:
        sampled.extend(own_chats(*args))
        return sampled

    monkeypatch.setattr(train_eagle3, "own_chats", kept)
    monkeypatch.setattr(train_eagle3, "CHATS", 2)
    monkeypatch.setattr(train_eagle3, "CHAT_TOKENS", 12)
    sizes = ["--known", "64", "--intermediate-size", "64", "--steps", "1", "--rows", "1", "--length", "32"]
    threads = torch.get_num_threads()
    try:
        train_eagle3.main(["--output", str(tmp_path), "--chats", "3", "--dtype", "bfloat16", *sizes])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        sys.modules.pop("train_eagle3")
    assert len(sampled) == 3 and len({tuple(chat) for chat in sampled}) == 3  # of two rounds
    before = [chat[:-12] for chat in sampled]
    assert before[0] == before[1] == before[2] and before[0]
    read_drafter(tmp_path).check_fits(read_spec(resolve_model_dir(BUNDLED)), 256)
