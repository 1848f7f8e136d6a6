# SPDX-License-Identifier: Apache-2.0
"""A KV cache of e4m3 on a GPU: attention against float64, what is stored against plain torch, long contexts,
and engines with it.

`pytest tests/gpu/test_fp8_cache.py -s` prints the times, too.
"""

from typing import Any

import numpy as np
import pytest
import torch
from attending import BLOCK_SIZE, DIM, Setup, check_graphs, check_layers
from comparing import SIZES, SMALL, assert_close, compare_engines, microseconds
from test_attention import STEPS as STEPS_IN_16_BITS

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.copies import has_fa3
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.ops import fp8, torch_ops
from quantised import make_quantised

pytestmark = pytest.mark.gpu

HEADS = [(32, 8), (28, 4), (16, 16)]
ROOM = 600 + 3 * 8  # blocks that three prompts may copy, and the gaps behind them
SCALES = ((0.021, 0.0087), (1.0, 1.0), (0.5, 3.0))  # of keys and values, a layer each
SETTINGS = SMALL | {"kv_cache_dtype": "fp8_e4m3"}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_setup(heads: int, kv_heads: int, backend: str = "auto", copied_blocks: int = ROOM) -> Setup:
    """Layers with scales of their own, next to plain torch in float64."""
    return Setup(
        heads,
        kv_heads,
        backend,
        layers=len(SCALES),
        scales=SCALES,
        wide=torch.float64,
        copied_blocks=copied_blocks,
    )


STEPS = STEPS_IN_16_BITS | {
    "all of the room": ([300, 200, 100], [4000, 4000, 1600]),
    "more than the room": ([300, 200, 100], [4000, 4000, 1601]),
    "few queries over long prefixes": ([60] * 3, [3000] * 3),
}
BY_FA2 = {"short chunk over a long prefix", "more than the room", "few queries over long prefixes"}


