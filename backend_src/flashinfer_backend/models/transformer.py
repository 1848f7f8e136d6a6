# SPDX-License-Identifier: Apache-2.0
"""The decoder of Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE, over a paged key/value cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashinfer_backend.models.config import ModelConfig
from flashinfer_backend.ops.collectives import ALONE
from flashinfer_backend.ops.weight import Role, Weight


class Attention(Protocol):
    """What a layer calls; the step was described to it by plan() beforehand."""

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend q[T, Hq, D] to the layer's cache, which already holds this step's keys and values."""


def rope_inv_freq(config: ModelConfig) -> Tensor:
    """Rotary frequencies in radians per position, [D/2] float32, with the checkpoint's scaling applied."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    if scaling["rope_type"] == "linear":
        return inv_freq / scaling["factor"]
    # llama3: long wavelengths are stretched by the factor, short ones kept, those between interpolated.
    # Source: rope scaling of Llama 3.1, https://github.com/meta-llama/llama-models (models/llama3/model.py).
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / scaling["factor"] + smooth * inv_freq
    # Long goes first, as in transformers: with low above high a wavelength can be both.
    kept = torch.where(wavelength < original / high, inv_freq, blended)
    return torch.where(wavelength > original / low, inv_freq / scaling["factor"], kept)


def rope_cos_sin(config: ModelConfig, max_positions: int) -> Tensor:
    """[max_positions, D] float32: cosines in the first D/2 columns, sines in the last."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), rope_inv_freq(config))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Layer(nn.Module):
    """Weights of one decoder layer. qkv holds the rows of Q, K and V in this order, gate_up gate then up;
    with experts, gate_up and down hold those of the first expert, then of the second and so on.
    kv_scales: the checkpoint's, of keys and values in a cache of e4m3."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        def weight(role: Role) -> Weight:
            return Weight.empty(role, config.shape(role), config.weight_format(index, role), dtype, device)

        hidden, head_dim = config.hidden_size, config.head_dim
        self.input_norm = parameter(hidden)
        self.qkv = weight("qkv")
        self.qkv_bias = parameter(len(self.qkv.data)) if config.qkv_bias else None
        self.q_norm = parameter(head_dim) if config.qk_norm else None
        self.k_norm = parameter(head_dim) if config.qk_norm else None
        self.o = weight("o")
        self.post_norm = parameter(hidden)
        self.router = parameter(config.num_experts, hidden) if config.num_experts else None
        self.gate_up = weight("gate_up")
        self.down = weight("down")
        self.kv_scales = (1.0, 1.0)


class Transformer(nn.Module):
    """Decoder with uninitialised weights; weights.load_weights fills them.

    ops is the module flashinfer_backend.ops.torch_ops or cuda_ops. max_seq_len (tokens; default: the
    checkpoint's max_position_embeddings) sizes the rotary table: every position must be below it.

    Where config is a rank's share, the model has its weights alone. The residual stream is the same on all
    ranks; `collectives`, set before the first step, sum what they add to it.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: ModuleType,
        dtype: torch.dtype | str,
        device: torch.device | str,
        max_seq_len: int | None = None,
    ) -> None:
        super().__init__()
        max_seq_len = config.max_position_embeddings if max_seq_len is None else max_seq_len
        config.check_max_seq_len(max_seq_len)
        self.config = config
        self.ops = ops
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.device = torch.device(device)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)

        self.collectives = ALONE
        self.embed_tokens = parameter(config.vocab_rows, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, index, self.dtype, self.device) for index in range(config.num_layers)
        )
        self.final_norm = parameter(config.hidden_size)
        tied = config.tie_word_embeddings
        head = self.embed_tokens if tied else parameter(config.vocab_rows, config.hidden_size)
        self.lm_head = Weight("head", head)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", rope_cos_sin(config, max_seq_len).to(self.device), persistent=False)

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """Of keys and values in a cache of e4m3, by layer."""
        return tuple(layer.kv_scales for layer in self.layers if isinstance(layer, Layer))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache_locations: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        attention: Attention,
        rows: Tensor | None = None,
        between_layers: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """One step over T tokens -> [R, hidden], the residual stream of the tokens in `rows` before the final
        norm; of all T without.

        input_ids[T] int32 or int64, positions[T] int32, cache_locations[T] int32 (block * P + offset),
        rows[R] int32; kv_caches: per layer (K, V), each [blocks, P, Hkv, D]. attention was planned for this
        step. between_layers is called after each layer's attention, so that the caller can do other work.
        """
        hidden = self.embed(input_ids)
        last = len(self.layers) - 1
        for index in range(last + 1):
            q = self.before_attention(index, hidden, positions, cache_locations, kv_caches[index])
            out = torch.empty_like(q)
            attention.run(index, q, out)
            between_layers()
            if index < last:
                hidden = self.after_attention(index, out, hidden)
        return self.finish(out, hidden, rows)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T, hidden], the residual stream that the first layer takes."""
        shard, own = self.config.shard, self.config.local_vocab
        if shard.size == 1:
            return F.embedding(input_ids, self.embed_tokens)
        local = input_ids - own.start
        elsewhere = (local < 0) | (local >= own.stop - own.start)
        hidden = F.embedding(local.masked_fill(elsewhere, 0), self.embed_tokens)
        return self.collectives.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def before_attention(
        self,
        index: int,
        hidden: Tensor,
        positions: Tensor,
        cache_locations: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        out: Tensor | None = None,
    ) -> Tensor:
        """First part of layer `index`: stores this step's keys and values, returns q[T, Hq, D] (in `out`
        when given)."""
        config, layer, ops = self.config, self.layers[index], self.ops
        qkv = ops.norm_linear(hidden, layer.input_norm, config.rms_norm_eps, layer.qkv, layer.qkv_bias)
        return ops.rope_and_store(
            qkv,
            positions,
            self.cos_sin,
            *kv_cache,
            cache_locations,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            config.num_heads,
            config.num_kv_heads,
            out,
            layer.kv_scales,
        )

    def after_attention(self, index: int, attended: Tensor, hidden: Tensor) -> Tensor:
        """Second part of layer `index`: attended[T, Hq, D] and the residual stream -> the next one."""
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        partial = self.ops.linear_add(attended.view(hidden.shape[0], -1), layer.o, self._of_one_rank(hidden))
        hidden = self.collectives.all_reduce(partial)
        return self.collectives.all_reduce(self.mlp(layer, hidden))

    def mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        """What a rank's part of the layer's MLP adds to the residual stream hidden[T, hidden], and on one
        rank that, too. May overwrite hidden."""
        config, ops, residual = self.config, self.ops, self._of_one_rank(hidden)
        if layer.router is None:
            gated = ops.norm_gate_up_silu(hidden, layer.post_norm, config.rms_norm_eps, layer.gate_up)
            return ops.linear_add(gated, layer.down, residual)
        routing = config.experts_per_token, config.norm_topk_prob
        norm = layer.post_norm, config.rms_norm_eps
        return ops.experts_add(hidden, *norm, layer.router, layer.gate_up, layer.down, *routing, residual)

    def _of_one_rank(self, residual: Tensor) -> Tensor | None:
        """The ranks' parts are summed, so one of them adds the residual."""
        return residual if self.config.shard.rank == 0 else None

    def finish(self, attended: Tensor, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """after_attention() of the last layer for the tokens in `rows`: nobody reads the others' outcome."""
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
            if not len(rows):
                return hidden
        return self.after_attention(len(self.layers) - 1, attended, hidden)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Final norm and output projection: hidden[R, hidden] as forward() returns it -> [R, V], in `out` if
        given. Only rank 0 gets them; on others, what is returned is their own columns."""
        config, alone = self.config, self.config.shard.size == 1
        own = self.ops.norm_linear(
            hidden, self.final_norm, config.rms_norm_eps, self.lm_head, None, out=out if alone else None
        )
        return own if alone else self.collectives.gather_columns(own, config.vocab_size, out)
