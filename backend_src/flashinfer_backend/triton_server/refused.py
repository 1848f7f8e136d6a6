# SPDX-License-Identifier: Apache-2.0
"""Inputs of TensorRT-LLM's model that ask for what this backend does not do.

They are declared in config.pbtxt so that a client which sends one is told, instead of getting an
answer that ignores it. A value that asks for nothing (beam_width 1, an empty tensor) passes.
"""

from collections.abc import Mapping

import numpy as np

# Features that this backend does not have, and the inputs that ask for each.
_INPUTS = {
    "encoder-decoder models": (
        "encoder_input_features", "encoder_output_lengths", "cross_attention_mask",
        "skip_cross_attn_blocks",
    ),
    "multimodal prompts": ("mrope_rotary_cos_sin", "mrope_position_deltas"),
    "prompt tuning": ("prompt_embedding_table", "prompt_table_extra_ids", "prompt_vocab_size"),
    "speculative decoding": ("draft_input_ids", "draft_logits", "draft_acceptance_threshold"),
    "lookahead decoding": (
        "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size",
    ),
    "disaggregated serving": ("context_phase_params",),
    "KV cache retention": (
        "retention_token_range_starts", "retention_token_range_ends", "retention_token_range_priorities",
        "retention_token_range_durations_ms", "retention_decode_priority",
        "retention_decode_duration_ms",
    ),
}  # fmt: skip
_FEATURES = {name: feature for feature, names in _INPUTS.items() for name in names}

# The value each of these has when it changes nothing. len_penalty, beam_search_diversity_rate and
# early_stopping rank beams and runtime_top_p_min and runtime_top_p_reset_ids bound the decay of top_p:
# without beams and decay they have no effect whatever their value.
_NEUTRAL = {"beam_width": 1, "runtime_top_p_decay": 1.0}
_MEANING = {"beam_width": "beam search", "runtime_top_p_decay": "decay of top_p"}


def refuse_unsupported(tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError for the first input that asks for something this backend does not do."""
    for name, tensor in tensors.items():
        if tensor.size == 0:
            continue
        if name in _FEATURES:
            raise ValueError(f"{name} is not supported: this backend has no {_FEATURES[name]}; leave it out")
        if name in _NEUTRAL and (asking := tensor[tensor != _NEUTRAL[name]]).size:
            value = asking[0].item()
            raise ValueError(
                f"{name} is {value:g}, which is not supported: this backend has no {_MEANING[name]};"
                f" it should be {_NEUTRAL[name]:g} or left out"
            )
    _refuse_decoder_prompt(tensors)


def _refuse_decoder_prompt(tensors: Mapping[str, np.ndarray]) -> None:
    """One id a row passes: that is what preprocessing makes of a prompt for a decoder-only model."""
    ids, lengths = tensors.get("decoder_input_ids"), tensors.get("decoder_input_lengths")
    longest = 0
    if lengths is not None and lengths.size:
        longest = int(lengths.max())
        if lengths.min() < 0:
            raise ValueError(
                f"decoder_input_lengths is {int(lengths.min())}; it should be 0 or 1, or left out"
            )
    elif ids is not None and ids.size:
        longest = ids.shape[-1]
    if longest > 1:
        name = "decoder_input_ids" if ids is not None else "decoder_input_lengths"
        raise ValueError(
            f"{name} is not supported: this backend has no encoder-decoder models, and a row has"
            f" {longest} ids where at most the one of preprocessing's DECODER_INPUT_ID passes; leave it out"
        )
