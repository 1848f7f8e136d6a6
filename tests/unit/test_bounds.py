# SPDX-License-Identifier: Apache-2.0
"""Every field of both APIs that takes text, a list or an object has a bound, and the bound is kept. The
fields are those of the bodies' structs and of the models' config.pbtxt."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from small_tokenizers import byte_level

from flashinfer_backend.config_tools import model_config
from flashinfer_backend.core import bounds
from flashinfer_backend.core.bounds import FIELDS
from flashinfer_backend.openai import adapters, requests
from flashinfer_backend.openai.bounds import bound_of, values
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.triton_server import postprocessing, preprocessing, refused
from flashinfer_backend.triton_server.request_parameters import read_request_parameters
from flashinfer_backend.triton_server.requests import LlmLimits, parse_request

REPOSITORY = Path(__file__).parents[2] / "model_repo"
KINDS = [
    requests.ChatRequest, requests.CompletionRequest, requests.ResponsesRequest, requests.MessagesRequest,
    requests.TokenizeRequest, requests.DetokenizeRequest, requests.EmbeddingRequest, requests.RerankRequest,
    requests.ScoreRequest, adapters.LoadRequest, adapters.UnloadRequest,
]  # fmt: skip
BODY_FIELDS = [(kind, field.name) for kind in KINDS for field in msgspec.structs.fields(kind)]
REFUSED = {*refused._FEATURES, *preprocessing.REFUSED}
PROMPT_BYTES = 1000


def is_open(hint: Any) -> bool:
    """Whether a value of this type can be of any size."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return False
    return (
        hint in (str, list, dict, Any)
        or any(map(is_open, typing.get_args(hint)))
        or (typing.get_origin(hint) in (list, dict))
    )


def inputs(model: str) -> dict[str, Any]:
    """Inputs of a model by name."""
    return {one.name: one for one in model_config.read(REPOSITORY / model / "config.pbtxt").input}


def is_text(one: Any) -> bool:
    return type_of(one) == "TYPE_STRING"


def type_of(one: Any) -> str:
    return one.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[one.data_type].name


TENSORS = [
    (model, name)
    for model in ("preprocessing", "llm", "postprocessing")
    for name, one in inputs(model).items()
    if -1 in one.dims or is_text(one)
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: str) -> TextTokenizer:
    return TextTokenizer(Path(tokenizer_folder))


def ask(model: str, tokenizer: TextTokenizer, tensors: dict[str, np.ndarray], rows: int) -> None:
    """What a model makes of a request of `rows` rows with these tensors. Raises ValueError."""
    one = np.ones((rows, 1), np.int32)
    if model == "llm":
        base = {"input_ids": one, "input_lengths": one, "request_output_len": one}
        text = {
            "guided_decoding_guide_type": texts(rows, b"regex"),
            "guided_decoding_guide": texts(rows, b"a"),
        }
        guided = text if text.keys() & tensors.keys() else {}
        parse_request(base | guided | tensors, LlmLimits(vocab_size=100, max_input_len=20))
    elif model == "preprocessing":
        base = {"QUERY": texts(rows, b"a"), "REQUEST_OUTPUT_LEN": one, "END_ID": one}
        preprocessor = preprocessing.Preprocessor(tokenizer, max_prompt_bytes=PROMPT_BYTES)
        (result,) = preprocessor.run([base | tensors])
        if isinstance(result, ValueError):
            raise result
    elif "CHUNK" in tensors:
        postprocessing.chunks(tensors)
    else:
        base = {"TOKENS_BATCH": one[:, :, None], "SEQUENCE_LENGTH": one}
        postprocessing.whole_texts(DeltaDecoder(byte_level()), base | tensors)


def texts(rows: int, *row: bytes) -> np.ndarray:
    return np.array([row] * rows, np.object_)


def wide(one: Any, rows: int, width: int) -> np.ndarray:
    """A tensor of an input with `width` values in a row."""
    if is_text(one):
        return texts(rows, *[b"a"] * width)
    kinds = {"TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_INT64": np.int64, "TYPE_UINT8": np.uint8}
    inner = [1 if dim == -1 else dim for dim in one.dims[:-1]]
    return np.zeros((rows, *inner, width), kinds.get(type_of(one), np.int32))


def beyond(most: int | None) -> str:
    return f"it should have at most {most}"


def test_every_field_that_can_be_of_any_size_has_a_row() -> None:
    hints = {kind: typing.get_type_hints(kind, include_extras=True) for kind in KINDS}
    open_fields = {name for kind, name in BODY_FIELDS if is_open(hints[kind][name])}
    assert open_fields <= FIELDS.keys()
    tensors = {name for _, name in TENSORS}
    assert tensors <= FIELDS.keys() | REFUSED
    # The ensemble's inputs are inputs of its steps, or refused by one.
    ensemble = model_config.read(REPOSITORY / "ensemble" / "config.pbtxt")
    taken = {
        ours: theirs for step in ensemble.ensemble_scheduling.step for theirs, ours in step.input_map.items()
    }
    steps = inputs("preprocessing") | inputs("llm")
    for name in inputs("ensemble"):
        assert taken[name] in steps, name
    # And no row is of a field that is gone.
    own = {f"{kind.__name__}.{name}" for kind, name in BODY_FIELDS if is_open(hints[kind][name])}
    others = {"parameters", "decoder_input_ids"} | (own & FIELDS.keys())
    assert FIELDS.keys() == open_fields | (tensors - REFUSED) | others


