# SPDX-License-Identifier: Apache-2.0
"""The one table of knobs: what can be set in a deployed model repository, where it goes, what it may be.

The engine's come from the fields of EngineConfig, the others are declared here. build.py, docs/knobs.md and
the checks read the table; the config.pbtxt files in model_repo/ hold its defaults.
"""

import os
from dataclasses import dataclass
from typing import Any

from flashinfer_backend.core import config as engine
from flashinfer_backend.core.values import Kind, Values

PRE, LLM, POST = "preprocessing", "llm", "postprocessing"
MODELS = ("ensemble", PRE, LLM, POST)

BATCHING = "dynamic_batching"
REPORT_OUTPUTS = "report_outputs"
SECOND_ENSEMBLE = "second_ensemble"
TRT_LLM, BLS = "tensorrt_llm", "tensorrt_llm_bls"  # TensorRT-LLM's names of its models


@dataclass(frozen=True)
class Knob:
    """One knob.

    default: the value as build.py writes it, or "auto" where that is among the words of `values`.
    places: (model, field) pairs; a field is a dotted path into ModelConfig, where `parameters.x` is the
        string parameter x and a repeated message stands for its first element. REPORT_OUTPUTS and
        SECOND_ENSEMBLE are no fields: patch.py drops these outputs, or writes the ensemble once more.
    aliases: other names that TensorRT-LLM has for it.
    """

    name: str
    default: str
    values: Values
    places: tuple[tuple[str, str], ...]
    meaning: str
    aliases: tuple[str, ...] = ()
    in_trt: bool = False

    def parse(self, text: str) -> str:
        """The value in its one spelling. Raises ValueError saying what the value should be."""
        value = self.values.parse(text)
        if self.values.kind == "path" and value not in self.values.words:
            return os.path.abspath(os.path.expanduser(value))
        return value


def _parameter(name: str, *models: str) -> tuple[tuple[str, str], ...]:
    return tuple((model, f"parameters.{name}") for model in models or (LLM,))


def _knob(
    name: str, default: str, kind: Kind, places: tuple[tuple[str, str], ...], meaning: str,
    aliases: tuple[str, ...] = (), in_trt: bool = False, **bounds: Any,
) -> Knob:  # fmt: skip
    """bounds: fields of Values."""
    return Knob(name, default, Values(kind, **bounds), places, meaning, aliases, in_trt)


def _llm(name: str, default: str, kind: Kind, meaning: str, **rest: Any) -> Knob:
    """A knob that is a parameter of the llm model under its own name, which the stubs read."""
    return _knob(name, default, kind, _parameter(name), meaning, **rest)


# Where an engine's knob goes, if not to the llm model's parameter of its name alone.
ENGINE_PLACES = {
    "tokenizer_dir": _parameter("tokenizer_dir", PRE, LLM, POST),
    "max_queue_size": (
        *((model, f"{BATCHING}.default_queue_policy.max_queue_size") for model in (PRE, LLM)),
        *_parameter("max_queue_size"),
    ),
}
# The engine's knobs that TensorRT-LLM has under the same name.
ENGINE_IN_TRT = frozenset(
    {
        "tokenizer_dir", "gpu_device_ids", "kv_cache_free_gpu_mem_fraction", "max_tokens_in_paged_kv_cache",
        "enable_kv_cache_reuse", "enable_chunked_context", "batch_scheduler_policy", "max_queue_size",
        "guided_decoding_backend", "stats_check_period_ms", "max_draft_len",
    }
)  # fmt: skip


def engine_knobs() -> tuple[Knob, ...]:
    """A knob for each field of the engine's configuration, in their order."""
    return tuple(
        Knob(
            field.name, field.default_text, field.values,
            ENGINE_PLACES.get(field.name, _parameter(field.name)), field.meaning,
            in_trt=field.name in ENGINE_IN_TRT,
        )
        for field in engine.fields(engine.EngineConfig)
    )  # fmt: skip


