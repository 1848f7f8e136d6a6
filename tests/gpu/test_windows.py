# SPDX-License-Identifier: Apache-2.0
"""Windows, sinks and soft caps on a GPU against plain torch, at head sizes that models have; and engines with
several cache groups."""

from typing import NamedTuple

import pytest
import torch
from attending import Setup, StepGraph, check_decode_replays, check_eager_steps
from comparing import assert_close
from test_engine import DEVICE, SETTINGS, SIZES, make_prompts

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.attention.contract import Scores
from flashinfer_backend.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

BLOCKS, MAX_BLOCKS = 6000, 2000
SCALES = ((0.5, 0.25), (0.125, 2.0))


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    window: int | None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    in_fp8: bool = False


CASES = {
    "Mistral 7B": Case(32, 8, 128, 4096),
    "Gemma 3 12B": Case(16, 8, 256, 1024, scale=256**-0.5),
    "Gemma 2 9B": Case(16, 8, 256, 4096, scale=224**-0.5, soft_cap=50.0),
    "GPT-OSS, windows": Case(64, 8, 64, 128, sinks=True),
    "GPT-OSS, full": Case(64, 8, 64, None, sinks=True),
    "short window, e4m3": Case(32, 8, 128, 200, in_fp8=True),
    "sinks, e4m3": Case(64, 8, 64, 128, sinks=True, in_fp8=True),
    "all at once": Case(28, 4, 128, 77, scale=0.2, soft_cap=3.0, sinks=True),
}


def make_setup(name: str) -> Setup:
    """Blocks behind a window are block 0, which is all NaN."""
    case = CASES[name]
    sinks = torch.linspace(-4, 6, case.heads, device=DEVICE) if case.sinks else None
    return Setup(
        case.heads,
        case.kv_heads,
        dim=case.dim,
        blocks=BLOCKS,
        max_blocks=MAX_BLOCKS,
        scales=SCALES if case.in_fp8 else (),
        spoilt=True,
        window=case.window,
        scores=[Scores(case.scale or case.dim**-0.5, case.soft_cap, sinks)] * 2,
    )


STEPS = {
    "decode": ([1] * 24, [1, 15, 16, 17, 32, 100, 127, 128, 129, 400, 1023, 1024, 1025, 4095, 4096, 4097] * 1
               + [5, 77, 78, 199, 200, 201, 5000, 16000]),
    "decode of one": ([1], [30000]),
    "prefill": ([100, 17, 640], [100, 17, 640]),
    "long prefill": ([8192], [8192]),
    "chunks": ([512, 300, 77, 129], [1536, 4000, 30000, 5000]),
    "short chunk over a long prefix": ([5], [9000]),
    "mixed": ([1] * 9 + [300, 700, 2], [60, 900, 1, 16, 17, 3000, 5, 128, 129, 300, 6700, 34]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_eager_steps(name):
    check_eager_steps(make_setup(name), STEPS)


@pytest.mark.parametrize("backend", ["fa2", "fa3", "copied"])
@pytest.mark.parametrize("name", CASES)
def test_each_kernel_of_prompts(name, backend, monkeypatch):
    if backend == "fa3" and CASES[name].in_fp8:
        pytest.skip("FA3 reads copies of a cache of e4m3")
    setup = make_setup(name)
    monkeypatch.setattr(setup.attention, "choose_prefill", lambda *_: backend)
    q_lens, kv_lens = [100, 33, 640, 200], [100, 2000, 640, 9000]
    batch = setup.batch(q_lens, kv_lens)
    q = setup.query(sum(q_lens))
    out = torch.full_like(q, float("nan"))
    setup.attention.step(batch).run(1, q, out)
    assert_close(out, setup.expected(batch, 1, q))


@pytest.mark.parametrize("name", CASES)
def test_decode_graphs(name):
    check_decode_replays(make_setup(name), 24, [(24, 40), (24, 300), (24, 3000)])


@pytest.mark.parametrize("name", CASES)
def test_graphs_of_steps_with_prompts(name):
    setup = make_setup(name)
    graph, ran = StepGraph(setup, 320, 40), 0
    for q_lens, kv_lens in (
        ([100, 17, 200], [100, 17, 200]),
        ([1] * 40 + [250], [*range(1, 400, 10), 250]),
        ([1, 1] + [130, 60], [4000, 7, 130, 60]),
        ([1] * 5 + [150, 120], [33, 16, 17, 900, 5, 700, 400]),
        ([1] * 3 + [300], [5, 5000, 60, 2000]),
    ):
        batch = setup.batch(q_lens, kv_lens)
        if graph.replay(batch):
            ran += 1
            graph.check(f"{q_lens} of {kv_lens}", batch)
    assert ran >= 3


KINDS = {
    "mistral": {"sliding_window": 100},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 70,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.parametrize("graphs", ["none", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_give_the_best_tokens_beyond_their_windows(kind, graphs, tmp_path):
    """Judged as in test_engine; a second time from cached prefixes."""
    from test_engine import TOLERANCE, shortfalls

    folder = make_checkpoint(kind, tmp_path / "model", **SIZES, **KINDS[kind])
    params = SamplingParams(max_tokens=150, temperature=0.0)
    core = start_core(folder, **SETTINGS, max_seq_len=512, cuda_graph_batch_sizes=graphs)
    assert len(core.runner.state.groups) == (1 if kind == "mistral" else 2)
    assert (core.runner.graphs is None) == (graphs == "none")
    with serve(core, tmp_path / "run") as client:
        for _ in range(2):
            short = shortfalls(folder, client.generate(make_prompts(12), params))
            assert (short == 0).float().mean() > 0.9 and short.max() < TOLERANCE
    assert core.scheduler.prompt_tokens_reused > 0
