# SPDX-License-Identifier: Apache-2.0
"""A ready engine: what runs steps, and what plans them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.engine.kv_events import KVEvents
from flashinfer_backend.engine.logits_room import step_tokens
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.ops import device
from flashinfer_backend.scheduler.budget import for_experts
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.scheduler import Scheduler
from flashinfer_backend.speculate.proposer import MakeProposer
from flashinfer_backend.worker.ranks import OtherRanks
from flashinfer_backend.worker.runner import Runner
from flashinfer_backend.worker.start import start_runner


@dataclass
class Core:
    """An engine without its transport."""

    config: EngineConfig  # every automatic value filled in
    spec: ModelSpec
    scheduler: Scheduler
    runner: Runner
    kv_events: KVEvents | None = None
    number: int = 0  # among the engines of the model

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.kv_events is not None:
            self.kv_events.close()
        if self.runner.others is not None:
            collectives = self.runner.state.model.collectives
            self.runner.others.close(collectives.settle)
            collectives.close()

    def wait_loss(self) -> None:
        """After a step that failed: let what has happened to another rank be told before the failure is."""
        if self.runner.others is not None:
            self.runner.others.wait_loss()

    def kill(self) -> None:
        """End the other ranks at once; from any thread."""
        if self.runner.others is not None:
            self.runner.others.kill()


def start(
    config: EngineConfig,
    folder: Path | None = None,
    on_loss: Callable[[str], None] | None = None,
    name: str = "engine",
    make_proposer: MakeProposer | None = None,
    number: int = 0,
) -> Core:
    """Load the model and allocate everything, with tensor_parallel_size - 1 processes for the other ranks.

    folder: the run directory, which only this user can write to. The ranks find each other there, and engines
    on the same GPUs take turns; None: a temporary one, without turns. on_loss is told, in a thread, when a
    rank has ended or hangs; None: this process ends then. name: of the engine, in the
    other ranks' lines of the log; number: among those of the model. make_proposer: of what guesses the tokens
    that follow, which steps check.
    Raises ValueError or OSError with what to change.
    """
    others = None
    if make_proposer is not None and config.tensor_parallel_size > 1:
        raise ValueError(
            "each rank makes its own proposer: tensor_parallel_size should be 1 with a given one"
        )
    if config.tensor_parallel_size > 1:
        others = OtherRanks(config, folder, on_loss, name)
    try:
        if others is None:
            config, runner = start_runner(config, make_proposer=make_proposer, folder=folder)
        else:
            shard = Shard(0, config.tensor_parallel_size, config.expert_parallel_size)
            config, runner = start_runner(config, shard, others.rendezvous, folder=folder)
            runner.others = others
            others.serve(limits_steps=runner.device.type == "cuda")
    except BaseException:
        if others is not None:
            others.kill()  # they cannot leave in order: they load, or wait for this rank
        raise
    state = runner.state
    pools = [
        BlockPool(cache.num_blocks, group.tail)
        for group, cache in zip(state.groups, state.caches, strict=True)
    ]
    snapshots = BlockPool(state.snapshots + 1) if state.states is not None else None
    drafting = runner.drafting
    drafts = drafting.proposer.count if drafting is not None else 0
    reuse = config.enable_kv_cache_reuse
    manager = KVCacheManager(pools, config.tokens_per_block, reuse, snapshots, drafts)
    spec = runner.state.model.spec
    scheduling = device.active().scheduling
    graphs, experts = runner.mixed_graphs, spec.experts
    if graphs is not None and experts is not None:
        scheduling = for_experts(scheduling, experts.count, experts.per_token, graphs.largest)
    logits_tokens = step_tokens(spec.vocab_size)
    scheduler = Scheduler(
        config,
        manager,
        spec.eos_token_ids,
        scheduling,
        logits_tokens,
        drafts=drafts,
        history=drafting is not None and drafting.proposer.history,
        draft_costs=runner.draft_costs,
    )
    events = None
    if config.kv_events_endpoint != "none":
        events = KVEvents(config, manager, scheduler.table, number)
    return Core(config, spec, scheduler, runner, events, number)
