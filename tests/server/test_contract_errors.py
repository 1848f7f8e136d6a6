# SPDX-License-Identifier: Apache-2.0
"""What each kind of error looks like through each endpoint: its status, and the text clients look for. No
other request suffers from it.

HTTP generate and generate_stream of release 24.10 answer 400 to any error of a model; the other endpoints
keep its status.
"""

import json
import re
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from asking import inputs, int32, stream, strings
from contract import LLM, PROMPT, TEXT, events, flag, generate, ids_request, number, text_of
from running import Server
from test_contract_unary import Unary
from tritonclient.utils import InferenceServerException

Values = dict[str, np.ndarray]
GOOD: Values = {"text_input": strings(PROMPT), "max_tokens": int32(4)}
INTERNAL = {
    "gRPC infer": "StatusCode.INTERNAL",
    "HTTP infer": "500",
    "gRPC stream": "None",  # an error in a response of the stream has no status
    "generate": "400",
    "generate_stream": "400",
}
INVALID_ARG = {**INTERNAL, "gRPC infer": "StatusCode.INVALID_ARGUMENT", "HTTP infer": "400"}
each_endpoint = pytest.mark.parametrize("endpoint", INTERNAL)


def as_json(values: Values) -> bytes:
    """The same request as HTTP generate takes it: scalars and flat lists."""
    plain = {name: [v.decode() if isinstance(v, bytes) else v for v in a.flat] for name, a in values.items()}
    body = {name: row[0] if len(row) == 1 else row for name, row in plain.items()}
    return json.dumps(body, default=lambda value: value.item()).encode()


class Endpoints:
    """Sends a request that should fail; the decoupled server answers all but infer."""

    def __init__(self, contract: Server, unary: Server) -> None:
        self._contract, self._unary = contract, unary

    def error(self, endpoint: str, values: Values, model: str = "ensemble") -> tuple[str, str]:
        """Status and message."""
        kind, _, verb = endpoint.partition(" ")
        if verb == "infer":
            client = Unary(self._unary, kind.lower())
            try:
                with pytest.raises(InferenceServerException) as raised:
                    client(model, values)
            finally:
                client.close()
            return str(raised.value.status()), str(raised.value.message())
        if verb == "stream":
            ((_, error),) = stream(self._contract, model, [("", values)])
            assert error is not None
            return str(error.status()), str(error.message())
        status, _, text = self._contract.raw(as_json(values), model, endpoint)
        return str(status), json.loads(text.removeprefix("data: "))["error"]


@pytest.fixture
def endpoints(contract: Server, unary: Server) -> Endpoints:
    return Endpoints(contract, unary)


MISTAKES: dict[str, tuple[Values, str]] = {
    "sampling value": ({"temperature": number(-1.0)}, "temperature is -1; it should be at least 0"),
    "of preprocessing": (
        {"embedding_bias_words": strings("a")},
        "embedding_bias_words and embedding_bias_weights belong together",
    ),
}


@each_endpoint
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_found_by_a_model(endpoints: Endpoints, endpoint: str, mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    status, text = endpoints.error(endpoint, {**GOOD, **changes})
    assert status == INTERNAL[endpoint]
    assert text.startswith(f"in ensemble 'ensemble', {message}")


def test_mistakes_found_by_each_model_when_called_directly(unary: Server) -> None:
    malformed = np.array([[[5, 6], [3, 2]]], np.int32)
    requests: list[tuple[str, Values, str]] = [
        (
            "preprocessing",
            {"QUERY": strings("a"), "REQUEST_OUTPUT_LEN": int32(1), "EMBEDDING_BIAS_WORDS": strings("a")},
            "belong together",
        ),
        (LLM, ids_request([5], 2, bad_words_list=malformed), "Sparse list must not"),
        (
            "postprocessing",
            {"TOKENS_BATCH": int32(5)[None], "SEQUENCE_LENGTH": int32(2)},
            "SEQUENCE_LENGTH is 2",
        ),
    ]
    for protocol, expected in (("grpc", INTERNAL["gRPC infer"]), ("http", INTERNAL["HTTP infer"])):
        client = Unary(unary, protocol)
        for model, values, message in requests:
            with pytest.raises(InferenceServerException, match=message) as raised:
                client(model, values)
            assert raised.value.status() == expected, model
        client.close()


@each_endpoint
@pytest.mark.parametrize("others", [(), ("temperature",), ("stop_words", "seed")])
@pytest.mark.parametrize("missing", ["text_input", "max_tokens"])
def test_a_required_input_that_is_missing(
    endpoints: Endpoints, endpoint: str, missing: str, others: tuple[str, ...]
) -> None:
    """Also beside optional ones, of which the server counts as many as are due."""
    values = {
        "text_input": strings("a"),
        "max_tokens": int32(4),
        "temperature": np.array([[0.5]], np.float32),
        "stop_words": strings("x"),
        "seed": np.array([[3]], np.uint64),
    }
    given = {"text_input", "max_tokens", *others} - {missing}
    status, text = endpoints.error(endpoint, {name: values[name] for name in given})
    assert status == INVALID_ARG[endpoint]
    assert f"({missing}) is missing; it should be" in text


@each_endpoint
def test_a_batch_larger_than_max_batch_size(endpoints: Endpoints, endpoint: str) -> None:
    rows = {"text_input": strings(*["a"] * 257), "max_tokens": int32(*[1] * 257)}
    status, text = endpoints.error(endpoint, rows)
    assert status == INVALID_ARG[endpoint]
    assert "inference request batch-size must be <= 256 for 'ensemble'" in text


@each_endpoint
def test_inputs_of_different_batch_sizes(endpoints: Endpoints, endpoint: str) -> None:
    status, text = endpoints.error(endpoint, {**GOOD, "max_tokens": int32(4, 4)})
    assert status == INVALID_ARG[endpoint]
    assert "batch size does not match other inputs for 'ensemble'" in text


TENSORS: dict[str, tuple[Values, str]] = {
    "unknown": ({"nothing": int32(4)}, "unexpected inference input 'nothing' for model 'ensemble'"),
    "type": (
        {"max_tokens": number(4.0)},
        "inference input 'max_tokens' data-type is 'FP32', but model 'ensemble' expects 'INT32'",
    ),
    "shape": (
        {"max_tokens": np.array([[1, 2]], np.int32)},
        "unexpected shape for input 'max_tokens' for model 'ensemble'. Expected [-1,1], got [1,2]",
    ),
}


@pytest.mark.parametrize("endpoint", ["gRPC infer", "HTTP infer", "gRPC stream"])
@pytest.mark.parametrize("mistake", TENSORS)
def test_tensors_that_are_not_as_declared(endpoints: Endpoints, endpoint: str, mistake: str) -> None:
    changes, message = TENSORS[mistake]
    status, text = endpoints.error(endpoint, {**GOOD, **changes})
    assert status == INVALID_ARG[endpoint] and message in text


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"timeout": -1}, "timeout is -1; it should be the microseconds"),
    ({"timeout": "soon"}, 'timeout is "soon"'),
    ({"timeout": 1.5}, "timeout is 1.5"),
    ({"timeout": True}, "timeout is true"),
    ({"priority": 10}, "priority is 10; it should be an integer in 1..9"),
    ({"queue_priority": "high"}, 'queue_priority is "high"'),
    ({"speculative_decoding": "off"}, 'speculative_decoding is "off"; it should be true or false'),
    ({"priority": 1, "queue_priority": 2}, "two names of one value"),
]


