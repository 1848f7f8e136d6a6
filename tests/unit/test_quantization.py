# SPDX-License-Identifier: Apache-2.0
"""How quantised checkpoints are recognised, refused and loaded; e4m3 in plain torch."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_models import load

from checkpoints import make_multimodal
from editing import edit_config, edit_tensors
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.hf.multimodal import ALIASES
from flashinfer_backend.models.quantization import read_quantization
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import WeightsError, load_weights
from flashinfer_backend.ops import fp8, torch_ops
from flashinfer_backend.ops.weight import FORMATS, Weight
from flashinfer_backend.worker.formats import check_cuda_formats
from int4_checkpoints import AWQ, GPTQ, INT4_LAYOUTS, make_int4, packed
from quantised import (
    ARGS,
    BLOCKS,
    GROUP,
    LAYOUTS,
    TOKEN,
    compressed_tensors,
    e4m3,
    make_quantised,
)

CHANNEL = ARGS | {"strategy": "channel"}
DYNAMIC = compressed_tensors(CHANNEL, TOKEN)


def in_groups(config: dict, *changes: dict) -> dict:
    """With a group of modules for each of these changes."""
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {f"group_{n}": group | own for n, own in enumerate(changes)}}


INT8 = ARGS | {"type": "int"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' with quant_algo 'NVFP4'"),
    "mixed": ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"),
    "int8": (compressed_tensors(INT8, TOKEN | {"type": "int"}), "weights with type 'int'"),
    "int4": (compressed_tensors(CHANNEL | {"num_bits": 4}, TOKEN), "weights with num_bits 4"),
    "asymmetric": (compressed_tensors(CHANNEL | {"symmetric": False}, TOKEN), "symmetric false"),
    "int8 inputs": (compressed_tensors(CHANNEL, INT8), "input_activations with type 'int'"),
    "weights only": (compressed_tensors(CHANNEL, None), "with activations of 16 bits"),
    "groups": (compressed_tensors(ARGS | {"strategy": "group"}, GROUP), "with weights by group"),
    "dynamic per tensor": (
        compressed_tensors(CHANNEL, ARGS | {"strategy": "tensor", "dynamic": True}), "dynamic true",
    ),
    "other blocks": (
        compressed_tensors(BLOCKS | {"block_structure": [64, 64]}, GROUP), "blocks of [64, 64]",
    ),
    "packed": (compressed_tensors(CHANNEL, TOKEN, format="pack-quantized"), "in format 'pack-quantized'"),
    "sparse": (compressed_tensors(CHANNEL, TOKEN, sparsity_config={"format": "sparse-bitmask"}), "sparsity"),
    "two groups": (in_groups(DYNAMIC, {}, {}), "other config_groups than one for all of Linear"),
    "some targets": (
        in_groups(DYNAMIC, {"targets": ["re:.*mlp.*"]}),
        "other config_groups than one for all of Linear",
    ),
    "int8 cache": (DYNAMIC | {"kv_cache_scheme": INT8}, "kv_cache_scheme with type 'int'"),
    "fp4 cache": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
        "a KV cache of 'NVFP4'",
    ),
    "fp8 blocks of 64": (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "'fp8' with fmt 'e5m2'"),
    "no activation_scheme": ({"quant_method": "fp8"}, "'fp8' with activation_scheme null"),
    "no zero_point": ({"quant_method": "awq", "bits": 4}, "'awq' without zero_point"),
    "awq of 8 bits": (AWQ | {"bits": 8, "group_size": 128}, "'awq' with bits 8"),
    "awq gemv": (AWQ | {"version": "gemv", "group_size": 128}, "'awq' with version 'gemv'"),
    "awq without zeros": (AWQ | {"zero_point": False, "group_size": 128}, "'awq' with zero_point false"),
    "awq groups": (AWQ | {"group_size": 16}, "'awq' with group_size 16"),
    "gptq of 3 bits": (GPTQ | {"bits": 3, "group_size": 128}, "'gptq' with bits 3"),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, "'gptq' with checkpoint_format 'marlin'"),
    "gptq marlin, older": (GPTQ | {"is_marlin_format": True}, "'gptq' with is_marlin_format true"),
    "gptq head": (GPTQ | {"lm_head": True, "group_size": 128}, "'gptq' with lm_head true"),
    "gptq words": (GPTQ | {"pack_dtype": "int16", "group_size": 128}, "'gptq' with pack_dtype 'int16'"),
    "gptq groups": (GPTQ | {"group_size": 1024}, "'gptq' with group_size 1024"),
    "gptq no groups": (GPTQ, "'gptq' with group_size null"),
    "gptq mixed": (
        GPTQ | {"group_size": 128, "dynamic": {"lm_head": {}, r"+:.*down": {"bits": 8}}},
        "'gptq' with other settings for some modules (dynamic '+:.*down')",
    ),
    "packed, activations": (in_groups(packed(), {"input_activations": TOKEN}), "with quantised activations"),
    "packed, 8 bits": (packed(num_bits=8), "weights with num_bits 8"),
    "packed, groups of 16": (packed(group_size=16), "with group_size 16"),
    "packed, floats": (packed(type="float"), "weights with type 'float'"),
    "packed, per tensor": (packed(strategy="tensor"), "weights by tensor"),
    "packed, order": (packed(actorder="random"), "weights with actorder 'random'"),
    "packed, sparse": (packed() | {"sparsity_config": {"format": "marlin-24"}}, "with sparsity"),
    "packed, marlin": (packed() | {"format": "marlin-24"}, "in format 'marlin-24'"),
    "autoround": ({"quant_method": "auto-round", "bits": 4}, "'auto-round'"),
    "powers of two": (FP8 | {"scale_fmt": "ue8m0"}, "'fp8' with scale_fmt 'ue8m0'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    config, found = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=re.escape(found)) as error:
        read_quantization({"quantization_config": config}, {})
    told = str(error.value)
    assert "served are FP8 (e4m3) checkpoints" in told and "quantization=fp8" in told
    assert "4-bit weights of AWQ (gemm), GPTQ and compressed-tensors (pack-quantized)" in told
    assert not re.search(r"\b(None|True|False)\b", told)


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.", "model.layers.11.mlp.up_proj", False),
        ("down_proj", "model.layers.0.mlp.down_proj", True),
        ("mlp.down", "model.layers.0.mlp.down_proj", False),
        ("model.layers.*.mlp*", "model.layers.7.mlp.down_proj", True),
        ("*self_attn*", "model.layers.7.mlp.down_proj", False),
        ("re:.*self_attn", "model.layers.0.self_attn.q_proj", True),
        (r"re:model\.layers\.\d\.mlp|never", "model.layers.0.mlp.up_proj", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
    ],
)
def test_patterns_of_ignored_modules(pattern, module, matches):
    quantization = read_quantization({"quantization_config": DYNAMIC | {"ignore": [pattern]}}, {})
    assert quantization.format_of([module]) == ("dense" if matches else "fp8_token")


@pytest.mark.parametrize(
    "name", ["model.language_model.layers.0.mlp", r"re:model\.language_model\.layers\.0\.mlp"]
)
def test_modules_of_a_multimodal_checkpoint_are_ignored_by_their_names_there(name, tmp_path):
    folder = make_multimodal("qwen3.5", tmp_path)
    edit_config(folder, quantization_config=DYNAMIC | {"ignore": ["lm_head", name, "model.visual.blocks.0"]})
    formats = [layer.mlp.down.format for layer in read_spec(folder).layers]
    assert formats == ["dense", *["fp8_token"] * 4]


def test_a_product_of_which_parts_are_ignored_is_refused(tmp_path):
    folder = make_quantised("ct-dynamic", "llama", tmp_path).folder
    edit_config(folder, quantization_config=DYNAMIC | {"ignore": ["lm_head", "re:.*k_proj"]})
    with pytest.raises(UnsupportedModelError, match=r"leaves out model\.layers\.0\.self_attn\.k_proj, but"):
        read_spec(folder)
    edit_config(folder, quantization_config=DYNAMIC | {"ignore": ["re:("]})
    with pytest.raises(ValueError, match="which is no regular expression"):
        read_spec(folder)


def test_modules_that_gptq_names_are_quantised_and_no_others():
    config = GPTQ | {"group_size": 64, "modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"]]}
    quantization = read_quantization({"quantization_config": config}, {})
    assert quantization.format_of(["model.layers.0.mlp.gate_proj"]) == "int4_gptq_64"
    assert (
        quantization.format_of(["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj"]) == "dense"
    )


@pytest.mark.parametrize(
    ("make", "layout", "changes", "message"),
    [
        (make_int4, "awq", {"intermediate_size": 272}, "mlp.down_proj have 272 columns; .* multiple of 64"),
        (make_int4, "awq", {"intermediate_size": 260}, "mlp.gate_proj has 260 rows; .* multiple of 8"),
        (make_quantised, "blocks", {"num_key_value_heads": 1}, r"k_proj has 64 rows; .* multiples of 128"),
    ],
)
def test_shapes_that_do_not_divide_are_refused(tmp_path, make, layout, changes, message):
    folder = make(layout, "llama", tmp_path).folder
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(folder)


# Loading

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("layout", "edit", "message"),
    [
        ("modelopt", lambda t: t.pop(f"{Q_PROJ}.weight_scale"), rf"lacks tensors.*{Q_PROJ}\.weight_scale"),
        ("modelopt", lambda t: t.pop(f"{Q_PROJ}.input_scale"), rf"lacks tensors.*{Q_PROJ}\.input_scale"),
        ("modelopt", lambda t: t.update({f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"].bfloat16()}),
         r"q_proj.weight is BF16; only F8_E4M3 are loaded \(by its quantization_config: fp8_static\)"),
        ("modelopt", lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(fp8.E4M3)}),
         "lm_head.weight is F8_E4M3; only F32, F16, BF16"),
        ("modelopt", lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(256, 2)}),
         r"weight_scale has shape \[256, 2\], config.json asks for \[\] or \[1\] or \[256\] or \[256, 1\]"),
        ("modelopt", lambda t: t[f"{Q_PROJ}.weight_scale"].fill_(torch.nan),
         "weight_scale has scales that are not"),
        ("modelopt", lambda t: t[f"{Q_PROJ}.input_scale"].zero_(),
         r"input_scale is 0\.0; a scale should be .* above 0"),
        ("modelopt", lambda t: t.pop("model.layers.1.self_attn.v_proj.v_scale"),
         r"scales of some keys and values, but not self_attn\.v_scale of layer 1"),
        ("modelopt", lambda t: t.update({f"{Q_PROJ}.q_scale": torch.ones(())}),
         r"does not account for.*q_scale"),
        ("awq", lambda t: t.pop(f"{Q_PROJ}.qzeros"), rf"lacks tensors.*{Q_PROJ}\.qzeros"),
        ("awq", lambda t: t.update({f"{Q_PROJ}.qweight": t[f"{Q_PROJ}.qweight"].float()}),
         r"q_proj.qweight is F32; only I32 are loaded \(by its quantization_config: int4_awq_64\)"),
        ("awq", lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(24, 256, dtype=torch.int32)}),
         r"qweight has shape \[24, 256\], config.json asks for \[192, 32\]"),
        ("awq", lambda t: t[f"{Q_PROJ}.scales"].fill_(torch.inf), "scales has scales that are not finite"),
        ("gptq", lambda t: t[f"{Q_PROJ}.bias"].fill_(1),
         r"q_proj\.bias is not zero, but config.json describes a model without it"),
        ("gptq-ordered", lambda t: t[f"{Q_PROJ}.g_idx"].zero_(),
         r"q_proj\.g_idx should name each of 6 groups 32 times"),
        ("gptq-ordered", lambda t: t.update({f"{Q_PROJ}.g_idx": t[f"{Q_PROJ}.g_idx"].flip(0)}),
         r"g_idx of layer 0's self_attn.q_proj, .* put columns into other groups than their neighbours"),
        ("gptq-ordered", lambda t: t.pop(f"{Q_PROJ}.g_idx"), "into other groups than their neighbours"),
        ("packed", lambda t: t[f"{Q_PROJ}.weight_shape"].fill_(7),
         r"weight_shape says \[7, 7\], config.json asks for \[256, 192\]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(tmp_path, layout, edit, message):
    if layout in LAYOUTS:
        folder = make_quantised(layout, "llama", tmp_path, kv_scales=True).folder
    else:
        folder = make_int4(layout, "llama", tmp_path).folder
    edit_tensors(folder, edit)
    with pytest.raises(WeightsError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("ct-dynamic", r"in_proj_b\.weight is F8_E4M3; only F32, F16, BF16 are loaded"),
        ("awq", r"layers\.0\.linear_attn\.in_proj_b should have 16 bits"),
        ("packed", r"layers\.0\.linear_attn\.in_proj_b should have 16 bits"),
    ],
)
def test_decays_and_betas_of_delta_nets_have_16_bits(tmp_path, layout, reason):
    """As in published checkpoints, whose tools leave them out."""
    make: Any = make_quantised if layout in LAYOUTS else make_int4
    folder = make(layout, "qwen3.5", tmp_path).folder
    load(folder)
    module = "model.layers.0.linear_attn.in_proj_b"

    def quantise(tensors):
        weight = tensors.pop(f"{module}.weight")
        if layout in LAYOUTS:
            tensors[f"{module}.weight"] = weight.to(torch.float8_e4m3fn)
        else:
            tensors[f"{module}.{'qweight' if layout == 'awq' else 'weight_packed'}"] = weight

    edit_tensors(folder, quantise)
    with pytest.raises(WeightsError, match=reason):
        load(folder)


LAYER = "model.language_model.layers.0"
# What Qwen's own quantised checkpoints leave out.
PUBLISHED = {
    "Qwen3.5-35B-A3B-FP8": (
        FP8 | {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"modules_to_not_convert": [
            "lm_head", "model.language_model.embed_tokens", f"{LAYER}.linear_attn.conv1d",
            f"{LAYER}.linear_attn.in_proj_a", f"{LAYER}.linear_attn.in_proj_b", f"{LAYER}.mlp.gate",
            f"{LAYER}.mlp.shared_expert_gate", "model.visual.merger.linear_fc1", "mtp.fc",
        ]},
        {"linear_attn.in_proj_qkv", "linear_attn.out_proj", "self_attn.q_proj", "mlp.experts.0.up_proj",
         "mlp.shared_expert.up_proj", "mtp"},
    ),
    "Qwen3.5-35B-A3B-GPTQ-Int4": (
        GPTQ | {"group_size": 128},
        {"dynamic": {
            "lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {},
            "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {},
        }},
        {"mlp.experts.0.up_proj"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_leave_out_what_they_say(name):
    settings, left_out, quantised = PUBLISHED[name]
    found = read_quantization({"quantization_config": settings | left_out}, {}).renamed(ALIASES)
    attention = [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_a", "in_proj_b", "out_proj")]
    mlp = [f"mlp.{part}" for part in ("experts.0.up_proj", "shared_expert.up_proj", "shared_expert_gate")]
    modules = {part: f"model.layers.0.{part}" for part in [*attention, "self_attn.q_proj", *mlp]}
    modules["mtp"] = "mtp.layers.0.mlp.experts.0.up_proj"
    assert {part for part, module in modules.items() if found.format_of([module]) != "dense"} == quantised


def test_tensors_that_may_be_missing(tmp_path):
    """Columns are then in order, and there is no bias."""
    folder = make_int4("gptq", "llama", tmp_path).folder
    before = load(folder)

    def drop(tensors):
        for name in [name for name in tensors if name.endswith((".g_idx", "_proj.bias"))]:
            del tensors[name]

    edit_tensors(folder, drop)
    after = load(folder)
    for ours, theirs in zip(before.layers, after.layers, strict=True):
        assert torch.equal(ours.down.data, theirs.down.data) and ours.down.order is theirs.down.order is None


def test_elements_in_fp8_without_a_word_about_it_are_refused(tmp_path):
    folder = make_quantised("modelopt", "llama", tmp_path).folder
    (folder / "hf_quant_config.json").unlink()
    with pytest.raises(WeightsError, match=r"F8_E4M3; only F32, F16, BF16 are loaded|does not account for"):
        load(folder)


@pytest.mark.parametrize("format", [name for name in FORMATS if name.startswith(("fp8", "int4"))])
def test_random_weights_in_every_format(tmp_path, format):
    """As N(0, initializer_range) as the format can: what benchmarks run on."""
    spec = read_spec(make_quantised("dense", "llama", tmp_path, hidden_size=256).folder)
    model = Transformer(spec.with_format(format), torch_ops, "float32", "cpu")
    load_weights(model, tmp_path, load_format="dummy")
    weight = model.layers[1].down
    values = weight.format.product(torch.eye(256), weight)
    assert values.std().item() == pytest.approx(spec.initializer_range, rel=0.05)
    assert weight.shape == (256, 256) and model.lm_head.data.dtype == torch.float32
    stored = weight.data.dtype, tuple(weight.data.shape)
    assert stored == ((torch.int16, (256, 64)) if "int4" in format else (fp8.E4M3, (256, 256)))


@pytest.mark.parametrize("format", ["fp8_token", "fp8_block"])
def test_random_weights_of_experts(tmp_path, format):
    """Each has its own, the two folded ones as well."""
    config, count = read_spec(make_quantised("dense", "qwen2-moe", tmp_path).folder), 8 + 2
    model = Transformer(config.with_format(format), torch_ops, "float32", "cpu")
    load_weights(model, tmp_path, load_format="dummy")
    for weight in (model.layers[0].gate_up, model.layers[0].down):
        parts = [weight.part(index, count) for index in range(count)]
        values = [part.format.product(torch.eye(weight.shape[1]), part) for part in parts]
        assert all(v.std().item() == pytest.approx(config.initializer_range, rel=0.05) for v in values)
        assert len({float(v.sum()) for v in values}) == count


def test_what_the_kernels_of_4_bits_lack_is_refused(tmp_path):
    folder = make_int4("awq", "llama", tmp_path).folder
    config = read_spec(folder)
    with pytest.raises(ValueError, match=r"qkv weights \[512, 192\] of 4 bits .* multiples of 128 on a GPU"):
        check_cuda_formats(EngineConfig(model_dir=""), config, torch.float16)
    wide = read_spec(folder, changes={"hidden_size": 256})
    for dtype in (torch.float16, torch.bfloat16):
        check_cuda_formats(EngineConfig(model_dir=""), wide, dtype)


def test_what_the_cuda_kernels_lack_is_refused(tmp_path):
    shape = read_spec(make_quantised("blocks", "llama", tmp_path).folder)
    plain = EngineConfig(model_dir="")
    with pytest.raises(ValueError, match=r"qkv weights \[512, 192\] in FP8 .* multiples of 128 on a GPU"):
        check_cuda_formats(plain, shape, torch.bfloat16)
    token = shape.with_format("fp8_token")
    check_cuda_formats(plain, token, torch.bfloat16)
    with pytest.raises(ValueError, match=r"FP8 need dtype=bfloat16 on a GPU, not torch\.float16"):
        check_cuda_formats(plain, token, torch.float16)
    for backend in ("auto", "triton", "fa2"):
        config = EngineConfig(model_dir="", kv_cache_dtype="fp8_e4m3", attention_backend=backend)
        check_cuda_formats(config, token, torch.bfloat16)


# e4m3


def test_rounding_is_to_the_nearest_and_saturates():
    """Every number of e4m3, what lies half-way between two, just beside that, and beyond the largest."""
    numbers = torch.arange(256, dtype=torch.uint8).view(fp8.E4M3).double()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        [numbers, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.tensor([464.0, 1e9, -1e30])]
    )
    found = fp8.to_e4m3(x.float(), 1.0)
    assert torch.equal(found.double(), e4m3(x.float()))
    assert found.float().abs().max() == 448


def test_rows_of_zeros_stay_zeros():
    weight = Weight("o", torch.ones(4, 128).to(fp8.E4M3), FORMATS["fp8_token"], torch.ones(4))
    x = torch.zeros(3, 128)
    x[1] = 1e-30
    product = weight.format.product(x, weight)
    assert product.isfinite().all() and (product[[0, 2]] == 0).all()
    elements, scale = fp8.quantise_groups(torch.zeros(2, 200))
    assert scale.shape == (2, 2) and (scale > 0).all() and (elements.float() == 0).all()


@pytest.mark.parametrize("shape", [(256, 128), (384, 640), (200, 1536), (1024, 2304)])
def test_scales_of_blocks_lie_as_cublas_reads_them(shape):
    """https://docs.nvidia.com/cuda/cublas/#scaling-factors-layouts: a block's rows beside each other,
    in steps of a multiple of 4. torch says the same of tensors without memory."""
    blocks, groups = -(-shape[0] // 128), shape[1] // 128
    weight = Weight.empty("o", shape, "fp8_block", torch.bfloat16, torch.device("cpu"))
    values = torch.randn(shape) * torch.arange(1, shape[0] + 1)[:, None] * torch.arange(1, shape[1] + 1)
    weight.format.fill(weight, values)
    _, expected = fp8.quantise_blocks(values)
    assert weight.scale.shape == (blocks, groups) and torch.equal(weight.scale, expected)
    apart = -(-groups // 4) * 4
    memory = torch.zeros(blocks * apart)
    for block in range(blocks):
        memory[block * apart :][:groups] = expected[block]
    found = fp8.cublas_block_scales(weight.scale)
    assert found.shape == (apart, blocks) and found.stride() == (1, apart)
    assert torch.equal(found.t().reshape(-1), memory)
    assert found.data_ptr() == weight.scale.data_ptr() and found.data_ptr() % 16 == 0
    if shape[0] % 128 == 0:
        empty = Weight.empty("o", shape, "fp8_block", torch.bfloat16, torch.device("meta"))
        x = torch.empty(8, shape[1], dtype=fp8.E4M3, device="meta")
        x_scales = torch.empty(groups, 8, device="meta").t()
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        scales = fp8.cublas_block_scales(empty.scale)
        assert F.scaled_mm(x, empty.data.t(), x_scales, kinds[0], scales, kinds[1]).shape == (8, shape[0])
    with pytest.raises(AssertionError, match="not of empty_block_scales"):
        fp8.cublas_block_scales(torch.ones(4, 5))


def test_blocks_are_quantised_each_by_itself():
    x = torch.randn(300, 200) * torch.logspace(-2, 2, 200)
    elements, scale = fp8.quantise_blocks(x)
    assert scale.shape == (3, 2)
    for i, rows in enumerate(x.split(128)):
        for j, block in enumerate(rows.split(128, dim=1)):
            assert scale[i, j] == fp8.scale_of(block.abs().max())
            part = elements[i * 128 :][:128, j * 128 :][:, :128]
            assert torch.equal(part.float(), fp8.to_e4m3(block, scale[i, j]).float())


def test_every_layout_is_recognised(tmp_path):
    expected = {
        "ct-dynamic": "fp8_token",
        "ct-static": "fp8_static",
        "ct-block": "fp8_block_scale",
        "modelopt": "fp8_static",
        "modelopt-new": "fp8_static",
        "blocks": "fp8_block",
        "autofp8": "fp8_static",
        "mistral": "fp8_static",
        "some-layers": "fp8_token",
        "on-load": "dense",
        "dense": "dense",
        "awq": "int4_awq_64",
        "awq-some": "int4_awq_32",
        "gptq": "int4_gptq_64",
        "gptq-zeros": "int4_gptq_32",
        "gptq-ordered": "int4_gptq_32",
        "gptq-rows": "int4_gptq_row",
        "gptq-v2": "int4_gptq_v2_64",
        "gptq-qwen3.5": "int4_gptq_64",
        "packed": "int4_packed_64",
        "packed-zeros": "int4_packed_zeros_32",
        "packed-rows": "int4_packed_row",
        "packed-ordered": "int4_packed_32",
    }
    found = {
        name: read_quantization(
            {"quantization_config": layout.config}, getattr(layout, "hf_quant", None) or {}
        ).format
        for name, layout in (LAYOUTS | INT4_LAYOUTS).items()
    }
    assert found == expected
