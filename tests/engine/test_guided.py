# SPDX-License-Identifier: Apache-2.0
"""Guided decoding with the bundled model: whatever is sampled follows the guide."""

import json
import re
import threading
from typing import Any

import numpy as np
import pytest

from checkpoints import make_checkpoint
from engine.harness import serve, shallow_model, start_core
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import NO_TOKEN_LEFT, SamplingParams
from flashinfer_backend.engine.start import Core
from flashinfer_backend.structured.compiler import GrammarCompiler, Vocabulary
from flashinfer_backend.structured.grammar import Grammar
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import protocol

llguidance = pytest.importorskip("llguidance")

END = 1
PLAIN = SamplingParams(max_tokens=60, temperature=0.9, seed=7)
REGEX = r"(cat|dog)s? [0-9]{3,5}(-[a-f]{2})?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "schön"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= item (", " item){1,4} "."\nitem ::= [A-Z] [a-z]{2,6}'


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(resolve_model_dir("bundled"))


def start_bundled(**settings: Any) -> Core:
    return start_core(shallow_model(), **({"max_seq_len": 512, "max_num_seqs": 12} | settings))


def guided(kind: str, text: str = "", seed: int = 0, **options: Any) -> SamplingParams:
    values = {"max_tokens": 200, "temperature": 1.0, "end_id": END} | options
    return SamplingParams(grammar_type=kind, grammar=text, seed=seed, **values)


def follows(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "ebnf_grammar":
        return re.fullmatch(r"[A-Z][a-z]{2,6}(, [A-Z][a-z]{2,6}){1,4}\.", text) is not None
    value = json.loads(text)
    if kind == "json_schema":
        assert list(value) == ["name", "age", "tags", "ok"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 12
        assert type(value["age"]) is int and 0 <= value["age"] <= 120
        assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "green", "schön"}
        assert type(value["ok"]) is bool
    return True


KINDS = [("regex", REGEX), ("json_schema", json.dumps(SCHEMA)), ("ebnf_grammar", GRAMMAR)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="mixed"),
        pytest.param({"max_num_tokens": 16, "max_num_tokens_while_decoding": 16}, id="chunked"),
        pytest.param({"max_tokens_in_paged_kv_cache": 256}, id="preempted"),
    ],
)
def test_samples_follow_their_guides_beside_plain_requests(tokenizer, tmp_path, settings):
    core = start_bundled(**settings)
    (prompt,) = tokenizer.encode_batch(["Tell me a story about a fox."], True)
    plain = PLAIN
    with serve(core, tmp_path) as client:
        alone = client.generate([prompt], plain)[0]
        asked = [(kind, guided(kind, text, seed)) for kind, text in KINDS for seed in range(4)]
        ids = [client.submit([*prompt, 100 + i], params) for i, (_, params) in enumerate(asked)]
        crowd = client.submit(prompt, plain)
        client.wait([*ids, crowd])
        assert not client.failure
        assert client.tokens[crowd] == alone
        texts = [tokenizer.backend.decode(client.tokens[i]) for i in ids]
        for local_id, (kind, _), text in zip(ids, asked, texts, strict=True):
            if client.code[local_id] == protocol.FINISHED_END_ID:
                assert follows(kind, text), text
        ended = sum(client.code[i] == protocol.FINISHED_END_ID for i in ids)
        assert ended >= 10, "max_tokens cut too many to tell anything"
        assert len(set(texts)) >= 10, "different seeds say different things"
    assert bool(core.scheduler.preemptions) == ("max_tokens_in_paged_kv_cache" in settings)


def test_without_end_id_the_sequence_ends_with_the_guide(tokenizer, tmp_path):
    """The step behind its last token is launched before that is known, and fails nothing."""
    with serve(start_bundled(), tmp_path) as client:
        ids = [client.submit([0], guided("regex", "(yes|no)[.]", seed=s, end_id=-1)) for s in range(4)]
        client.wait(ids)
        for i in ids:
            assert tokenizer.backend.decode(client.tokens[i]) in ("yes.", "no.")
            assert client.code[i] == protocol.FINISHED_END_ID
    assert not client.failure


