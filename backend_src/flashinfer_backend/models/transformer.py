# SPDX-License-Identifier: Apache-2.0
"""Computes a ModelSpec over a paged key/value cache."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashinfer_backend.models.rope import cos_sin, query_scales
from flashinfer_backend.models.spec import DeltaNet, Experts, FullAttention, LayerSpec, ModelSpec, Product
from flashinfer_backend.ops.collectives import ALONE, Collectives
from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights
from flashinfer_backend.ops.torch_ops import Mixture
from flashinfer_backend.ops.weight import Chosen, LowRank, Weight

KVCaches = list[tuple[Tensor, Tensor]]


class Attention(Protocol):
    """What a layer calls; the step was described to it by plan() beforehand."""

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend q[T, Hq, D] to the layer's cache, which already holds this step's keys and values."""


class Taps(NamedTuple):
    """Which layers' outputs are wanted, ascending; and where they are written:
    out[T, len(layers) * hidden], side by side. None: they are appended to `kept`, [T, hidden] each. A copy
    amid the layers would keep the product behind it from reading its weights early."""

    layers: tuple[int, ...]
    out: Tensor | None
    kept: list[Tensor]


class Recurrent(NamedTuple):
    """What layers that keep states are told of a step: the states of each such layer, and the step's rows."""

    states: list[DeltaStates]
    rows: DeltaRows


class Stream(NamedTuple):
    """What a mixer leaves as it is: the residual stream [T, hidden], and what the gate of attention is the
    sigmoid of, [T, Hq D], where it has one. qkvz, ba: what a delta net takes, the results of its products of
    these names."""

    hidden: Tensor
    gate: Tensor | None = None
    qkvz: Tensor | None = None
    ba: Tensor | None = None

    def of(self, rows: Tensor) -> Stream:
        """What is read of it behind the mixer, of some tokens."""
        return Stream(self.hidden[rows], None if self.gate is None else self.gate[rows])


