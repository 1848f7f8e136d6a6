# SPDX-License-Identifier: Apache-2.0
"""A drafter for benchmarks, whose accepted length is set, next to a head that costs what a real one does:
EAGLE-3's, or the checkpoint's own (MTP).

Random weights say nothing that a drafter could guess. So the target is given an embedding and an output
projection by which the next token follows from the last one alone, whatever its layers add: greedy answers go
round the vocabulary in a known order, by a wide margin. The drafts are that order, spoilt from one of them on
so that a step's tokens are `accepted` on average. The head runs in full, and its guesses are dropped.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.hf.eagle3 import Eagle3Spec, eagle3
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.eagle3 import Head
from flashinfer_backend.speculate.heads import HeadProposer
from flashinfer_backend.speculate.mtp import load_mtp
from flashinfer_backend.speculate.proposer import DraftStep, MakeProposer, Slots

DRAFT_VOCAB = 32000  # of published heads
INTERMEDIATE = 14336  # of the head of a target that has experts
LOUD = 4.0  # standard deviation of the embedding: layers of random weights add some 2 each
ROUNDS = 4096  # rows of the table of what is spoilt


def make_replaying(count: int, accepted: float, head: str = "eagle3") -> MakeProposer:
    """For engine.start: a proposer of `count` drafts, of which steps keep `accepted` tokens on average, their
    own included: 1.0 to count + 1. head: one of HEADS."""

    def make(config: EngineConfig, model: Transformer) -> Replaying:
        return Replaying(model, count, accepted, HEADS[head](config, model, count))

    return make


class Replaying:
    history = False

    def __init__(
        self, model: Transformer, count: int, accepted: float, head: HeadProposer | None = None, seed: int = 0
    ) -> None:
        """Changes the target's embedding and output projection; see above."""
        self.count, self._head = count, head
        self.layers = head.layers if head is not None else ()
        self.cache_layers = head.cache_layers if head is not None else 0
        self.defers = head is None or head.defers
        generator = torch.Generator().manual_seed(seed)
        follows = tokens_follow(model, generator)
        steps = [follows]
        for _ in range(count - 1):
            steps.append(follows[steps[-1].long()])
        self._drafts = torch.stack(steps, 1).to(model.device)  # int32 [V, count]
        # Spread evenly over any run of steps, so that short measurements have the set length.
        turns = torch.arange(ROUNDS, dtype=torch.float64)
        self._chance = (turns * (5**0.5 - 1) / 2 % 1).unsqueeze(1).to(model.device)
        self._spoilt = torch.empty((ROUNDS, count), dtype=torch.bool, device=model.device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=model.device)  # of the steps with drafts
        self._vocab = len(follows)
        self.accept(accepted)

    def accept(self, accepted: float) -> None:
        """Have steps keep that many tokens on average from now on."""
        share = share_kept(self.count, accepted)
        kept = share ** torch.arange(1, self.count + 1, device=self._chance.device)
        self._spoilt.copy_(self._chance >= kept)

    def propose(self, step: DraftStep, state: Slots, count: int) -> Tensor:
        if self._head is not None:
            self._head.propose(step, state, count)
        slots = step.sample_slots
        drafts = self._drafts[state.last_token[slots], :count]
        self._turn += 1
        rounds = (self._turn + 977 * slots) % ROUNDS
        wrong = self._spoilt[rounds, :count]
        return torch.where(wrong, (drafts + 1) % self._vocab, drafts)


@torch.no_grad()
def tokens_follow(model: Transformer, generator: torch.Generator) -> Tensor:
    """Make each token's follower the likeliest by far: int32 [V], the followers. With a tied embedding each
    token follows itself."""
    spec, embedding = model.spec, model.embed_tokens
    own = torch.Generator(device=embedding.device).manual_seed(1)
    embedding.normal_(0.0, LOUD, generator=own)
    if spec.tie_word_embeddings:
        return torch.arange(spec.vocab_size, dtype=torch.int32)
    order = torch.randperm(spec.vocab_size, generator=generator)
    follows = torch.empty_like(order)
    follows[order] = order.roll(-1)  # one round through all tokens
    model.lm_head.data[follows.to(embedding.device)] = embedding / LOUD
    return follows.int()


def share_kept(count: int, accepted: float) -> float:
    """The probability of each draft to be right by which 1 + p + ... + p^count is `accepted`."""
    if not 1 <= accepted <= count + 1:
        raise ValueError(
            f"accepted tokens a step should be 1 to {count + 1} with {count} drafts, not {accepted}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(count + 1)) < accepted:
            low = middle
        else:
            high = middle
    return high if accepted > 1 else 0.0


def eagle3_head(config: EngineConfig, model: Transformer, count: int) -> HeadProposer:
    """A head of published size for the target; in FP8 where the target is quantised so on load."""
    spec = head_spec(model.spec)
    if config.quantization == "fp8":
        spec = spec.quantised_on_load()
    head = Head(spec, model, config.max_seq_len)
    head.load(Path(), "dummy")
    return HeadProposer(head, model, count)


def mtp_head(config: EngineConfig, model: Transformer, count: int) -> HeadProposer:
    """The head that the target's checkpoint brings."""
    return HeadProposer(load_mtp(Path(), model, "dummy"), model, count)


def no_head(config: EngineConfig, model: Transformer, count: int) -> None:
    """Drafts that cost nothing."""


HEADS = {"eagle3": eagle3_head, "mtp": mtp_head, "none": no_head}


def head_spec(target: ModelSpec) -> Eagle3Spec:
    attention, layers = target.attention, len(target.layers)
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.mlp.size if not target.mlp.gate_up.experts else INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": target.norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(DRAFT_VOCAB, target.vocab_size),
        "eagle_aux_hidden_state_layer_ids": sorted({1, max(1, layers // 2), max(1, layers - 3)}),
    }
    return eagle3(raw, {})