def test_guides_with_other_features(tokenizer, tmp_path):
    """A guide outranks what would leave no token; min_tokens holds where the guide has a choice. Special
    tokens are not their text."""
    (minus,) = tokenizer.encode_batch(["-"], False)
    with serve(start_bundled(), tmp_path) as client:
        fixed = guided("regex", "a-b", bad_words=[minus], min_tokens=50, log_probs=True)
        open_end = guided(
            "regex", "x+", min_tokens=5, top_k=4, top_p=0.9, repetition_penalty=1.3, max_tokens=30
        )
        one, other = client.submit([0], fixed), client.submit([0], open_end)
        special = guided("regex", "[a-z_<>|]{9}", bias_ids=[0, 2], bias_values=[50.0, 50.0])
        third = client.submit([0], special)
        client.wait([one, other, third])
        assert not client.failure
        assert re.fullmatch("[a-z_<>|]{9}", tokenizer.backend.decode(client.tokens[third]))
        assert tokenizer.backend.decode(client.tokens[one]) == "a-b"
        assert len([e.log_prob for e in client.reports[one] if e.log_prob is not None]) == len(
            client.tokens[one]
        )
        assert len(client.tokens[other]) >= 5
        assert re.fullmatch("x+", tokenizer.backend.decode(client.tokens[other]))


def test_guides_with_allowed_ids(tokenizer, tmp_path):
    """Both hold, over bad words and biases, in forced texts as well; without a common token the request fails
    alone."""
    digits = [ids[0] for ids in tokenizer.encode_batch(list("0123456789"), False)]
    few = {"allowed_ids": sorted([*digits[3:6], END])}
    spoilt = {"bad_words": [[i] for i in digits], "bias_ids": digits, "bias_values": [float("-inf")] * 10}
    with serve(start_bundled(speculative_method="ngram", max_draft_len=4), tmp_path) as client:
        ids = [
            client.submit([0], guided("regex", "[0-9]{6}", **few)),
            client.submit([0], guided("regex", "[0-9]{6}", top_p=0.9, min_tokens=50, **spoilt, **few)),
            client.submit([0], guided("regex", "33[0-9]{3}77", **few)),
            client.submit([0], guided("regex", "[a-z]{6}", **few)),
            client.submit([0], PLAIN),
        ]
        client.wait(ids)
        texts = [tokenizer.backend.decode(client.tokens[i]) for i in ids]
        assert all(re.fullmatch("[345]{6}", text) for text in texts[:2])
        assert re.fullmatch("33[345]{3}", texts[2]) and texts[3] == ""
        assert {i: client.failure[i].message for i in client.failure} == dict.fromkeys(
            ids[2:4], NO_TOKEN_LEFT
        )
        assert len(client.tokens[ids[4]]) == 60


def test_a_guide_outranks_biases_against_all_that_it_allows(tokenizer, tmp_path):
    """Also with bad words and filters."""
    digits = [i for token, i in tokenizer.backend.get_vocab().items() if any(c.isdigit() for c in token)]
    filtered = {"bad_words": [[i] for i in digits], "top_k": 3, "top_p": 0.9}
    with serve(start_bundled(), tmp_path) as client:
        ids = []
        for bias in (float("-inf"), -3e38):
            for options in ({}, filtered):
                options = options | {"bias_ids": digits, "bias_values": [bias] * len(digits)}
                ids.append(client.submit([0, 7], guided("regex", "[0-9]{6}", temperature=0.5, **options)))
        client.wait(ids)
        assert not client.failure
        for one in ids:
            assert re.fullmatch("[0-9]{6}", str(tokenizer.backend.decode(client.tokens[one])))


def test_a_matcher_that_fails_in_the_middle_fails_its_request_alone(tmp_path, monkeypatch):
    take = Grammar.take

    def failing(grammar: Grammar, words: np.ndarray) -> str | None:
        return grammar._failed("no more") if grammar.tokens == 3 else take(grammar, words)

    with serve(start_bundled(), tmp_path) as client:
        other = client.submit([0], guided("regex", "[a-z ]{2}"))
        client.wait([other])
        monkeypatch.setattr(Grammar, "take", failing)
        one, plain = client.submit([0], guided("regex", "[a-z ]{20,}")), client.submit([0], PLAIN)
        client.wait([one, plain])
        assert client.failure[one].message == "no more" and not client.failure[one].refused
        assert len(client.tokens[one]) == 3 and len(client.tokens[plain]) == 60


