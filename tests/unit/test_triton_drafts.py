# SPDX-License-Identifier: Apache-2.0
"""The kernels of drafts in Triton's interpreter, without a GPU; tests/gpu/test_drafts.py runs the real
ones."""

import torch
from interpreted import interpreted

from flashinfer_backend.ops import torch_ops

BLOCK = 16


def check_step(rows: int, feeds: int, where: str) -> None:
    """What rows with drafts feed, which drafts are accepted, and what is noted of them."""
    from flashinfer_backend.ops import triton_drafts

    slots_count, columns = 50, 20
    generator = torch.Generator().manual_seed(rows + feeds)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, generator=generator)

    slots = torch.randperm(slots_count, generator=generator)[:rows].int()
    slots[-1] = slots_count  # padding
    fed = 1 + integers(feeds, rows)
    fed[-1] = 1
    lengths = integers(200, slots_count + 1)
    lengths[-1] = 0
    drafts, last = integers(3, slots_count + 1, feeds - 1), integers(9, slots_count + 1)
    given = [slots, fed, last, drafts, lengths, integers(99, slots_count + 1, columns)]
    given += [integers(3, rows * feeds), torch.arange(rows, dtype=torch.int32) * feeds]
    results = []
    for ops, device in ((torch_ops, "cpu"), (triton_drafts, where)):
        slots, fed, last, drafts, lengths, table, sampled, first = (t.clone().to(device) for t in given)
        by_slot = torch_ops.BySlot(last, lengths, drafts, table, BLOCK)
        inputs = ops.draft_inputs(slots, fed, feeds, by_slot)
        moved = lengths.clone()
        counts, ends = ops.accept(sampled, first, fed, slots, by_slot)
        history = torch.zeros(slots_count + 1, 400, dtype=torch.int32, device=device)
        ops.record_tokens(history, inputs[:3], slots, by_slot)
        noted = torch.zeros(slots_count + 1, 7, dtype=torch.int32, device=device)
        places = ops.note_tokens(noted, last[slots], slots, lengths[slots])
        behind = torch.arange(rows, dtype=torch.int32, device=device) % 8
        again = ops.noted_inputs(noted, slots, behind, 7, by_slot)
        own = [counts, ends, lengths, last[:-1], history[:-1], places, noted[:-1]]
        results.append([*inputs, moved, *again, *own])
    assert results[0][-7].max() > 1 or rows == 1
    assert torch.equal(results[0][-1].view(-1)[results[0][-2][:-1]], results[0][-4][slots[:-1].cpu()])
    for plain, kernel in zip(*results, strict=True):
        assert torch.equal(plain, kernel.cpu())


def check_places_ahead(where: str) -> None:
    """Some behind a block's end, whose next block the step has fed or not; a row of padding."""
    from flashinfer_backend.ops import triton_drafts

    def by_slot(table: torch.Tensor) -> torch_ops.BySlot:  # nothing else of it is read
        return torch_ops.BySlot(table, table, table, table, BLOCK)

    table = torch.arange(1, 25, dtype=torch.int32).view(4, 6)
    table[3] = 0
    slots, ends = torch.tensor([2, 0, 1, 3]).int(), torch.tensor([1, 3, 4, 6]).int()
    positions = torch.tensor([13, 14, 15, 30, 7, 9, 0]).int()
    fed = torch.tensor([32, 9, 17, 0]).int()
    expected = [[15, 31, 8, 1], [16, 32, 9, 2], [17, 33, 10, 3]]
    assert torch_ops.places_ahead(positions, ends, slots, fed, by_slot(table), 3)[0].tolist() == expected
    for count in (0, 1, 3):
        given = positions, ends, slots, fed
        plain = torch_ops.places_ahead(*given, by_slot(table), count)
        found = triton_drafts.places_ahead(*(t.to(where) for t in given), by_slot(table.to(where)), count)
        for own, other in zip(plain, found, strict=True):
            assert own.shape == (count, 4) and torch.equal(own, other.cpu())
    # Slot 0 has fed all of its second block, and none of the third; slot 2 one token of its second one.
    assert plain[1][:, 1].tolist() == [2 * BLOCK + 15, 0, 0]
    assert plain[1][:, 0].tolist() == [13 * BLOCK + 15, 14 * BLOCK, 14 * BLOCK + 1]


