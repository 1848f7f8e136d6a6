# SPDX-License-Identifier: Apache-2.0
"""Drafts, right and wrong ones, change when tokens come, and not which."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from engine.graphed import replayed
from engine.harness import serve, shallow_model, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import TOP_LOGPROBS
from flashinfer_backend.speculate.proposer import DraftStep, Slots
from flashinfer_backend.transport import protocol
from thinned import some

PROMPTS = [[0, *range(40 + i, 60 + 5 * i)] for i in range(12)]


def parameters() -> list[SamplingParams]:
    """Greedy and sampled ones, alone and with all that sampling can be asked for."""
    params = [
        SamplingParams(max_tokens=16 + i, temperature=0.8 * (i % 2), seed=2**40 + i, end_id=-1)
        for i in range(len(PROMPTS))
    ]
    params[3].max_tokens, params[4].max_tokens = 1, 2
    params[2].frequency_penalty = params[5].repetition_penalty = 1.3
    params[6].presence_penalty, params[6].bad_words = 0.7, [[40], [46, 47], [47, 48, 49]]
    params[7].top_k, params[7].top_p, params[7].min_p = 20, 0.9, 0.02
    params[8].log_probs, params[8].top_logprobs = True, 3
    params[1].allowed_ids = [*range(3, 200, 3), 101]
    params[9].bias_ids, params[9].bias_values, params[9].generation_logits = [5, 50], [4.0, -9.0], True
    params[10].min_tokens, params[10].late_ids, params[10].end_id = 12, [30, 32], 101
    params[11].log_probs = True
    params[11].repetition_penalty = params[11].frequency_penalty = 1.1
    return params


class Replay:
    """Drafts from answers that are known, each token of them spoilt with a probability."""

    layers, cache_layers, history, defers = (), 0, False, True

    def __init__(self, count: int, spoilt: float, sequences: list[list[int]] | None = None) -> None:
        self.count, self.spoilt = count, spoilt
        self.sequences = sequences or []
        self._random = torch.Generator().manual_seed(count)

    def propose(self, step: DraftStep, state: Slots, count: int) -> torch.Tensor:
        slots = step.sample_slots
        lengths, last_tokens = state.lengths[slots].tolist(), state.last_token[slots].tolist()
        drafts = torch.zeros(len(slots), count, dtype=torch.int32)
        for row, (length, last) in enumerate(zip(lengths, last_tokens, strict=True)):
            known = [s for s in self.sequences if len(s) > length and s[length] == last]
            follows = known[0][length + 1 : length + 1 + count] if known else []
            drafts[row, : len(follows)] = torch.tensor(follows, dtype=torch.int32)
        wrong = torch.rand(drafts.shape, generator=self._random) < self.spoilt
        return torch.where(wrong, (drafts + 1) % 250, drafts).to(slots.device)


def replay(count: int, spoilt: float, found: list[Any]) -> Replay:
    """Of answers to PROMPTS, with their codes."""
    sequences = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, found, strict=False)]
    return Replay(count, spoilt, sequences)


def answers(
    tmp_path: Path,
    params: list[SamplingParams],
    graphs: bool = False,
    offers: Any = None,
    folder: Path | None = None,
    **settings: Any,
) -> tuple[list[Any], list[Any], Any, Any]:
    """offers: in place of DraftPace's."""
    core = start_core(folder or shallow_model(), check_invariants=True, tokens_per_block=16, **settings)
    if offers is not None:
        core.scheduler._pace.offers = offers
    capture = replayed(core.runner) if graphs else None
    with serve(core, tmp_path) as client:
        prompts = PROMPTS[: len(params)]
        ids = client.submit_together(prompts, params)
        client.wait(ids)
        client.wait_idle()
        # Their prefixes are in the cache: what is found there was computed of accepted tokens alone.
        both = (0, len(params) // 2)
        longer = [prompts[i] + client.tokens[ids[i]][:20] for i in both]
        again = client.submit_together(longer, [params[i] for i in both])
        client.wait(again)
        assert not client.failure, client.failure
        ids += again
        found = [(client.tokens[i], client.code[i]) for i in ids]
        # An end id is counted nowhere.
        assert client.loop.generated_tokens == sum(len(tokens) for tokens, _ in found)
        assert capture is None or capture.replays > client.loop.iteration / 2
        return found, [reported(client, i) for i in ids], core, client.loop


def reported(client: Any, request: int) -> list[list[float]]:
    """What came with each token."""
    told = []
    for report in client.reports[request]:
        packed = np.frombuffer(report.top_logprobs or b"", TOP_LOGPROBS)
        top = [value for pair in packed.tolist() for value in pair]
        logits = np.frombuffer(report.generation_logits or b"", "<f4").tolist()
        if report.log_prob is not None or logits:
            told.append([report.log_prob or 0.0, *top, *logits])
    return told


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Any, ...]]:
    """Answers to `parameters()` without drafts, by max_tokens_in_paged_kv_cache."""

    @functools.cache
    def made(blocks: int) -> tuple[Any, ...]:
        folder = tmp_path_factory.mktemp("without")
        return answers(folder, parameters(), max_tokens_in_paged_kv_cache=blocks)

    return made


