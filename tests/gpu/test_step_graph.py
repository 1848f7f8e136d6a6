# SPDX-License-Identifier: Apache-2.0
"""Attention of whole mixed steps in a captured graph against plain torch."""

import pytest
import torch
from attending import HEADS, NO_WORDS, Setup, StepGraph, check_layers
from test_fp8_cache import make_setup

from flashinfer_backend.attention.contract import StepShape

pytestmark = pytest.mark.gpu

CACHES = {"16 bits": Setup, "e4m3": make_setup}

# Prompts that FA3 takes, whatever the number of heads here: enough tiles, or not much to read.
STEPS = {
    "prompts alone": ([100, 17, 200], [100, 17, 200]),
    "decode rows before a prompt": ([1] * 40 + [250], [*range(1, 400, 10), 250]),
    "a long decode row": ([1, 1] + [130, 60], [4000, 7, 130, 60]),
    "chunks of longer prompts": ([1] * 5 + [150, 120], [33, 16, 17, 900, 5, 700, 400]),
    "most prompts": ([1] * 20 + [18] * 16, [60] * 20 + [18] * 16),
    "one prompt": ([300], [300]),
    "a short prompt": ([20], [20]),
    "decode rows and a short prompt": ([1] * 30 + [25], [*range(1, 301, 10), 25]),
}


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens", [64, 320])
@pytest.mark.parametrize("cache", CACHES)
def test_one_graph_for_steps_of_any_shape(cache, heads, kv_heads, tokens):
    setup = CACHES[cache](heads, kv_heads)
    graph, ran = StepGraph(setup, tokens, 40), 0
    for name, (q_lens, kv_lens) in list(STEPS.items()) * 2:
        if sum(q_lens) > tokens:
            continue
        batch = setup.batch(q_lens, kv_lens)
        if graph.replay(batch):
            ran += 1
            graph.check(name, batch)
    assert ran >= (14 if tokens == 320 else 2)


@pytest.mark.parametrize("cache", CACHES)
def test_refuses_what_it_cannot_do_and_goes_on(cache):
    setup = CACHES[cache](32, 8)
    graph = StepGraph(setup, 320, 40)
    refused = {
        "no prompts": ([1] * 5, [600] * 5),
        "17 prompts": ([15] * 17, [15] * 17),
        "more decode rows": ([1] * 41 + [100], [9] * 41 + [100]),
        "a short chunk over a long prefix, which FA2 splits": ([5], [4000]),
    }
    if cache == "e4m3":
        refused["more blocks than there is room for copies"] = ([100] * 3, [4000, 4000, 1700])
        refused["too few queries for what would be copied"] = ([60] * 2, [3000] * 2)
    for name, (q_lens, kv_lens) in refused.items():
        assert not graph.state.plan(setup.batch(q_lens, kv_lens), NO_WORDS), name
    batch = setup.batch([1] * 3 + [90], [50, 60, 70, 90])
    assert graph.replay(batch)
    graph.check("goes on", batch)


def test_there_is_none_for_a_forced_decode_backend():
    setup = Setup(32, 8, "fa2")
    assert setup.attention.captured(StepShape(64, 40, None), setup.table, torch.empty(0).cuda().int()) is None


def test_over_e4m3_there_is_none_without_room_for_copies():
    setup = make_setup(32, 8, copied_blocks=0)
    assert setup.attention.captured(StepShape(64, 40, None), setup.table, torch.empty(0).cuda().int()) is None


def test_eager_steps_and_graphs_share_the_copies():
    """Each step reads what it has copied itself."""
    setup = make_setup(32, 8)
    graph = StepGraph(setup, 320, 40)
    batch = setup.batch([1] * 3 + [250], [50, 60, 70, 900])
    assert graph.replay(batch)
    graph.check("first", batch)
    other = setup.batch([700, 300], [3000, 2000])
    check_layers("eager", setup, other, setup.attention.step(other).run)
    last = setup.batch([1] * 2 + [200], [40, 90, 500])
    assert graph.replay(last)
    graph.check("last", last)