def check_likeliest(where: str) -> None:
    from flashinfer_backend.ops import triton_drafts

    generator = torch.Generator().manual_seed(2)
    for rows, vocab in ((1, 100), (5, 5000), (3, 2048)):
        logits = torch.randn(rows, vocab + 16, generator=generator).bfloat16()[:, :vocab]
        logits[-1] = 3.0  # all alike: the first
        ids = torch.randperm(vocab, generator=generator).int()
        for own in (None, ids):
            plain = torch_ops.likeliest(logits, own)
            found = triton_drafts.likeliest(logits.to(where), None if own is None else own.to(where))
            best = logits.float() == logits.float().amax(1, keepdim=True)
            first = best.int().argmax(1)
            assert found.tolist() == (first if own is None else own[first]).tolist()
            assert logits.float()[0, plain[0] if own is None else (own == plain[0]).int().argmax()] == (
                logits.float()[0].max()
            )


def check_norms(where: str) -> None:
    from flashinfer_backend.ops import triton_drafts

    generator = torch.Generator().manual_seed(4)
    for tokens, size in ((1, 64), (5, 200)):
        given = [torch.randn(n, generator=generator) * 3 for n in ((tokens, size),) * 2 + (size, size)]
        plain = torch_ops.norms_side_by_side(*given, 1e-5)
        found = triton_drafts.norms_side_by_side(*(t.to(where) for t in given), 1e-5)
        assert torch.allclose(found.cpu(), plain, atol=1e-5) and plain.shape == (tokens, 2 * size)


def check_ngrams(where: str) -> None:
    from flashinfer_backend.ops import triton_drafts

    generator = torch.Generator().manual_seed(3)
    history = torch.randint(0, 4, (9, 9000), dtype=torch.int32, generator=generator)
    history[5, :3000] = torch.arange(3000)  # nothing stands twice
    history[6, :40] = torch.tensor([7, 8] * 20)  # ends amid what repeats
    history[7, 4090:4100] = history[7, 8000:8010] = torch.arange(10) + 50  # across two programs
    slots = torch.tensor([3, 0, 8, 5, 6, 7, 1], dtype=torch.int32)
    lengths = torch.tensor([0, 1, 9, 4000, 9, 2999, 39, 8006, 0], dtype=torch.int32)
    for most, least in ((4, 2), (3, 3), (6, 1)):
        plain = torch_ops.ngram_drafts(history, slots, lengths, 5, most, least)
        own = (t.to(where) for t in (history, slots, lengths))
        assert torch.equal(triton_drafts.ngram_drafts(*own, 5, most, least).cpu(), plain)


def test_what_followed_the_longest_match_is_drafted() -> None:
    def drafts(tokens: list[int], most: int = 3, least: int = 2, count: int = 4) -> list[int]:
        history = torch.tensor([tokens, tokens], dtype=torch.int32)
        lengths = torch.tensor([len(tokens) - 1, 0], dtype=torch.int32)
        slots = torch.zeros(1, dtype=torch.int32)
        return torch_ops.ngram_drafts(history, slots, lengths, count, most, least)[0].tolist()

    assert drafts([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1]
    assert drafts([1, 2, 3, 4, 9, 2, 3, 5, 7, 8, 1, 2, 3]) == [4, 9, 2, 3]  # the longest, not the latest
    assert drafts([2, 3, 4, 9, 2, 3, 5, 7, 8, 6, 2, 3]) == [5, 7, 8, 6]  # the latest of equally long ones
    assert drafts([1, 2, 3, 4, 5, 9, 3]) == [3, 3, 3, 3]  # one token is too little
    assert drafts([1, 2, 3, 4, 5, 9, 3], least=1) == [4, 5, 9, 3]
    assert drafts([5, 1, 2, 1, 2]) == [1, 2, 1, 2]  # goes on as it repeats
    assert drafts([4]) == [4, 4, 4, 4]


def test_kernels_in_the_interpreter() -> None:
    interpreted(__file__)


if __name__ == "__main__":
    for shape in ((1, 4), (7, 2), (40, 4), (20, 6)):
        check_step(*shape, "cpu")
    check_places_ahead("cpu")
    check_likeliest("cpu")
    check_norms("cpu")
    check_ngrams("cpu")
