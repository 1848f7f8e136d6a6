# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head in a real engine drafts what its definition says, whatever runs beside, and changes no
token."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from checkpoints import make_checkpoint
from eagle3_heads import FORMS, Reference, make_head
from engine.graphed import replayed
from engine.harness import serve, start_core
from engine.ranks_in_threads import start_ranks
from engine.test_generate import loaded
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import named_folder
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.start import Core
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.eagle3 import load_eagle3
from flashinfer_backend.speculate.heads import HeadProposer
from flashinfer_backend.speculate.proposer import DraftStep, Slots

SIZES: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256, "known": 100}
BLOCK = 64  # sequences are shorter: a draft's later tokens never want a block that is not there yet


class Recorded:
    """A proposer that notes its drafts: (slot, tokens in the cache) -> the last token and the drafts."""

    def __init__(self, proposer: HeadProposer) -> None:
        self._proposer = proposer
        self.count, self.layers, self.cache_layers = proposer.count, proposer.layers, proposer.cache_layers
        self.history, self.defers = proposer.history, proposer.defers
        self.found: list[tuple[int, int, int, list[int]]] = []
        self.calls = 0

    def propose(self, step: DraftStep, state: Slots, count: int) -> torch.Tensor:
        drafts = self._proposer.propose(step, state, count)
        self.calls += 1
        slots = step.sample_slots
        rows = zip(
            slots.tolist(), state.lengths[slots].tolist(), state.last_token[slots].tolist(), strict=True
        )
        if count:
            self.found += [(*row, each) for row, each in zip(rows, drafts.tolist(), strict=True)]
        return drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=4)


def start_recorded(
    target: Path, proposer: Callable[[EngineConfig, Transformer], Any], **settings: Any
) -> tuple[Any, list[Recorded]]:
    made: list[Recorded] = []

    def make(config: EngineConfig, model: Transformer) -> Recorded:
        made.append(Recorded(proposer(config, model)))
        return made[0]

    options: dict[str, Any] = {"tokens_per_block": BLOCK, "max_seq_len": BLOCK, "check_invariants": True}
    return start_core(target, make_proposer=make, **options | settings), made


def start(target: Path, head: Path, **settings: Any) -> tuple[Any, list[Recorded]]:
    return start_recorded(
        target, lambda config, model: load_eagle3(head, model, 3, config.max_seq_len), **settings
    )


class Expected:
    """What a head should draft, by the target in transformers."""

    def __init__(self, target: Path, head: Path) -> None:
        self.model = loaded(target)
        embedding, layers = self.model.get_input_embeddings(), self.model.config.num_hidden_layers
        self.head = Reference(head, embedding.weight.detach(), layers)
        self._states: dict[tuple[int, ...], list[torch.Tensor]] = {}  # by sequence, of all its tokens

    @torch.no_grad()
    def drafts(self, sequence: list[int], length: int, count: int) -> list[int]:
        """Behind the sequence's token at `length`, of which the target has computed those before; up to a
        near tie."""
        if tuple(sequence) not in self._states:
            states = self.model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
            self._states[tuple(sequence)] = [states[after][0] for after in self.head.taken]
        known = [states[:length] for states in self._states[tuple(sequence)]]
        drafts, margins = self.head.drafts(known, sequence[: length + 1], count)
        clear = [margin > 1e-3 for margin in margins]
        return drafts[: clear.index(False)] if False in clear else drafts


def check(recorded: Recorded, sequences: list[list[int]], expected: Expected, most: int = 3) -> int:
    """Compare the drafts behind each sequence's tokens, of each the first `most`, with those expected; how
    many were compared."""
    known = {}
    for sequence in sequences:
        for length in range(1, len(sequence)):
            known.setdefault((length, sequence[length]), []).append(sequence)
    compared = 0
    for _, length, last, drafts in recorded.found:
        candidates = known.get((length, last), [])
        if len(candidates) != 1 or -1 in drafts:
            continue  # of a sequence that has ended, or of two that are alike
        wanted = expected.drafts(candidates[0], length, min(most, len(drafts)))
        assert drafts[: len(wanted)] == wanted, (length, last)
        compared += len(wanted) == min(most, len(drafts))
    return compared