KNOBS: tuple[Knob, ...] = (
    *engine_knobs(),
    _knob(
        "batching_strategy", "inflight_fused_batching", "choice", _parameter("gpt_model_type"),
        words=("inflight_fused_batching", "inflight_batching"), aliases=("gpt_model_type",), in_trt=True,
        meaning="sequences join and leave the batch at every step; both words mean that",
    ),
    # Answers.
    _llm(
        "exclude_input_in_output", "false", "bool", in_trt=True,
        meaning="answers without streaming omit the prompt, unless the request says otherwise",
    ),
    _knob(
        "ensemble_report_outputs", "true", "bool", (("ensemble", REPORT_OUTPUTS),),
        meaning="false = the ensemble has no outputs of log probs, logits and perf metrics, which cost "
        "tritonserver time and memory in every chunk, and refuses requests for them",
    ),
    _llm(
        "streamed_log_probs", "auto", "choice", words=("auto", "chunk", "all"),
        meaning="output_log_probs in each chunk of a stream: chunk = of its own tokens; all = of all tokens "
        "so far, as in TensorRT-LLM; auto = all with --llm-name tensorrt_llm, else chunk",
    ),
    _llm(
        "fold_input_ids", "false", "bool",
        meaning="true = prompt ids outside the vocabulary are taken modulo its size instead of being "
        "refused, for benchmark_core_model.py",
    ),
    _llm(
        "max_json_logits_mib", "16", "int",
        meaning="MiB of logits that a sequence can request from the ensemble over HTTP, as JSON: "
        "tritonserver sends no other answer of the ensemble while it writes them. 0 = no bound",
    ),
    _knob(
        BLS, "false", "bool", (("ensemble", SECOND_ENSEMBLE),),
        meaning="true = the ensemble also under this name, for clients of TensorRT-LLM's BLS model",
    ),
    _knob(
        "max_prompt_bytes", "1048576", "int", _parameter("max_prompt_bytes", PRE),
        meaning="most bytes of a prompt; all prompts of a request can have 8 times as many. Longer ones are "
        "refused before they are tokenised. 0 = no bound",
    ),
    _knob(
        "add_special_tokens", "true", "bool", _parameter("add_special_tokens", PRE), in_trt=True,
        meaning="put the tokenizer's special tokens (BOS ...) around each prompt",
    ),
    _knob(
        "skip_special_tokens", "true", "bool", _parameter("skip_special_tokens", LLM, POST), in_trt=True,
        meaning="omit special tokens from the text",
    ),
    # Triton.
    _knob(
        "triton_max_batch_size", "256", "int", tuple((model, "max_batch_size") for model in MODELS),
        low=1, high=65536, in_trt=True,
        meaning="most prompts of a request, and most requests in one call of a model",
    ),
    _knob(
        "preferred_batch_size", "auto", "sizes",
        ((PRE, f"{BATCHING}.preferred_batch_size"),), words=("auto",), low=1, high=65536,
        meaning="batch sizes that Triton's batcher prefers within the queue delay; auto = "
        "triton_max_batch_size",
    ),
    _knob(
        "llm_preferred_batch_size", "auto", "sizes",
        ((LLM, f"{BATCHING}.preferred_batch_size"),), words=("auto",), low=1, high=65536,
        meaning="the same for llm; 1 = a burst is shared by all instances; auto = preferred_batch_size",
    ),
    _knob(
        "max_queue_delay_microseconds", "0", "int",
        tuple((model, f"{BATCHING}.max_queue_delay_microseconds") for model in (PRE, LLM)),
        in_trt=True, meaning="time that Triton's batcher can delay a request to build a larger group",
    ),
    _knob(
        "decoupled_mode", "true", "bool", ((LLM, "model_transaction_policy.decoupled"),), in_trt=True,
        meaning="false = one answer a request, without streaming, also for unary gRPC and HTTP infer",
    ),
    _knob(
        "preprocessing_instance_count", "1", "int", ((PRE, "instance_group.count"),), low=1, high=64,
        in_trt=True, meaning="processes that tokenise",
    ),
    _knob(
        "llm_instance_count", "2", "int", ((LLM, "instance_group.count"),), low=1, high=64,
        meaning="processes that pass requests and tokens between Triton and the engine, "
        "6\u00a0000 to 11\u00a0000 responses/s each; 4 to 6 for a large GPU",
    ),
    _knob(
        "postprocessing_instance_count", "2", "int", ((POST, "instance_group.count"),), low=1, high=64,
        in_trt=True, meaning="processes that turn tokens into text",
    ),
    # Polling.
    _llm(
        "cancellation_check_period_ms", "100", "int", low=0, high=60000, in_trt=True,
        meaning="how often the server checks whether clients have left; 0 = never",
    ),
)  # fmt: skip

BY_NAME = {name: knob for knob in KNOBS for name in (knob.name, *knob.aliases)}