def test_mistakes_in_parameters_are_named_while_others_go_on(contract: Server) -> None:
    expected = generate(contract, 64)[TEXT]
    found: list[str] = []
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            found.append(text_of(events(contract, 64)))

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for changes, message in PARAMETERS:
            asked = {"text_input": PROMPT, "max_tokens": 4, **changes}
            status, answer = contract.post(asked)
            assert status == 400, (changes, answer)  # whatever the model's own status is
            assert message in answer["error"], changes
            # Streaming, the status may have been sent by then.
            assert message in str(contract.post(asked | {"stream": True}, stream=True)), changes
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert set(found) == {expected}


def test_an_error_leaves_the_grpc_stream_usable(contract: Server) -> None:
    bad = {**GOOD, "max_tokens": int32(0)}
    answers = stream(contract, "ensemble", [("1", GOOD), ("2", bad), ("3", GOOD)])
    assert sum(error is not None for _, error in answers) == 1
    texts = [r.as_numpy(TEXT) for r, error in answers if error is None]
    assert sum(text is not None for text in texts) == 2


def test_an_unknown_model(endpoints: Endpoints, contract: Server) -> None:
    message = "Request for unknown model: 'nothing' is not found"
    assert endpoints.error("gRPC infer", GOOD, "nothing") == ("StatusCode.NOT_FOUND", message)
    for endpoint in ("HTTP infer", "generate", "generate_stream"):
        assert endpoints.error(endpoint, GOOD, "nothing") == ("404", message)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize("body", [b"{", b"", b"text", b"[]", b'{"text_input": "a", "max_tokens": "four"}'])
def test_json_that_cannot_be_read(contract: Server, verb: str, body: bytes) -> None:
    """Release 24.10 calls that its own failure (500), other releases the client's (400)."""
    status, _, text = contract.raw(body, verb=verb)
    assert status in (400, 500)
    message = json.loads(text)["error"]
    assert re.search("failed to parse the request JSON buffer|non-object|Unable to parse", message)


def test_unary_calls_of_a_decoupled_model(contract: Server) -> None:
    message = "doesn't support models with decoupled transaction policy"
    with grpcclient.InferenceServerClient(contract.grpc) as client:
        with pytest.raises(InferenceServerException, match=message) as raised:
            client.infer("ensemble", inputs(GOOD))
        assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    http = Unary(contract, "http")
    with pytest.raises(InferenceServerException, match=message) as raised:
        http("ensemble", GOOD)
    assert raised.value.status() == "501"
    http.close()


@pytest.mark.parametrize("endpoint", ["gRPC infer", "HTTP infer"])
def test_several_answers_without_decoupled_mode(endpoints: Endpoints, unary: Server, endpoint: str) -> None:
    message = "in ensemble 'ensemble', Streaming is only supported if model is deployed using decoupled mode."
    assert endpoints.error(endpoint, {**GOOD, "stream": flag(True)}) == (INTERNAL[endpoint], message)
    two = {"text_input": strings("a", "b"), "max_tokens": int32(4, 4)}
    assert "batch size greater than 1" in endpoints.error(endpoint, two)[1]
    for verb in ("generate", "generate_stream"):
        status, _, text = unary.raw(as_json({**GOOD, "stream": flag(True)}), verb=verb)
        assert (status, json.loads(text.removeprefix("data: "))["error"]) == (400, message)
