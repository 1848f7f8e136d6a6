# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels of a checkpoint in parallel, before the engine's warm-up would one by one.

The operations are called with tensors that have a shape and no memory (device meta). Triton's hook takes down
which variants they would compile, and nothing is launched; then threads compile them. A variant that is
forgotten here is compiled when the warm-up first runs it.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.draft_counts import draft_counts
from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.tuned import steps
from flashinfer_backend.models.hf.eagle3 import Eagle3Spec
from flashinfer_backend.models.spec import Experts, ModelSpec, Product
from flashinfer_backend.ops import device
from flashinfer_backend.ops.fp8 import E4M3
from flashinfer_backend.ops.torch_ops import Penalties
from flashinfer_backend.ops.weight import Added, Chosen, LowRank
from flashinfer_backend.worker.device_state import MOST_DEFERRED

log = logging.getLogger(__name__)

MANY = 8192  # tokens that stand for "all more" in a table of core/tuned


def prepare(
    config: EngineConfig, model: ModelSpec, dtype: torch.dtype, drafter: ModelSpec | None = None
) -> int:
    """Compile what is not in Triton's cache, and load the rest from it, for the current device; returns how
    many variants that were. config has its limits resolved.

    What fails is only logged: the warm-up runs all kernels, and shows an error that matters.
    """
    began = time.monotonic()
    try:
        count = _prepare(lambda: call_operations(config, model, dtype, drafter), began)
    except Exception as error:  # Triton's compiler raises what its passes raise
        log.warning("Triton kernels are compiled one by one, not ahead: %s: %s", type(error).__name__, error)
        return 0
    log.info("%d variants of Triton kernels are ready after %.1f s", count, time.monotonic() - began)
    return count


def _prepare(calls: Callable[[], object], began: float) -> int:
    variants = collect(calls)
    finished = 0

    def how_far() -> str:
        elapsed = time.monotonic() - began
        return f"compiled {finished} of {len(variants)} Triton kernels in {elapsed:.0f} s"

    def one_more() -> None:
        nonlocal finished
        finished += 1

    with telling(how_far, lambda: finished):
        errors = compile_together(variants, one_more)
    if errors:
        raise errors[0]
    return len(variants)


def compile_together(
    variants: Sequence[tuple[Any, str]], compiled: Callable[[], None] = lambda: None
) -> list[Exception]:
    """Compile what collect() found, in a thread for each core, for the current device. Calls `compiled` after
    each, and returns what those raised that failed."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None

    def choose_device() -> None:
        if index is not None:
            torch.cuda.set_device(index)

    again: list[tuple[Any, str]] = []
    errors: list[Exception] = []
    workers = max(1, min(len(variants), len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(workers, "triton", choose_device) as threads:
        futures = {threads.submit(kernel.preload, data): (kernel, data) for kernel, data in variants}
        for future in as_completed(futures):
            try:
                future.result()
            except Exception as error:  # Triton's compiler raises what its passes raise
                if _parser_failed(error):
                    again.append(futures[future])
                else:
                    errors.append(error)
            else:
                compiled()
    for kernel, data in again:
        try:
            kernel.preload(data)
        except Exception as error:
            errors.append(error)
        else:
            compiled()
    return errors


def _parser_failed(error: BaseException | None) -> bool:
    """Whether CPython 3.11's `ast.parse` raised it or what it comes from, which happens now and then where
    several threads parse and the garbage collector runs between; alone it does not."""
    while error is not None and not isinstance(error, SystemError):
        error = error.__cause__
    return error is not None


def collect(calls: Callable[[], object]) -> list[tuple[Any, str]]:
    """The kernels that `calls` would compile, each with what Triton's preload wants. Launches nothing, also
    not those that are there; no other thread may launch any meanwhile."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    found: dict[tuple[Any, str], str] = {}

    def take_down(key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[fn.jit_function, key] = compile["specialization_data"]
        return True  # do not compile

    run = JITFunction.run

    def run_without_launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, grid=grid, warmup=True, **options)

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook, JITFunction.run = take_down, run_without_launch
    try:
        calls()
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = before, run
    return [(kernel, data) for (kernel, _), data in found.items()]


