# SPDX-License-Identifier: Apache-2.0
"""Brings a rank up: model, KV cache of the right size, warm kernels, captured graphs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from flashinfer_backend.attention.copies import copied_blocks, copies_bytes
from flashinfer_backend.cache.device import KVCache, KVCacheFormat, StateFormat
from flashinfer_backend.cache.groups import CacheGroup, cache_groups, share_memory
from flashinfer_backend.core.config import EngineConfig, resolve_limits
from flashinfer_backend.core.paths import resolve_drafter_dir, resolve_model_dir
from flashinfer_backend.core.shard import WHOLE, Shard
from flashinfer_backend.models.hf import read_drafter, read_spec
from flashinfer_backend.models.quantization import BLOCK
from flashinfer_backend.models.spec import Experts, ModelSpec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops.collectives import connect
from flashinfer_backend.speculate.methods import chosen
from flashinfer_backend.speculate.proposer import MakeProposer
from flashinfer_backend.worker import prebuild, prebuild_triton
from flashinfer_backend.worker.adapters import AdapterLoader
from flashinfer_backend.worker.device_state import DeviceState
from flashinfer_backend.worker.gpu_turns import GpuTurn, Neighbours
from flashinfer_backend.worker.graphs import default_sizes
from flashinfer_backend.worker.runner import Runner
from flashinfer_backend.worker.warm_up import (
    prompt_plan,
    warm_up_mixed,
    warm_up_products,
    warm_up_prompts,
    warm_up_sampling,
)

log = logging.getLogger(__name__)

EXPERT_GRAIN = 32  # rows and columns of an expert's weights on a GPU come in multiples of it
GROWTH_BYTES = 4 << 30  # attention workspaces, captured graphs (outputs and nodes), the CUDA context's growth
CPU_KV_BYTES = 512 << 20  # KV cache on a CPU unless max_tokens_in_paged_kv_cache says otherwise


def start_runner(
    config: EngineConfig,
    shard: Shard = WHOLE,
    rendezvous: str = "",
    make_proposer: MakeProposer | None = None,
    folder: Path | None = None,
) -> tuple[EngineConfig, Runner]:
    """Load the model and allocate everything; the config with every automatic value filled in.

    Of one of several ranks, its share; rendezvous is a file by which they find each other. Every rank runs
    the same steps here. folder: of rank 0, the engine's run directory, by which it takes turns with other
    engines on its GPUs; None: it takes none. Raises ValueError or OSError with what to change.
    """
    began = time.monotonic()
    model_dir = resolve_model_dir(config.model_dir)
    tokenizer_dir = resolve_model_dir(config.tokenizer_dir) if config.tokenizer_dir else model_dir
    spec = read_spec(model_dir, tokenizer_dir, task=config.task)
    if config.quantization == "fp8":
        spec = spec.quantised_on_load()
    spec.check_max_seq_len(config.max_seq_len)
    config = resolve_limits(config, spec.longest_seq_len)
    spec = spec.within(config.max_seq_len)
    spec.check_expert_groups(config.expert_parallel_size)
    drafter: ModelSpec | None = None
    if config.draft_model != "none":
        head = read_drafter(resolve_drafter_dir(config.draft_model), config.quantization == "fp8")
        head.check_fits(spec, config.max_seq_len)
        drafter = head.share(shard)
    spec = spec.share(shard)
    if config.speculative_method == "mtp":
        drafter = spec.mtp_head()
    device = _device(config, shard)
    dtype = _dtype(config, spec, device)
    plain_torch = _plain_torch(config, device, dtype)
    if not plain_torch:
        check_cuda_formats(config, spec, dtype)
        if drafter is not None:
            check_cuda_formats(config, drafter, dtype)
    turn = None
    if folder is not None and device.type == "cuda":
        turn = GpuTurn(folder, [str(torch.cuda.get_device_properties(n).uuid) for n in range(shard.size)])
    if device.type == "cuda":
        prebuild.prepare(config, spec, dtype, drafter)
    if plain_torch:
        from flashinfer_backend.ops import torch_ops as ops

        config = msgspec.structs.replace(config, attention_backend="torch", cuda_graph_batch_sizes="none")
    else:
        from flashinfer_backend.ops import cuda_ops as ops  # type: ignore[no-redef]

        prebuild_triton.prepare(config, spec, dtype, drafter)
    model = Transformer(spec, ops, dtype, device, config.max_seq_len)
    load_weights(model, model_dir, config.load_format)
    adapters = None
    if config.max_loras:
        adapters = AdapterLoader(model, config)
    stored, seconds = _stored(spec), time.monotonic() - began
    log.info("loaded %s (weights: %s) as %s on %s in %.1f s", model_dir, stored, dtype, device, seconds)
    neighbours = [Neighbours()] * shard.size

    def take_turn() -> None:
        neighbours[:] = turn.take() if turn is not None else neighbours

    if shard.size == 1:
        take_turn()
    else:
        where = rendezvous, device, spec.hidden_size, dtype, plain_torch
        model.collectives = connect(shard, *where, take_turn)
        told = model.collectives.agreed([float(n) for each in neighbours for n in (each.cache, each.waiting)])
        neighbours = [Neighbours(int(a), int(b)) for a, b in zip(told[::2], told[1::2], strict=True)]
        log.info("%d ranks are joined after %.1f s", shard.size, time.monotonic() - began)

    layers, proposer = spec.windows(config.max_seq_len), None
    make_proposer = make_proposer or chosen(config)
    if make_proposer is not None and spec.pooling is not None:
        raise ValueError(
            f"the checkpoint is {spec.pooling.what}. It has no use for drafts: set speculative_method=none"
        )
    if make_proposer is not None:
        proposer = make_proposer(config, model)
        layers += [None] * proposer.cache_layers
    groups = cache_groups(layers, config.tokens_per_block, _cache_format(config, model, (0,)).bytes_per_block)
    lengths = config.max_seq_len, config.max_num_tokens
    drafts = proposer.count if proposer is not None else 0
    enough = [group.enough_blocks(config.max_num_seqs, *lengths, drafts) for group in groups]
    states, snapshots = None, 0
    if (kept := state_format(model, drafts)) is not None:
        snapshots = model.collectives.minimum(_num_snapshots(config, model, kept, neighbours[shard.rank]))
        states = kept.allocate(config.max_num_seqs + 1 + snapshots, device)
    num_blocks = model.collectives.minimum(_num_blocks(config, model, groups, enough, neighbours[shard.rank]))
    tokens = num_blocks * config.tokens_per_block
    if num_blocks < groups[0].needed_blocks(1, *lengths, drafts):
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
        KVCache.allocate(_cache_format(config, model, group.layers), count + 1, device)
        for group, count in zip(groups, blocks, strict=True)
    ]
    state = DeviceState(config, model, ops, groups, caches, proposer, states)
    runner = Runner(config, state, proposer, adapters)
    _warm_up(config, runner)
    if turn is not None:
        own = sum(g.bytes_per_block * (n + 1) for g, n in zip(groups, blocks, strict=True))
        turn.ready(own + (kept.bytes_per_sequence * states.rows if kept and states else 0))
        runner.turn = turn
    if kept is not None:
        log.info(
            "states of %d slots and %d snapshots, %.1f MiB each",
            config.max_num_seqs,
            snapshots,
            kept.bytes_per_sequence / 2**20,
        )
    parts = [f"{n} for {len(g.layers)} layers ({g.name})" for g, n in zip(groups, blocks, strict=True)]
    log.info(
        "KV cache of %s blocks of %d tokens; ready after %.1f s",
        num_blocks if len(groups) == 1 else ", ".join(parts),
        config.tokens_per_block,
        time.monotonic() - began,
    )
    return config, runner


def _stored(spec: ModelSpec) -> str:
    """What the log says of the weights."""
    stored, mlp = "not quantised" if spec.format == "dense" else spec.format, spec.experts
    return stored if mlp is None else f"{stored}, {mlp.count} experts, {mlp.per_token} a token"


def _device(config: EngineConfig, shard: Shard) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device; use device=cpu or auto")
    if name == "cpu" and config.attention_backend in ("fa2", "xqa", "triton"):
        raise ValueError(
            f"attention_backend {config.attention_backend} needs a CUDA device; use auto or torch"
        )
    if shard.size == 1:
        return torch.device(name)
    if name == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // shard.size))
        return torch.device(name)
    if torch.cuda.device_count() < shard.size:
        raise ValueError(
            f"tensor_parallel_size={shard.size} needs as many GPUs, and {torch.cuda.device_count()} can be "
            "seen here (CUDA_VISIBLE_DEVICES chooses them)"
        )
    device = torch.device(name, shard.rank)
    torch.cuda.set_device(device)
    return device


def _plain_torch(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether everything runs in plain torch: on a CPU, or as the slow reference on any GPU."""
    if device.type == "cpu" or config.attention_backend == "torch":
        return True
    if dtype == torch.float32:
        raise ValueError(
            "the CUDA kernels compute in bfloat16 or float16: for float32 use attention_backend=torch"
        )
    if torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"the CUDA kernels need a Hopper GPU or newer, not {name}: use attention_backend=torch"
        )
    return False


