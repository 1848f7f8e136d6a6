# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on a GPU: its kernels against the formats' own products, and engines with them."""

import pytest
import torch
from comparing import SMALL, assert_close, capture, compare_engines
from compilations import watch
from msgspec.structs import replace
from test_engine import SETTINGS, SIZES
from test_triton_experts import check_tiles
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.attention.flashinfer_paged import LARGEST_GRAPH
from flashinfer_backend.core import tuned
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops import device, torch_ops
from flashinfer_backend.ops.torch_ops import Mixture
from flashinfer_backend.ops.weight import Weight
from flashinfer_backend.worker import graphs
from int4_checkpoints import make_int4
from mxfp4_checkpoints import make_mxfp4
from quantised import Quantised, make_quantised
from tables import entries

pytestmark = pytest.mark.gpu

FORMATS = ["dense", "fp8_token", "fp8_block", "mxfp4", "int4_awq_128"]
# Of a row's relative error. In FP8 a last bit of the first product decides over roundings to e4m3.
BOUND = {"dense": 2e-2, "fp8_token": 6e-2, "fp8_block": 6e-2, "mxfp4": 2e-2, "int4_awq_128": 2e-2}
# Experts, of which a token has, hidden size, intermediate size: as Qwen3-30B-A3B, and as Mixtral on 8 GPUs.
SHAPES = [(128, 8, 2048, 768), (8, 2, 4096, 1792)]
GPT_OSS = (32, 4, 2880, 2880)  # of 20B
CLIP = (1.702, 7.0)
TOKENS = [1, 7, 64, 300, 4096]
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_weight(role: str, experts: int, rows: int, inner: int, format: str) -> Weight:
    """Rows differ in size, so that a scale of another one shows."""
    where = torch.device("cuda")
    weight = Weight.empty(role, (experts * rows, inner), format, torch.bfloat16, where)  # type: ignore[arg-type]
    for index in range(experts):
        sizes = torch.logspace(-1, 1, rows, device="cuda")[torch.randperm(rows, device="cuda")]
        values = torch.randn(rows, inner, device="cuda") * sizes[:, None] * inner**-0.5
        weight.format.fill(weight.part(index, experts), values)
    return weight