class Layer(nn.Module):
    """One decoder layer: a weight for each of its spec's products and norms, by their names, and what is
    computed with them behind its mixer."""

    input_norm: nn.Parameter | None
    mixer_norm: nn.Parameter | None
    post_norm: nn.Parameter | None
    mlp_norm: nn.Parameter | None
    o: Weight
    router: Weight
    gate_up: Weight
    down: Weight
    shared_gate_up: Weight
    shared_down: Weight
    xielu: nn.Parameter | None

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, ops: ModuleType, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec, self.ops = spec, ops
        self.eps, self.rank = model.norm_eps, model.shard.rank
        self.input_norm = self.mixer_norm = self.post_norm = self.mlp_norm = None
        for norm in spec.norms:
            size = norm.own.stop - norm.own.start
            setattr(self, norm.name, parameter((size,), dtype, device))
        for product in spec.products:
            setattr(self, product.name, weight(product, dtype, device))
        numbers = spec.mlp.activation == "xielu"
        self.xielu = parameter((4,), torch.float32, device) if numbers else None

    def _product(self, x: Tensor, norm: Tensor | None, weight: Weight, chosen: Chosen | None) -> Tensor:
        """weight of x[T, K], normed first if there is a norm, with its tokens' adapters -> [T, N]."""
        if norm is None:
            return self.ops.linear(x, weight, weight.bias, chosen)
        return self.ops.norm_linear(x, norm, self.eps, weight, weight.bias, chosen=chosen)

    def behind(
        self, x: Tensor, hidden: Tensor, collectives: Collectives, chosen: Chosen | None = None
    ) -> Tensor:
        """From the mixer's result x[T, N] and the residual stream before it to the next one."""
        residual = None if self.mixer_norm is not None else hidden
        added = collectives.all_reduce(self._added(x, self.o, residual, chosen))
        hidden = self._onto(hidden, added, self.mixer_norm)
        residual = None if self.mlp_norm is not None else hidden
        added = collectives.all_reduce(self._mlp(hidden, residual, chosen))
        return self._onto(hidden, added, self.mlp_norm)

    def mlp(self, hidden: Tensor) -> Tensor:
        """What a rank's part of the MLP adds to the residual stream hidden[T, hidden], and on one rank that
        as well, unless what is added is normed first. May overwrite hidden."""
        return self._mlp(hidden, None if self.mlp_norm is not None else hidden)

    def _mlp(self, hidden: Tensor, residual: Tensor | None, chosen: Chosen | None = None) -> Tensor:
        mlp, ops = self.spec.mlp, self.ops
        if isinstance(mlp, Experts):
            direct = () if mlp.scaled_input else (self.gate_up,)  # else its input is scaled behind the norm
            normed, quantised = ops.norm_quantised(hidden, self.post_norm, self.eps, direct)
            logits, residual = ops.router_logits(normed, self.router), self._of_one_rank(residual)
            if mlp.folded is None:
                logits, gate = logits[:, : mlp.count], logits[:, mlp.count : mlp.count + 1]
                if mlp.shared is not None:
                    shared = self._shared(hidden, None if mlp.shared_gate is None else gate)
                    residual = shared if residual is None else residual + shared
            mixture = Mixture(mlp.per_token, mlp.norm_topk, mlp.clip, mlp.scaled_input, mlp.own, mlp.folded)
            return ops.experts_add(normed, logits, self.gate_up, self.down, mixture, residual, quantised)
        plain = mlp.activation == "silu" and self.gate_up.bias is None
        if plain and self.post_norm is not None:
            residual, bias = self._of_one_rank(residual), self._of_one_rank(self.down.bias)
            weights = self.gate_up, self.down
            return ops.mlp_add(hidden, self.post_norm, self.eps, *weights, residual, chosen, bias)
        product = self._product(hidden, self.post_norm, self.gate_up, chosen)
        inner = ops.activate(product, mlp.activation, self.xielu)
        return self._added(inner, self.down, residual, chosen)

    def _shared(self, hidden: Tensor, gate: Tensor | None) -> Tensor:
        """A rank's part of what the MLP adds that all tokens share, times the sigmoid of gate[T, 1]."""
        weights = self.shared_gate_up, self.shared_down
        added = self.ops.mlp_add(hidden, self.post_norm, self.eps, *weights, None)
        return added if gate is None else gate.sigmoid().to(added.dtype) * added

    def _added(self, x: Tensor, weight: Weight, residual: Tensor | None, chosen: Chosen | None) -> Tensor:
        """A rank's part of residual + weight of x + bias + what its tokens' adapters add."""
        return self.ops.linear_add(
            x, weight, self._of_one_rank(residual), chosen, self._of_one_rank(weight.bias)
        )

    def _onto(self, hidden: Tensor, added: Tensor, norm: Tensor | None) -> Tensor:
        """The residual stream behind a mixer or MLP: `added`, which has it, or without it is normed first."""
        return added if norm is None else hidden + self.ops.rms_norm(added, norm, self.eps)

    def _of_one_rank(self, addend: Tensor | None) -> Tensor | None:
        """The ranks' parts are summed, so one of them adds a residual or a bias."""
        return addend if self.rank == 0 else None


