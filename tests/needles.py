# SPDX-License-Identifier: Apache-2.0
"""A model that finds needles, and prompts that hide them.

A prompt is random text with one needle of each of two kinds, and ends with a question about a kind. Attention
of the first layer scores the needle of that kind 12 to 14, and the text around 0. The needle's value comes
back through the values, and the answer is the token of that value. Text of 120 000 tokens weighs as much as a
score of 12: the needle has half of the weights or more. The answer is wrong if the part of the keys with the
needle is missing; a part without it does not change the answer.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor

VALUES = 16
TEXT = 200  # tokens 0..199; behind them needles of each kind by value, a question of each kind, answers
QUESTION = TEXT + 2 * VALUES
ANSWER = QUESTION + 2
VOCABULARY = ANSWER + VALUES
MARK = 8.0  # what an embedding has in a direction of its own; in the others it has numbers around 1
# Where the needle of each kind lies, as a share of the prompt, and its value.
CASES = [((0.0, 1.0), (3, 11)), ((0.5, 0.1), (15, 0)), ((0.97, 0.33), (7, 7))]
SCORE = 16.0  # of a needle, before norms make embeddings with a MARK smaller


class Directions(NamedTuple):
    """Of the residual stream, where no text is: needles and questions of each kind, a needle's value, and the
    value that was found."""

    needle: int
    question: int
    value: int
    found: int


def make_needle_model(folder: Path, heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> Path:
    """Writes a Llama checkpoint of two layers to a new folder and returns it. kv_heads: even; the first half
    finds needles of the first kind."""
    hidden = max(256, 2 * head_dim)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_theta=5e5,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    at = Directions(*(hidden - 3 * VALUES + place for place in (0, 2, 4)), found=hidden - VALUES)
    with torch.no_grad():
        _embed(model.model.embed_tokens.weight, at)
        _attend(model.model.layers[0].self_attn, at, heads, kv_heads, head_dim)
        model.lm_head.weight[ANSWER:].zero_()
        for value in range(VALUES):
            model.lm_head.weight[ANSWER + value, at.found + value] = 1
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({}))
    return folder


def _embed(weight: Tensor, at: Directions) -> None:
    weight.normal_()
    weight[:, at.needle :] = 0
    for kind in range(2):
        weight[QUESTION + kind, at.question + kind] = MARK
        for value in range(VALUES):
            token = TEXT + kind * VALUES + value
            weight[token, at.needle + kind] = weight[token, at.value + value] = MARK


def _attend(attention: torch.nn.Module, at: Directions, heads: int, kv_heads: int, dim: int) -> None:
    queries, keys, values, result = (
        getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    for matrix in (queries, keys, values):  # of text, scores and values around 1
        matrix.normal_(std=matrix.shape[1] ** -0.5)
        matrix[:, at.needle :] = 0
    result.normal_(std=0.02)
    result[at.needle :] = 0
    # Of all pairs the last is turned least: by 0.3 in 120 000 positions.
    mark = math.sqrt(SCORE * math.sqrt(dim)) / MARK
    for projection, count, place in ((queries, heads, at.question), (keys, kv_heads, at.needle)):
        for head in range(count):
            first, second = head * dim + dim // 2 - 1, head * dim + dim - 1
            projection[[first, second]] = 0
            projection[first, place + head * 2 // count] = mark
    for head in range(kv_heads):
        for value in range(VALUES):
            values[head * dim + value] = 0
            values[head * dim + value, at.value + value] = 1
    for head in range(heads):
        result[:, head * dim : head * dim + VALUES] = 0
        for value in range(VALUES):
            result[at.found + value, head * dim + value] = 2 / heads


def hide(length: int, depths: tuple[float, float], values: tuple[int, int], seed: int) -> list[int]:
    """A prompt of `length` tokens without its question: the needles of both kinds at these shares of it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, TEXT, (length,), generator=generator)
    for kind in range(2):
        ids[int(depths[kind] * (length - 1))] = TEXT + kind * VALUES + values[kind]
    return ids.tolist()


def questions(prompt: list[int]) -> list[list[int]]:
    """The prompt with the question of each kind."""
    return [[*prompt, QUESTION + kind] for kind in range(2)]
