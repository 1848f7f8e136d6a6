# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of its sequences: how much memory keys, values and states get, and its allocation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from flashinfer_backend.attention.copies import copied_blocks, copies_bytes
from flashinfer_backend.cache.device import KVCache, KVCacheFormat, StateCache, StateFormat
from flashinfer_backend.cache.groups import CacheGroup, cache_groups, share_memory
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.proposer import Proposer
from flashinfer_backend.worker.gpu_turns import Neighbours

log = logging.getLogger(__name__)

GROWTH_BYTES = 4 << 30  # attention workspaces, captured graphs (outputs and nodes), the CUDA context's growth
CPU_KV_BYTES = 512 << 20  # the largest KV cache on a CPU


@dataclass(frozen=True)
class SequenceMemory:
    """Cache groups, the cache of each, and the states, if layers keep any. copied_blocks: room for copies of
    what prompts read (attention/copies.py)."""

    groups: list[CacheGroup]
    caches: list[KVCache]
    states: StateCache | None
    copied_blocks: int

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches) + (self.states.nbytes if self.states else 0)

    def __str__(self) -> str:
        blocks = [cache.num_blocks - 1 for cache in self.caches]
        if len(self.groups) == 1:
            return str(blocks[0])
        pairs = zip(blocks, self.groups, strict=True)
        return ", ".join(f"{n} for {len(group.layers)} layers ({group.name})" for n, group in pairs)


def allocate(
    config: EngineConfig, model: Transformer, proposer: Proposer | None, neighbours: Neighbours
) -> tuple[EngineConfig, SequenceMemory]:
    """Allocate states, then keys and values in what is left; the config with the max_seq_len that there is
    room for. All ranks agree on the numbers. neighbours: the other engines on this rank's GPU.

    Raises ValueError where there is too little memory.
    """
    drafts = proposer.count if proposer is not None else 0
    windows = model.spec.windows(config.max_seq_len)
    windows += [None] * (proposer.cache_layers if proposer is not None else 0)
    layer_bytes = _cache_format(config, model, (0,)).bytes_per_block
    groups = cache_groups(windows, config.tokens_per_block, layer_bytes)
    lengths = config.max_seq_len, config.max_num_tokens
    enough = [group.enough_blocks(config.max_num_seqs, *lengths, drafts) for group in groups]
    free = None
    if model.device.type == "cuda":
        free = _free_after_largest_step(config, model)
    states = None
    if (kept := state_format(model, drafts)) is not None:
        snapshots = model.collectives.minimum(_num_snapshots(config, kept, free, neighbours))
        states = kept.allocate(config.max_num_seqs + 1 + snapshots, model.device)
        free = None if free is None else free - states.nbytes
        log.info(
            "states of %d slots and %d snapshots, %.1f MiB each",
            config.max_num_seqs,
            snapshots,
            kept.bytes_per_sequence / 2**20,
        )
    copied = 0 if free is None else model.collectives.minimum(_copied_blocks(config, model, groups, free))
    copies = copies_bytes(_cache_format(config, model, (0,)), model.dtype, copied)
    num_blocks = num_blocks_of(config, groups, enough, free, neighbours, copies)
    num_blocks = model.collectives.minimum(num_blocks)
    if num_blocks < groups[0].needed_blocks(1, *lengths, drafts):
        tokens = num_blocks * config.tokens_per_block
        log.warning(
            "the KV cache holds %d tokens: max_seq_len is %d instead of %d",
            tokens,
            tokens,
            config.max_seq_len,
        )
        config = msgspec.structs.replace(
            config, max_seq_len=tokens, max_input_len=min(config.max_input_len, tokens - 1)
        )
    blocks = [num_blocks, *(min(num_blocks, most) for most in enough[1:])]
    caches = [
        KVCache.allocate(_cache_format(config, model, group.layers), count + 1, model.device)
        for group, count in zip(groups, blocks, strict=True)
    ]
    return config, SequenceMemory(groups, caches, states, copied)


def _cache_format(config: EngineConfig, model: Transformer, layers: tuple[int, ...]) -> KVCacheFormat:
    """The format of one cache group."""
    heads = model.spec.attention
    in_fp8 = config.kv_cache_dtype == "fp8_e4m3"
    scales = model.kv_scales  # those behind the model's are a proposer's
    return KVCacheFormat(
        num_layers=len(layers),
        num_kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        block_size=config.tokens_per_block,
        dtype=torch.float8_e4m3fn if in_fp8 else model.dtype,
        scales=tuple(scales[layer] if layer < len(scales) else (1.0, 1.0) for layer in layers)
        if in_fp8
        else (),
    )


