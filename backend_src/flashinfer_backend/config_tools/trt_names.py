# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's fill_template names, and those of its config.pbtxt files, that are no knobs here.

A value that asks for what happens anyway is accepted. Any other is refused, with the way to get the same
here or the statement that there is none: a knob that is silently without effect misleads.
"""

from flashinfer_backend.core.values import FALSE_WORDS, TRUE_WORDS

# What is said of a value that is refused: the names, and of each the values that ask for what happens anyway.
_BY_HINT: dict[str, dict[str, tuple[str, ...]]] = {
    "the llm model always runs on Triton's python backend": {"triton_backend": ("python",)},
    "there are no engine files here: set model_dir to a Hugging Face checkpoint folder": {
        "engine_dir": (), "gpt_model_path": (),
    },
    "encoder-decoder models are not supported": {
        "encoder_engine_dir": (), "encoder_input_features_data_type": ("TYPE_FP16",),
        "cross_kv_cache_fraction": (), "encoder_model_path": (),
    },
    "prompt tables are not supported": {"prompt_embedding_table_data_type": ("TYPE_FP16",)},
    "logits are sent as they are computed, in FP32": {"logits_datatype": ("TYPE_FP32",)},
    "log probabilities are always the log-softmax of the model's logits": {"normalize_log_probs": ("true",)},
    "the tokenizer's type is read from tokenizer_dir": {"tokenizer_type": ("auto",)},
    "beam search is not supported: several samples of a prompt come with num_return_sequences": {
        "max_beam_width": ("1",),
    },
    "decoding is always by top-k and top-p sampling, or greedy": {
        "decoding_mode": ("top_k_top_p", "top_k", "top_p"),
    },
    "windows are those of the checkpoint: bound a sequence with max_seq_len": {
        "max_attention_window_size": (), "sink_token_length": ("0",), "max_kv_cache_length": (),
    },
    "the KV cache is not offloaded to host memory": {
        "kv_cache_host_memory_bytes": ("0",), "kv_cache_onboard_blocks": ("true",),
    },
    "nothing polls for requests: the engine is woken by them": {"recv_poll_period_ms": ("0",)},
    "statistics are published every stats_check_period_ms": {"iter_stats_max_iterations": ()},
    "ask with return_perf_metrics in the request": {"request_stats_max_iterations": ()},
    "an engine runs on GPUs of one host: tensor_parallel_size says on how many, replicas how many"
    " engines there are, gpu_device_ids which GPUs they get": {
        "participant_ids": (), "num_nodes": ("1",), "pipeline_parallel_size": ("1",),
    },
    "drafts come from speculative_method=ngram, eagle3 or mtp": {
        "lookahead_window_size": (), "lookahead_ngram_size": (), "lookahead_verification_set_size": (),
        "medusa_choices": (), "eagle_choices": (), "speculative_decoding_fast_logits": ("false",),
    },
    "no second model drafts here: set speculative_method=eagle3 and draft_model=folder of the head": {
        "tensorrt_llm_draft_model_name": (),
    },
    "room for adapters is max_loras times max_lora_rank: set these": {
        "lora_cache_optimal_adapter_size": (), "lora_cache_gpu_memory_fraction": (),
    },
    "the largest rank is max_lora_rank: set that": {"lora_cache_max_adapter_size": ()},
    "adapters are named by lora_modules, with folders as PEFT writes them": {"lora_prefetch_dir": ()},
    "the weights are always on the GPU as a whole": {"gpu_weights_percent": ("1", "1.0")},
    "attention splits long sequences automatically": {"multi_block_mode": ("true",)},
    "attention always accumulates in FP32, which cannot be switched off": {
        "enable_context_fmha_fp32_acc": ("true",),
    },
    "set cuda_graph_batch_sizes to auto, none or a list of batch sizes": {
        "cuda_graph_mode": (), "cuda_graph_cache_size": (),
    },
    "steps always overlap, which cannot be switched off": {"enable_trt_overlap": ("true",)},
    "grammars are compiled from tokenizer_dir": {"xgrammar_tokenizer_info_path": ()},
    "multimodal models are not supported": {
        "multimodal_model_path": (), "multimodal_encoders_name": (), "max_num_images": (),
        "visual_model_path": (),
    },
    "the BLS model is the ensemble under a second name, without a process: set tensorrt_llm_bls=true": {
        "bls_instance_count": (),
    },
    "each chunk of a stream has its own text only": {"accumulate_tokens": ("false",)},
    "set max_num_seqs (sequences that run at a time) or triton_max_batch_size (requests in a call)": {
        "max_batch_size": (),
    },
    "the engine is a Python process of this package": {
        "executor_worker_path": ("/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",),
        "worker_path": ("/opt/tritonserver/backends/tensorrtllm/triton_tensorrtllm_worker",),
    },
    "set max_num_seqs": {"max_num_sequences": ()},
    "name the model with --llm-name NAME": {"tensorrt_llm_model_name": ()},
}  # fmt: skip
FOREIGN = {name: (hint, accepted) for hint, names in _BY_HINT.items() for name, accepted in names.items()}


def refusal(name: str, value: str) -> str | None:
    """Why a value of a name in FOREIGN is refused, or None if it is accepted. Empty is TensorRT-LLM's word
    for its default."""
    hint, accepted = FOREIGN[name]
    word = "true" if value in TRUE_WORDS else "false" if value in FALSE_WORDS else value.lower()
    if not value or word in accepted or value in accepted:
        return None
    return hint + (f"; accepted: {', '.join(accepted)}" if accepted else "")
