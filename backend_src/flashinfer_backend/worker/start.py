# SPDX-License-Identifier: Apache-2.0
"""Brings a rank up: model, KV cache of the right size, warm kernels, captured graphs."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from flashinfer_backend.core.config import EngineConfig, resolve_limits
from flashinfer_backend.core.paths import resolve_drafter_dir, resolve_model_dir
from flashinfer_backend.core.shard import WHOLE, Shard
from flashinfer_backend.models.hf import read_drafter, read_spec
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops.collectives import connect
from flashinfer_backend.speculate.methods import chosen
from flashinfer_backend.speculate.proposer import MakeProposer
from flashinfer_backend.worker import memory, prebuild, prebuild_triton, trace
from flashinfer_backend.worker.adapters import AdapterLoader
from flashinfer_backend.worker.device_state import DeviceState
from flashinfer_backend.worker.formats import (
    check_cuda_formats,
    choose_device,
    choose_dtype,
    runs_plain_torch,
)
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


def start_runner(
    config: EngineConfig,
    shard: Shard = WHOLE,
    rendezvous: str = "",
    make_proposer: MakeProposer | None = None,
    folder: Path | None = None,
) -> tuple[EngineConfig, Runner]:
    """Load a rank's share of the model and allocate everything; the config with every automatic value filled
    in. Every rank runs the same steps here.

    rendezvous: a file by which several ranks find each other. folder: the engine's run directory, given to
    rank 0, which takes turns with other engines on its GPUs; None: it takes no turns. Raises ValueError or
    OSError with what to change.
    """
    began = time.monotonic()
    config, spec, drafter = read_specs(config, shard)
    make_proposer = make_proposer or chosen(config)
    if make_proposer is not None and spec.pooling is not None:
        raise ValueError(
            f"the checkpoint is {spec.pooling.what}. It has no use for drafts: set speculative_method=none"
        )
    device = choose_device(config, shard)
    dtype = choose_dtype(config, spec, device)
    plain_torch = runs_plain_torch(config, device, dtype)
    if not plain_torch:
        for each in (spec, drafter) if drafter is not None else (spec,):
            check_cuda_formats(config, each, dtype)
    turn = None
    if folder is not None and device.type == "cuda":
        turn = GpuTurn(folder, [str(torch.cuda.get_device_properties(n).uuid) for n in range(shard.size)])

    if device.type == "cuda":
        prebuild.prepare(config, spec, dtype, drafter)
    ops: ModuleType
    if plain_torch:
        from flashinfer_backend.ops import torch_ops as ops

        config = msgspec.structs.replace(config, attention_backend="torch", cuda_graph_batch_sizes="none")
    else:
        from flashinfer_backend.ops import cuda_ops as ops

        prebuild_triton.prepare(config, spec, dtype, drafter)

    model = Transformer(spec, ops, dtype, device, config.max_seq_len)
    model_dir = resolve_model_dir(config.model_dir)
    load_weights(model, model_dir, config.load_format)
    adapters = AdapterLoader(model, config) if config.max_loras else None
    stored, seconds = _stored(spec), time.monotonic() - began
    log.info("loaded %s (weights: %s) as %s on %s in %.1f s", model_dir, stored, dtype, device, seconds)

    neighbours = _join(model, shard, rendezvous, plain_torch, turn)
    proposer = make_proposer(config, model) if make_proposer is not None else None
    config, kept = memory.allocate(config, model, proposer, neighbours)
    state = DeviceState(config, model, ops, kept, proposer)
    runner = Runner(config, state, proposer, adapters)
    _warm_up(config, runner)
    if config.profile_dir != "none":
        trace.warm_up()
    if turn is not None:
        turn.ready(kept.nbytes)
        runner.turn = turn
    log.info(
        "KV cache of %s blocks of %d tokens; ready after %.1f s",
        kept,
        config.tokens_per_block,
        time.monotonic() - began,
    )
    return config, runner


def read_specs(
    config: EngineConfig, shard: Shard, changes: dict[str, Any] | None = None
) -> tuple[EngineConfig, ModelSpec, ModelSpec | None]:
    """The config with the limits filled in, and a rank's shares of the model and of its drafter. changes: of
    the checkpoint's config.json. Raises ValueError or OSError with what to change."""
    model_dir = resolve_model_dir(config.model_dir)
    tokenizer_dir = resolve_model_dir(config.tokenizer_dir) if config.tokenizer_dir else model_dir
    spec = read_spec(model_dir, tokenizer_dir, changes, task=config.task)
    if config.quantization == "fp8":
        spec = spec.quantised_on_load()
    spec.check_max_seq_len(config.max_seq_len)
    config = resolve_limits(config, spec.longest_seq_len)
    spec = spec.within(config.max_seq_len)
    spec.check_expert_groups(config.expert_parallel_size)
    own = spec.share(shard)
    drafter: ModelSpec | None = None
    if config.draft_model != "none":
        head = read_drafter(resolve_drafter_dir(config.draft_model), config.quantization == "fp8")
        head.check_fits(spec, config.max_seq_len)
        drafter = head.share(shard)
    elif config.speculative_method == "mtp":
        drafter = own.mtp_head()
    return config, own, drafter


def _join(
    model: Transformer, shard: Shard, rendezvous: str, plain_torch: bool, turn: GpuTurn | None
) -> Neighbours:
    """Connects the ranks, and waits for this engine's turn to take memory. Returns the other engines on this
    rank's GPU."""
    neighbours = [Neighbours()] * shard.size

    def take_turn() -> None:
        if turn is not None:
            neighbours[:] = turn.take()

    if shard.size == 1:
        take_turn()
        return neighbours[0]
    began = time.monotonic()
    spec = model.spec
    model.collectives = connect(
        shard, rendezvous, model.device, spec.hidden_size, model.dtype, plain_torch, take_turn
    )
    told = model.collectives.agreed([float(n) for each in neighbours for n in (each.cache, each.waiting)])
    log.info("%d ranks joined in %.1f s", shard.size, time.monotonic() - began)
    cache, waiting = told[2 * shard.rank : 2 * shard.rank + 2]
    return Neighbours(int(cache), int(waiting))


def _stored(spec: ModelSpec) -> str:
    """What the log says of the weights."""
    stored, mlp = "not quantised" if spec.format == "dense" else spec.format, spec.experts
    return stored if mlp is None else f"{stored}, {mlp.count} experts, {mlp.per_token} a token"


def _warm_up(config: EngineConfig, runner: Runner) -> None:
    """Run every kind of step once, so that no request pays for compilation; capture graphs."""
    if runner.device.type == "cuda":
        warm_up_prompts(config, runner)
        # What PyTorch keeps for later allocations is no use to the driver, which needs memory for graphs.
        torch.cuda.empty_cache()
        # Plain torch has none, and what is compared runs layer by layer.
        if config.cuda_graph_batch_sizes != "none" and not config.compare_attention:
            sizes = config.cuda_graph_batch_sizes
            if runner.state.model.spec.pooling is not None:
                sizes = [1]  # it has no decode steps
            runner.capture_graphs(default_sizes(config.max_num_seqs) if sizes == "auto" else sizes)
        warm_up_products(config, runner)
        warm_up_mixed(config, runner)
        warm_up_sampling(config, runner)
    runner.rehearse(prompt_plan(runner.state.dummy_slot, 1))