@pytest.mark.parametrize(
    ("count", "spoilt", "blocks", "graphs"),
    some(
        list(itertools.product((1, 4), (0.0, 0.3, 1.0), (0, 160), (False, True))),
        [(1, 0.0, 0, False), (3, 0.3, 160, False), (4, 1.0, 160, False), (3, 0.3, 160, True)],
    ),
)
def test_tokens_are_those_of_steps_without_drafts(
    count: int, spoilt: float, blocks: int, graphs: bool, tmp_path: Path, without: Any
):
    expected, told, core, loop = without(blocks)
    assert not blocks or core.scheduler.preemptions
    proposer = replay(count, spoilt, expected)
    found, retold, _, drafted = answers(
        tmp_path / "with",
        parameters(),
        proposer=proposer,
        graphs=graphs,
        max_tokens_in_paged_kv_cache=blocks,
    )
    assert found == expected
    for again, once in zip(retold, told, strict=True):
        assert np.allclose(again, once, atol=1e-3)
    assert len(told[8]) == len(found[8][0]) and len(told[9]) == len(found[9][0])
    # Wrong drafts cost no steps, right ones save some.
    assert drafted.iteration < loop.iteration * (0.9 if spoilt < 1 else 1.1)


@pytest.mark.parametrize(
    ("windows", "graphs"),
    some(
        list(itertools.product(("some layers", "all layers"), (False, True))),
        [("some layers", True), ("all layers", False)],
    ),
)
def test_layers_with_windows_check_drafts(windows: str, graphs: bool, tmp_path: Path):
    """Sequences leave blocks behind while drafts are unread."""
    if windows == "all layers":
        folder, groups = make_checkpoint("mistral", tmp_path / "model", sliding_window=21), [21]
    else:
        kinds = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
        folder = make_checkpoint("qwen3", tmp_path / "model", sliding_window=21, **kinds)
        groups = [None, 21]
    settings: dict[str, Any] = {"folder": folder, "max_seq_len": 256}
    expected, _, core, loop = answers(tmp_path / "without", parameters(), **settings)
    assert [group.window for group in core.runner.state.groups] == groups
    proposer = replay(4, 0.3, expected)
    found, _, core, drafted = answers(
        tmp_path / "with", parameters(), proposer=proposer, graphs=graphs, **settings
    )
    assert found == expected
    assert core.scheduler.accepted_tokens and drafted.iteration < loop.iteration * 0.9


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_come_and_go(graphs: bool, tmp_path: Path, without: Any):
    """In every other step or so, half of them wrong: what a step without drafts opens a block for may stand
    before where the host expects it."""
    expected, *_ = without(0)
    proposer, generator = replay(4, 0.5, expected), np.random.default_rng(3)
    found, _, core, _ = answers(
        tmp_path / "with",
        parameters(),
        graphs,
        lambda slots, rows: int(generator.choice([0, 0, 2, 4])),
        proposer=proposer,
    )
    assert found == expected
    assert core.scheduler.accepted_tokens


