# SPDX-License-Identifier: Apache-2.0
"""What is computed: a model as a list of layer specs, of the whole checkpoint or of one rank's share.

Read without torch, for build.py. models/hf makes the specs, models/transformer.py computes them, and
models/weights.py fills their products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from flashinfer_backend.core.shard import WHOLE, Part, Shard
from flashinfer_backend.core.tuned import GATED, Role, Shape
from flashinfer_backend.core.values import some
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.pooling import Pooling
from flashinfer_backend.models.quantization import BLOCK, GROUP_MXFP4, WeightFormat

Spec = TypeVar("Spec", bound="ModelSpec")
MLP = TypeVar("MLP", bound="Gated")

ROWS_MOVE = "dense", "fp8_token", "fp8_static", "fp8_on_load"  # formats whose rows can be put in any order
CENTRED = "dense", "fp8_on_load"  # formats whose rows can be changed
STACKED = "dense", "fp8_on_load", "mxfp4"  # formats that are read where all experts are one tensor
# What transformers calls scales of FP8 weights without blocks, as Mistral publishes them, and names here.
SCALE_NAMES = {".weight_scale_inv": ".weight_scale", ".activation_scale": ".input_scale"}
MOST_FOLDED = 2  # parts of a shared expert that become further experts
ROUTER_GRAIN = 8  # rows of a router with further ones come in multiples: its logits' rows are aligned
VOCAB_GRAIN = 16  # rows of a rank's share of the vocabulary come in multiples, as its kernels want them


Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"]


class Source(NamedTuple):
    """A module of the checkpoint, by its name within the layer, and the part of its matrix that is stored.
    Several sources can be parts of one module. order: of the rows within each head, as they are stored; ():
    as they are in the checkpoint. turn: (index, count) of one of `count` sources that ranks have whole, each
    an equal number; None: ranks divide its rows."""

    module: str
    part: Part
    order: tuple[int, ...] = ()
    turn: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return self.part.rows.stop - self.part.rows.start


class Stack(NamedTuple):
    """One tensor of all experts' matrices, [E, N, K], or [E, K, N] where they are `transposed`. name: the
    tensor's, within the layer; where the sources' module is the same, no checkpoint has experts apart. turns:
    the rows of an expert's sources take turns; else they follow each other. In MXFP4, and biases, as GPT-OSS
    has them: more tensors, never transposed, whose names begin with this one's."""

    name: str
    transposed: bool = False
    turns: bool = False


