# SPDX-License-Identifier: Apache-2.0
"""Drafts by an EAGLE-3 head: https://arxiv.org/abs/2503.01840.

At each position the head takes hidden states that the target had there, joined into one, and the embedding of
the token that follows: from these it guesses the token after that. The next guess starts from the head's own
hidden state instead of the target's. The head's keys and values lie in the target's blocks, as further
layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashinfer_backend.models.checkpoint_kind import weight_files
from flashinfer_backend.models.hf import read_drafter
from flashinfer_backend.models.hf.eagle3 import Eagle3Spec
from flashinfer_backend.models.rope import cos_sin
from flashinfer_backend.models.safetensors_file import Header
from flashinfer_backend.models.spec import Product
from flashinfer_backend.models.transformer import AttentionLayer, Stream, Transformer, parameter, weight
from flashinfer_backend.models.weights import WeightsError, load_weights, of_layers, of_product
from flashinfer_backend.ops.weight import FLOATS, INTEGERS, Stored, Weight
from flashinfer_backend.speculate.heads import HeadProposer
from flashinfer_backend.speculate.proposer import Places

FIRST_LAYER = "midlayer"  # what SafeAILab's checkpoints call layers.0


class FirstLayer(AttentionLayer):
    """The first layer, whose queries, keys and values come from the next token's embedding and from the
    hidden state, side by side, each with a norm."""

    hidden_norm: nn.Parameter

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """embedded and hidden [T, H], each normed -> side by side [T, 2 H], and of that the latter."""
        norms = self.input_norm, self.hidden_norm
        both = self.ops.norms_side_by_side(embedded, hidden, *norms, self.eps)
        return both, both[:, hidden.shape[1] :]


class Head(nn.Module):
    """An EAGLE-3 head (heads.DraftHead) with uninitialised weights, which `load` fills, for sequences of
    up to `positions` tokens. Of several ranks, each has its share of the layers (`spec`), and all else.

    embed_tokens: [V, H], where that is not the target's.
    """

    layers: list[AttentionLayer]
    embed_tokens: Tensor | None

    def __init__(self, spec: Eagle3Spec, target: Transformer, positions: int) -> None:
        super().__init__()
        spec.check_fits(target.spec, positions)
        self.spec, self.ops, self.dtype, self.device = spec, target.ops, target.dtype, target.device
        self._target = [target]  # in a list: its parameters are not this module's
        table = cos_sin(spec.attention.rope, positions).to(self.device)
        hidden, joined = spec.hidden_size, spec.fc.shape[1]
        kinds = [FirstLayer, *[AttentionLayer] * (len(spec.layers) - 1)]
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            kind(layer, spec, self.ops, table, self.dtype)
            for kind, layer in zip(kinds, spec.layers, strict=True)
        )
        self.fc = self._weight(spec.fc)
        parts = {"none": 0, "whole": 1, "each": joined // spec.target_hidden_size}[spec.fc_norms]
        self._fc_norms = [f"fc{index}_norm" for index in range(parts)]
        for name in self._fc_norms:
            setattr(self, name, parameter((joined // parts,), self.dtype, self.device))
        self.final_norm = parameter((hidden,), self.dtype, self.device)
        self.lm_head = self._weight(spec.head)
        # int32 [draft_vocab_size]: the target's id of each token that the head knows.
        self.ids = torch.arange(spec.draft_vocab_size, dtype=torch.int32, device=self.device)
        self.embed_tokens = None
        if hidden != target.spec.hidden_size:
            self.embed_tokens = parameter(spec.embedding.shape, self.dtype, self.device)

    def _weight(self, product: Product) -> Weight:
        return weight(product, self.dtype, self.device)

    @property
    def taken(self) -> tuple[int, ...]:
        return tuple(after - 1 for after in self.spec.taken_of(self._target[0].spec))

    def join(self, taken: Tensor) -> Tensor:
        """The target's hidden states, [T, layers * target's H] -> [T, H]."""
        if self._fc_norms:
            norms = [getattr(self, name) for name in self._fc_norms]
            parts = [
                self.ops.rms_norm(part.contiguous(), norm, self.spec.norm_eps)
                for part, norm in zip(taken.chunk(len(norms), dim=1), norms, strict=True)
            ]
            taken = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return self.ops.linear_add(taken, self.fc, None)

    def forward(self, tokens: Tensor, hidden: Tensor, places: Places, rows: Tensor | None = None) -> Tensor:
        """Hidden states [R, H] behind the last layer, of the positions in rows (int32 [R]; None: of all).

        tokens: int32 [T], the one that follows each position. hidden [T, H]: the target's, joined, or the
        head's own; may be overwritten.
        """
        for index, layer in enumerate(self.layers):
            q, hidden = self._before(index, tokens, hidden, places)
            attended = torch.empty_like(q)
            places.attend(index, q, attended)
            if rows is not None and index == len(self.layers) - 1:
                attended, hidden = attended[rows], hidden[rows]
            hidden = layer.after(attended, Stream(hidden), self._target[0].collectives)
        return hidden

    def store(self, tokens: Tensor, hidden: Tensor, places: Places) -> None:
        for index, layer in enumerate(self.layers):
            q, hidden = self._before(index, tokens, hidden, places)
            if index < len(self.layers) - 1:
                attended = torch.empty_like(q)
                places.attend(index, q, attended)
                hidden = layer.after(attended, Stream(hidden), self._target[0].collectives)

    def _before(self, index: int, tokens: Tensor, hidden: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """A layer up to its attention: q[T, Hq, D] and the residual stream."""
        layer, where = self.layers[index], (places.positions, places.locations, places.caches[index])
        if not isinstance(layer, FirstLayer):
            return layer.before(hidden, *where)[0], hidden
        both, normed = layer.enter(self._embed(tokens), hidden)
        q = layer.rotate(self.ops.linear_add(both, layer.qkv, None), *where)
        return q, normed.contiguous() if self.spec.norm_before_residual else hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        own = self.embed_tokens
        return self._target[0].embed(tokens) if own is None else F.embedding(tokens, own)

    def guess(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        spec, ops = self.spec, self.ops
        if spec.norm_output:
            hidden = ops.rms_norm(hidden, self.final_norm, spec.norm_eps)
            logits = ops.linear_add(hidden, self.lm_head, None)
        else:
            logits = ops.norm_linear(hidden, self.final_norm, spec.norm_eps, self.lm_head, None)
        return ops.likeliest(logits, self.ids), hidden

    def load(self, folder: Path, load_format: str = "auto") -> None:
        """Fill the weights from a checkpoint's folder; load_format and errors as load_weights'."""
        mask: list[Tensor] = []
        embedding: list[Tensor] = []
        load_weights(self, folder, load_format, targets=self._destinations(mask, embedding))
        if load_format == "dummy":
            return
        # Checkpoints often have a copy of the target's embedding.
        if embedding and not self._target[0].collectives.minimum(self._is_targets(embedding[0])):
            self.embed_tokens = embedding[0].to(self.device, self.dtype, copy=True)
        found = self.ids.sort().values.tolist()
        if found != sorted(set(found)) or not 0 <= found[0] <= found[-1] < self.spec.vocab_size:
            raise WeightsError(
                f"{folder}: d2t gives ids outside of the target's {self.spec.vocab_size} tokens, or one twice"
            )
        if mask and mask[0].nonzero().squeeze(1).tolist() != found:
            raise WeightsError(f"{folder}: t2d names other tokens than d2t")

    def _is_targets(self, embedding: Tensor) -> bool:
        target = self._target[0]
        rows = target.spec.embedding.sources[0].part.rows
        own = target.embed_tokens[: rows.stop - rows.start]
        return torch.equal(embedding[rows].to(own), own)

    def _destinations(self, mask: list[Tensor], embedding: list[Tensor]) -> dict[str, Stored]:
        """Checkpoint name -> what it fills; t2d is put into `mask`, an embedding that may be the target's
        into `embedding`."""
        spec = self.spec
        targets = of_product(spec.fc, self.fc) | of_product(spec.head, self.lm_head) | of_layers(self)
        targets["norm.weight"] = Stored.into(self.final_norm)
        for index, name in enumerate(self._fc_norms):
            module = "input_norm" if spec.fc_norms == "whole" else f"fc_norm.{index}"
            targets[f"{module}.weight"] = Stored.into(getattr(self, name))
        if self.embed_tokens is None:
            shape = (spec.embedding.shape,)
            targets["embed_tokens.weight"] = Stored(shape, FLOATS, embedding.append, optional=True)
        else:
            targets["embed_tokens.weight"] = Stored.into(self.embed_tokens)
        words, known = spec.vocab_size, spec.draft_vocab_size
        every = known == words

        def offsets(found: Tensor) -> None:
            self.ids += found.to(self.ids)

        targets["d2t"] = Stored(((known,),), INTEGERS, offsets, optional=every)
        targets["t2d"] = Stored(((words,),), ("BOOL",), mask.append, optional=True)
        return targets


def load_eagle3(
    folder: Path,
    target: Transformer,
    count: int,
    positions: int,
    load_format: str = "auto",
    fp8: bool = False,
) -> HeadProposer:
    """The proposer of `count` drafts by the head in a folder. positions: the most that a sequence has. fp8:
    the head's layers are quantised as they are read. Raises OSError or ValueError saying what is wrong."""
    spec = read_drafter(folder, fp8).share(target.spec.shard)
    if load_format == "auto" and _has_midlayer(folder):
        spec = replace(spec, layers=(replace(spec.layers[0], prefix=FIRST_LAYER), *spec.layers[1:]))
    head = Head(spec, target, positions)
    head.load(folder, load_format)
    return HeadProposer(head, target, count)


def _has_midlayer(folder: Path) -> bool:
    try:
        names = [name for path in weight_files(folder) for name in Header(path).names]
    except (ValueError, KeyError):
        return False  # loading says what is wrong with the files
    return any(name.startswith(f"{FIRST_LAYER}.") for name in names)