class AttentionLayer(Layer):
    """A layer whose mixer is attention.

    cos_sin[positions, rotated values]: the table of its rotary embedding. kv_scales: the checkpoint's, of
    keys and values in a cache of e4m3.
    """

    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    sinks: nn.Parameter | None
    qkv: Weight

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, ops: ModuleType, cos_sin: Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, model, ops, cos_sin.device, dtype)
        assert isinstance(spec.mixer, FullAttention)
        self.mixer = own = spec.mixer
        self.cos_sin, self.kv_scales = cos_sin, (1.0, 1.0)
        if not own.norms:
            self.q_norm = self.k_norm = None
        self.sinks = parameter((own.heads,), torch.float32, cos_sin.device) if own.sinks else None
        self.query_scales: Tensor | None = None
        beta, every, ahead = own.query_scaling or (0.0, 0, 0)
        if beta and len(cos_sin) + ahead > every:
            scales = query_scales(beta, every, ahead, len(cos_sin))
            self.query_scales = scales.to(cos_sin.device, dtype)

    def before(
        self,
        hidden: Tensor,
        positions: Tensor,
        cache_locations: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        out: Tensor | None = None,
        collectives: Collectives = ALONE,
        chosen: Chosen | None = None,
    ) -> tuple[Tensor, Stream]:
        """Up to attention: stores this step's keys and values, returns q[T, Hq, D] (in `out` when given) and
        what goes around attention. chosen: the tokens' adapters, as in Transformer.forward."""
        qkv, gate = self.project(hidden, chosen), None
        if self.mixer.gated:
            gates = self.mixer.heads * self.mixer.head_dim
            gate, qkv = qkv[:, :gates], qkv[:, gates:]
        if self.mixer.qk_norm == "all":
            self._norm_all_heads(qkv, collectives)
        return self.rotate(qkv, positions, cache_locations, kv_cache, out), Stream(hidden, gate)

    def project(self, hidden: Tensor, chosen: Chosen | None) -> Tensor:
        """hidden[T, hidden] -> queries, keys and values, and before them a gate, side by side."""
        return self._product(hidden, self.input_norm, self.qkv, chosen)

    def rotate(
        self,
        qkv: Tensor,
        positions: Tensor,
        cache_locations: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        out: Tensor | None = None,
    ) -> Tensor:
        """q from the product qkv[T, (Hq + 2 Hkv) D] on."""
        mixer = self.mixer
        head_norms = (None, None) if mixer.qk_norm == "all" else (self.q_norm, self.k_norm)
        q = self.ops.rope_and_store(
            qkv,
            positions,
            self.cos_sin,
            *kv_cache,
            cache_locations,
            *head_norms,
            self.eps,
            mixer.heads,
            mixer.kv_heads,
            out,
            self.kv_scales,
            norm_rotated=mixer.qk_norm == "rotated",
        )
        if self.query_scales is not None:
            q *= self.query_scales[positions].view(-1, 1, 1)
        return q

    def _norm_all_heads(self, qkv: Tensor, collectives: Collectives) -> None:
        """Norm the queries of all ranks' heads together, and the keys, in place."""
        mixer, size = self.mixer, collectives.shard.size
        parts = qkv.split([n * mixer.head_dim for n in (mixer.heads, mixer.kv_heads, mixer.kv_heads)], dim=-1)
        wide = [part.float() for part in parts[:2]]
        squares = torch.stack([x.square().mean(-1) for x in wide]) / size
        if size > 1:  # ranks that have the same heads count them equally often
            squares = collectives.sum(squares)
        for part, x, square, weight in zip(parts, wide, squares, (self.q_norm, self.k_norm), strict=False):
            part.copy_((x * torch.rsqrt(square.unsqueeze(-1) + self.eps)).to(part.dtype) * weight)

    def after(
        self, attended: Tensor, stream: Stream, collectives: Collectives, chosen: Chosen | None = None
    ) -> Tensor:
        """From attention on: attended[T, Hq, D] and what goes around it -> the next residual stream."""
        hidden, gate = stream.hidden, stream.gate
        x = attended.view(len(hidden), -1)
        if gate is not None:
            x = self.ops.gated_by(x, gate)
        return self.behind(x, hidden, collectives, chosen)


class DeltaLayer(Layer):
    """A layer whose mixer is a gated delta net."""

    qkvz: Weight
    ba: Weight
    out_norm: nn.Parameter

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, ops: ModuleType, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, model, ops, device, dtype)
        assert isinstance(spec.mixer, DeltaNet)
        self.mixer = own = spec.mixer
        self.conv = parameter((sum(own.widths), own.kernel), dtype, device)
        self.a_log = parameter((own.value_heads,), torch.float32, device)
        self.dt_bias = parameter((own.value_heads,), torch.float32, device)

    def before(self, hidden: Tensor, chosen: Chosen | None = None) -> Stream:
        """Up to the mixer."""
        assert self.input_norm is not None
        products = self.qkvz, self.ba
        qkvz, ba = self.ops.norm_linears(hidden, self.input_norm, self.eps, products, chosen)
        return Stream(hidden, None, qkvz, ba)

    def mix(self, qkvz: Tensor, ba: Tensor, states: DeltaStates, rows: DeltaRows) -> Tensor:
        """The mixer's output for the step's tokens, [T, Hv Dv]."""
        widths = self.mixer.widths
        qkv, z = qkvz.split((sum(widths), widths[2]), dim=-1)
        b, a = ba.chunk(2, dim=-1)
        own = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.out_norm, self.eps)
        return self.ops.delta_net(qkv, z, a, b, own, states, rows)

    def after(
        self, mixed: Tensor, stream: Stream, collectives: Collectives, chosen: Chosen | None = None
    ) -> Tensor:
        """From the mixer on, to the next residual stream."""
        return self.behind(mixed, stream.hidden, collectives, chosen)


