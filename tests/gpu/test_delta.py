# SPDX-License-Identifier: Apache-2.0
"""The kernels of gated delta net layers on a GPU, at models' shapes, against plain torch in float32; and in a
CUDA graph."""

import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashinfer_backend.ops import delta_rows, torch_delta
from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights, Pending

sys.path += [str(Path(__file__).parents[n] / name) for n, name in ((1, "unit"), (2, "perf_configs/kernels"))]
from test_triton_delta import (
    CASES,
    WIDTH,
    Case,
    Sizes,
    check,
    inputs_of,
    nothing_pending,
    settled,
    split_inputs,
)

pytestmark = pytest.mark.gpu
QWEN = Sizes(16, 32, 128)  # Qwen3-Next-80B-A3B, Qwen3.5-9B, 35B-A3B
LARGE = [
    Case(QWEN, [1], 1),
    Case(QWEN, [1] * 67, 67),
    Case(QWEN, [1, 1, 1500, 64, 65, 3, 129], 2),
    Case(QWEN, [1, 1, 1, 300, 2, 64], 3, padding=40),
    Case(Sizes(16, 48, 128), [3, 1, 90], 2, 2, padding=9),
    Case(QWEN, [2] * 150, 0),  # more rows than the smaller kernels look through
    Case(QWEN, [4, 1, 3, 200, 7], 3, 3),
    Case(QWEN, [3] * 40, 40, 4),
    Case(QWEN, [8, 1, 5, 8, 100], 4, 7),
    Case(QWEN, [10, 2, 9], 3, 9),  # more drafts than the kernel for Hopper takes
    Case(Sizes(16, 48, 128), [1, 200], 1),  # 27B
    Case(Sizes(16, 48, 128), [2, 3], 2, 2),
    Case(Sizes(8, 16, 128), [1, 1, 300], 2),  # a rank of two
    Case(Sizes(16, 64, 128), [1, 100], 1),  # 122B-A10B
    Case(Sizes(2, 6, 128), [1, 1, 1, 70], 3, padding=1),  # 27B on a rank of eight
]