def _dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32  # what CPUs compute fast, and exactly enough to compare with
    return torch.float16 if spec.dtype == "float16" else torch.bfloat16


def check_cuda_formats(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ValueError for formats that the CUDA kernels do not compute."""
    slow = "attention_backend=torch computes it, slowly"
    if config.attention_backend in ("fa2", "xqa", "triton"):
        _check_scores(config, spec)
    if spec.experts is not None:
        _check_experts(spec, spec.experts)
    for product in spec.products:
        if product.format == "dense":
            continue
        rows, inner = product.shape
        if product.format == "mxfp4":
            if dtype != torch.bfloat16:
                raise ValueError(f"weights in MXFP4 need dtype=bfloat16 on a GPU, not {dtype}; set it")
            continue
        if product.format.startswith("int4"):
            if inner % BLOCK:
                raise ValueError(
                    f"the {product.name} weights [{rows}, {inner}] of 4 bits should have columns in"
                    f" multiples of {BLOCK} on a GPU; {slow}"
                )
            continue
        if dtype != torch.bfloat16:
            raise ValueError(f"weights in FP8 need dtype=bfloat16 on a GPU, not {dtype}; set it")
        grain = BLOCK if product.format.startswith("fp8_block") else 16
        if rows % 16 or inner % grain:
            raise ValueError(
                f"the {product.name} weights [{rows}, {inner}] in FP8 should have rows in multiples of"
                f" 16 and columns in multiples of {grain} on a GPU; {slow}"
            )


def _check_scores(config: EngineConfig, spec: ModelSpec) -> None:
    mixers = spec.attentions
    found = {
        "windows": any(spec.windows(config.max_seq_len)),
        "soft caps": any(mixer.soft_cap for mixer in mixers),
        "scales of scores": any(mixer.scale for mixer in mixers),
        "sinks": any(mixer.sinks for mixer in mixers),
    }
    if config.attention_backend == "triton":
        found = {}
    if config.attention_backend != "fa2":
        variants = {mixer.variant for mixer in mixers if mixer.variant}
        found |= {f"attention of the kind {variant}": True for variant in variants}
    for name in (name for name, there in found.items() if there):
        raise ValueError(
            f"attention_backend {config.attention_backend} has no {name} as this checkpoint has them: set"
            " attention_backend=auto"
        )


def _check_experts(spec: ModelSpec, experts: Experts) -> None:
    for name, size in {"hidden_size": spec.hidden_size, experts.size_key: experts.size}.items():
        if size % EXPERT_GRAIN:
            where = f" on each of {spec.shard.size} GPUs" if spec.shard.size > 1 else ""
            raise ValueError(
                f"{name} is {size}{where}; with experts it should be a multiple of {EXPERT_GRAIN} on a GPU;"
                " attention_backend=torch computes it, slowly"
            )


def _cache_format(config: EngineConfig, model: Transformer, layers: tuple[int, ...]) -> KVCacheFormat:
    """Of one cache group."""
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
    """Of layers that keep states; None: there is none. drafts: that a step checks of a row, at most."""
    nets = model.spec.delta_nets
    if not nets:
        return None
    net = nets[0]
    sizes = net.value_heads, net.key_dim, net.value_dim, sum(net.widths), net.kernel
    return StateFormat(len(nets), *sizes, model.dtype, drafts)


def _num_snapshots(
    config: EngineConfig, model: Transformer, states: StateFormat, neighbours: Neighbours
) -> int:
    """Twice as many as slots, for reuse; else a few, for sequences of one request. On a GPU a quarter of what
    the slots leave at most. neighbours: as of _num_blocks."""
    wanted = 2 * config.max_num_seqs if config.enable_kv_cache_reuse else -(-config.max_num_seqs // 8)
    if model.device.type == "cpu":
        return wanted
    each = states.bytes_per_sequence
    free = _free_memory_after_largest_step(config, model) - GROWTH_BYTES * neighbours.waiting
    free = int(free * config.kv_cache_free_gpu_mem_fraction)
    left = free - each * (config.max_num_seqs + 1)
    if left < 4 * each:
        raise ValueError(
            f"states of max_num_seqs={config.max_num_seqs} sequences take {each / 2**20:.1f} MiB each, and"
            f" {max(0, free) / 2**30:.2f} GiB are left for them and the KV cache: lower max_num_seqs"
        )
    return min(wanted, left // 4 // each)


def _num_blocks(
    config: EngineConfig,
    model: Transformer,
    groups: Sequence[CacheGroup],
    enough: Sequence[int],
    neighbours: Neighbours,
) -> int:
    """Blocks of the first cache group. enough: what each group can make use of. neighbours: the other engines
    on the GPU."""
    free, copies = CPU_KV_BYTES, 0
    if model.device.type == "cpu":
        blocks = min(enough[0], share_memory(groups, enough, free))
    else:
        copies = _copies_bytes(config, model)
        free = _free_memory_after_largest_step(config, model) - copies - GROWTH_BYTES * neighbours.waiting
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
        takers.append(f"copies of an FP8 cache's blocks for prompts ({copies / 2**30:.2f} GiB)")
    left = (
        f"leave {free / 2**30:.2f} GiB" if free >= 0 else f"want {-free / 2**30:.2f} GiB more than there is"
    )
    taken = f"{', '.join(takers[:-1])} and {takers[-1]}"
    return f"no memory is left for the KV cache: {taken} {left}; use a smaller model or max_num_tokens"


def _copies_bytes(config: EngineConfig, model: Transformer) -> int:
    """Of what attention of prompts copies; plain torch and variants copy nothing."""
    if config.attention_backend == "torch" or all(mixer.variant for mixer in model.spec.attentions):
        return 0  # FA2 reads the cache itself
    cache_format = _cache_format(config, model, (0,))
    lengths = config.max_seq_len, config.max_num_tokens
    blocks = copied_blocks(cache_format, model.dtype, *lengths, model.device)
    return copies_bytes(cache_format, model.dtype, blocks)


def _free_memory_after_largest_step(config: EngineConfig, model: Transformer) -> int:
    """Bytes free beside weights and the activations of a step of max_num_tokens."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # loading has peaks of its own
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


def _warm_up(config: EngineConfig, runner: Runner) -> None:
    """Run every kind of step once, so that no request pays for compilation; capture graphs."""
    if runner.device.type == "cuda":
        warm_up_prompts(config, runner)
        warm_up_products(config, runner)
        # Plain torch has none, and what is compared runs layer by layer.
        if config.cuda_graph_batch_sizes != "none" and not config.compare_attention:
            sizes = config.cuda_graph_batch_sizes
            if runner.state.model.spec.pooling is not None:
                sizes = [1]  # it has no decode steps
            runner.capture_graphs(default_sizes(config.max_num_seqs) if sizes == "auto" else sizes)
        warm_up_mixed(config, runner)
        warm_up_sampling(config, runner)
    runner.rehearse(prompt_plan(runner.state.dummy_slot, 1))