class Transformer(nn.Module):
    """Decoder with uninitialised weights; weights.load_weights fills them.

    ops is the module flashinfer_backend.ops.torch_ops or cuda_ops. max_seq_len (tokens; default: the
    checkpoint's max_position_embeddings) sizes the rotary tables: every position must be below it.

    Where spec is a rank's share, the model has its weights alone. The residual stream is the same on all
    ranks; `collectives`, set before the first step, sum what they add to it.
    """

    layers: list[Layer]
    _wanted: Tensor  # int64, tokens whose logits are scores

    def __init__(
        self,
        spec: ModelSpec,
        ops: ModuleType,
        dtype: torch.dtype | str,
        device: torch.device | str,
        max_seq_len: int | None = None,
    ) -> None:
        super().__init__()
        max_seq_len = spec.max_position_embeddings if max_seq_len is None else max_seq_len
        spec.check_max_seq_len(max_seq_len)
        self.spec = spec
        self.ops = ops
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.device = torch.device(device)
        self.collectives = ALONE
        ropes = {mixer.rope for mixer in spec.attentions}
        tables = {rope: cos_sin(rope, max_seq_len).to(self.device) for rope in ropes}
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        self._own_tokens = spec.embedding.sources[0].part.rows
        self.embed_tokens = parameter(spec.embedding.shape, self.dtype, self.device)
        self.embedding_adapters: LowRank | None = None  # where the engine has room for some
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            AttentionLayer(layer, spec, ops, tables[layer.mixer.rope], self.dtype)
            if isinstance(layer.mixer, FullAttention)
            else DeltaLayer(layer, spec, ops, self.device, self.dtype)
            for layer in spec.layers
        )
        # Of each layer, among those with attention or those that keep states.
        kinds = [isinstance(layer, AttentionLayer) for layer in self.layers]
        self.places = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
        self.final_norm = parameter((spec.hidden_size,), self.dtype, self.device)
        tied = spec.tie_word_embeddings
        self.lm_head = (
            Weight("head", self.embed_tokens) if tied else weight(spec.head, self.dtype, self.device)
        )
        scores = spec.pooling is not None and spec.pooling.task == "score" and not spec.pooling.tokens
        shape = (1, spec.hidden_size)
        self.score = parameter(shape, self.dtype, self.device) if scores else None  # all of it on every rank
        wanted = spec.pooling.tokens if spec.pooling is not None else ()
        self.register_buffer("_wanted", torch.tensor(wanted, dtype=torch.int64, device=self.device))

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """The scales of keys and values in a cache of e4m3, for each layer with attention."""
        return tuple(layer.kv_scales for layer in self.attention_layers)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """Those with attention, in their order."""
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache_locations: Tensor | list[Tensor],
        kv_caches: KVCaches,
        attention: Attention,
        rows: Tensor | None = None,
        between_layers: Callable[[], object] = lambda: None,
        taps: Taps | None = None,
        chosen: Chosen | None = None,
        recurrent: Recurrent | None = None,
    ) -> Tensor:
        """One step over T tokens -> [R, hidden], the residual stream of the tokens in `rows` before the final
        norm; of all T without.

        input_ids[T] int32 or int64, positions[T] int32, cache_locations[T] int32 (block * P + offset; a list
        of those of each layer with attention where these are in several cache groups), rows[R] int32;
        kv_caches: (K, V) of each layer with attention, each [blocks, P, Hkv, D]. attention was planned for
        this step. between_layers is called after each layer's attention, so that the caller can do other
        work. taps: other layers' outputs that are wanted. chosen: the tokens' adapters, by their places in
        Weight.adapters; None: no token has one. recurrent: where layers keep states.
        """
        inputs, mixed, stream = (input_ids, positions, cache_locations), None, None
        for index in range(len(self.layers)):
            q, stream = self.piece(index, inputs, kv_caches, mixed, stream, None, taps, chosen)
            if q is None:
                assert recurrent is not None
                mixed = self.mix(index, stream, recurrent)
                continue
            mixed = torch.empty_like(q)
            attention.run(self.places[index], q, mixed)
            between_layers()
        assert mixed is not None and stream is not None
        return self.finish(mixed, stream, rows, chosen, taps)

    def piece(
        self,
        index: int,
        inputs: tuple[Tensor, Tensor, Tensor | list[Tensor]],
        kv_caches: KVCaches,
        mixed: Tensor | None,
        stream: Stream | None,
        out: Tensor | None = None,
        taps: Taps | None = None,
        chosen: Chosen | None = None,
    ) -> tuple[Tensor | None, Stream]:
        """What a step runs before the mixer of layer `index`, from the mixer of the layer before on, or from
        the embedding. mixed: of the mixer before, attention's [T, Hq, D] or a delta net's [T, Hv Dv]; stream:
        what it left as it was. Returns q[T, Hq, D] for attention (in `out` when given) or None, and what goes
        around the mixer. inputs: input_ids, positions and cache_locations of forward(); chosen: its own.
        Writes the output of the layer before to its places in taps."""
        input_ids, positions, locations = inputs
        if mixed is None or stream is None:
            hidden = self.embed(input_ids, chosen)
        else:
            hidden = self._after(index - 1, mixed, stream, chosen)
        self._tap(taps, index - 1, hidden)
        layer, place = self.layers[index], self.places[index]
        if isinstance(layer, DeltaLayer):
            return None, layer.before(hidden, chosen)
        assert isinstance(layer, AttentionLayer)
        cache_locations = locations if isinstance(locations, Tensor) else locations[place]
        where = positions, cache_locations, kv_caches[place]
        return layer.before(hidden, *where, out, self.collectives, chosen)

    def mix(self, index: int, stream: Stream, recurrent: Recurrent) -> Tensor:
        """The mixer of layer `index`, which is a delta net."""
        layer = self.layers[index]
        assert isinstance(layer, DeltaLayer) and stream.qkvz is not None and stream.ba is not None
        return layer.mix(stream.qkvz, stream.ba, recurrent.states[self.places[index]], recurrent.rows)

    def finish(
        self,
        mixed: Tensor,
        stream: Stream,
        rows: Tensor | None,
        chosen: Chosen | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """The last piece, from the last mixer on, for the tokens in `rows`: the others' residual stream is
        not read, but for taps of the last layer."""
        last = len(self.layers) - 1
        if taps is not None and last in taps.layers:
            hidden = self._after(last, mixed, stream, chosen)
            self._tap(taps, last, hidden)
            return hidden if rows is None else hidden[rows]
        if rows is not None:
            mixed, stream = mixed[rows], stream.of(rows)
            chosen = None if chosen is None else chosen.of(rows)
            if not len(rows):
                return stream.hidden
        return self._after(last, mixed, stream, chosen)

    def _tap(self, taps: Taps | None, number: int, hidden: Tensor) -> None:
        """Write a layer's output to its places, or keep it, if it is wanted."""
        if taps is None or number not in taps.layers:
            return
        if taps.out is None:
            following = self.layers[number + 1 : number + 2]
            changed = any(self.ops.overwrites_residual(layer.o, len(hidden)) for layer in following)
            taps.kept.extend([hidden.clone() if changed else hidden] * taps.layers.count(number))
            return
        for layer, place in zip(taps.layers, taps.out.split(hidden.shape[1], dim=1), strict=True):
            if layer == number:
                place.copy_(hidden)

    def _after(self, index: int, mixed: Tensor, stream: Stream, chosen: Chosen | None) -> Tensor:
        layer = self.layers[index]
        assert isinstance(layer, AttentionLayer | DeltaLayer)
        return layer.after(mixed, stream, self.collectives, chosen)

    def embed(self, input_ids: Tensor, chosen: Chosen | None = None) -> Tensor:
        """[T, hidden], the residual stream that the first layer takes."""
        hidden = self._look_up(input_ids, chosen)
        if self.spec.centred:
            hidden = (hidden - hidden.float().mean(-1, keepdim=True)).to(hidden.dtype)
        return hidden if self._embedding_scale == 1 else hidden * self._embedding_scale

    def _look_up(self, input_ids: Tensor, chosen: Chosen | None) -> Tensor:
        adapters = None if chosen is None else self.embedding_adapters
        if self.spec.shard.size == 1:
            hidden = F.embedding(input_ids, self.embed_tokens)
            if adapters is None:
                return hidden
            return self.ops.add_embedded(hidden, input_ids, adapters, chosen)
        own = self._own_tokens
        local = input_ids - own.start
        elsewhere = (local < 0) | (local >= own.stop - own.start)
        hidden = F.embedding(local.masked_fill(elsewhere, 0), self.embed_tokens)
        hidden.masked_fill_(elsewhere.unsqueeze(1), 0.0)
        if adapters is not None:
            hidden = self.ops.add_embedded(hidden, local.masked_fill(elsewhere, -1), adapters, chosen)
        return self.collectives.all_reduce(hidden)

    @torch.inference_mode()
    def compute_products(self, tokens: int, head: bool, chosen: Chosen | None = None) -> None:
        """Compute each product of `tokens` tokens, for what that loads: of layers that are alike those of
        one, and the output projection's if told. chosen: the tokens' adapters. Ranks do not meet."""
        unlike = {}
        for layer in self.layers:
            products = ((each.name, each.shape, each.format, each.bias) for each in layer.spec.products)
            unlike[tuple(products), layer.input_norm is None, layer.post_norm is None] = layer
        hidden = torch.zeros(tokens, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        for layer in unlike.values():
            own = hidden.clone()
            if isinstance(layer, DeltaLayer):
                layer.before(own, chosen)
            elif isinstance(layer, AttentionLayer):
                layer.project(own, chosen)
            layer.behind(own.new_zeros(tokens, layer.o.shape[1]), own, ALONE, chosen)
        if head:
            last = self.final_norm, self.spec.norm_eps, self.lm_head, None
            self.ops.norm_linear(hidden, *last, chosen=chosen)

    def logits(self, hidden: Tensor, out: Tensor | None = None, chosen: Chosen | None = None) -> Tensor:
        """Final norm and output projection: hidden[R, hidden] as forward() returns it -> [R, V], in `out` if
        given. Only rank 0 gets them; on others, what is returned is their own columns. Of a model with
        pooling, what it gives in place of them, [R, spec.outputs]. chosen: the rows' adapters."""
        if self.spec.pooling is not None:
            pooled = self._pooled(hidden, chosen)
            return pooled if out is None else out.copy_(pooled)
        return self._logits(hidden, out, chosen)

    def _pooled(self, hidden: Tensor, chosen: Chosen | None) -> Tensor:
        """See logits(). The residual stream is the same on all ranks, so each computes all of it, but for
        logits of tokens."""
        if len(self._wanted):
            logits = self._logits(hidden, None, chosen)
            # Ranks other than 0 have fewer columns, and their result is not read.
            return logits[:, self._wanted] if self.spec.shard.rank == 0 else logits[:, : len(self._wanted)]
        normed = self.ops.rms_norm(hidden, self.final_norm, self.spec.norm_eps)
        return normed if self.score is None else F.linear(normed, self.score)

    def _logits(self, hidden: Tensor, out: Tensor | None, chosen: Chosen | None) -> Tensor:
        spec, alone = self.spec, self.spec.shard.size == 1
        head, result = (self.final_norm, spec.norm_eps, self.lm_head, None), out if alone else None
        own = self.ops.norm_linear(hidden, *head, out=result, chosen=chosen)
        if (cap := spec.logits_soft_cap) is not None:
            own.div_(cap).tanh_().mul_(cap)
        return own if alone else self.collectives.gather_columns(own, spec.vocab_size, out)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def weight(product: Product, dtype: torch.dtype, device: torch.device) -> Weight:
    weight = Weight.empty(product.role, product.shape, product.format, dtype, device)
    if product.bias:
        weight.bias = parameter(product.shape[:1], dtype, device)
    return weight
