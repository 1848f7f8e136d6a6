# SPDX-License-Identifier: Apache-2.0
"""The kernels of gated delta net layers in Triton's interpreter, without a GPU, against plain torch in
float32; tests/gpu/test_delta.py runs the real ones."""

from typing import NamedTuple

import torch
from interpreted import interpreted
from torch import Tensor

from flashinfer_backend.ops import torch_delta
from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights, Pending

WIDTH = 4


class Sizes(NamedTuple):
    key_heads: int
    value_heads: int
    dim: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.dim


class Case(NamedTuple):
    """lengths: tokens of each row. decodes: how many rows at the front decode, with up to `drafts` drafts.
    padding: how many empty rows follow the decode rows and the others, and how many tokens follow all."""

    sizes: Sizes
    lengths: list[int]
    decodes: int
    drafts: int = 0
    padding: int = 0


SMALL = Sizes(1, 2, 32)
CASES = [
    Case(SMALL, [1, 1, 1], 3),
    Case(SMALL, [1, 70, 68, 2], 1, padding=2),
    Case(Sizes(2, 2, 32), [3, 65], 0),
    Case(SMALL, [3, 1, 4, 2], 4, 3),
    Case(Sizes(2, 4, 32), [1, 2, 1], 2, 2, padding=1),
]


def inputs_of(sizes: Sizes, tokens: int, generator: torch.Generator) -> Tensor:
    """A product whose columns are qkv, z, a and b. Every third token has nearly the key of the one before."""
    channels, heads = sizes.channels, sizes.value_heads
    product = torch.randn(tokens, channels + heads * sizes.dim + 2 * heads, generator=generator)
    product[1::3, :channels] = 0.03 * product[1::3, :channels] + product[:-1:3, :channels]
    return product


def split_inputs(sizes: Sizes, product: Tensor) -> list[Tensor]:
    heads = sizes.value_heads
    return list(product.split([sizes.channels, heads * sizes.dim, heads, heads], dim=-1))


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, of the whole."""
    found = found.detach().cpu().double()
    assert found.isfinite().all()
    return float((found - exact.double()).norm() / exact.double().norm())


def padded(rows: DeltaRows, padding: int, slot: int) -> DeltaRows:
    """The rows with those of a case's padding, in `slot`."""
    decodes, starts = rows.decodes, rows.starts.tolist()

    def spread(values: Tensor | None, *empty: int) -> Tensor | None:
        if values is None:
            return None
        one, other = (torch.tensor([each] * padding).to(values) for each in (empty[0], empty[-1]))
        return torch.cat([values[:decodes], one, values[decodes:], other])

    edges = starts[decodes], starts[-1]
    found = [spread(rows.slots, slot), spread(rows.starts[:-1], *edges), spread(rows.first, 5)]
    assert found[1] is not None
    found[1] = torch.cat([found[1], rows.starts[-1:]])
    held, cuts, saves = spread(rows.held, 0), spread(rows.cuts, *edges), spread(rows.saves, slot)
    return DeltaRows(*found, held, decodes + padding, cuts, saves, True)  # type: ignore[arg-type]


def nothing_pending(sizes: Sizes, slots: int, most: int) -> Pending:
    """Of slots whose states have seen all tokens, on the CPU: what counts of no token is wrong."""
    keys, written = (
        torch.full((slots, heads, most, sizes.dim), torch.nan)
        for heads in (sizes.key_heads, sizes.value_heads)
    )
    begun = torch.zeros(slots, sizes.value_heads, dtype=torch.int32)
    return Pending(keys, written, torch.full((slots, sizes.value_heads, most), torch.nan), begun)