@pytest.fixture(params=["cuda", "triton"])
def decode_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel for Hopper, where it takes a case, and without."""
    if request.param == "triton":
        monkeypatch.setattr(delta_rows, "takes", lambda weights, states: False)
    elif torch.cuda.get_device_capability() == (9, 0):
        assert delta_rows.module(torch.device("cuda", 0)) is not None


@pytest.mark.usefixtures("decode_rows")
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_compute_what_torch_does(case: Case, dtype: torch.dtype) -> None:
    check(case, "cuda", dtype)


def words(*values: int, where: str = "cuda") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=where)


def pending_of(ops: ModuleType, sizes: Sizes, slots: int, where: str) -> Pending | None:
    """Of slots whose sequences begin."""
    if not ops.MOST_PENDING:
        return None
    return Pending(*(x.to(where) for x in nothing_pending(sizes, slots, ops.MOST_PENDING)))


def long_row_errors(
    tokens: int, heads: int, spread: float, slowest: float, where: str, dtype: torch.dtype
) -> list[float]:
    """Relative errors of the results and the state of one row. Its keys differ by `spread`; a head loses some
    `slowest` of its state with each token. Plain torch rounds what it convolved as the kernels do: rounding
    hides much of what little such keys differ by."""
    from flashinfer_backend.ops import triton_delta

    torch.manual_seed(0)
    dim, channels = 128, 3 * heads * 128
    qkv = torch.randn(tokens, 3, heads, dim, device=where)
    qkv[:, 1] = torch.randn(heads, dim, device=where) + spread * qkv[:, 1]
    z, (a, b) = torch.randn(tokens, heads * dim, device=where), torch.randn(2, tokens, heads, device=where)
    inputs = [x.to(dtype) for x in (qkv.flatten(1), z, a, b)]
    last_tap = torch.zeros(channels, WIDTH, device=where)
    last_tap[:, -1] = 1
    gates = torch.full((heads,), math.log(slowest), device=where), torch.zeros(heads, device=where)
    own, results = torch.ones(dim, device=where), []
    rows = DeltaRows(*(words(*each, where=where) for each in ([0], [0, tokens], [0])), None, 0)
    weights = DeltaWeights(last_tap.to(dtype), *gates, own.to(dtype), 1e-6)
    for ops in (torch_delta, triton_delta):
        recurrent = torch.zeros(1, heads, dim, dim, device=where)
        kept = torch.zeros(1, WIDTH, channels + 2 * heads, dtype=dtype, device=where)
        states = DeltaStates(recurrent, kept, pending_of(ops, Sizes(heads, heads, dim), 1, where))
        results.append((ops.delta_net(*inputs, weights, states, rows).float(), recurrent))
    return [float((found - exact).norm() / exact.norm()) for exact, found in zip(*results, strict=True)]


@pytest.mark.usefixtures("decode_rows")
@pytest.mark.parametrize("rows", [1, 9])
def test_states_are_written_once_in_many_steps(rows: int) -> None:
    check(Case(Sizes(16, 48, 128), [1] * rows + [40], rows, padding=2), "cuda", torch.bfloat16, 11)


@pytest.mark.usefixtures("decode_rows")
def test_padding_of_decode_rows_shares_a_slot() -> None:
    """At position 0: the other rows' results are as without it."""
    from flashinfer_backend.ops import triton_delta

    sizes, rows = QWEN, 6
    parts = split_inputs(sizes, inputs_of(sizes, rows, torch.Generator().manual_seed(0)).cuda().bfloat16())
    conv, zeros = torch.ones(sizes.channels, WIDTH).cuda().bfloat16(), torch.zeros(sizes.value_heads).cuda()
    weights = DeltaWeights(conv, zeros, zeros, torch.ones(sizes.dim).cuda().bfloat16(), 1e-6)
    results = []
    for count in (2, rows):
        state = torch.ones(4, sizes.value_heads, sizes.dim, sizes.dim).cuda()
        inputs = torch.ones(4, WIDTH, sizes.channels + 2 * sizes.value_heads).cuda().bfloat16()
        states = DeltaStates(state, inputs, pending_of(triton_delta, sizes, 4, "cuda"))
        assert states.pending is not None
        states.pending.begun[:2] = 24
        given = words(0, 1, 3, 3, 3, 3), words(*range(rows + 1)), words(24, 24, 0, 0, 0, 0)
        slots, starts, first = (x[:n] for x, n in zip(given, (count, count + 1, count), strict=True))
        for _ in range(9):
            own = DeltaRows(slots, starts, first, None, count)
            out = triton_delta.delta_net(*(x[:count] for x in parts), weights, states, own)
            first[:2] += 1
        results.append((out[:2].clone(), state[:2]))
    for alone, found in zip(*results, strict=True):
        assert torch.equal(alone, found)


def test_hopper_has_a_kernel_for_decode_rows() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    assert delta_rows.module(torch.device("cuda", 0)) is not None


@pytest.mark.parametrize(("spread", "slowest"), [(1.0, 0.01), (0.03, 0.01), (0.03, 1e-6)])
def test_long_rows_keep_their_states_right(spread: float, slowest: float) -> None:
    """Errors do not add up over many chunks, nor where all keys are nearly the same."""
    errors = long_row_errors(8192, 4, spread, slowest, "cuda", torch.bfloat16)
    assert max(errors) < 3e-2, errors


