# SPDX-License-Identifier: Apache-2.0
"""The gRPC form of a request to Triton's ensemble: serialised before the clock starts, read after it stops,
so that a worker only moves bytes meanwhile. Needs tritonclient[grpc], imported where it is first used."""

from typing import Any

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
UNBOUNDED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
METADATA_SECONDS = 30.0
# Triton's type -> numpy's; BYTES is apart.
TYPES = {
    "BOOL": "bool", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "UINT8": "uint8",
    "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "FP16": "float16", "FP32": "float32",
    "FP64": "float64",
}  # fmt: skip


def input_types(address: str, model: str) -> dict[str, str]:
    """Input name -> Triton type, as the server at host:port tells. Raises ConnectionError where it does
    not."""
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(address) as client:
        try:
            found = client.get_model_metadata(model, client_timeout=METADATA_SECONDS)
        except triton.InferenceServerException as error:
            raise ConnectionError(f"{address}: the inputs of model {model!r} are not told: {error}") from None
    return {each.name: each.datatype for each in found.inputs}


def request_message(model: str, body: dict[str, Any], types: dict[str, str]) -> bytes:
    """A serialised ModelInferRequest of one row. body: input name -> value or list of values, as the JSON of
    generate_stream holds them. Raises ValueError for an input that the model has not or another kind of
    value."""
    import numpy as np
    import tritonclient.grpc as triton
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in body.items():
        if name not in types:
            raise ValueError(f"model {model!r} has no input {name!r}; it has {', '.join(sorted(types))}")
        values = value if isinstance(value, list) else [value]
        try:
            if types[name] == "BYTES":
                array = np.array([[str(v).encode() for v in values]], dtype=object)
            else:
                kind = np.dtype(TYPES[types[name]])
                if kind.kind in "iu":
                    span = range(np.iinfo(kind).min, np.iinfo(kind).max + 1)
                    if not all(isinstance(v, int) and v in span for v in values):
                        raise ValueError
                array = np.array([values], kind)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"input {name!r} is of type {types[name]}, {value!r} is not") from None
        tensor = triton.InferInput(name, list(array.shape), types[name])
        tensor.set_data_from_numpy(array)
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    return bytes(request.SerializeToString())


def read_response(data: bytes) -> tuple[dict[str, Any] | None, bool]:
    """(the fields of a ModelStreamInferResponse as an event of generate_stream has them, whether it is the
    final response); no event for a response without outputs. Outputs that the client has no use for are left
    out. Raises ValueError for what is no such response."""
    import numpy as np
    from google.protobuf.message import DecodeError
    from tritonclient.grpc import service_pb2

    try:
        message = service_pb2.ModelStreamInferResponse.FromString(data)
    except DecodeError:
        raise ValueError(f"message is no ModelStreamInferResponse: {data[:200]!r}") from None
    if message.error_message:
        return {"error": message.error_message}, True
    response = message.infer_response
    final = response.parameters["triton_final_response"].bool_param
    if not response.outputs:
        return None, final
    event: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name in ("text_output", "finish_reason"):
            event[output.name] = "\n".join(_strings(raw))
        elif output.name in ("num_output_tokens", "total_accepted_draft_tokens"):
            event[output.name] = int(np.frombuffer(raw, np.int32).item())
    return event, final


def _strings(raw: bytes) -> list[str]:
    """Each string stands after its length, four bytes."""
    found, at = [], 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        found.append(raw[at + 4 : at + 4 + length].decode(errors="replace"))
        at += 4 + length
    return found


def error_of(error: Any) -> str:
    """One line of a grpc.RpcError."""
    details = error.details() or ""
    return f"gRPC {error.code().name}: {str(details)[:500]}"
