# SPDX-License-Identifier: Apache-2.0
"""The engine's settings: their names, defaults, limits and meanings, which build.py's knobs are made from;
how they are read from the llm model's config.pbtxt, and resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from flashinfer_backend.core.paths import BUNDLED
from flashinfer_backend.core.values import INT32_MAX, Kind, Values

AUTO = "auto"
LONGEST_AUTO_SEQ_LEN = 32768  # tokens
GPU_HEAD_DIMS = (64, 128, 256)  # of attention on a GPU, other than plain torch's
# Of max_queue_size "auto". Four times the slots: the last one waits as long as four full batches take. The
# least is for benchmarks, which send thousands of requests at once to few slots.
QUEUED_PER_SLOT = 4
LEAST_AUTO_QUEUE = 4096


@dataclass(frozen=True)
class Setting:
    """The meaning of a field of EngineConfig, and constraints beyond its type.

    low, high: bounds, both included, of a number or of each of a list. words: further accepted texts.
    "auto" stands for the default, which can then lie outside the bounds; build.py takes the first word if
    the field has no default. text: what a text is that
    names no folder.
    """

    meaning: str
    low: float = 0
    high: float = INT32_MAX
    words: tuple[str, ...] = ()
    text: str = ""


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of one engine process. With the word "auto", the default (0, "" or -1) means: derived from the
    checkpoint, the machine or another field. `resolve_limits` fills in the limits among them."""

    # fmt: off
    # The checkpoint.
    model_dir: Annotated[str, Setting(
        "Hugging Face checkpoint folder; bundled = the small one in the package. Same as --model",
        words=(BUNDLED,))]
    tokenizer_dir: Annotated[str, Setting(
        "folder of the tokenizer; auto = model_dir", words=(AUTO, BUNDLED))] = ""
    task: Annotated[Literal["auto", "generate", "embed", "score"], Setting(
        "what the checkpoint is for; auto = as its files say: embed for an embedding model, score for a"
        " reranker (not Qwen3-Reranker's: set score), else generate")] = "auto"
    load_format: Annotated[Literal["auto", "dummy"], Setting(
        "auto = the checkpoint's safetensors; dummy = random weights, for benchmarks")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Setting(
        "type of activations, and of weights and KV cache unless quantised; auto = the checkpoint's on a GPU,"
        " float32 on a CPU")] = "auto"
    quantization: Annotated[Literal["auto", "fp8"], Setting(
        "auto = the checkpoint's format; fp8 = a 16-bit checkpoint is quantised to FP8 while it loads"
    )] = "auto"
    device: Annotated[Literal["auto", "cuda", "cpu"], Setting(
        "where the engine runs; auto = a GPU if there is one")] = "auto"
    attention_backend: Annotated[Literal["auto", "fa2", "triton", "torch"], Setting(
        "attention of decode steps: FlashInfer's fa2, this project's Triton kernel, or plain torch for all"
        " steps; auto = the fastest measured one on a GPU, torch on a CPU")] = "auto"
    speculative_method: Annotated[Literal["none", "ngram", "eagle3", "mtp"], Setting(
        "how drafts are made: guessed tokens, of which a step checks several at once; answers stay the same."
        " ngram = what followed the last tokens earlier; eagle3 = the head in draft_model; mtp = the"
        " checkpoint's own head (Qwen3.5, Qwen3-Next)"
    )] = "none"
    draft_model: Annotated[str, Setting(
        "folder of the EAGLE-3 head of speculative_method=eagle3; bundled = the bundled model's",
        words=("none", "bundled"))] = "none"
    max_draft_len: Annotated[int, Setting(
        "most drafts of a sequence in a step; steps with many sequences have fewer", high=15)] = 4
    max_matching_ngram_size: Annotated[int, Setting(
        "ngram: the most last tokens to look up", low=1, high=16)] = 4
    min_matching_ngram_size: Annotated[int, Setting(
        "ngram: the fewest last tokens that must match", low=1, high=16)] = 2
    max_loras: Annotated[int, Setting(
        "adapters (LoRA) that fit on the GPU at the same time, and so in one step; 0 = none",
        high=256)] = 0
    lora_modules: Annotated[Literal["none"] | dict[str, str], Setting(
        "names of adapters and their folders, as PEFT writes them"
    )] = "none"
    max_lora_rank: Annotated[int, Setting(
        "the largest rank of an adapter; sets the memory that each takes on the GPU", low=1, high=256)] = 16
    lora_vocabulary: Annotated[bool, Setting(
        "GPU memory for adapters of the embedding and the output head (embed_tokens, lm_head)")] = False
    lora_cache_host_memory_bytes: Annotated[int, Setting(
        "bytes of host memory for the adapters used last",
        high=2**62)] = 1 << 30
    tensor_parallel_size: Annotated[Literal[1, 2, 4, 8], Setting(
        "GPUs that one model is spread over, each with a part of every layer; on a CPU, processes")] = 1

    expert_parallel_size: Annotated[Literal[1, 2, 4, 8], Setting(
        "groups of these GPUs that share a mixture's experts: with as many groups as GPUs each GPU has whole"
        " experts, with 1 a part of every expert")] = 1

    # Engines.
    replicas: Annotated[int, Setting(
        "engines behind the one llm model, each a process with its own GPUs, weights and KV cache",
        low=1, high=64)] = 1
    gpu_device_ids: Annotated[Literal["auto"] | list[list[int]], Setting(
        "GPUs of each engine, counted from 0 among those in CUDA_VISIBLE_DEVICES: 0;1 for two engines; auto ="
        " in order")] = "auto"

    # Limits.
    max_seq_len: Annotated[int, Setting(
        "tokens of prompt and output together; auto = the checkpoint's limit, at most"
        f" {LONGEST_AUTO_SEQ_LEN}", low=2, words=(AUTO,))] = 0
    max_input_len: Annotated[int, Setting(
        "tokens of a prompt; auto = max_seq_len - 1", low=1, words=(AUTO,))] = 0
    max_num_seqs: Annotated[int, Setting("sequences that run at the same time", low=1, high=4096)] = 256
    max_num_tokens: Annotated[int, Setting(
        "most tokens of a step while no sequence streams; it also sizes the work buffers", low=1)] = 8192
    max_num_tokens_while_decoding: Annotated[int, Setting(
        "most tokens of a step while sequences stream; smaller = steadier streams, larger = faster first"
        " tokens", low=1)] = 2048

    # KV cache.
    kv_cache_dtype: Annotated[Literal["auto", "fp8_e4m3"], Setting(
        "elements of the KV cache; auto = dtype; fp8_e4m3 = 8 bits, with the checkpoint's scales or 1, and"
        " twice the tokens")] = "auto"
    tokens_per_block: Annotated[Literal[16, 32, 64], Setting(
        "tokens of a block of the KV cache, the unit of prefix reuse")] = 16
    kv_cache_free_gpu_mem_fraction: Annotated[float, Setting(
        "the KV cache's share of the GPU memory that the weights of all engines on the GPU leave; on a CPU"
        " the cache has at most 512 MiB",
        low=0.001, high=1)] = 0.9
    max_tokens_in_paged_kv_cache: Annotated[int, Setting(
        "most tokens of the KV cache, rounded up to whole blocks; auto = as many as fit. The smaller of this"
        " and the memory's share counts", low=16, words=(AUTO,))] = 0
    enable_kv_cache_reuse: Annotated[bool, Setting(
        "keep the blocks of earlier prompts for prompts that begin with the same tokens")] = True

    # Scheduling.
    enable_chunked_context: Annotated[bool, Setting(
        "split long prompts over several steps; false = a prompt must fit one step")] = True
    batch_scheduler_policy: Annotated[Literal["max_utilization", "guaranteed_no_evict"], Setting(
        "max_utilization = admit sequences while there are blocks; when these run out, the newest sequence is"
        " computed again later. guaranteed_no_evict = reserve all blocks that a sequence can need"
    )] = "max_utilization"
    schedule_policy: Annotated[Literal["fcfs", "lof"], Setting(
        "which waiting request runs next: fcfs = in order of arrival; lof = largest max_tokens first: a"
        " backlog ends sooner if answers reach max_tokens, but short requests wait for longer ones")] = "fcfs"
    max_queue_size: Annotated[int, Setting(
        "requests that can wait, in Triton and in the engine. 0 = no bound; auto ="
        f" {QUEUED_PER_SLOT} for each of max_num_seqs, at least {LEAST_AUTO_QUEUE}", words=(AUTO,))] = -1
    max_logits_mib: Annotated[int, Setting(
        "MiB for the requested logits of all requests together: 4 bytes for each word of the vocabulary and"
        " each token. Requests wait for room",
        low=1)] = 2048
    cuda_graph_batch_sizes: Annotated[Literal["auto", "none"] | list[int], Setting(
        "batch sizes whose decode step is captured as a CUDA graph; a batch is padded to the next",
        low=1, high=4096)] = "auto"

    # Answers and metrics.
    guided_decoding_backend: Annotated[Literal["llguidance", "xgrammar", "none"], Setting(
        "library for the grammars of guided decoding; xgrammar = llguidance, for older model repositories;"
        " none = guided requests are refused")] = "llguidance"
    kv_events_endpoint: Annotated[str, Setting(
        "where the engine publishes which prefixes its cache has, for request routers (ZeroMQ, in vLLM's"
        " form); engine 1 takes the next port",
        words=("none",), text="an address such as tcp://*:5557")] = "none"
    kv_events_replay_endpoint: Annotated[str, Setting(
        "where request routers get messages that they have missed (the latest 64 MiB are kept)",
        words=("none",), text="an address such as tcp://*:5558")] = "none"
    kv_events_topic: Annotated[str, Setting(
        "topic of these messages; {ip} is POD_IP or the host's address, {model} the checkpoint folder's name",
        text="a text")] = "kv@{ip}:9000@{model}"
    stats_check_period_ms: Annotated[int, Setting(
        "how often the metrics are updated", low=1, high=60000)] = 100
    profile_dir: Annotated[str, Setting(
        "absolute path of a folder for traces of POST /start_profile (OpenAI API), created if it is missing;"
        " none = /start_profile is not served", words=("none",))] = "none"
    start_stall_minutes: Annotated[int, Setting(
        "an engine without progress for this long during startup is ended; 0 = never",
        low=0, high=10080)] = 30
    read_shared_prefixes_once: Annotated[bool, Setting(
        "decode rows whose sequences begin with the same cached blocks read these once a step, if that saves"
        " enough. Its kernel was compared with plain torch on a CPU, not yet on a GPU")] = False
    compare_attention: Annotated[bool, Setting(
        "for finding faults: run plain torch's attention next to the chosen one for the first 64 tokens of"
        " each prompt, and log the largest error by layer. Slow")] = False
    check_invariants: Annotated[bool, Setting(
        "for finding faults: check in every step that each block and slot has one owner; if not, log it and"
        " end. Costs up to 0.6 ms a step for each running sequence")] = False
    # fmt: on

    @property
    def drafts(self) -> int:
        """Drafts of a row in a step, at most."""
        return 0 if self.speculative_method == "none" else self.max_draft_len

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> EngineConfig:
        """Config from string parameters. Unset means empty, "auto" on a field with that word, or an unfilled
        `${...}`; parameters that are not the engine's are left alone.

        Raises ValueError naming the parameter, its value and what it should be.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = parameters.get(field.name, "").strip()
            if text == "" or text.startswith("${"):
                continue
            try:
                values[field.name] = field.read(text)
            except ValueError as error:
                raise ValueError(f"parameter {field.name} of the llm model is {text!r}; it {error}") from None
        if "model_dir" not in values:
            raise ValueError("parameter model_dir of the llm model is not set: name a checkpoint folder")
        return cls(**values)


@dataclass(frozen=True)
class Field:
    """One field of EngineConfig, as build.py and from_parameters see it. default: None where it has none."""

    name: str
    meaning: str
    values: Values
    default: Any

    def read(self, text: str) -> Any:
        """The field's value of a text. Raises ValueError saying what the text should be."""
        text = self.values.parse(text)
        if text == AUTO:
            return self.default
        match self.values.kind:
            case "bool":
                return text == "true"
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "sizes" if text not in self.values.words:
                return [int(size) for size in text.split(",")]
            case "groups" if text not in self.values.words:
                return [[int(number) for number in group.split(",")] for group in text.split(";")]
            case "folders" if text not in self.values.words:
                return dict(entry.split("=", 1) for entry in text.split(","))
            case "choice" if isinstance(self.default, int):
                return int(text)
        return text

    def text(self, value: Any) -> str:
        """The text that `read` makes `value` of."""
        if value == self.default and AUTO in self.values.words:
            return AUTO
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, dict):
            return ",".join(f"{name}={folder}" for name, folder in value.items())
        if self.values.kind == "groups" and isinstance(value, list):
            return ";".join(",".join(map(str, group)) for group in value)
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    @property
    def default_text(self) -> str:
        """What build.py writes unless it is told otherwise."""
        return self.values.words[0] if self.default is None else self.text(self.default)

    def check(self, value: Any) -> None:
        """Raise ValueError unless the field may have this value."""
        try:
            self.values.parse(self.text(value))
        except ValueError as error:
            raise ValueError(f"{self.name} is {value}; it {error}") from None


