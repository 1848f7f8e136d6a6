# SPDX-License-Identifier: Apache-2.0
"""FlashInfer attention against plain torch over the same blocks."""

import numpy as np
import pytest
import torch
from attending import HEADS, MAX_SEQS, DecodeGraph, Setup, check_eager_steps, check_graphs
from comparing import assert_close

from flashinfer_backend.attention.contract import StepShape

pytestmark = pytest.mark.gpu

STEPS = {
    "decode of one": ([1], [77]),
    "decode": ([1] * 24, [1, 15, 16, 17, 32, 100, 255, 256, 257, 400, 33, 31] * 2),
    "decode of one length": ([1] * 40, [256] * 40),
    "skewed decode": ([1] * 16, [4000] + [50] * 15),
    "prefill": ([100, 17, 640], [100, 17, 640]),
    "long prefill": ([2048], [2048]),
    "chunked prefill": ([512, 300], [1536, 4000]),
    "short chunk over a long prefix": ([5], [4000]),
    "mixed": ([1] * 9 + [300, 700, 2], [60, 900, 1, 16, 17, 3000, 5, 128, 129, 300, 1700, 34]),
}


CASES = [(heads, kv_heads, backend) for backend in ("fa2", "triton", "auto") for heads, kv_heads in HEADS]


@pytest.mark.parametrize("heads, kv_heads, backend", CASES)
def test_eager_steps(heads, kv_heads, backend):
    check_eager_steps(Setup(heads, kv_heads, backend), STEPS)


@pytest.mark.parametrize("heads, kv_heads, backend", CASES)
def test_graph_replays_other_lengths_and_fewer_rows(heads, kv_heads, backend):
    check_graphs(Setup(heads, kv_heads, backend))


def test_long_prompts_take_copies():
    choose = Setup(32, 8).attention.choose_prefill
    for q_len, kv_len, expected in ((2048, 2048, "copied"), (600, 4000, "copied"), (150, 4000, "fa3")):
        assert choose(np.array([q_len], np.int32), np.array([kv_len], np.int32)) == expected
    assert Setup(32, 8, copied_blocks=0).attention.choose_prefill(*2 * [np.array([2048], np.int32)]) == "fa3"


@pytest.mark.parametrize("backend", ["fa3", "copied"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_prompt_does_not_see_what_another_has_broken(dim, backend):
    """Keys and values of the second prompt are NaN, which tiles of the first one's would reach."""
    setup = Setup(16, 4, dim=dim)
    setup.attention.choose_prefill = lambda *_: backend
    batch, q = setup.batch([700, 300], [700, 300]), setup.query(1000)
    expected = setup.expected(batch, 0, q)[:700]
    blocks = setup.table[int(batch.slots[1]), :19].long()
    for part in setup.attention.layers[0]:
        part[blocks] = torch.nan
    out = torch.zeros_like(q)
    setup.attention.step(batch).run(0, q, out)
    assert_close(out[:700], expected)
    assert out[700:].isnan().all()


def test_a_graph_sees_blocks_that_the_table_gets_after_the_plan():
    """A decode step's newest blocks are entered by the graph itself."""
    setup = Setup(32, 8, "triton")
    graph = DecodeGraph(setup, 9)
    assert graph.state.reads_block_table
    batch = setup.batch([1] * 9, [1, 17, 300, 4000, 16, 33, 64, 65, 999])
    table = setup.table.clone()
    setup.table.zero_()
    graph.plan(batch)
    setup.table.copy_(table)
    graph.graph.replay()
    assert_close(graph.out, setup.expected(batch, 0, graph.q))


def test_plans_do_not_overwrite_copies_in_flight():
    """Many steps planned while the GPU is still busy with the first: each must see its own lengths."""
    setup = Setup(32, 8, "fa2")
    rows, steps = 16, 12
    graph = DecodeGraph(setup, rows)
    batches, tables, queries = [], [], []
    for _ in range(steps):
        batches.append(setup.batch([1] * rows, setup.rng.integers(1, 240, rows).tolist()))
        tables.append(setup.table.clone())
        batches[-1].block_table = tables[-1]
        queries.append(setup.query(rows))
    expected = [setup.expected(batch, 0, q) for batch, q in zip(batches, queries, strict=True)]
    outs = [torch.full_like(q, float("nan")) for q in queries]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for batch, q, out in zip(batches, queries, outs, strict=True):
        graph.plan(batch)
        graph.state.run(0, q, out)
    for out, reference in zip(outs, expected, strict=True):
        assert_close(out, reference)


def test_refuses_what_it_cannot_do():
    setup = Setup(32, 8)
    with pytest.raises(ValueError, match="max_num_seqs"):
        setup.attention.captured(StepShape(MAX_SEQS + 1, MAX_SEQS + 1, 1), setup.table, setup.table[0])
    state = DecodeGraph(setup, 2).state
    for rows in (1, 3):
        with pytest.raises(ValueError, match="2 rows"):
            state.plan(setup.batch([1] * rows, [5, 6, 7][:rows]), np.empty(0, np.int32))