@dataclass(frozen=True)
class Product:
    """One matrix product, x[T, K] @ weight[N, K].T.

    name: what the layer calls the weight. sources: whose rows the weight has, one source below the other.
    cut: what ranks divide: the rows of each source, in multiples of `grain`; its columns, so that the ranks'
    products are summed; or nothing. role: of its numbers in core.tuned; "" for a product that is not tuned
    and never quantised. bias: each source has one. experts: how many matrices of equal size the weight has,
    each for other tokens; 0: it is one matrix, for all. padding: rows of zeros behind the sources'.
    scale: what the checkpoint's weight is multiplied by. centred: the mean of the weight's rows is taken from
    each of them, so that the product's mean is 0. stack: a tensor that checkpoints have in place of
    the sources'. first_expert, elsewhere: which of the checkpoint's experts these are, and the
    sources of those that other ranks have. folded: how many of `experts`, the last ones, are equal parts of
    the expert that all tokens share (Experts.folded). format: one of ops.weight.FORMATS.
    """

    name: str
    sources: tuple[Source, ...]
    cut: Literal["rows", "columns"] | None
    role: Role
    grain: int = 1
    bias: bool = False
    experts: int = 0
    padding: int = 0
    scale: float = 1.0
    centred: bool = False
    stack: Stack | None = None
    first_expert: int = 0
    elsewhere: tuple[Source, ...] = ()
    folded: int = 0
    format: WeightFormat = "dense"

    @cached_property
    def shape(self) -> Shape:
        """[N, K] of the weight; of experts, all of them below each other."""
        columns = self.sources[0].part.columns
        return sum(source.rows for source in self.sources) + self.padding, columns.stop - columns.start

    @property
    def all_experts(self) -> int:
        """How many experts the checkpoint has, without a folded one."""
        return self.experts - self.folded + len(self.elsewhere) * self.experts // len(self.sources)

    @property
    def folded_sources(self) -> tuple[Source, ...]:
        """Those of the parts of a folded expert."""
        return self.sources[-self.folded * len(self.sources) // self.experts :] if self.folded else ()

    def with_folded(self, parts: list[Product]) -> Product:
        """That of the experts and behind them of the parts of the one that all tokens share."""
        sources = (source for part in parts for source in part.sources)
        experts = self.experts + len(parts)
        return replace(self, sources=(*self.sources, *sources), experts=experts, folded=len(parts))

    def of_experts(self, first: int, count: int) -> Product:
        """That of `count` experts alone."""
        each = len(self.sources) // self.experts
        own = slice(first * each, (first + count) * each)
        others = *self.sources[: own.start], *self.sources[own.stop :]
        return replace(self, sources=self.sources[own], experts=count, first_expert=first, elsewhere=others)

    @property
    def stacked(self) -> bool:
        """Whether every checkpoint has all experts in one tensor."""
        return self.stack is not None and self.stack.name == self.sources[0].module

    @property
    def gated(self) -> bool:
        """Whether the rows are a gate's and as many of what it multiplies."""
        return self.role == GATED

    @property
    def adds(self) -> bool:
        """Whether it is added to the residual stream, of which one rank has the sum so far."""
        return self.cut == "columns"

    @property
    def modules(self) -> list[str]:
        return [source.module for source in self.sources]

    @cached_property
    def runs(self) -> list[tuple[Source, ...]]:
        """The sources, those of one module that follow each other together."""
        return [tuple(run) for _, run in itertools.groupby(self.sources, lambda source: source.module)]

    def share(self, shard: Shard) -> Product:
        """One rank's share. Where there are fewer grains than ranks, several ranks have the same."""
        if self.cut is None or shard.size == 1:
            return self
        own = [self._share(source, shard) for source in self.sources if _has(source, shard)]
        return replace(self, sources=tuple(own))

    def _share(self, source: Source, shard: Shard) -> Source:
        part = source.part
        if source.turn is not None:
            return source
        if self.cut == "rows":
            part = part._replace(rows=_own(part.rows, self.grain, shard))
        else:
            part = part._replace(columns=_own(part.columns, self.grain, shard))
        return source._replace(part=part)

    def check_format(self, shard: Shard) -> None:
        """Raise UnsupportedModelError where the sources cannot be stored as one weight of the format, or the
        format is not computed for experts."""
        where = f" on each of {shard.size} ranks" if shard.size > 1 else ""
        if self.experts and self.format == "fp8_static":
            raise UnsupportedModelError(
                "experts in FP8 with stored scales of activations are not supported; take one with dynamic"
                " scales, or the 16-bit checkpoint, with the knob quantization=fp8 if it should be FP8"
            )
        if self.centred and self.format not in CENTRED:
            raise UnsupportedModelError(
                f"{', '.join(self.modules)} have format {self.format}, of which the mean that this family's"
                " LayerNorm subtracts cannot be taken away: take the 16-bit checkpoint"
            )
        if any(source.order for source in self.sources) and not self.format.startswith(ROWS_MOVE):
            raise UnsupportedModelError(
                f"{', '.join(self.modules)} have format {self.format}, whose rows cannot be put in the order"
                " that this family's rotary embedding wants: take the 16-bit checkpoint"
            )
        if self.stacked and self.format not in STACKED:
            raise UnsupportedModelError(
                f"{self.modules[0]} holds all experts in one tensor, which is not read in format"
                f" {self.format}; read are {', '.join(STACKED)}"
            )
        if self.format == "mxfp4":
            self._check_mxfp4(where)
        if self.format.startswith("int4"):
            self._check_int4(where)
        if self.format.startswith("fp8_block"):
            self._check_blocks(where)

    @property
    def _smaller(self) -> str:
        """How ranks get larger parts."""
        also = " or a larger expert_parallel_size" if self.experts else ""
        return f": set a smaller tensor_parallel_size{also}"

    def _check_mxfp4(self, where: str) -> None:
        columns = self.shape[1]
        if not self.stacked:
            raise UnsupportedModelError(
                f"{some(self.modules)} should not be in MXFP4, which is for GPT-OSS's experts: list them in"
                " quantization_config.modules_to_not_convert if they have 16 bits"
            )
        if columns % GROUP_MXFP4:
            cure = self._smaller if where else ""
            raise UnsupportedModelError(
                f"{self.modules[0]} would have {columns} columns{where}; in MXFP4 they should be a multiple"
                f" of {GROUP_MXFP4}{cure}"
            )

    def _check_int4(self, where: str) -> None:
        columns, size = self.shape[1], self.format.rpartition("_")[2]
        for source in self.sources:
            if source.rows % 8:
                raise UnsupportedModelError(
                    f"{source.module} has {source.rows} rows{where}; with 4-bit weights they should be a"
                    " multiple of 8"
                )
        grain = int(size) if size.isdigit() else 8
        if columns % grain:
            raise UnsupportedModelError(
                f"{', '.join(self.modules)} have {columns} columns{where}; in format {self.format} they"
                f" should be a multiple of {grain}"
            )

    def _check_blocks(self, where: str) -> None:
        begins_within = len(self.sources) > 1 or (where and self.cut == "rows")
        for source in self.sources:
            if source.rows % BLOCK and begins_within:
                cure = self._smaller if where else ""
                raise UnsupportedModelError(
                    f"{source.module} has {source.rows} rows{where}; with FP8 scales of {BLOCK}x{BLOCK}"
                    f" blocks the parts of one product should have multiples of {BLOCK}{cure}"
                )
        columns = self.shape[1]
        if where and self.cut == "columns" and columns % BLOCK:
            raise UnsupportedModelError(
                f"{some(self.modules)} would have {columns} columns{where}; with FP8 scales of"
                f" {BLOCK}x{BLOCK} blocks it should be a multiple of {BLOCK}{self._smaller}"
            )


class Norm(NamedTuple):
    """An RMSNorm's weight: what the layer calls it, the checkpoint's module within the layer ("": it has
    none, and the weight is 1), its length there. It is the checkpoint's times `scale` plus `offset`. grain:
    each rank has a multiple of this many values; 0: every rank has all of them. rows: of a rank's share."""

    name: str
    module: str
    size: int
    grain: int = 0
    scale: float = 1.0
    offset: float = 0.0
    rows: slice | None = None

    @property
    def own(self) -> slice:
        return self.rows or slice(0, self.size)

    def share(self, shard: Shard) -> Norm:
        return self._replace(rows=_own(self.own, self.grain, shard)) if self.grain else self


def _has(source: Source, shard: Shard) -> bool:
    """Whether a rank has some of a source."""
    if source.turn is None:
        return True
    index, count = source.turn
    own = _own(slice(0, count), 1, shard)
    return own.start <= index < own.stop


def _own(rows: slice, grain: int, shard: Shard) -> slice:
    """A rank's part of some rows, in multiples of grain."""
    length = rows.stop - rows.start
    first = rows.start + shard.rank * length // shard.size // grain * grain
    return slice(first, first + max(grain, length // shard.size))


@dataclass(frozen=True)
class LinearScaling:
    """Rotary frequencies divided by a factor."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths stretched by the factor, short ones kept, those between interpolated. original: the
    positions that the model was first trained with."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


@dataclass(frozen=True)
class YarnScaling:
    """NTK by parts: wavelengths that turn more than `fast` times within the `original` positions are kept,
    those that turn less than `slow` times stretched by the factor. truncate: bounds are whole dimensions.
    magnitude: what cosines and sines are multiplied by. https://arxiv.org/abs/2309.00071."""

    factor: float
    original: int
    magnitude: float
    fast: float
    slow: float
    truncate: bool


@dataclass(frozen=True)
class LongScaling:
    """Each wavelength stretched by a factor of its own: `short` ones for sequences of up to `original`
    positions, `long` ones beyond. magnitude: as of YarnScaling. https://arxiv.org/abs/2402.13753."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    magnitude: float


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `dim` values of heads: https://arxiv.org/abs/2104.09864."""

    theta: float
    dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongScaling | None = None


@dataclass(frozen=True)
class FullAttention:
    """Causal attention with grouped queries. qkv holds the rows of Q, K and V in this order. rope: None:
    queries and keys are not rotated. qk_norm: queries and keys are normed, each head ("head") or all heads
    together ("all") before they are rotated, or each head behind ("rotated"). norms: theirs. window: the
    latest tokens that a token sees, itself included; None: all. scale, soft_cap: of the scores
    (attention.contract.Scores); None: 1 / sqrt(head_dim), and none. sinks: whether the checkpoint has a sink
    for each head. query_scaling: (beta, positions, ahead), by which rotated queries grow
    (models.rope.query_scales). variant: in attention.variants.VARIANTS, how scores become weights otherwise,
    with its number for each head (by_head), where a sequence can be longer than `variant_beyond` tokens.
    gated: before the queries qkv has the rows of a gate, by whose sigmoid what is attended is multiplied:
    https://arxiv.org/abs/2505.06708."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    qkv: Product
    o: Product
    qk_norm: Literal["", "head", "all", "rotated"] = ""
    norms: tuple[Norm, ...] = ()
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    query_scaling: tuple[float, int, int] | None = None
    variant: str = ""
    variant_beyond: int = 0
    by_head: tuple[float, ...] = ()
    gated: bool = False

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.o

    @property
    def own_heads(self) -> slice:
        """Which of the checkpoint's query heads these are."""
        rows = self.qkv.sources[0].part.rows
        return slice(rows.start // self.head_dim, rows.stop // self.head_dim)

    def share(self, shard: Shard) -> FullAttention:
        """Whole heads. Fewer key/value heads than ranks are held by several ranks each."""
        size, where = shard.size, f"tensor_parallel_size={shard.size}"
        _check_divides(size, self.heads, "num_attention_heads")
        if self.kv_heads > size:
            _check_divides(size, self.kv_heads, "num_key_value_heads")
        elif size % self.kv_heads:
            raise UnsupportedModelError(
                f"{where} should be a multiple of num_key_value_heads, which is {self.kv_heads}, or divide it"
            )
        return replace(
            self.map(lambda product: product.share(shard)),
            heads=self.heads // size,
            kv_heads=max(1, self.kv_heads // size),
            norms=tuple(norm.share(shard) for norm in self.norms),
            by_head=self.by_head[shard.rank * self.heads // size : (shard.rank + 1) * self.heads // size],
        )

    def map(self, change: Callable[[Product], Product]) -> FullAttention:
        return replace(self, qkv=change(self.qkv), o=change(self.o))


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net layer, which keeps a state of each sequence in place of keys and values:
    https://arxiv.org/abs/2412.06464. key_dim: of a head's queries and keys; value_dim: of its values. kernel:
    how many tokens' queries, keys and values are convolved. qkvz holds the rows of queries, keys, values and,
    as many, of a gate; ba those of each value head's beta and decay, in 16 bits. shard: which heads these
    are."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    qkvz: Product
    ba: Product
    o: Product
    shard: Shard = WHOLE

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (Norm("out_norm", "linear_attn.norm", self.value_dim),)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkvz, self.ba, self.o

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values, which are the convolution's channels."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def own_channels(self) -> list[slice]:
        """Which of the checkpoint's channels these are: of queries, keys and values."""
        found, start = [], 0
        for width in self.widths:
            first = start + self.shard.rank * width
            found.append(slice(first, first + width))
            start += width * self.shard.size
        return found

    @property
    def own_heads(self) -> slice:
        """Which of the checkpoint's value heads these are."""
        first = self.shard.rank * self.value_heads
        return slice(first, first + self.value_heads)

    def share(self, shard: Shard) -> DeltaNet:
        """Whole key heads, each with its value heads."""
        _check_divides(shard.size, self.key_heads, "linear_num_key_heads")
        keys, values = self.key_heads // shard.size, self.value_heads // shard.size
        own = self.map(lambda product: product.share(shard))
        return replace(own, ba=self.ba.share(shard), key_heads=keys, value_heads=values, shard=shard)

    def map(self, change: Callable[[Product], Product]) -> DeltaNet:
        """The same with other products, of those that can be quantised."""
        return replace(self, qkvz=change(self.qkvz), o=change(self.o))


Mixer = FullAttention | DeltaNet


@dataclass(frozen=True)
class Gated:
    """down(activation(gate(x)) * up(x)): https://arxiv.org/abs/2002.05202. Without a gate (gate_up is not
    `gated`), down(activation(up(x))). size: rows of the gate. size_key: what config.json calls it."""

    size: int
    size_key: str
    gate_up: Product
    down: Product
    activation: Activation = field(default="silu", kw_only=True)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate_up, self.down

    def share(self: MLP, shard: Shard) -> MLP:
        """An equal part of the gate's rows."""
        _check_divides(shard.size, self.size, self.size_key)
        return replace(self.map(lambda product: product.share(shard)), size=self.size // shard.size)

    def map(self: MLP, change: Callable[[Product], Product]) -> MLP:
        return replace(self, gate_up=change(self.gate_up), down=change(self.down))


@dataclass(frozen=True)
class Experts(Gated):
    """The weighted sum of `per_token` of `count` gated MLPs, which a router chooses for each token by the
    softmax of its logits: https://arxiv.org/abs/2101.03961. norm_topk: a token's weights are divided by their
    sum. scaled_input: of a token's one expert the input is multiplied, by the sigmoid of its logit, and the
    result is not. gate_up and down hold those of the first expert, then of the second and so on. clip: of
    their activation, as ops.torch_ops.gated takes it. shared: an MLP of every token, whose result is added,
    times the sigmoid of shared_gate's one value, where there is one. own: the first of a rank's whole
    experts, and how many it has; None: all. The weights are those of `products`: the shared gate's row is
    behind the router's, the shared MLP is `folded` or has products named shared_gate_up and shared_down."""

    router: Product
    count: int
    per_token: int
    norm_topk: bool
    clip: tuple[float, float] | None = None
    shared: Gated | None = None
    shared_gate: Product | None = None
    scaled_input: bool = False
    own: tuple[int, int] | None = None

    @property
    def folded(self) -> tuple[int, int] | None:
        """The shared MLP as further experts, which every token has and gate_up and down hold behind the
        others: the number of the first, and how many. None: there is none, or it is computed apart, as its
        size is no small multiple of an expert's, it has other formats, a token's one expert has another
        input, or the rank has only some experts. Where it is much of the work, as with a token's one expert,
        products of their own are faster for prompts."""
        shared = self.shared
        if shared is None or self.own is not None or self.scaled_input or shared.size % self.size:
            return None
        count = shared.size // self.size
        formats = [(mlp.gate_up.format, mlp.down.format) for mlp in (self, shared)]
        return (self.count, count) if count <= MOST_FOLDED and formats[0] == formats[1] else None

    @cached_property
    def products(self) -> tuple[Product, ...]:
        router, gate_up, down, shared = self.router, self.gate_up, self.down, self.shared
        if self.shared_gate is not None:
            sources = *router.sources, *self.shared_gate.sources
            router = replace(router, sources=sources, padding=-(self.count + 1) % ROUTER_GRAIN)
        if shared is None or self.folded is None:
            return router, gate_up, down, *(() if shared is None else shared.products)
        _, count = self.folded
        parts = [shared.share(Shard(index, count)) for index in range(count)]
        gate_up = gate_up.with_folded([part.gate_up for part in parts])
        return router, gate_up, down.with_folded([part.down for part in parts])

    def share(self, shard: Shard) -> Experts:
        """An equal part of the gates' rows; with groups of ranks, of a group's experts."""
        groups, within = shard.expert_groups, shard.in_group
        if groups == 1:
            own = super().share(shard)
        else:
            knob = "expert_parallel_size"
            _check_divides(groups, self.count, "the number of experts", knob)
            _check_divides(within.size, self.size, self.size_key, f"tensor_parallel_size / {knob}")
            count = self.count // groups
            place = shard.rank // within.size * count, count
            own = super().share(within)
            gate_up, down = own.gate_up.of_experts(*place), own.down.of_experts(*place)
            own = replace(own, gate_up=gate_up, down=down, own=place)
        return own if self.shared is None else replace(own, shared=self.shared.share(shard))

    def map(self, change: Callable[[Product], Product]) -> Experts:
        own = super().map(change)
        return own if self.shared is None else replace(own, shared=self.shared.map(change))


@dataclass(frozen=True)
class LayerSpec:
    """hidden + mixer(hidden), and to that + mlp(of it). own_norms: those of the residual stream before the
    mixer (input_norm) and the MLP (post_norm), and of what the mixer (mixer_norm) and the MLP (mlp_norm) add
    to it; each may be missing. prefix: of the checkpoint's modules."""

    prefix: str
    mixer: Mixer
    mlp: Gated
    own_norms: tuple[Norm, ...]

    @property
    def norms(self) -> tuple[Norm, ...]:
        return *self.own_norms, *self.mixer.norms

    @property
    def products(self) -> tuple[Product, ...]:
        return *self.mixer.products, *self.mlp.products

    @property
    def adaptable(self) -> tuple[Product, ...]:
        """Products that adapters can add to; experts, routed or shared, have none."""
        return *self.mixer.products, *(() if isinstance(self.mlp, Experts) else self.mlp.products)

    def share(self, shard: Shard) -> LayerSpec:
        return replace(self, mixer=self.mixer.share(shard), mlp=self.mlp.share(shard))

    def map(self, change: Callable[[Product], Product]) -> LayerSpec:
        """The same with other products, of those that can be quantised."""
        return replace(self, mixer=self.mixer.map(change), mlp=self.mlp.map(change))


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding, layers, final norm, head. Of a rank's share (`share`), layers have its heads and
    rows alone, and vocab_size is the whole's.

    norm_eps: of every RMSNorm. format: of the layers' products, as the checkpoint says; those that it leaves
    out are dense. dtype: the checkpoint's. initializer_range: the standard deviation of random weights.
    disputed_window: a sliding_window that some engines apply and others ignore, so that longer sequences are
    not computed; None: there is none. aliases: beginnings of its tensors' names, and what they are here.
    ignored: beginnings of names of tensors that are not read. embedding_scale: what embeddings are multiplied
    by, rounded to the model's type. centred: all that is written to the residual stream has a mean of 0, so
    that an RMSNorm of it is a LayerNorm: https://arxiv.org/abs/1607.06450. logits_soft_cap: logits become
    soft_cap * tanh(logit / soft_cap).
    pooling: what an embedding model or a reranker gives in place of logits. mtp: the layer of a head for
    drafts that the checkpoint brings (speculate.mtp).
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    norm_eps: float
    final_norm: Norm
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    initializer_range: float
    format: WeightFormat = "dense"
    shard: Shard = WHOLE
    disputed_window: int | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    embedding_scale: float = 1.0
    centred: bool = False
    logits_soft_cap: float | None = None
    pooling: Pooling | None = None
    mtp: LayerSpec | None = None

    def share(self: Spec, shard: Shard) -> Spec:
        """One rank's share under tensor parallelism: whole heads, and an equal part of each MLP's rows and of
        the vocabulary.

        Raises UnsupportedModelError where the model cannot be cut into `shard.size` shares.
        """
        if shard.size == 1:
            return self
        mtp = None if self.mtp is None else self.mtp.share(shard)
        layers = tuple(layer.share(shard) for layer in self.layers)
        return replace(self, layers=layers, mtp=mtp, shard=shard).checked()

    def pooled(self: Spec, pooling: Pooling | None) -> Spec:
        """The same as an embedding model or a reranker. Tensors may lack the prefix of the model's module; a
        head whose logits are not read is not kept."""
        if pooling is None:
            return self
        if self.final_norm.scale != 1:
            raise UnsupportedModelError("this family's hidden states are scaled, so they are no embeddings")
        bare = tuple((name, f"model.{name}") for name in ("embed_tokens.", "layers.", "norm."))
        headless = not pooling.tokens
        return replace(
            self,
            pooling=pooling,
            aliases=(*self.aliases, *bare),
            ignored=(*self.ignored, "lm_head.") if headless else self.ignored,
            tie_word_embeddings=self.tie_word_embeddings or headless,
        )

    def mtp_head(self) -> ModelSpec:
        """The head of `mtp`, which norms what it gives on. Raises UnsupportedModelError without one."""
        if self.mtp is None:
            raise UnsupportedModelError(
                "speculative_method=mtp needs a checkpoint of a family that brings such a head (Qwen3.5,"
                " Qwen3-Next), of one layer: set it to ngram, eagle3 or none"
            )
        return replace(self, layers=(self.mtp,), mtp=None, tie_word_embeddings=False)

    @property
    def outputs(self) -> int:
        """Numbers for each sampled token: logits of the vocabulary, or what a pooling model gives."""
        if self.pooling is None:
            return self.vocab_size
        return self.hidden_size if self.pooling.task == "embed" else len(self.pooling.tokens) or 1

    def with_format(self: Spec, format: WeightFormat) -> Spec:
        """The same with all products of its layers in this format. Raises as checked()."""

        def formatted(layer: LayerSpec) -> LayerSpec:
            return layer.map(lambda product: replace(product, format=format))

        layers, mtp = tuple(map(formatted, self.layers)), None if self.mtp is None else formatted(self.mtp)
        return replace(self, layers=layers, mtp=mtp, format=format).checked()

    def quantised_on_load(self: Spec) -> Spec:
        """The same with its layers' products in FP8, made from 16-bit weights while they load.

        Raises UnsupportedModelError for a checkpoint that is quantised already.
        """
        if self.format != "dense":
            raise UnsupportedModelError(
                f"quantization=fp8 is for checkpoints of 16 or 32 bits, and this one is quantised already"
                f" ({self.format}); it is served as it is with quantization=auto"
            )
        return self.with_format("fp8_on_load")

    def checked(self: Spec) -> Spec:
        """Itself. Raises UnsupportedModelError as check_format does of its products."""
        for product in self.products:
            product.check_format(self.shard)
        return self

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Those of all layers that differ in name, shape or format, and the head."""
        every = (product for layer in self.layers for product in layer.products)
        found = {(product.name, product.shape, product.experts, product.format): product for product in every}
        return *found.values(), self.head

    def known_name(self, name: str) -> str:
        """What a tensor of the checkpoint is called here."""
        for beginning, own in self.aliases:
            if name.startswith(beginning):
                name = own + name.removeprefix(beginning)
                break
        if self.format in ("fp8_static", "fp8_token"):
            for end, own in SCALE_NAMES.items():
                if name.endswith(end):
                    return name.removesuffix(end) + own
        return name

    @property
    def embedding(self) -> Product:
        """The rank's rows of the embedding, which are looked up."""
        return self._vocabulary("embed_tokens", "model.embed_tokens", "")

    @property
    def head(self) -> Product:
        """The rank's columns of the logits."""
        return self._vocabulary("lm_head", "lm_head", "head")

    def _vocabulary(self, name: str, module: str, role: Role) -> Product:
        size, columns = self.shard.size, slice(0, self.hidden_size)
        grain = VOCAB_GRAIN if size > 1 else 1
        count = -(-self.vocab_size // (size * grain)) * grain
        first, last = (min(rank * count, self.vocab_size) for rank in (self.shard.rank, self.shard.rank + 1))
        part = Part((self.vocab_size, self.hidden_size), slice(first, last), columns)
        return Product(name, (Source(module, part),), "rows", role, padding=count - (last - first))

    @property
    def vocabulary(self) -> tuple[Product, ...]:
        """What adapters of the vocabulary add to: the embedding, as a product of tokens' unit vectors, and
        the head, where its logits are read."""
        (source,) = self.embedding.sources
        (rows, columns), own, every = source.part
        embedding = Source(source.module, Part((columns, rows), every, own))
        looked_up = Product("embed_tokens", (embedding,), "columns", "")
        read = self.pooling is None or bool(self.pooling.tokens)
        return (looked_up, self.head) if read else (looked_up,)

    @property
    def attentions(self) -> list[FullAttention]:
        """Those of the layers that have one, in their order; the n-th has the n-th keys and values."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, FullAttention)]

    @property
    def delta_nets(self) -> list[DeltaNet]:
        """Those of the layers that keep a state, in their order; the n-th has the n-th states."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet)]

    @property
    def attention(self) -> FullAttention:
        """That of every layer with one: caches and kernels have one shape of heads."""
        return self.attentions[0]

    @property
    def mlp(self) -> Gated:
        """That of the first layer."""
        return self.layers[0].mlp

    @property
    def experts(self) -> Experts | None:
        """Those of every layer that has some."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)), None)

    @property
    def mlps(self) -> list[Gated]:
        """Those of layers without experts, and those that all tokens share, unless folded; each once."""
        found: list[Gated] = []
        for layer in self.layers:
            mlp: Gated | None = layer.mlp
            if isinstance(mlp, Experts):
                mlp = None if mlp.folded else mlp.shared
            if mlp is not None and mlp not in found:
                found.append(mlp)
        return found

    @property
    def longest_seq_len(self) -> int:
        """The longest sequence, in tokens, that check_max_seq_len lets pass."""
        return min(self.max_position_embeddings, self.disputed_window or self.max_position_embeddings)

    def windows(self, max_seq_len: int) -> list[int | None]:
        """The window of each of `attentions`; None without one, or with one that no sequence of max_seq_len
        tokens exceeds."""
        found = [mixer.window for mixer in self.attentions]
        return [window if window and window < max_seq_len else None for window in found]

    def within(self: Spec, max_seq_len: int) -> Spec:
        """The same for sequences of at most max_seq_len tokens: without variants that differ beyond them."""

        def usual(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer
            if not isinstance(mixer, FullAttention) or max_seq_len > mixer.variant_beyond:
                return layer
            return replace(layer, mixer=replace(mixer, variant="", by_head=()))

        return replace(self, layers=tuple(map(usual, self.layers)))

    def check_expert_groups(self, groups: int) -> None:
        """Raise UnsupportedModelError for groups of ranks that would share experts which are not there."""
        if groups > 1 and self.experts is None:
            raise UnsupportedModelError(
                f"expert_parallel_size={groups} is for models with experts; it should be 1"
            )

    def check_max_seq_len(self, max_seq_len: int) -> None:
        """Raise ValueError if sequences of max_seq_len tokens are beyond what the model computes exactly."""
        if max_seq_len > self.max_position_embeddings:
            raise ValueError(
                f"max_seq_len {max_seq_len} is above the checkpoint's max_position_embeddings "
                f"{self.max_position_embeddings}; choose at most that"
            )
        if self.disputed_window is not None and max_seq_len > self.disputed_window:
            raise UnsupportedModelError(
                f"max_seq_len {max_seq_len} is above the checkpoint's sliding_window {self.disputed_window}, "
                "which transformers ignores for this architecture and other engines apply: set max_seq_len "
                f"to at most {self.disputed_window}, or take the key out of config.json if the model was "
                "trained without"
            )


def _check_divides(size: int, count: int, name: str, knob: str = "tensor_parallel_size") -> None:
    if count % size:
        raise UnsupportedModelError(f"{knob}={size} should divide {name}, which is {count}")
