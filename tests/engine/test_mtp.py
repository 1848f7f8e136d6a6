# SPDX-License-Identifier: Apache-2.0
"""Drafts by the head that a checkpoint brings, against transformers' layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from checkpoints import make_checkpoint
from engine.graphed import graphed, replay_graphs, replayed
from engine.harness import fewer, start_core
from engine.ranks_in_threads import start_ranks
from engine.test_eagle3 import BLOCK, PROMPTS, Recorded, answers, check, start_recorded
from flashinfer_backend.models.weights import WeightsError
from flashinfer_backend.speculate.heads import HeadProposer
from flashinfer_backend.speculate.mtp import load_mtp

PREFIX = "mtp.layers.0."


class Reference:
    """The target and its head, which is written to the target's file; count drafts of a sequence."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self._hidden: dict[tuple[int, ...], Tensor] = {}  # by sequence, of all its tokens
        config, hidden = self.model.config, self.model.config.hidden_size
        torch.manual_seed(1)
        kind = Qwen3_5DecoderLayer if config.model_type == "qwen3_5_text" else Qwen3_5MoeDecoderLayer
        self.layer = kind(config, config.layer_types.index("full_attention")).eval()
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        self.fc = torch.randn(hidden, 2 * hidden) / hidden**0.5
        self.norms = [Qwen3_5RMSNorm(hidden, config.rms_norm_eps) for _ in range(3)]
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                if "norm" in name:
                    parameter.uniform_(-0.5, 0.5)
                else:
                    parameter.normal_(0.0, 0.15)
            for norm in self.norms:
                norm.weight.uniform_(-0.5, 0.5)
        names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
        tensors = {f"{PREFIX}{name}": value for name, value in self.layer.state_dict().items()}
        own = {f"mtp.{name}.weight": norm.weight for name, norm in zip(names, self.norms, strict=True)}
        file = folder / "model.safetensors"
        every = load_file(file) | tensors | own | {"mtp.fc.weight": self.fc}
        save_file({name: value.detach() for name, value in every.items()}, file, metadata={"format": "pt"})

    @torch.no_grad()
    def drafts(self, sequence: list[int], length: int, count: int) -> list[int]:
        """Behind the sequence's token at `length`, of which the target has computed those before; up to a
        near tie."""
        if tuple(sequence) not in self._hidden:
            states = self.model.model(torch.tensor([sequence])).last_hidden_state
            self._hidden[tuple(sequence)] = states
        hidden = self._hidden[tuple(sequence)][:, :length]
        follow, drafts = sequence[1 : length + 1], []
        for _ in range(count):
            normed = self._behind(hidden, follow)
            logits = self.model.lm_head(normed[0, -1])
            best = logits.topk(2)
            if best.values[0] - best.values[1] < 1e-3:
                break
            drafts.append(int(best.indices[0]))
            follow, hidden = [*follow, drafts[-1]], torch.cat([hidden, normed[:, -1:]], 1)
        return drafts

    def _behind(self, hidden: Tensor, follow: list[int]) -> Tensor:
        embedding_norm, hidden_norm, norm = self.norms
        embedded = self.model.model.embed_tokens(torch.tensor([follow]))
        x = torch.cat([embedding_norm(embedded), hidden_norm(hidden)], -1) @ self.fc.T
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        turned = self.rotary(x, positions.expand(3, 1, -1))
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        found = self.layer(x, position_embeddings=turned, attention_mask=mask, position_ids=positions)
        return norm(found[0] if isinstance(found, tuple) else found)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = make_checkpoint("qwen3.5", tmp_path_factory.mktemp("target"), **fewer("qwen3.5"))
    return folder, Reference(folder)


