# SPDX-License-Identifier: Apache-2.0
"""The model's operations in plain torch: any device, any floating dtype.

These define what the CUDA kernels of the same names compute. T is the number of tokens in the step,
R the number of rows to sample, Hq and Hkv the query and key/value heads, D the head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.ops import fp8
from flashinfer_backend.ops.torch_delta import MOST_PENDING as MOST_PENDING
from flashinfer_backend.ops.torch_delta import count_held as count_held
from flashinfer_backend.ops.torch_delta import delta_net as delta_net
from flashinfer_backend.ops.weight import Chosen, LowRank, Weight

_MASK32 = 0xFFFFFFFF
LARGEST_LOGIT = 1e30  # over GREEDY_TEMPERATURE, the smallest that samples, it is still a float32


class BySlot(NamedTuple):
    """What the device keeps by slot, int32. The last of the S slots is padding's, whose length stays 0."""

    last_token: Tensor  # [S], which stands behind those in the cache
    lengths: Tensor  # [S], tokens in the cache
    drafts: Tensor  # [S, k], guesses at what follows the last token
    block_table: Tensor  # [S, columns]
    block_size: int  # tokens of a block


class Mixture(NamedTuple):
    """How a mixture of experts is computed. per_token: a token's experts, weighted as `route` says.
    clip: of their activation, as `gated` takes it. scaled_input, with one renormalised expert for a token:
    what it reads is multiplied by the sigmoid of its logit once it is chosen. own: which of the router's
    experts are there, the first and how many; the others add nothing. None: all. folded: the number of the
    first expert that all tokens have next to those that they choose, and how many; None: there is none.
    Their inputs are not scaled."""

    per_token: int
    renormalise: bool
    clip: tuple[float, float] | None = None
    scaled_input: bool = False
    own: tuple[int, int] | None = None
    folded: tuple[int, int] | None = None


class Penalties(NamedTuple):
    """Of n rows of logits (int64, none twice), whose tokens are in the rows `slots` of a history (int64 [n]),
    generated ones from prompt_len on (int32 [n]). The rest is float32 [n]: a repetition penalty of 1 and
    others of 0 change nothing."""

    rows: Tensor
    slots: Tensor
    prompt_len: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x[..., H], weight[H] -> [..., H] in x's dtype.

    The statistics are float32; the normalised value is rounded to x's dtype before the weight is
    applied, as Hugging Face transformers does.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor | None = None,
    chosen: Chosen | None = None,
) -> Tensor:
    """linear() of rms_norm(x), in `out` when given. x is unchanged."""
    product = linear(rms_norm(x, norm_weight, eps), weight, bias, chosen)
    return product if out is None else out.copy_(product)


def norm_linears(
    x: Tensor, norm_weight: Tensor, eps: float, weights: Sequence[Weight], chosen: Chosen | None = None
) -> list[Tensor]:
    """linear() of rms_norm(x) with each of the weights."""
    normed = rms_norm(x, norm_weight, eps)
    return [linear(normed, weight, None, chosen) for weight in weights]


def norm_quantised(
    x: Tensor, norm_weight: Tensor, eps: float, weights: Sequence[Weight]
) -> tuple[Tensor, None]:
    """rms_norm(x), and None: in plain torch each product quantises its own input."""
    return rms_norm(x, norm_weight, eps), None


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, chosen: Chosen | None = None) -> Tensor:
    """x @ weight.T + bias: x[T, K], weight[N, K], bias[N] or None -> [T, N]; with what the tokens' adapters
    add, where the weight has some."""
    return _add_adapters(weight.format.product(x, weight, bias), x, weight, chosen)


