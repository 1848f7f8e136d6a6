# SPDX-License-Identifier: Apache-2.0
"""config.json parsing and rotary tables."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import torch
import transformers
from msgspec.structs import replace
from tokenizers import Tokenizer, models
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints import KINDS, make_checkpoint
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.shard import Part, Shard
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf import ARCHITECTURES, read_spec
from flashinfer_backend.models.hf.end_ids import tokenizer_end_ids
from flashinfer_backend.models.rope import AHEAD, cos_sin, inv_freq
from flashinfer_backend.models.spec import Experts, LinearScaling, ModelSpec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.worker.formats import check_cuda_formats
from flashinfer_backend.worker.memory import state_format
from quantised import LAYOUTS

SHAPES = Path(__file__).parents[2] / "perf_configs/shapes"
# As Llama 3.1 8B was published, with the keys of transformers 4.
LLAMA31 = json.loads((SHAPES / "llama-3.1-8b/config.json").read_text())
LLAMA31["eos_token_id"] = [128001, 128008, 128009]
FACTORS = [1.0 + index / 10 for index in range(64)]


def parse(path: Path, generation: dict | None = None, **changes) -> ModelSpec:
    raw = {key: value for key, value in (LLAMA31 | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(path)


def parse_kind(folder: Path, kind: str = "qwen3-moe", **changes: Any) -> ModelSpec:
    """Of a checkpoint in folder / "model", with other values in its config.json; ...: without the key."""
    path = make_checkpoint(kind, folder / "model")
    written = json.loads((path / "config.json").read_text()) | changes
    written = {key: value for key, value in written.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(written))
    return read_spec(path)


def test_published_config(tmp_path):
    config = parse(tmp_path, generation={"eos_token_id": [128009, -1, 7, 128256, 1 << 40]})
    heads = config.attention
    assert (heads.heads, heads.kv_heads, heads.head_dim, len(config.layers)) == (32, 8, 128, 32)
    assert (config.dtype, heads.rope.theta) == ("bfloat16", 500000.0)
    assert config.eos_token_ids == (128009, 7, 128001, 128008)
    assert not (heads.qkv.bias or heads.qk_norm or config.tie_word_embeddings)


def test_new_and_old_rope_keys_mean_the_same(tmp_path):
    old = parse(tmp_path)
    new_keys = LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}
    assert parse(tmp_path, rope_parameters=new_keys, rope_scaling=..., rope_theta=...) == old
    linear = parse(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert linear.attention.rope.scaling == LinearScaling(4.0)
    plain = parse(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10.0}, rope_scaling=...)
    assert (plain.attention.rope.theta, plain.attention.rope.scaling) == (10.0, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]},
         "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": ["KimiLinearForCausalLM"]},
         "KimiLinearForCausalLM is not supported, as such models have recurrent .*: serve it with vLLM"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "have latent attention .* another architecture: Lla"),
        ({"model_type": "granite"}, "model_type 'granite' contradicts architecture LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "'proportional' is not supported; .* yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, 'rope_scaling.factor is "4"'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "factor is -4.0; it should be a number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is null; it should be a list of 64"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "speed": 1}}, "rope_scaling has speed, which"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "factor 0.5 is not"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no 'low_freq_factor'"),
        ({"rope_theta": 0}, "rope_theta is 0; it should be greater than 0"),
        ({"rope_parameters": {"rope_theta": 0.0}, "rope_scaling": ...},
         "rope_theta is 0; it should be greater"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"mlp_bias": True}, "mlp_bias true"),
        ({"is_causal": False}, "is_causal false"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported; supported: "silu"'),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config 'awq'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        ({"intermediate_size": ...}, "has no 'intermediate_size'"),
        ({"rope_scaling": {"full_attention": LLAMA31["rope_scaling"]}},
         "by kind of layer .'full_attention'."),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layer_types has 'chunked_attention'"),
        ({"transformers_weights": "ema.safetensors"},
         'transformers_weights is "ema.safetensors", which is not supported: weights are read from'),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192, which is not supported"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 4}}}, "per_layer_config is .*all layers have"),
        ({"kv_sharing_modes": ["none", "reuse"]}, "kv_sharing_modes is .*every layer has keys"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types names 31 layers; it should .* 32"),
        ({"layer_types": ["sliding_attention"]},
         "layer_types has sliding_attention, but sliding_window is not"),
        ({"num_attention_heads": None}, "num_attention_heads is null; it should be an integer of at least 1"),
        ({"max_position_embeddings": "4096"}, 'max_position_embeddings is "4096"; it should be an integer'),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads is 2.0; it should be an integer of at least 1"),
        ({"head_dim": -64}, "head_dim is -64; it should be an integer of at least 1"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": "4096"},
         'sliding_window is "4096"; it should be an integer of at least 1'),
        ({"architectures": "LlamaForCausalLM"}, 'architectures is "LlamaForCausalLM"; it should be a list'),
        ({"rope_theta": 10**400}, "; it should be a finite number"),
        ({"rms_norm_eps": None}, "rms_norm_eps is null; it should be a number greater than 0"),
        ({"rope_scaling": 1}, "rope_scaling is 1; it should be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0; it should be a"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; it should be an integer .*, in 31 bits"),
        ({"eos_token_id": "x"}, 'eos_token_id is "x"; it should be a token id or a list of them'),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, **changes)


def test_broken_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        read_spec(tmp_path)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.mixer.window for layer in spec.layers]


@pytest.mark.parametrize(
    "change", [{}, {"sliding_window": None}, {"sliding_window": 100}, {"layer_types": ["full_attention"] * 2}]
)
def test_mistral_without_the_key_has_the_window_of_transformers(tmp_path, change):
    ours = parse_kind(tmp_path, "mistral", **{"sliding_window": ...} | change)
    assert windows(ours) == [transformers.AutoConfig.from_pretrained(tmp_path / "model").sliding_window] * 2


def test_keys_that_change_nothing_are_accepted(tmp_path):
    harmless = {"transformers_weights": "model.safetensors", "per_layer_config": {}}
    nothing = {"attention_chunk_size": None, "kv_sharing_modes": None}
    assert parse(tmp_path, **harmless, **nothing) == parse(tmp_path)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA31["rope_scaling"],
        LLAMA31["rope_scaling"] | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
        {"rope_type": "dynamic", "factor": 6.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, "beta_fast": 20.0, "beta_slow": 3.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "mscale": 0.7},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": FACTORS,
            "long_factor": FACTORS[::-1],
        },
    ],
)
def test_rope_frequencies_match_transformers(tmp_path, scaling):
    config = parse(tmp_path, rope_scaling=scaling)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    if scaling is None:
        expected = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    else:
        expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")
        found = config.attention.rope.scaling
        assert getattr(found, "magnitude", 1.0) == pytest.approx(magnitude, rel=1e-6)
    torch.testing.assert_close(inv_freq(config.attention.rope), expected, rtol=1e-6, atol=0)
    if scaling and scaling["rope_type"] == "longrope":
        expected, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=131073)
        found = inv_freq(config.attention.rope, 131073)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_yarn_stretches_what_a_model_computes(tmp_path):
    """Some checkpoints give max_position_embeddings from before the stretching."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for positions, longest in ((32768, 131072), (131072, 131072), (40960, 131072), (262144, 262144)):
        config = parse(tmp_path, rope_scaling=yarn, max_position_embeddings=positions)
        assert config.longest_seq_len == longest


