# SPDX-License-Identifier: Apache-2.0
"""A runner with all of its graphs, on a CPU: decode steps, steps with prompts as one graph and in pieces."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from checkpoints import make_checkpoint
from engine.graphed import PROMPTS, graphed, replay_graphs
from engine.harness import fewer, serve, shallow_model, start_core
from engine.test_adapters import MODULES, make_adapter
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.scheduler import scheduler
from flashinfer_backend.worker import graphs, prefixes
from flashinfer_backend.worker.device_state import DeviceState, row_words


@pytest.mark.parametrize(
    "feature", ["one group", "few blocks", "windows", "adapters", "states", "states, experts", "experts"]
)
def test_a_runner_with_graphs_gives_the_tokens_of_one_without(
    feature: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """With few blocks, some sequences are preempted. With windows, those of two lengths, in turn with layers
    that see all. With adapters, rows of two and rows without any. With states, steps with prompts go in
    pieces; with experts, larger ones too."""
    windows, options = feature == "windows", {}
    captures = replay_graphs(monkeypatch)
    more = 2 if feature == "few blocks" else 1  # tokens, so that blocks run out
    params = [SamplingParams(max_tokens=9 + more * i, temperature=0.7 * (i % 2), seed=i) for i in range(12)]
    params[3].min_tokens, params[3].end_id = 12, 70
    folder, produced = shallow_model(), []
    if feature == "few blocks":
        options = {"max_tokens_in_paged_kv_cache": 300}
    if windows:
        kinds = ["sliding_attention", "full_attention"]
        changes = {"use_sliding_window": True, "sliding_window": 21, "layer_types": kinds}
        folder = make_checkpoint("qwen3", tmp_path / "model", **changes)
    checkpoints = {"states": "qwen3.5", "states, experts": "qwen3.5-moe", "experts": "qwen3-moe"}
    if kind := checkpoints.get(feature):
        folder = make_checkpoint(kind, tmp_path / "model", **fewer(kind))
    pieces: dict[int, int] = {}  # tokens of steps that go in pieces, and with padding
    run = graphs.MixedGraphs.run

    def noted(own: graphs.MixedGraphs, plan: StepPlan, inputs: Any, *rest: Any) -> torch.Tensor:
        pieces[plan.num_tokens] = len(inputs[0])
        return run(own, plan, inputs, *rest)

    monkeypatch.setattr(graphs.MixedGraphs, "run", noted)
    # Larger ones are faster here, but those in pieces are none for a step that has a full graph.
    monkeypatch.setattr(graphs.MixedGraphs, "_layer_seconds", lambda _, size: 100.0 - size)
    if feature == "adapters":
        options = {"max_loras": 2, "max_lora_rank": 8}
        for seed in range(2):
            form = {"r": 4 + seed, "lora_alpha": 64, "target_modules": MODULES}
            adapter = make_adapter(folder, tmp_path / str(seed), form, seed)
            for each in params[seed::3]:
                each.adapter = str(adapter)
    for name in ("without", "graphs"):
        core = start_core(folder, tokens_per_block=16, max_num_seqs=8, **options)
        if name == "graphs":
            attentions = graphed(core.runner.state)
            core.runner.capture_graphs([2, 4, 8])
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS, params))
            if feature == "adapters":
                # With the graphs of steps without adapters, and of those with one in each row.
                for each in ("", str(tmp_path / "0")):
                    alone = [msgspec.structs.replace(row, adapter=each) for row in params[:3]]
                    produced[-1] += client.generate(PROMPTS[:3], alone)
    assert captures[0].replays > 30 and len(attentions) == 1 + windows
    for attention in attentions:
        assert sum(each.taken for each in attention.planned) or "states" in feature
    assert (max(pieces.values(), default=0) > 48) == ("experts" in feature)
    assert feature != "experts" or all(padded <= 48 for tokens, padded in pieces.items() if tokens <= 48)
    assert feature != "one group" or sum(each.refused for each in attentions[0].planned)
    assert produced[0] == produced[1]
    assert bool(core.scheduler.preemptions) == (feature == "few blocks")
    if feature == "adapters":
        assert produced[0][0] == produced[0][-3] != produced[0][-6]


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_with_prompts_and_states_in_graphs(drafts: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Second turns start from snapshots: steps keep and restore states, beside decode rows."""
    replay_graphs(monkeypatch)
    monkeypatch.setattr(graphs, "MIXED_SIZES", [16, 64, 160])
    monkeypatch.setattr(scheduler, "SNAPSHOT_TOKENS", 16)
    seen: set[str] = set()
    upload = DeviceState.upload_rows

    def noted(own: DeviceState, plan: StepPlan, rows: torch.Tensor, decodes: int) -> None:
        prompts = plan.num_rows - own.state_decodes(plan)
        if len(rows) > row_words(plan.num_rows):
            found = prompts > 1, len(plan.cuts), len(plan.restored), prompts and plan.num_rows > prompts
            names = "prompts", "cut", "restored", "both"
            seen.update(name for name, has in zip(names, found, strict=True) if has)
        upload(own, plan, rows, decodes)

    monkeypatch.setattr(DeviceState, "upload_rows", noted)
    folder = make_checkpoint("qwen3.5", tmp_path / "model", **fewer("qwen3.5"))
    options = {"tokens_per_block": 16, "max_num_seqs": 4, "enable_kv_cache_reuse": True}
    if drafts:
        options |= {"speculative_method": "ngram", "max_draft_len": drafts, "min_matching_ngram_size": 1}
    params = [
        SamplingParams(max_tokens=8 + 2 * i, temperature=0.7 * (i % 4 == 1), seed=i, end_id=-1)
        for i in range(6)
    ]
    prompts = [2 * prompt[:14] for prompt in PROMPTS[:6]]
    produced = []
    for name in ("without", "graphs"):
        core = start_core(folder, **options)
        if name == "graphs":
            graphed(core.runner.state)
            core.runner.capture_graphs([4])
        with serve(core, tmp_path / name) as client:
            first = client.generate(prompts, params)
            turns = [[*prompt, *answer, 9, 8] for prompt, answer in zip(prompts, first, strict=True)]
            produced.append([first, client.generate(turns, params)])
    assert produced[0] == produced[1]
    assert seen == {"prompts", "cut", "restored", "both"}


