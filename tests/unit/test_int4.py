# SPDX-License-Identifier: Apache-2.0
"""How checkpoints with weights of 4 bits are recognised, refused, loaded and packed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.quantization import read_quantization
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import WeightsError, load_weights
from flashinfer_backend.ops import int4, torch_ops
from flashinfer_backend.ops.weight import FORMATS
from flashinfer_backend.worker.start import check_cuda_formats
from int4_checkpoints import AWQ, GPTQ, INT4_LAYOUTS, make_int4, packed
from quantised import TOKEN, edit_config, make_quantised

REFUSED = {
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
        GPTQ | {"group_size": 128, "dynamic": {r"+:.*down": {"bits": 8}}},
        "'gptq' with other settings for some modules (dynamic '+:.*down')",
    ),
    "packed, 8 bits": (packed(num_bits=8), "weights with num_bits 8"),
    "packed, groups of 16": (packed(group_size=16), "with group_size 16"),
    "packed, floats": (packed(type="float"), "weights with type 'float'"),
    "packed, per tensor": (packed(strategy="tensor"), "weights by tensor"),
    "packed, order": (packed(actorder="random"), "weights with actorder 'random'"),
    "packed, sparse": (packed() | {"sparsity_config": {"format": "marlin-24"}}, "with sparsity"),
    "packed, marlin": (packed() | {"format": "marlin-24"}, "in format 'marlin-24'"),
    "autoround": ({"quant_method": "auto-round", "bits": 4}, "'auto-round'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    config, found = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=re.escape(found)) as error:
        read_quantization({"quantization_config": config}, {})
    assert "4-bit weights of AWQ (gemm), GPTQ and compressed-tensors (pack-quantized)" in str(error.value)


def test_quantised_activations_are_refused():
    config = packed()
    config["config_groups"]["group_0"]["input_activations"] = TOKEN
    with pytest.raises(UnsupportedModelError, match="'pack-quantized' with quantised activations"):
        read_quantization({"quantization_config": config}, {})


def test_every_layout_is_recognised():
    expected = {
        "awq": "int4_awq_64",
        "awq-some": "int4_awq_32",
        "gptq": "int4_gptq_64",
        "gptq-zeros": "int4_gptq_32",
        "gptq-ordered": "int4_gptq_32",
        "gptq-rows": "int4_gptq_row",
        "gptq-v2": "int4_gptq_v2_64",
        "packed": "int4_packed_64",
        "packed-zeros": "int4_packed_zeros_32",
        "packed-rows": "int4_packed_row",
        "packed-ordered": "int4_packed_32",
    }
    found = {
        name: read_quantization({"quantization_config": layout.config}, {}).format
        for name, layout in INT4_LAYOUTS.items()
    }
    assert found == expected
    assert set(found.values()) <= set(FORMATS)


def test_modules_that_gptq_names_are_quantised_and_no_others():
    config = GPTQ | {"group_size": 64, "modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"]]}
    quantization = read_quantization({"quantization_config": config}, {})
    assert quantization.format_of(["model.layers.0.mlp.gate_proj"]) == "int4_gptq_64"
    assert (
        quantization.format_of(["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj"]) == "dense"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 272}, "mlp.down_proj have 272 columns; .* multiple of 64"),
        ({"intermediate_size": 260}, "mlp.gate_proj has 260 rows; .* multiple of 8"),
    ],
)
def test_shapes_that_do_not_divide_are_refused(tmp_path, changes, message):
    folder = make_int4("awq", "llama", tmp_path).folder
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(folder)


def test_what_the_cuda_kernels_lack_is_refused(tmp_path):
    folder = make_int4("awq", "llama", tmp_path).folder
    config = read_spec(folder)
    with pytest.raises(ValueError, match=r"qkv weights \[512, 192\] of 4 bits .* multiples of 128 on a GPU"):
        check_cuda_formats(EngineConfig(model_dir=""), config, torch.float16)
    wide = read_spec(folder, changes={"hidden_size": 256})
    for dtype in (torch.float16, torch.bfloat16):
        check_cuda_formats(EngineConfig(model_dir=""), wide, dtype)


# Loading

Q_PROJ = "model.layers.0.self_attn.q_proj"


def load(folder: Path) -> Transformer:
    model = Transformer(read_spec(folder), torch_ops, "float32", "cpu")
    load_weights(model, folder)
    return model


def edited(folder: Path, edit) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("layout", "edit", "message"),
    [
        ("awq", lambda t: t.pop(f"{Q_PROJ}.qzeros"), rf"lacks tensors.*{Q_PROJ}\.qzeros"),
        (
            "awq",
            lambda t: t.update({f"{Q_PROJ}.qweight": t[f"{Q_PROJ}.qweight"].float()}),
            r"q_proj.qweight is F32; only I32 are loaded \(by its quantization_config: int4_awq_64\)",
        ),
        (
            "awq",
            lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(24, 256, dtype=torch.int32)}),
            r"qweight has shape \[24, 256\], config.json asks for \[192, 32\]",
        ),
        ("awq", lambda t: t[f"{Q_PROJ}.scales"].fill_(torch.inf), "scales has scales that are not finite"),
        (
            "gptq",
            lambda t: t[f"{Q_PROJ}.bias"].fill_(1),
            r"q_proj\.bias is not zero, but config.json describes a model without it",
        ),
        (
            "gptq-ordered",
            lambda t: t[f"{Q_PROJ}.g_idx"].zero_(),
            r"q_proj\.g_idx should name each of 6 groups 32 times",
        ),
        (
            "gptq-ordered",
            lambda t: t.update({f"{Q_PROJ}.g_idx": t[f"{Q_PROJ}.g_idx"].flip(0)}),
            r"g_idx of layer 0's self_attn.q_proj, .* put columns into other groups than their neighbours",
        ),
        ("gptq-ordered", lambda t: t.pop(f"{Q_PROJ}.g_idx"), "into other groups than their neighbours"),
        (
            "packed",
            lambda t: t[f"{Q_PROJ}.weight_shape"].fill_(7),
            r"weight_shape says \[7, 7\], config.json asks for \[256, 192\]",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(tmp_path, layout, edit, message):
    folder = make_int4(layout, "llama", tmp_path).folder
    with pytest.raises(WeightsError, match=message):
        load(edited(folder, edit))


def test_tensors_that_may_be_missing(tmp_path):
    """Columns are then in order, and there is no bias."""
    folder = make_int4("gptq", "llama", tmp_path).folder
    before = load(folder)

    def drop(tensors):
        for name in [name for name in tensors if name.endswith((".g_idx", "_proj.bias"))]:
            del tensors[name]

    after = load(edited(folder, drop))
    for ours, theirs in zip(before.layers, after.layers, strict=True):
        assert torch.equal(ours.down.data, theirs.down.data) and ours.down.order is theirs.down.order is None


@pytest.mark.parametrize("format", [name for name in FORMATS if name.startswith("int4")])
def test_random_weights_in_every_format(tmp_path, format):
    config = read_spec(make_quantised("dense", "llama", tmp_path, hidden_size=256).folder)
    quantised = replace(config, layers=config.layers[:1]).with_format(format)
    model = Transformer(quantised, torch_ops, "float32", "cpu")
    load_weights(model, tmp_path, load_format="dummy")
    weight = model.layers[0].down
    x = torch.eye(256)
    values = weight.format.product(x, weight)
    assert values.std().item() == pytest.approx(config.initializer_range, rel=0.05)
    assert weight.data.shape == (256, 64) and weight.data.dtype == torch.int16 and weight.shape == (256, 256)


# Packing


@pytest.mark.parametrize("columns", [4, 12, 96, 192, 256])
def test_packing_comes_back(columns):
    values = torch.randint(0, 16, (24, columns), dtype=torch.uint8, generator=torch.manual_seed(columns))
    packed_values = int4.pack(values)
    assert packed_values.shape == (24, columns // 4)
    assert torch.equal(int4.unpack(packed_values), values)
    assert torch.equal(int4.unpack(packed_values[8:16]), values[8:16])


def test_words_hold_columns_a_quarter_of_a_block_apart():
    """What the kernel counts on. Whole blocks can be cut off."""
    values = torch.arange(256).div(16, rounding_mode="floor").to(torch.uint8).expand(2, 256)
    values = (values + torch.tensor([[0], [3]])) & 15
    words = int4.pack(values.to(torch.uint8)).long() & 0xFFFF
    for block in (0, 1):
        for word in (0, 1, 31):
            parts = [int(words[1, 32 * block + word]) >> 4 * i & 15 for i in range(4)]
            assert parts == [int(values[1, 128 * block + 32 * i + word]) for i in range(4)]
    assert torch.equal(int4.unpack(int4.pack(values.to(torch.uint8))[:, 32:].contiguous()), values[:, 128:])


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantising_is_within_half_a_step(symmetric):
    x = torch.randn(16, 256, generator=torch.manual_seed(0))
    x[3] = 0
    values, scale, zero = int4.quantise(x, 4, symmetric)
    found = int4.dequantise(int4.pack(values), scale, zero)
    step = scale.t().repeat_interleave(64, dim=1)
    # The largest numbers of a symmetric group are half a step beyond 7 steps.
    assert ((found - x).abs() <= step * (0.5001 if symmetric else 1.0001)).all()
    assert (found[3] == 0).all()
