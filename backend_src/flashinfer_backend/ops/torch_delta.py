# SPDX-License-Identifier: Apache-2.0
"""The operations of a gated delta net layer in plain torch: https://arxiv.org/abs/2412.06464.

They compute in float32 and return x's dtype. T is the number of tokens in the step and R that of its rows;
a row is a sequence's next tokens, starts[i] to starts[i + 1], one or more. Each sequence has a slot, whose
states the operations read and write in place: a row goes on from where its slot's last one ended, wherever
that was cut. Hk and Hv are the key and value heads, Hv a multiple of Hk; Dk and Dv are their dimensions.

slots is int32 [R], starts int32 [R + 1]. `decodes` says how many rows in front have exactly one token.
`delta_net` is the whole layer between its first product and its last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_PENDING = 0  # tokens, of DeltaStates.pending: these operations write recurrent states with every token
CHUNK = 64  # tokens that are computed at once; a row's first chunk begins at its first token
L2_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """What a layer has besides its products: conv[C, W], a_log, dt_bias[Hv], norm[Dv], and the norm's eps."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class Pending(NamedTuple):
    """What the last tokens of all slots wrote, P at most, where recurrent states are not written with every
    token. A head's state behind a token at position t is

        exp(decays[t]) recurrent + sum over i from begun to t: exp(decays[t] - decays[i]) keys[i] written[i]

    keys[S, Hk, P, Dk], written[S, Hv, P, Dv] and decays[S, Hv, P], since `begun`, float32; begun[S, Hv],
    int32: how many tokens of its sequence the recurrent state has seen. Where it is 0, recurrent counts as
    zeros. A key lies at its position modulo P, the others at their position plus their head's number, modulo
    P. Head h's state is written where that is P - 1: in each step those of as many heads, and what is pending
    of a head lies at the front."""

    keys: Tensor
    written: Tensor
    decays: Tensor
    begun: Tensor


class DeltaStates(NamedTuple):
    """A layer's states, of all slots: recurrent[S, Hv, Dk, Dv] float32, and inputs[S, L, C + 2 Hv], what the
    last L tokens put in: a token's qkv, a and b at its position modulo L, with L of `inputs_kept`. pending:
    what recurrent has not seen; None: it has seen all, but for tokens that are held (DeltaRows). Nothing need
    be cleared: a sequence that begins takes no notice of what is there."""

    recurrent: Tensor
    inputs: Tensor
    pending: Pending | None = None


class DeltaRows(NamedTuple):
    """The rows of a step, int32: slots[R], starts[R + 1] and first[R], the position of each row's first
    token. held[R]: how many tokens before it are not in its slot's recurrent state yet, of `count_held`; of
    the first `decodes` rows alone. None: drafts are never checked, and the first `decodes` rows have one
    token.

    cuts[R], saves[R]: the states behind the tokens before cuts[i], which lies within row i, are kept in slot
    saves[i] as well. Where cuts[i] is the row's start, none are; else it has as many tokens before it as the
    convolution has inputs. None: no row keeps any.

    padded: rows can have no tokens, of the first `decodes` the last ones, and tokens behind the last row are
    padding; neither changes a state."""

    slots: Tensor
    starts: Tensor
    first: Tensor
    held: Tensor | None
    decodes: int
    cuts: Tensor | None = None
    saves: Tensor | None = None
    padded: bool = False


def inputs_kept(width: int, drafts: int = 0) -> int:
    """L of DeltaStates, of a convolution of `width` inputs and steps that check up to `drafts` drafts a row:
    those that a step reads and those that it writes are different ones."""
    return width + (2 * drafts + 1 if drafts else 0)


def count_held(in_state: Tensor, slots: Tensor, starts: Tensor, first: Tensor, decodes: int) -> Tensor:
    """DeltaRows.held of a step. in_state[S] int32: how many of its sequence's tokens a slot's recurrent state
    has seen; it becomes that behind this step. Where a state is restored, it has to be set."""
    behind = first + starts[1:] - starts[:-1]
    held = (first - in_state[slots]).clamp(min=0)
    held[decodes:] = 0
    behind[:decodes] = first[:decodes]
    in_state[slots] = behind
    return held