PROMPTS = [[(7 * i + 11 * j) % 250 + 3 for j in range(9 + 3 * i)] for i in range(5)]


def parameters(max_tokens: int = 16, **options: Any) -> list[SamplingParams]:
    """Greedy and sampled ones."""
    return [
        SamplingParams(max_tokens=max_tokens, temperature=0.9 * (i % 2), seed=i, end_id=-1, **options)
        for i in range(len(PROMPTS))
    ]


def answers(
    core: Any, folder: Path, prompts: list[list[int]] = PROMPTS, max_tokens: int = 16
) -> list[list[int]]:
    with serve(core, folder) as client:
        return client.generate(prompts, parameters(max_tokens)[: len(prompts)])


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers without drafts."""
    return answers(start_core(target, max_seq_len=BLOCK), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_definition(form: str, target: Path, plain: Any, tmp_path: Path):
    """Of several sequences together, with prompts in one chunk and in several; and the tokens are those of
    steps without drafts."""
    layers = 2 if form == "speculators" else 1
    if form == "safeailab":  # by the number of layers, of which these are the fewest that are not all one
        target = make_checkpoint("llama", tmp_path / "target", num_hidden_layers=6)
        plain = answers(start_core(target, max_seq_len=BLOCK), tmp_path / "plain")
    head = make_head(form, tmp_path / "head", **SIZES, layers=layers)
    for limit in (64, 8) if form == "speculators" else (8,):
        core, (recorded,) = start(target, head, max_num_tokens=limit, max_num_tokens_while_decoding=limit)
        found = answers(core, tmp_path / f"with{limit}")
        assert found == plain
        sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, found, strict=True)]
        assert check(recorded, sequences, Expected(target, head)) > 20


def test_drafts_behind_a_cached_prefix_and_after_preemption(target: Path, tmp_path: Path):
    """Blocks of 16 tokens, for which a draft's later tokens may find no block yet: their first ones are
    compared."""
    head = make_head("speculators", tmp_path / "head", **SIZES)
    expected = Expected(target, head)
    few: dict[str, Any] = {"max_tokens_in_paged_kv_cache": 96, "max_num_seqs": 5}
    core, (recorded,) = start(target, head, tokens_per_block=16, **few)
    # So long that they want the blocks together, however late the last of them comes.
    first = answers(core, tmp_path / "first", max_tokens=32)
    assert core.scheduler.preemptions
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, first, strict=True)]
    assert check(recorded, sequences, expected, most=1) > 20
    core, (recorded,) = start(target, head, tokens_per_block=16)
    again = [sequence[:-24] for sequence in sequences]
    answers(core, tmp_path / "second", again, max_tokens=4)
    recorded.found.clear()
    longer = [prompt + tokens for prompt, tokens in zip(again, answers(core, tmp_path, again), strict=True)]
    assert core.scheduler.blocks_reused > 2
    assert check(recorded, longer, expected, most=1) > 20


def test_a_target_with_windows_has_a_head_that_sees_all(tmp_path: Path):
    kinds = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2}
    target = make_checkpoint(
        "qwen3", tmp_path / "target", num_hidden_layers=4, sliding_window=12, head_dim=16, **kinds
    )
    head = make_head("speculators", tmp_path / "head", **SIZES)
    plain = answers(start_core(target, max_seq_len=BLOCK), tmp_path / "plain", max_tokens=20)
    core, (recorded,) = start(target, head)
    replayed(core.runner)
    found = answers(core, tmp_path / "with", max_tokens=20)
    assert [group.layers for group in core.runner.state.groups] == [(1, 3, 4), (0, 2)]
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, found, strict=True)]
    assert found == plain and check(recorded, sequences, Expected(target, head)) > 20


@pytest.mark.parametrize("layers", [1, 2])
def test_tokens_of_steps_without_drafts_are_taken_in_later(layers: int, target: Path, tmp_path: Path):
    """By graphs, while there are no drafts for up to 20 steps: a head of one layer then runs once for up to
    16 of them. Afterwards it drafts as its definition says."""
    head = make_head("speculators", tmp_path / "head", **SIZES, layers=layers)
    prompts = PROMPTS[:3]
    plain = answers(start_core(target, max_seq_len=BLOCK), tmp_path / "plain", prompts, max_tokens=40)
    core, (recorded,) = start(target, head)
    replayed(core.runner)
    asked = itertools.count()
    core.scheduler._pace.offers = lambda slots, rows: 3 * (next(asked) % 23 in (2, 3, 22))
    recorded.calls = 0
    with serve(core, tmp_path / "with") as client:
        found = client.generate(prompts, parameters(40)[:3])
        steps = client.loop.iteration
    assert found == plain
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)]
    assert check(recorded, sequences, Expected(target, head)) > 10
    assert recorded.calls < 0.6 * steps if layers == 1 else recorded.calls >= steps


def test_the_bundled_head_is_accepted(tmp_path: Path):
    """Tokens of a step, its own included, on texts of the bundled model; and the tokens are those of steps
    without drafts."""
    folder = named_folder("bundled")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("Once upon a time").ids
    params = [
        SamplingParams(max_tokens=50, temperature=temperature, seed=5, end_id=-1)
        for temperature in (0.0, 0.8)
    ]

    def answers(core: Core, run_dir: Path) -> tuple[list[list[int]], list[float]]:
        found, kept = [], []
        with serve(core, run_dir) as client:
            for each in params:
                before = client.loop.iteration
                found += client.generate([prompt], each)
                kept.append(len(found[-1]) / (client.loop.iteration - before))
        return found, kept

    def make(config: EngineConfig, model: Transformer) -> HeadProposer:
        return load_eagle3(folder / "eagle3", model, 3, config.max_seq_len)

    plain, _ = answers(start_core(Path("bundled")), tmp_path / "plain")
    found, kept = answers(start_core(Path("bundled"), make_proposer=make), tmp_path / "with")
    assert found == plain
    assert kept[0] > 2.0 and kept[1] > 1.5, kept


def test_two_ranks_draft_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each has its share of the head's layers, and graphs, whose logits rank 0 alone has. The tokens are
    those of two ranks without drafts. One row has no drafts."""
    prompts = [[0, *range(40, 60)], [0, *range(70, 75)]]
    params = [SamplingParams(max_tokens=24, temperature=0.0, end_id=-1) for _ in prompts]
    params[1].max_tokens, params[1].speculative_decoding, params[1].presence_penalty = 8, False, 1.0
    found, steps = [], []
    for options in ({}, {"speculative_method": "eagle3", "draft_model": "bundled", "max_draft_len": 3}):
        core = start_ranks(Path("bundled"), 2, monkeypatch, replayed, **options)
        with serve(core, tmp_path / str(len(found))) as client:
            found.append(client.generate(prompts, params))
            steps.append(client.loop.iteration)
        core.close()
    assert found[1] == found[0]
    assert steps[1] < 0.8 * steps[0]


def test_heads_draft_in_fp8(tmp_path: Path):
    """The head's layers are quantised as the target's are, and its keys and values stored as the target's."""
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    drafting = {"speculative_method": "eagle3", "draft_model": "bundled", "max_draft_len": 3}
    params = [SamplingParams(max_tokens=24, temperature=0.8 * i, seed=3, end_id=-1) for i in range(2)]
    found, steps = [], []
    for name, chosen in (("plain", {}), ("with", drafting)):
        with serve(start_core(Path("bundled"), **options, **chosen), tmp_path / name) as client:
            found.append([client.generate([[0, *range(40, 60)]], each) for each in params])
            steps.append(client.loop.iteration)
    assert found[1] == found[0]
    assert steps[1] < 0.7 * steps[0]
