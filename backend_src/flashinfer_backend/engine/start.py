# SPDX-License-Identifier: Apache-2.0
"""A ready engine: what runs steps, and what plans them."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.config import ModelConfig
from flashinfer_backend.ops import device
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.scheduler import Scheduler
from flashinfer_backend.worker.runner import Runner
from flashinfer_backend.worker.start import start_runner


@dataclass
class Core:
    """An engine without its transport."""

    config: EngineConfig  # every automatic value filled in
    model_config: ModelConfig
    scheduler: Scheduler
    runner: Runner


def start(config: EngineConfig) -> Core:
    """Load the model and allocate everything. Raises ValueError or OSError with what to change."""
    config, runner = start_runner(config)
    manager = KVCacheManager(
        runner.state.kv_cache.num_blocks, config.tokens_per_block, config.enable_kv_cache_reuse
    )
    model_config = runner.state.model.config
    scheduling = device.active().scheduling
    scheduler = Scheduler(config, manager, model_config.eos_token_ids, scheduling)
    return Core(config, model_config, scheduler, runner)