def delta_net(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, states: DeltaStates, rows: DeltaRows
) -> Tensor:
    """qkv[T, C], C = 2 Hk Dk + Hv Dv, z[T, Hv Dv], a, b[T, Hv] -> [T, Hv Dv]: the convolution, the gated
    delta rule and the gated norm. All rows of the inputs can have a stride.

    With `held`, the recurrent states stay behind the first `decodes` rows: these can have drafts among their
    tokens, of which those that are accepted enter the state in the next step, and the others leave nothing.
    """
    parts = qkv, z, a, b
    if rows.padded:
        rows, out = _without_padding(rows), torch.zeros_like(z, memory_format=torch.contiguous_format)
        if tokens := int(rows.starts[-1]):
            qkv, z, a, b = (x[:tokens] for x in parts)
            out[:tokens] = delta_net(qkv, z, a, b, weights, states, rows)
        return out
    if rows.cuts is None or rows.saves is None or torch.equal(rows.cuts, rows.starts[:-1]):
        return _delta_net(parts, weights, states, rows)
    starts, cuts = rows.starts.long(), rows.cuts.long()
    cut = cuts > starts[:-1]
    lengths = torch.where(cut, cuts, starts[1:]) - starts[:-1]  # of what is before the cuts
    token = torch.arange(int(starts[-1]), device=qkv.device)
    row = torch.searchsorted(starts, token, right=True) - 1
    early = token < starts[row] + lengths[row]
    out = torch.empty(len(token), z.shape[1], dtype=z.dtype, device=z.device)
    before = rows._replace(starts=_edges(lengths))
    out[early] = _delta_net([x[token[early]] for x in parts], weights, states, before)
    slots, saves = rows.slots[cut].long(), rows.saves[cut].long()
    for each in states[:2]:
        each[saves] = each[slots]
    left = (starts[1:] - starts[:-1] - lengths)[cut]
    behind = DeltaRows(rows.slots[cut], _edges(left), (rows.first + lengths)[cut], None, 0)
    out[~early] = _delta_net([x[token[~early]] for x in parts], weights, states, behind)
    return out


def _without_padding(rows: DeltaRows) -> DeltaRows:
    lengths = rows.starts[1:] - rows.starts[:-1]
    own = lengths > 0
    slots, first, held, cuts, saves = (
        None if x is None else x[own] for x in (rows.slots, rows.first, rows.held, rows.cuts, rows.saves)
    )
    assert slots is not None and first is not None
    decodes = int(own[: rows.decodes].sum())
    return DeltaRows(slots, _edges(lengths[own]), first, held, decodes, cuts, saves)


def _edges(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _delta_net(
    parts: Sequence[Tensor], weights: DeltaWeights, states: DeltaStates, rows: DeltaRows
) -> Tensor:
    """The layer's output for qkv, z, a and b; intermediate states are not kept."""
    qkv, z, a, b = parts
    slots, starts = rows.slots.long(), rows.starts.long()
    mixed = torch.cat([qkv, a, b], dim=-1).to(states.inputs.dtype)
    length, width = states.inputs.shape[1], weights.conv.shape[1]
    held = torch.zeros_like(slots) if rows.held is None else rows.held.long()
    begin = rows.first.long() - held
    fresh = (begin == 0).view(-1, 1, 1, 1)
    recurrent = states.recurrent[slots].masked_fill(fresh, 0.0)

    def earlier(positions: Tensor) -> Tensor:  # [R, n] -> what tokens there put in
        found = states.inputs[slots.unsqueeze(1), positions % length]
        return found.masked_fill((positions < 0).unsqueeze(-1), 0.0)

    def window(end: Tensor) -> Tensor:  # the convolution's inputs before a position
        channels = earlier(end.unsqueeze(1) + torch.arange(1 - width, 0, device=end.device))
        return channels[..., : qkv.shape[1]].mT.contiguous()

    if rows.held is not None and (again := held.nonzero()[:, 0]).numel():
        places = torch.arange(int(held.max()), device=held.device)
        inputs = earlier(begin.unsqueeze(1) + places)[places < held.unsqueeze(1)]
        ends = F.pad(held[again].cumsum(0), (1, 0))
        past, state = window(begin)[again], recurrent[again]
        _compute(inputs, weights, past, state, ends, 0)
        recurrent[again] = state
    kept = recurrent[: rows.decodes].clone()
    single = rows.decodes if rows.held is None else 0
    past = window(rows.first.long())
    out = _compute(mixed, weights, past, recurrent, starts, single)
    if rows.held is not None:
        recurrent[: rows.decodes] = kept
    states.recurrent[slots] = recurrent
    token = torch.arange(int(starts[-1]), device=mixed.device)
    row = torch.searchsorted(starts, token, right=True) - 1
    last = starts[row + 1] - token <= length
    positions = rows.first[row] + token - starts[row]
    states.inputs[slots[row[last]], positions[last] % length] = mixed[last]
    shape = out.shape
    return gated_norm(out, z.view(shape), weights.norm, weights.eps).flatten(1)


def _compute(
    mixed: Tensor, weights: DeltaWeights, past: Tensor, recurrent: Tensor, starts: Tensor, decodes: int
) -> Tensor:
    """Rows of mixed[T, C + 2 Hv] through the convolution and the rule, from their own past[R, C, W - 1] and
    recurrent[R, Hv, Dk, Dv], which they change -> [T, Hv, Dv]."""
    rows, heads, key_dim, value_dim = recurrent.shape
    values = heads * value_dim
    qkv, a, b = mixed.split([mixed.shape[1] - 2 * heads, heads, heads], dim=-1)
    slots = torch.arange(rows, device=mixed.device)
    qkv = causal_conv(qkv, weights.conv, past, slots, starts, decodes)
    keys = (qkv.shape[1] - values) // 2
    q, k, v = qkv.split([keys, keys, values], dim=-1)
    q, k, v = q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (heads, -1))
    gates = delta_gates(a, b, weights.a_log, weights.dt_bias)
    return gated_delta_rule(q, k, v, *gates, recurrent, slots, starts, decodes)