def activate(x: Tensor, activation: str, numbers: Tensor | None = None) -> Tensor:
    """x[T, 2I], a gate's columns and those that it multiplies -> activation(gate) * rest [T, I] with "silu"
    or "gelu_tanh" (https://arxiv.org/abs/1606.08415); with those that have no gate x[T, I] -> max(x, 0) ** 2
    ("relu2"), GELU's own form of x ("gelu") or, with its `numbers` (`xielu`), "xielu"."""
    if numbers is not None:
        return xielu(x, numbers)
    if activation == "relu2":
        return F.relu(x).square_()
    if activation == "gelu":
        return F.gelu(x)
    gate, rest = x.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * rest


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """alpha_p x^2 + beta x for x > 0, else alpha_n (exp(min(x, eps)) - 1 - x) + beta x, in float32:
    https://arxiv.org/abs/2411.13010. numbers[4] float32: alpha_p and alpha_n, of which the softplus is taken,
    and alpha_n is above beta; beta; eps."""
    (positive, negative), (beta, eps) = F.softplus(numbers[:2]), numbers[2:]
    wide = x.float()
    below = (torch.expm1(torch.minimum(wide, eps)) - wide) * (beta + negative)
    return (torch.where(wide > 0, positive * wide * wide, below) + beta * wide).to(x.dtype)


