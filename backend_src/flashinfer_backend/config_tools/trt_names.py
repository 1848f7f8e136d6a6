# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's fill_template names, and those of its config.pbtxt files, that are no knobs here.

A value that asks for what happens anyway is accepted. Any other is refused, with the way to get the same
here or the statement that there is none: a knob that is silently without effect misleads.
"""

from dataclasses import dataclass

from flashinfer_backend.core.values import FALSE_WORDS, TRUE_WORDS


@dataclass(frozen=True)
class ForeignKnob:
    """accepted: the values, in lower case, that ask for what happens anyway."""

    accepted: tuple[str, ...]
    hint: str

    def refusal(self, value: str) -> str | None:
        """Why `value` is refused, or None if it is accepted. Empty is TensorRT-LLM's word for its default."""
        if not value:
            return None
        word = "true" if value in TRUE_WORDS else "false" if value in FALSE_WORDS else value.lower()
        if word in self.accepted or value in self.accepted:
            return None
        also = f"; accepted: {', '.join(self.accepted)}" if self.accepted else ""
        return self.hint + also


_NO_ENGINE = "there are no engine files here: set model_dir to a Hugging Face checkpoint folder"
_NO_ENCODER = "encoder-decoder models are not supported"
_LORA_ROOM = "room for adapters is max_loras times max_lora_rank: set these"
_NO_SPECULATION = "drafts come from speculative_method=ngram, eagle3 or mtp"
_NO_MULTIMODAL = "multimodal models are not supported"
_NO_BLS = "the BLS model is the ensemble under a second name, without a process: set tensorrt_llm_bls=true"
_NO_OFFLOAD = "the KV cache is not offloaded to host memory"
_ONE_PROCESS = (
    "an engine runs on GPUs of one host: tensor_parallel_size says on how many, replicas how many engines"
    " there are, gpu_device_ids which GPUs they get"
)
_FULL_ATTENTION = "windows are those of the checkpoint: bound a sequence with max_seq_len"
_WORKERS = "/opt/tritonserver/backends/tensorrtllm"
_NO_WORKER = "the engine is a Python process of this package"
_GRAPHS = "set cuda_graph_batch_sizes to auto, none or a list of batch sizes"

FOREIGN: dict[str, ForeignKnob] = {
    "triton_backend": ForeignKnob(("python",), "the llm model always runs on Triton's python backend"),
    "engine_dir": ForeignKnob((), _NO_ENGINE),
    "encoder_engine_dir": ForeignKnob((), _NO_ENCODER),
    "encoder_input_features_data_type": ForeignKnob(("TYPE_FP16",), _NO_ENCODER),
    "cross_kv_cache_fraction": ForeignKnob((), _NO_ENCODER),
    "prompt_embedding_table_data_type": ForeignKnob(("TYPE_FP16",), "prompt tables are not supported"),
    "logits_datatype": ForeignKnob(("TYPE_FP32",), "logits are sent as they are computed, in FP32"),
    "normalize_log_probs": ForeignKnob(
        ("true",), "log probabilities are always the log-softmax of the model's logits"
    ),
    "tokenizer_type": ForeignKnob(("auto",), "the tokenizer's type is read from tokenizer_dir"),
    "max_beam_width": ForeignKnob(
        ("1",), "beam search is not supported: several samples of a prompt come with num_return_sequences"
    ),
    "decoding_mode": ForeignKnob(
        ("top_k_top_p", "top_k", "top_p"), "decoding is always by top-k and top-p sampling, or greedy"
    ),
    "max_attention_window_size": ForeignKnob((), _FULL_ATTENTION),
    "sink_token_length": ForeignKnob(("0",), _FULL_ATTENTION),
    "kv_cache_host_memory_bytes": ForeignKnob(("0",), _NO_OFFLOAD),
    "kv_cache_onboard_blocks": ForeignKnob(("true",), _NO_OFFLOAD),
    "recv_poll_period_ms": ForeignKnob(("0",), "nothing polls for requests: the engine is woken by them"),
    "iter_stats_max_iterations": ForeignKnob((), "statistics are published every stats_check_period_ms"),
    "request_stats_max_iterations": ForeignKnob((), "ask with return_perf_metrics in the request"),
    "participant_ids": ForeignKnob((), _ONE_PROCESS),
    "num_nodes": ForeignKnob(("1",), _ONE_PROCESS),
    "lookahead_window_size": ForeignKnob((), _NO_SPECULATION),
    "lookahead_ngram_size": ForeignKnob((), _NO_SPECULATION),
    "lookahead_verification_set_size": ForeignKnob((), _NO_SPECULATION),
    "medusa_choices": ForeignKnob((), _NO_SPECULATION),
    "eagle_choices": ForeignKnob((), _NO_SPECULATION),
    "speculative_decoding_fast_logits": ForeignKnob(("false",), _NO_SPECULATION),
    "tensorrt_llm_draft_model_name": ForeignKnob(
        (), "no second model drafts here: set speculative_method=eagle3 and draft_model=folder of the head"
    ),
    "lora_cache_optimal_adapter_size": ForeignKnob((), _LORA_ROOM),
    "lora_cache_max_adapter_size": ForeignKnob((), "the largest rank is max_lora_rank: set that"),
    "lora_cache_gpu_memory_fraction": ForeignKnob((), _LORA_ROOM),
    "lora_prefetch_dir": ForeignKnob(
        (), "adapters are named by lora_modules, with folders as PEFT writes them"
    ),
    "gpu_weights_percent": ForeignKnob(("1", "1.0"), "the weights are always on the GPU as a whole"),
    "multi_block_mode": ForeignKnob(("true",), "attention splits long sequences automatically"),
    "enable_context_fmha_fp32_acc": ForeignKnob(
        ("true",), "attention always accumulates in FP32, which cannot be switched off"
    ),
    "cuda_graph_mode": ForeignKnob((), _GRAPHS),
    "cuda_graph_cache_size": ForeignKnob((), _GRAPHS),
    "enable_trt_overlap": ForeignKnob(("true",), "steps always overlap, which cannot be switched off"),
    "xgrammar_tokenizer_info_path": ForeignKnob((), "grammars are compiled from tokenizer_dir"),
    "multimodal_model_path": ForeignKnob((), _NO_MULTIMODAL),
    "multimodal_encoders_name": ForeignKnob((), _NO_MULTIMODAL),
    "max_num_images": ForeignKnob((), _NO_MULTIMODAL),
    "bls_instance_count": ForeignKnob((), _NO_BLS),
    "accumulate_tokens": ForeignKnob(("false",), "each chunk of a stream has its own text only"),
    "max_batch_size": ForeignKnob(
        (), "set max_num_seqs (sequences that run at a time) or triton_max_batch_size (requests in a call)"
    ),
    "pipeline_parallel_size": ForeignKnob(("1",), _ONE_PROCESS),
    "gpt_model_path": ForeignKnob((), _NO_ENGINE),
    "encoder_model_path": ForeignKnob((), _NO_ENCODER),
    "visual_model_path": ForeignKnob((), _NO_MULTIMODAL),
    "executor_worker_path": ForeignKnob((f"{_WORKERS}/trtllmExecutorWorker",), _NO_WORKER),
    "worker_path": ForeignKnob((f"{_WORKERS}/triton_tensorrtllm_worker",), _NO_WORKER),
    "max_num_sequences": ForeignKnob((), "set max_num_seqs"),
    "max_kv_cache_length": ForeignKnob((), _FULL_ATTENTION),
    "tensorrt_llm_model_name": ForeignKnob((), "name the model with --llm-name NAME"),
}
