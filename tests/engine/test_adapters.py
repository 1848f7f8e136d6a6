# SPDX-License-Identifier: Apache-2.0
"""Adapters in a real engine, against PEFT's merged into the model."""

import copy
import json
import math
import os
import random
import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from engine.harness import fewer, make_prompts, serve, start_core
from engine.ranks_in_threads import start_ranks
from engine.test_generate import next_ids
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import TOP_LOGPROBS
from flashinfer_backend.engine import adapters
from flashinfer_backend.engine.adapters import AdapterPreparation
from flashinfer_backend.models.adapters import Adapter, AdapterError
from flashinfer_backend.transport import protocol
from int4_checkpoints import make_int4
from waiting import wait_for

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Ranks that are no powers of two, modules of fused products that others lack, and each way of scaling.
FORMS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 64, "target_modules": MODULES},
    {"r": 3, "lora_alpha": 48, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    {
        "r": 16,
        "lora_alpha": 128,
        "target_modules": ["k_proj", "up_proj", "o_proj"],
        "rank_pattern": {"k_proj": 5},
        "alpha_pattern": {"o_proj": 160},
        "layers_to_transform": [1],
    },
]
SLOW = r"(.+)(.+)(.+)(.+)(.+)(.+)(.+)(.+)\3\4\5\6"  # of a number of ways that grows with a name's length
ASKED = 10  # tokens of an answer
ADAPTERS = {"max_loras": 2, "max_lora_rank": 16}


def make_adapter(base: Path | nn.Module, folder: Path, form: dict[str, Any], seed: int) -> Path:
    """As PEFT saves it, with random weights. base: the model, or its folder."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(base) if isinstance(base, Path) else copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(**form))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.create_or_update_model_card = lambda _: None  # saving takes longest for it
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "phi3", "mpt", "qwen3.5"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, folder / "model", **fewer(request.param))
    forms = FORMS
    fused = {"phi3": ["qkv_proj", "gate_up_proj", "o_proj"], "mpt": ["Wqkv", "out_proj", "down_proj"]}
    fused["qwen3.5"] = ["q_proj", "k_proj", "o_proj", "up_proj", "out_proj"]
    fused["qwen3.5"] += [f"in_proj_{name}" for name in ("qkv", "z", "a")]
    if request.param in fused:
        forms = [{"r": 4, "lora_alpha": 64, "target_modules": fused[request.param]}]
    return model, [make_adapter(model, folder / str(i), form, i) for i, form in enumerate(forms)]


def with_adapter(model_dir: Path, adapter: Path | None, merge: bool = True) -> Any:
    """transformers' model with the adapter merged into the weights, or next to them."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
        model = model.merge_and_unload() if merge else model.base_model.model
    return model


def merged(
    model_dir: Path,
    adapter: Path | None,
    prompts: list[list[int]],
    answers: list[list[int]],
    merge: bool = True,
) -> list[list[int]]:
    """The answers, exactly if they are the greedy ones of `with_adapter`."""
    return next_ids(with_adapter(model_dir, adapter, merge), prompts, answers, ASKED)


def asks(adapter: Path | None, max_tokens: int = ASKED) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, adapter="" if adapter is None else str(adapter)
    )