@pytest.mark.usefixtures("decode_rows")
@pytest.mark.parametrize("drafts", [0, 3])
def test_decode_steps_are_graphs(drafts: int) -> None:
    """Replayed, a graph goes on from the states that it left. With drafts, some of them enter the state."""
    from flashinfer_backend.ops import triton_delta

    sizes, rows = QWEN, 5
    tokens, heads = rows * (1 + drafts), sizes.value_heads
    generator = torch.Generator().manual_seed(0)
    parts = split_inputs(sizes, inputs_of(sizes, tokens, generator).cuda().bfloat16())
    conv = torch.randn(sizes.channels, WIDTH, generator=generator).cuda().bfloat16()
    zeros, norm = torch.zeros(heads, device="cuda"), torch.ones(sizes.dim, device="cuda").bfloat16()
    weights = DeltaWeights(conv, zeros, zeros, norm, 1e-6)
    kept = torch_delta.inputs_kept(WIDTH, drafts)
    states = DeltaStates(
        torch.zeros(7, heads, sizes.dim, sizes.dim, device="cuda"),
        torch.zeros(7, kept, sizes.channels + 2 * heads, device="cuda").bfloat16(),
        None if drafts else pending_of(triton_delta, sizes, 7, "cuda"),
    )
    kept = [*states[:2], *(states.pending or ())]
    for tensor in kept:
        tensor.zero_()
    slots, first, in_state = words(3, 0, 6, 1, 5), words(0, 0, 0, 0, 0), words(*[0] * 7)
    starts, accepted = words(*range(0, tokens + 1, 1 + drafts)), words(1, 1 + drafts, 1, 1 + drafts // 2, 1)

    def step() -> torch.Tensor:
        held = torch_delta.count_held(in_state, slots, starts, first, rows) if drafts else None
        out = triton_delta.delta_net(*parts, weights, states, DeltaRows(slots, starts, first, held, rows))
        first.add_(accepted)
        return out

    expected = [step().clone() for _ in range(11)]
    assert not torch.equal(expected[2], expected[3])
    behind = [tensor.clone() for tensor in kept]
    assert behind[0][slots].any()
    for tensor in (*kept, first, in_state):
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for wanted in expected:
        graph.replay()
        assert torch.equal(found, wanted)
    used = slots.long()
    for tensor, wanted in zip(kept, behind, strict=True):
        assert torch.equal(tensor[used], wanted[used])


@pytest.mark.parametrize(("lengths", "decodes"), [([1] * 5, 5), ([4] * 3, 3), ([70, 300, 64], 0)], ids=str)
def test_kernels_compute_what_flashinfer_does(lengths: list[int], decodes: int) -> None:
    """Where the convolution passes its last input alone."""
    pytest.importorskip("flashinfer")
    pytest.importorskip("cutlass", reason="FlashInfer's delta nets need nvidia-cutlass-dsl")
    from bench_delta import flashinfer_rule

    from flashinfer_backend.ops import triton_delta

    torch.manual_seed(0)
    rows, tokens, heads, dim, channels = len(lengths), sum(lengths), 32, 128, QWEN.channels
    drafts = lengths[0] - 1 if decodes else 0
    qkv, z = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (channels, heads * dim))
    a, b = torch.randn(2, tokens, heads, device="cuda").bfloat16()
    last_tap = torch.zeros(channels, WIDTH, device="cuda").bfloat16()
    last_tap[:, -1] = 1
    a_log, dt_bias = torch.randn(2, heads, device="cuda")
    weights = DeltaWeights(last_tap, a_log, dt_bias, torch.ones(dim, device="cuda").bfloat16(), 1e-6)
    before = 0.1 * torch.randn(rows, heads, dim, dim, device="cuda")
    kept = torch_delta.inputs_kept(WIDTH, drafts)
    inputs = torch.zeros(rows, kept, channels + 2 * heads, device="cuda").bfloat16()
    pending = None if drafts else pending_of(triton_delta, QWEN, rows, "cuda")
    if pending is not None:
        pending.begun.fill_(100)
    states = DeltaStates(before.clone(), inputs, pending)
    starts = [sum(lengths[:row]) for row in range(rows + 1)]
    held = words(*[0] * rows) if drafts else None
    given = DeltaRows(words(*range(rows)), words(*starts), words(*[100] * rows), held, decodes)
    found = triton_delta.delta_net(qkv, z, a, b, weights, states, given)
    convolved = torch.nn.functional.silu(qkv.float()).bfloat16().unflatten(-1, (-1, dim))
    q, k, v = (x.contiguous() for x in convolved.split([16, 16, heads], dim=1))
    results, behind = flashinfer_rule(q, k, v, a, b, a_log, dt_bias, before, lengths, decodes > 0)()
    exact = torch_delta.gated_norm(results, z.view_as(results), weights.norm, weights.eps).flatten(1)
    states_behind = settled(states, given.slots, given.first + torch.tensor(lengths, device="cuda"))
    pairs = [(found, exact)] if drafts else [(found, exact), (states_behind, behind)]
    for own, theirs in pairs:
        error = (own.float() - theirs.float()).norm() / theirs.float().norm()
        assert float(error) < 2e-2, error
