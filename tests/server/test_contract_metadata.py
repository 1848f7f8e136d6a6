# SPDX-License-Identifier: Apache-2.0
"""Names, types and shapes of all tensors of TensorRT-LLM's four models, as the server tells clients of them.

What this backend adds is listed apart. Sizes are those without the batch dimension.
"""

import json

import pytest
from contract import LLM
from running import Server, fetch

Tensors = dict[str, tuple[str, list[int]]]

SAMPLING = """
    temperature repetition_penalty presence_penalty frequency_penalty FP32 1
    min_tokens min_length num_return_sequences end_id pad_id beam_width INT32 1
    seed random_seed UINT64 1
    return_log_probs return_context_logits return_generation_logits BOOL 1
    return_perf_metrics return_kv_cache_reuse_stats return_num_input_tokens return_num_output_tokens BOOL 1
    exclude_input_in_output BOOL 1
    prompt_embedding_table FP16 -1,-1
    prompt_vocab_size INT32 1
    lora_task_id UINT64 1
    lora_weights FP16 -1,-1
    lora_config INT32 -1,3
    guided_decoding_guide_type guided_decoding_guide BYTES 1
"""
EXTRA_OUTPUTS = """
    cum_log_probs FP32 -1
    output_log_probs FP32 -1,-1
    context_logits FP32 -1,-1
    generation_logits FP32 -1,-1,-1
    batch_index sequence_index num_input_tokens num_output_tokens INT32 1
    kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks INT32 1
    arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns INT64 1
    acceptance_rate FP32 1
    total_accepted_draft_tokens total_draft_tokens INT32 1
"""
INPUTS = {
    "ensemble": SAMPLING
    + """
    text_input decoder_text_input BYTES 1
    max_tokens top_k INT32 1
    bad_words stop_words embedding_bias_words BYTES -1
    embedding_bias_weights FP32 -1
    top_p length_penalty FP32 1
    stream BOOL 1
    prompt_table_extra_id UINT64 1
""",
    LLM: SAMPLING
    + """
    input_ids decoder_input_ids draft_input_ids INT32 -1
    input_lengths request_output_len encoder_output_lengths decoder_input_lengths INT32 1
    encoder_input_features FP16 -1,-1
    draft_logits FP32 -1,-1
    draft_acceptance_threshold FP32 1
    stop_words_list bad_words_list INT32 2,-1
    embedding_bias mrope_rotary_cos_sin FP32 -1
    runtime_top_p runtime_top_p_min runtime_top_p_decay len_penalty beam_search_diversity_rate FP32 1
    runtime_top_k runtime_top_p_reset_ids INT32 1
    early_stopping stop streaming skip_cross_attn_blocks BOOL 1
    prompt_table_extra_ids UINT64 -1
    cross_attention_mask BOOL -1,-1
    mrope_position_deltas INT64 1
    context_phase_params UINT8 -1
    retention_token_range_starts retention_token_range_ends INT32 -1
    retention_token_range_priorities retention_token_range_durations_ms INT32 -1
    retention_decode_priority retention_decode_duration_ms INT32 1
    lookahead_window_size lookahead_ngram_size lookahead_verification_set_size INT32 1
""",
    "preprocessing": """
    QUERY DECODER_QUERY IMAGE_URL BYTES 1
    REQUEST_OUTPUT_LEN END_ID PAD_ID INT32 1
    IMAGE_BYTES VIDEO_BYTES UINT8 -1,-1,-1,-1
    BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS BYTES -1
    EMBEDDING_BIAS_WEIGHTS FP32 -1
    PROMPT_TABLE_EXTRA_ID UINT64 1
""",
    "postprocessing": """
    TOKENS_BATCH INT32 -1,-1
    SEQUENCE_LENGTH INT32 -1
""",
}
OUTPUTS = {
    "ensemble": EXTRA_OUTPUTS + "text_output BYTES -1",
    LLM: EXTRA_OUTPUTS
    + """
    output_ids INT32 -1,-1
    sequence_length INT32 -1
    context_phase_params UINT8 -1
""",
    "preprocessing": """
    INPUT_ID DECODER_INPUT_ID REQUEST_OUTPUT_LEN VISION_INPUT_ID INT32 -1
    REQUEST_INPUT_LEN REQUEST_DECODER_INPUT_LEN OUT_END_ID OUT_PAD_ID INT32 1
    BAD_WORDS_IDS STOP_WORDS_IDS INT32 2,-1
    EMBEDDING_BIAS FP32 -1
    OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1
    PIXEL_VALUES FP16 -1,-1,-1,-1
    ASPECT_RATIO_IDS ATTENTION_MASK INT64 -1
    ASPECT_RATIO_MASK INT64 -1,-1
    CROSS_ATTENTION_MASK INT64 -1,-1,-1
    IMAGE_SIZES INT64 2
    IMAGE_GRID_THW INT64 3
    IS_VIDEO_INPUT BOOL 1
""",
    "postprocessing": "OUTPUT BYTES -1",
}
ADDED = {
    ("ensemble", "inputs"): "exclude_stop_words_in_output BOOL 1",
    ("ensemble", "outputs"): "finish_reason BYTES 1",
    (LLM, "inputs"): "stop_words_text BYTES -1\nexclude_stop_words_in_output BOOL 1",
    (LLM, "outputs"): "finish_reason BYTES 1\nchunk INT64 -1",
    ("postprocessing", "inputs"): "CHUNK INT64 -1",
}


def parse(table: str) -> Tensors:
    tensors: Tensors = {}
    for line in filter(None, map(str.strip, table.splitlines())):
        *names, kind, dims = line.split()
        tensors.update({name: (kind, [-1, *map(int, dims.split(","))]) for name in names})
    return tensors


@pytest.mark.parametrize(("kind", "tables"), [("inputs", INPUTS), ("outputs", OUTPUTS)])
@pytest.mark.parametrize("model", INPUTS)
def test_tensors_are_those_of_tensorrt_llm(
    contract: Server, model: str, kind: str, tables: dict[str, str]
) -> None:
    metadata = json.loads(fetch(f"{contract.url}/v2/models/{model}")[2])
    found = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in metadata[kind]}
    assert found == parse(tables[model]) | parse(ADDED.get((model, kind), ""))
    assert metadata["versions"] == ["1"]


def test_which_inputs_are_mandatory(contract: Server) -> None:
    mandatory = {
        "ensemble": set(),  # text_input and max_tokens, which preprocessing asks for
        LLM: {"input_lengths", "request_output_len"},
        "preprocessing": set(),  # QUERY and REQUEST_OUTPUT_LEN, which it asks for
        "postprocessing": set(),  # TOKENS_BATCH and SEQUENCE_LENGTH, or CHUNK
    }
    for model, names in mandatory.items():
        config = json.loads(fetch(f"{contract.url}/v2/models/{model}/config")[2])
        assert {tensor["name"] for tensor in config["input"] if not tensor["optional"]} == names
        batching = config.get("dynamic_batching", {}).get("preferred_batch_size")
        expected = None if model == "ensemble" else [256]
        assert (config["max_batch_size"], batching) == (256, expected)