def fields(config: type[msgspec.Struct]) -> list[Field]:
    """The fields of EngineConfig, in their order. Raises TypeError for one that does not say what it means
    and may be."""
    result = []
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        hint = hints[field.name]
        settings = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Setting)]
        if len(settings) != 1:
            raise TypeError(f"{config.__name__}.{field.name} should be Annotated with one Setting")
        setting = settings[0]
        kind, words = _kind(get_args(hint)[0])
        kind = "text" if setting.text else kind
        values = Values(kind, words + setting.words, setting.low, setting.high, setting.text)
        default = None if field.required else field.default
        result.append(Field(field.name, setting.meaning, values, default))
    return result


def _kind(hint: Any) -> tuple[Kind, tuple[str, ...]]:
    """What a field's type says of its values: their kind and words."""
    plain: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "path"}
    if hint in plain:
        return plain[hint], ()
    if get_origin(hint) is Literal:
        return "choice", tuple(map(str, get_args(hint)))
    literal, numbers = get_args(hint)  # of a union
    kinds: dict[Any, Kind] = {list[int]: "sizes", list[list[int]]: "groups", dict[str, str]: "folders"}
    if numbers not in kinds:
        raise TypeError(f"{hint} should be a Literal of words | list[int], lists of these or dict[str, str]")
    return kinds[numbers], tuple(get_args(literal))