@pytest.mark.parametrize(("most", "sizes"), [(9, [8, 16]), (32, [8, 16, 32]), (50, [8, 16, 32, 48])])
def test_no_graph_is_captured_for_steps_beyond_the_budget(
    most: int, sizes: list[int], monkeypatch: Any
) -> None:
    replay_graphs(monkeypatch)
    core = start_core(
        Path("bundled"), max_num_seqs=8, max_num_tokens=most, max_num_tokens_while_decoding=most
    )
    graphed(core.runner.state)
    core.runner.capture_graphs([8])
    mixed = core.runner.mixed_graphs
    assert mixed is not None
    assert mixed.largest == sizes[-1]


def test_decode_rows_beside_prompts_read_shared_prefixes_once(tmp_path: Path, monkeypatch: Any) -> None:
    replay_graphs(monkeypatch)
    monkeypatch.setattr(graphs, "LARGEST_SHARING", 32)
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 1 << 18)
    document = list(range(40, 232))
    prompts = [[*document, *range(300 + 40 * i, 309 + 40 * i)] for i in range(16)]
    params = [SamplingParams(max_tokens=10 + 3 * (i % 5), temperature=0.0) for i in range(16)]
    produced = []
    for name in ("without", "graphs"):
        core = start_core(
            shallow_model(), tokens_per_block=16, max_num_seqs=8, read_shared_prefixes_once=True
        )
        if name == "graphs":
            (attention,) = graphed(core.runner.state)
            core.runner.capture_graphs([2, 4, 8])
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(prompts, params))
    assert produced[0] == produced[1]
    assert len(attention.sharing) == 3 and sum(each.taken for each in attention.sharing) > 2


def test_a_runner_with_graphs_has_an_eagle3_head_draft_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    """As many steps with graphs as without, so as many accepted drafts; and the tokens of no drafts."""
    replay_graphs(monkeypatch)
    params = [SamplingParams(max_tokens=24, temperature=0.7 * (i % 2), seed=i, end_id=-1) for i in range(3)]
    drafting = {"speculative_method": "eagle3", "draft_model": "bundled", "max_draft_len": 3}
    produced, steps, late = [], [], []
    for name in ("plain", "without", "graphs"):
        options: dict[str, Any] = {} if name == "plain" else drafting
        core = start_core(Path("bundled"), tokens_per_block=16, max_num_seqs=4, **options)
        if name == "graphs":
            graphed(core.runner.state)
            core.runner.capture_graphs([2, 4])
        if name != "plain":
            _note_what_is_late(core.runner, late)
        with serve(core, tmp_path / name) as client:
            produced.append([client.generate([prompt], each)[0] for prompt, each in
                             zip(PROMPTS, params, strict=False)])  # fmt: skip
            steps.append(client.loop.iteration)
    assert produced[1] == produced[2] == produced[0]
    assert steps[1] < 0.8 * steps[0] and abs(steps[2] - steps[1]) <= 1
    # A graph without drafts is read before the head works for it, other steps behind that.
    assert set(late) == {True, False}


def test_drafts_that_cannot_be_made_behind_a_step_harm_no_request(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    replay_graphs(monkeypatch)
    drafting = {"speculative_method": "eagle3", "draft_model": "bundled", "max_draft_len": 3}
    produced, failed = [], []
    for name in ("as they are", "failing"):
        core = start_core(Path("bundled"), tokens_per_block=16, max_num_seqs=4, **drafting)
        graphed(core.runner.state)
        core.runner.capture_graphs([2, 4])
        late: list[bool] = []
        if name == "failing":
            propose = core.runner.drafting.propose

            def proposed(*step: Any, late: list[bool] = late, propose: Any = propose) -> None:
                if late and late[-1]:
                    failed.append(len(late))
                    raise RuntimeError("no memory is left")
                propose(*step)

            core.runner.drafting.propose = proposed
            settle = core.runner.settle

            def settled(late: list[bool] = late, settle: Any = settle) -> None:
                late.append(True)
                try:
                    settle()
                finally:
                    late.append(False)

            core.runner.settle = settled
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS[:2], [SamplingParams(max_tokens=16, end_id=-1)] * 2))
            assert not client.failure
    assert failed and "the drafts behind a step failed" in caplog.text
    assert produced[0] == produced[1]


def _note_what_is_late(runner: Any, late: list[bool]) -> None:
    """late: of each step at whose end a head works, whether that is behind its launch."""
    launch, propose = runner.launch, runner.drafting.propose
    launching = False

    def launched(plan: Any, *callbacks: Any) -> Any:
        nonlocal launching
        runner.settle()
        launching = True
        try:
            return launch(plan, *callbacks)
        finally:
            launching = False

    def proposed(fed: Any, *rest: Any) -> None:
        late.append(not launching)
        propose(fed, *rest)

    runner.launch, runner.drafting.propose = launched, proposed
