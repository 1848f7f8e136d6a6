# SPDX-License-Identifier: Apache-2.0
"""Runs steps of every kind once, so that no request is the one that compiles or loads something.

CUDA loads a kernel when it first runs, and libraries choose kernels by sizes that only some steps have.
tests/gpu/test_no_compilation.py counts what is loaded after the start.
"""

from __future__ import annotations

import logging
import time

import msgspec
import numpy as np

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import Feeds, NewSequence, StepPlan, Wants, greedy_plan
from flashinfer_backend.worker.runner import Runner

log = logging.getLogger(__name__)

PROMPT = (1, 2, 3)
LENGTHS = (1, 16, 64, 200, 512, 1024, 2048, 4096)  # tokens of a step
# Tokens of products alone: cuBLAS chooses its kernel by their number, for few tokens by nearly each.
PRODUCTS = sorted({*range(1, 513), *range(512, 1025, 8), *range(1024, 4097, 64), *range(4096, 16385, 512)})
ADAPTED_LENGTHS = (1, 16, 64, 200, 512)
FAR = 8192  # tokens of a long prefix
# Decode rows, prompts, tokens in the cache before each of these, tokens of each. Attention has kernels for
# many short prompts, for few tokens over a long prefix, for copies of more prompts than a graph has, and for
# both kinds of rows next to each other.
MIXED = (
    (0, 20, 0, 3), (0, 20, 0, 60), (0, 17, 0, 260), (0, 4, 0, 300), (0, 1, FAR, 8), (0, 1, FAR, 64),
    (0, 4, FAR, 64), (0, 1, FAR, 512), (1, 1, 0, 40), (12, 1, 0, 200), (40, 2, 0, 400), (24, 1, 0, 1500),
    (100, 3, 0, 600), (200, 3, FAR, 300), (200, 20, 0, 40),
)  # fmt: skip
FEATURES: list[dict[str, object]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 100},
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


def warm_up_prompts(config: EngineConfig, runner: Runner) -> None:
    """Steps of one prompt, of all sizes."""
    longest = min(config.max_num_tokens, config.max_input_len)
    began, length = time.monotonic(), 1
    with telling(lambda: f"running a first step of {length} tokens"):
        for length in sorted({*LENGTHS, longest} & set(range(1, longest + 1))):
            runner.rehearse(prompt_plan(runner.state.dummy_slot, length))
            if config.max_loras and length in {*ADAPTED_LENGTHS, longest}:
                runner.rehearse(prompt_plan(runner.state.dummy_slot, length, adapted=True))
    log.info("steps with prompts are warm after %.1f s", time.monotonic() - began)


def warm_up_products(config: EngineConfig, runner: Runner) -> None:
    """Products of all numbers of tokens, and logits of all numbers of rows."""
    began, tokens, rows = time.monotonic(), 1, config.max_num_seqs
    with telling(lambda: f"computing the first products of {tokens} tokens"):
        for tokens in sorted(
            {n for n in PRODUCTS if n < config.max_num_tokens} | {config.max_num_tokens, rows}
        ):
            runner.state.model.compute_products(tokens, head=tokens <= rows)
    log.info("products are warm after %.1f s", time.monotonic() - began)


def warm_up_mixed(config: EngineConfig, runner: Runner) -> None:
    """Steps of several rows, with graphs where there are some. Their slots' blocks are all block 0; the next
    sequences in these slots start over."""
    began = time.monotonic()
    generates = runner.state.model.spec.pooling is None
    steps = mixed_steps(config) if generates else []
    with telling(lambda: f"running the first of {len(steps)} kinds of steps with several rows"):
        for step in steps:
            runner.rehearse(step)
        if generates:
            for length in sorted({1, min(64, config.max_num_tokens, config.max_input_len)}):
                plan = prompt_plan(runner.state.dummy_slot, length)
                plan.wants[:] = Wants.NEXT | Wants.LOGITS
                plan.told = [(0, 5, bytes(4 * length))]
                runner.rehearse(plan)
    log.info("steps of several rows are warm after %.1f s", time.monotonic() - began)


def mixed_steps(config: EngineConfig) -> list[StepPlan]:
    """Those of MIXED, cut to what the config allows."""
    found: dict[tuple[int, int, int, int], StepPlan] = {}
    for decodes, prompts, start, length in MIXED:
        prompts = min(prompts, config.max_num_seqs)
        decodes = min(decodes, config.max_num_seqs - prompts)
        length = min(length, (config.max_num_tokens - decodes) // prompts, config.max_input_len)
        start = max(0, min(start, config.max_seq_len - length - 1))
        if length > 0:
            found[decodes, prompts, start, length] = _rows(decodes, [start] * prompts, [length] * prompts)
    return list(found.values())


def prompt_plan(slot: int, length: int, adapted: bool = False) -> StepPlan:
    """A prompt of zeros in a slot."""
    return _rows(0, [0], [length], slot, adapted)


def _rows(
    decodes: int, starts: list[int], lengths: list[int], first: int = 0, adapted: bool = False
) -> StepPlan:
    """Decode rows behind PROMPT, and prompts of zeros; from slot `first` on."""
    rows = decodes + len(starts)
    return greedy_plan(
        first + np.arange(rows, dtype=np.int32),
        [len(PROMPT)] * decodes + starts,
        [1] * decodes + lengths,
        [Feeds.LAST] * decodes + [Feeds.GIVEN] * len(starts),
        tokens=np.zeros(sum(lengths), np.int32),
        following=np.full(len(starts), -1, np.int32),
        adapted=adapted,
    )


def warm_up_sampling(config: EngineConfig, runner: Runner) -> None:
    """Steps of decodes with each sampling feature alone and with all of them, at several numbers of rows.
    What compiles or loads at first use depends on which operations run and, for some, on sizes of 1, few and
    many.

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
    every_handle = list(range(1, config.max_num_seqs + 1))
    runner.rehearse(_decodes(1, SamplingParams(max_tokens=1), -1, freed=every_handle))
    log.info("sampling is warm after %.1f s", time.monotonic() - began)


def _decodes(rows: int, params: SamplingParams, suppressed: int, freed: list[int] | None = None) -> StepPlan:
    slots = np.arange(rows, dtype=np.int32)
    stateful = slots if params.stateful else slots[:0]
    tokens = np.array(PROMPT, "<i4").tobytes()
    new = [NewSequence(slot + 1, slot, 0, params, len(PROMPT), tokens) for slot in stateful.tolist()]
    temperature = np.full(rows, params.temperature, np.float32)
    freed = freed if freed is not None else list(range(1, rows + 1))
    unlike = {"temperature": temperature, "suppressed": np.full(rows, suppressed, np.int32)}
    return greedy_plan(slots, len(PROMPT), 1, Feeds.LAST, stateful=stateful, new=new, freed=freed, **unlike)