def auto_queue_size(max_num_seqs: int) -> int:
    """Requests that may wait, for max_queue_size "auto"."""
    return max(LEAST_AUTO_QUEUE, QUEUED_PER_SLOT * max_num_seqs)


def resolve_lengths(config: EngineConfig, longest_seq_len: int) -> tuple[int, int]:
    """(max_seq_len, max_input_len) with what "auto" stands for. longest_seq_len: the checkpoint's limit."""
    max_seq_len = config.max_seq_len or min(longest_seq_len, LONGEST_AUTO_SEQ_LEN)
    return max_seq_len, config.max_input_len or max_seq_len - 1


def contradictions(config: EngineConfig, longest_seq_len: int) -> list[str]:
    """Which limits contradict each other, each with what would be right. longest_seq_len: the checkpoint's
    limit, for "auto"."""
    max_seq_len, max_input_len = resolve_lengths(config, longest_seq_len)
    seq_len = f"max_seq_len={max_seq_len}" if config.max_seq_len else f"max_seq_len (auto: {max_seq_len})"
    input_len = f"max_input_len={max_input_len}"
    if not config.max_input_len:
        input_len = f"max_input_len (auto: {max_input_len})"
    budget, busy_budget = config.max_num_tokens, config.max_num_tokens_while_decoding
    problems = []
    if max_input_len >= max_seq_len:
        problems.append(
            f"{input_len} should be at most {max_seq_len - 1}: {seq_len} has to hold the prompt and at least "
            "one new token"
        )
    if busy_budget < config.max_num_seqs:
        problems.append(
            f"max_num_tokens_while_decoding={busy_budget} should be at least "
            f"max_num_seqs={config.max_num_seqs}: each running sequence takes one token of every step"
        )
    if busy_budget > budget:
        problems.append(
            f"max_num_tokens_while_decoding={busy_budget} should be at most max_num_tokens={budget}, the "
            "budget of a step in which nothing streams"
        )
    ranks, groups = config.tensor_parallel_size, config.expert_parallel_size
    if ranks % groups:
        problems.append(f"expert_parallel_size={groups} should divide tensor_parallel_size={ranks}")
    if not config.enable_chunked_context and max_input_len > budget:
        problems.append(
            f"enable_chunked_context=false needs max_num_tokens={budget} to be at least {max_input_len}, "
            f"since a prompt of {input_len} tokens has to fit one step; or set a smaller max_input_len"
        )
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        endpoint = getattr(config, name)
        if endpoint != "none" and not re.fullmatch(r"tcp://\S+:[0-9]{1,5}", endpoint):
            problems.append(f"{name}={endpoint} should be tcp://ADDRESS:PORT, or none")
    if config.kv_events_replay_endpoint != "none" and config.kv_events_endpoint == "none":
        problems.append("kv_events_replay_endpoint needs kv_events_endpoint, where the messages are sent")
    if config.kv_events_endpoint != "none" and not config.enable_kv_cache_reuse:
        problems.append("kv_events_endpoint needs enable_kv_cache_reuse=true: else there are no prefixes")
    if config.profile_dir != "none" and not config.profile_dir.startswith("/"):
        problems.append(f"profile_dir={config.profile_dir} should be an absolute path, or none")
    if config.lora_modules != "none" and not config.max_loras:
        problems.append("lora_modules needs max_loras, the number of adapters that have room on the GPU")
    if config.lora_vocabulary and not config.max_loras:
        problems.append("lora_vocabulary needs max_loras, the number of adapters that have room on the GPU")
    return problems + _draft_contradictions(config) + device_contradictions(config)