def causal_conv(
    x: Tensor, weight: Tensor, conv_states: Tensor, slots: Tensor, starts: Tensor, decodes: int = 0
) -> Tensor:
    """silu of each channel's convolution with its last W inputs: x[T, C], weight[C, W] -> [T, C].

    conv_states[S, C, W - 1] has each slot's last inputs, the latest last, and is written.
    """
    past = conv_states.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    single = slots[:decodes].long()
    window = torch.cat([conv_states[single], x[:decodes].to(conv_states.dtype).unsqueeze(-1)], dim=-1)
    conv_states[single] = window[..., 1:]
    out[:decodes] = F.silu((window.float() * weight.float()).sum(-1)).to(x.dtype)
    for slot, start, end in _rows(slots, starts, decodes):
        inputs = torch.cat([conv_states[slot], x[start:end].t().to(conv_states.dtype)], dim=-1)
        conv_states[slot] = inputs[:, inputs.shape[1] - past :]
        summed = F.conv1d(inputs.float(), weight.float().unsqueeze(1), groups=len(weight))
        out[start:end] = F.silu(summed).t().to(x.dtype)
    return out


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """How much of its state each head keeps, in log space, and how much of its value it writes: decay and
    beta, float32 [T, Hv], of a, b[T, Hv] and the layer's a_log, dt_bias[Hv]."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay, torch.sigmoid(b.float())


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    decodes: int = 0,
) -> Tensor:
    """Each token's query of its head's state, which its key and value change before: [T, Hv, Dv].

    q, k[T, Hk, Dk], normalised here (and q scaled by Dk ** -0.5); v[T, Hv, Dv]; decay, beta float32 [T, Hv],
    of `delta_gates`; states[S, Hv, Dk, Dv] float32. A token's state is S = exp(decay) S' + k (beta (v - k
    exp(decay) S')) of the one before, S', and its result q S. Heads Hv / Hk in a row share a query and key.
    """
    share = v.shape[1] // k.shape[1]
    q, k = (_normalised(x).repeat_interleave(share, dim=1) for x in (q, k))
    q, dtype = q * q.shape[-1] ** -0.5, v.dtype
    v, decay, beta = v.float(), decay.float(), beta.float()
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    single = slots[:decodes].long()
    tokens = [x[:decodes] for x in (q, k, v, decay, beta)]
    out[:decodes], states[single] = _next_token(states[single], *tokens)
    for slot, start, end in _rows(slots, starts, decodes):
        row = [x[start:end] for x in (q, k, v, decay, beta)]
        out[start:end], states[slot] = _next_tokens(states[slot], *row)
    return out.to(dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension times silu(gate): x, gate[..., D], weight[D] -> [..., D]. The normed
    value is rounded to x's dtype before the weight is applied."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return ((weight * normed).float() * F.silu(gate.float())).to(x.dtype)


def _rows(slots: Tensor, starts: Tensor, decodes: int) -> list[tuple[int, int, int]]:
    """Slot, first token and end of each row behind the first `decodes`."""
    edges = itertools.pairwise(starts[decodes:].tolist())
    return [(slot, *edge) for slot, edge in zip(slots[decodes:].tolist(), edges, strict=True)]


def _normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


def _next_token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token a row: state[R, Hv, Dk, Dv], q, k[R, Hv, Dk], v[R, Hv, Dv], decay, beta[R, Hv] -> results
    [R, Hv, Dv] and the states behind them."""
    kept = state * decay.exp()[..., None, None]
    written = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ kept).squeeze(-2))
    state = kept + k.unsqueeze(-1) * written.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _next_tokens(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One row's n tokens: state[Hv, Dk, Dv], q, k[n, Hv, Dk], v[n, Hv, Dv], decay, beta[n, Hv] -> results
    [n, Hv, Dv] and the state behind them. Section 3.3 of the paper, whose names these are: what a chunk
    writes depends linearly on the state before it, by U and W."""
    n = len(q)
    size = min(CHUNK, n)
    padding = -n % size

    def chunked(x: Tensor) -> Tensor:  # [chunks, Hv, size, ...]; a padded token changes nothing
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding))
        return padded.unflatten(0, (-1, size)).transpose(1, 2)

    q, k, v, decay, beta = (chunked(x) for x in (q, k, v, decay, beta))
    total = decay.cumsum(-1)  # since the chunk's start
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    system = beta.unsqueeze(-1) * (k @ k.mT) * between
    writes = beta.unsqueeze(-1) * torch.cat([v, k * total.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, writes, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.mT) * between
    asks = q * total.exp().unsqueeze(-1)
    rest = (total[..., -1:] - total).exp().unsqueeze(-1) * k  # what the chunk's end keeps of each key
    kept = total[..., -1].exp()[..., None, None]
    results = []
    for i in range(len(q)):
        written = u[i] - w[i] @ state
        results.append(asks[i] @ state + scores[i] @ written)
        state = kept[i] * state + rest[i].mT @ written
    return torch.stack(results).transpose(1, 2).flatten(0, 1)[:n], state
