# SPDX-License-Identifier: Apache-2.0
"""The one table of knobs: what can be set in a deployed model repository, where it goes, what it may be.

build.py, docs/knobs.md and the checks read it; the config.pbtxt files in model_repo/ hold its defaults.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

from flashinfer_backend.core.paths import BUNDLED

PRE, LLM, POST = "preprocessing", "llm", "postprocessing"
MODELS = ("ensemble", PRE, LLM, POST)

TRUE_WORDS = ("True", "true", "TRUE", "1")
FALSE_WORDS = ("False", "false", "FALSE", "0")

INT32_MAX = 2**31 - 1
BATCHING = "dynamic_batching"
REPORT_OUTPUTS = "report_outputs"

Kind = Literal["int", "float", "bool", "choice", "sizes", "path"]


@dataclass(frozen=True)
class Knob:
    """One knob.

    default: the value as build.py writes it, or "auto" where that is among `words`.
    places: (model, field) pairs; a field is a dotted path into ModelConfig, where `parameters.x` is the
        string parameter x and a repeated message stands for its first element. REPORT_OUTPUTS is no field:
        patch.py drops these outputs.
    words: values accepted as they are. For a choice, all of them.
    low, high: bounds, both included, of an int, a float or each of sizes.
    aliases: other names that TensorRT-LLM has for it.
    """

    name: str
    default: str
    kind: Kind
    places: tuple[tuple[str, str], ...]
    meaning: str
    words: tuple[str, ...] = ()
    low: float = 0
    high: float = INT32_MAX
    aliases: tuple[str, ...] = ()
    in_trt: bool = False

    def expected(self) -> str:
        """What the value may be, for tables and error messages."""
        words = ", ".join(self.words)
        span = f">= {self.low:g}" if self.high == INT32_MAX else f"{self.low:g}..{self.high:g}"
        match self.kind:
            case "choice":
                return words
            case "bool":
                return "true, false"
            case "path":
                return f"a folder, or {words}"
            case "sizes":
                return f"{words}, or integers {span} separated by commas"
            case _:
                number = f"{'an integer' if self.kind == 'int' else 'a number'} {span}"
                return f"{words}, or {number}" if words else number

    def parse(self, text: str) -> str:
        """The value in its one spelling. Raises ValueError saying what the value should be."""
        text = text.strip()
        if text in self.words:
            return text
        value: str | None = None
        match self.kind:
            case "bool":
                value = "true" if text in TRUE_WORDS else "false" if text in FALSE_WORDS else None
            case "int":
                value = self._int(text)
            case "float":
                value = self._float(text)
            case "sizes":
                sizes = [self._int(part.strip()) for part in text.split(",")]
                if all(sizes):
                    value = ",".join(sorted({size for size in sizes if size}, key=int))
            case "path":
                if text and text.isprintable():
                    value = os.path.abspath(os.path.expanduser(text))
        if value is None:
            raise ValueError(f"should be {self.expected()}")
        return value

    def _int(self, text: str) -> str | None:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not self.low <= int(text) <= self.high:
            return None
        return str(int(text))

    def _float(self, text: str) -> str | None:
        try:
            number = float(text)
        except ValueError:
            return None
        return repr(number) if math.isfinite(number) and self.low <= number <= self.high else None


def _parameter(name: str, *models: str) -> tuple[tuple[str, str], ...]:
    return tuple((model, f"parameters.{name}") for model in models or (LLM,))


def _engine(name: str, default: str, kind: Kind, meaning: str, **rest) -> Knob:
    """A knob that is a parameter of the llm model under its own name."""
    return Knob(name, default, kind, _parameter(name), meaning, **rest)


KNOBS: tuple[Knob, ...] = (
    # The checkpoint.
    _engine(
        "model_dir", BUNDLED, "path", words=(BUNDLED,),
        meaning="Hugging Face checkpoint folder; bundled = the small one in the package. Same as --model",
    ),
    Knob(
        "tokenizer_dir", "auto", "path", _parameter("tokenizer_dir", PRE, LLM, POST), words=("auto", BUNDLED),
        in_trt=True, meaning="folder of the tokenizer; auto = model_dir",
    ),
    _engine(
        "load_format", "auto", "choice", words=("auto", "dummy"),
        meaning="auto = the checkpoint's safetensors; dummy = random weights, for benchmarks",
    ),
    _engine(
        "dtype", "auto", "choice", words=("auto", "float32", "bfloat16", "float16"),
        meaning="of weights and KV cache; auto = the checkpoint's on a GPU, float32 on a CPU",
    ),
    _engine(
        "device", "auto", "choice", words=("auto", "cuda", "cpu"),
        meaning="where the engine runs; auto = a GPU if there is one",
    ),
    _engine(
        "attention_backend", "auto", "choice", words=("auto", "fa2", "xqa", "triton", "torch"),
        meaning="attention of decode steps: FlashInfer's fa2 or xqa, this project's Triton kernel, or plain "
        "torch for everything; auto = what measured fastest on a GPU, torch on a CPU",
    ),
    # Limits.
    _engine(
        "max_seq_len", "auto", "int", words=("auto",), low=2,
        meaning="tokens of prompt and output together; auto = the checkpoint's limit, at most 32768",
    ),
    _engine(
        "max_input_len", "auto", "int", words=("auto",), low=1,
        meaning="tokens of a prompt; auto = max_seq_len - 1",
    ),
    _engine("max_num_seqs", "256", "int", low=1, high=4096, meaning="sequences which run at the same time"),
    _engine(
        "max_num_tokens", "8192", "int", low=1,
        meaning="token budget of a step while nothing streams; it also sizes the work buffers",
    ),
    _engine(
        "max_num_tokens_while_decoding", "2048", "int", low=1,
        meaning="token budget of a step while sequences stream; smaller = steadier streams, larger = "
        "faster first tokens",
    ),
    # KV cache.
    _engine(
        "tokens_per_block", "16", "choice", words=("16", "32", "64"),
        meaning="tokens of a page of the KV cache, the grain of prefix reuse",
    ),
    _engine(
        "kv_cache_free_gpu_mem_fraction", "0.9", "float", low=0.001, high=1, in_trt=True,
        meaning="share of the GPU memory left beside the weights which the KV cache takes",
    ),
    _engine(
        "max_tokens_in_paged_kv_cache", "auto", "int", words=("auto",), low=16, in_trt=True,
        meaning="upper bound of the KV cache in tokens; auto = what the memory holds. "
        "The smaller of both bounds counts",
    ),
    _engine(
        "enable_kv_cache_reuse", "true", "bool", in_trt=True,
        meaning="keep the pages of earlier prompts for prompts which begin with the same tokens",
    ),
    # Scheduling.
    _engine(
        "enable_chunked_context", "true", "bool", in_trt=True,
        meaning="split long prompts over several steps; false = a prompt has to fit one step",
    ),
    _engine(
        "batch_scheduler_policy", "max_utilization", "choice",
        words=("max_utilization", "guaranteed_no_evict"), in_trt=True,
        meaning="max_utilization admits while pages last and may recompute the newest sequence later; "
        "guaranteed_no_evict reserves all pages a sequence can need",
    ),
    _engine(
        "schedule_policy", "fcfs", "choice", words=("fcfs", "lof"),
        meaning="which waiting request runs next: fcfs = the first that came; lof = the one with the largest "
        "max_tokens (longest output first), and the work of a backlog spread evenly over its steps: it ends "
        "sooner where max_tokens tells the length, but a short request waits for as long as longer ones do",
    ),
    Knob(
        "batching_strategy", "inflight_fused_batching", "choice", _parameter("gpt_model_type"),
        words=("inflight_fused_batching", "inflight_batching"), aliases=("gpt_model_type",), in_trt=True,
        meaning="sequences join and leave the batch at every step; both words mean that",
    ),
    _engine(
        "cuda_graph_batch_sizes", "auto", "sizes", words=("auto", "none"), low=1, high=4096,
        meaning="batch sizes whose decode step is captured as a CUDA graph; a batch is padded to the next",
    ),
    # Answers.
    _engine(
        "exclude_input_in_output", "false", "bool", in_trt=True,
        meaning="answers which are not streamed leave the prompt out, unless the request says otherwise",
    ),
    Knob(
        "ensemble_report_outputs", "true", "bool", (("ensemble", REPORT_OUTPUTS),),
        meaning="false = the ensemble lacks the outputs of log probs, logits and perf metrics, and requests "
        "that ask for one are refused: each costs tritonserver time and memory in every chunk, there or not",
    ),
    _engine(
        "guided_decoding_backend", "xgrammar", "choice", words=("xgrammar", "none"), in_trt=True,
        meaning="compiles the guides of guided decoding; none = requests with a guide are refused",
    ),
    Knob(
        "add_special_tokens", "true", "bool", _parameter("add_special_tokens", PRE), in_trt=True,
        meaning="put the tokenizer's special tokens (BOS ...) around each prompt",
    ),
    Knob(
        "skip_special_tokens", "true", "bool", _parameter("skip_special_tokens", LLM, POST), in_trt=True,
        meaning="leave special tokens out of the text",
    ),
    # Triton.
    Knob(
        "triton_max_batch_size", "256", "int", tuple((model, "max_batch_size") for model in MODELS),
        low=1, high=65536, in_trt=True,
        meaning="prompts in one request, and requests handed over in one call",
    ),
    Knob(
        "preferred_batch_size", "auto", "sizes",
        ((PRE, f"{BATCHING}.preferred_batch_size"),), words=("auto",), low=1, high=65536,
        meaning="batch sizes Triton's batcher aims at within the queue delay; auto = triton_max_batch_size",
    ),
    Knob(
        "llm_preferred_batch_size", "auto", "sizes",
        ((LLM, f"{BATCHING}.preferred_batch_size"),), words=("auto",), low=1, high=65536,
        meaning="the same for llm, whose instances answer all that they are given: with 1, none of them "
        "takes most of a burst; auto = preferred_batch_size",
    ),
    Knob(
        "max_queue_delay_microseconds", "0", "int",
        tuple((model, f"{BATCHING}.max_queue_delay_microseconds") for model in (PRE, LLM)),
        in_trt=True, meaning="time Triton's batcher may hold a request back to build a larger group",
    ),
    Knob(
        "max_queue_size", "0", "int",
        (*((model, f"{BATCHING}.default_queue_policy.max_queue_size") for model in (PRE, LLM)),
         *_parameter("max_queue_size")),
        in_trt=True,
        meaning="requests which may wait, in Triton and in the engine; more are refused. 0 = no bound",
    ),
    Knob(
        "decoupled_mode", "true", "bool", ((LLM, "model_transaction_policy.decoupled"),), in_trt=True,
        meaning="false = one answer a request, without streaming, also for unary gRPC and HTTP infer",
    ),
    Knob(
        "preprocessing_instance_count", "1", "int", ((PRE, "instance_group.count"),), low=1, high=64,
        in_trt=True, meaning="processes which tokenise",
    ),
    Knob(
        "llm_instance_count", "2", "int", ((LLM, "instance_group.count"),), low=1, high=64,
        meaning="processes which pass requests and tokens between Triton and the engine, 6 000 to 11 000 "
        "responses/s each; 4 to 6 for a large GPU",
    ),
    Knob(
        "postprocessing_instance_count", "2", "int", ((POST, "instance_group.count"),), low=1, high=64,
        in_trt=True, meaning="processes which turn tokens into text",
    ),
    # Polling.
    _engine(
        "cancellation_check_period_ms", "100", "int", low=0, high=60000, in_trt=True,
        meaning="how often requests are asked whether their client has gone; 0 = never",
    ),
    _engine(
        "stats_check_period_ms", "100", "int", low=1, high=60000, in_trt=True,
        meaning="how often the metrics are brought up to date",
    ),
)  # fmt: skip

BY_NAME = {name: knob for knob in KNOBS for name in (knob.name, *knob.aliases)}
