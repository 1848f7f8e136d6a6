# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a cache of e4m3 prompts' attention can have copies of in 16 bits.

FA3 wants keys and values in the type of the queries. Queries of e4m3 lose accuracy (docs/formats.md), so the
blocks that a step's prompts read are copied before each layer's attention, exactly, to a scratch that all
layers share (attention/triton_copy.py).
"""

from __future__ import annotations

import numpy as np
import torch

from flashinfer_backend.cache.device import KVCacheFormat
from flashinfer_backend.ops import device as active_device
from flashinfer_backend.ops.fp8 import E4M3

MAX_PROMPTS = 16  # of a step that is a graph; those that a step has fewer of read a block each
_TOGETHER = 65536  # tokens that several prompts of a step may have before them, whatever max_seq_len is
_MOST_BYTES = 1 << 30


def has_fa3(device: torch.device) -> bool:
    """Whether FlashInfer's FA3 runs there: it is for Hopper alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def copied_blocks(
    cache: KVCacheFormat, dtype: torch.dtype, max_seq_len: int, max_num_tokens: int, device: torch.device
) -> int:
    """The number of blocks that can be copied: what the prompts of a step read, counted for each prompt.
    0 where FA3 needs none, and where there is no FA3. dtype: of queries.

    Room for all that a step of max_num_tokens tokens has behind a sequence of max_seq_len tokens, or behind
    shorter ones of 65536 together; at most 1 GiB. A block that a prompt does not fill counts as a whole
    one, so a step with many such prompts can need a little more.
    """
    if cache.dtype != E4M3 or not has_fa3(device):
        return 0
    tokens = max(max_seq_len, _TOGETHER) + max_num_tokens
    most = _MOST_BYTES // copies_format(cache, dtype).bytes_per_block - MAX_PROMPTS
    return max(0, min(-(-tokens // cache.block_size), most))


def copies_pay(q_lens: np.ndarray, kv_lens: np.ndarray, blocks: int, block_size: int) -> bool:
    """Whether copies of what a step's prompts read fit into `blocks`, and FA3 over them is faster than FA2
    over the cache (core/tuned). q_lens and kv_lens: int32 [R]."""
    numbers = active_device.active().prompt_attention
    tokens = int(kv_lens.sum(dtype=np.int64))
    if int(((kv_lens + (block_size - 1)) // block_size).sum()) > blocks:
        return False
    # A copy takes a token's time once; each query that reads it saves a part of FA2's.
    return tokens <= numbers.copied_freely or int(np.dot(q_lens.astype(np.int64), kv_lens)) >= (
        numbers.copied_queries * tokens
    )


def copies_format(cache: KVCacheFormat, dtype: torch.dtype) -> KVCacheFormat:
    """The copies are a cache of one layer."""
    return KVCacheFormat(1, cache.num_kv_heads, cache.head_dim, cache.block_size, dtype)


def copies_bytes(cache: KVCacheFormat, dtype: torch.dtype, blocks: int) -> int:
    """Device memory for the copies of `blocks` blocks, a number that copied_blocks returned."""
    return (blocks + MAX_PROMPTS) * copies_format(cache, dtype).bytes_per_block if blocks else 0