def _draft_contradictions(config: EngineConfig) -> list[str]:
    method, model = config.speculative_method, config.draft_model
    problems = []
    if method != "none" and not config.max_draft_len:
        problems.append(f"speculative_method={method} needs a max_draft_len of at least 1")
    if method == "eagle3" and model == "none":
        problems.append("speculative_method=eagle3 needs draft_model, the folder of the head")
    if method != "eagle3" and model != "none":
        problems.append(f"draft_model={model} needs speculative_method=eagle3, which is {method}")
    if config.min_matching_ngram_size > config.max_matching_ngram_size:
        problems.append(
            f"min_matching_ngram_size={config.min_matching_ngram_size} should be at most "
            f"max_matching_ngram_size={config.max_matching_ngram_size}"
        )
    if method != "none" and config.attention_backend == "fa2":
        problems.append(
            "attention_backend=fa2 takes lengths from the host, which learns late how many drafts were "
            f"accepted: with speculative_method={method} it should be auto"
        )
    return problems


def device_contradictions(config: EngineConfig) -> list[str]:
    """Contradictions of gpu_device_ids with replicas and device, each with what would be right."""
    groups, each = config.gpu_device_ids, config.tensor_parallel_size
    if isinstance(groups, str):
        return []
    text = ";".join(",".join(map(str, group)) for group in groups)
    ids = [number for group in groups for number in group]
    problems = []
    if config.device == "cpu":
        problems.append(f"gpu_device_ids={text} needs a GPU: with device=cpu it should be auto")
    if len(groups) != config.replicas:
        problems.append(
            f"gpu_device_ids={text} has the GPUs of {len(groups)} engine{'s' * (len(groups) > 1)}, and "
            f"replicas={config.replicas}: set replicas={len(groups)}, or name {config.replicas} groups, with "
            "semicolons between them"
        )
    if wrong := [group for group in groups if len(group) != each]:
        shown = ",".join(map(str, wrong[0]))
        problems.append(
            f"gpu_device_ids={text} gives one engine the GPUs {shown}: with tensor_parallel_size={each} each "
            f"group should have {each}"
        )
    if twice := sorted({number for number in ids if ids.count(number) > 1}):
        problems.append(
            f"gpu_device_ids={text} names GPU {', '.join(map(str, twice))} twice: each should belong to one "
            "engine"
        )
    return problems


