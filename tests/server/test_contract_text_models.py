# SPDX-License-Identifier: Apache-2.0
"""The models preprocessing and postprocessing, called as TensorRT-LLM's tools call them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from asking import int32, strings
from contract import PROMPT, encode, number, tokenizer, words
from running import Server
from test_contract_unary import Unary
from tritonclient.utils import InferenceServerException

from flashinfer_backend.text.chunk import LAST, NO_LIMIT, pack_chunk

ASKED = {"QUERY": strings(PROMPT), "REQUEST_OUTPUT_LEN": int32(5)}
PAD, END = 9, 11


@pytest.fixture
def infer(contract: Server) -> Iterator[Unary]:
    """Neither model is decoupled, whatever llm is."""
    client = Unary(contract, "grpc")
    yield client
    client.close()


def test_rows_of_preprocessing_are_padded_at_their_ends(infer: Unary) -> None:
    prompts = [encode("The"), encode(PROMPT)]
    values = {
        "QUERY": strings("The", PROMPT), "REQUEST_OUTPUT_LEN": int32(5, 6),
        "PAD_ID": int32(PAD, PAD), "END_ID": int32(END, END),
    }  # fmt: skip
    found = infer("preprocessing", values)
    width = max(map(len, prompts))
    padded = [prompt + [PAD] * (width - len(prompt)) for prompt in prompts]
    assert found.as_numpy("INPUT_ID").tolist() == padded
    assert found.as_numpy("REQUEST_INPUT_LEN").tolist() == [[len(prompt)] for prompt in prompts]
    assert found.as_numpy("REQUEST_OUTPUT_LEN").tolist() == [[5], [6]]
    assert found.as_numpy("OUT_PAD_ID").tolist() == [[PAD], [PAD]]
    assert found.as_numpy("OUT_END_ID").tolist() == [[END], [END]]
    for name, shape in (
        ("BAD_WORDS_IDS", (2, 2, 0)),
        ("STOP_WORDS_IDS", (2, 2, 0)),
        ("EMBEDDING_BIAS", (2, 0)),
    ):
        assert found.as_numpy(name).shape == shape  # nothing was given


def test_word_lists_of_preprocessing(infer: Unary) -> None:
    given = [" tree", "", " and house"]
    table = np.array([[word.encode() for word in given]], np.object_)
    weights = number(1.5, 7.0, -2.0).reshape(1, 3)
    values = {
        **ASKED, "BAD_WORDS_DICT": table, "STOP_WORDS_DICT": table,
        "EMBEDDING_BIAS_WORDS": table, "EMBEDDING_BIAS_WEIGHTS": weights,
    }  # fmt: skip
    found = infer("preprocessing", values)
    tree, house = words(" tree"), words(" and house")
    ids = tree + house
    ends = [len(tree), len(ids)] + [-1] * (len(ids) - 2)
    for name in ("BAD_WORDS_IDS", "STOP_WORDS_IDS"):
        assert found.as_numpy(name).tolist() == [[ids, ends]], "the empty word is left out"
    bias = np.zeros(tokenizer().get_vocab_size(), np.float32)
    np.add.at(bias, tree, 1.5)
    np.add.at(bias, house, -2.0)
    assert found.as_numpy("EMBEDDING_BIAS").tolist() == [bias.tolist()]


REFUSED: dict[str, np.ndarray] = {
    "DECODER_QUERY": strings("a"),
    "IMAGE_BYTES": np.ones((1, 1, 2, 2, 3), np.uint8),
    "IMAGE_URL": strings("https://example.com/a.png"),
    "VIDEO_BYTES": np.ones((1, 1, 2, 2, 3), np.uint8),
    "PROMPT_TABLE_EXTRA_ID": np.array([[1]], np.uint64),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_preprocessing_does_not_serve_is_refused_by_name(infer: Unary, name: str) -> None:
    with pytest.raises(InferenceServerException, match=f"{name}.* is not supported") as raised:
        infer("preprocessing", {**ASKED, name: REFUSED[name]})
    assert raised.value.status() == "StatusCode.INTERNAL"


def test_outputs_of_models_that_are_not_served_are_never_there(infer: Unary) -> None:
    found = infer("preprocessing", ASKED).get_response()
    assert {output.name for output in found.outputs} == {
        *("INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN", "BAD_WORDS_IDS", "STOP_WORDS_IDS"),
        *("EMBEDDING_BIAS", "OUT_END_ID", "OUT_PAD_ID", "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN"),
    }


def test_postprocessing_decodes_each_beam_on_its_own_into_a_flat_array(infer: Unary) -> None:
    texts = [["Once upon", "The"], ["a dog and", " ran"]]
    ids = [[words(text) for text in row] for row in texts]
    width = max(len(beam) for row in ids for beam in row)
    tokens = [[beam + [-1] * (width - len(beam)) for beam in row] for row in ids]
    values: dict[str, Any] = {
        "TOKENS_BATCH": np.array(tokens, np.int32),
        "SEQUENCE_LENGTH": np.array([[len(beam) for beam in row] for row in ids], np.int32),
    }
    output = infer("postprocessing", values).as_numpy("OUTPUT")
    assert output.shape == (4,)
    assert [text.decode() for text in output] == [tokenizer().decode(beam) for row in ids for beam in row]


def test_postprocessing_leaves_special_tokens_out(infer: Unary) -> None:
    special = tokenizer().encode(PROMPT).ids[0]
    assert tokenizer().decode([special]) == "" != tokenizer().decode([special], skip_special_tokens=False)
    ids = [special, *words(PROMPT)]
    values = {"TOKENS_BATCH": np.array([[ids]], np.int32), "SEQUENCE_LENGTH": int32(len(ids))}
    assert infer("postprocessing", values).as_numpy("OUTPUT")[0].decode() == PROMPT


def test_postprocessing_takes_ids_or_a_chunk(infer: Unary) -> None:
    ids = words(" ran to the park")
    chunk = pack_chunk(0, 0, LAST, NO_LIMIT, ids[:2], ids[2:])
    text = infer("postprocessing", {"CHUNK": chunk}).as_numpy("OUTPUT")[0].decode()
    assert tokenizer().decode(ids[:2]) + text == tokenizer().decode(ids)
    tokens = {"TOKENS_BATCH": np.array([[ids]], np.int32), "SEQUENCE_LENGTH": int32(len(ids))}
    for wrong, message in (
        ({"SEQUENCE_LENGTH": int32(1)}, "TOKENS_BATCH is missing"),
        ({"TOKENS_BATCH": tokens["TOKENS_BATCH"]}, "SEQUENCE_LENGTH is missing"),
        ({"CHUNK": chunk} | tokens, "so SEQUENCE_LENGTH and TOKENS_BATCH should be left out"),
        ({"CHUNK": chunk[:, 1:]}, r"CHUNK row begins with"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            infer("postprocessing", wrong)