def test_rope_table_holds_cosines_then_sines(tmp_path):
    table = cos_sin(parse(tmp_path, rope_scaling=None).attention.rope, 50)
    assert table.shape == (50 + AHEAD, 128) and table.dtype == torch.float32
    angle = 49 * 500000.0 ** (-2 * 3 / 128)
    assert table[49, 3].item() == pytest.approx(math.cos(angle), abs=1e-5)
    assert table[49, 64 + 3].item() == pytest.approx(math.sin(angle), abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}, "rope_theta": ...},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10.0}, "rope_scaling": None},
        {"original_max_position_embeddings": 4096},
        {
            "original_max_position_embeddings": 4096,
            "rope_scaling": {k: v for k, v in LLAMA31["rope_scaling"].items() if "original" not in k},
        },
    ],
)
def test_rope_keys_that_contradict_each_other_mean_what_they_mean_to_transformers(tmp_path, changes):
    config = parse(tmp_path, **changes)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.attention.rope.theta == theirs.rope_parameters["rope_theta"]
    expected, _ = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu")
    torch.testing.assert_close(inv_freq(config.attention.rope), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": None}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 32}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 16}, 64),
    ],
)
def test_llama_with_a_window_is_served_up_to_its_length(tmp_path, changes, window):
    """transformers gives it full attention, others the window: up to its length the two agree."""
    config = parse(tmp_path, **changes)
    assert config.disputed_window == window and windows(config) == [None] * 32
    assert config.longest_seq_len == (window or 131072)
    if window:
        with pytest.raises(UnsupportedModelError, match=r"take the key out of config\.json"):
            config.check_max_seq_len(65)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": ...},
        {"max_window_layers": 1},
        {"max_window_layers": 1, "sliding_window": ...},
        {"max_window_layers": 1, "sliding_window": None},
        {"max_window_layers": 2},
        {"max_window_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {"max_window_layers": 1, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_qwen_has_a_window_where_transformers_has_a_layer_with_one(tmp_path, changes):
    plain = {"layer_types": ..., "max_window_layers": ..., "use_sliding_window": True, "sliding_window": 40}
    ours = parse_kind(tmp_path, "qwen3", **plain | changes)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    expected = [theirs.sliding_window if "sliding" in kind else None for kind in theirs.layer_types]
    assert windows(ours) == expected


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"])
def test_heads_that_are_not_named_are_those_of_transformers(tmp_path, kind):
    unnamed = {"head_dim": ..., "num_key_value_heads": ..., "hidden_size": 1024, "num_attention_heads": 32}
    ours = parse_kind(tmp_path, kind, **unnamed)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.attention.kv_heads, ours.attention.head_dim) == (theirs.num_key_value_heads, head_dim)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram"])