def test_what_a_draft_makes_a_bad_word_of_is_not_sampled_behind_it(tmp_path: Path):
    params = [SamplingParams(max_tokens=24, seed=i, temperature=0.5, end_id=-1) for i in range(6)]
    plain, *_ = answers(tmp_path / "plain", _logged(params))
    for each, (tokens, _) in zip(params, plain, strict=False):
        each.bad_words = [tokens[at : at + 2] for at in range(2, 20, 3)]
    expected, *_ = answers(tmp_path / "without", _logged(params))
    assert all(a != b for (a, _), (b, _) in zip(expected, plain, strict=True))
    proposer = replay(3, 0.0, expected)
    found, *_ = answers(tmp_path / "with", _logged(params), proposer=proposer)
    assert found == expected


def test_sequences_end_amid_accepted_drafts(tmp_path: Path):
    """With an end id or stop words that lie within what a step accepts."""
    params = [SamplingParams(max_tokens=32, temperature=0.8 * (i % 2), seed=i, end_id=-1) for i in range(9)]
    plain, *_ = answers(tmp_path / "plain", _logged(params))
    for i, (each, (tokens, _)) in enumerate(zip(params, plain, strict=False)):
        at = 10 + i
        if i % 3 == 0:
            each.end_id = tokens[at]
        else:
            each.stop_sequences = [tokens[at - i % 3 : at + 1]]
        each.min_tokens = 4 if i == 6 else 0
    expected, *_ = answers(tmp_path / "without", _logged(params))
    codes = {code for _, code in expected}
    assert {protocol.FINISHED_END_ID, protocol.FINISHED_STOP_WORDS} <= codes
    proposer = replay(4, 0.1, plain)
    found, *_ = answers(tmp_path / "with", _logged(params), proposer=proposer)
    assert found == expected


@pytest.fixture(scope="module")
def held_back(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[SamplingParams], list[Any]]:
    """Ends of answers, by the end id, by other ones, or by both, that are held back until a step that drafts
    could reach; and the answers without drafts."""
    params = [SamplingParams(max_tokens=32, temperature=0.8 * (i % 2), seed=i, end_id=-1) for i in range(9)]
    plain, *_ = answers(tmp_path_factory.mktemp("plain"), _logged(params))
    for i, (each, (tokens, _)) in enumerate(zip(params, plain, strict=False)):
        each.min_tokens, often = 20 + i % 5, sorted(tokens, key=lambda token: -tokens.count(token))
        if i % 3 < 2:
            each.end_id = often[0]
        if i % 3 > 0:
            each.late_ids = [often[-1], tokens[19]]
    expected, *_ = answers(tmp_path_factory.mktemp("without"), params)
    assert all(a != b for (a, _), (b, _) in zip(expected, plain, strict=True))
    assert all(len(tokens) >= each.min_tokens for (tokens, _), each in zip(expected, params, strict=False))
    assert {len(tokens) for tokens, _ in expected[:9]} - {32}
    return params, expected


@pytest.mark.parametrize(
    ("count", "spoilt"), some(list(itertools.product((1, 4), (0.0, 0.3, 1.0))), [(4, 0.0), (3, 0.3)])
)
def test_ends_are_held_back_amid_drafts(count: int, spoilt: float, held_back: Any, tmp_path: Path):
    params, expected = held_back
    proposer = replay(count, spoilt, expected)
    found, _, core, _ = answers(tmp_path / "with", params, proposer=proposer)
    assert found == expected
    # Of a third of the tokens or fewer the end is not held back, so others were drafted too.
    tokens, accepted = sum(len(tokens) for tokens, _ in found), core.scheduler.accepted_tokens
    assert accepted > tokens * {1: 0.25, 3: 0.35, 4: 0.4}[count] if spoilt < 1 else not accepted