def resolve_limits(config: EngineConfig, longest_seq_len: int) -> EngineConfig:
    """Fill max_seq_len, max_input_len and max_queue_size; check every field, and the limits against each
    other. longest_seq_len: the checkpoint's limit, for "auto" alone: ModelSpec checks a max_seq_len.

    Raises ValueError where a value is not allowed, or with all contradictions.
    """
    for field in fields(EngineConfig):
        field.check(getattr(config, field.name))
    if problems := contradictions(config, longest_seq_len):
        raise ValueError("; ".join(problems))
    max_seq_len, max_input_len = resolve_lengths(config, longest_seq_len)
    max_queue_size = config.max_queue_size
    if max_queue_size < 0:
        max_queue_size = auto_queue_size(config.max_num_seqs)
    return msgspec.structs.replace(
        config, max_seq_len=max_seq_len, max_input_len=max_input_len, max_queue_size=max_queue_size
    )


def prompt_too_long(tokens: int, max_input_len: int, max_seq_len: int, longest_seq_len: int) -> str:
    """What a client is told whose prompt is longer than the resolved max_input_len. The first sentence is
    TensorRT-LLM's. longest_seq_len: the checkpoint's limit, 0 where it is not known."""
    if max_input_len < max_seq_len - 1:
        advice = ", or raise max_input_len when building the model repository"
    elif 0 < longest_seq_len <= max_seq_len:
        advice = f"; max_seq_len ({max_seq_len}) is the most that the checkpoint allows"
    else:
        advice = (
            f", or raise max_seq_len ({max_seq_len}) when building the model repository; if the KV cache has"
            " no room for more, the engine's log says so"
        )
    return (
        f"Prompt length ({tokens}) exceeds maximum input length ({max_input_len}). Shorten the prompt{advice}"
    )
