# SPDX-License-Identifier: Apache-2.0
"""The reference operations that a model's parity with transformers does not pin down by itself, and
those around the model in a decode step."""

import pytest
import torch
from interpreted import interpreted

import step_inputs_cases
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.weight import Weight

MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_hash_bits_are_those_of_the_definition(seed):
    positions = [0, 1, 2**31 - 1]
    bits = torch_ops.sample_hash(torch.tensor([seed] * 3), torch.tensor(positions, dtype=torch.int32), 7)
    h = mix(mix(seed & MASK) ^ (seed >> 32 & MASK))
    assert bits.tolist() == [[mix(mix(h ^ position) ^ token) for token in range(7)] for position in positions]


def test_noise_is_finite_for_all_extreme_bits():
    noise = torch_ops.gumbel_noise(torch.tensor([0, 511, 512, 2**31, 2**32 - 512, 2**32 - 1]))
    assert bool(noise.isfinite().all())
    assert noise[-1] > 16 and noise[0] < -2.8


def rows(count: int, temperature: float, seed: int = 7):
    return (
        torch.full((count,), temperature),
        torch.full((count,), seed, dtype=torch.int64),
        torch.arange(count, dtype=torch.int32),
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature):
    count = 20000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    ids = torch_ops.sample(logits.expand(count, -1), *rows(count, temperature))
    expected = (logits / temperature).softmax(-1)
    frequency = ids.bincount(minlength=5) / count
    assert ids.dtype == torch.int32
    # Five standard deviations of a binomial frequency.
    assert bool(((frequency - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all())


def test_neighbouring_seeds_draw_independently():
    logits = torch.zeros(2000, 10)
    draws = [torch_ops.sample(logits, *rows(2000, 1.0, seed=seed)) for seed in (1, 2)]
    assert (draws[0] == draws[1]).float().mean().item() == pytest.approx(0.1, abs=0.035)


def test_a_row_samples_the_same_whatever_its_batch():
    logits = torch.randn(6, 300, generator=torch.manual_seed(0))
    temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 3.0, 1.0])
    seed = torch.tensor([3, 3, -9, 1, 5, 2**40])
    position = torch.tensor([0, 4, 9, 7, 4, 100], dtype=torch.int32)
    together = torch_ops.sample(logits, temperature, seed, position)
    order = torch.tensor([4, 2, 5, 0, 1, 3])
    permuted = torch_ops.sample(logits[order], temperature[order], seed[order], position[order])
    alone = [
        torch_ops.sample(*(x[i : i + 1] for x in (logits, temperature, seed, position))) for i in range(6)
    ]
    assert torch.equal(permuted, together[order])
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("other_temperature", [0.0, 1.0])
def test_greedy_takes_the_lowest_of_equal_ids(other_temperature):
    logits = torch.zeros(2, 50)
    logits[0, [9, 30, 49]] = 4.0
    temperature = torch.tensor([0.0, other_temperature])
    ids = torch_ops.sample(logits, temperature, torch.tensor([1, 1]), torch.tensor([0, 0], dtype=torch.int32))
    assert ids[0] == 9


def test_suppressed_logits_are_never_sampled():
    logits = torch.full((500, 8), -torch.inf)
    logits[:, 5] = -3.0
    for temperature in (0.0, 1.0):
        assert bool((torch_ops.sample(logits, *rows(500, temperature)) == 5).all())


def test_rms_norm_is_float32_inside():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # 300 squared is above float16's largest number
    normed = torch_ops.rms_norm(x, torch.full((4,), 2.0, dtype=torch.float16), 1e-5)
    assert normed.dtype == torch.float16
    assert normed.tolist() == [[2.0] * 4]


def test_store_touches_only_its_locations():
    generator = torch.manual_seed(0)
    k_cache, v_cache = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8)
    qkv = torch.randn(2, 4 * 8, generator=generator)
    table = torch.cat((torch.ones(9, 4), torch.zeros(9, 4)), dim=1)  # the identity rotation
    locations = torch.tensor([11, 2], dtype=torch.int32)
    positions = torch.tensor([8, 0], dtype=torch.int32)
    q = torch_ops.rope_and_store(
        qkv, positions, table, k_cache, v_cache, locations, None, None, 1e-6, num_heads=2, num_kv_heads=1
    )
    torch.testing.assert_close(q, qkv[:, :16].view(2, 2, 8))
    for cache, start in ((k_cache, 16), (v_cache, 24)):
        torch.testing.assert_close(cache.view(12, 8)[[11, 2]], qkv[:, start : start + 8])
        assert cache.view(12, 8).any(dim=1).nonzero().flatten().tolist() == [2, 11]