@pytest.mark.parametrize(("kind", "name"), BODY_FIELDS)
def test_a_body_may_hold_what_its_bounds_say_and_no_more(kind: Any, name: str) -> None:
    needed = "".join(
        f'"{field.name}": {1 if field.name == "max_tokens" else []}, '
        for field in msgspec.structs.fields(kind)
        if field.required and field.name != name
    )

    def refusal(raw: str) -> str:
        try:
            requests.decode(kind, f'{{{needed}"{name}": {raw}}}'.encode())
        except ApiError as error:
            return error.message if error.param == name else ""
        return ""

    bound = bound_of(kind, name)
    if bound.size is not None:
        assert "bytes of JSON" not in refusal(f'"{"x" * (bound.size - 2)}"')
        assert f"bytes of JSON; {beyond(bound.size)}" in refusal(f'"{"x" * (bound.size - 1)}"')
    if bound.items is not None:
        assert "should have at most" not in refusal("[" + "{}," * (bound.items - 1) + "{}]")
        elements = "[" + "{}," * bound.items + "{}]"
        assert refusal(elements) == f"{name} has {bound.items + 1} elements; {beyond(bound.items)}"
    if bound.size is None or 2 * bound.values < bound.size:
        numbers = "[" + "0," * (bound.values - 1) + "0]"
        assert "should have at most" not in refusal(numbers)
        more = bound.values + 1
        assert f"{name} has {more} {bound.of}; {beyond(bound.values)}" in refusal(numbers[:-1] + ",0]")
        names = "{" + ",".join(f'"{n},":",\\\\\\","' for n in range(min(more, 1 << 16))) + "}"
        if more <= 1 << 16 and (bound.size is None or len(names) <= bound.size):
            assert f"{name} has {more} {bound.of}; {beyond(bound.values)}" in refusal(names)


@pytest.mark.parametrize(("model", "name"), TENSORS)
def test_a_tensor_may_hold_what_its_bounds_say_and_no_more(
    model: str, name: str, tokenizer: TextTokenizer
) -> None:
    one = inputs(model)[name]

    def refusal(tensor: np.ndarray) -> str:
        try:
            ask(model, tokenizer, {name: tensor}, len(tensor))
        except ValueError as error:
            return str(error)
        return ""

    if name in REFUSED:
        assert "not supported" in refusal(wide(one, 1, 1))
        return
    if name == "decoder_input_ids":  # what preprocessing makes of a prompt passes
        assert not refusal(wide(one, 1, 1)) and "not supported" in refusal(wide(one, 1, 2))
        return
    bound = FIELDS[name]
    if -1 in one.dims:
        assert beyond(bound.values) not in refusal(wide(one, 1, bound.values))
        assert f"{bound.values + 1} {bound.of}; {beyond(bound.values)} in a row" in refusal(
            wide(one, 1, bound.values + 1)
        )
    if bound.all_values is not None:
        rows = bound.all_values // bound.values + 1
        assert f"in {rows} rows; {beyond(bound.all_values)}" in refusal(wide(one, rows, bound.values))
    if is_text(one):
        most, several = bound.size or PROMPT_BYTES, min(bound.size or 1, 1 << 14)
        row = [b"x" * several] * (most // several) if bound.size else [b"x" * most]
        fits, more = (
            texts(1, *row),
            texts(1, *row[:-1], row[-1] + b"x") if len(row) == 1 else texts(1, *row, b"x"),
        )
        assert beyond(most) not in refusal(fits)
        assert beyond(most) in refusal(more)
        if bound.all_size is not None:
            rows = bound.all_size // most + 1
            assert f"bytes in {rows} rows; {beyond(bound.all_size)}" in refusal(np.repeat(fits, rows, axis=0))


def test_the_parameters_of_a_request_are_bounded() -> None:
    most = FIELDS["parameters"].size
    assert most is not None
    for known in ({"timeout": 1}, {}):
        with pytest.raises(ValueError, match=beyond(most)):
            read_request_parameters(json.dumps({**known, "more": "x" * most}), 0)


@pytest.mark.parametrize(
    ("value", "count"),
    [([1, 2, 'a,,\\",,', "\\"], 4), ({"a,": {"b,,": [1, 2]}, "c": "\\\\"}, 3), ([], 1), ("a,b", 1)],
)
def test_commas_of_texts_are_no_values(value: Any, count: int) -> None:
    assert values(json.dumps(value).encode(), 1) == count


def test_no_bound_is_given_twice() -> None:
    """The second value would count for both."""
    names = re.findall(r"^(\w+) = ", Path(bounds.__file__).read_text(), re.MULTILINE)
    assert len(names) == len(set(names)) > 10
