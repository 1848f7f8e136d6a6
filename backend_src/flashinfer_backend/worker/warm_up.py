# SPDX-License-Identifier: Apache-2.0
"""Samples with every feature once, so that no request is the one that compiles or loads something."""

from __future__ import annotations

import logging
import time

import msgspec
import numpy as np

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import NONE, Feeds, NewSequence, StepPlan, Wants
from flashinfer_backend.worker.runner import Runner

log = logging.getLogger(__name__)

PROMPT = (1, 2, 3)
FEATURES: list[dict[str, object]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"bad_words": [[4], [1, 2, 5]]},
    {"allowed_ids": [4, 5, 6]},
    {"min_tokens": 2, "late_ids": [4]},
    {"bias_ids": [1, 2], "bias_values": [0.5, -0.5]},
    {"log_probs": True},
    {"log_probs": True, "top_logprobs": 5},
    {"generation_logits": True},
    {"pooled": True},
]


def warm_up_sampling(config: EngineConfig, runner: Runner) -> None:
    """Steps of decodes with each sampling feature, by itself and all in one, at several numbers of rows. What
    compiles or loads at first use depends on which operations run and, for some, on sizes of 1, few and many.

    The rows use real slots, whose block tables are all block 0 then; every step ends them again.
    """
    began = time.monotonic()
    if runner.state.model.spec.pooling is None:
        features = [feature for feature in FEATURES if "pooled" not in feature]
        cases = [*features, {k: v for feature in features for k, v in feature.items()}]
    else:
        cases = [{"pooled": True}]
    steps = [
        (rows, params, suppressed)
        for rows in sorted({1, 2, 16, min(130, config.max_num_seqs)} & set(range(1, config.max_num_seqs + 1)))
        for values in cases
        for params in [msgspec.convert({"max_tokens": 1, "temperature": 0.0, **values}, SamplingParams)]
        for suppressed in (-1, 0)
        if rows <= 16 or params.filters  # the filters alone depend on more
    ]
    done = 0
    with telling(lambda: f"sampled {done} of {len(steps)} first steps"):
        for step in steps:
            runner.rehearse(_decodes(*step))
            done += 1
    if runner.state.model.collectives.shard.rank == 0:  # which alone samples
        runner.sampler.warm_up_masks(runner.device)
    everybody = list(range(1, config.max_num_seqs + 1))
    runner.rehearse(_decodes(1, SamplingParams(max_tokens=1), -1, freed=everybody))
    log.info("sampling is warm after %.1f s", time.monotonic() - began)


def _decodes(rows: int, params: SamplingParams, suppressed: int, freed: list[int] | None = None) -> StepPlan:
    slots = np.arange(rows, dtype=np.int32)
    stateful = slots if params.stateful else slots[:0]
    tokens = np.array(PROMPT, "<i4").tobytes()
    new = [NewSequence(slot + 1, slot, 0, params, len(PROMPT), tokens) for slot in stateful.tolist()]
    return StepPlan(
        slots=slots,
        starts=np.full(rows, len(PROMPT), np.int32),
        lengths=np.ones(rows, np.int32),
        feeds=np.full(rows, Feeds.LAST, np.int8),
        wants=np.full(rows, Wants.NEXT, np.int8),
        tokens=NONE,
        epochs=np.zeros(rows, np.int64),
        temperature=np.full(rows, params.temperature, np.float32),
        seed=np.zeros(rows, np.uint64),
        suppressed=np.full(rows, suppressed, np.int32),
        stateful=stateful,
        new=new,
        freed=freed if freed is not None else list(range(1, rows + 1)),
    )