def test_invalid_guides_say_why(tmp_path):
    with serve(start_bundled(), tmp_path) as client:
        good = client.submit([0], guided("regex", "ab"))
        bad = client.submit([0], guided("json_schema", '{"type": "' + "x" * 100_000 + '"}'))
        client.wait([good, bad])
        assert "Unsupported type" in client.failure[bad].message and client.failure[bad].refused
        assert len(client.failure[bad].message) < 500 and good in client.code


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", r'{"type": "\ud800"}'),
        ("json_schema", r'{"$defs": {"\ud800": {"not": {}}}, "$ref": "#/$defs/\ud800"}'),
        ("ebnf_grammar", f'root ::= "a"{{{"1" * 5000}}}'),
        ("regex", r"\U99999999"),
    ],
)
def test_odd_texts_in_a_guide_fail_their_request_alone(tmp_path, caplog, kind, text):
    with serve(start_bundled(), tmp_path) as client:
        plain = client.submit([0], PLAIN)
        bad = client.submit([0], guided(kind, text))
        client.wait([bad, plain])
        assert client.failure[bad].refused and "is not a valid" in client.failure[bad].message
        assert len(client.tokens[plain]) == 60
    assert not [record for record in caplog.records if record.exc_info], "a client writes no tracebacks"


def test_switched_off(tmp_path):
    with serve(start_bundled(guided_decoding_backend="none"), tmp_path) as client:
        bad = client.submit([0], guided("regex", "a"))
        client.wait([bad])
        assert "guided_decoding_backend none" in client.failure[bad].message


def test_a_checkpoint_without_tokenizer_says_so(tmp_path):
    with serve(start_core(make_checkpoint("llama", tmp_path / "model")), tmp_path / "run") as client:
        bad = client.submit([5], guided("regex", "a"))
        client.wait([bad])
        assert "tokenizer" in client.failure[bad].message
        good = client.submit([5], SamplingParams(max_tokens=2, temperature=0.0))
        client.wait([good])


def test_guides_are_compiled_for_the_tokenizer_of_tokenizer_dir(tmp_path, tokenizer):
    core = start_core(make_checkpoint("llama", tmp_path / "model"), tokenizer_dir="bundled")
    with serve(core, tmp_path / "run") as client:
        one = client.submit([5], guided("regex", "[a-z]{3}"))
        client.wait([one])
        assert re.fullmatch("[a-z]{3}", str(tokenizer.backend.decode(client.tokens[one])))


def test_compiling_holds_up_nobody_and_can_be_cancelled(tmp_path, monkeypatch):
    compile_guide, proceed = GrammarCompiler.compile, threading.Event()

    def slow(self: GrammarCompiler, kind: str, text: str, end_id: int) -> Any:
        assert proceed.wait(120)
        return compile_guide(self, kind, text, end_id)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    with serve(start_bundled(max_queue_size=2), tmp_path) as client:
        cancelled, kept = (client.submit([0], guided("regex", word)) for word in ("ab", "cd"))
        refused = client.submit([0], guided("regex", "ef"))
        client.wait([refused])
        assert client.failure[refused].refused
        client.cancel(cancelled)
        client.wait([cancelled])
        assert client.code[cancelled] == protocol.FINISHED_CANCELLED
        plain = client.submit([0], SamplingParams(max_tokens=5, temperature=0.0))
        client.wait([plain])
        assert kept not in client.code and client.loop.status().requests_waiting == 1
        proceed.set()
        client.wait([kept])
        assert client.tokens[kept]


def test_a_guide_that_is_ever_slower_to_follow_fails_its_request_alone(tmp_path, tokenizer):
    always = {"bias_ids": [tokenizer.backend.token_to_id("a")], "bias_values": [1000.0]}
    with serve(start_bundled(), tmp_path) as client:
        plain = client.submit([0], SamplingParams(max_tokens=200, temperature=0.0))
        slow = client.submit([0], guided("regex", "(a{0,300}){0,300}b", **always))
        client.wait([slow, plain])
        assert "after 10" in client.failure[slow].message and "are ambiguous" in client.failure[slow].message
        assert len(client.tokens[plain]) == 200


def test_a_guide_that_runs_dry_fails_its_request_alone(tmp_path, monkeypatch):
    """A vocabulary without a way to go on: only part of it is known to the guide."""
    tokens = [b"<end>", b"<1>", b"a", b"b", *[b"<pad>"] * 252]
    vocabulary = Vocabulary(tokens, [0, 1, *range(4, 256)], 0)
    made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
    monkeypatch.setattr(GrammarCompiler, "load", lambda *_: made)
    with serve(start_core(make_checkpoint("llama", tmp_path / "model")), tmp_path / "run") as client:
        dry = client.submit([5], guided("regex", "abc", end_id=0))
        never = client.submit([5], guided("regex", "c", end_id=0))
        good = client.submit([5], guided("regex", "ab", end_id=0))
        client.wait([dry, never, good])
        assert "no token of this model's vocabulary after 2 tokens" in client.failure[dry].message
        assert "allows no token" in client.failure[never].message
        assert not client.failure[dry].refused  # it had begun
        assert client.tokens[good] == [2, 3]
