# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels of a checkpoint in parallel, before the engine's warm-up would one by one.

The operations are called with tensors that have a shape and no memory (device meta). Triton's hook takes down
which variants they would compile, and nothing is launched; then threads compile them. A variant that is
forgotten here is compiled when the warm-up first runs it.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.draft_counts import draft_counts
from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.tuned import Table
from flashinfer_backend.models.adapter_places import AdapterPlaces
from flashinfer_backend.models.hf.eagle3 import Eagle3Spec
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.models.transformer import DeltaLayer, Transformer
from flashinfer_backend.ops import device
from flashinfer_backend.ops.fp8 import E4M3
from flashinfer_backend.ops.torch_delta import DeltaRows
from flashinfer_backend.ops.torch_ops import BySlot, Penalties
from flashinfer_backend.ops.weight import Fp8Static, Weight
from flashinfer_backend.speculate.eagle3 import Head
from flashinfer_backend.speculate.mtp import MtpHead
from flashinfer_backend.speculate.proposer import Places
from flashinfer_backend.worker.device_state import MOST_DEFERRED
from flashinfer_backend.worker.memory import state_format

log = logging.getLogger(__name__)

# Tokens of steps, besides those of the tables of core/tuned, that have kernels of their own: one token, few
# tokens and more of them with experts or adapters, and what stands for "all more" in a table.
TOKENS = (1, 2, 4, 5, 16, 17, 32, 33, 64, 65, 8192)


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
) -> list[BaseException]:
    """Compile what collect() found, in a thread for each core, for the current device. Calls `compiled` after
    each, and returns what those raised that failed."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None

    def choose_device() -> None:
        if index is not None:
            torch.cuda.set_device(index)

    errors: list[BaseException] = []
    workers = max(1, min(len(variants), len(os.sched_getaffinity(0))))
    # Where it runs between, CPython 3.11's `ast.parse` fails now and then in one of several threads.
    collects = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(workers, "triton", choose_device) as threads:
            futures = [threads.submit(kernel.preload, data) for kernel, data in variants]
            for future in as_completed(futures):
                if (error := future.exception()) is not None:
                    errors.append(error)
                else:
                    compiled()
    finally:
        if collects:
            gc.enable()
    return errors


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
    from flashinfer_backend.ops import cuda_ops

    target = Transformer(model, cuda_ops, dtype, "meta", max_seq_len=1)
    with _libraries_without_memory():
        _call_model(config, target, drafter)
    _call_others(config, target, drafter)


@contextmanager
def _libraries_without_memory() -> Iterator[None]:
    """FlashInfer's operations, and the one that not every PyTorch has without memory, take tensors of
    device meta inside the block, as torch's do."""
    import flashinfer

    from flashinfer_backend.ops import cuda_fp8

    def normed(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.empty_like(x)

    def gated(x: Tensor, **_: Any) -> Tensor:
        return x.new_empty(len(x), x.shape[1] // 2)

    def product(x: Tensor, _: Tensor, weight: Weight) -> Tensor:
        return x.new_empty(len(x), len(weight.data), dtype=torch.bfloat16)

    instead: list[tuple[ModuleType, str, Any]] = [
        (flashinfer, "rmsnorm", normed),
        (flashinfer, "silu_and_mul", gated),
        (flashinfer, "gelu_tanh_and_mul", gated),
        (cuda_fp8, "blocks_by_cublas", product),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in instead]
    try:
        for module, name, function in instead:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _call_model(config: EngineConfig, model: Transformer, drafter: ModelSpec | None) -> None:
    """The products of the model and of a drafter, as their own code computes them, and what goes with
    them."""
    if config.max_loras:
        AdapterPlaces(model, config.max_loras, config.max_lora_rank, config.lora_vocabulary)
    counts = token_counts(model.spec)
    for _ in _kinds_of_input_scales(model):
        for tokens in counts:
            model.compute_products(tokens, head=True)
            if config.max_loras:
                chosen = model.ops.group_adapters(_words(tokens), config.max_loras)
                model.compute_products(tokens, head=True, chosen=chosen)
                model.embed(_words(tokens), chosen)
    if drafter is None:
        return
    head = Head(drafter, model, 1) if isinstance(drafter, Eagle3Spec) else MtpHead(model)
    if isinstance(head, MtpHead):
        head.share_projection()
    cache = _empty_cache(config, model)
    for _ in _kinds_of_input_scales(head):
        for tokens in counts:
            places = Places(_words(tokens), _words(tokens), [cache] * len(head.layers), lambda *_: None)
            columns = len(head.taken) * model.spec.hidden_size
            taken = torch.empty(tokens, columns, dtype=model.dtype, device="meta")
            head.guess(head(_words(tokens), head.join(taken), places))


def token_counts(model: ModelSpec) -> list[int]:
    """Tokens of steps that together take each kernel that this device's numbers give to some step: the most
    tokens of every entry, and one more."""
    numbers = device.active()
    tables: list[Table[Any]] = [numbers.linear, numbers.linear_adapted, numbers.linear_fp8]
    tables += [numbers.linear_blocks, numbers.blocks_linear, numbers.blocks_fp8]
    limits = {limit for table in tables for limit in _limits(table)}
    if (mlp := model.experts) is not None:  # whose limits are of an expert's tokens
        each = _limits(numbers.experts)
        limits |= {-(-(limit + 1) * mlp.count // mlp.per_token) - 1 for limit in each}
    return sorted({*TOKENS, *limits, *(limit + 1 for limit in limits)})


def _limits(table: Table[Any]) -> set[int]:
    steps = (step for entries in table.values() for entry in entries for step in entry.steps)
    return {limit for limit, _ in steps if limit}


def _kinds_of_input_scales(model: Transformer | Head | MtpHead) -> Iterator[None]:
    """Once for each kind of scales that its weights can have for their inputs. Where a checkpoint stores
    these, the modules of a product have the same one, or each another."""
    for apart in (False, True) if model.spec.format == "fp8_static" else (False,):
        for layer in model.layers:
            for product in layer.spec.products:
                weight = getattr(layer, product.name)
                if isinstance(weight.format, Fp8Static):
                    ends = itertools.accumulate(source.rows for source in product.sources)
                    starts = [0, *ends][:-1] if apart else [0]
                    weight.input_scales = {start: 1.0 + number for number, start in enumerate(starts)}
        yield


def _empty_cache(config: EngineConfig, model: Transformer) -> tuple[Tensor, Tensor]:
    """Of a layer."""
    mixer, stored = model.spec.attention, model.dtype if config.kv_cache_dtype == "auto" else E4M3
    shape = 2, config.tokens_per_block, mixer.kv_heads, mixer.head_dim
    return torch.empty(shape, dtype=stored, device="meta"), torch.empty(shape, dtype=stored, device="meta")


def _words(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _call_others(config: EngineConfig, model: Transformer, drafter: ModelSpec | None) -> None:
    """What a step computes besides the model's products."""
    from flashinfer_backend.attention import split, triton_copy, triton_decode
    from flashinfer_backend.attention.prefixes import PREFIX_WORDS, PrefixTiles
    from flashinfer_backend.attention.triton_prefix import SharedWork, prefix_parts
    from flashinfer_backend.ops.triton_filters import keep_likeliest
    from flashinfer_backend.ops.triton_inputs import step_inputs
    from flashinfer_backend.ops.triton_logits import copy_rows, penalise
    from flashinfer_backend.ops.triton_sample import keep_allowed, sample
    from flashinfer_backend.sampling.rows import FEW

    def empty(*shape: int, of: torch.dtype = model.dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    spec, mixer = model.spec, model.spec.attention
    heads, kv_heads, dim = mixer.heads, mixer.kv_heads, mixer.head_dim
    block = config.tokens_per_block
    cache = _empty_cache(config, model)
    stored = cache[0].dtype
    product = empty(4, mixer.qkv.shape[0])
    qkv, gate = product[:, : (heads + 2 * kv_heads) * dim], product[:, : heads * dim]
    kinds_of_layers = {(each.mixer.rope, each.mixer.qk_norm): each for each in model.attention_layers}
    for layer in kinds_of_layers.values():
        layer.rotate(qkv, _words(4), _words(4), cache)
    if mixer.gated:
        model.ops.gated_by(empty(4, heads * dim), gate)
    table = _words(config.max_num_seqs + 1, -(-config.max_seq_len // block))
    last_token = _words(config.max_num_seqs + 1)
    by_slot = BySlot(last_token, last_token, _words(len(last_token), config.max_draft_len), table, block)
    step_inputs(_words(4), by_slot, new_blocks=_words(4))
    step_inputs(_words(4), by_slot, given=(_words(4), _words(4), 1))
    heat, seed, record = empty(4, of=torch.float32), empty(4, of=torch.int64), (last_token, _words(4))
    sample(empty(4, spec.outputs), heat, seed, _words(4), _words(4), record)
    sample(empty(4, spec.outputs, of=torch.float32), heat, seed, _words(4), None, record)
    masks, index = _words(4, -(-spec.vocab_size // 32)), empty(4, of=torch.int64)
    changed = empty(4, spec.outputs, of=torch.float32)
    keep_allowed(changed, index, masks)
    for bounded in (False, True):
        copy_rows(empty(4, spec.outputs), index, bounded)
    keep_likeliest(changed, index, heat, _words(4), heat, heat, FEW)
    penalties = Penalties(index, index, _words(4), heat, heat, heat)
    penalise(changed, penalties, _words(config.max_num_seqs, config.max_seq_len + 1), _words(4))
    drafts = config.drafts
    varied = any(mixer.variant for mixer in spec.attentions)  # which take FA2
    copies = empty(2, block, kv_heads, dim), empty(2, block, kv_heads, dim)
    for rows in () if varied or config.attention_backend == "torch" else triton_copy.ROWS:
        triton_copy.copy_prompts(cache, copies, _words(4), _words(4), _words(4), rows)
    if config.attention_backend in ("auto", "triton") and not varied:
        most, fp8_cache = config.max_num_seqs, stored == E4M3
        mixers, windows = spec.attentions, spec.windows(config.max_seq_len)
        kinds = {(m.soft_cap, m.sinks, window) for m, window in zip(mixers, windows, strict=True)}
        kinds |= {(None, False, None)} if drafter is not None else set()
        before, plain = 0, kinds == {(None, False, None)}
        limits = {min(limit or most, most) for limit, _ in split.config_steps(fp8_cache)}
        if drafts:
            limits.add(min(triton_decode.FEW_ROWS, most))
        for rows in sorted(limits):
            items = split.max_items(rows, kv_heads, fp8_cache)
            workspace = triton_decode.DecodeWorkspace(rows, items, heads, kv_heads, dim, table.device)
            given = _words(items, split.ITEM_WORDS), table, workspace, dim**-0.5
            lengths: list[split.Lengths | None] = [None]
            if drafts:  # of each row alone, and of those that are checked with drafts
                fed = {1} | {1 + n for r in range(before + 1, rows + 1) for n in draft_counts(r, drafts)}
                # Steps that no graph holds have as many query tokens of each row as it feeds.
                kinds_of_steps = (False,) if config.cuda_graph_batch_sizes == "auto" else (False, True)
                lengths = [
                    split.Lengths(last_token, queries, ragged=ragged and queries > 1)
                    for queries, ragged in itertools.product(sorted(fed), kinds_of_steps)
                ]
            for ends, (cap, sinks, window) in itertools.product(lengths, kinds):
                q = empty(rows * (1 if ends is None else ends.queries), heads, dim)
                sink = empty(heads, of=torch.float32) if sinks else None
                triton_decode.decode(
                    q, cache, q, *given,
                    soft_cap=cap, sinks=sink, rows=rows, lengths=ends, window=window,
                )  # fmt: skip
            once = config.read_shared_prefixes_once and plain and not drafts and not fp8_cache
            if once and PrefixTiles.fit(heads, kv_heads):
                q, work = empty(rows, heads, dim), SharedWork(_words(2, PREFIX_WORDS), _words(rows))
                prefix_parts(q, cache, work, table, workspace, dim**-0.5)
                triton_decode.decode(q, cache, q, *given, rows=rows, shared=True)
            before = rows
    if spec.delta_nets:
        _call_delta_net(config.max_num_seqs, drafts, model)
    if drafts:
        _call_drafts(config, by_slot)


def _call_delta_net(most: int, drafts: int, model: Transformer) -> None:
    """A layer's, whose sizes all others have: decode rows with up to `drafts` drafts, each number of prompts
    up to `most` that kernels tell from others, and the padded rows of graphs."""
    from flashinfer_backend.ops.triton_delta import SEARCHED, state_columns

    layer = next(layer for layer in model.layers if isinstance(layer, DeltaLayer))
    format, mixer = state_format(model, drafts), layer.mixer
    assert format is not None
    states = format.allocate(1, model.device).layers[0]
    heads, _, dv = states.recurrent.shape[1:]
    few = range(1, min(most, SEARCHED[0]) + 1)  # among these are all widths of columns
    columns = {state_columns(heads * prompts, dv, device.sms()): prompts for prompts in few}
    counts = sorted({0, 1, most, *columns.values(), *(size for size in SEARCHED if size < most)})
    for prompts, padded in [(0, True), (1, True), *((count, False) for count in counts)]:
        rows = prompts or most
        qkvz, ba = (
            torch.empty(rows, product.shape[0], dtype=model.dtype, device="meta")
            for product in (mixer.qkvz, mixer.ba)
        )
        held = _words(rows) if drafts else None
        row = DeltaRows(_words(rows), _words(rows + 1), _words(rows), held, rows - prompts)
        layer.mix(qkvz, ba, states, row._replace(padded=padded))


def _call_drafts(config: EngineConfig, by_slot: BySlot) -> None:
    """What checks and proposes drafts."""
    from flashinfer_backend.ops import triton_drafts

    tokens, lengths = _words(4), by_slot.lengths
    for count in draft_counts(1, config.max_draft_len):
        triton_drafts.draft_inputs(tokens, tokens, 1 + count, by_slot)
    triton_drafts.accept(tokens, tokens, tokens, tokens, by_slot)
    noted = _words(len(lengths), MOST_DEFERRED)
    triton_drafts.note_tokens(noted, tokens, tokens, tokens)
    triton_drafts.noted_inputs(noted, tokens, tokens, MOST_DEFERRED, by_slot)
    if config.speculative_method == "ngram":
        history = _words(len(lengths), config.max_seq_len + 1)
        triton_drafts.record_tokens(history, (tokens, tokens, tokens), tokens, by_slot)
        sizes = config.max_matching_ngram_size, config.min_matching_ngram_size
        for count in draft_counts(1, config.max_draft_len):
            triton_drafts.ngram_drafts(history, tokens, lengths, count, *sizes)
    if config.speculative_method in ("eagle3", "mtp"):
        for count in draft_counts(1, config.max_draft_len):
            triton_drafts.places_ahead(tokens, tokens, tokens, lengths, by_slot, count - 1)
