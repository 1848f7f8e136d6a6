# SPDX-License-Identifier: Apache-2.0
"""The engine's settings: parsed from the llm model's config.pbtxt parameters, then resolved."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import msgspec

TRUE_WORDS = ("true", "1")
FALSE_WORDS = ("false", "0")


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of one engine process. 0 means "derive from the checkpoint or machine" where the
    comment says auto; `resolve_limits` fills those in."""

    model_dir: str
    load_format: Literal["auto", "dummy"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention_backend: Literal["auto", "fa2", "xqa", "triton", "torch"] = "auto"
    max_num_seqs: int = 256
    max_num_tokens: int = 8192
    max_num_tokens_while_decoding: int = 2048
    max_seq_len: int = 0  # auto: the checkpoint's limit, at most 32768
    max_input_len: int = 0  # auto: max_seq_len - 1
    tokens_per_block: int = 16
    kv_cache_free_gpu_mem_fraction: float = 0.9
    max_tokens_in_paged_kv_cache: int = 0  # auto: from free memory
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    schedule_policy: Literal["fcfs", "lof"] = "fcfs"
    cuda_graph_batch_sizes: Literal["auto", "none"] | list[int] = "auto"
    max_queue_size: int = 0  # 0: unlimited
    stats_check_period_ms: int = 100
    guided_decoding_backend: Literal["xgrammar", "none"] = "xgrammar"
    tokenizer_dir: str = ""  # whose vocabulary guides are compiled for; empty: model_dir's

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> EngineConfig:
        """Config from string parameters. Unset means empty, "auto" on an auto field, or an
        unfilled `${...}`; parameters that are not the engine's are left alone.

        Raises ValueError naming the parameter, its value and what it should be.
        """
        values: dict[str, Any] = {}
        fields = {f.name: f for f in msgspec.structs.fields(cls)}
        for name, text in parameters.items():
            text = text.strip()
            if name not in fields or text == "" or text.startswith("${"):
                continue
            if text == "auto" and isinstance(fields[name].default, int):
                continue
            try:
                values[name] = _parse(name, text, fields[name].default)
                _check_word(values[name], fields[name].type)
                msgspec.convert(values[name], fields[name].type)
            except (ValueError, msgspec.ValidationError) as error:
                raise ValueError(f"parameter {name} of the llm model is {text!r}: {error}") from None
        if "model_dir" not in values:
            raise ValueError("parameter model_dir of the llm model is not set: name a checkpoint folder")
        return cls(**values)


def _parse(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() in TRUE_WORDS:
            return True
        if text.lower() in FALSE_WORDS:
            return False
        raise ValueError("it should be true or false")
    if isinstance(default, int):
        return int(text)
    if isinstance(default, float):
        return float(text)
    if name == "cuda_graph_batch_sizes" and text not in ("auto", "none"):
        return [int(size) for size in text.split(",")]
    return text


def _check_word(value: Any, kind: Any) -> None:
    words = get_args(kind) if get_origin(kind) is Literal else ()
    if words and value not in words:
        raise ValueError(f"it should be {' or '.join(words)}")


def resolve_limits(config: EngineConfig, max_position_embeddings: int) -> EngineConfig:
    """Fill max_seq_len and max_input_len and check the limits against each other.

    Raises ValueError where they contradict each other or the checkpoint.
    """
    max_seq_len = config.max_seq_len or min(max_position_embeddings, 32768)
    if max_seq_len > max_position_embeddings:
        raise ValueError(
            f"max_seq_len {max_seq_len} exceeds the checkpoint's max_position_embeddings "
            f"{max_position_embeddings}; choose at most that"
        )
    max_input_len = config.max_input_len or max_seq_len - 1
    if not 0 < max_input_len < max_seq_len:
        raise ValueError(
            f"max_input_len {max_input_len} should lie in 1..{max_seq_len - 1} (max_seq_len - 1)"
        )
    for name in ("max_num_seqs", "max_num_tokens", "max_num_tokens_while_decoding", "tokens_per_block"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it should be at least 1")
    if config.tokens_per_block not in (16, 32, 64, 128):
        raise ValueError(f"tokens_per_block is {config.tokens_per_block}; it should be 16, 32, 64 or 128")
    if config.max_num_tokens_while_decoding < config.max_num_seqs:
        raise ValueError(
            f"max_num_tokens_while_decoding {config.max_num_tokens_while_decoding} is below max_num_seqs "
            f"{config.max_num_seqs}: a full batch of decodes would leave nothing for prompts"
        )
    if not config.enable_chunked_context and max_input_len > config.max_num_tokens:
        raise ValueError(
            f"without chunked context a prompt must fit one step: max_num_tokens {config.max_num_tokens} "
            f"should be at least max_input_len {max_input_len}, or enable_chunked_context true"
        )
    if not 0.0 < config.kv_cache_free_gpu_mem_fraction <= 1.0:
        raise ValueError("kv_cache_free_gpu_mem_fraction should lie in (0, 1]")
    return msgspec.structs.replace(config, max_seq_len=max_seq_len, max_input_len=max_input_len)