def test_every_number_is_read_exactly():
    """By the Triton kernel: over one token, the result is the token's value."""
    from flashinfer_backend.attention import split, triton_decode

    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(fp8.E4M3).float()
    values = torch.where(numbers.isnan(), 0.0, numbers).view(2, 1, 1, DIM)
    shape = (2, BLOCK_SIZE, 1, DIM)
    wide = torch.zeros(shape, device="cuda"), values.expand(shape)
    cache = wide[0].to(fp8.E4M3), wide[1].to(fp8.E4M3).contiguous()
    items = np.zeros((3, split.ITEM_WORDS), np.int32)
    split.split_rows(np.ones(2, np.int32), np.arange(2, dtype=np.int32), 3, items)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device="cuda")
    space = triton_decode.DecodeWorkspace(2, 3, 4, 1, DIM, torch.device("cuda"))
    q = torch.ones(2, 4, DIM, dtype=torch.bfloat16, device="cuda")
    out, words = torch.empty_like(q), torch.from_numpy(items).cuda()
    triton_decode.decode(q, cache, out, words, table, space, 1.0, (0.5, 0.25))
    assert torch.equal(out.float(), (values * 0.25).view(2, 1, DIM).expand(2, 4, DIM))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_exact(dtype):
    """Every number of e4m3, of rows that end within a block; zeros behind each, and no more."""
    from flashinfer_backend.attention.copies import gap_blocks
    from flashinfer_backend.attention.triton_copy import copy_prompts

    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    every = every[~every.view(fp8.E4M3).float().isnan()]
    shape, gap = (50, BLOCK_SIZE, 8, DIM), gap_blocks(BLOCK_SIZE)
    cache = tuple(
        every[torch.randint(len(every), shape, device="cuda")].view(fp8.E4M3).contiguous() for _ in "kv"
    )
    for lengths in ([1], [45, 640, 16], [11200, 3201], [7] * 64, [9] * 300):
        rows, blocks = len(lengths), [-(-length // BLOCK_SIZE) for length in lengths]
        kv_indptr = torch.tensor([0, *blocks]).cumsum(0).int()
        indices = torch.randint(50, (sum(blocks),), dtype=torch.int32)
        last = (torch.tensor(lengths) - 1) % BLOCK_SIZE + 1
        total = sum(blocks) + rows * gap
        copies = tuple(torch.full((total + 3, *shape[1:]), 7.0, dtype=dtype, device="cuda") for _ in "kv")
        copy_prompts(cache, copies, indices.cuda(), kv_indptr.cuda(), last.int().cuda(), rows)
        for elements, copy in zip(cache, copies, strict=True):
            parts = []
            for row, length in enumerate(lengths):
                own = indices[kv_indptr[row] : kv_indptr[row + 1]].long().cuda()
                parts.append(elements.float()[own].flatten(0, 1)[:length])
                parts.append(torch.zeros((blocks[row] + gap) * BLOCK_SIZE - length, 8, DIM, device="cuda"))
            assert torch.equal(copy[:total].flatten(0, 1).float(), torch.cat(parts))
            assert (copy[total:] == 7.0).all()


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("backend", "room"), [("auto", ROOM), ("auto", 0), ("fa2", ROOM)])
def test_steps_are_those_of_float64(backend, room, heads, kv_heads):
    setup = make_setup(heads, kv_heads, backend, room)
    for name, (q_lens, kv_lens) in STEPS.items():
        batch = setup.batch(q_lens, kv_lens)
        setup.attention.step(batch)
        if max(q_lens) > 1 and heads == 32:
            expected = "fa2" if name in BY_FA2 or not room else "copied"
            assert setup.attention._prefill_call.backend == expected, name
        check_layers(name, setup, batch, setup.attention.run)


def test_prompts_share_blocks():
    """Each row has a copy of its own."""
    setup = make_setup(32, 8)
    q_lens, kv_lens = [200, 150, 300], [1000, 900, 1300]
    batch = setup.batch(q_lens, kv_lens)
    first, second, third = batch.slots.tolist()
    for slot, columns in ((second, 40), (third, 25)):
        setup.table[slot, :columns] = setup.table[first, :columns]
    setup.attention.step(batch)
    assert setup.attention._prefill_call.backend == "copied"
    check_layers("shared", setup, batch, setup.attention.run)


@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_graphs_replay_other_lengths_and_fewer_rows(backend):
    check_graphs(make_setup(32, 8, backend))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_stored_elements_are_those_of_plain_torch(scales, normed):
    """Values bit for bit. A key's bfloat16 may differ in its last bit, and its element by one then."""
    from flashinfer_backend.ops import cuda_ops

    tokens, heads, kv_heads = 200, 32, 8
    qkv = (torch.randn(tokens, (heads + 2 * kv_heads) * DIM, device="cuda") * 3).bfloat16()
    qkv[0] *= 1000  # beyond the largest element, which it becomes
    positions = torch.randint(0, 500, (tokens,), device="cuda", dtype=torch.int32)
    angles = torch.rand(500, DIM // 2, device="cuda") * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    places = torch.randperm(64 * BLOCK_SIZE, device="cuda")[:tokens].int()
    norm = (torch.rand(DIM, device="cuda") + 0.5).bfloat16() if normed else None
    stored, queries = [], []
    for ops in (cuda_ops, torch_ops):
        cache = [torch.zeros(64, BLOCK_SIZE, kv_heads, DIM, device="cuda").to(fp8.E4M3) for _ in "kv"]
        queries.append(
            ops.rope_and_store(
                qkv, positions, cos_sin, *cache, places, norm, norm, 1e-5, heads, kv_heads, kv_scales=scales
            )
        )
        stored.append(cache)
    (keys, values), (expected_keys, expected_values) = stored
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert values.float().abs().max() == fp8.LARGEST
    difference = (keys.float() - expected_keys.float()).abs()
    assert (difference == 0).double().mean() > 0.99
    # Where a rotation's two parts cancel, a bit of one of them is much of the sum.
    assert (difference <= expected_keys.float().abs() / 7 + 0.04 / scales[0]).all()
    torch.testing.assert_close(queries[0], queries[1], rtol=1e-2, atol=0.04)


CONTEXT, NEEDLES = 32768, 64


@pytest.mark.parametrize("kind", ["decode", "prompt by FA2", "prompt by FA3"])
def test_needles_are_found_in_32k_tokens(kind):
    """One key of 32 768 answers a query; exactly, it has some 0.8 of the weight. In every head the value that
    comes back is the nearest to the needle's own, with a cache of e4m3 as with one of bfloat16."""
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

    heads, kv_heads = 32, 8
    blocks = CONTEXT // BLOCK_SIZE
    keys, values = (torch.randn(blocks + 1, BLOCK_SIZE, kv_heads, DIM, device="cuda") for _ in "kv")
    flat_keys, flat_values = (x[1:].view(CONTEXT, kv_heads, DIM) for x in (keys, values))
    rng = np.random.default_rng(1)
    # Not among the last tokens, which a prompt's first queries do not see.
    where = torch.from_numpy(rng.permutation(CONTEXT - 2 * NEEDLES)[:NEEDLES]).cuda()
    group = heads // kv_heads
    needles = flat_keys[where].repeat_interleave(group, dim=1)  # [needles, heads, D]
    # Scores of others are spread by about 1, so that they add up to e^10.9.
    strength = 12.4 * DIM**0.5 / (needles * needles).sum(-1, keepdim=True)
    other = torch.randn_like(needles)
    other -= (other * needles).sum(-1, keepdim=True) / (needles * needles).sum(-1, keepdim=True) * needles
    q = (needles * strength + other * 0.3).bfloat16()
    candidates = flat_values[where].repeat_interleave(group, dim=1).transpose(0, 1)  # [heads, needles, D]
    table = torch.zeros(NEEDLES + 1, blocks, dtype=torch.int32, device="cuda")
    table[:NEEDLES] = torch.arange(1, blocks + 1, device="cuda", dtype=torch.int32)
    if kind == "decode":  # so many sequences over the same blocks
        lens = np.ones(NEEDLES, np.int32), np.full(NEEDLES, CONTEXT, np.int32)
    else:  # a prompt's last chunk
        lens = np.array([NEEDLES], np.int32), np.array([CONTEXT], np.int32)
    batch = AttentionBatch(*lens, np.arange(len(lens[0]), dtype=np.int32), table)

    def attend(cache: KVCache) -> torch.Tensor:
        attention = FlashInferAttention(
            cache, heads, NEEDLES, blocks, dtype=torch.bfloat16, copied_blocks=blocks
        )
        if kind == "prompt by FA3":  # which few queries would not take
            attention.choose_prefill = lambda *_: "copied"  # type: ignore[method-assign]
        attention.step(batch)
        out = torch.full_like(q, float("nan"))
        attention.run(0, q, out)
        return out

    def found(out: torch.Tensor) -> float:
        nearest = torch.cdist(out.float().transpose(0, 1), candidates).argmin(-1)  # [heads, needles]
        return float((nearest == torch.arange(NEEDLES, device="cuda")).double().mean())

    scales = tuple(float(x.abs().max()) / fp8.LARGEST for x in (keys, values))
    elements = tuple(fp8.to_e4m3(x, scale) for x, scale in zip((keys, values), scales, strict=True))
    ours = attend(KVCache.over([elements], (scales,)))
    dense = attend(KVCache.over([(keys.bfloat16(), values.bfloat16())]))
    wide = tuple(x.double() * scale for x, scale in zip(elements, scales, strict=True))
    reference = TorchPagedAttention(KVCache.over([wide]), heads)
    exact = torch.empty_like(q, dtype=torch.float64)
    for row in range(len(batch.slots)):  # one at a time: in float64 they are large
        one = slice(row, row + 1)
        part = one if kind == "decode" else slice(None)
        reference.step(AttentionBatch(lens[0][one], lens[1][one], batch.slots[one], table))
        result = torch.empty_like(q[part], dtype=torch.float64)
        reference.run(0, q[part].double(), result)
        exact[part] = result
    print(f"\n{kind}: found {found(ours):.4f} with e4m3, {found(dense):.4f} with bfloat16")
    assert found(dense) == 1.0 and found(ours) == 1.0
    assert_close(ours, exact, 1e-2)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", ["modelopt", "dense"])
def test_engine(layout, kind, tmp_path):
    checkpoint = make_quantised(layout, kind, tmp_path / "model", kv_scales=layout == "modelopt", **SIZES)

    def started(backend: str, core: Any) -> None:
        assert core.runner.state.caches[0].layers[0][0].dtype == fp8.E4M3
        if backend == "auto" and torch.cuda.get_device_capability()[0] == 9:
            # Prompts take FA3 over copies, and steps with prompts are whole graphs.
            attention, graphs = core.runner.state.attention, core.runner.mixed_graphs
            assert attention._copies is not None and graphs is not None and graphs._full

    name = f"{layout} {kind}"  # of 256 positions; in the second round the cache has the prompts
    compare_engines(
        name, checkpoint, SETTINGS, tmp_path, longest=230, rounds=2, started=started, fp8_cache=True
    )


DECODE = ((1, 256), (1, 8192), (16, 1024), (64, 256), (64, 1024), (64, 4096), (256, 256), (256, 1024))
PROMPTS = ((1, 200), (16, 200), (4, 512), (1, 2048), (1, 8192))
# About where copies begin to pay: few queries, and few tokens.
CHUNKS = ((20, 20), (64, 64), (64, 1024), (256, 4096), (256, 32768))
MORE_CHUNKS = ((4, 32, 256), (4, 32, 1024), (4, 64, 4096), (4, 96, 4096), (4, 128, 4096))
SHAPES: dict[str, tuple[list[int], list[int]]] = {
    **{f"decode {rows} x {length}": ([1] * rows, [length] * rows) for rows, length in DECODE},
    **{f"prompt {count} x {length}": ([length] * count, [length] * count) for count, length in PROMPTS},
    "chunk 2048 of 32768": ([2048], [32768]),
    **{f"chunk {queries} of {length}": ([queries], [length]) for queries, length in CHUNKS},
    **{
        f"{count} chunks {queries} of {length}": ([queries] * count, [length] * count)
        for count, queries, length in MORE_CHUNKS
    },
}


def layer_time(dtype: torch.dtype, q_lens: list[int], kv_lens: list[int], copied_blocks: int = 0) -> float:
    """Microseconds of a layer's attention. Four layers take turns, so that decode reads from memory."""
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

    blocks, layers, columns = 24000, 4, -(-max(kv_lens) // BLOCK_SIZE)
    shape = (blocks, BLOCK_SIZE, 8, DIM)
    caches = [
        tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in "kv")
        for _ in range(layers)
    ]
    scales = ((1.0, 1.0),) * layers if dtype == fp8.E4M3 else ()
    cache = KVCache.over(caches, scales)
    attention = FlashInferAttention(
        cache, 32, 256, columns, dtype=torch.bfloat16, copied_blocks=copied_blocks
    )
    if copied_blocks:  # also where it would not pay
        attention.choose_prefill = lambda *_: "copied"  # type: ignore[method-assign]
    table = torch.randint(1, blocks, (len(q_lens), columns), device="cuda", dtype=torch.int32)
    slots = np.arange(len(q_lens), dtype=np.int32)
    attention.step(AttentionBatch(np.array(q_lens, np.int32), np.array(kv_lens, np.int32), slots, table))
    q = torch.randn(sum(q_lens), 32, DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    return microseconds(lambda layer: attention.run(layer, q, out), layers)


def test_times() -> None:
    """Prints microseconds of one layer's attention, 32 query heads to 8; asserts nothing."""
    print("\nattention of one layer, us: cache of bfloat16 | of e4m3, prompts by FA2 | by FA3 over copies")
    for name, (q_lens, kv_lens) in SHAPES.items():
        dense, ours = (layer_time(dtype, q_lens, kv_lens) for dtype in (torch.bfloat16, fp8.E4M3))
        line = f"{name:22} {dense:9.1f} | {ours:9.1f}"
        if max(q_lens) > 1 and has_fa3(torch.device("cuda")):
            blocks = sum(-(-length // BLOCK_SIZE) for length in kv_lens)
            line += f" | {layer_time(fp8.E4M3, q_lens, kv_lens, blocks):9.1f}"
        print(line)