def state_format(model: Transformer, drafts: int = 0) -> StateFormat | None:
    """What layers with states keep; None where there are none. drafts: the most that a row has in a step.
    With any, tokens are held, so none are pending."""
    nets = model.spec.delta_nets
    if not nets:
        return None
    net = nets[0]
    sizes = net.value_heads, net.key_dim, net.value_dim, sum(net.widths), net.kernel
    return StateFormat(len(nets), *sizes, model.dtype, drafts, 0 if drafts else model.ops.MOST_PENDING)


def _num_snapshots(
    config: EngineConfig, states: StateFormat, free: int | None, neighbours: Neighbours
) -> int:
    """Twice the number of slots for reuse, else a few for sequences of one request. On a GPU they take at
    most a quarter of what the slots leave of `free` bytes. free, neighbours: as of num_blocks_of."""
    wanted = 2 * config.max_num_seqs if config.enable_kv_cache_reuse else -(-config.max_num_seqs // 8)
    if free is None:
        return wanted
    each = states.bytes_per_sequence
    share = int((free - GROWTH_BYTES * neighbours.waiting) * config.kv_cache_free_gpu_mem_fraction)
    left = share - each * (config.max_num_seqs + 1)
    if left < 4 * each:
        raise ValueError(
            f"states of max_num_seqs={config.max_num_seqs} sequences take {each / 2**20:.1f} MiB each, and"
            f" {max(0, share) / 2**30:.2f} GiB are left for them and the KV cache: lower max_num_seqs"
        )
    return min(wanted, left // 4 // each)


def num_blocks_of(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    enough: Sequence[int],
    free: int | None,
    neighbours: Neighbours,
    copies: int = 0,
) -> int:
    """Blocks of the first cache group. enough: how many blocks each group can use. free: bytes that are left
    for the groups and for copies; None on a CPU. neighbours: the other engines on the GPU. copies: bytes of
    copies of what prompts read. Raises ValueError for none."""
    if free is None:
        free = CPU_KV_BYTES
        blocks = min(enough[0], share_memory(groups, enough, free))
    else:
        free -= copies + GROWTH_BYTES * neighbours.waiting
        share = int((free + neighbours.cache) * config.kv_cache_free_gpu_mem_fraction)
        blocks = share_memory(groups, enough, min(free, share))
    if config.max_tokens_in_paged_kv_cache:
        blocks = min(blocks, -(-config.max_tokens_in_paged_kv_cache // config.tokens_per_block))
    if blocks < 1:
        raise ValueError(_no_room(free, copies, neighbours != Neighbours()))
    return blocks


def _no_room(free: int, copies: int, shared: bool) -> str:
    """free: bytes that the weights, the largest step, `copies` bytes of copies and, where the GPU is shared,
    other engines leave."""
    takers = ["the weights", "the largest step"]
    takers += ["other engines on this GPU"] if shared else []
    if copies:
        takers.append(f"copies of the cache for prompts ({copies / 2**30:.2f} GiB)")
    left = (
        f"leave {free / 2**30:.2f} GiB" if free >= 0 else f"want {-free / 2**30:.2f} GiB more than there is"
    )
    taken = f"{', '.join(takers[:-1])} and {takers[-1]}"
    return (
        f"no memory is left for the KV cache: {taken} {left}. Lower max_num_tokens, or use a smaller model or"
        " more GPUs (tensor_parallel_size)"
    )


def _copied_blocks(config: EngineConfig, model: Transformer, groups: Sequence[CacheGroup], free: int) -> int:
    """Room for copies of what prompts read; plain torch copies nothing, and no group with a variant, which
    takes FA2."""
    varied = {layer for layer, mixer in enumerate(model.spec.attentions) if mixer.variant}
    if config.attention_backend == "torch" or all(varied.intersection(group.layers) for group in groups):
        return 0
    lengths = config.max_seq_len, config.max_num_tokens
    return copied_blocks(_cache_format(config, model, (0,)), model.dtype, *lengths, model.device, free)


def _free_after_largest_step(config: EngineConfig, model: Transformer) -> int:
    """Bytes that weights and the activations of a step of max_num_tokens leave free."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # loading has its own peaks
    hidden = torch.zeros(
        (config.max_num_tokens, model.spec.hidden_size), dtype=model.dtype, device=model.device
    )
    added = model.layers[0].mlp(hidden)
    logits = model.logits(hidden[: config.max_num_seqs])
    del hidden, added, logits
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free - 3 * peak - GROWTH_BYTES