@pytest.fixture(scope="module")
def plain(made: tuple[Path, Reference], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers without drafts."""
    return answers(start_core(made[0], max_seq_len=BLOCK), tmp_path_factory.mktemp("plain"))


def start(folder: Path, **settings: Any) -> tuple[Any, list[Recorded]]:
    return start_recorded(
        folder, lambda _, model: HeadProposer(load_mtp(folder, model), model, 3), **settings
    )


def test_a_head_with_experts_drafts_what_the_definition_does(tmp_path: Path) -> None:
    """Its experts are in one tensor, as in what Qwen publishes in 16 bits."""
    folder = make_checkpoint("qwen3.5-moe", tmp_path / "target", **fewer("qwen3.5-moe"))
    reference = Reference(folder)
    core, (recorded,) = start(folder)
    found = answers(core, tmp_path / "run")
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, found, strict=True)]
    assert check(recorded, sequences, reference) > 20


@pytest.mark.parametrize("captured", [False, True])
def test_drafts_are_those_of_the_definition(
    made: tuple[Path, Reference], plain: list[list[int]], tmp_path: Path, captured: bool
) -> None:
    """Of several sequences together, with prompts in chunks; and the tokens are those without drafts."""
    folder, reference = made
    core, (recorded,) = start(folder, max_num_tokens=8, max_num_tokens_while_decoding=8)
    capture = replayed(core.runner) if captured else None
    found = answers(core, tmp_path / "with")
    assert found == plain
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, found, strict=True)]
    assert captured or check(recorded, sequences, reference) > 20
    assert capture is None or capture.replays > 5


def test_all_graphs_give_the_tokens_of_none(
    made: tuple[Path, Reference], plain: list[list[int]], tmp_path: Path, monkeypatch: Any
) -> None:
    """Steps with prompts too: the head takes in their tokens behind the last graph."""
    folder, _ = made
    replay_graphs(monkeypatch)
    options = {"tokens_per_block": 16, "max_num_tokens": 24, "max_num_tokens_while_decoding": 24}
    for name in ("drafts", "graphs"):
        core = start_core(folder, **options, speculative_method="mtp", max_draft_len=3)
        if name == "graphs":
            graphed(core.runner.state)
            core.runner.capture_graphs([2, 8])
            assert core.runner.mixed_graphs is not None
        assert answers(core, tmp_path / name) == plain


@pytest.mark.parametrize("captured", [False, True])
def test_drafts_at_the_longest_sequences_end(
    made: tuple[Path, Reference], tmp_path: Path, captured: bool
) -> None:
    """Further ones have positions that no token can have."""
    options: dict[str, Any] = {"tokens_per_block": 16, "max_seq_len": 40, "check_invariants": True}
    prompts = PROMPTS[2:]
    plain = answers(start_core(made[0], **options), tmp_path / "plain", prompts, max_tokens=40)
    core = start_core(made[0], **options, speculative_method="mtp", max_draft_len=4)
    core.scheduler._pace.offers = lambda slots, rows: 4  # type: ignore[union-attr]  # though they never pay
    capture = replayed(core.runner) if captured else None
    assert answers(core, tmp_path / "with", prompts, max_tokens=40) == plain
    assert core.scheduler.drafted_tokens and (capture is None or capture.replays > 5)


def test_two_ranks_draft_the_same(
    made: tuple[Path, Reference], plain: list[list[int]], tmp_path: Path, monkeypatch: Any
) -> None:
    """If one fed others than another, the sums of what they compute would be of different tokens."""
    folder, _ = made
    drafting = {"speculative_method": "mtp", "max_draft_len": 3, "max_seq_len": BLOCK}
    two = start_ranks(folder, 2, monkeypatch, **drafting)
    assert answers(two, tmp_path / "two") == plain
    assert two.scheduler.drafted_tokens
    two.close()


def test_what_has_no_head_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3.5", tmp_path / "without")
    with pytest.raises(WeightsError, match=r"lacks tensors that config\.json asks for: mtp\.fc\.weight"):
        start_core(folder, speculative_method="mtp")
    folder = make_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match="mtp needs a checkpoint of a family that brings such a head"):
        start_core(folder, speculative_method="mtp")