def call_operations(
    config: EngineConfig, model: ModelSpec, dtype: torch.dtype, drafter: ModelSpec | None = None
) -> None:
    """Every Triton operation of a step, in every variant that depends on the number of tokens or rows.
    drafter: a head with layers of its own."""
    from flashinfer_backend.attention import split, triton_copy, triton_decode
    from flashinfer_backend.attention.prefixes import PREFIX_WORDS, PrefixTiles
    from flashinfer_backend.attention.triton_prefix import SharedWork, prefix_parts
    from flashinfer_backend.ops.triton_filters import keep_likeliest
    from flashinfer_backend.ops.triton_inputs import step_inputs
    from flashinfer_backend.ops.triton_logits import copy_rows, penalise
    from flashinfer_backend.ops.triton_rope import rope_and_store
    from flashinfer_backend.ops.triton_sample import keep_allowed, sample
    from flashinfer_backend.sampling.rows import FEW

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    def words(*shape: int) -> Tensor:
        return empty(*shape, of=torch.int32)

    _call_products(model, empty)
    if drafter is not None:
        _call_products(drafter, empty)
    if config.max_loras:
        _call_adapters(config, model, empty)
    mixer = model.attention
    heads, kv_heads, dim = mixer.heads, mixer.kv_heads, mixer.head_dim
    block = config.tokens_per_block
    stored = dtype if config.kv_cache_dtype == "auto" else E4M3
    cache = empty(2, block, kv_heads, dim, of=stored), empty(2, block, kv_heads, dim, of=stored)
    for spec in (model, drafter) if drafter is not None else (model,):
        qkv = empty(4, spec.attention.qkv.shape[0])[:, : (heads + 2 * kv_heads) * dim]
        for rotated, kind in {(each.rope.dim if each.rope else 0, each.qk_norm) for each in spec.attentions}:
            norm = empty(dim) if kind in ("head", "rotated") else None
            angles = empty(config.max_seq_len, rotated, of=torch.float32)
            rope_and_store(
                qkv, words(4), angles, *cache, words(4), norm, norm, spec.norm_eps, heads, kv_heads,
                norm_rotated=kind == "rotated",
            )  # fmt: skip
    table = words(config.max_num_seqs + 1, -(-config.max_seq_len // block))
    last_token = words(config.max_num_seqs + 1)
    step_inputs(words(4), last_token, last_token, table, block, new_blocks=words(4))
    step_inputs(words(4), last_token, last_token, table, block, given=(words(4), words(4), 1))
    heat, seed, record = empty(4, of=torch.float32), empty(4, of=torch.int64), (last_token, words(4))
    sample(empty(4, model.outputs), heat, seed, words(4), words(4), record)
    sample(empty(4, model.outputs, of=torch.float32), heat, seed, words(4), None, record)
    masks, index = words(4, -(-model.vocab_size // 32)), empty(4, of=torch.int64)
    changed = empty(4, model.outputs, of=torch.float32)
    keep_allowed(changed, index, masks)
    for bounded in (False, True):
        copy_rows(empty(4, model.outputs), index, bounded)
    keep_likeliest(changed, index, heat, words(4), heat, heat, FEW)
    penalties = Penalties(index, index, words(4), heat, heat, heat)
    penalise(changed, penalties, words(config.max_num_seqs, config.max_seq_len + 1), words(4))
    if stored == E4M3:
        copies = empty(2, block, kv_heads, dim), empty(2, block, kv_heads, dim)
        triton_copy.copy_blocks(cache, copies, words(4), words(4), 3)
    drafts = 0 if config.speculative_method == "none" else config.max_draft_len
    varied = any(mixer.variant for mixer in model.attentions)  # which take FA2
    if config.attention_backend in ("auto", "triton") and not varied:
        most, fp8_cache = config.max_num_seqs, stored == E4M3
        mixers, windows = model.attentions, model.windows(config.max_seq_len)
        kinds = {(m.soft_cap, m.sinks, window) for m, window in zip(mixers, windows, strict=True)}
        kinds |= {(None, False, None)} if drafter is not None else set()
        before, plain = 0, kinds == {(None, False, None)}
        for rows in sorted({min(limit or most, most) for limit, _ in split.config_steps(fp8_cache)}):
            items = split.max_items(rows, kv_heads, fp8_cache)
            workspace = triton_decode.DecodeWorkspace(rows, items, heads, kv_heads, dim, table.device)
            given = words(items, split.ITEM_WORDS), table, workspace, dim**-0.5
            lengths: list[split.Lengths | None] = [None]
            if drafts:  # of each row alone, and of those that are checked with drafts
                fed = {1} | {1 + n for r in range(before + 1, rows + 1) for n in draft_counts(r, drafts)}
                lengths = [split.Lengths(last_token, queries) for queries in sorted(fed)]
            for ends, (cap, sinks, window) in itertools.product(lengths, kinds):
                q = empty(rows * (1 if ends is None else ends.queries), heads, dim)
                sink = empty(heads, of=torch.float32) if sinks else None
                triton_decode.decode(
                    q, cache, q, *given,
                    soft_cap=cap, sinks=sink, rows=rows, lengths=ends, window=window,
                )  # fmt: skip
            once = config.read_shared_prefixes_once and plain and not drafts and not fp8_cache
            if once and PrefixTiles.fit(heads, kv_heads):
                q, work = empty(rows, heads, dim), SharedWork(words(2, PREFIX_WORDS), words(rows))
                prefix_parts(q, cache, work, table, workspace, dim**-0.5)
                triton_decode.decode(q, cache, q, *given, rows=rows, shared=True)
            before = rows
    if model.delta_nets:
        _call_delta_net(config.max_num_seqs, drafts, model, empty)
    if drafts:
        _call_drafts(config, words, table, last_token)
    if drafter is not None:
        _call_head(config, drafter, empty, words, table, last_token)


def _call_delta_net(most: int, drafts: int, model: ModelSpec, empty: Callable[..., Tensor]) -> None:
    """A layer's, whose sizes all others have: decode rows with up to `drafts` drafts, and each number of
    prompts up to `most` that kernels tell from others."""
    from flashinfer_backend.ops import triton_delta
    from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights, inputs_kept

    def words(*shape: int) -> Tensor:
        return empty(*shape, of=torch.int32)

    def floats(*shape: int) -> Tensor:
        return empty(*shape, of=torch.float32)

    net = model.delta_nets[0]
    channels, heads = sum(net.widths), net.value_heads
    norm = empty(net.value_dim)
    weights = DeltaWeights(empty(channels, net.kernel), floats(heads), floats(heads), norm, model.norm_eps)
    recurrent = floats(1, heads, net.key_dim, net.value_dim)
    states = DeltaStates(recurrent, empty(1, inputs_kept(net.kernel, drafts), channels + 2 * heads))
    for prompts in sorted({0, 1, most, *(size for size in triton_delta.SEARCHED if size < most)}):
        rows = prompts or most
        qkv, z = empty(rows, channels + net.widths[2]).split((channels, net.widths[2]), dim=-1)
        b, a = empty(rows, 2 * heads).chunk(2, dim=-1)
        held = words(rows) if drafts else None
        row = DeltaRows(words(rows), words(rows + 1), words(rows), held, rows - prompts)
        triton_delta.delta_net(qkv, z, a, b, weights, states, row)


def _call_drafts(config: EngineConfig, words: Callable[..., Tensor], table: Tensor, by_slot: Tensor) -> None:
    """What checks and proposes drafts; by_slot: a tensor of a word for each slot."""
    from flashinfer_backend.ops import triton_drafts

    drafts = words(len(by_slot), config.max_draft_len)
    for count in draft_counts(1, config.max_draft_len):
        own = words(4), words(4), 1 + count, by_slot, drafts, by_slot
        triton_drafts.draft_inputs(*own, table, config.tokens_per_block)
    tokens = words(4)
    triton_drafts.accept(tokens, tokens, tokens, tokens, drafts, by_slot, by_slot)
    noted = words(len(by_slot), MOST_DEFERRED)
    triton_drafts.note_tokens(noted, tokens, tokens, tokens)
    where = by_slot, by_slot, table, config.tokens_per_block
    triton_drafts.noted_inputs(noted, tokens, tokens, MOST_DEFERRED, *where)
    if config.speculative_method == "ngram":
        history = words(len(by_slot), config.max_seq_len + 1)
        triton_drafts.record_tokens(history, (tokens, tokens, tokens), tokens, by_slot, by_slot)
        sizes = config.max_matching_ngram_size, config.min_matching_ngram_size
        for count in draft_counts(1, config.max_draft_len):
            triton_drafts.ngram_drafts(history, tokens, by_slot, count, *sizes)


def _call_head(
    config: EngineConfig,
    head: ModelSpec,
    empty: Callable[..., Tensor],
    words: Callable[..., Tensor],
    table: Tensor,
    by_slot: Tensor,
) -> None:
    """What a head's drafts take besides its layers."""
    from flashinfer_backend.ops import triton_drafts

    for count in draft_counts(1, config.max_draft_len):
        rows = words(4), words(4), words(4), by_slot, table
        triton_drafts.places_ahead(*rows, config.tokens_per_block, count - 1)
    known, hidden = head.head.shape
    both = empty(4, hidden), empty(4, hidden), empty(hidden), empty(hidden)
    triton_drafts.norms_side_by_side(*both, head.norm_eps)
    triton_drafts.likeliest(empty(4, known), words(known) if isinstance(head, Eagle3Spec) else None)


def _around(product: Product, model: ModelSpec, tokens: int, empty: Callable[..., Tensor]) -> dict[str, Any]:
    """What is computed with a product of `tokens` tokens, as Triton's kernels are told."""
    rows, _ = product.shape
    adds = product.adds and model.shard.rank == 0 and product.name != "shared_down"
    return {
        "bias": empty(rows) if product.bias else None,
        "residual": empty(tokens, rows) if adds else None,
        "gated": product.gated,
    }


def _bare(product: Product, model: ModelSpec) -> bool:
    """Whether no norm is computed with it."""
    return product.adds or product in model.bare


def _call_fp8_product(product: Product, model: ModelSpec, empty: Callable[..., Tensor]) -> None:
    """As ops.cuda_fp8 does."""
    from flashinfer_backend.ops import fp8, triton_fp8
    from flashinfer_backend.ops.tilings import choose, choose_blocks
    from flashinfer_backend.ops.triton_linear import linear

    (rows, inner), role, format = product.shape, product.role, product.format
    norm = None if _bare(product, model) else triton_fp8.Norm(empty(inner), model.norm_eps)
    result, scales = empty(1, rows), empty(rows, of=torch.float32)

    def behind(tokens: int = 1) -> dict[str, Any]:
        return _around(product, model, tokens, empty)

    if not format.startswith("fp8_block"):
        static = 1.0 if format == "fp8_static" else None
        _, x_scales = triton_fp8.quantise_rows(empty(1, inner), static, norm)
        triton_fp8.finish(result, x_scales, scales, **behind())
        weight = empty(rows, inner, of=torch.float8_e4m3fn)
        for tokens, _ in steps(device.active().linear_fp8, role, (rows, inner)):
            tiling = choose(role, tokens or MANY, weight)
            if tiling is None:
                continue
            few = empty(tokens or MANY, inner)
            if tiling.quantise and static is None:
                linear(
                    few, weight, tiling, norm.weight if norm else None, norm.eps if norm else 0.0,
                    scales=(None, scales), **behind(len(few)),
                )  # fmt: skip
            else:
                elements, x_scales = triton_fp8.quantise_rows(few, static, norm)
                linear(elements, weight, tiling, scales=(x_scales, scales), **behind(len(few)))
        if format == "fp8_static":  # where parts have input scales of their own
            triton_fp8.quantise_rows(empty(1, inner), static)
            triton_fp8.finish(result, x_scales, scales)
            triton_fp8.finish(result, **behind())
        return
    weight = empty(rows, inner, of=torch.float8_e4m3fn)
    scales = fp8.empty_block_scales((rows, inner), weight.device)
    x = triton_fp8.quantise_groups(empty(1, inner), norm)
    limits = [tokens or MANY for tokens, _ in steps(device.active().blocks_fp8, role)]
    for tile in dict.fromkeys(choose_blocks(role, tokens, rows) for tokens in limits):
        product_of = triton_fp8.block_product(*x, weight, scales, tile, 1) if tile else result  # cuBLAS's
        triton_fp8.finish(product_of, **behind())


def _call_int4_product(product: Product, empty: Callable[..., Tensor]) -> None:
    """As ops.cuda_int4 does."""
    from flashinfer_backend.ops import triton_int4
    from flashinfer_backend.ops.weight import Weight

    dtype = empty(0).dtype
    weight = Weight.empty(product.role, product.shape, product.format, dtype, torch.device("meta"))
    triton_int4.dequantise(weight.data, weight.scale, weight.zero, dtype)


def _call_experts(model: ModelSpec, mlp: Experts, empty: Callable[..., Tensor]) -> None:
    """As ops.cuda_experts does, with each tile."""
    from flashinfer_backend.models.transformer import weight
    from flashinfer_backend.ops import cuda_experts, triton_experts

    where = empty(0).dtype, torch.device("meta")
    of_experts = [product for product in model.products if product.experts]
    pairs_of_products = itertools.product(
        (product for product in of_experts if product.gated),
        (product for product in of_experts if not product.gated),
    )
    for gate_up, down in pairs_of_products:
        fewest = 0  # tokens an expert that take the next tile
        weights = weight(gate_up, *where), weight(down, *where)
        scales = triton_experts.scales_of(weights[0])
        for limit, _ in steps(device.active().experts, scales):
            least = max(1, -(-fewest * mlp.count // mlp.per_token))
            fewest = (limit or 0) + 1
            # One token, few and more are routed by different kernels.
            for tokens in sorted({max(least, some) for some in (1, 2, triton_experts.FEW_TOKENS + 1)}):
                pairs = tokens * mlp.per_token // mlp.count
                if limit is not None and pairs > limit:
                    continue
                normed = empty(tokens, model.hidden_size)
                residual = torch.empty_like(normed) if model.shard.rank == 0 else None
                logits = empty(tokens, mlp.count, of=torch.float32)
                routing = mlp.per_token, mlp.norm_topk
                cuda_experts.weighted_sum(normed, logits, *weights, *routing, residual, mlp.clip, mlp.own)


def _call_products(model: ModelSpec, empty: Callable[..., Tensor]) -> None:
    """As ops.cuda_ops does."""
    if model.experts is not None:
        _call_experts(model, model.experts, empty)
    for product in model.products:
        if product.experts or not product.role:
            continue
        if product.format == "dense":
            _call_dense_product(product, model, empty)
        elif product.format.startswith("int4"):
            _call_int4_product(product, empty)
        else:
            _call_fp8_product(product, model, empty)


def _call_adapters(config: EngineConfig, model: ModelSpec, empty: Callable[..., Tensor]) -> None:
    """As ops.cuda_ops does, with each size of tiles."""
    from flashinfer_backend.models.adapter_places import room
    from flashinfer_backend.ops import triton_adapters

    limits, like = (config.max_loras, config.max_lora_rank), empty(0)

    def chosen(tokens: int) -> Chosen:
        return triton_adapters.group_adapters(empty(tokens, of=torch.int32), config.max_loras)

    products = [product for layer in model.layers for product in layer.adaptable]
    products += model.vocabulary[1:] if config.lora_vocabulary else ()
    for product in {(each.name, each.shape): each for each in products}.values():
        low = room(product, *limits, like.dtype, like.device)
        for tokens in (1, 32, 64, MANY):
            added = triton_adapters.shrink(empty(tokens, product.shape[1]), low, chosen(tokens))
            triton_adapters.expand(empty(tokens, product.shape[0]), added)
        if product.format == "dense" and product.role:
            _call_dense_product(product, model, empty, low, chosen)
    if config.lora_vocabulary:
        embedding = room(model.vocabulary[0], *limits, like.dtype, like.device)
        for tokens in (1, 32, 64):
            inner = empty(1, tokens, 1, embedding.down.shape[2], of=torch.float32)
            hidden = empty(tokens, model.hidden_size)
            triton_adapters.expand(hidden, Added(inner, embedding, chosen(tokens)))


def _call_dense_product(
    product: Product,
    model: ModelSpec,
    empty: Callable[..., Tensor],
    low: LowRank | None = None,
    chosen: Callable[[int], Chosen] | None = None,
) -> None:
    """low, chosen: the weight's adapters, and those of so many tokens, one of which has a kernel of its
    own."""
    from flashinfer_backend.ops import triton_linear
    from flashinfer_backend.ops.tilings import FEW, choose, choose_adapted
    from flashinfer_backend.ops.triton_adapters import shrink

    weight = empty(*product.shape)
    table = device.active().linear
    limits = {limit or MANY for limit, _ in steps(table, product.role, product.shape)}
    if low is not None:
        limits |= {1, FEW, *(limit or MANY for limit, _ in steps(table, product.role))}
        own_steps = steps(device.active().linear_adapted, product.role, product.shape)
        limits |= {limit or MANY for limit, _ in own_steps}
    for tokens in sorted(limits):
        own = None if low is None or chosen is None else (low, chosen(tokens))
        tiling = (choose if own is None else choose_adapted)(product.role, tokens, weight)
        if tiling is None or (own is not None and not triton_linear.takes_adapters(tiling, own[0])):
            continue
        norm = empty(product.shape[1]) if tiling.fuse_norm and not _bare(product, model) else None
        x = empty(tokens, product.shape[1])
        if own is not None:
            # Where there is too much to shrink for it to be done next to the product.
            shrink(x, *own, norm, triton_linear.SPLITS)
        triton_linear.linear(
            x,
            weight,
            tiling,
            norm_weight=norm,
            eps=0.0 if norm is None else model.norm_eps,
            adapters=own,
            **_around(product, model, tokens, empty),
        )