def test_each_sequence_has_its_adapter(made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """More adapters than places, in chunks, with preemption and prefix hits: prompts are the same for all."""
    model, adapters = made
    chosen: list[Path | None] = [None, *adapters]
    prompts = make_prompts(4)
    few = {"max_num_tokens": 16, "max_num_tokens_while_decoding": 16, "max_tokens_in_paged_kv_cache": 144}
    core = start_core(model, max_num_seqs=6, max_seq_len=160, check_invariants=True, **few, **ADAPTERS)
    with serve(core, tmp_path / "run") as client:
        every = (
            [prompt for prompt in prompts for _ in chosen],
            [asks(each) for _ in prompts for each in chosen],
        )
        found = client.generate(*every)
        expected = [found[number :: len(chosen)] for number in range(len(chosen))]
        assert len({json.dumps(ids) for ids in expected}) == len(chosen), "the adapters change too little"
        for adapter, answers in zip(chosen, expected, strict=True):
            assert answers == merged(model, adapter, prompts, answers), adapter
        assert client.generate(*every) == found
        assert client.loop.adapters.loads >= len(adapters)
        # A prompt's blocks serve the same adapter alone.
        longest = max(range(4), key=lambda index: len(prompts[index]))
        for number in (0, 0, 1, 1):
            assert client.generate([prompts[longest]], asks(chosen[number])) == [expected[number][longest]]
        # In any order and number, some of which are cancelled.
        draw = random.Random(5)
        for n in range(40):  # which sequences are together, and so whether blocks run out, depends on time
            if n > 1 and core.scheduler.preemptions:
                break
            kinds = [(draw.randrange(4), draw.randrange(len(chosen))) for _ in range(9)]
            asked = [client.submit(prompts[which], asks(chosen[number])) for which, number in kinds]
            client.cancel(asked[draw.randrange(9)])
            client.wait(asked)
            for (which, number), each in zip(kinds, asked, strict=True):
                wanted = expected[number][which]
                done = client.code[each] != protocol.FINISHED_CANCELLED
                assert client.tokens[each] == (wanted if done else wanted[: len(client.tokens[each])])
    assert core.scheduler.preemptions and core.scheduler.prompt_tokens_reused


@pytest.mark.parametrize("made", ["phi3", "qwen3.5"], indirect=True)
@pytest.mark.parametrize(
    "settings", [{"quantization": "fp8"}, {"speculative_method": "ngram"}], ids=["FP8", "drafts"]
)
def test_with_other_features(settings: dict[str, Any], made: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """An adapter alone gives what it gives among others; drafts change nothing."""
    model, adapters = made
    prompts = [prompt + prompt[:10] for prompt in make_prompts(3)]
    each = [asks(None), asks(adapters[0]), asks(adapters[-1])]
    core = start_core(model, max_seq_len=160, check_invariants=True, **ADAPTERS, **settings)
    with serve(core, tmp_path / "with") as client:
        found = client.generate(prompts, each)
    plain = {} if "speculative_method" in settings else settings
    core = start_core(model, max_seq_len=160, **ADAPTERS, **plain)
    with serve(core, tmp_path / "alone") as client:
        assert found == [client.generate([p], [a])[0] for p, a in zip(prompts, each, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_4_bit_model_with_all_at_once(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests with drafts, chunks, preemption and prefix hits, against PEFT in float64."""
    from peft import PeftModel

    checkpoint = make_int4("awq", "llama", tmp_path / "model")
    made = [make_adapter(checkpoint.model, tmp_path / str(i), FORMS[i], i) for i in range(2)]
    chosen = [None, *made]
    prompts, draw = [prompt + prompt[:10] for prompt in make_prompts(4)], random.Random(ranks)
    peft = PeftModel.from_pretrained(copy.deepcopy(checkpoint.model), chosen[1], "1").double()
    peft.load_adapter(chosen[2], "2")
    few = {"max_num_tokens": 24, "max_num_tokens_while_decoding": 24, "max_tokens_in_paged_kv_cache": 128}
    settings = {"max_num_seqs": 6, "max_seq_len": 160, "speculative_method": "ngram", **few, **ADAPTERS}
    core = start_ranks(checkpoint.folder, ranks, monkeypatch, **settings)
    kinds, count = [(draw.randrange(4), draw.randrange(3)) for _ in range(24)], 14
    with serve(core, tmp_path / "run") as client:
        found = client.generate([prompts[i] for i, _ in kinds], [asks(chosen[j], count) for _, j in kinds])
    assert core.scheduler.preemptions and core.scheduler.prompt_tokens_reused
    core.close()
    for (which, number), tokens in {kind: row for kind, row in zip(kinds, found, strict=True)}.items():
        if number:
            peft.set_adapter(str(number))
        model = peft if number else checkpoint.model
        with torch.inference_mode():
            logits = model(torch.tensor([prompts[which] + tokens])).logits[0, len(prompts[which]) - 1 : -1]
        assert (logits.amax(-1) - logits[range(count), tokens]).max() < 1e-3, (which, number)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma3"])
def test_embedding_and_head(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, on two ranks, and refused where there is no room. Tied weights are two for adapters."""
    model = make_checkpoint(kind, tmp_path / "model")
    targets = [["embed_tokens", "lm_head"], ["embed_tokens", "down_proj"], ["lm_head", "q_proj"]]
    adapters = [
        make_adapter(model, tmp_path / str(i), {"r": 4, "lora_alpha": 16, "target_modules": each, **tied}, i)
        for i, each in enumerate(targets)
        for tied in ({"ensure_weight_tying": True} if kind == "llama-tied" and i == 2 else {},)
    ]
    prompts, chosen = make_prompts(3), [None, *adapters]
    settings, given = {"max_seq_len": 160, "max_loras": 3, "lora_vocabulary": True}, []
    for ranks in (1, 2):
        core = start_ranks(model, ranks, monkeypatch, **settings)
        with serve(core, tmp_path / f"{ranks}") as client:
            each = [asks(adapter) for _ in prompts for adapter in chosen]
            given.append(client.generate([prompt for prompt in prompts for _ in chosen], each))
            of_prompt = {"context_logits": True, "prompt_log_probs": 2}
            asked = [client.submit(prompts[0], msgspec.structs.replace(p, **of_prompt)) for p in each[:4]]
            client.wait(asked)
            reports = [client.reports[local_id][0] for local_id in asked]
        core.close()
        for report in reports:
            logits = np.frombuffer(report.context_logits, "<f4").reshape(len(prompts[0]), -1)
            exact = torch.tensor(logits[:-1]).log_softmax(-1)
            told = np.frombuffer(report.prompt_log_probs, TOP_LOGPROBS).reshape(-1, 3)
            own = exact.gather(1, torch.tensor(prompts[0][1:]).unsqueeze(1))
            right = torch.cat([own, exact.topk(2).values], dim=1)
            np.testing.assert_allclose(told["log_prob"], right, atol=1e-4)
    assert given[0] == given[1]
    expected = [given[0][number :: len(chosen)] for number in range(len(chosen))]
    assert len({json.dumps(ids) for ids in expected}) == len(chosen), "the adapters change too little"
    for adapter, answers in zip(chosen, expected, strict=True):
        assert answers == merged(model, adapter, prompts, answers, merge=False), adapter
    with serve(start_core(model, max_seq_len=160, max_loras=1), tmp_path / "none") as client:
        refused = client.submit(prompts[0], asks(adapters[0]))
        client.wait([refused])
        assert "the knob lora_vocabulary is off" in client.failure[refused].message


def test_ranks_have_their_shares(made: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: Any) -> None:
    model, adapters = made
    prompts = make_prompts(3)
    core = start_ranks(model, 2, monkeypatch, max_seq_len=160, **ADAPTERS)
    with serve(core, tmp_path) as client:
        for adapter in (*adapters, None):
            answers = client.generate(prompts, asks(adapter))
            assert answers == merged(model, adapter, prompts, answers), adapter
        # Numbers of one rank's share alone that are not finite are found by all.
        broken = tmp_path / "broken"
        shutil.copytree(adapters[0], broken)
        tensors = load_file(broken / "adapter_model.safetensors")
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor[-1] = math.nan
        save_file(tensors, broken / "adapter_model.safetensors")
        failing = client.submit(prompts[0], asks(broken))
        client.wait([failing])
        assert "not finite" in client.failure[failing].message
        assert client.generate_after_failures(prompts[:1], asks(None)) == answers[:1]
    core.close()


def test_a_folder_that_changes_between_two_ranks_fails_its_requests_alone(tmp_path: Path) -> None:
    """Rank 1, a process, reads it later than rank 0."""
    model, adapter = resolve_model_dir("bundled"), tmp_path / "adapter"
    prompts, lost = make_prompts(1), list[str]()
    core = start_core(model, tensor_parallel_size=2, on_loss=lost.append, **ADAPTERS)
    loader = core.runner.adapters
    assert loader is not None
    (other,) = [each for each in psutil.Process().children() if "flashinfer_backend.worker" in each.cmdline()]
    with serve(core, tmp_path / "run") as client:
        plain = client.generate(prompts, asks(None))
        for said in ("was replaced or written to while it was read", "was removed before the request could"):
            make_adapter(model, adapter, FORMS[0], 1)
            answers = client.generate(prompts, asks(adapter))
            assert answers == merged(model, adapter, prompts, answers) != plain
            make_adapter(model, adapter, FORMS[1], 1)
            loader._cached.clear()
            other.suspend()
            failing = client.submit(prompts[0], asks(adapter))
            wait_for(lambda: loader._cached)
            shutil.rmtree(adapter)
            if "replaced" in said:
                make_adapter(model, adapter, FORMS[0], 2)
            other.resume()
            client.wait([failing])
            assert said in client.failure[failing].message and not lost
            assert client.generate_after_failures(prompts, asks(None)) == plain
    core.close()


@pytest.mark.parametrize("made", ["llama"], indirect=True)
def test_what_is_wrong_with_an_adapter_fails_its_requests_alone(
    made: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    model, adapters = made
    prompts = make_prompts(1)
    broken, cut = tmp_path / "broken", tmp_path / "cut"
    for folder in (broken, cut):
        shutil.copytree(adapters[0], folder)
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "adapter_config.json")
    (pipe / "adapter_model.safetensors").touch()
    (cut / "adapter_model.safetensors").write_bytes(b"0" * 100)
    config = json.loads((broken / "adapter_config.json").read_text())
    core = start_core(model, max_seq_len=160, max_lora_rank=16, max_loras=1)
    with serve(core, tmp_path / "run") as client:
        plain, adapted = (client.generate(prompts, asks(each)) for each in (None, adapters[0]))
        for folder, change, said in (
            (broken, {"use_dora": True}, "use_dora true, which is not supported"),
            (broken, {"peft_type": "IA3"}, 'peft_type "IA3"; only LORA'),
            (broken, {"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
            (broken, {"new_key": 1}, "new_key 1, an unknown key"),
            (broken, {"lora_alpha": 10**400}, "should be a finite number"),
            (broken, {"alpha_pattern": {SLOW: 1}}, "takes longer than"),
            (broken, {"alpha_pattern": {"(": 1}}, "is no regular expression"),
            (pipe, {}, "adapter_config.json cannot be read: it should be a regular file"),
            (cut, {}, "adapter_model.safetensors cannot be read"),
            (tmp_path / "none", {}, "none was removed before the request could run. Send the request again"),
        ):
            if change:
                (folder / "adapter_config.json").write_text(json.dumps(config | change))
            going_on, failing = client.submit(prompts[0], asks(None)), client.submit(prompts[0], asks(folder))
            client.wait([going_on, failing])
            assert said in client.failure[failing].message
            assert client.tokens[going_on] == plain[0]
        # A file that is written anew is another adapter, and the place that failed is free.
        (broken / "adapter_config.json").write_text(json.dumps(config))
        client.failure.clear()
        assert client.generate(prompts, asks(broken)) == adapted
        # So is one whose settings alone are others.
        (broken / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 6 * config["r"]}))
        changed = client.generate(prompts, asks(broken))
        assert changed == merged(model, broken, prompts, changed) != adapted


def test_an_adapter_that_failed_for_a_cancelled_request_is_tried_again(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    loads: list[Future[Any]] = []

    def load(place: int, folder: str) -> Future[Any]:
        loads.append(Future())
        return loads[-1]

    preparation = AdapterPreparation(load, 1, list)
    for handle in (1, 2):
        preparation.submit(Request(handle, np.zeros(4, np.int32), asks(tmp_path), 24))
        assert not list(preparation.ready()) and len(loads) == handle
        if handle == 1:
            preparation.cancel(handle)
            loads[0].set_exception(AdapterError("broken"))
    loads[1].set_result(Adapter(tmp_path, ((0, 0), (0, 0)), 1, ()))
    assert [problem for _, problem in preparation.ready()] == [None]


def test_requests_that_wait_for_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are overtaken for a while, then come first. A turn does not look at each of thousands."""
    clock, looks = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: clock.now))
    place_of = AdapterPreparation._place_of
    monkeypatch.setattr(AdapterPreparation, "_place_of", lambda *args: looks.append(1) or place_of(*args))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / name / file).touch()

    def load(place: int, folder: str) -> Future[Any]:
        loaded: Future[Any] = Future()
        loaded.set_result(Adapter(Path(folder), ((0, 0), (0, 0)), 1, ()))
        return loaded

    running: list[Request] = []
    preparation = AdapterPreparation(load, 1, lambda: running)

    def come(name: str, *handles: int) -> None:
        for handle in handles:
            preparation.submit(Request(handle, np.zeros(4, np.int32), asks(tmp_path / name), 24))

    def gone_on() -> list[int]:
        found = [request for _ in range(2) for request, problem in preparation.ready() if problem is None]
        running.extend(found)
        return [request.handle for request in found]

    come("a", 1, 2)
    assert gone_on() == [1, 2]
    come("b", *range(10, 1010))
    come("a", 3)
    looks.clear()
    assert gone_on() == [3] and len(looks) < 10
    assert preparation.waiting == [str(tmp_path / "b")]
    clock.now = 1.5
    come("a", 4)
    assert gone_on() == []
    preparation.cancel(10)  # the next one has waited for as long
    running.clear()
    assert gone_on() == list(range(11, 1010)) and preparation.waiting == [str(tmp_path / "a")]
    running.clear()
    assert gone_on() == [4] and not len(preparation)


def test_an_adapter_that_gave_way_to_others_is_named(tmp_path: Path) -> None:
    """The weights of a task id, whose requests waited for a place."""
    task = tmp_path / "task"
    task.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (task / name).touch()
    load: Future[Any] = Future()
    preparation = AdapterPreparation(lambda *_: load, 1, list)
    params = msgspec.structs.replace(asks(task), adapter_name="7")
    preparation.submit(Request(1, np.zeros(4, np.int32), params, 24))
    assert not list(preparation.ready())
    shutil.rmtree(task)
    load.set_exception(AdapterError("it has no adapter_config.json"))
    ((_, problem),) = preparation.ready()
    assert problem is not None and problem.startswith("the adapter 7 was removed before the request could")


def test_the_model_alone_takes_no_adapters(tmp_path: Path) -> None:
    with serve(start_core(Path("bundled")), tmp_path) as client:
        refused = client.submit([1, 2, 3], asks(tmp_path))
        client.wait([refused])
        assert "max_loras" in client.failure[refused].message