@pytest.mark.parametrize("spoilt", some([0.0, 0.4], [0.4]))
def test_grammars_advance_along_drafts(spoilt: float, tmp_path: Path):
    """Ended by the end id and without one, with what else decides what a grammar lets follow."""
    schema = '{"type": "object", "properties": {"a": {"enum": ["red", "blue"]}, "b": {"type": "integer"}}, '
    texts = [
        ("json_schema", schema + '"required": ["a", "b"], "additionalProperties": false}'),
        ("regex", "(yes|no|perhaps)( [a-z]{2,5}){3}[.]"),
        ("ebnf_grammar", 'root ::= item (", " item){1,4} "."\nitem ::= [A-Z] [a-z]{2,6}'),
    ]
    params = [
        SamplingParams(
            max_tokens=60,
            temperature=0.9 * (i % 2),
            seed=i,
            end_id=[-1, 0][i // 3 % 2],
            grammar_type=texts[i % 3][0],
            grammar=texts[i % 3][1],
        )
        for i in range(12)
    ]
    params[7].bad_words, params[8].frequency_penalty, params[9].min_tokens = [[44], [110, 32]], 1.2, 12
    expected, *_, loop = answers(tmp_path / "without", _logged(params))
    codes = [code for _, code in expected]
    assert codes.count(protocol.FINISHED_END_ID) > 9
    proposer = replay(4, spoilt, expected)
    found, *_, drafted = answers(tmp_path / "with", _logged(params), proposer=proposer)
    assert found == expected
    assert drafted.iteration < loop.iteration * 0.9


def test_what_a_grammar_forces_needs_no_good_drafts(tmp_path: Path):
    """Every draft of the proposer is wrong; steps are saved all the same."""
    text = "[12]#7041#3986#5527#9083#6154#"  # of which no token of this vocabulary has two characters
    params = [
        SamplingParams(max_tokens=60, temperature=0.9, seed=i, grammar_type="regex", grammar=text)
        for i in range(4)
    ]
    expected, *_, loop = answers(tmp_path / "without", _logged(params))
    found, *_, drafted = answers(tmp_path / "with", _logged(params), proposer=Replay(4, 1.0))
    assert found == expected
    assert drafted.iteration < loop.iteration * 0.5


def _logged(params: list[SamplingParams]) -> list[SamplingParams]:
    params[len(params) * 2 // 3].log_probs = True
    return params


def test_drafts_are_refused_where_they_cannot_be_checked():
    with pytest.raises(ValueError, match="tensor_parallel_size should be 1"):
        start_core(shallow_model(), proposer=Replay(2, 0.0), tensor_parallel_size=2)


def test_tokens_before_one_that_nothing_is_left_for_are_sent(tmp_path):
    """Of the step's drafts those in front of it are right. A stop word among them ends the answer first."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0, end_id=-1)
    with serve(start_core(Path("bundled")), tmp_path / "plain") as client:
        ((*before, last), *_) = [tokens[:6] for tokens in client.generate(PROMPTS[:1], greedy)]
    allowed = sorted({*before, last})
    stuck: Any = {"allowed_ids": allowed, "bad_words": [[before[-1], each] for each in allowed]}
    stuck |= {"max_tokens": 12, "temperature": 0.0, "end_id": -1}
    proposer = Replay(4, 0.0, [PROMPTS[0] + before])
    core = start_core(Path("bundled"), proposer=proposer, check_invariants=True)
    core.scheduler._pace.offers = lambda *_: 4  # type: ignore[union-attr,method-assign]
    with serve(core, tmp_path / "drafts") as client:
        for more, ends in (({}, False), ({"stop_sequences": [[before[-2]]]}, True)):
            one = client.submit(PROMPTS[0], SamplingParams(**stuck, **more))
            client.wait([one])
            assert client.tokens[one] == (before[:-1] if ends else before)
            assert (one in client.failure, one in client.code) == (not ends, ends)
    assert core.scheduler.accepted_tokens
