# SPDX-License-Identifier: Apache-2.0
"""Which variants of Triton's kernels there are, and that compiling them ahead gives those that steps run."""

import gc
import importlib.util
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper_driver import use_hopper
from msgspec.structs import replace

from flashinfer_backend import ops
from flashinfer_backend.core import tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.draft_counts import draft_counts
from flashinfer_backend.core.tuned import BlockTile, Tiling
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.ops import device
from flashinfer_backend.worker import prebuild_triton
from flashinfer_backend.worker.prebuild_triton import collect
from perf_configs.replaying import head_spec
from specs import EXPERTS, SHARED, bundled
from tables import entries, measured
from thinned import some

pytest.importorskip("triton")

SIZES_8B = {
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
BUNDLED, LLAMA = bundled(), bundled(**SIZES_8B)
CONFIG = EngineConfig(model_dir="", max_seq_len=8192, read_shared_prefixes_once=True)
VOCAB = 1000
META = torch.device("meta")
SIZES = (1, 7, 64, 300, 4096)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """With FlashInfer's names where it is not installed, so that ops.cuda_ops can be imported."""
    use_hopper(monkeypatch, tmp_path)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *_: None)
    if importlib.util.find_spec("flashinfer") is not None:
        yield
        return
    names = ("rmsnorm", "silu_and_mul", "gelu_tanh_and_mul")
    flashinfer = SimpleNamespace(**dict.fromkeys(names, None))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    yield
    assert vars(flashinfer) == dict.fromkeys(names, None)
    for name in ("cuda_ops", "cuda_int4"):  # which hold on to it
        if sys.modules.pop(f"{ops.__name__}.{name}", None) is not None:
            delattr(ops, name)


def test_both_kinds_of_operations_have_the_same_parameters() -> None:
    """A layer calls them by these, whichever it has."""
    from flashinfer_backend.ops import cuda_ops, torch_ops

    public = [
        name
        for name, value in vars(torch_ops).items()
        if inspect.isfunction(value) and hasattr(cuda_ops, name)
    ]
    assert {"linear", "experts_add", "delta_net", "sample"} <= set(public)
    for name in public:
        found = [inspect.signature(getattr(module, name)) for module in (torch_ops, cuda_ops)]
        first, second = ([(p.name, p.default) for p in each.parameters.values()] for each in found)
        assert first == second, name


def sample_rows(rows: int) -> None:
    """As a step samples: all that is said of the rows is one vector."""
    from flashinfer_backend.ops.triton_sample import sample

    data = torch.zeros(6 * rows, dtype=torch.int32)
    slots, heat, position, suppressed = data[2 * rows :].view(4, rows)
    seed, record = data[: 2 * rows].view(torch.int64), (torch.zeros(257, dtype=torch.int32), slots)
    logits = torch.empty(rows, VOCAB, dtype=torch.bfloat16)
    sample(logits, heat.view(torch.float32), seed, position, suppressed, record)


def names(variants: list[tuple[Any, str]]) -> Counter[str]:
    return Counter(kernel.__name__ for kernel, _ in variants)


def ahead_of(model: ModelSpec, config: EngineConfig = CONFIG, *head: ModelSpec) -> list[tuple[Any, str]]:
    """What is compiled ahead."""
    return collect(lambda: prebuild_triton.call_operations(config, model, torch.bfloat16, *head))


def empty(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=of, device=META)


def test_sampling_has_one_variant_for_any_number_of_rows():
    found = collect(lambda: [sample_rows(rows) for rows in range(1, 40)])
    assert names(found) == {"_block_best": 1, "_row_best": 1}