@pytest.mark.parametrize(
    "token", ["</s>", "<|turn|>", {"content": "<tool>", "special": False}, "a", "no such"]
)
def test_the_tokenizers_end_id_is_read_from_its_files(tmp_path, kind, token):
    if kind == "unigram":
        backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], unk_id=0))
    else:
        backend = getattr(small_tokenizers, kind)()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<s>"}))
    expected = TextTokenizer(tmp_path).eos_id
    assert tokenizer_end_ids(tmp_path) == ([] if expected is None else [expected])


def test_a_call_of_harmony_ends_a_text_as_well(tmp_path):
    backend = Tokenizer.from_str(small_tokenizers.byte_level().to_str())  # others have it as it is
    backend.add_special_tokens(["<|return|>", "<|call|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    assert tokenizer_end_ids(tmp_path) == [backend.token_to_id(name) for name in ("<|return|>", "<|call|>")]


def test_the_tokenizers_end_token_is_one_of_the_end_ids(tmp_path):
    model_dir, tokenizer_dir = tmp_path / "model", tmp_path / "tokenizer"
    model_dir.mkdir()
    tokenizer_dir.mkdir()
    small_tokenizers.byte_level().save(str(model_dir / "tokenizer.json"))
    small_tokenizers.sentencepiece().save(str(tokenizer_dir / "tokenizer.json"))
    for folder, token in ((model_dir, "<|turn|>"), (tokenizer_dir, "<tool>")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    config = parse(model_dir, generation={"eos_token_id": 7}, eos_token_id=8)
    assert config.eos_token_ids == (7, 8, TextTokenizer(model_dir).eos_id)
    config = read_spec(model_dir, tokenizer_dir)
    assert config.eos_token_ids == (7, 8, TextTokenizer(tokenizer_dir).eos_id)


@pytest.mark.parametrize(
    ("shape", "states", "size"), [("qwen3.5-35b-a3b", 30, 34.66e9), ("qwen3.5-27b", 48, 26.90e9)]
)
def test_published_sizes_of_delta_nets(shape, states, size):
    """Without the head for drafts. Of 4 ranks each has its heads, whose states are a quarter."""
    spec = read_spec(SHAPES / shape)
    model = Transformer(spec, torch_ops, "bfloat16", "meta", 16)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(size, rel=1e-3)
    assert len(spec.delta_nets) == states == 3 * len(spec.attentions)
    assert (spec.attention.rope.dim, spec.attention.rope.theta, spec.attention.gated) == (64, 1e7, True)
    part = Transformer(spec.share(Shard(3, 4)), torch_ops, "bfloat16", "meta", 16)
    assert 4 * state_format(part).bytes_per_sequence == state_format(model).bytes_per_sequence


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3.5", {"layer_types": ["linear_attention"] * 5}, "and one of them at least full_attention"),
        ("qwen3.5", {"layer_types": ["full_attention"] * 4}, "it should name num_hidden_layers, 5, layers"),
        ("qwen3.5", {"layer_types": ["sliding_attention"] * 5},
         "has 'sliding_attention'; .* and linear_attention"),
        ("qwen3.5", {"linear_num_value_heads": 3},
         "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ("qwen3.5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; it should be an integer"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it should be an integer of"),
        ("qwen3-moe", {"mlp_only_layers": [True]},
         r"mlp_only_layers is \[true\]; it should be a list of layers' numbers"),
        ("qwen3-moe", {"num_experts": 9}, "num_experts and num_local_experts differ"),
        ("qwen3-moe", {"num_experts": "8"}, "num_experts and num_local_experts differ"),
        ("qwen3-moe", {"num_local_experts": ...}, "it has neither num_experts nor num_local_experts"),
        ("qwen3-moe", {"num_local_experts": 0}, "num_local_experts is 0; it should be an integer"),
        ("qwen3-moe", {"num_experts_per_tok": 9},
         "num_experts_per_tok is 9; it should be at most the number of experts, 8"),
        ("qwen3-moe", {"num_experts_per_tok": "2"}, 'num_experts_per_tok is "2"; it should be an integer'),
        ("qwen3-moe", {"moe_intermediate_size": ...}, "has no 'moe_intermediate_size'"),
        ("qwen3-moe", {"norm_topk_prob": "yes"}, 'norm_topk_prob is "yes"'),
        ("qwen3-moe", {"quantization_config": FP8 | {"activation_scheme": "static"}},
         "experts in FP8 with stored scales of activations are not supported; take one with dynamic"),
        ("qwen3-moe", {"head_dim": 64, "quantization_config": FP8 | {"weight_block_size": [128, 128]}},
         "experts.0.gate_proj has 48 rows; with FP8 scales of 128x128 blocks"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported for Llama 4"),
        ("llama4", {"moe_layers": ["1"]}, "moe_layers is .* it should be a list of layers' numbers"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is null; it should be an integer"),
        ("llama4", {"layer_types": ["full_attention"]}, "layer_types names 1 layers; it should name 4"),
    ],
)  # fmt: skip
def test_what_is_not_computed_of_other_families_is_refused(tmp_path, kind, changes, message):
    with pytest.raises(ValueError, match=message):
        parse_kind(tmp_path, kind, **changes)


def test_delta_nets_are_cut_by_key_heads(tmp_path):
    spec = parse_kind(tmp_path, "qwen3-next")
    with pytest.raises(UnsupportedModelError, match="should divide linear_num_key_heads, which is 2"):
        spec.share(Shard(0, 4))
    assert parse_kind(tmp_path, "qwen3.5", mtp_num_hidden_layers=2).mtp is None is not spec.mtp


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "qwen3-moe-plain"])
def test_experts_are_those_of_transformers(tmp_path, kind):
    """Also by the older name of their number, and where keys are left out that have a default."""
    ours = parse_kind(tmp_path, kind, norm_topk_prob=kind == "qwen3-moe")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    mlp = ours.mlp
    assert isinstance(mlp, Experts)
    assert (mlp.count, mlp.per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert mlp.norm_topk == (kind != "qwen3-moe-plain")
    size = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert mlp.size == size and mlp.down.shape == (mlp.count * 64, size)
    if kind != "mixtral":  # no such layer
        assert parse_kind(tmp_path, kind, mlp_only_layers=[99, -1]) == ours
    older = parse_kind(tmp_path, kind, num_local_experts=..., num_experts=5, rope_parameters=...)
    assert isinstance(older.mlp, Experts) and older.mlp.count == 5
    assert older.attention.rope.theta == (1e6 if kind == "mixtral" else 1e4)


def test_a_window_is_that_of_all_layers_with_experts(tmp_path):
    for kind in ("mixtral", "qwen3-moe"):
        found = parse_kind(tmp_path / kind, kind, sliding_window=40, use_sliding_window=True)
        assert windows(found) == [40] * 2
    assert windows(parse_kind(tmp_path, sliding_window=40, use_sliding_window=False)) == [None] * 2


@pytest.mark.parametrize(
    ("kind", "name"), [("mistral-window", "windows"), ("gemma2-capped", "soft caps"), ("granite", "scales")]
)
def test_a_decode_backend_that_does_not_compute_a_checkpoint_is_refused(tmp_path, kind, name):
    spec = read_spec(make_checkpoint(kind, tmp_path), changes={"head_dim": 64})
    config = EngineConfig(model_dir="", max_seq_len=21 if name == "soft caps" else 100)
    check_cuda_formats(config, spec, torch.bfloat16)
    with pytest.raises(ValueError, match=f"attention_backend fa2 has no {name}.* set attention_backend"):
        check_cuda_formats(replace(config, attention_backend="fa2"), spec, torch.bfloat16)


def test_sizes_of_heads_without_kernels_are_refused(tmp_path):
    folder = make_checkpoint("llama", tmp_path)
    for dim in (64, 128, 256):
        spec = read_spec(folder, changes={"head_dim": dim})
        check_cuda_formats(EngineConfig(model_dir=""), spec, torch.bfloat16)
    with pytest.raises(ValueError, match=r"head_dim is 96; .* 64, 128, 256: attention_backend=torch"):
        check_cuda_formats(
            EngineConfig(model_dir=""), read_spec(folder, changes={"head_dim": 96}), torch.bfloat16
        )


def test_variants_of_attention_have_one_kernel(tmp_path):
    spec = read_spec(make_checkpoint("mpt", tmp_path, hidden_size=384))
    config = EngineConfig(model_dir="", max_seq_len=100)
    for served in ("auto", "fa2"):
        check_cuda_formats(replace(config, attention_backend=served), spec, torch.bfloat16)
    with pytest.raises(ValueError, match="attention_backend triton has no attention of the kind alibi as"):
        check_cuda_formats(replace(config, attention_backend="triton"), spec, torch.bfloat16)


def test_chunks_count_where_sequences_are_longer(tmp_path):
    """Up to a chunk's length any kernel of attention will do."""
    spec = read_spec(make_checkpoint("llama4", tmp_path))
    assert {mixer.variant for mixer in spec.within(22).attentions} == {"", "chunked"}
    assert not any(mixer.variant or mixer.by_head for mixer in spec.within(21).attentions)
    mpt = read_spec(make_checkpoint("mpt", tmp_path / "mpt"))
    assert all(mixer.variant == "alibi" for mixer in mpt.within(1).attentions)


def test_llama_4_as_published_has_every_fourth_layer_without_positions(tmp_path):
    make_checkpoint("llama4", tmp_path)
    published = read_spec(tmp_path, changes={"no_rope_layers": [], "layer_types": None})
    assert [mixer.rope is None for mixer in published.attentions] == [False, False, False, True]
    assert [mixer.variant for mixer in published.attentions] == ["chunked"] * 3 + [""]


def test_means_of_quantised_weights_cannot_be_taken(tmp_path):
    """LayerNorm's mean is taken from the weights, which FP8 made on load has and FP8 as stored does not."""
    spec = read_spec(make_checkpoint("mpt", tmp_path))
    assert spec.quantised_on_load().layers[0].mixer.o.format == "fp8_on_load"
    with pytest.raises(UnsupportedModelError, match=r"attn\.out_proj have format .* take the 16-bit"):
        spec.with_format("fp8_token")


def test_experts_are_cut_by_their_width(tmp_path):
    whole = parse_kind(tmp_path)
    local = whole.share(Shard(1, 2))
    mlp = local.mlp
    assert mlp.gate_up.shape == (8 * 2 * 24, 64) and mlp.down.shape == (8 * 64, 24)
    assert mlp.down.sources[7][:2] == ("mlp.experts.7.down_proj", Part((64, 48), slice(0, 64), slice(24, 48)))
    with pytest.raises(UnsupportedModelError, match="should divide moe_intermediate_size, which is 48"):
        parse_kind(tmp_path, num_attention_heads=32, num_key_value_heads=32).share(Shard(0, 32))


def test_groups_of_ranks_have_whole_experts(tmp_path):
    local = parse_kind(tmp_path).share(Shard(3, 4, 2))
    mlp = local.mlp
    assert mlp.own == (4, 4) and mlp.gate_up.shape == (4 * 2 * 24, 64)
    assert mlp.down.sources[0][:2] == ("mlp.experts.4.down_proj", Part((64, 48), slice(0, 64), slice(24, 48)))
    with pytest.raises(
        UnsupportedModelError, match="expert_parallel_size=16 should divide the number of exp"
    ):
        parse_kind(tmp_path, num_attention_heads=16, num_key_value_heads=16).share(Shard(0, 16, 16))
    with pytest.raises(UnsupportedModelError, match="expert_parallel_size=2 is for models with experts"):
        read_spec(make_checkpoint("llama", tmp_path / "llama")).check_expert_groups(2)


@pytest.mark.parametrize(
    ("kind", "folded"),
    [("qwen2-moe", (8, 2)), ("qwen3.5-moe", (8, 1)), ("llama4", None), ("qwen3-next", None)],
)
def test_a_shared_expert_is_folded_where_it_is_as_large_as_one_or_two(tmp_path, kind, folded):
    """Each rank's part of it as well, but not where ranks have whole experts, nor in other formats."""
    spec = parse_kind(tmp_path, kind)
    of_ranks = spec, spec.share(Shard(1, 2)), spec.share(Shard(1, 2, 2))
    assert [each.experts.folded for each in of_ranks] == [folded, folded, None]
    assert [each.experts.shared in each.mlps for each in of_ranks] == [not folded] * 2 + [True]
    for mlp in (each.experts for each in of_ranks):
        router, gate_up, down, *shared = mlp.products
        count, further = len(mlp.gate_up.sources) // 2, mlp.folded[1] if mlp.folded else 0
        assert [product.name for product in shared] == ([] if further else ["shared_gate_up", "shared_down"])
        assert gate_up.experts == down.experts == count + further
        assert gate_up.all_experts == down.all_experts == (4 if kind == "llama4" else 8)
        assert gate_up.shape == ((count + further) * 2 * mlp.size, 64)
        assert down.shape == ((count + further) * 64, mlp.size)
        assert router.shape == ((4, 64) if kind == "llama4" else (16, 64))
    if kind == "qwen2-moe":
        config = LAYOUTS["ct-dynamic"].config
        for ignored, expected in ((["lm_head"], folded), ([r"re:.*shared_expert\..*"], None)):
            other = parse_kind(tmp_path, kind, quantization_config=config | {"ignore": ignored})
            assert other.experts.gate_up.format == "fp8_token" and other.experts.folded == expected
        gate_up, down = of_ranks[1].experts.products[1:]
        parts = [slice(48, 72), slice(72, 96)]  # of the rank's half
        assert [source.part.rows for source in gate_up.folded_sources] == [parts[0]] * 2 + [parts[1]] * 2
        assert [source.part.columns for source in down.folded_sources] == parts
        assert {source.module for source in down.folded_sources} == {"mlp.shared_expert.down_proj"}


def test_every_architecture_has_a_checkpoint_to_compare_with_and_a_place_in_the_list():
    listed = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    names = {f"{architecture}ForCausalLM" for architecture, *_ in KINDS.values()}
    assert names | {"MPTForCausalLM"} == set(ARCHITECTURES)  # its own code's name for Mpt
    assert all(f"`{name}`" in listed for name in ARCHITECTURES)