def settled(states: DeltaStates, slots: Tensor, behind: Tensor) -> Tensor:
    """The recurrent states of all slots, in which what is pending has been written where these `slots` have
    seen `behind` tokens: as Pending says it."""
    found = states.recurrent.clone()
    if states.pending is None:
        return found
    keys, written, decays, begun = (x.cpu() for x in states.pending)
    share = written.shape[1] // keys.shape[1]
    for slot, end in zip(slots.tolist(), behind.tolist(), strict=True):
        for head in range(written.shape[1]):
            begin, state = int(begun[slot, head]), found[slot, head]
            assert end - decays.shape[-1] < begin <= end
            if begin == 0:
                state.zero_()
            positions, most = torch.arange(begin, end), decays.shape[-1]
            if begin == end:
                continue
            at = (positions + head) % most
            last, own = decays[slot, head, at[-1]], decays[slot, head, at]
            left = (last - own).exp()[:, None] * keys[slot, head // share, positions % most]
            state *= last.exp()
            state += (left.mT @ written[slot, head, at]).to(state.device)
    return found


def check(case: Case, where: str, dtype: torch.dtype, steps: int = 2) -> None:
    """In each step but the first one each row goes on where the last one ended, if it was a prompt, and
    otherwise behind some of its tokens. Without drafts, all rows of every fourth step are prompts."""
    from flashinfer_backend.ops import triton_delta

    sizes, lengths, decodes, drafts, padding = case
    heads, dim, tokens, rows = sizes.value_heads, sizes.dim, sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def words(values: list[int] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32)

    weights = normal(sizes.channels, WIDTH), normal(heads), normal(heads), 1 + 0.1 * normal(dim)
    kept = torch_delta.inputs_kept(WIDTH, drafts)
    # Behind the slots and two others, those in which states are kept that rows have on their way. Padding has
    # the second of the two.
    places = 2 * rows + 2
    states = normal(places, heads, dim, dim), normal(places, kept, sizes.channels + 2 * heads)
    slots = words(torch.randperm(rows + 1, generator=generator)[:rows])
    starts = words([0, *torch.tensor(lengths).cumsum(0).tolist()])
    first = words([(0, 41, 2, 100, 1)[row % 5] for row in range(rows)])
    cuts = starts[:-1].clone()
    for row in range(decodes, rows):
        if lengths[row] > WIDTH:
            cuts[row] += words([64, WIDTH, 37][row % 3]).clamp(max=lengths[row] - 1)
    saves = words(range(rows + 2, places))
    states[0][slots[first == 0].long()] = torch.nan  # another sequence's
    kinds = [(torch_delta, "cpu", torch.float32), (triton_delta, where, dtype)]
    own_states = []
    for ops, device, kind in kinds:
        recurrent, inputs = (x.clone().to(device) for x in states)
        pending = None
        if most := 0 if drafts else ops.MOST_PENDING:
            pending = nothing_pending(sizes, places, most)
            pending.begun[slots.long()] = torch.where(first == 0, 77, first)[:, None]  # of others before
            pending = Pending(*(x.to(device) for x in pending))
        own_states.append(DeltaStates(recurrent, inputs.to(dtype).to(kind), pending))
    in_state = torch.zeros(places, dtype=torch.int32)
    # Products are of 16 bits, and what they are of is rounded several times.
    allowed = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for step in range(steps):
        held, behind = None, first + words(lengths)
        if not drafts:
            decodes = 0 if step % 4 == 3 else case.decodes
        else:
            since = torch.randint(0, drafts + 2, (rows,), generator=generator).int()
            in_state[slots] = torch.where(in_state[slots] == 0, (first - since).clamp(min=0), in_state[slots])
            held = torch_delta.count_held(in_state, slots, starts, first, decodes)
        product, results = inputs_of(sizes, tokens + padding, generator), []
        for (ops, device, kind), own in zip(kinds, own_states, strict=True):
            conv, a_log, dt_bias, norm = (x.to(device) for x in weights)
            given = DeltaWeights(conv.to(dtype).to(kind), a_log, dt_bias, norm.to(dtype).to(kind), 1e-6)
            row = DeltaRows(
                *(None if t is None else t.to(device) for t in (slots, starts, first, held)),
                decodes,
                *(x.to(device) for x in (cuts, saves)),
            )
            if padding:
                row = padded(row, padding, rows + 1)
            parts = split_inputs(sizes, product.to(dtype).to(device, kind))
            result = ops.delta_net(*parts, given, own, row)
            assert not result[tokens:].any(), "of padding"
            results.append((result[:tokens], settled(own, slots, behind)))
        for name, plain, found in zip(("results", "states"), *results, strict=True):
            assert error(found, plain) < allowed, f"{name} of {case}: {error(found, plain)}"
        for row in (cuts > starts[:-1]).nonzero()[:, 0].tolist():
            last = (first[row] + cuts[row] - starts[row] - 1 - torch.arange(WIDTH - 1)) % kept
            at = int(saves[row]), last.long()
            plain, found = (own.inputs.cpu()[at] for own in own_states)
            assert torch.equal(plain[:, : sizes.channels], found[:, : sizes.channels].float())
        grown = words(lengths)
        if drafts:
            good = 1 + torch.randint(0, 99, (rows,), generator=generator).int() % grown
            grown = torch.where(torch.arange(rows) < decodes, good, grown)
        first = first + grown
    used = [*slots.tolist(), *saves[cuts > starts[:-1]].tolist()]
    others = [slot for slot in range(places) if slot not in used]
    for plain, found, before in zip(*(own[:2] for own in own_states), states, strict=True):
        assert torch.equal(found[others].cpu(), before[others].to(found.dtype))
        assert torch.equal(plain[others], found[others].cpu().float())
    if (pending := own_states[1].pending) is not None:
        assert not pending.begun[others].any() and pending.written[others].isnan().all()


def test_kernels_in_the_interpreter() -> None:
    interpreted(__file__)


if __name__ == "__main__":
    from flashinfer_backend.ops import triton_delta

    triton_delta.NATIVE = False
    for case in CASES:
        check(case, "cpu", torch.float16)
    check(Case(SMALL, [1, 66, 2], 1), "cpu", torch.float32)
    check(Case(Sizes(2, 4, 32), [1, 1, 1, 2], 3, padding=1), "cpu", torch.float32, 11)
