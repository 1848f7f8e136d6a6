# SPDX-License-Identifier: Apache-2.0
"""Drafts on a GPU: attention of several tokens a row, what surrounds it, and an engine with all of it in
graphs.

16 bits round otherwise in steps of several tokens a row, so tokens are judged as in test_engine.py: each by
how far its logit is below the best one, in the context that was really produced.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attending import BLOCK_SIZE, DIM, random_cache
from comparing import capture
from test_engine import SETTINGS, SIZES, TOLERANCE, make_prompts, shortfalls
from test_triton_drafts import check_likeliest, check_ngrams, check_norms, check_places_ahead, check_step

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from engine.test_drafts import Replay
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import StepShape
from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops.weight import Weight

pytestmark = pytest.mark.gpu

LENGTHS = [4, 77, 1000, 4097, 9, 300, 64, 2050]


class Rows:
    """Rows of up to `feeds` query tokens over a cache, for which the host plans more keys than there are.
    Blocks behind a window are NaN."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        feeds: int,
        in_e4m3: bool,
        window: int | None = None,
        dim: int = DIM,
        rows: int = len(LENGTHS),
    ) -> None:
        torch.manual_seed(0)
        self.heads, self.feeds, self.window = heads, feeds, window
        self.fed = np.array([feeds - i % feeds for i in range(rows)], np.int32)
        self.lens = np.array([max(length, feeds) for length in LENGTHS[:rows]], np.int32)
        self.planned = self.lens + np.array([2 * feeds, 0, feeds, 1, 2 * feeds, 3, feeds, 0], np.int32)[:rows]
        self.slots = np.arange(rows, dtype=np.int32)[::-1].copy()
        columns = -(-int(self.planned.max()) // BLOCK_SIZE)
        blocks = torch.randperm(rows * columns) + 1
        self.table = torch.zeros(rows + 1, columns, dtype=torch.int32, device="cuda")
        self.table[:rows] = blocks.view(rows, columns)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        self.lengths[torch.from_numpy(self.slots).long().cuda()] = torch.from_numpy(self.lens).cuda()
        shape = (rows * columns + 1, BLOCK_SIZE, kv_heads, dim)
        scales = ((0.5, 0.25),) if in_e4m3 else ()
        cache, self.wide = random_cache(1, shape, scales, torch.float64, spoilt=window is not None)
        if window is not None:
            for slot, length, fed in zip(self.slots, self.lens, self.fed, strict=True):
                self.table[int(slot), : max(0, int(length - fed) - window + 1) // BLOCK_SIZE] = 0
        self.attention = FlashInferAttention(
            cache,
            heads,
            rows,
            columns,
            dtype=torch.bfloat16,
            most_drafts=lambda rows: feeds,
            window=window,
        )

    def batch(self, **changes: Any) -> AttentionBatch:
        given = {"q_lens": self.fed, "kv_lens": self.planned, "slots": self.slots, "block_table": self.table}
        return AttentionBatch(**(given | changes))

    def check(self, q: torch.Tensor, out: torch.Tensor, first: np.ndarray, more: int = 0) -> None:
        """Each row's own queries, which begin at `first`, against plain torch in float64."""
        reference = TorchPagedAttention(self.wide, self.heads, self.window)
        fed = self.fed if more == 0 else np.ones_like(self.fed)
        for row, (start, count) in enumerate(zip(first.tolist(), fed.tolist(), strict=True)):
            one, own = slice(row, row + 1), slice(start, start + count)
            expected = torch.empty_like(q[own]).double()
            lens = self.lens[one] + np.int32(more)
            reference.step(AttentionBatch(fed[one], lens, self.slots[one], self.table))
            reference.run(0, q[own].double(), expected)
            error = (out[own].double() - expected).norm() / expected.norm()
            assert error < 1e-2, f"row {row} of {count} queries over {self.lens[row]}: {error:.3f}"


@pytest.mark.parametrize("in_e4m3", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "dim", "count"),
    [
        (8, 8, None, 128, 8), (32, 8, None, 128, 8), (32, 4, None, 128, 8), (14, 2, None, 128, 8),
        (32, 2, None, 128, 8), (32, 8, 200, 128, 8), (8, 8, 3, 128, 8), (32, 2, 200, 128, 8),
        (16, 2, None, 256, 8), (24, 4, 200, 256, 8),
        # Of few rows a program has one token.
        (16, 2, None, 256, 1), (32, 4, None, 128, 4), (24, 4, 200, 256, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("feeds", [2, 4, 6])
def test_several_queries_a_row(
    feeds: int, heads: int, kv_heads: int, window: int | None, dim: int, count: int, in_e4m3: bool
) -> None:
    """Launched one by one, where rows have as many as they feed, and in a graph, where they are padded."""
    rows = Rows(heads, kv_heads, feeds, in_e4m3, window, dim, count)
    q = torch.randn(int(rows.fed.sum()), heads, dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    rows.attention.step(rows.batch(lengths=rows.lengths, drafted=feeds)).run(0, q, out)
    rows.check(q, out, np.cumsum(rows.fed) - rows.fed)

    shape = StepShape(count * feeds, count, feeds)
    words = torch.zeros(rows.attention.graph_words(shape), dtype=torch.int32, device="cuda")
    state = rows.attention.captured(shape, rows.table, words, rows.lengths)
    assert state is not None
    host = np.zeros(len(words), np.int32)
    assert state.plan(rows.batch(), host)
    words.copy_(torch.from_numpy(host))
    q = torch.randn(shape.tokens, heads, dim, device="cuda").bfloat16()
    out, behind = torch.empty_like(q), torch.empty_like(q[:count])
    ahead = state.ahead(0, rows.lengths)

    def run() -> None:
        state.run(0, q, out)
        ahead.run(0, q[:count], behind)

    graph, _ = capture(run)
    out.fill_(math.nan)
    graph.replay()
    assert out.isfinite().all()
    rows.check(q, out, np.arange(count) * feeds)
    rows.fed = np.ones_like(rows.fed)
    rows.check(q[:count], behind, np.arange(count))


def test_one_query_a_row_ends_where_the_device_says() -> None:
    rows = Rows(32, 8, 1, False)
    q = torch.randn(len(LENGTHS), 32, DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    rows.attention.step(rows.batch(lengths=rows.lengths)).run(0, q, out)
    rows.check(q, out, np.arange(len(LENGTHS)))


@pytest.mark.parametrize("feeds", [2, 4, 6])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_kernels_of_a_step(rows: int, feeds: int) -> None:
    check_step(rows, feeds, "cuda")


def test_ngrams_are_looked_up() -> None:
    check_ngrams("cuda")


def test_heads_get_places_and_choose_tokens() -> None:
    check_places_ahead("cuda")
    check_likeliest("cuda")
    check_norms("cuda")


@pytest.mark.parametrize("tokens", [1, 4, 16, 17, 64])
def test_a_copy_for_drafts_multiplies_nearly_as_the_weight_does(tokens: int) -> None:
    """Against float64. Rounding the copy and x to e4m3 gives errors of some 3.8 % of a product's usual size;
    a scale of another row, or a row left out, gives larger ones."""
    from flashinfer_backend.ops import cuda_ops  # wants FlashInfer

    torch.manual_seed(0)
    rows = 20480 + 160  # one whole part and one that is not
    data = torch.randn(rows, 2048, device="cuda") * torch.logspace(-1, 1, rows, device="cuda")[:, None]
    weight = Weight("head", data.bfloat16())
    copy = cuda_ops.for_drafts(weight)
    assert copy is not None
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()
    expected = x.double() @ weight.data.double().T
    usual = x.double().norm(dim=1)[:, None] * weight.data.double().norm(dim=1) / math.sqrt(2048)
    for used, median, most in ((copy, 0.04, 0.3), (weight, 0.004, 0.03)):
        found = cuda_ops.linear(x, used)
        error = (found.double() - expected).abs() / usual
        assert found.shape == expected.shape
        assert error.median() < median and error.max() < most


@pytest.mark.parametrize("spoilt", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("graphs", ["auto", "none"])
@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype"), [("llama", "auto"), ("llama", "fp8_e4m3"), ("qwen3", "auto")]
)
def test_tokens_are_the_best_with_drafts(
    kind: str, kv_cache_dtype: str, graphs: str, spoilt: float, tmp_path: Path
) -> None:
    """Right, mixed and wrong drafts: as good as without, in fewer steps where they are right. Qwen 3 with a
    window in one layer, which ends amid prompts."""
    windows: dict[str, Any] = {}
    if kind == "qwen3":
        kinds = ["sliding_attention", "full_attention"]
        windows = {"use_sliding_window": True, "sliding_window": 21, "layer_types": kinds}
    folder = make_checkpoint(kind, tmp_path / "model", **SIZES, **windows)
    params = [SamplingParams(max_tokens=32 + i, temperature=0.0) for i in range(12)]
    prompts, settings = make_prompts(12), SETTINGS | {"kv_cache_dtype": kv_cache_dtype}
    core = start_core(folder, **settings)
    with serve(core, tmp_path / "without") as client:
        plain = client.generate(prompts, params)
    sequences = [p + tokens for p, tokens in zip(prompts, plain, strict=True)]
    proposer = OnDevice(3, spoilt, sequences)
    core = start_core(folder, proposer=proposer, cuda_graph_batch_sizes=graphs, **settings)
    with serve(core, tmp_path / "with") as client:
        found = client.generate(prompts, params)
    # Behind a near tie that fell the other way the drafts of a sequence are wrong.
    right = sum(a == b for a, b in zip(plain, found, strict=True))
    scheduler = core.scheduler
    assert spoilt or scheduler.accepted_tokens >= 0.6 * 32 * right > 0, (scheduler.drafted_tokens, right)
    if kv_cache_dtype == "auto":
        short = shortfalls(folder, found)
        assert (short == 0).float().mean() > 0.9 and short.max() < TOLERANCE
    else:  # the cache rounds more than the comparison allows: most sequences are the same for long
        same = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
                for pair in zip(found, plain, strict=True)]  # fmt: skip
        assert np.mean(same) > 16, same


class OnDevice(Replay):
    """Looks its sequences up on the device: by the last two tokens, which the prompts and answers of this
    test have once or nearly so."""

    history = True

    def __init__(self, count: int, spoilt: float, sequences: list[list[int]]) -> None:
        super().__init__(count, spoilt)
        most = max(map(len, sequences)) + count + 1
        padded = [tokens + [0] * (most - len(tokens)) for tokens in sequences]
        self._known = torch.tensor(padded, dtype=torch.int32, device="cuda")

    def propose(self, step: Any, state: Any, count: int) -> torch.Tensor:
        slots = step.sample_slots.long()
        length = state.lengths[slots].long().clamp(max=self._known.shape[1] - self.count - 1)
        begin = state.tokens[slots, :1] == self._known[None, :, 0]
        last = state.last_token[slots][:, None] == self._known[:, length].T
        row = (begin & last).int().argmax(1)
        places = length[:, None] + 1 + torch.arange(count, device="cuda")
        drafts = self._known[row[:, None], places]
        if not self.spoilt:
            return drafts
        wrong = (drafts * 7 + places) % 10 < self.spoilt * 10
        return torch.where(wrong, (drafts + 1) % 250, drafts)
