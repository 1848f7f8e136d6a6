# SPDX-License-Identifier: Apache-2.0
"""Requests of the tests of whole servers, as tensors of gRPC."""

import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from running import Server
from tritonclient.utils import np_to_triton_dtype

PROMPT = "Once upon a time"
TIMEOUT_S = 120


def inputs(values: dict[str, np.ndarray]) -> list[grpcclient.InferInput]:
    result = []
    for name, value in values.items():
        result.append(grpcclient.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype)))
        result[-1].set_data_from_numpy(value)
    return result


def stream(server: Server, model: str, requests: list[tuple[str, dict[str, np.ndarray]]]) -> list[Any]:
    """(result, error) pairs of ModelStreamInfer, until each request's final response."""
    answers: queue.Queue[Any] = queue.Queue()
    found, final = [], 0
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for request_id, values in requests:
            client.async_stream_infer(
                model, inputs(values), request_id=request_id, enable_empty_final_response=True
            )
        while final < len(requests):
            result, error = answers.get(timeout=TIMEOUT_S)
            found.append((result, error))
            final += error is not None or result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    return found


def stop_request() -> dict[str, np.ndarray]:
    """Stops the request with the same id."""
    return {
        **{name: int32(0) for name in ("input_ids", "input_lengths", "request_output_len")},
        "stop": np.array([[True]]),
    }


def strings(*rows: str) -> np.ndarray:
    return np.array([[row.encode()] for row in rows], np.object_)


def int32(*rows: int) -> np.ndarray:
    return np.array([[row] for row in rows], np.int32)
