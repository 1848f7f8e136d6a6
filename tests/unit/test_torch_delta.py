# SPDX-License-Identifier: Apache-2.0
"""The operations of gated delta net layers against transformers' own, in float32, over any cut of the
tokens."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from flashinfer_backend.ops import torch_delta
from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 16, 24, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
SLOTS = 5
EPS = 1e-6
LENGTHS = [1, 1, 150, 64, 3]  # of rows, two of one token in front


def words(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(lengths: list[int]) -> Tensor:
    return words(0, *torch.tensor(lengths).cumsum(0).tolist())


def token_inputs(tokens: int) -> tuple[Tensor, ...]:
    """q, k, v, decay, beta of so many tokens. Every third key is nearly the one before, as in text that
    repeats itself."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = normal(tokens, KEY_HEADS, KEY_DIM), normal(tokens, KEY_HEADS, KEY_DIM)
    k[1::3] = k[0::3][: len(k[1::3])] + 0.01 * k[1::3]
    v = normal(tokens, VALUE_HEADS, VALUE_DIM)
    gates = normal(tokens, VALUE_HEADS), normal(tokens, VALUE_HEADS)
    decay, beta = torch_delta.delta_gates(*gates, normal(VALUE_HEADS), normal(VALUE_HEADS))
    return q, k, v, decay, beta


