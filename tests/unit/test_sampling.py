# SPDX-License-Identifier: Apache-2.0
"""Filters, processors and token history against transformers' logits processors and plain definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.staging import StagingRing
from flashinfer_backend.sampling import processors
from flashinfer_backend.sampling.filters import min_p_mask, top_k_top_p_mask
from flashinfer_backend.sampling.history import TokenHistory
from flashinfer_backend.sampling.logprobs import log_probs, logits_problem
from flashinfer_backend.sampling.rows import ProcessedRows, upload
from flashinfer_backend.sampling.state import SequenceState, StatefulRow

VOCAB = 101
NEVER = float("-inf")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_history(*sequences: list[int]) -> TokenHistory:
    cpu = torch.device("cpu")
    history = TokenHistory(len(sequences) + 2, 64, cpu, StagingRing(64, cpu))
    history.restore([(slot, np.array(ids, np.int32)) for slot, ids in enumerate(sequences)])
    return history


@pytest.mark.parametrize("top_k", [1, 5, 50, VOCAB])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_filters_keep_what_transformers_keeps(top_k, top_p):
    logits = torch.randn(8, VOCAB) * 3
    expected = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    kept = top_k_top_p_mask(logits, torch.full((8,), top_k), torch.full((8,), top_p))
    assert torch.equal(kept, expected > NEVER)


def test_filters_are_per_row_and_keep_ties():
    logits = torch.tensor([[4.0, 3.0, 3.0, 1.0], [4.0, 3.0, 2.0, 1.0], [9.0, 9.0, 9.0, NEVER]])
    kept = top_k_top_p_mask(logits, torch.tensor([2, 4, 3]), torch.tensor([1.0, 0.7, 0.01]))
    assert kept.tolist() == [[True, True, True, False], [True, True, False, False], [True, True, True, False]]


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p):
    logits = torch.randn(8, VOCAB) * 3
    expected = MinPLogitsWarper(min_p)(None, logits)
    assert torch.equal(min_p_mask(logits, torch.full((8,), min_p)), expected > NEVER)


def test_top_p_of_one_keeps_what_rounding_would_cut():
    logits = torch.cat([torch.zeros(1, 1), torch.full((1, 5000), -18.0)], dim=1)
    assert top_k_top_p_mask(logits, torch.tensor([5001]), torch.ones(1)).all()


def penalties(*rows: tuple[int, int, int, float, float, float]) -> torch_ops.Penalties:
    kinds = [torch.int64, torch.int64, torch.int32, torch.float32, torch.float32, torch.float32]
    columns = zip(zip(*rows, strict=True), kinds, strict=True)
    return torch_ops.Penalties(*(torch.tensor(column, dtype=kind) for column, kind in columns))


def test_repetition_penalty_equals_transformers():
    sequences = [[1, 2, 2, 3], list(range(40, 80)), [100]]
    history = make_history(*sequences)
    logits = torch.randn(4, VOCAB)
    own = logits.clone()
    rows, slots, factors = [3, 0, 1], [1, 0, 2], [1.7, 0.6, 1.2]
    of = penalties(*((r, s, 0, f, 0.0, 0.0) for r, s, f in zip(rows, slots, factors, strict=True)))
    torch_ops.penalise(own, of, history.tokens, torch.tensor([4, 1, 0, 40], dtype=torch.int32))
    for row, slot, factor in zip(rows, slots, factors, strict=True):
        ids = torch.tensor([sequences[slot]])
        expected = RepetitionPenaltyLogitsProcessor(factor)(ids, logits[row : row + 1])
        torch.testing.assert_close(own[row : row + 1], expected)
    assert torch.equal(own[2], logits[2])


def test_presence_and_frequency_count_generated_tokens_only():
    history = make_history([5, 6, 7, 7, 8], [5, 5, 5])
    own = torch.zeros(2, VOCAB)
    of = penalties((0, 0, 2, 1.0, 0.5, 0.25), (1, 1, 3, 1.0, 9.0, 9.0))
    torch_ops.penalise(own, of, history.tokens, torch.tensor([5, 3], dtype=torch.int32))
    expected = torch.zeros(2, VOCAB)
    expected[0, 7], expected[0, 8] = -(0.5 + 2 * 0.25), -(0.5 + 0.25)
    torch.testing.assert_close(own, expected)


def bad_words(*words: list[list[int]], late: list[list[int]] | None = None) -> processors.BadWords:
    """Those of sequences in slots 0, 1, ...; late: their late ids, where they have not come to min_tokens."""
    rows = []
    for slot, (each, ids) in enumerate(zip(words, late or [[]] * len(words), strict=True)):
        params = SamplingParams(max_tokens=9, bad_words=each, late_ids=ids)
        state = SequenceState(slot + 1, params, 0, None, slot)
        rows.append(StatefulRow(slot, slot, slot, state, -1, bool(ids)))
    count = len(rows)
    plan = SimpleNamespace(
        temperature=np.zeros(count, np.float32), seed=np.zeros(count, np.uint64), samples=np.ones(count, bool)
    )
    cpu = torch.device("cpu")
    found = ProcessedRows(rows, plan, VOCAB, StagingRing(64, cpu)).words
    assert found is not None
    return found


def test_bad_words_equal_transformers():
    sequences = [[1, 2, 3], [3], [9, 1, 2, 3]]
    words = [
        [[3, 4], [2, 3, 5], [7]],
        [[2, 3, 6], [3, 6], [3, 3, 7], [50, 60, 3, 6]],
        [[1, 2, 4], [8, 2, 3, 4], [3, 4]],
    ]
    history = make_history(*sequences)
    logits = torch.randn(3, VOCAB)
    own = logits.clone()
    position = torch.tensor([len(s) for s in sequences], dtype=torch.int32)
    processors.mask_bad_words(own, bad_words(*words), history.tokens, position)
    for i, (ids, each) in enumerate(zip(sequences, words, strict=True)):
        fresh = NoBadWordsLogitsProcessor(each, eos_token_id=[])
        assert torch.equal(own[i : i + 1], fresh(torch.tensor([ids]), logits[i : i + 1]))


def test_bad_words_of_one_token_need_no_history():
    own = torch.zeros(2, VOCAB)
    position = torch.tensor([1, 1], dtype=torch.int32)
    processors.mask_bad_words(own, bad_words([], [[4], [8]]), None, position)
    assert (own == NEVER).nonzero().tolist() == [[1, 4], [1, 8]]


def test_late_ids_stand_beside_bad_words_until_min_tokens():
    own = torch.zeros(3, VOCAB)
    position = torch.tensor([1, 1, 2], dtype=torch.int32)
    history = make_history([6], [6], [6, 5])
    words = bad_words([[4]], [], [[6, 5, 9], []], late=[[], [3, 4], [7]])
    processors.mask_bad_words(own, words, history.tokens, position)
    assert (own == NEVER).nonzero().tolist() == [[0, 4], [1, 3], [1, 4], [2, 7], [2, 9]]


def test_only_allowed_ids_are_left_and_a_row_without_any_has_its_marker():
    asked = [[5], [], [7, 9], [0, *range(2, VOCAB)], [33, 64]]
    rows = []
    for slot, ids in enumerate(asked):
        params = SamplingParams(max_tokens=9, allowed_ids=ids)
        rows.append(StatefulRow(slot, slot, slot, SequenceState(slot + 1, params, 0, None, slot), -1, False))
    count = len(rows)
    plan = SimpleNamespace(
        temperature=np.zeros(count, np.float32), seed=np.zeros(count, np.uint64), samples=np.ones(count, bool)
    )
    allowed = ProcessedRows(rows, plan, VOCAB, StagingRing(64, torch.device("cpu"))).allowed
    assert allowed is not None
    own = torch.zeros(count, VOCAB)
    torch_ops.keep_allowed(own, allowed.rows, allowed.mask)
    own[2, [7, 9]] = NEVER
    processors.mark_stuck(own, allowed)
    left = [[5], list(range(VOCAB)), [0], [0, *range(2, VOCAB)], [33, 64]]
    assert [(row > NEVER).nonzero().flatten().tolist() for row in own] == left
    assert [row.state.marker for row in rows] == [0, -1, 0, 1, 0]


def test_one_long_bad_word_does_not_make_thousands_of_short_ones_long():
    """All of them would be so long: 4096 words of 61441 tokens take a GB, and the step several."""
    short = [[n % VOCAB] for n in range(4095)]
    words = bad_words([*short, [5] * 61441])
    assert sum(t.numel() for t in vars(words).values()) == 3 * 4096 + 3 * 61440
    # One that is longer than all of the sequence begins before it.
    own = torch.zeros(1, VOCAB)
    own_words = bad_words([[5] * 4, [5] * 3])
    history, position = make_history([5, 5]), torch.tensor([2], dtype=torch.int32)
    for words, banned in ((own_words, True), (bad_words([[5] * 4]), False)):
        processors.mask_bad_words(own.zero_(), words, history.tokens, position)
        assert bool(own[0, 5] == NEVER) is banned


def test_bias_and_suppressed_tokens():
    own = torch.zeros(2, VOCAB)
    processors.add_bias(own, torch.tensor([3, VOCAB + 3, VOCAB + 4]), torch.tensor([1.0, -2.0, NEVER]))
    processors.suppress_tokens(own, torch.tensor([-1, 9], dtype=torch.int32))
    assert (own[0, 3], own[1, 3], own[1, 4], own[1, 9]) == (1.0, -2.0, NEVER, NEVER)
    assert own.count_nonzero() == 4


def test_masks_allow_what_their_bits_say_and_outrank_suppressed_tokens():
    own = torch.zeros(3, VOCAB)
    own[2, [3, 64]] = NEVER
    masks = np.zeros((2, 4), np.uint32)
    masks[0, 3] = 1 << 4  # token 100
    masks[0, 0] = 1 << 31
    masks[1, 0], masks[1, 2] = 1 << 3, 1  # tokens 3 and 64, both suppressed
    fallback = torch.zeros(2, VOCAB)
    processors.allow_only(own, torch.tensor([0, 2]), torch.from_numpy(masks.view(np.int32)), fallback)
    assert (own > NEVER).nonzero().tolist() == [*([0, t] for t in (31, 100))] + [
        [1, t] for t in range(VOCAB)
    ] + [[2, 3], [2, 64]]


def test_masks_alone_forbid_the_rest():
    own = torch.randn(3, VOCAB)
    before, masks = own.clone(), np.zeros((2, -(-VOCAB // 32)), np.uint32)
    masks[0, 3], masks[0, 0], masks[1, 2] = 1 << 4, 1 << 31, 1  # tokens 100 and 31; token 64
    torch_ops.keep_allowed(own, torch.tensor([2, 0]), torch.from_numpy(masks.view(np.int32)))
    assert torch.equal(own[1], before[1])
    for row, allowed in ((2, [31, 100]), (0, [64])):
        assert (own[row] > NEVER).nonzero().flatten().tolist() == allowed
        assert torch.equal(own[row, allowed], before[row, allowed])


def test_history_is_entered_for_new_owners_only():
    history = make_history([1, 2, 3], [4])
    history.record(torch.tensor([0, 1]), torch.tensor([3, 1]), torch.tensor([10, 11], dtype=torch.int32))
    history.restore([(1, np.array([20, 21], np.int32))])
    assert history.tokens is not None
    assert history.tokens[0, :4].tolist() == [1, 2, 3, 10]
    assert history.tokens[1, :2].tolist() == [20, 21]


def test_upload_keeps_values_types_and_shapes():
    arrays = [
        np.arange(3, dtype=np.int32),
        np.array([2**63 + 5, 1], np.uint64),
        np.array([[0.5], [2.0]], np.float32),
        np.empty((2, 0), np.int32),
        np.array([-7], np.int64),
    ]
    tensors = upload(StagingRing(64, torch.device("cpu")), arrays)
    for tensor, array in zip(tensors, arrays, strict=True):
        expected = array.view(np.int64) if array.dtype == np.uint64 else array
        assert tensor.shape == expected.shape and torch.equal(tensor, torch.from_numpy(expected))


def test_log_probs_are_those_of_a_log_softmax():
    logits = torch.randn(6, VOCAB, dtype=torch.bfloat16) * 8
    tokens = torch.randint(0, VOCAB, (6,), dtype=torch.int32)
    expected = logits.float().log_softmax(-1).gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(log_probs(logits, tokens), expected)


def test_context_logits_that_fit_no_message_are_refused():
    params, room = SamplingParams(max_tokens=9, context_logits=True), 8 << 30
    assert logits_problem(params, 1000, 9, 128256, room) is None
    problem = logits_problem(params, 8192, 9, 128256, room)
    assert problem is not None and "4008 MiB" in problem and "4185 tokens" in problem
    assert logits_problem(SamplingParams(max_tokens=9), 8192, 9, 128256, room) is None


def test_logits_for_which_there_is_no_room_are_refused():
    both = SamplingParams(max_tokens=24, context_logits=True, generation_logits=True)
    assert logits_problem(both, 1000, 24, 2048, 8 << 20) is None
    problem = logits_problem(both, 1000, 25, 2048, 8 << 20)
    assert problem is not None and "1000 prompt tokens and of up to 25 generated tokens" in problem
    assert "room for 8 MiB, those of 1024 tokens" in problem and "max_logits_mib" in problem
    alone = SamplingParams(max_tokens=25, context_logits=True)
    assert logits_problem(alone, 1000, 25, 2048, 8 << 20) is None
