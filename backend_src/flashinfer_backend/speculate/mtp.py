# SPDX-License-Identifier: Apache-2.0
"""The head for drafts that Qwen3-Next's and Qwen3.5's checkpoints bring, trained to predict the token after
the next one (multi-token prediction): https://arxiv.org/abs/2404.19737.

Like an EAGLE-3 head it takes at each position what the target had there, and the token that follows. It takes
the target's last hidden state, normed as for the logits, has one layer as the target's with attention, and
shares the target's embedding and output projection. Published heads have one layer, which drafts further
tokens from its own normed hidden states.

For drafts a GPU reads the projection in e4m3, a copy: of 16 bits it is most of what a draft reads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from flashinfer_backend.core.shard import Part
from flashinfer_backend.models.spec import ModelSpec, Norm, Product, Source
from flashinfer_backend.models.transformer import (
    AttentionLayer,
    Layer,
    Stream,
    Transformer,
    parameter,
    weight,
)
from flashinfer_backend.models.weights import load_weights, of_layers, of_norm, of_product
from flashinfer_backend.ops.weight import Weight
from flashinfer_backend.speculate.proposer import Places

OTHERS = ("model.", "lm_head.", "language_model.", "visual.")  # beginnings of the target's tensors' names
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


class MtpHead(nn.Module):
    """The head (heads.DraftHead) with uninitialised weights, which `load` fills. Of several ranks, each has
    its share of the layer, as of the target's, and all else."""

    layers: list[Layer]

    def __init__(self, target: Transformer) -> None:
        super().__init__()
        spec, hidden = target.spec, target.spec.hidden_size
        self.spec: ModelSpec = replace(spec.mtp_head(), ignored=OTHERS)
        self.ops, self.dtype, self.device = target.ops, target.dtype, target.device
        self._target = [target]  # in a list: its parameters are not this module's
        table = target.attention_layers[0].cos_sin
        self.layers = nn.ModuleList(
            [AttentionLayer(self.spec.layers[0], self.spec, self.ops, table, self.dtype)]
        )  # type: ignore[assignment]
        columns = 2 * hidden
        source = Source("mtp.fc", Part((hidden, columns), slice(0, hidden), slice(0, columns)))
        self._fc = Product("fc", (source,), None, "")
        self.fc = weight(self._fc, self.dtype, self.device)
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            parameter((hidden,), self.dtype, self.device) for _ in NORMS
        )
        self.lm_head: Weight | None = None  # the target's in fewer bits, of share_projection

    @property
    def taken(self) -> tuple[int, ...]:
        return (len(self._target[0].layers) - 1,)

    def join(self, taken: Tensor) -> Tensor:
        """The target's last hidden states as its output projection reads them, [T, H] -> [T, H]."""
        return self.ops.rms_norm(taken, self._target[0].final_norm, self.spec.norm_eps)

    def forward(self, tokens: Tensor, hidden: Tensor, places: Places, rows: Tensor | None = None) -> Tensor:
        q, stream = self._before(tokens, hidden, places)
        attended = torch.empty_like(q)
        places.attend(0, q, attended)
        if rows is not None:
            attended, stream = attended[rows], stream.of(rows)
        return self._layer.after(attended, stream, self._target[0].collectives)

    def store(self, tokens: Tensor, hidden: Tensor, places: Places) -> None:
        self._before(tokens, hidden, places)

    def guess(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        target, ops = self._target[0], self.ops
        hidden = ops.rms_norm(hidden, self.final_norm, self.spec.norm_eps)
        logits, collectives = ops.linear(hidden, self.lm_head or target.lm_head), target.collectives
        if self.spec.shard.size == 1:
            return ops.likeliest(logits[:, : self.spec.vocab_size]), hidden
        logits = collectives.gather_columns(logits, self.spec.vocab_size)
        return collectives.broadcast(ops.likeliest(logits)), hidden  # of rank 0, which has all columns

    def load(self, folder: Path, load_format: str = "auto") -> None:
        """Fill the weights from the target's folder; load_format and errors as load_weights'."""
        hidden, targets = self.spec.hidden_size, of_product(self._fc, self.fc) | of_layers(self)
        own = zip(NORMS, (self.embedding_norm, self.hidden_norm, self.final_norm), strict=True)
        for module, target in own:
            targets |= of_norm(Norm("", module, hidden, offset=1.0), target, "mtp.")
        load_weights(self, folder, load_format, targets=targets)
        self.share_projection()

    def share_projection(self) -> None:
        """Take the target's output projection as it is now."""
        self.lm_head = self.ops.for_drafts(self._target[0].lm_head)

    @property
    def _layer(self) -> AttentionLayer:
        (layer,) = self.layers
        assert isinstance(layer, AttentionLayer)
        return layer

    def _before(self, tokens: Tensor, hidden: Tensor, places: Places) -> tuple[Tensor, Stream]:
        """The layer up to its attention."""
        eps = self.spec.norm_eps
        norms = self.embedding_norm, self.hidden_norm
        joined = self.ops.norms_side_by_side(self._target[0].embed(tokens), hidden, *norms, eps)
        positions, locations, (cache,), _ = places
        return self._layer.before(self.ops.linear(joined, self.fc), positions, locations, cache)


def load_mtp(folder: Path, target: Transformer, load_format: str = "auto") -> MtpHead:
    """Raises OSError or ValueError saying what is wrong."""
    head = MtpHead(target)
    head.load(folder, load_format)
    return head