def recurrent(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' results [T, Hv, Dv] and state of one sequence, token by token."""
    batch = (x.unsqueeze(0) for x in inputs)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, last = reference.torch_recurrent_gated_delta_rule(*batch, initial_state=state[None], **options)
    return out[0], last[0]


def test_gates_are_those_of_the_reference() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(7, VALUE_HEADS) * 10, torch.randn(7, VALUE_HEADS)
    a_log, dt_bias = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    decay, beta = torch_delta.delta_gates(a.bfloat16(), b.bfloat16(), a_log, dt_bias)
    assert decay.dtype == beta.dtype == torch.float32
    expected = -a_log.exp() * torch.nn.functional.softplus(a.bfloat16().float() + dt_bias)
    torch.testing.assert_close(decay, expected)
    torch.testing.assert_close(beta, b.bfloat16().float().sigmoid())


@pytest.mark.parametrize("decodes", [0, 2])
def test_rows_of_any_length_compute_the_recurrence(decodes: int) -> None:
    """Each in its own slot and from its own state; other slots are left alone."""
    inputs = token_inputs(sum(LENGTHS))
    states = torch.randn(SLOTS + 2, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    slots, starts = words(3, 0, 5, 1, 6), starts_of(LENGTHS)
    before = states.clone()
    out = torch_delta.gated_delta_rule(*inputs, states, slots, starts, decodes)
    for row, slot in enumerate(slots.tolist()):
        own = slice(int(starts[row]), int(starts[row + 1]))
        expected, last = recurrent(tuple(x[own] for x in inputs), before[slot])
        torch.testing.assert_close(out[own], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot], last, rtol=1e-4, atol=1e-5)
    others = [slot for slot in range(len(states)) if slot not in slots.tolist()]
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("decodes", [0, 2])
def test_convolution_is_that_of_the_reference(decodes: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(sum(LENGTHS), CHANNELS), torch.randn(CHANNELS, WIDTH)
    conv_states = torch.randn(SLOTS + 2, CHANNELS, WIDTH - 1)
    slots, starts = words(3, 0, 5, 1, 6), starts_of(LENGTHS)
    before = conv_states.clone()
    out = torch_delta.causal_conv(x, weight, conv_states, slots, starts, decodes)
    for row, slot in enumerate(slots.tolist()):
        own = x[starts[row] : starts[row + 1]]
        state = before[slot : slot + 1].clone()
        expected = reference.causal_conv1d_update(own.t()[None], state, weight, activation="silu")[0].t()
        torch.testing.assert_close(out[starts[row] : starts[row + 1]], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(conv_states[slot], state[0])
    others = [slot for slot in range(len(before)) if slot not in slots.tolist()]
    assert torch.equal(conv_states[others], before[others])


def test_norm_is_that_of_the_reference() -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(7, VALUE_HEADS, VALUE_DIM), torch.randn(7, VALUE_HEADS, VALUE_DIM)
    norm = reference.Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-5)
    norm.weight.data = torch.rand(VALUE_DIM)
    torch.testing.assert_close(torch_delta.gated_norm(x, gate, norm.weight.data, 1e-5), norm(x, gate))
    x, gate, norm = x.bfloat16(), gate.bfloat16(), norm.bfloat16()
    found = torch_delta.gated_norm(x, gate, norm.weight.data, 1e-5)
    assert torch.equal(found, norm(x, gate))


def layer_weights() -> DeltaWeights:
    torch.manual_seed(1)
    gates = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    return DeltaWeights(torch.randn(CHANNELS, WIDTH), *gates, 1 + 0.1 * torch.randn(VALUE_DIM), EPS)


def layer_inputs(tokens: int, seed: int = 0) -> list[Tensor]:
    """qkv, z, a, b of tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = CHANNELS, VALUE_HEADS * VALUE_DIM, VALUE_HEADS, VALUE_HEADS
    return [torch.randn(tokens, size, generator=generator) for size in sizes]


def make_states(drafts: int = 0) -> DeltaStates:
    """With what a sequence must take no notice of."""
    kept = torch_delta.inputs_kept(WIDTH, drafts)
    inputs = torch.randn(SLOTS, kept, CHANNELS + 2 * VALUE_HEADS)
    return DeltaStates(torch.randn(SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), inputs)


def test_accepted_drafts_enter_the_state_and_others_leave_nothing() -> None:
    """Sequences in steps of their own lengths; behind a step some of a row's tokens turn out to be others."""
    weights, drafts, total = layer_weights(), 3, 60
    sequences = {slot: layer_inputs(total, slot) for slot in (0, 2, 3)}
    expected, end_states, states = {}, {}, make_states()
    for slot, inputs in sequences.items():
        rows = DeltaRows(words(slot), words(0, total), words(0), None, 0)
        expected[slot] = torch_delta.delta_net(*inputs, weights, states, rows)
        end_states[slot] = states.recurrent[slot].clone()
    generator = torch.Generator().manual_seed(0)
    states, in_state = make_states(drafts), torch.full((SLOTS,), 99, dtype=torch.int32)
    position = {0: 0, 2: 0, 3: 0}
    for step in range(200):
        # Prompts in chunks up to here, one row behind those that decode.
        order = sorted(position, key=lambda slot: position[slot] < 9 * slot)
        order = [slot for slot in order if position[slot] < total]
        if not order:
            break
        decodes = sum(position[slot] >= 9 * slot for slot in order)
        lengths, right, given = [], [], []
        for slot in order:
            start = position[slot]
            if start < 9 * slot:
                length = good = min(1 + step % 7, 9 * slot - start)
            else:
                length = min(1 + int(torch.randint(0, drafts + 1, (), generator=generator)), total - start)
                good = 1 + int(torch.randint(0, length, (), generator=generator))
            wrong = layer_inputs(length - good, 1000 + step)
            own = [x[start : start + good] for x in sequences[slot]]
            given.append([torch.cat(pair) for pair in zip(own, wrong, strict=True)])
            lengths.append(length)
            right.append(good)
        slots, starts, first = words(*order), starts_of(lengths), words(*(position[slot] for slot in order))
        held = torch_delta.count_held(in_state, slots, starts, first, decodes)
        inputs = [torch.cat(parts) for parts in zip(*given, strict=True)]
        rows = DeltaRows(slots, starts, first, held, decodes)
        out = torch_delta.delta_net(*inputs, weights, states, rows)
        for row, slot in enumerate(order):
            own, start = out[starts[row] :][: right[row]], position[slot]
            torch.testing.assert_close(own, expected[slot][start:][: right[row]], rtol=1e-4, atol=1e-4)
            position[slot] += right[row]
    assert set(position.values()) == {total}
    # What is held enters with the next token, whatever that is.
    slots, first = words(0, 2, 3), words(total, total, total)
    held = torch_delta.count_held(in_state, slots, words(0, 1, 2, 3), first, 3)
    assert held.max() > 1
    rows = DeltaRows(slots, words(0, 1, 2, 3), first, held, 3)
    torch_delta.delta_net(*layer_inputs(3), weights, states, rows)
    for slot, state in end_states.items():
        torch.testing.assert_close(states.recurrent[slot], state, rtol=1e-4, atol=1e-5)