def test_a_router_decides_in_float32():
    """In bfloat16 both logits are 1."""
    router = Weight("", torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]]).bfloat16())
    gate_up = Weight("gate_up", torch.ones(2 * 2, 2).bfloat16())
    down = Weight("down", torch.tensor([[0.0], [0.0], [1.0], [1.0]]).bfloat16())  # the second expert's counts
    x = torch.ones(1, 2).bfloat16()
    mixture = torch_ops.Mixture(1, renormalise=True)
    logits = torch_ops.router_logits(x, router)
    found = torch_ops.experts_add(x, logits, gate_up, down, mixture, None)
    assert (found > 1).all()


TABLE = [[1, 2], [3, 4], [5, 6], [0, 0]]  # the last slot is that of padding


def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_slot(last_token: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch_ops.BySlot:
    return torch_ops.BySlot(last_token, lengths, torch.zeros(len(lengths), 0), table, 16)


def test_decodes_feed_the_last_tokens_of_their_slots():
    lengths, table = int32([3, 0, 17, 0]), int32(TABLE)
    found = torch_ops.step_inputs(int32([2, 0]), by_slot(int32([10, 11, 12, 13]), lengths, table))
    ids, positions, locations = (part.tolist() for part in found)
    assert (ids, positions, locations) == ([12, 10], [17, 3], [6 * 16 + 1, 1 * 16 + 3])
    assert lengths.tolist() == [4, 0, 18, 0] and table.tolist() == TABLE


def test_decodes_enter_new_blocks_into_the_block_table():
    lengths, table = int32([15, 16, 0, 0]), int32(TABLE)
    slots, blocks = int32([1, 0, 3, 3]), int32([9, -1, -1, -1])  # two rows of padding share a slot
    _, positions, locations = torch_ops.step_inputs(slots, by_slot(int32([0] * 4), lengths, table), blocks)
    assert positions.tolist() == [16, 15, 0, 0]
    assert locations.tolist() == [9 * 16, 1 * 16 + 15, 0, 0]
    assert table.tolist() == [[1, 2], [3, 9], [5, 6], [0, 0]]
    assert lengths.tolist() == [16, 17, 0, 0]


def test_prompts_feed_given_tokens_and_leave_their_lengths():
    lengths, table = int32([3, 99, 99, 0]), int32(TABLE)
    slots = int32([0, 2, 2, 2, 1, 3, 3])
    given = int32([0, 20, 21, 22, 30, 0, 0]), int32([0, 15, 16, 17, 4, 0, 0]), 1
    found = torch_ops.step_inputs(slots, by_slot(int32([10, 11, 12, 13]), lengths, table), given=given)
    ids, positions, locations = (part.tolist() for part in found)
    assert (ids, positions) == ([10, 20, 21, 22, 30, 0, 0], [3, 15, 16, 17, 4, 0, 0])
    assert locations == [19, 5 * 16 + 15, 6 * 16, 6 * 16 + 1, 3 * 16 + 4, 0, 0]
    assert lengths.tolist() == [4, 5, 18, 0]


def test_step_inputs_in_tritons_interpreter():
    interpreted(step_inputs_cases.__file__)


def test_sample_suppresses_a_token_and_records_the_choice():
    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0]])
    zeros = torch.zeros(2)
    last_token = torch.zeros(4, dtype=torch.int32)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    tokens = torch_ops.sample(
        logits,
        zeros,
        zeros.long(),
        zeros.int(),
        torch.tensor([1, -1], dtype=torch.int32),
        (last_token, slots),
    )
    assert tokens.tolist() == [2, 1]
    assert last_token.tolist() == [0, 1, 0, 2]
    assert logits[0, 1] == 3.0, "the caller's logits were changed"
