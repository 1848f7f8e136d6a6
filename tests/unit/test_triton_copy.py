# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that copies what prompts read of the cache, in Triton's interpreter, without a GPU;
tests/gpu/test_fp8_cache.py runs the real one. And how much room copies have, and when they pay.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreted import interpreted

from flashinfer_backend.attention import copies
from flashinfer_backend.attention.contract import Scores
from flashinfer_backend.attention.variants.alibi import ALIBI
from flashinfer_backend.cache.device import KVCacheFormat
from flashinfer_backend.cache.groups import CacheGroup
from flashinfer_backend.core import tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.ops import device
from flashinfer_backend.worker import memory
from flashinfer_backend.worker.gpu_turns import Neighbours

BLOCK_SIZE = 16
SHAPES = [(1, 64), (5, 128), (8, 128)]  # key/value heads, dim; 5 heads divide into small pieces
LLAMA_8B = KVCacheFormat(32, 8, 128, BLOCK_SIZE, torch.float8_e4m3fn, ((1.0, 1.0),) * 32)


def check(
    kv_heads: int, dim: int, types: tuple[torch.dtype, torch.dtype], lengths: list[int], block_size: int = 16
) -> None:
    """Each row's tokens are copied, from blocks in any order, and zeros stand behind them; the rest of the
    copies stays as it was. Elements are every number of e4m3; cells that no row has are NaN."""
    from flashinfer_backend.attention import triton_copy

    torch.manual_seed(0)
    shape, rows, dtype = (9, block_size, kv_heads, dim), len(lengths), types[0]
    every = torch.arange(256, dtype=torch.uint8)
    every = every[~every.view(torch.float8_e4m3fn).float().isnan()]
    elements = tuple(every[torch.randint(len(every), shape)].view(torch.float8_e4m3fn) for _ in "kv")
    cache = tuple(part.float().to(dtype) for part in elements)
    blocks = [-(-length // block_size) for length in lengths]
    kv_indptr = torch.tensor([0, *blocks, 999], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.randint(8, (sum(blocks) + 5,), dtype=torch.int32)
    last = (torch.tensor(lengths) - 1) % block_size + 1
    for n, length, of_last in zip(kv_indptr[1 : rows + 1].tolist(), lengths, last.tolist(), strict=True):
        if length % block_size:  # of a block of its own, what the row does not fill
            indices[n - 1] = 8
            for part in cache:
                part[8, of_last:] = torch.nan
    gap = copies.gap_blocks(block_size)
    assert gap * block_size >= copies.TILE
    total = sum(blocks) + rows * gap
    copied = tuple(torch.full((total + 3, *shape[1:]), 7.0, dtype=types[1]) for _ in "kv")
    triton_copy.copy_prompts(cache, copied, indices, kv_indptr, last.int(), rows)
    starts = triton_copy.Copies.starts(SimpleNamespace(_block_size=block_size), kv_indptr[: rows + 1].numpy())
    assert starts[-1] == total * block_size
    for part, copy in zip(cache, copied, strict=True):
        flat = copy.flatten(0, 1).float()
        for row, length in enumerate(lengths):
            own = part[indices[kv_indptr[row] : kv_indptr[row + 1]].long()].flatten(0, 1).float()
            assert torch.equal(flat[starts[row] : starts[row] + length], own[:length])
            assert (flat[starts[row] + length : starts[row + 1]] == 0).all()
        assert (copy[total:] == 7.0).all()


def test_in_the_interpreter():
    interpreted(__file__)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return torch.device("cuda")


PLAIN = replace(LLAMA_8B, dtype=torch.bfloat16, scales=())
FREE = 100 << 30  # bytes


@pytest.mark.parametrize(
    ("cache", "max_seq_len", "tokens"),
    [
        (LLAMA_8B, 4096, 65536 + 8192),  # several prompts behind prefixes
        (PLAIN, 4096, 65536 + 8192),
        (LLAMA_8B, 131072, 131072 + 8192),
        (LLAMA_8B, 1 << 20, (1 << 18) - copies.MAX_PROMPTS * (BLOCK_SIZE + 128)),  # 1 GiB
        (KVCacheFormat(1, 8, 128, 64, torch.float8_e4m3fn, ((1.0, 1.0),)), 100000, 100032 + 8192),
    ],
)
def test_room_for_the_longest_sequence_up_to_a_bound(hopper, cache, max_seq_len, tokens):
    blocks = copies.copied_blocks(cache, torch.bfloat16, max_seq_len, 8192, hopper, FREE)
    assert blocks == tokens // cache.block_size
    used = copies.copies_bytes(cache, torch.bfloat16, blocks)
    assert used == (tokens + copies.MAX_PROMPTS * (cache.block_size + 128)) * 2 * 8 * 128 * 2 <= 1 << 30


def test_copies_that_are_not_needed_take_a_small_part_of_the_memory(hopper):
    def used(cache: KVCacheFormat, free: int) -> int:
        blocks = copies.copied_blocks(cache, torch.bfloat16, 131072, 8192, hopper, free)
        return copies.copies_bytes(cache, torch.bfloat16, blocks)

    assert used(LLAMA_8B, 4 << 30) == used(LLAMA_8B, FREE) == used(PLAIN, FREE) > 512 << 20
    assert 127 << 20 <= used(PLAIN, 4 << 30) <= 128 << 20
    assert used(PLAIN, 1 << 20) == used(PLAIN, -1) == 0
    for head_dim, some in ((64, False), (128, True), (256, True)):
        assert (used(replace(PLAIN, head_dim=head_dim), FREE) > 0) is some
    assert used(replace(LLAMA_8B, head_dim=64), FREE) > 0


def test_no_room_where_nothing_is_copied(hopper, monkeypatch):
    def room(cache: KVCacheFormat, device: torch.device = hopper) -> int:
        return copies.copied_blocks(cache, torch.bfloat16, 4096, 8192, device, FREE)

    assert room(LLAMA_8B, torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert room(LLAMA_8B) == room(PLAIN) == 0
    assert copies.copies_bytes(LLAMA_8B, torch.bfloat16, 0) == 0


@pytest.mark.parametrize(
    ("backend", "variants", "groups", "some"),
    [
        ("auto", [None, None], [(0, 1)], True),
        ("torch", [None, None], [(0, 1)], False),
        ("auto", ["alibi", None], [(0, 1)], False),  # which takes FA2 as a whole
        ("auto", ["alibi", None], [(0,), (1,)], True),
        ("auto", [None], [(0, 1)], True),  # the second layer is a drafter's
    ],
)
def test_copies_are_for_groups_without_variants(hopper, monkeypatch, backend, variants, groups, some):
    attentions = [SimpleNamespace(variant=variant) for variant in variants]
    spec = SimpleNamespace(attentions=attentions)
    model = SimpleNamespace(device=hopper, dtype=torch.bfloat16, spec=spec)
    config = EngineConfig(model_dir="", attention_backend=backend, max_seq_len=4096, max_num_tokens=8192)
    monkeypatch.setattr(memory, "_cache_format", lambda *_: PLAIN)
    given = [CacheGroup(layers, None, BLOCK_SIZE, 1 << 20) for layers in groups]
    assert (memory._copied_blocks(config, model, given, FREE) > 0) is some


def test_the_cache_leaves_the_copies_their_memory():
    config = EngineConfig(model_dir="", max_seq_len=131072, kv_cache_free_gpu_mem_fraction=1.0)
    group = CacheGroup((0,), None, BLOCK_SIZE, LLAMA_8B.bytes_per_block)

    def blocks(free: int, copied: int) -> int:
        return memory.num_blocks_of(config, [group], [0], free, Neighbours(), copied)

    assert blocks(20 << 30, 0) == (20 << 30) // LLAMA_8B.bytes_per_block
    assert blocks(20 << 30, 1 << 30) == (19 << 30) // LLAMA_8B.bytes_per_block
    with pytest.raises(
        ValueError, match=r"copies of .* \(0.54 GiB\) want 0.29 GiB more than there is. Lower"
    ):
        blocks(256 << 20, 553 << 20)
    with pytest.raises(ValueError, match=r"the weights and the largest step leave 0.00 GiB. Lower"):
        blocks(1 << 10, 0)


if __name__ == "__main__":
    from flashinfer_backend.attention import triton_copy as kernels

    kernels.device.sms = lambda: 1  # so that programs have more than one piece
    for heads in SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            check(*heads, (torch.float8_e4m3fn, dtype), [48, 7, 32])
            check(*heads, (dtype, dtype), [16, 37])
    check(*SHAPES[0], (torch.bfloat16, torch.bfloat16), [1])
    check(*SHAPES[0], (torch.bfloat16, torch.bfloat16), [3] * 17)  # more rows than a graph has
    check(*SHAPES[0], (torch.float16, torch.float16), [300, 256], 256)


# Of e4m3 and of 16 bits.
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "fp8", "plain"),
    [
        ([400] * 4, [400] * 4, True, True),
        ([20], [20], True, False),  # so few tokens that copying costs nothing
        ([800], [1600], True, True),  # all of the room
        ([800], [1601], False, False),
        ([800, 100], [1584, 1], True, True),
        ([800, 100], [1584, 17], False, False),  # a block more
        ([20] * 3, [510] * 3, False, False),  # too few queries for what they read
        ([20, 900], [100, 1000], True, True),  # most of what is read has many queries
        ([240, 20], [100, 1400], False, False),
        ([256], [1600], True, True),
        ([255], [1600], True, False),
    ],
)
def test_prompts_take_copies_where_they_have_room_and_pay(q_lens, kv_lens, fp8, plain):
    """Room for 100 blocks, and for the gaps behind rows."""
    room = 100 + len(q_lens) * copies.gap_blocks(BLOCK_SIZE)
    with device.use(tuned.fallback()):
        lens = np.array(q_lens, np.int32), np.array(kv_lens, np.int32)
        assert [copies.copies_pay(*lens, room, BLOCK_SIZE, 4, of) for of in (True, False)] == [fp8, plain]
        # Products of 32 768 queries and 131 072 tokens are more than an int32.
        long = np.array([32768], np.int32), np.array([131072], np.int32)
        assert all(copies.copies_pay(*long, 10000, BLOCK_SIZE, 4, of) for of in (True, False))
        # A query sees no more than its window of what is copied.
        lens = np.array([1600], np.int32), np.array([1727], np.int32)
        assert [copies.copies_pay(*lens, 200, BLOCK_SIZE, 8, False, n) for n in (128, 256)] == [False, True]
        many = np.full(copies.MOST_ROWS + 1, 4000, np.int32)
        assert not copies.copies_pay(many, many, 1 << 20, BLOCK_SIZE, 4, True)


def test_variants_of_attention_have_no_windows_sinks_or_caps():
    flashinfer_paged = pytest.importorskip("flashinfer_backend.attention.flashinfer_paged")
    scores = Scores(0.1, variant=ALIBI, by_head=torch.ones(32))
    flashinfer_paged.check_scores([scores, Scores(0.2)], None)
    for window, other in ((9, scores), (None, Scores(0.1, sinks=torch.ones(32)))):
        with pytest.raises(ValueError, match="no windows, sinks or soft caps in a cache group with"):
            flashinfer_paged.check_scores([scores, other], window)