def by_formats(
    normed: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    experts: int,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """The weighted sum in float32, for the experts that were chosen."""
    result = torch.zeros_like(normed, dtype=torch.float32)
    for index in chosen.unique().tolist():
        tokens, place = torch.where(chosen == index)
        parts = gate_up.part(index, experts), down.part(index, experts)
        biases = [None if part.bias is None else part.bias.float() for part in parts]
        first, second = (
            Weight(part.role, part.data.float()) if part.format.name == "dense" else part for part in parts
        )
        gate, up = first.format.product(normed[tokens].float(), first, biases[0]).chunk(2, -1)
        gated = torch_ops.gated(gate, up, clip).bfloat16().float()  # as the first kernel stores it
        product = second.format.product(gated, second, biases[1])
        result.index_add_(0, tokens, product * weights[tokens, place, None])
    return result


@pytest.mark.parametrize(
    ("shape", "format", "clip"),
    [(shape, format, None) for shape in SHAPES for format in FORMATS]
    + [(GPT_OSS, format, CLIP) for format in ("dense", "mxfp4")],
)
def test_products(shape, format, clip):
    """clip: with biases, as GPT-OSS has them."""
    from flashinfer_backend.ops import cuda_ops

    experts, per_token, hidden, inner = shape
    gate_up = make_weight("gate_up", experts, 2 * inner, hidden, format)
    down = make_weight("down", experts, hidden, inner, format)
    router = Weight("", torch.randn(experts, hidden, device="cuda").bfloat16() * hidden**-0.5)
    for weight in (router, gate_up, down) if clip else ():
        values = torch.randn(len(weight.data), device="cuda").bfloat16()
        weight.bias = nn.Parameter(values, requires_grad=False)
    norm = (torch.rand(hidden, device="cuda") + 0.5).bfloat16()
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        residual = torch.randn(tokens, hidden, device="cuda").bfloat16() if tokens != 7 else None
        normed, quantised = cuda_ops.norm_quantised(x, norm, 1e-5, (gate_up,))
        assert (quantised is not None) == (format == "fp8_block")
        torch.testing.assert_close(normed, cuda_ops.rms_norm(x, norm, 1e-5), rtol=1e-2, atol=0)
        logits = normed.float() @ router.data.float().t()
        logits = logits if router.bias is None else logits + router.bias
        chosen, weights = torch_ops.route(logits, per_token, tokens != 64)
        expected = by_formats(normed, chosen, weights, gate_up, down, experts, clip)
        expected = expected if residual is None else expected + residual
        mixture = Mixture(per_token, tokens != 64, clip)
        own_logits = cuda_ops.router_logits(normed, router)
        found = cuda_ops.experts_add(normed, own_logits, gate_up, down, mixture, residual, quantised)
        # The order of float32's additions decides between experts that a token wants nearly as much.
        error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
        wrong = int((error > BOUND[format]).sum())
        assert wrong <= tokens // 100, f"{tokens} tokens: {wrong} differ, by up to {error.max():.2e}"


def test_routes_in_a_graph():
    """What one counts in is as the next one, and the next replay, need it."""
    from flashinfer_backend.ops import triton_experts

    logits = torch.randn(64, 32, device="cuda")

    def routes() -> list[triton_experts.Tiles]:
        return [triton_experts.route(logits, per_token, True, 16) for per_token in (4, 2)]

    graph, found = capture(routes)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        for tiles, per_token in zip(found, (4, 2), strict=True):
            chosen, weights = torch_ops.route(logits, per_token, True)
            torch.testing.assert_close(tiles.weights, weights)
            check_tiles(tiles, chosen.flatten().tolist())


@pytest.mark.parametrize("format", FORMATS)
def test_whole_experts_of_ranks_add_up(format):
    """As the formats' own products of all; with one expert for a token, of an input times its logit's
    sigmoid."""
    from flashinfer_backend.ops import cuda_ops

    experts, groups, hidden, inner = 16, 4, 512, 256
    gate_up = make_weight("gate_up", experts, 2 * inner, hidden, format)
    down = make_weight("down", experts, hidden, inner, format)
    router = Weight("", torch.randn(experts, hidden, device="cuda").bfloat16() * hidden**-0.5)
    for tokens, per_token in ((1, 4), (9, 4), (300, 4), (9, 1), (300, 1)):
        normed, scaled = torch.randn(tokens, hidden, device="cuda").bfloat16(), per_token == 1
        logits = cuda_ops.router_logits(normed, router)
        chosen, weights = torch_ops.route(logits, per_token, True)
        factor = logits.amax(-1, keepdim=True).sigmoid().bfloat16() if scaled else 1
        expected = by_formats(normed * factor, chosen, weights, gate_up, down, experts)
        found = torch.zeros_like(expected)
        for group in range(groups):
            parts = gate_up.part(group, groups), down.part(group, groups)
            own = group * experts // groups, experts // groups
            mixture = Mixture(per_token, True, scaled_input=scaled, own=own)
            found += cuda_ops.experts_add(normed, logits, *parts, mixture, None)
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        wrong = int((error > BOUND[format]).sum())
        assert wrong <= tokens // 100, f"{tokens} tokens: {wrong} differ, by up to {error.max():.2e}"


@pytest.mark.parametrize("format", FORMATS)
def test_folded_experts(format):
    """Which every token has behind its own, with a gate or without."""
    from flashinfer_backend.ops import cuda_ops

    experts, hidden, inner = 16, 512, 256
    for tokens, further, gate in ((1, 1, True), (9, 2, True), (300, 2, True), (9, 1, False), (300, 1, False)):
        per_token, folded = 4, (experts, further)
        gate_up = make_weight("gate_up", experts + further, 2 * inner, hidden, format)
        down = make_weight("down", experts + further, hidden, inner, format)
        rows = experts + 8 * gate  # its row, and padding
        router = Weight("", torch.randn(rows, hidden, device="cuda").bfloat16() * hidden**-0.5)
        normed = torch.randn(tokens, hidden, device="cuda").bfloat16()
        logits = cuda_ops.router_logits(normed, router)
        chosen, weights = torch_ops.route(logits, per_token, True, folded)
        expected = by_formats(normed, chosen, weights, gate_up, down, experts + further)
        mixture = Mixture(per_token, True, folded=folded)
        found = cuda_ops.experts_add(normed, logits, gate_up, down, mixture, None)
        error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
        wrong = int((error > BOUND[format]).sum())
        assert wrong <= tokens // 100, f"{tokens} tokens: {wrong} differ, by up to {error.max():.2e}"


TABLE = tuned.fallback().experts
TILES = [(scales, tile) for scales in TABLE for _, tile in tuned.steps(TABLE, scales)]
OF_SCALES = {"none": "dense", "rows": "fp8_token", "blocks": "fp8_block", "int4": "int4_awq_128"}


@pytest.mark.parametrize(("scales", "tile"), TILES, ids=lambda each: getattr(each, "tokens", each))
def test_every_tile_gives_the_same(scales, tile):
    """With tokens that all want the same experts, so that tiles are full and others have none."""
    from flashinfer_backend.ops import cuda_experts

    format = OF_SCALES.get(scales, scales)
    experts, per_token, hidden, inner = 16, 4, 512, 256
    gate_up = make_weight("gate_up", experts, 2 * inner, hidden, format)
    down = make_weight("down", experts, hidden, inner, format)
    x = torch.randn(500, hidden, device="cuda").bfloat16()
    logits = torch.randn(500, experts, device="cuda") - 4 * (torch.arange(experts, device="cuda") > 5)
    experts_of = device.active().experts | {scales: entries((None, tile))}
    with device.use(replace(device.active(), experts=experts_of)):
        found = cuda_experts.experts_add(x, logits, gate_up, down, Mixture(per_token, True), None)
    chosen, weights = torch_ops.route(logits, per_token, True)
    assert_close(found, by_formats(x, chosen, weights, gate_up, down, experts), BOUND[format])


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss in MXFP4"])
def test_nothing_compiles_after_the_start(kind, tmp_path):
    if kind == "qwen3-moe":
        folder = make_checkpoint(kind, tmp_path / "model", **SIZES, **EXPERTS)
    else:
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 256}
        folder, _ = make_mxfp4(tmp_path, **sizes)
    with watch() as found:
        core = start_core(folder, **SETTINGS)
        found.clear()
        with serve(core, tmp_path / "run") as client:
            for count in (1, 5, 16):
                prompts = [[7] * (1 + 31 * i % 200) for i in range(count)]
                client.generate(prompts, SamplingParams(max_tokens=9, temperature=0.0))
        assert not (found.triton or found.loaded or found.built), found


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dense", "mixtral"),
        *((layout, "qwen3-moe") for layout in ("dense", "ct-dynamic", "blocks", "on-load")),
    ],
)
def test_engines(layout, kind, tmp_path):
    """A bit decides which expert a token has, too, so single tokens are farther from the best than with one
    MLP, in plain torch as well."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 128}
    checkpoint = make_quantised(
        layout, kind, tmp_path / "model", **sizes, **(EXPERTS if "moe" in kind else {})
    )
    knobs = {"quantization": "fp8"} if layout == "on-load" else {}
    compare_engines(f"{layout}, {kind}", checkpoint, SMALL | knobs, tmp_path, factor=2.5)


def test_steps_of_more_tokens_than_attention_has_a_graph_for(tmp_path, monkeypatch):
    """Go in pieces, between one layer's attention and the next one's."""
    pieces, in_pieces = [], graphs.MixedGraphs.run

    def noted(self, plan, inputs, *others):
        pieces.append(len(inputs[0]))
        return in_pieces(self, plan, inputs, *others)

    monkeypatch.setattr(graphs.MixedGraphs, "run", noted)
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 128, "max_position_embeddings": 2048}
    checkpoint = make_quantised("blocks", "qwen3-moe", tmp_path / "model", **sizes, **EXPERTS)
    settings = SMALL | {"max_num_tokens": 2048, "max_num_tokens_while_decoding": 2048, "max_seq_len": 2048}
    compare_engines("larger steps", checkpoint, settings, tmp_path, factor=2.5, longest=1900)
    assert {size for size in pieces if size > LARGEST_GRAPH} & set(graphs.FURTHER_SIZES)


OTHERS = ["gpt-oss", "gpt-oss in MXFP4", "qwen2-moe", "qwen2-moe, apart", "qwen3-moe in 4 bits"]


@pytest.mark.parametrize("kind", OTHERS)
def test_engines_of_other_families(kind, tmp_path):
    """Beyond the windows of GPT-OSS, with its biases and sinks; with shared experts, folded and apart; in 4
    bits."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8}
    if kind.startswith("gpt-oss"):
        published, folder = make_mxfp4(tmp_path, **sizes, head_dim=64, intermediate_size=256)
        served = published if kind.endswith("MXFP4") else folder
    elif kind.startswith("qwen2-moe"):
        shared = {"shared_expert_intermediate_size": 384 if kind.endswith("apart") else 512}
        served = folder = make_checkpoint("qwen2-moe", tmp_path / "model", **sizes, **EXPERTS, **shared)
    else:
        sizes |= {"head_dim": 128, "moe_intermediate_size": 256}
        checkpoint = make_int4("awq", "qwen3-moe", tmp_path / "model", **sizes)
        compare_engines(kind, checkpoint, SMALL, tmp_path, 2.5)
        return
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    compare_engines(kind, Quantised(served, model), SMALL, tmp_path, 2.5)


def test_widths_that_the_kernels_do_not_have_are_refused(tmp_path):
    folder = make_checkpoint("qwen3-moe", tmp_path / "model", **SIZES)
    with pytest.raises(
        ValueError, match="moe_intermediate_size is 48; with experts it should be a multiple of 32"
    ):
        start_core(folder, **SETTINGS)
