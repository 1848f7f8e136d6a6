# SPDX-License-Identifier: Apache-2.0
"""How much of the cache prompts' attention can have copies of, one row's tokens behind the other's.

FlashInfer's FA3 reads such keys and values by bulk loads (TMA), faster than blocks of a cache, and wants them
in the type of the queries: queries of e4m3 lose accuracy (docs/formats.md). So what a step's prompts read is
copied before each layer's attention, exactly, to a scratch that all layers share (attention/triton_copy.py).
"""

from __future__ import annotations

import numpy as np
import torch

from flashinfer_backend.cache.device import KVCacheFormat
from flashinfer_backend.ops import device as active_device
from flashinfer_backend.ops.fp8 import E4M3

MAX_PROMPTS = 16  # of a step that is a graph; those that a step has fewer of take a block each, and a gap
MOST_ROWS = 1024  # of a step whose prompts read copies
# Tokens that FA3's tiles have at most. Behind a row's own, a tile reads others, whose values would count if
# they were infinite or NaN. So a row is followed by zeros.
TILE = 128
TIMED = (128, 256)  # heads' sizes for which copies of a cache in 16 bits were timed
_TOGETHER = 65536  # tokens that several prompts of a step may have before them, whatever max_seq_len is
_MOST_BYTES = 1 << 30
_SHARE = 32  # of the memory for keys and values, one part may hold copies that FA3 can do without


def has_fa3(device: torch.device) -> bool:
    """Whether FlashInfer's FA3 runs there: it is for Hopper alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def gap_blocks(block_size: int) -> int:
    """Blocks of zeros behind each row's."""
    return -(-TILE // block_size)


def copied_blocks(
    cache: KVCacheFormat,
    dtype: torch.dtype,
    max_seq_len: int,
    max_num_tokens: int,
    device: torch.device,
    free: int,
) -> int:
    """The number of blocks that copies have room for: what the prompts of a step read, counted for each
    prompt, and the gaps behind them. 0 where there is no FA3, and of a cache in 16 bits for heads of 64.
    dtype: of queries. free: bytes for keys and values, of which copies take a 32nd at most, unless FA3 cannot
    read the cache.

    Room for all that a step of max_num_tokens tokens has behind a sequence of max_seq_len tokens, or behind
    shorter ones of 65536 together; at most 1 GiB. A prompt's last block counts as a whole one, and its gap as
    128 tokens, so steps with many short prompts can need more.
    """
    fp8 = cache.dtype == E4M3
    if not has_fa3(device) or not (fp8 or cache.head_dim in TIMED):
        return 0
    tokens = max(max_seq_len, _TOGETHER) + max_num_tokens
    most_bytes = _MOST_BYTES if fp8 else min(_MOST_BYTES, max(0, free) // _SHARE)
    most = most_bytes // copies_format(cache, dtype).bytes_per_block - _for_graphs(cache.block_size)
    return max(0, min(-(-tokens // cache.block_size), most))


def copies_pay(
    q_lens: np.ndarray,
    kv_lens: np.ndarray,
    blocks: int,
    block_size: int,
    group: int,
    fp8: bool,
    window: int | None = None,
) -> bool:
    """Whether copies of what a step's prompts read fit into `blocks`, and FA3 over them is faster than over
    the cache itself; fp8: than FA2 over a cache of e4m3 (core/tuned). q_lens and kv_lens: int32 [R], of what
    is read. group: query heads of a head of keys. window: tokens that a query reads at most."""
    numbers = active_device.active().prompt_attention
    rows, tokens = len(q_lens), int(kv_lens.sum(dtype=np.int64))
    needed = int(((kv_lens + (block_size - 1)) // block_size).sum()) + rows * gap_blocks(block_size)
    if needed > blocks or rows > MOST_ROWS:
        return False
    # A copy takes a token's time once; each query that reads it saves a part of the other way's.
    seen = kv_lens if window is None else np.minimum(kv_lens, window)
    reads = int(np.dot(q_lens.astype(np.int64), seen))
    if fp8:
        return tokens <= numbers.copied_freely or reads >= numbers.copied_queries * tokens
    return reads * group >= numbers.copied_head_queries * tokens


def copies_format(cache: KVCacheFormat, dtype: torch.dtype) -> KVCacheFormat:
    """The copies are a cache of one layer."""
    return KVCacheFormat(1, cache.num_kv_heads, cache.head_dim, cache.block_size, dtype)


def copies_rooms(cache: KVCacheFormat, blocks: int) -> int:
    """Blocks of the scratch memory with room for `blocks`, a number that copied_blocks returned."""
    return blocks + _for_graphs(cache.block_size)


def copies_bytes(cache: KVCacheFormat, dtype: torch.dtype, blocks: int) -> int:
    """Device memory of that scratch."""
    return copies_rooms(cache, blocks) * copies_format(cache, dtype).bytes_per_block if blocks else 0


def _for_graphs(block_size: int) -> int:
    return MAX_PROMPTS * (1 + gap_blocks(block_size))  # of a graph's padding
