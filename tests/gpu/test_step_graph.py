# SPDX-License-Identifier: Apache-2.0
"""Attention of whole mixed steps in a captured graph against plain torch."""

import numpy as np
import pytest
import torch
from test_attention import HEADS, LAYERS, Setup, assert_close
from test_fp8_cache import Setup as Fp8Setup

from flashinfer_backend.attention.contract import StepShape

pytestmark = pytest.mark.gpu

NO_WORDS = np.empty(0, np.int32)
CACHES = {"16 bits": Setup, "e4m3": Fp8Setup}

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


class Captured:
    def __init__(self, setup: Setup | Fp8Setup, tokens: int, decode_rows: int):
        self.setup, self.tokens = setup, tokens
        self.state = setup.attention.captured(
            StepShape(tokens, decode_rows, None), setup.table, torch.empty(0).cuda().int()
        )
        self.q, self.out = (torch.zeros(LAYERS, *setup.query(tokens).shape).cuda().bfloat16() for _ in "qo")
        self.graph = torch.cuda.CUDAGraph()
        self.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self):
        for layer in range(LAYERS):
            # As in a step: what writes q ends before attention starts.
            q = self.q[layer] * 1
            self.state.run(layer, q, self.out[layer])


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens", [64, 320])
@pytest.mark.parametrize("cache", CACHES)
def test_one_graph_for_steps_of_any_shape(cache, heads, kv_heads, tokens):
    setup = CACHES[cache](heads, kv_heads)
    captured = Captured(setup, tokens, 40)
    ran = 0
    for name, (q_lens, kv_lens) in list(STEPS.items()) * 2:
        if sum(q_lens) > tokens:
            continue
        batch = setup.batch(q_lens, kv_lens)
        if not captured.state.plan(batch, NO_WORDS):
            continue
        ran += 1
        captured.q.normal_()
        captured.out.fill_(float("nan"))
        captured.graph.replay()
        for layer in range(LAYERS):
            used = sum(q_lens)
            expected = setup.expected(batch, layer, captured.q[layer, :used])
            try:
                assert_close(captured.out[layer, :used], expected)
            except AssertionError as error:
                raise AssertionError(f"{name}, layer {layer}: {error}") from None
            assert captured.out[layer, used:].isnan().all(), name
    assert ran >= (14 if tokens == 320 else 2)


@pytest.mark.parametrize("cache", CACHES)
def test_refuses_what_it_cannot_do_and_goes_on(cache):
    setup = CACHES[cache](32, 8)
    captured = Captured(setup, 320, 40)
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
        assert not captured.state.plan(setup.batch(q_lens, kv_lens), NO_WORDS), name
    batch = setup.batch([1] * 3 + [90], [50, 60, 70, 90])
    assert captured.state.plan(batch, NO_WORDS)
    captured.q.normal_()
    captured.graph.replay()
    assert_close(captured.out[0, :93], setup.expected(batch, 0, captured.q[0, :93]))


def test_there_is_none_for_a_forced_decode_backend():
    setup = Setup(32, 8, "fa2")
    assert setup.attention.captured(StepShape(64, 40, None), setup.table, torch.empty(0).cuda().int()) is None


def test_over_e4m3_there_is_none_without_room_for_copies():
    setup = Fp8Setup(32, 8, copied_blocks=0)
    assert setup.attention.captured(StepShape(64, 40, None), setup.table, torch.empty(0).cuda().int()) is None


def test_eager_steps_and_graphs_share_the_copies():
    """Each step reads what it has copied itself."""
    setup = Fp8Setup(32, 8)
    captured = Captured(setup, 320, 40)
    batch = setup.batch([1] * 3 + [250], [50, 60, 70, 900])
    assert captured.state.plan(batch, NO_WORDS)
    captured.q.normal_()
    captured.graph.replay()
    in_graph = captured.out[:, :253].clone()
    expected = [setup.expected(batch, layer, captured.q[layer, :253]) for layer in range(LAYERS)]
    other = setup.batch([700, 300], [3000, 2000])
    setup.attention.step(other)
    q = setup.query(1000)
    eager = torch.full_like(q, float("nan"))
    setup.attention.run(1, q, eager)
    assert_close(eager, setup.expected(other, 1, q))
    for layer in range(LAYERS):
        assert_close(in_graph[layer], expected[layer])
    last = setup.batch([1] * 2 + [200], [40, 90, 500])
    assert captured.state.plan(last, NO_WORDS)
    captured.graph.replay()
    for layer in range(LAYERS):
        assert_close(captured.out[layer, :202], setup.expected(last, layer, captured.q[layer, :202]))
