# SPDX-License-Identifier: Apache-2.0
"""A sampling parameter reaches all that have to know it; CONTRIBUTING.md lists them."""

import ast
from pathlib import Path
from typing import Any

import flashinfer_backend
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.worker.warm_up import FEATURES

PACKAGE = Path(flashinfer_backend.__file__).parent
ENGINE = ("engine", "scheduler", "sampling", "structured")
APIS = ("openai/sampling.py", "openai/embeddings.py", "triton_server/requests.py")
# Values that ask for something; None: nothing by itself.
ASKING: dict[str, Any] = {
    "max_tokens": None,
    "temperature": None,
    "seed": None,
    "min_tokens": None,  # the plan says it
    "end_id": None,
    "stop_sequences": None,  # found by the loop
    "context_logits": None,  # of the prompt, before anything is sampled
    "prompt_log_probs": None,  # likewise
    "perf_metrics": None,
    "speculative_decoding": None,  # of the scheduler
    "adapter": None,  # of the layers
    "adapter_name": None,  # of KV events
    "top_logprobs": None,  # of log_probs
    "bias_values": None,  # of bias_ids
    "grammar": None,  # of grammar_type
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "bad_words": [[1]],
    "allowed_ids": [1],
    "late_ids": [1],
    "bias_ids": [1],
    "grammar_type": "json",
    "log_probs": True,
    "generation_logits": True,
    "pooled": True,
}


def nodes(*places: str) -> list[ast.AST]:
    paths = [PACKAGE / place for place in places]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def test_every_parameter_is_known_here():
    assert set(ASKING) == set(SamplingParams.__struct_fields__)


def test_a_parameter_that_changes_or_reports_logits_has_a_state_and_is_warmed_up():
    """Without `stateful` the sampler never looks at it; without a warm-up the first request with it waits."""
    warm = {name for feature in FEATURES for name in feature}
    for name, value in ASKING.items():
        params = (
            SamplingParams(max_tokens=1) if value is None else SamplingParams(max_tokens=1, **{name: value})
        )
        assert params.stateful == (value is not None), name
        if value is not None and name != "grammar_type":  # a grammar is made when its request comes
            assert name in warm, f"worker/warm_up.py: FEATURES lacks {name}"


def test_every_parameter_is_read_by_the_engine():
    """One that nobody reads would be accepted and ignored."""
    attributes = [node for node in nodes(*ENGINE) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if ast.unparse(node.value).rpartition(".")[2] in ("params", "p")}
    assert set(SamplingParams.__struct_fields__) - read == set()


def test_every_parameter_comes_from_a_api():
    given: set[str | None] = set()
    for api in APIS:
        calls = [node for node in nodes(api) if isinstance(node, ast.Call)]
        (made,) = [call for call in calls if ast.unparse(call.func) == "SamplingParams"]
        given |= {keyword.arg for keyword in made.keywords}
    written = [
        node
        for node in nodes("openai")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    given |= {node.attr for node in written if ast.unparse(node.value).rpartition(".")[2] == "params"}
    assert set(SamplingParams.__struct_fields__) - given == set()