def linear_add(
    x: Tensor,
    weight: Weight,
    residual: Tensor | None,
    chosen: Chosen | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """residual (None: 0) + linear(x): x[T, K], weight[H, K], residual[T, H], bias[H] -> [T, H]. Use the
    returned tensor."""
    product = linear(x, weight, bias, chosen)
    return product if residual is None else residual + product


def overwrites_residual(weight: Weight, tokens: int) -> bool:
    """Whether linear_add of `tokens` tokens overwrites its residual."""
    return False


def group_adapters(places: Tensor, room: int) -> Chosen:
    """places[T] int32: each token's adapter, of `room`; -1: none."""
    found = places[places >= 0].unique()
    rest = max(1, min(len(places), room)) - len(found)
    distinct = F.pad(found, (1, rest), value=-1).int()
    distinct[0] = len(found)
    return Chosen(places, distinct)


def _add_adapters(product: Tensor, x: Tensor, weight: Weight, chosen: Chosen | None) -> Tensor:
    """Add to product[T, N] what each token's adapter adds for x[T, K], in place; returns product. down @ x is
    rounded to x's dtype, as PEFT does."""
    if weight.adapters is None or chosen is None:
        return product
    down, up, ends = weight.adapters
    for place in chosen.distinct[1:].tolist():
        rows = (chosen.places == place).nonzero()[:, 0]
        if place < 0 or not len(rows):
            continue
        own, start = x[rows].float(), 0
        for part, end in enumerate(ends):
            inner = (own @ down[place, part].float().T).to(x.dtype).float()
            product[rows, start:end] += (inner @ up[place, start:end].float().T).to(product.dtype)
            start = end
    return product


def add_embedded(hidden: Tensor, ids: Tensor, low: LowRank, chosen: Chosen) -> Tensor:
    """Add to embeddings hidden[T, H] what each token's adapter adds to that of its id, in place; returns
    hidden. low: of a product of unit vectors. ids[T]: -1: another rank's."""
    inner = embedded_down(ids, low, chosen).float()
    for place in chosen.distinct[1:].tolist():
        rows = (chosen.places == place).nonzero()[:, 0]
        if place >= 0 and len(rows):
            hidden[rows] += (inner[rows] @ low.up[place].float().T).to(hidden.dtype)
    return hidden


def embedded_down(ids: Tensor, low: LowRank, chosen: Chosen) -> Tensor:
    """down of each token's adapter at its id -> [T, R]; of no adapter, any."""
    if not low.down.shape[3]:  # a rank without tokens
        return low.down.new_zeros(len(ids), low.down.shape[2])
    places = chosen.places.clamp(min=0).long()
    found = low.down[places, 0, :, ids.clamp(min=0).long()]
    return found.masked_fill((ids < 0).unsqueeze(1), 0.0)


def norm_gate_up_silu(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up: Weight, chosen: Chosen | None = None
) -> Tensor:
    """silu(gate) * up of norm_linear(x): x[T, H] -> [T, I].

    gate_up[2I, H] holds the gate in rows 0..I and the up projection in rows I..2I.
    """
    gate, up = norm_linear(x, norm_weight, eps, gate_up, None, chosen=chosen).chunk(2, dim=-1)
    return F.silu(gate) * up


def mlp_add(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up: Weight,
    down: Weight,
    residual: Tensor | None,
    chosen: Chosen | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """linear_add() of norm_gate_up_silu(x): gate_up[2I, H], down[H, I], x, residual and result [T, H]."""
    inner = norm_gate_up_silu(x, norm_weight, eps, gate_up, chosen)
    return linear_add(inner, down, residual, chosen, bias)


def router_logits(normed: Tensor, router: Weight) -> Tensor:
    """normed[T, H] @ router[N, H].T, and its bias -> float32 [T, N]. Rounded to 16 bits, logits would be
    equal more often, and another expert would be taken."""
    bias = None if router.bias is None else router.bias.float()
    return F.linear(normed.float(), router.data.float(), bias)


def route(
    logits: Tensor, experts_per_token: int, renormalise: bool, folded: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, logits[T, E] -> int64, float32, both [T, experts_per_token].

    They are the largest of softmax(logits), in float32, divided by their sum if `renormalise`: Mixtral's
    routing, https://arxiv.org/abs/2401.04088, section 2.1. folded: as of Mixture (E, n): behind them each
    token has n more, whose weights are the sigmoid of logits[:, E], or 1 where there is no such column.
    """
    first, further = folded or (logits.shape[1], 0)
    weights, chosen = logits[:, :first].float().softmax(-1).topk(experts_per_token, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) if renormalise else weights
    gates = logits[:, first : first + 1].float().sigmoid() if logits.shape[1] > first else torch.ones(())
    every = torch.arange(first, first + further, device=logits.device).expand(len(logits), -1)
    return torch.cat((chosen, every), 1), torch.cat((weights, gates.to(weights).expand(every.shape)), 1)


def gated_by(x: Tensor, gate: Tensor) -> Tensor:
    """x[T, N] times the sigmoid of gate[T, N]."""
    return x * torch.sigmoid(gate)


def gated(gate: Tensor, up: Tensor, clip: tuple[float, float] | None = None) -> Tensor:
    """silu(gate) * up; with clip (alpha, limit), of gates up to the limit and ups within it on both sides,
    gate * sigmoid(alpha * gate) * (up + 1): https://arxiv.org/abs/2508.10925, section 2.1."""
    if clip is None:
        return F.silu(gate) * up
    alpha, limit = clip
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def experts_add(
    normed: Tensor,
    logits: Tensor,
    gate_up: Weight,
    down: Weight,
    mixture: Mixture,
    residual: Tensor | None,
    quantised: None = None,
) -> Tensor:
    """residual (None: 0) plus each token's experts, which `route` chooses and weights by logits[T, N]:
    down @ `gated`(gate @ n, up @ n, clip) of an expert with n of normed[T, H]. residual[T, H] -> [T, H].

    gate_up[E 2I, H] and down[E H, I] hold the experts below each other, of each the gate's rows before the up
    projection's; folded ones are the last. Each may have a bias. residual is unchanged. quantised: of
    norm_quantised.
    """
    first, further = mixture.folded or (logits.shape[1], 0)
    start, count = mixture.own or (0, first + further)
    chosen, weights = route(logits, mixture.per_token, mixture.renormalise, mixture.folded)
    if mixture.scaled_input:
        normed = normed * logits.amax(-1, keepdim=True).sigmoid().to(normed.dtype)
    result = torch.zeros_like(normed, dtype=torch.float32)
    for expert in (chosen - start).unique().tolist():
        if not 0 <= expert < count:
            continue
        tokens, place = torch.where(chosen == expert + start)
        x = normed[tokens]
        one, two = gate_up.part(expert, count), down.part(expert, count)
        gate, up = one.format.product(x, one, one.bias).chunk(2, dim=-1)
        product = two.format.product(gated(gate, up, mixture.clip), two, two.bias)
        result.index_add_(0, tokens, product.float() * weights[tokens, place].unsqueeze(1))
    return (result if residual is None else residual.float() + result).to(normed.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head's first values (GPT-NeoX pairing): x[T, heads, D], cos and sin
    [T, 1, R/2] float32 for the first R."""
    rotated = 2 * cos.shape[-1]
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*(part.to(x.dtype) for part in turned), x[..., rotated:]), dim=-1)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_locations: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    norm_rotated: bool = False,
) -> Tensor:
    """Rotate Q and K, write K and V to their places and return Q as [T, Hq, D], in `out` when given.

    qkv[T, (Hq + 2 Hkv) D], whose rows can have a stride; positions[T] int32; cos_sin[max_pos, R] float32 for
    the first R values of a head, with cosines in the first R/2 columns and sines in the last; k_cache and
    v_cache [blocks, P, Hkv, D], contiguous; cache_locations[T] int32, block * P + offset. q_norm[D] and
    k_norm[D] (Qwen3) are per-head RMSNorm weights applied before the rotation (norm_rotated: behind it), or
    None. kv_scales: what K and V are divided by in a cache of e4m3; others store them as they are.
    """
    tokens, head_dim = qkv.shape[0], k_cache.shape[-1]
    q, k, v = qkv.view(tokens, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return _rotate(x, cos, sin)
        if norm_rotated:
            return rms_norm(_rotate(x, cos, sin), norm, eps)
        return _rotate(rms_norm(x, norm, eps), cos, sin)

    where = cache_locations.long()
    for cache, stored, scale in zip((k_cache, v_cache), (turned(k, k_norm), v), kv_scales, strict=True):
        if cache.dtype == fp8.E4M3:  # as bytes: not every torch can index e4m3 on every device
            cache, stored = cache.view(torch.uint8), fp8.to_e4m3(stored, scale).view(torch.uint8)
        cache.view(-1, num_kv_heads, head_dim)[where] = stored
    rotated = turned(q, q_norm)
    return rotated if out is None else out.copy_(rotated)


def _mix(x: Tensor) -> Tensor:
    """The lowbias32 integer hash on uint32 values held in int64
    (https://github.com/skeeto/hash-prospector)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def sample_hash(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """uint32 noise bits of every (row, token): seed[R] int64, position[R] int32 -> [R, V] int64 in 0..2^32.

    They depend on the seed, the position and the token id alone, never on the row or the batch.
    """
    h = _mix(seed & _MASK32)
    h = _mix(h ^ ((seed >> 32) & _MASK32))
    h = _mix(h ^ (position.long() & _MASK32))
    return _mix(h.unsqueeze(1) ^ torch.arange(vocab_size, device=seed.device))


def gumbel_noise(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from uint32 bits held in int64.

    u = (2 (bits >> 9) + 1) 2^-24 is exact in float32 and lies strictly between 0 and 1. With one bit
    more the largest u would round to 1 and its noise to infinity: one token in 2^24 drawn at random.
    """
    u = (bits >> 9).float() * 2.0**-23 + 2.0**-24
    return -torch.log(-torch.log(u))


def step_inputs(
    slots: Tensor,
    state: BySlot,
    new_blocks: Tensor | None = None,
    given: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a step's tokens feed the model: (input_ids, positions, cache_locations), all int32 [T].

    slots: int32 [T], of the tokens. A token is its slot's last one, at the position `lengths`; or, with
    `given` (input ids and positions, int32 [T], and how many tokens are still the last ones of their slots,
    in front), those behind are given. A slot's tokens follow each other. new_blocks: int32 [T], without
    `given`: each, unless -1, is entered into the block table as that of the token's position.

    cache_locations is block * block_size + offset of each position. `lengths` moves on behind the tokens;
    that of the last slot stays 0.
    """
    last_token, lengths, _, block_table, block_size = state
    input_ids, positions, ends = last_token[slots], lengths[slots], slots
    if given is not None:
        tokens, places, decodes = given
        input_ids = torch.cat([input_ids[:decodes], tokens[decodes:]])
        positions = torch.cat([positions[:decodes], places[decodes:]])
        follows = torch.cat([slots[1:] == slots[:-1], slots.new_zeros(1, dtype=torch.bool)])
        ends = slots.masked_fill(follows, len(lengths) - 1)
    lengths[ends] = positions + 1
    lengths[-1] = 0
    columns = positions // block_size
    blocks = block_table[slots, columns]
    if new_blocks is not None:
        blocks = torch.where(new_blocks >= 0, new_blocks, blocks)
        block_table[slots, columns] = blocks
    return input_ids, positions, blocks * block_size + positions % block_size


def draft_inputs(
    slots: Tensor, fed: Tensor, feeds: int, state: BySlot
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What decode rows with drafts feed the model: (input_ids, slots, positions, cache_locations), int32
    [s * feeds] each, `feeds` of each row: its slot's last token, then drafts, fed[i] tokens in all, then
    padding.

    slots, fed: int32 [s]. Padding is token 0 at position 0 of the last slot. `lengths` moves on by `fed`."""
    last_token, lengths, drafts, block_table, block_size = state
    places, padding = torch.arange(feeds, dtype=torch.int32, device=slots.device), len(lengths) - 1
    inside = places < fed.unsqueeze(1)
    owners = torch.where(inside, slots.unsqueeze(1), padding)
    known = torch.cat([last_token[slots].unsqueeze(1), drafts[slots, : feeds - 1]], dim=1)
    positions = torch.where(inside, lengths[slots].unsqueeze(1) + places, 0)
    blocks = block_table[owners, positions // block_size]
    lengths[slots] += fed
    lengths[padding] = 0
    columns = torch.where(inside, known, 0), owners, positions, blocks * block_size + positions % block_size
    ids, owners, positions, locations = (column.flatten() for column in columns)
    return ids, owners, positions, locations


def note_tokens(noted: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Note each token (int32 [T], of its slot and at its position) in noted, int32 [slots + 1, columns]: in
    the column of its position, modulo their number. Returns where, int64 [T]: rows of noted.view(-1)."""
    columns = noted.shape[1]
    places = slots.long() * columns + positions % columns
    noted.view(-1)[places] = tokens
    return places


def noted_inputs(
    noted: Tensor, slots: Tensor, behind: Tensor, turns: int, state: BySlot
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the last behind[i] tokens of each of `slots` were, as note_tokens noted them: (positions,
    cache_locations, the token behind each, int32 [s * turns] each; rows of noted.view(-1), int64), padded to
    `turns` of each slot.

    slots, behind: int32 [s]. Padding, and what would stand before a sequence's begin, has position 0 and
    cache location 0."""
    last_token, lengths, _, block_table, block_size = state
    columns, owners, behind = noted.shape[1], slots.unsqueeze(1), behind.unsqueeze(1)
    turn = torch.arange(turns, dtype=torch.int32, device=slots.device)
    positions = lengths[owners] - behind + turn
    valid = (turn < behind) & (positions >= 0)
    positions = torch.where(valid, positions, 0)
    follow = noted[owners, (positions + 1) % columns]
    follow = torch.where(turn == behind - 1, last_token[owners], follow)
    blocks = block_table[owners, positions // block_size]
    locations = torch.where(valid, blocks * block_size + positions % block_size, 0)
    rows = owners.long() * columns + positions % columns
    return positions.flatten(), locations.flatten(), follow.flatten(), rows.flatten()


def accept(
    sampled: Tensor, first: Tensor, fed: Tensor, slots: Tensor, state: BySlot
) -> tuple[Tensor, Tensor]:
    """Check the drafts of rows that were sampled behind each of their tokens: how many tokens a row comes to,
    1 or more, and the place in `sampled` of the last of them; int32 [s] each.

    sampled: int32 [n], of which those of row i are the fed[i] from first[i] on. fed: the last token and
    drafts. first, fed, slots: int32 [s]. A draft is accepted where it is what was sampled in its place, and
    so are all before it: then the tokens behind are those that steps without drafts would have given.

    lengths, which were moved on by `fed`, and last_token become those of what was accepted.
    """
    last_token, lengths, drafts, *_ = state
    count = drafts.shape[1]
    columns = torch.arange(count + 1, dtype=torch.int32, device=sampled.device)
    inside = columns < fed.unsqueeze(1)
    places = (first.unsqueeze(1) + columns).clamp(max=len(sampled) - 1)
    agrees = (drafts[slots] == sampled[places[:, :count]]) & inside[:, 1:]
    counts = agrees.int().cumprod(1).sum(1, dtype=torch.int32) + 1
    ends = first + counts - 1
    lengths[slots] += counts - fed
    lengths[-1] = 0
    last_token[slots] = sampled[ends]
    return counts, ends


def places_ahead(
    positions: Tensor, ends: Tensor, slots: Tensor, fed_lengths: Tensor, state: BySlot, count: int
) -> tuple[Tensor, Tensor]:
    """Where the `count` tokens behind each sampling row's last kept one stand: (positions, cache_locations),
    int32 [count, s] each; in the dummy block 0 where a step has fed no token of their block, which may not
    be theirs.

    positions: int32 [T], of a step's tokens; ends: int32 [s], of which the last kept ones are; slots int32
    [s]; fed_lengths: int32 [slots + 1], tokens in the cache with all that the step has fed.
    """
    *_, block_table, block_size = state
    ahead = torch.arange(1, count + 1, dtype=torch.int32, device=slots.device)
    found = positions[ends] + ahead.unsqueeze(1)
    columns, known = found // block_size, (fed_lengths[slots] - 1) // block_size
    blocks = block_table[slots, torch.minimum(columns, known.clamp(min=0))]
    locations = torch.where(columns > known, 0, blocks * block_size + found % block_size)
    return found, locations


def norms_side_by_side(
    left: Tensor, right: Tensor, left_weight: Tensor, right_weight: Tensor, eps: float
) -> Tensor:
    """rms_norm of left[T, H] and of right[T, H], each with its weight [H], in one [T, 2 H]."""
    return torch.cat([rms_norm(left, left_weight, eps), rms_norm(right, right_weight, eps)], dim=1)


def for_drafts(weight: Weight) -> Weight | None:
    """See ops.cuda_ops.for_drafts: a copy would only be computed more slowly."""
    return None


def likeliest(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """The first of the largest logits of each row [R, V], int32 [R]: its place, or what ids (int32 [V]) has
    there."""
    best = logits.argmax(-1)
    return best.int() if ids is None else ids[best]


def record_tokens(history: Tensor, fed: tuple[Tensor, Tensor, Tensor], slots: Tensor, state: BySlot) -> None:
    """Note a step's tokens in history[slots + 1, columns]: those fed, (tokens, slots, positions) [T] each,
    but for what is behind `lengths`, and the last tokens of `slots` [s] there. All int32."""
    (tokens, owners, positions), last_token, lengths = fed, state.last_token, state.lengths
    kept = positions < lengths[owners]
    history[owners[kept], positions[kept]] = tokens[kept]
    history[slots, lengths[slots]] = last_token[slots]


def ngram_drafts(
    history: Tensor, slots: Tensor, lengths: Tensor, count: int, most: int, least: int
) -> Tensor:
    """What followed the longest run of a sequence's last tokens, of `least` to `most` of them, where it stood
    last before; int32 [s, count]. Where none did, its last token.

    history: int32 [slots + 1, columns], whose slots have `lengths` tokens and a last one behind them; slots:
    int32 [s]. What would follow the last token is taken to repeat: behind "a b a b" comes "a b a b".
    """
    if not len(slots):
        return slots.new_empty(0, count)
    last = lengths[slots].long()
    width = int(last.max()) + 1
    tokens, places = history[slots, :width].long(), torch.arange(width, device=history.device)
    runs = torch.ones_like(tokens, dtype=torch.bool)
    matched = torch.zeros_like(tokens)
    for back in range(most):
        wanted = tokens.gather(1, (last - back).clamp(min=0).unsqueeze(1))
        earlier = F.pad(tokens, (back, 0), value=-1)[:, :width]
        runs &= (earlier == wanted) & (last >= back).unsqueeze(1)
        matched += runs
    ahead = last.unsqueeze(1) - places  # 0 or less: the last token itself, or nothing
    best = torch.where((matched >= least) & (ahead > 0), matched * width + places, -1).amax(1)
    end = torch.where(best >= 0, best % width, last - 1)
    steps = torch.arange(count, device=history.device) % (last - end).unsqueeze(1)
    drafts = tokens.gather(1, (end + 1).unsqueeze(1) + steps)
    return drafts.int()


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    suppressed: Tensor | None = None,
    record: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Pick one token per row: logits[R, V] -> int32[R]. logits are left alone.

    temperature[R] float32: 0 takes the largest logit, else a sample of softmax(logits / temperature) by
    the Gumbel-max trick. seed[R] int64 and position[R] int32 key the noise. Ties take the lowest id.
    suppressed[R] int32: a token that row must not take, or -1. record (last_token, slots): the tokens are
    also written to last_token[slots].
    """
    wide = logits.float()
    if suppressed is not None:
        index = suppressed.clamp(min=0).long().unsqueeze(1)
        kept = wide.gather(1, index).masked_fill(suppressed.unsqueeze(1) >= 0, float("-inf"))
        wide = wide.scatter(1, index, kept)
    # Where this question costs no device synchronisation, all-greedy steps skip the noise.
    if logits.device.type == "cpu" and not bool((temperature > 0).any()):
        tokens = wide.argmax(-1).int()
    else:
        random = (temperature > 0).unsqueeze(1)
        noise = gumbel_noise(sample_hash(seed, position, logits.shape[1]))
        scaled = wide / torch.where(random, temperature.unsqueeze(1), 1.0)
        tokens = torch.where(random, scaled + noise, wide).argmax(-1).int()
    if record is not None:
        last_token, slots = record
        last_token[slots] = tokens
    return tokens


def keep_finite(logits: Tensor) -> Tensor:
    """Bound, in place, what extreme biases and penalties made of logits, so that softmax of them, divided by
    any temperature, has a value. NaN cannot be chosen."""
    return torch.nan_to_num_(logits, nan=float("-inf"), posinf=LARGEST_LOGIT, neginf=float("-inf")).clamp_(
        max=LARGEST_LOGIT
    )


def copy_rows(logits: Tensor, rows: Tensor, bounded: bool) -> Tensor:
    """logits[rows], rows int64 [n], as float32 [n, V] of their own; bounded: as keep_finite bounds them."""
    own = logits[rows].float()
    return keep_finite(own) if bounded else own


def penalise(logits: Tensor, of: Penalties, history: Tensor, position: Tensor) -> None:
    """Make tokens that occurred less likely, in place. logits float32 [R, V]; history int32 [slots, length],
    of which the first position[r] (int32 [R], at least 1) tokens of its slot are those of row r.

    A logit is divided by the repetition penalty, or multiplied if negative (https://arxiv.org/abs/1909.05858,
    section 4.1); then presence is subtracted once, and frequency as often as the token was generated. The
    result is bounded as keep_finite does.
    """
    ends = position[of.rows].unsqueeze(1)
    longest = int(ends.max())
    place = torch.arange(longest, device=logits.device)
    tokens = history[:, :longest][of.slots].long()
    valid = place < ends
    # What is not valid repeats the first token. Repeats write the same value: their order does not matter.
    tokens = torch.where(valid, tokens, tokens[:, :1])
    own = logits[of.rows]
    scores, penalty = own.gather(1, tokens), of.repetition.unsqueeze(1)
    own.scatter_(1, tokens, torch.where(scores < 0, scores * penalty, scores / penalty))
    counts = torch.zeros_like(own)
    counts.scatter_add_(1, tokens, (valid & (place >= of.prompt_len.unsqueeze(1))).float())
    own -= of.frequency.unsqueeze(1) * counts + of.presence.unsqueeze(1) * (counts > 0)
    logits[of.rows] = keep_finite(own)


def keep_allowed(logits: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Set to -inf, in place, what masks forbid. logits[R, V] float32; rows[n] int64, each mask's row, none
    twice; mask[n, ceil(V / 32)] int32, where bit t % 32 of word t // 32 allows token t."""
    logits[rows] = logits[rows].masked_fill(~allowed_tokens(mask, logits.shape[1]), float("-inf"))


def allowed_tokens(mask: Tensor, vocab_size: int) -> Tensor:
    """The bits of such masks, bool [n, V]."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]