def test_rope_and_inputs_have_one_variant_for_any_part_of_a_step():
    from flashinfer_backend.ops.torch_ops import BySlot
    from flashinfer_backend.ops.triton_inputs import step_inputs
    from flashinfer_backend.ops.triton_rope import rope_and_store

    cache = torch.empty(2, 16, 2, 64), torch.empty(2, 16, 2, 64)
    table, last = torch.zeros(33, 8, dtype=torch.int32), torch.zeros(33, dtype=torch.int32)
    by_slot = BySlot(last, last, torch.zeros(33, 0, dtype=torch.int32), table, 16)

    def calls() -> None:
        for tokens in range(1, 33):
            data = torch.zeros(4 * tokens, dtype=torch.int32)
            _, slots, positions, blocks = data.view(4, tokens)
            qkv = torch.empty(tokens, 8 * 64)
            rope_and_store(qkv, positions, torch.empty(9, 64), *cache, slots, None, None, 1e-5, 4, 2)
            step_inputs(slots, by_slot, new_blocks=blocks)
            step_inputs(slots, by_slot, given=(blocks, positions, tokens // 2))

    assert names(collect(calls)) == {"_rope_and_store": 1, "_step_inputs": 2}


@pytest.mark.parametrize("model", [BUNDLED, LLAMA], ids=["bundled", "llama"])
def test_operations_are_called_without_compiling_anything(model, tmp_path):
    numbers = measured()
    with device.use(numbers):
        variants = ahead_of(model)
    found = names(variants)
    assert {"_rope_and_store", "_step_inputs", "_block_best", "_row_best", "_decode"} <= set(found)
    # For rows by themselves, and for rows that share prefixes.
    assert found["_decode"] == 2 * len(tuned.steps(numbers.decode_attention, "16 bits"))
    assert found["_prefix"] == 1 and found["_block_best"] == 2
    assert (found["_linear"] > 15) == (model is LLAMA)  # the small model's products do not fit the tilings
    assert not list(tmp_path.iterdir())


def test_drafts_have_kernels_of_their_own():
    """Rows alone and rows with all of their drafts, by the numbers of rows that check as many; what is shared
    with an engine without drafts is the same."""
    config = replace(CONFIG, speculative_method="ngram", max_draft_len=4)
    plain, drafted = ahead_of(LLAMA), ahead_of(LLAMA, config)
    kernels = {
        "_accept": 1,
        "_draft_inputs": 3,
        "_note_tokens": 1,
        "_noted_inputs": 1,
        "_record_tokens": 1,
        "_longest_match": 1,
        "_continue_match": 3,
    }
    found = names(drafted)
    assert {name: found[name] for name in kernels} == kernels
    assert not any(names(plain)[name] for name in kernels)
    attention = {"_decode", "_prefix"}  # with drafts, rows share no reads
    assert {v for v in drafted if v[0].__name__ not in attention} >= {
        v for v in plain if v[0].__name__ not in attention
    }
    assert not {v for v in drafted if v[0].__name__ == "_decode"} & set(plain)


def test_an_output_gate_has_one_variant_for_any_step():
    from flashinfer_backend.ops.triton_gate import gated_by

    model = bundled(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text")
    assert model.attention.gated
    gates, wide = model.attention.heads * model.attention.head_dim, model.attention.qkv.shape[0]

    def steps() -> None:
        for tokens in SIZES:
            gated_by(empty(tokens, gates), empty(tokens, wide)[:, :gates])

    ahead = [each for each in ahead_of(model) if each[0].__name__ == "_gate"]
    assert collect(steps) == ahead and len(ahead) == 1
    assert prebuild_triton.compile_together(ahead) == []


@pytest.mark.parametrize("heads", some([32, 48], [48]))
def test_a_delta_net_has_one_variant_for_any_step(heads):
    """But where a kernel looks through more rows, takes other columns for another number of rows, or has rows
    without tokens. They compile for Hopper."""
    from flashinfer_backend.cache.device import StateFormat
    from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaWeights
    from flashinfer_backend.ops.triton_delta import MOST_PENDING, delta_net

    sizes = {"linear_num_value_heads": heads}
    model = bundled(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", **sizes)
    config = EngineConfig(model_dir="", max_seq_len=8192, max_num_seqs=256)
    kernels = {
        "_decode_rows": 2,
        "_convolve_rows": 3,
        "_keep_inputs": 1,
        "_chunk_writes": 3,
        "_chunk_states": 2,
        "_gated_norm": 1,
    }
    dim, channels = 128, (32 + heads) * 128

    def steps(drafts: int) -> None:
        of_heads = empty(heads, of=torch.float32)
        kept = 1, heads, dim, dim, channels, 4, torch.bfloat16, drafts, 0 if drafts else MOST_PENDING
        states = StateFormat(*kept).allocate(9, META).layers[0]
        weights = DeltaWeights(empty(channels, 4), of_heads, of_heads, empty(dim), model.norm_eps)
        kinds = [(1, 1, 1), (33, 33, 33), (3, 2, 70), (7, 0, 4096), (200, 1, 300)]
        for rows, decodes, tokens in [*kinds, *((n, 0, 300) for n in range(1, 10))]:
            qkv, z = empty(tokens, channels + heads * dim).split([channels, heads * dim], dim=-1)
            b, a = empty(tokens, 2 * heads).chunk(2, dim=-1)
            slots, starts, first, held = empty(4, rows + 1, of=torch.int32)
            own = DeltaRows(slots[1:], starts, first[1:], held[1:] if drafts else None, decodes)
            if tokens == 4096:
                own = own._replace(cuts=starts[1:], saves=slots[1:])
            delta_net(qkv, z, a, b, weights, states, own._replace(padded=tokens in (70, 4096)))

    compiled = []
    for drafts in (0, 3):
        own = replace(config, speculative_method="ngram", max_draft_len=drafts) if drafts else config
        ahead = ahead_of(model, own)
        assert {name: names(ahead)[name] for name in kernels} == kernels
        assert set(collect(lambda n=drafts: steps(n))) <= set(ahead)
        rows = [each for each in ahead if each[0].__name__ == "_decode_rows"]
        compiled += some(rows, rows[-1:])
        if not drafts:  # with drafts the others differ only in how many inputs a slot keeps
            one_each = {each[0].__name__: each for each in ahead if each[0].__name__ in kernels}
            compiled += [each for each in one_each.values() if each not in compiled]
    assert prebuild_triton.compile_together(compiled) == []


@pytest.mark.parametrize(("format", "hidden"), [("dense", 4096), ("fp8_block", 2048)])
def test_products_behind_one_norm_begin_with_it_for_few_tokens(
    format: str, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta net's two, which are a kernel each then."""
    from flashinfer_backend.ops import cuda_ops
    from flashinfer_backend.ops.weight import Weight

    normed: list[int] = []
    monkeypatch.setattr(cuda_ops, "rms_norm", lambda x, *_: normed.append(len(x)) or x)
    wide = Weight.empty("qkv", (10240, hidden), format, torch.bfloat16, META)  # type: ignore[arg-type]
    weights, norm = (wide, Weight("ba", empty(64, hidden))), (empty(hidden), 1e-6)
    h100 = tuned.load("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    with device.use(h100):
        for tokens in (1, 16):
            x = empty(tokens, hidden)
            found = collect(lambda x=x: cuda_ops.norm_linears(x, *norm, weights))
            assert names(found) == {"_linear": 2} and not normed
            # The second one is dense with either format.
            assert prebuild_triton.compile_together(found if format == "dense" else found[:1]) == []
        if format == "fp8_block":
            found = collect(lambda: cuda_ops.norm_linears(empty(17, hidden), *norm, weights))
            assert not normed and names(found)["_quantise_groups"] == 1  # which is the norm as well


@pytest.mark.parametrize(("dim", "width"), [(96, 4), (8, 4), (128, 17)])
def test_delta_nets_of_other_sizes_are_refused(dim, width):
    from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights
    from flashinfer_backend.ops.triton_delta import delta_net

    one, words = torch.empty(1), torch.zeros(2, dtype=torch.int32)
    qkv, weights = torch.empty(1, 3 * dim), DeltaWeights(torch.empty(3 * dim, width), one, one, one, 1e-6)
    states = DeltaStates(torch.empty(1, 1, dim, dim), torch.empty(1, width, 3 * dim + 2))
    with pytest.raises(ValueError, match=f"heads of {dim} .* convolution of {width} inputs"):
        delta_net(qkv, one, one, one, weights, states, DeltaRows(words[1:], words, words[1:], None, 1))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_has_its_kernels_ahead(method: str, fp8: bool) -> None:
    """With those of products that its target has not, for each number of drafts."""
    config = replace(CONFIG, speculative_method=method, draft_model="head", max_draft_len=3, max_seq_len=64)
    family = (
        {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"} if method == "mtp" else {}
    )
    target = bundled(**SIZES_8B | family)
    target = target.quantised_on_load() if fp8 else target
    spec = target.mtp_head() if method == "mtp" else head_spec(target)
    if fp8 and method == "eagle3":
        spec = spec.quantised_on_load()
    with device.use(measured()):
        ahead, without = set(ahead_of(target, config, spec)), set(ahead_of(target, config))
    assert without < ahead
    own = names([variant for variant in ahead if variant not in without])
    assert {"_norms_side_by_side", "_best_of_block", "_best_of_row", "_linear"} <= set(own), own


def test_a_cache_in_fp8_has_kernels_of_its_own():
    """Which any number of rows, and both kinds of scales, share; those that copy differ in how many rows."""
    from flashinfer_backend.attention import split, triton_copy, triton_decode
    from flashinfer_backend.ops.triton_rope import rope_and_store

    config = EngineConfig(model_dir="", max_seq_len=8192, kv_cache_dtype="fp8_e4m3")
    plain, ahead = ahead_of(LLAMA), ahead_of(LLAMA, config)
    touched = {"_rope_and_store", "_decode", "_copy_prompts"}
    ours = {variant for variant in ahead if variant[0].__name__ in touched}
    assert {kernel.__name__ for kernel, _ in ours} == touched
    assert not ours & set(plain)
    assert names(ahead)["_copy_prompts"] == names(plain)["_copy_prompts"] == len(triton_copy.ROWS)

    def calls() -> None:
        cache = tuple(empty(9, 16, 8, 128, of=torch.float8_e4m3fn) for _ in "kv")
        table = empty(257, 512, of=torch.int32)
        for rows, scales in ((1, (0.5, 0.25)), (33, (1.0, 1.0)), (256, (1.0, 3.0))):
            words = empty(rows, of=torch.int32)
            cos_sin = empty(8192, 128, of=torch.float32)
            qkv = empty(rows, 48 * 128)
            rope_and_store(qkv, words, cos_sin, *cache, words, None, None, 1e-5, 32, 8, None, scales)
            items = split.max_items(rows, 8, fp8=True)
            workspace = triton_decode.DecodeWorkspace(rows, items, 32, 8, 128, META)
            work, q = empty(items, split.ITEM_WORDS, of=torch.int32), empty(rows, 32, 128)
            triton_decode.decode(q, cache, q, work, table, workspace, 128**-0.5, scales)
            scratch = empty(99, 16, 8, 128), empty(99, 16, 8, 128)
            triton_copy.copy_prompts(cache, scratch, words, empty(rows + 1, of=torch.int32), words, rows)

    assert set(collect(calls)) <= ours


def decode_attention(
    heads: int, kv_heads: int, dim: int, rows: int, feeds: int = 1, ragged: bool = False
) -> None:
    from flashinfer_backend.attention import split, triton_decode

    cache = tuple(empty(9, 16, kv_heads, dim) for _ in "kv")
    items = split.max_items(rows, kv_heads, fp8=False)
    workspace = triton_decode.DecodeWorkspace(rows, items * feeds, heads, kv_heads, dim, META)
    lengths = split.Lengths(empty(257, of=torch.int32), feeds, 0, ragged) if feeds > 1 else None
    q, work = empty(rows * feeds, heads, dim), empty(items, split.ITEM_WORDS, of=torch.int32)
    table = empty(257, 512, of=torch.int32)
    triton_decode.decode(q, cache, q, work, table, workspace, dim**-0.5, rows=rows, lengths=lengths)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), some([(64, 1, 128), (64, 1, 256), (16, 2, 256)], [(64, 1, 256)])
)
def test_decode_attention_fits_the_shared_memory(heads, kv_heads, dim):
    shapes = some([(1, 1), (64, 1), (1, 4), (64, 4)], [(64, 4)])

    def steps() -> None:
        for rows, feeds in shapes:
            decode_attention(heads, kv_heads, dim, rows, feeds)

    with device.use(measured()):
        found = dict.fromkeys(collect(steps))
    assert len(found) == len(shapes)
    for kernel, data in found:
        assert kernel.preload(data).metadata.shared <= 232448


@pytest.mark.parametrize("graphs", ["auto", "none"])
def test_rows_with_drafts_have_their_kernels_ahead(graphs):
    """Of few rows and of more, whose programs have one token and several; without graphs also of rows with
    as many tokens as they feed."""
    config = EngineConfig(
        model_dir="", max_seq_len=8192, speculative_method="ngram", max_draft_len=3, max_num_seqs=64,
        cuda_graph_batch_sizes=graphs,
    )  # fmt: skip

    def steps() -> None:
        for rows in (1, 4, 5, 48, 49, 64):
            for feeds in {1 + n for n in draft_counts(rows, 3)}:
                decode_attention(32, 8, 128, rows, feeds, graphs == "none")

    with device.use(measured()):
        ahead = {each for each in ahead_of(LLAMA, config) if each[0].__name__ == "_decode"}
        found = set(collect(steps))
    assert found <= ahead and len(found) > 4


def test_a_copy_for_drafts_is_the_weight_but_for_its_rounding():
    from flashinfer_backend.ops import cuda_ops, fp8
    from flashinfer_backend.ops.weight import Weight

    torch.manual_seed(0)
    rows = 8192 + 160  # one whole part and one that is not
    data = torch.randn(rows, 32, dtype=torch.bfloat16) * torch.logspace(-3, 3, rows)[:, None].bfloat16()
    data[7] = 0
    copy = cuda_ops.for_drafts(Weight("head", data))
    assert copy is not None and copy.data.dtype == fp8.E4M3 and copy.role == "head"
    wide = copy.data.float() * copy.scale[:, None]
    assert not wide[7].any()
    error = (wide - data.float()).norm(dim=1) / data.float().norm(dim=1).clamp(min=1e-9)
    assert error.max() < 0.05
    others = Weight("head", data[:-1]), Weight("head", data.half())
    others += (Weight.empty("head", (32, 32), "fp8_token", torch.bfloat16, META),)
    assert all(cuda_ops.for_drafts(other) is None for other in others)


def test_each_cache_takes_its_own_tiles():
    """In a call as in what is compiled ahead."""
    from flashinfer_backend.attention import triton_decode

    plain, few, more = (tuned.DecodeAttention(block, 3, 2, 16, 8, 2) for block in (16, 64, 128))
    forms = {"16 bits": entries((None, plain)), "e4m3": entries((16, few), (None, more))}
    numbers = replace(tuned.fallback(), decode_attention=forms)

    def blocks(calls: Any) -> list[int]:
        found = []
        with device.use(numbers):
            for kernel, data in collect(calls):
                if kernel.__name__ == "_decode":
                    place = [parameter.name for parameter in kernel.params].index("TILE")
                    constants = json.loads(data)
                    keys = [tuple(key) for key in constants["constant_keys"]]
                    found.append(constants["constant_vals"][keys.index((place,))])
        return sorted(set(found))

    for stored, name, expected in (
        (torch.bfloat16, "auto", [16]),
        (torch.float8_e4m3fn, "fp8_e4m3", [64, 128]),
    ):
        config = EngineConfig(model_dir="", max_seq_len=8192, kv_cache_dtype=name)
        assert blocks(lambda c=config: prebuild_triton.call_operations(c, LLAMA, torch.bfloat16)) == expected

        def call(rows: int, of: torch.dtype = stored) -> None:
            cache = empty(9, 16, 8, 128, of=of), empty(9, 16, 8, 128, of=of)
            space = triton_decode.DecodeWorkspace(rows, rows + 1, 32, 8, 128, META)
            items, table = (empty(rows + 1, 8, of=torch.int32) for _ in range(2))
            q = empty(rows, 32, 128)
            triton_decode.decode(q, cache, q, items, table, space, 128**-0.5)

        assert [blocks(lambda r=rows: call(r)) for rows in (16, 17)] == [[expected[0]], [expected[-1]]]


def test_rows_that_share_prefixes_have_their_kernels_ahead():
    """Those of any number of rows. They compile for Hopper."""
    from flashinfer_backend.attention import split, triton_decode
    from flashinfer_backend.attention.prefixes import PREFIX_WORDS, PrefixTiles
    from flashinfer_backend.attention.triton_prefix import SharedWork, prefix_parts

    def calls() -> None:
        cache, table = tuple(empty(9, 16, 8, 128) for _ in "kv"), empty(257, 512, of=torch.int32)
        for rows in (16, 64, 256):
            items, tiles = split.max_items(rows, 8, False), PrefixTiles(rows, 32, 8)
            words = empty(items * split.ITEM_WORDS + tiles.words, of=torch.int32)
            own, prefixes, order = words.split_with_sizes([items * split.ITEM_WORDS, *tiles.sizes])
            space = triton_decode.DecodeWorkspace(rows, items, 32, 8, 128, META)
            q, work = empty(rows, 32, 128), SharedWork(prefixes.view(-1, PREFIX_WORDS), order)
            prefix_parts(q, cache, work, table, space, 128**-0.5)
            own = own.view(-1, split.ITEM_WORDS)
            triton_decode.decode(q, cache, q, own, table, space, 128**-0.5, shared=True)

    ahead = ahead_of(LLAMA)
    used = collect(calls)
    assert set(used) <= set(ahead) and names(used)["_prefix"] == 1
    one_each = {kernel.__name__: (kernel, data) for kernel, data in used}
    assert prebuild_triton.compile_together(list(one_each.values())) == []


def test_what_is_compiled_ahead_is_what_runs(monkeypatch):
    monkeypatch.setattr(prebuild_triton, "call_operations", lambda *_: sample_rows(3))
    assert prebuild_triton.prepare(CONFIG, BUNDLED, torch.bfloat16) == 2
    assert collect(lambda: sample_rows(5)) == []


def test_no_garbage_is_collected_while_threads_parse_kernels():
    seen = []
    kernel = SimpleNamespace(preload=lambda data: seen.append(gc.isenabled()))
    assert prebuild_triton.compile_together([(kernel, "")] * 4) == []
    assert seen == [False] * 4 and gc.isenabled()


def test_what_fails_for_its_own_reasons_is_compiled_once(monkeypatch, caplog):
    """The others are compiled all the same, and the warm-up shows what is wrong."""
    compiled = []

    class Kernel:
        def preload(self, data):
            compiled.append(data)
            if data == 1:
                raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(prebuild_triton, "collect", lambda _: [(Kernel(), each) for each in range(4)])
    assert prebuild_triton.prepare(CONFIG, BUNDLED, torch.bfloat16) == 0
    assert sorted(compiled) == [0, 1, 2, 3]
    assert "PassManager::run failed" in caplog.text


def test_a_failure_is_left_to_the_warm_up(monkeypatch, caplog):
    def fail(*_: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(prebuild_triton, "call_operations", fail)
    assert prebuild_triton.prepare(CONFIG, BUNDLED, torch.bfloat16) == 0
    assert "PassManager::run failed" in caplog.text


def test_parts_with_stored_scales_that_differ_have_their_kernels_ahead():
    model = LLAMA.with_format("fp8_static")
    used = collect(lambda: fp8_products(model, "fp8_static", {0: 0.5, 1024: 0.25}))
    assert set(used) <= set(ahead_of(model))


def fp8_products(
    model: ModelSpec, format: str, input_scales: dict[int, float], sizes: Sequence[int] = SIZES
) -> None:
    """As a layer has them, but for norms before parts, which are FlashInfer's."""
    from flashinfer_backend.ops import cuda_fp8
    from flashinfer_backend.ops.triton_fp8 import Norm
    from flashinfer_backend.ops.weight import Weight

    weights = {}
    for product in model.layers[0].products:
        role = product.role
        weights[role] = weight = Weight.empty(role, product.shape, format, torch.bfloat16, META)
        weight.input_scales = input_scales if len(product.sources) > 1 else {0: 0.5}

    widths = [weights[role].shape[1] for role in ("qkv", "o", "down")]
    for tokens in sizes:
        x, mixed, inner = (torch.empty(tokens, k, dtype=torch.bfloat16, device=META) for k in widths)
        norm = Norm(x[0], model.norm_eps)
        first = norm if format != "fp8_static" or len(input_scales) == 1 else None
        cuda_fp8.product(x, weights["qkv"], norm=first)
        cuda_fp8.product(mixed, weights["o"], residual=x)
        if cuda_fp8.mlp(x, weights["gate_up"], weights["down"], norm, None, x) is None:
            cuda_fp8.product(x, weights["gate_up"], gated=True, norm=first)
            cuda_fp8.product(inner, weights["down"], residual=x)


EXPERT_KERNELS = ("_route_and_place", "_route", "_place", "_product", "_sum")


@pytest.mark.parametrize(("format", "folded"), [("dense", 1), ("fp8_block", 2)])
def test_folded_experts_compile_for_hopper(format, folded):
    """Their routes have as many variants as those of others."""
    count = 12 + folded
    keys = {"num_experts": count, "num_experts_per_tok": 3, "shared_expert_intermediate_size": folded * 768}
    model = bundled(**SHARED | keys | {"hidden_size": 1024}).with_format(format)
    assert model.mlp.folded == (count, folded)
    ahead = ahead_of(model)
    routes = [each for each in ahead if each[0].__name__ in EXPERT_KERNELS[:3]]
    assert names(routes) == {"_route_and_place": 2, "_route": 1, "_place": 4}
    others = {
        kernel.__name__: (kernel, data) for kernel, data in ahead if kernel.__name__ in EXPERT_KERNELS[3:]
    }
    if folded == 1:  # which differs in nothing but the numbers: one route of each kind
        routes = list({kernel.__name__: (kernel, data) for kernel, data in routes}.values())
    assert prebuild_triton.compile_together([*routes, *others.values()]) == []


def test_blocks_that_cublas_multiplies_compile_no_tiles():
    """Of gate and up never, of down from 17 tokens on. torch looks at the layouts of scales without memory,
    too."""
    model = LLAMA.with_format("fp8_block")
    few, many = BlockTile(16, 64, 4), BlockTile(64, 128, 4)
    blocks = dict.fromkeys(("qkv", "o"), entries((16, few), (None, many)))
    blocks |= {"gate_up": entries((0, few), (None, None)), "down": entries((16, few), (None, None))}
    numbers = replace(tuned.fallback(), blocks_fp8=blocks)
    with device.use(numbers):
        variants = ahead_of(model)
        used = collect(lambda: fp8_products(model, "fp8_block", {}))
    assert set(used) <= set(variants)
    assert names(variants)["_block_product"] == names(used)["_block_product"] == 5


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("format", ["fp8_token", "fp8_static"])
def test_few_tokens_in_fp8_take_the_tilings_that_are_compiled(format, quantise):
    """Those that quantise do so where scales of activations are computed; stored ones keep their kernel."""
    model = LLAMA.with_format(format)

    def make(split: int) -> tuple[tuned.Entry[Tiling], ...]:
        few = [Tiling(tokens, 64, 256, split, 3, quantise=quantise) for tokens in (1, 16)]
        return entries(*((tiling.tokens, tiling) for tiling in few), (64, Tiling(64, 64, 256, split, 3)))

    products = {role: make(1 if role == "gate_up" else 2) for role in ("qkv", "o", "gate_up", "down")}
    with device.use(replace(measured(), linear_fp8=products)):
        variants = ahead_of(model)
        used = collect(lambda: fp8_products(model, format, {0: 0.5}))
        few = collect(lambda: fp8_products(model, format, {0: 0.5}, (1, 7)))
    # Of each role: for one, for seven and for 64.
    assert names(used)["_linear"] == 12
    assert set(used) <= set(variants)
    inside = quantise and format == "fp8_token"
    assert names(few) == ({"_linear": 8} if inside else {"_linear": 8, "_quantise_rows": 3})


def test_products_with_adapters_fit_the_shared_memory():
    """What adapters add is behind a pipeline that takes most of it. Those with tiles of 64 tokens, which take
    the most."""
    config = replace(CONFIG, max_loras=8, max_lora_rank=64, lora_vocabulary=True)
    with device.use(measured()):
        plain, adapted = ahead_of(LLAMA), ahead_of(LLAMA, config)
        found = [variant for variant in adapted if variant not in plain]
        assert set(names(found)) == {"_linear", "_shrink", "_expand", "_distinct"}
        largest = [
            (kernel, data)
            for kernel, data in found
            if kernel.__name__ == "_linear" and sizes(data)["TOKENS"] == 64 and sizes(data)["GATED"]
        ]
        assert largest
        for kernel, data in largest:
            assert kernel.preload(data).metadata.shared <= 227 << 10


FEW = [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 69]
DEEPEST = {"down": entries((24, Tiling(32, 64, 128, stages=7)), (64, Tiling(64, 64, 64)))}


@pytest.mark.parametrize(
    ("format", "experts"),
    [
        *((format, None) for format in ("dense", "fp8_on_load", "fp8_static", "fp8_block", "int4_awq_128")),
        *(("dense", experts) for experts in ((128, 8), (8, 2), (1, 1), (8, 2, 768), (8, 2, 640))),
        *((format, (8, 2)) for format in ("fp8_on_load", "fp8_block", "int4_awq_128", "mxfp4")),
        *(("fp8_block", (8, 2, size)) for size in (1536, 640)),
    ],
)
def test_products_of_any_number_of_tokens_are_ahead_and_no_others(
    format: str, experts: tuple[int, ...] | None
):
    """With adapters and without, and with tilings for adapters that no step without them takes."""
    from flashinfer_backend.models.adapter_places import AdapterPlaces
    from flashinfer_backend.models.transformer import Transformer
    from flashinfer_backend.ops import cuda_ops

    names_of = "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"
    mixture = dict(zip(names_of, experts or (), strict=False))
    kind = SHARED if len(mixture) == 3 else EXPERTS
    keys = SIZES_8B | (kind | mixture if experts else {})
    if format == "mxfp4":
        kept = {"quant_method": "mxfp4", "modules_to_not_convert": ["*.self_attn", "*.mlp.router"]}
        keys |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "quantization_config": kept}
    model = bundled(**keys)
    model = model if format in ("dense", "mxfp4") else model.with_format(format)
    # Adapters do not change experts, and attention is the same with experts and without.
    adapted = experts in (None, (128, 8)) or format == "mxfp4"
    config = replace(CONFIG, max_loras=8) if adapted else CONFIG

    def steps() -> None:
        target = Transformer(model, cuda_ops, torch.bfloat16, META, 1)
        if adapted:
            AdapterPlaces(target, 8, config.max_lora_rank, vocabulary=False)
        for _ in prebuild_triton._kinds_of_input_scales(target):
            for tokens in (*some(range(1, 70), FEW), 100, 128, 129, 256, 257, 513, 4096):
                target.compute_products(tokens, head=True)
                if adapted:
                    chosen = cuda_ops.group_adapters(empty(tokens, of=torch.int32), 8)
                    target.compute_products(tokens, head=True, chosen=chosen)

    with (
        device.use(replace(measured("NVIDIA H100 80GB HBM3"), linear_adapted=DEEPEST)),
        prebuild_triton._libraries_without_memory(),
    ):
        used, ahead = set(collect(steps)), set(ahead_of(model, config))
    assert used <= ahead, names([variant for variant in used if variant not in ahead])
    kinds = {kernel for kernel, _ in used}
    in_vain = [variant for variant in ahead if variant[0] in kinds and variant not in used]
    assert not in_vain, names(in_vain)
    if format == "dense" and experts is None:
        assert max(sizes(data)["STAGES"] for kernel, data in used if kernel.__name__ == "_linear") == 7


def sizes(data: str) -> dict[str, Any]:
    """A variant's constants by their names."""
    from flashinfer_backend.ops.triton_linear import _linear

    told = json.loads(data)
    keys = [key[0] for key in told["constant_keys"]]
    return {_linear.arg_names[key]: value for key, value in zip(keys, told["constant_vals"], strict=True)}
