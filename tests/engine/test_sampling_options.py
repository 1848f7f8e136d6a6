# SPDX-License-Identifier: Apache-2.0
"""Penalties, bad words, bias, filters, log probabilities and logits over whole sequences.

The reference is one forward pass of transformers over the produced sequence, with transformers' own
logits processors (or a plain definition) applied before each of its tokens.
"""

import functools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from checkpoints import make_checkpoint
from engine.harness import Client, make_prompts, serve, start_core
from flashinfer_backend.core.sampling_params import NO_TOKEN_LEFT, SamplingParams
from flashinfer_backend.core.step import TOP_LOGPROBS
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.transport import protocol

NEVER = float("-inf")
VOCAB = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def forward(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def choose(row: torch.Tensor, ids: list[int], prompt_len: int, p: SamplingParams) -> int:
    """The next token of ids, from its logits [V], by the documented order of steps."""
    row, seen = row.clone().unsqueeze(0), torch.tensor([ids])
    if p.allowed_ids:
        row = torch.full_like(row, NEVER).index_copy(1, torch.tensor(p.allowed_ids), row[:, p.allowed_ids])
    if p.repetition_penalty != 1:
        row = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(seen, row)
    for token in ids[prompt_len:]:
        row[0, token] -= p.frequency_penalty
    for token in set(ids[prompt_len:]):
        row[0, token] -= p.presence_penalty
    for token, bias in zip(p.bias_ids, p.bias_values, strict=True):
        row[0, token] += bias
    if p.bad_words:
        row = NoBadWordsLogitsProcessor(p.bad_words, eos_token_id=[])(seen, row)
    if len(ids) - prompt_len < p.min_tokens:
        row[0, [token for token in (p.end_id, *p.late_ids) if token >= 0]] = NEVER
    if p.temperature > 0:
        scaled = row / p.temperature
        if p.top_k:
            scaled = TopKLogitsWarper(p.top_k)(seen, scaled)
        if p.top_p < 1:
            scaled = TopPLogitsWarper(p.top_p)(seen, scaled)
        if p.min_p:
            scaled = MinPLogitsWarper(p.min_p)(seen, scaled)
        row = row.masked_fill(scaled == NEVER, NEVER)
    heat, seed = torch.tensor([p.temperature]), torch.tensor([p.seed])
    return int(torch_ops.sample(row, heat, seed, torch.tensor([len(ids)], dtype=torch.int32)))


@functools.cache  # the same whichever way a request is served
def chosen(
    model: PreTrainedModel, ids: tuple[int, ...], start: int, asked: bytes
) -> tuple[torch.Tensor, list[int]]:
    """The logits of ids, and what is chosen behind each of ids[start - 1 : -1]."""
    p = msgspec.msgpack.decode(asked, type=SamplingParams)
    logits = forward(model, list(ids))
    return logits, [choose(logits[n - 1], list(ids[:n]), start, p) for n in range(start, len(ids))]


def check(
    model: PreTrainedModel, client: Client, local_id: int, prompt: list[int], p: SamplingParams
) -> None:
    """Everything the engine sent for a request is what the reference gives."""
    produced, code = client.tokens[local_id], client.code[local_id]
    ids, start = prompt + produced, len(prompt)
    logits, expected = chosen(model, tuple(ids), start, msgspec.msgpack.encode(p))
    assert produced == expected
    if code == protocol.FINISHED_END_ID:
        assert choose(logits[-1], ids, start, p) == p.end_id
    else:
        assert code == protocol.FINISHED_LENGTH and len(produced) == p.max_tokens
    reports = client.reports.get(local_id, [])
    if p.log_probs:
        reported = [e.log_prob for e in reports if e.log_prob is not None]
        reference = logits.log_softmax(-1)[torch.arange(start, len(ids)) - 1, torch.tensor(produced)]
        np.testing.assert_allclose(reported, reference, atol=1e-4)
    if p.generation_logits:
        sent = [np.frombuffer(e.generation_logits, "<f4") for e in reports if e.generation_logits is not None]
        np.testing.assert_allclose(np.stack(sent), logits[start - 1 : -1], atol=1e-4)
    if p.context_logits:
        (sent,) = [e.context_logits for e in reports if e.context_logits is not None]
        np.testing.assert_allclose(
            np.frombuffer(sent, "<f4").reshape(start, VOCAB), logits[:start], atol=1e-4
        )
        assert reports[0].context_logits is sent, "context logits come with the first token"
    if p.prompt_log_probs is not None:
        (told,) = [e.prompt_log_probs for e in reports if e.prompt_log_probs is not None]
        assert reports[0].prompt_log_probs is told, "so do log probabilities of the prompt"
        most, rows = p.prompt_log_probs, np.frombuffer(told, TOP_LOGPROBS).reshape(start - 1, -1)
        reference = logits[: start - 1].log_softmax(-1)
        own = reference[torch.arange(start - 1), torch.tensor(prompt[1:])]
        np.testing.assert_allclose(rows["log_prob"][:, 0], own, atol=1e-4)
        assert rows["token"][:, 0].tolist() == (reference >= own.unsqueeze(1)).sum(1).tolist(), "ranks"
        values, ids = reference.topk(most)
        assert rows["token"][:, 1:].tolist() == ids.tolist()
        np.testing.assert_allclose(rows["log_prob"][:, 1:], values, atol=1e-4)


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(forward(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def features(prompt: list[int], plain: list[int]) -> dict[str, SamplingParams]:
    """Each feature alone, and all together. plain: what the model would say greedily."""
    n = 28

    def params(**options: object) -> SamplingParams:
        return SamplingParams(max_tokens=n, **({"temperature": 0.0} | options))  # type: ignore[arg-type]

    bad_words = [[plain[0]], [prompt[-1], plain[0]], plain[2:5], plain[6:8], [249, 248, 247], [250]]
    allowed = [*range(3, 120, 2), 200, *plain[:8]]
    bias = {"bias_ids": [plain[1], 17, 60], "bias_values": [NEVER, 3.5, -4.0]}
    return {
        "plain": params(),
        "repetition": params(repetition_penalty=1.6),
        "rewarded repetition": params(repetition_penalty=0.8, temperature=1.0, seed=5),
        "presence": params(presence_penalty=1.5),
        "frequency": params(frequency_penalty=0.9, temperature=0.7, seed=3),
        "negative frequency": params(frequency_penalty=-0.2, presence_penalty=0.1),
        "bad words": params(bad_words=bad_words),
        "bias": params(**bias),
        "allowed ids": params(allowed_ids=sorted({*allowed, 255} - {plain[1]}), temperature=0.6, seed=14),
        "top-k": params(temperature=1.2, top_k=7, seed=2**63 - 1),
        "top-p": params(temperature=0.9, top_p=0.6, seed=11),
        "top-k and top-p": params(temperature=1.5, top_k=30, top_p=0.8, seed=12),
        "min-p": params(temperature=1.5, min_p=0.2, seed=13),
        "greedy in spite of filters": params(top_k=3, top_p=0.5),
        "min_tokens": params(end_id=plain[4], min_tokens=12, log_probs=True, generation_logits=True),
        "late ids": params(late_ids=[plain[2], plain[5], 250], min_tokens=9),
        "log_probs": params(log_probs=True, prompt_log_probs=4),
        "log_probs of samples": params(log_probs=True, temperature=1.0, end_id=plain[9]),
        "generation logits": params(generation_logits=True, temperature=1.0, seed=4),
        "context logits": params(context_logits=True),
        "everything": params(
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            bad_words=bad_words,
            allowed_ids=sorted(set(allowed)),
            temperature=1.1,
            top_k=50,
            top_p=0.95,
            min_p=0.02,
            seed=77,
            end_id=plain[6],
            min_tokens=10,
            late_ids=[plain[7]],
            log_probs=True,
            generation_logits=True,
            context_logits=True,
            prompt_log_probs=0,
            **bias,
        ),
    }


@pytest.fixture(scope="module")
def cases(model: PreTrainedModel) -> list[tuple[list[int], SamplingParams]]:
    names = list(features([1], list(range(10))))
    prompts = make_prompts(len(names), 70)
    return [(p, features(p, greedy(model, p, 10))[name]) for p, name in zip(prompts, names, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_seqs": 19, "max_num_tokens": 1024}, id="mixed"),
        pytest.param({"max_num_seqs": 3}, id="slots reused"),
        pytest.param(
            {"max_num_seqs": 16, "max_num_tokens": 16, "max_num_tokens_while_decoding": 16}, id="chunked"
        ),
        pytest.param({"max_num_seqs": 16, "max_tokens_in_paged_kv_cache": 400}, id="preempted"),
    ],
)
def test_every_feature_equals_transformers(checkpoint, model, cases, tmp_path, settings):
    core = start_core(checkpoint, **({"max_seq_len": 160} | settings))
    with serve(core, tmp_path) as client:
        for _ in range(2):  # the second time with the prefix cache
            ids = [client.submit(prompt, params) for prompt, params in cases]
            client.wait(ids)
            assert not client.failure
            for local_id, (prompt, params) in zip(ids, cases, strict=True):
                check(model, client, local_id, prompt, params)
    assert bool(core.scheduler.preemptions) == ("max_tokens_in_paged_kv_cache" in settings)
    if settings["max_num_seqs"] == len(cases):
        assert core.scheduler.prompt_tokens_reused > 0


def test_features_bite(model, cases):
    """Every case but the first few differs from what the plain sampler would say: none is tested in vain."""
    for name, (prompt, params) in zip(features([1], list(range(10))), cases, strict=True):
        if name in ("plain", "greedy in spite of filters") or "log" in name:
            continue
        ids, without = (
            list(prompt),
            SamplingParams(max_tokens=1, temperature=params.temperature, seed=params.seed),
        )
        for _ in range(params.max_tokens):
            row = forward(model, ids)[-1]
            token = choose(row, ids, len(prompt), params)
            if token != choose(row, ids, len(prompt), without):
                break
            ids.append(token)
        else:
            pytest.fail(f"{name} changes no token")


def test_rows_that_ask_for_nothing_stay_on_the_plain_path(checkpoint, tmp_path):
    core = start_core(checkpoint)
    with serve(core, tmp_path) as client:
        plain = SamplingParams(max_tokens=8, temperature=0.8, min_tokens=3, end_id=5, context_logits=True)
        client.generate(make_prompts(4, 70), plain)
        assert core.runner.sampler._history.tokens is None
        assert not core.scheduler.table.stateful.any()


@pytest.mark.parametrize(
    ("extreme", "expected"),
    [
        ({"bias_ids": [5], "bias_values": [3e38]}, [5, 5, 5, 5]),
        ({"bias_ids": list(range(VOCAB)), "bias_values": [float("-inf")] * VOCAB}, [0, 0, 0, 0]),
        ({"allowed_ids": [5, 6], "bias_ids": [6, 7], "bias_values": [99.0, float("inf")]}, [6, 6, 6, 6]),
        ({"repetition_penalty": 1e-39}, None),
        ({"frequency_penalty": -3e38}, None),
    ],
)
def test_extreme_biases_and_penalties_harm_nobody(checkpoint, tmp_path, extreme, expected):
    with serve(start_core(checkpoint), tmp_path) as client:
        prompts = make_prompts(2, 70)
        plain = client.submit(prompts[0], SamplingParams(max_tokens=20, temperature=0.0))
        params = SamplingParams(max_tokens=4, temperature=0.01, top_p=0.9, **extreme)
        odd = client.submit(prompts[1], params)
        client.wait([plain, odd])
        assert len(client.tokens[plain]) == 20 and len(client.tokens[odd]) == 4
        assert expected is None or client.tokens[odd] == expected


def test_a_request_without_an_allowed_token_fails_alone(checkpoint, model, tmp_path, caplog):
    prompts = make_prompts(5, 70)
    first = greedy(model, prompts[0], 2)
    core = start_core(checkpoint)
    common = {"max_tokens": 20, "temperature": 0.0}
    with serve(core, tmp_path) as client:
        # After its first token the only ids left complete bad words.
        late = SamplingParams(
            allowed_ids=sorted({first[0], 40}), bad_words=[[first[0], first[0]], [first[0], 40]], **common
        )
        at_once = SamplingParams(allowed_ids=[40, 41], bad_words=[[40], [41], [41, 40]], **common)
        too_early = SamplingParams(allowed_ids=[40, 2], min_tokens=3, late_ids=[2], end_id=40, **common)
        plain = SamplingParams(**common)
        asked = [(prompts[0], late), (prompts[1], at_once), (prompts[2], too_early), (prompts[3], plain)]
        ids = [client.submit(*each) for each in asked]
        client.wait(ids)
        assert [(client.failure[i].message, client.failure[i].refused) for i in ids[:3]] == [
            (NO_TOKEN_LEFT, False),
            (NO_TOKEN_LEFT, True),
            (NO_TOKEN_LEFT, True),
        ]
        assert client.tokens[ids[0]] == first[:1] and ids[3] not in client.failure
        check(model, client, ids[3], prompts[3], plain)
        # A marker that is chosen is fed to the step behind it: nothing of it is found again.
        again = client.submit(prompts[0] + first[:1], plain)
        client.wait([again])
        check(model, client, again, prompts[0] + first[:1], plain)
    assert not [record for record in caplog.records if "failed" in record.getMessage()]


def test_no_log_prob_for_an_end_id(checkpoint, model, tmp_path):
    prompt = make_prompts(1, 70)[0]
    first = greedy(model, prompt, 1)[0]
    with serve(start_core(checkpoint), tmp_path) as client:
        params = SamplingParams(max_tokens=8, temperature=0.0, end_id=first)
        asks = {"log_probs": True, "generation_logits": True, "context_logits": True}
        one = client.submit(prompt, protocol.msgspec.structs.replace(params, **asks))
        client.wait([one])
        assert client.tokens[one] == [] and client.code[one] == protocol.FINISHED_END_ID
        (report,) = client.reports[one]
        assert report.log_prob is None and report.generation_logits is None
        assert report.context_logits is not None and len(report.context_logits) == 4 * VOCAB * len(prompt)
