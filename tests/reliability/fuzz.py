# SPDX-License-Identifier: Apache-2.0
"""Random requests to real servers: `make fuzz REQUESTS=100000`.

Each request is drawn from the seed and its number, and may be wrong in any way: shapes, types, values,
names, missing and further inputs, bytes that are not what they say. Every one should get a whole answer or an
error in plain words; requests that are right should get the same text as ever, and calls that the model
writes with a slip should be read as they are meant. `--first N --requests 1` repeats one.
"""

import argparse
import contextlib
import functools
import http.client
import itertools
import json
import math
import os
import random
import re
import struct
import sys
import tempfile
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)] + [str(Path(__file__).parents[1] / "server")]

from openai_server import OpenAiServer, events, model_with_template, openai_running, said  # noqa: E402
from running import NGRAM, Server, build_repository, running  # noqa: E402

from client.arguments import integer, positive  # noqa: E402
from flashinfer_backend.core.bounds import FIELDS  # noqa: E402
from flashinfer_backend.core.paths import resolve_model_dir  # noqa: E402
from flashinfer_backend.openai import requests as openai_requests  # noqa: E402
from flashinfer_backend.openai.formats.choice import make_reader  # noqa: E402
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, merged  # noqa: E402

TIMEOUT_S = 60.0  # an answer that takes longer has been forgotten
PROMPT = "Once upon a time"
EAGLE3 = ("speculative_method=eagle3", "draft_model=bundled", "max_draft_len=4")  # knobs
BOUNDED_AS = {  # inputs of the ensemble, by the name that its step knows
    "stop_words": "STOP_WORDS_DICT",
    "bad_words": "BAD_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
}
MODELS = ("ensemble", "preprocessing", "llm", "postprocessing")
# What an error must not show: Python's own words, and places of the machine.
LEAK = re.compile(
    r'Traceback|File "|line \d+, in |(?<![\w.])/(work|tmp|usr|root|home|opt|proc|var|dev|etc)/|'
    r"0x[0-9a-f]{6,}|<class|<[\w.]+ object|\barray\(|dtype|numpy|\bNone\b|\w+(Error|Exception)\b|\bnp\."
)

GUIDE = "(🙂|é|日本|ab){3,30}"  # characters of several tokens, which a text's end can cut

# Functions that the model calls, and values whose text has no mark of a call.
PARAMETERS: dict[str, Any] = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": found}}}
    for name, found in (("weather", PARAMETERS), ("now", {}))
]
CITIES = ["Ulm", "São Paulo", 'Pa"ris', "a\nb", "x < y", "</p", "{}", "\\", "null", "1"]

# What preprocessing's backend says to all requests of a batch when one of them lies about its texts' lengths.
NEIGHBOUR = "incomplete string data for inference input"
SIZES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2}
SIZES |= {"UINT32": 4, "INT32": 4, "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8}
TYPES = [*SIZES, "BYTES"]
FORMATS = {"BOOL": "?", "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "FP16": "e", "UINT32": "I"}
FORMATS |= {"INT32": "i", "FP32": "f", "UINT64": "Q", "INT64": "q", "FP64": "d"}

WORDS = [
    "a", "", " ", "Once upon a time", "the", "\x00", "\x7f\x1b[31m", "é" * 3, "日本語", "🙂🙂", "\u202e",
    "a\u0301",
    "</s>", "<s>", "<|endoftext|>", "%s%n{}{0}", "../../etc/passwd", "'; --", "\n\n", "x" * 500, "\ufffd",
    '{"type": "object"}', "[a-z]+", "(", "\ud800", "\ufeff", "root ::= x", "regex", "json", "json_schema",
    "ebnf_grammar", "\\",
]  # fmt: skip
SPECIAL_STOPS = ["<|begin_of_text|>", "<|end_of_text|>", "a<|end_of_text|>", "<tool_call>", " the"]
INTEGERS = [
    0, 1, 1, 2, 3, 5, -1, -2, 100, 255, 256, 2047, 2048, 65536,
    -(2**31), 2**31 - 1, 2**31, 2**63 - 1, 2**64,
]  # fmt: skip
FLOATS = [
    0.0, -0.0, 0.5, 0.9, 1.0, 1.0, 2.0, -1.0,
    1e-45, 1e-6, 3e38, 1e39, 1e308, math.nan, math.inf, -math.inf,
]  # fmt: skip


OTHER_PATHS = ["/v1/models/" + "x" * 99, "/v1/nothing", "//", "/v1/models/%00", "/v1/%2e%2e/x", "/?a"]
HEADERS = ["Authorization", "Accept", "Accept-Encoding", "Expect", "X-Request-Id", "Cookie"]
HEADER_VALUES = ["Bearer x", "\xff\xfe", "", "x" * 5000, "text/event-stream", "Bearer"]


@dataclass(frozen=True)
class Verdict:
    """What a request came to: a kind to be counted, and what is wrong with it, or nothing."""

    kind: str
    wrong: str = ""


def judge_words(message: str) -> str:
    """What is wrong with an error's text."""
    if len(message) < 8 or " " not in message:
        return f"an error without words: {message!r}"
    found = LEAK.search(message)
    return f"an error that shows {found[0]!r}: {message[:300]!r}" if found else ""


def judge_offsets(choice: dict[str, Any]) -> str:
    """What is wrong with the places of a choice's tokens in its text, the echoed prompt's among them."""
    offsets = (choice.get("logprobs") or {}).get("text_offset") or []
    rising = all(a <= b for a, b in itertools.pairwise([0, *offsets]))
    # A stop text is cut off the text, and not its tokens off their list.
    within = choice["finish_reason"] == "stop" or max(offsets, default=0) <= len(choice["text"])
    return "" if rising and within else f"text_offset {offsets} of the text {choice['text']!r}"


def judge_prompt(choice: dict[str, Any]) -> str:
    """What is wrong with what is told of a prompt's tokens by id, and in lists if it is echoed."""
    by_id = choice.get("prompt_logprobs") or [None]
    lists = (choice.get("logprobs") or {}).get("token_logprobs") or []
    echoed = lists if lists[:1] == [None] else []
    pairs = zip(by_id[1:], echoed[1:] or itertools.repeat(None), strict=False)
    for place, (told, value) in enumerate(pairs, 1):
        found = [(each["logprob"], each["rank"]) for each in told.values()]
        if any(log_prob > 1e-5 or rank < 1 for log_prob, rank in found):
            return f"token {place} of the prompt: {told}"
        if value is not None and value not in dict(found):
            return f"token {place} of the prompt: {value} in the list, {told} by id"
    return "" if not echoed or len(echoed) >= len(by_id) else f"{len(echoed)} of {len(by_id)} tokens"


def asked(port: int, verb: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, str]:
    """Status, content type and text of an answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.request(verb, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        return answer.status, str(answer.headers.get("content-type", "")), text


class Draw:
    """Values of one request. long: whether it may ask for as many tokens as fit."""

    def __init__(self, seed: int, number: int, long: bool) -> None:
        self.rng, self.long = random.Random(f"{seed} {number}"), long

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def integer(self) -> int:
        return self.rng.choice(INTEGERS) if self.chance(0.9) else self.rng.randrange(-(10**12), 10**12)

    def text(self) -> str:
        if self.chance(0.9):
            return self.rng.choice(WORDS)
        return "".join(chr(self.rng.randrange(1, 0xD7FF)) for _ in range(self.rng.randrange(40)))

    def plain_text(self) -> str:
        """Text that UTF-8 can say."""
        return self.text().encode(errors="replace").decode()

    def json(self, depth: int = 2) -> Any:
        """Anything that JSON can say, and NaN."""
        kind = self.rng.randrange(8 if depth else 6)
        if kind == 6:
            return [self.json(depth - 1) for _ in range(self.rng.randrange(4))]
        if kind == 7:
            return {self.text(): self.json(depth - 1) for _ in range(self.rng.randrange(3))}
        return [None, True, False, self.integer(), self.rng.choice(FLOATS), self.text()][kind]

    def beyond(self, name: str) -> Any:
        """More than a field may hold, or None where that takes long to send."""
        bound = FIELDS.get(name)
        if bound is None or bound.values > 1 << 16:
            return None
        if bound.size is not None and self.chance(0.5):
            return "x" * (bound.size + 1)
        return [self.text() if bound.of == "words" else 1] * (bound.values + 1)

    def right(self, datatype: str, name: str) -> Any:
        """A value of the type, likely a good one."""
        if name.lower() in ("max_tokens", "request_output_len"):
            return self.rng.choice([1, 2, 5, 2**31 - 1 if self.long else 8, 0 if self.chance(0.1) else 3])
        if name == "num_return_sequences":  # hundreds are a request like any other, and take their time
            return self.rng.choice([1, 1, 2, 3, 0, -1, 5000])
        if name == "stop":  # a request to stop another one has no answer
            return False
        if datatype == "BOOL":
            return self.chance(0.5)
        if datatype in ("FP16", "FP32", "FP64"):
            return self.rng.choice([0.0, 0.5, 0.9, 1.0, 2.0]) if self.chance(0.7) else self.rng.choice(FLOATS)
        if datatype in ("BYTES", "STRING"):
            return self.text()
        if self.chance(0.7):
            return self.rng.choice([0, 1, 2, 3, 5, 40, 300])
        return self.integer()

    def broken(self, body: bytes) -> bytes:
        """The bytes, cut or changed."""
        kind = self.rng.randrange(3)
        if kind == 0 or not body:
            return body[: self.rng.randrange(len(body) + 1)]
        if kind == 1:
            at = self.rng.randrange(len(body))
            return body[:at] + bytes([self.rng.randrange(256)]) + body[at + 1 :]
        return body + self.rng.choice([b"}", b",", b"\x00", body])


@dataclass(frozen=True)
class Input:
    """One input of a model, as its configuration says."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool


class TritonFuzz:
    """Requests to tritonserver's models, over HTTP and gRPC."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._port = int(server.url.rpartition(":")[2])
        self._local = threading.local()
        self.models = {name: self._inputs(name) for name in MODELS}
        self.expected = server.text(PROMPT, 12)

    def _inputs(self, model: str) -> list[Input]:
        _, _, config = asked(self._port, "GET", f"/v2/models/{model}/config", b"", {})
        result = []
        for tensor in json.loads(config)["input"]:
            kind = tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
            dims = tuple(int(size) for size in tensor["dims"])
            result.append(Input(tensor["name"], kind, dims, bool(tensor.get("optional"))))
        return result

    @property
    def _stub(self) -> Any:
        if not hasattr(self._local, "stub"):
            self._local.channel = grpc.insecure_channel(self.server.grpc)
            self._local.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._local.channel)
        return self._local.stub

    def control(self) -> Verdict:
        """A request that is right."""
        body = {"text_input": PROMPT, "max_tokens": 12, "exclude_input_in_output": True}
        status, answer = self.server.post(body)
        if NEIGHBOUR in answer.get("error", ""):
            return Verdict("control: failed with another request of its batch")
        text = answer.get("text_output") if status == 200 else answer
        return Verdict("control", "" if text == self.expected else f"control requests get {text!r}")

    def alive(self) -> set[int]:
        """The processes of the server."""
        return {process.pid for process in self.server.commands()}

    def send(self, draw: Draw) -> Verdict:
        """One request."""
        if draw.chance(0.02):
            return self._drafts(draw)
        model = draw.rng.choice(MODELS)
        kinds = ["generate", "generate_stream", "infer", "gRPC", "gRPC", "gRPC stream", "gRPC stream"]
        kind = draw.rng.choice(kinds)
        if kind.startswith("gRPC"):
            return self._grpc(draw, model, kind)
        make = self._infer_body if kind == "infer" else self._generate_body
        body = make(draw, model)
        headers = {"Content-Type": "application/json"}
        if draw.chance(0.05):
            body = draw.broken(body)
        if kind == "infer" and draw.chance(0.05):
            length = draw.rng.choice([0, 1, len(body), len(body) + 9, -1])
            headers["Inference-Header-Content-Length"] = str(length)
        status, _, text = asked(self._port, "POST", f"/v2/models/{model}/{kind}", body, headers)
        return self._judge_http(f"{kind} {model}", model, status, text)

    def _drafts(self, draw: Draw) -> Verdict:
        """A request that is right, whole and as a stream, with drafts and without."""
        rng = draw.rng
        body: dict[str, Any] = {"text_input": draw.plain_text()[:40] + PROMPT}
        body |= {"max_tokens": rng.choice([7, 20, 60]), "temperature": rng.choice([0.0, 0.8, 1.3, 2.0])}
        body |= {"seed": rng.randrange(1 << 60), "exclude_input_in_output": True}
        body |= {"return_num_output_tokens": True, "return_perf_metrics": True}
        more: list[dict[str, Any]] = [{"min_tokens": 7}, {"top_k": 30}, {"bad_words": [" the"]}]
        more += [{"guided_decoding_guide_type": "regex", "guided_decoding_guide": GUIDE}]
        more += [{"frequency_penalty": 0.7, "repetition_penalty": 1.2}]
        more += [{"embedding_bias_words": [" a"], "embedding_bias_weights": [2.0]}]
        for each in rng.sample([*more, {"end_id": 5}, {"return_log_probs": True}], rng.choice([0, 1, 2, 3])):
            body |= each
        text = self.server.post(body | {"speculative_decoding": False})[1].get("text_output", "")
        if text and draw.chance(0.7):
            body["stop_words"] = cut_anywhere(rng, text)
            body["exclude_stop_words_in_output"] = draw.chance(0.5)
        right: Any = None
        for on, stream in itertools.product((False, True), (False, True)):
            found = self.server.post(body | {"speculative_decoding": on, "stream": stream}, stream=stream)
            parts = found if stream else [found[1]]
            if any("error" in part for part in parts):
                return Verdict("drafts", f"{parts} for {body}")
            got = [sum(part["num_output_tokens"] for part in parts), parts[-1]["finish_reason"]]
            got.append("".join(part["text_output"] for part in parts))
            right = right or got
            drafted = parts[-1]["total_draft_tokens"], parts[-1]["total_accepted_draft_tokens"]
            if got != right or not 0 <= drafted[1] <= drafted[0] <= 999 * on:
                return Verdict("drafts", f"{got}, not {right}, for {body}, {on}, {stream}: {drafted}")
        return Verdict("drafts: the same")

    def _judge_http(self, name: str, model: str, status: int, text: str) -> Verdict:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")] or [text]
        try:
            answers = [json.loads(event) for event in events if event]
        except ValueError:
            if status == 200 and "infer" in name:
                return Verdict(f"{name}: whole")  # with binary data
            return Verdict(name, f"{status} {text[:300]!r} is not JSON")
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            return Verdict(f"{name}: error", next(filter(None, map(judge_words, errors)), ""))
        if status != 200:
            return Verdict(name, f"status {status} without an error: {text[:300]!r}")
        if not answers and model in ("ensemble", "llm"):
            return Verdict(name, "an answer without an event")
        if model in ("ensemble", "llm") and "generate" in name and "finish_reason" not in answers[-1]:
            return Verdict(name, f"an answer without its end: {text[-300:]!r}")
        return Verdict(f"{name}: whole")

    def _chosen(self, draw: Draw, model: str) -> list[Input]:
        inputs = self.models[model]
        likely = {"text_input", "max_tokens", "QUERY", "REQUEST_OUTPUT_LEN", "input_ids", "input_lengths"}
        likely |= {"request_output_len"}
        if model == "postprocessing":
            likely |= {"TOKENS_BATCH", "SEQUENCE_LENGTH"} if draw.chance(0.6) else {"CHUNK"}
        rare = 2.0 / len(inputs) if model != "postprocessing" else 0.05
        return [tensor for tensor in inputs if draw.chance(0.96 if tensor.name in likely else rare)]

    def _generate_body(self, draw: Draw, model: str) -> bytes:
        body: dict[str, Any] = {}
        for tensor in self._chosen(draw, model):
            if draw.chance(0.06):
                body[tensor.name] = draw.json()
            elif draw.chance(0.01) and (more := draw.beyond(BOUNDED_AS.get(tensor.name, tensor.name))):
                body[tensor.name] = more
            elif len(tensor.dims) > 1 or tensor.dims[0] != 1 or draw.chance(0.05):
                count = draw.rng.choice([0, 1, 1, 2, 3, 7])
                body[tensor.name] = [draw.right(tensor.datatype, tensor.name) for _ in range(count)]
            else:
                body[tensor.name] = draw.right(tensor.datatype, tensor.name)
        if draw.chance(0.06):
            body[draw.text()] = draw.json()
        if draw.chance(0.06):
            body["parameters"] = draw.json()
        if draw.chance(0.06):
            body["id"] = draw.json(0)
        return json.dumps(body, ensure_ascii=draw.chance(0.5)).encode(errors="surrogatepass")

    def _shape(self, draw: Draw, tensor: Input, batch: int, large: bool) -> list[int]:
        if draw.chance(0.04):
            # Left out (docs/security.md): shapes whose bytes overflow 64 bits end the server or a stub,
            # HTTP's infer takes memory for whatever a shape says, requests without rows are never answered.
            sizes = [draw.rng.choice([0, 1, 2, 3, -1, 5]) for _ in range(draw.rng.randrange(6))]
            if sizes and large:
                sizes[0] = draw.rng.choice([sizes[0], 2**31])
            return [sizes[0] or 1, *sizes[1:]] if sizes else []
        width = draw.rng.choice([0, 1, 1, 2, 4, 9])
        rows = batch if draw.chance(0.97) else draw.rng.choice([1, 2, 257])
        return [rows, *(width if size < 0 else size for size in tensor.dims)]

    def _values(self, draw: Draw, tensor: Input, count: int) -> list[Any]:
        if tensor.name == "input_lengths":
            return [draw.rng.choice([1, 1, 2, 4, 9])] * count
        if tensor.name == "CHUNK" and draw.chance(0.8):
            return [draw.rng.choice([0, 1, 2, 3, -1, 2**40, draw.integer() % 2**63]) for _ in range(count)]
        return [draw.right(tensor.datatype, tensor.name) for _ in range(count)]

    def _infer_body(self, draw: Draw, model: str) -> bytes:
        inputs: list[Any] = []
        batch = draw.rng.choice([1, 1, 1, 2, 3])
        for tensor in self._chosen(draw, model):
            shape = self._shape(draw, tensor, batch, large=False)
            count = max(0, math.prod(shape))
            wrong = draw.rng.choice([*TYPES, "STRING", "", "int32"])
            datatype = tensor.datatype if draw.chance(0.97) else wrong
            data: Any = self._values(draw, tensor, min(count, 600))
            if draw.chance(0.04):
                data = draw.json()
            made: dict[str, Any] = {"name": tensor.name, "datatype": datatype, "shape": shape, "data": data}
            if draw.chance(0.03):
                binary = {"shared_memory_region": draw.text()}, {"binary_data_size": draw.integer()}
                made["parameters"] = draw.rng.choice([draw.json(), *binary])
            if draw.chance(0.03):
                made[draw.rng.choice(["name", "datatype", "data"])] = draw.json()
            inputs.append(made)
        if draw.chance(0.04):
            inputs.append(draw.json())
        body: dict[str, Any] = {"inputs": inputs}
        if draw.chance(0.1):
            body["outputs"] = [{"name": draw.text(), "parameters": {"binary_data": draw.chance(0.5)}}]
        if draw.chance(0.05):
            body[draw.rng.choice(["outputs", "parameters", "id", "inputs"])] = draw.json()
        if draw.chance(0.04):
            body["parameters"] = {draw.rng.choice(["sequence_id", "priority", "timeout"]): draw.json(0)}
        return json.dumps(body, ensure_ascii=draw.chance(0.5)).encode(errors="surrogatepass")

    def _raw(self, draw: Draw, tensor: Input, datatype: str, count: int) -> bytes:
        values = self._values(draw, tensor, min(count, 600))
        if datatype == "BYTES":
            texts = [str(value).encode(errors="surrogatepass") for value in values]
            if draw.chance(0.1):
                texts = [b"\xff\xfe\x00\xc3", *texts[1:]]
            packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
            if draw.chance(0.03):
                packed = struct.pack("<I", draw.rng.choice([0, 5, 2**31, 2**32 - 1])) + packed[4:]
            return packed
        if datatype not in FORMATS:
            return bytes(2 * len(values))
        parts = []
        for value in values:
            number = value if isinstance(value, (int, float)) else len(str(value))
            try:
                parts.append(struct.pack("<" + FORMATS[datatype], number))
            except (struct.error, OverflowError, ValueError):
                parts.append(draw.rng.randbytes(SIZES[datatype]))
        return b"".join(parts)

    def _grpc(self, draw: Draw, model: str, kind: str) -> Verdict:
        name, rng = f"{kind} {model}", draw.rng
        request = service_pb2.ModelInferRequest(model_name=model)
        batch = rng.choice([1, 1, 1, 2, 3])
        chosen = self._chosen(draw, model)
        if model in ("ensemble", "llm") and draw.chance(0.1):
            chosen = [tensor for tensor in chosen if not tensor.name.startswith("lora_")]
            self._add_adapter(draw, request, batch)
        for tensor in chosen:
            shape = self._shape(draw, tensor, batch, large=True)
            datatype = tensor.datatype if draw.chance(0.97) else rng.choice([*TYPES, "STRING", ""])
            added = request.inputs.add(name=tensor.name, datatype=datatype, shape=shape)
            raw = self._raw(draw, tensor, datatype, max(0, math.prod(shape)))
            if draw.chance(0.03):
                raw = draw.broken(raw)
            if draw.chance(0.98):
                request.raw_input_contents.append(raw)
            if draw.chance(0.02):
                added.contents.int_contents.append(3)
            if draw.chance(0.02):
                added.parameters[rng.choice(["shared_memory_region", "x"])].string_param = draw.plain_text()
        if draw.chance(0.04):
            request.inputs.add(name=draw.plain_text(), datatype=rng.choice(TYPES), shape=[1, 1])
        if draw.chance(0.1):
            outputs = ["text_output", "finish_reason", "OUTPUT", "chunk", draw.plain_text()]
            for _ in range(rng.randrange(3)):
                request.outputs.add(name=rng.choice(outputs))
        if draw.chance(0.1):
            request.id = draw.plain_text()
        if draw.chance(0.04):
            place = rng.choice(["sequence_id", "priority", "timeout", "x"])
            request.parameters[place].int64_param = rng.choice([-1, 0, 1, 2**62])
        if draw.chance(0.02):
            request.model_version = rng.choice(["1", "2", "x"])
        try:
            if kind == "gRPC":
                answer = self._stub.ModelInfer(request, timeout=TIMEOUT_S)
                whole = bool(answer.model_name)
                return Verdict(f"{name}: whole", "" if whole else "an answer without a model's name")
            request.parameters["triton_enable_empty_final_response"].bool_param = True
            stream = self._stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S)
            return self._judge_stream(name, list(stream))
        except grpc.RpcError as error:
            status = error.code()
            if status in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                return Verdict(name, f"{status}: {error.details()!r}")
            return Verdict(f"{name}: error", judge_words(str(error.details())))

    @staticmethod
    def _add_adapter(draw: Draw, request: Any, batch: int) -> None:
        """A task id, known or not, and likely weights: of the bundled model's first layer, or nearly so."""
        rng = draw.rng
        rank = 2 if draw.chance(0.8) else rng.choice([0, 1, -1, 4000])
        width = rank * (128 + 256) if draw.chance(0.9) else rng.choice([0, 1, 767, 769])  # of q_proj
        module, layer = (1, 0) if draw.chance(0.8) else (rng.choice([0, 5, 17, -1]), rng.choice([1, 99, -1]))
        width = max(0, width)
        tensors: dict[str, tuple[str, list[int], bytes]] = {
            "lora_task_id": ("UINT64", [1], struct.pack("<Q", rng.choice([0, 1, 2, 3, 2**64 - 1]))),
            "lora_weights": ("FP16", [1, width], rng.choice([b"\0\0", b"\0\x3c", b"\0\x7c"]) * width),
            "lora_config": ("INT32", [1, 3], struct.pack("<3i", module, layer, rank)),
        }
        for name, (datatype, shape, raw) in tensors.items():
            if name == "lora_task_id" or draw.chance(0.7):
                request.inputs.add(name=name, datatype=datatype, shape=[batch, *shape])
                request.raw_input_contents.append(raw * batch)

    @staticmethod
    def _judge_stream(name: str, answers: list[Any]) -> Verdict:
        errors = [answer.error_message for answer in answers if answer.error_message]
        if errors:
            return Verdict(f"{name}: error", next(filter(None, map(judge_words, errors)), ""))
        finals = sum(a.infer_response.parameters["triton_final_response"].bool_param for a in answers)
        if finals != 1:
            return Verdict(name, f"a stream of {len(answers)} answers with {finals} ends")
        return Verdict(f"{name}: whole")


def cut_anywhere(rng: random.Random, text: str) -> list[str]:
    """Stop words that an answer has, which tokens and drafts cut anywhere."""
    ends = [rng.randrange(1, len(text) + 1) for _ in range(rng.choice([1, 2, 4]))]
    return [text[max(0, end - rng.randrange(1, 12)) : end] for end in ends]


Calls = list[tuple[str, dict[str, Any]]]  # names and arguments


def hermes_calls(draw: Draw, calls: Calls) -> str:
    """Calls as Hermes and Qwen 3 write them, some without their end."""
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    ends = ["" if draw.chance(0.3) else "\n</tool_call>" for _ in calls]
    return "\n".join(f"<tool_call>\n{text}{end}" for text, end in zip(texts, ends, strict=True))


def qwen_calls(draw: Draw, calls: Calls) -> str:
    """Calls as Qwen3-Coder writes them: some without <tool_call> or </parameter>, some in another's tag."""
    texts: list[str] = []
    end = ""
    for name, arguments in calls:
        if not (end and draw.chance(0.3)):  # else one more function in the same tag
            texts += [end, "" if draw.chance(0.4) else "<tool_call>\n"]
        texts.append(f"<function={name}>\n")
        for key, value in arguments.items():
            texts.append(f"<parameter={key}>\n{value}\n" + ("" if draw.chance(0.4) else "</parameter>\n"))
        texts.append("</function>\n")
        end = "</tool_call>\n"
    return "".join([*texts, end])


WRITERS = {"hermes": hermes_calls, "qwen3_coder": qwen_calls}


def wrong_calls(text: str, found: list[tuple[str, str]], calls: Calls, before: str) -> str:
    """What is wrong where an answer should be these calls behind the text `before`. found: names of its
    calls and their arguments in JSON."""
    try:
        read = [(name, json.loads(arguments)) for name, arguments in found]
    except ValueError:
        return f"arguments that are no JSON: {found}"
    return "" if (read, text) == (calls, before) else f"{text!r} {read} should be {calls} behind {before!r}"


def gathered(parts: Iterable[dict[str, Any]]) -> dict[int, tuple[list[Any], list[float]]]:
    """What an answer comes to, whole or in the chunks of its stream. By choice: its text, how it ended, ids,
    tokens of log probabilities; and these."""
    choices: dict[int, tuple[list[Any], list[float]]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        found, values = choices.setdefault(choice["index"], (["", [], [], []], []))
        message = choice.get("delta") or choice.get("message") or choice
        found[0] += message.get("text") or message.get("content") or ""
        found[1] += [choice["finish_reason"], choice.get("stop_reason")] if choice["finish_reason"] else []
        found[2] += choice.get("token_ids") or []
        told = choice.get("logprobs") or {}
        each = told.get("content") or []
        found[3] += told.get("tokens") or [token["token"] for token in each]
        values += [value or 0.0 for value in told.get("token_logprobs") or [e["logprob"] for e in each]]
    return choices


class OpenAiFuzz:
    """Requests to the OpenAI API. tool_format: of the server's calls."""

    ROUTES: typing.ClassVar[dict[str, type]] = {
        "/v1/chat/completions": openai_requests.ChatRequest,
        "/v1/completions": openai_requests.CompletionRequest,
        "/v1/responses": openai_requests.ResponsesRequest,
        "/v1/messages": openai_requests.MessagesRequest,
        "/v1/messages/count_tokens": openai_requests.CountTokensRequest,
        "/tokenize": openai_requests.TokenizeRequest,
        "/detokenize": openai_requests.DetokenizeRequest,
    }

    def __init__(self, server: OpenAiServer, tool_format: str) -> None:
        self.server, self._tool_format = server, tool_format
        self.expected = self._control_text()

    def _control_text(self) -> str:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        return str(self.server.call("/v1/completions", body)[2]["choices"][0]["text"])

    def control(self) -> Verdict:
        """A request that is right."""
        text = self._control_text()
        return Verdict("control", "" if text == self.expected else f"control requests get {text!r}")

    def alive(self) -> set[int]:
        """The processes of the server."""
        return {process.pid for process in [self.server.parent, *self.server.workers(), self.server.engine()]}

    def send(self, draw: Draw) -> Verdict:
        """One request."""
        rng = draw.rng
        if draw.chance(0.03):
            return self._calls(draw)
        if draw.chance(0.02):
            return self._drafts(draw)
        path = rng.choice(list(self.ROUTES))
        text = json.dumps(self._body(draw, path), ensure_ascii=draw.chance(0.5))
        body = text.encode(errors="surrogatepass")
        if draw.chance(0.05):
            body = draw.broken(body)
        verb = "POST" if draw.chance(0.97) else rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
        if draw.chance(0.03):
            path = rng.choice(OTHER_PATHS)
        kinds = ["application/json"] * 9 + ["text/plain", "", "multipart/form-data"]
        headers = {"Content-Type": rng.choice(kinds)}
        if draw.chance(0.05):
            headers[rng.choice(HEADERS)] = rng.choice(HEADER_VALUES)
        return self._judge(path, *asked(self.server.port, verb, path, body, headers))

    def _calls(self, draw: Draw) -> Verdict:
        """Calls with slips that can be understood in one way only. The model is made to write them; or, as a
        guided answer has no reasoning, a reader is given some that are in reasoning that is not closed."""
        rng = draw.rng
        calls: Calls = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            given = {"city": rng.choice(CITIES), "days": rng.randrange(-9, 9)}
            names = rng.sample(list(given), rng.randrange(3))
            calls.append(("weather", {name: given[name] for name in names}) if names else ("now", {}))
        before = rng.choice(["", "I look."])
        text = f"{before}\n{WRITERS[self._tool_format](draw, calls)}"
        if draw.chance(0.3):
            return self._read_calls(draw, calls, f"<think>{text}", before)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": PROMPT}],
            "tools": TOOLS,
            "structured_outputs": {"grammar": f"root ::= {json.dumps(text)}"},
        }
        status, _, answer = self.server.call("/v1/chat/completions", body)
        if status != 200:
            return Verdict("calls", f"{status} {answer} for {text!r}")
        _, _, stream = self.server.call("/v1/chat/completions", body | {"stream": True})
        wrongs = (wrong_calls(*said(each)[1:3], calls, before) for each in ([answer], events(stream)))
        wrong = next(filter(None, wrongs), "")
        return Verdict("calls: whole", wrong and f"{wrong}, for {text!r}")

    def _drafts(self, draw: Draw) -> Verdict:
        """A request that is right, whole and as a stream, with drafts and without."""
        rng = draw.rng
        path = rng.choice(["/v1/completions", "/v1/chat/completions"])
        body: dict[str, Any] = {"max_tokens": rng.choice([1, 9, 40, 90]), "n": rng.choice([1, 1, 1, 3])}
        # Hot answers have characters that several tokens spell, and some that are cut off.
        body |= {"temperature": rng.choice([0, 0.8, 1.3, 2]), "seed": rng.randrange(1 << 60)}
        if path.endswith("chat/completions"):
            body["messages"] = [{"role": "user", "content": draw.plain_text() + PROMPT}]
            more: list[dict[str, Any]] = [{"logprobs": True, "top_logprobs": 2}]
        else:
            body["prompt"] = [draw.plain_text() + PROMPT, PROMPT][: rng.choice([1, 1, 2])]
            more = [{"logprobs": 1}]
        more += [{"structured_outputs": {"regex": GUIDE}}, {"return_token_ids": True}]
        more += [{"frequency_penalty": 0.7, "repetition_penalty": 1.2}, {"min_tokens": 7}, {"top_k": 30}]
        more += [{"bad_words": [" the"]}, {"logit_bias": {"300": 4}}, {"ignore_eos": True}]
        for each in rng.sample(more, rng.choice([0, 1, 2, 3])):
            body |= each
        body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 0))
        found = self.server.call(path, body | {"speculative_decoding": False})
        if found[0] != 200:
            return Verdict("drafts", f"{found[0]} {found[2]} for {body}")
        text = gathered([found[2]])[0][0][0]
        if text and draw.chance(0.6):
            body["stop"] = cut_anywhere(rng, text)
            body["include_stop_str_in_output"] = draw.chance(0.5)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        right: Any = None
        for on, more_asked in itertools.product((False, True), ({}, stream)):
            asked_for = body | more_asked | {"speculative_decoding": on}
            found = self.server.call(path, asked_for)
            if found[0] != 200:
                return Verdict("drafts", f"{found[0]} {found[2]} for {asked_for}")
            parts = events(found[2]) if more_asked else [found[2]]
            usage = parts[-1]["usage"]
            drafted = usage.get("completion_tokens_details", {}).get("accepted_prediction_tokens") is not None
            counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
            choices = gathered(parts)
            got = counts, {index: said_ for index, (said_, _) in choices.items()}
            values = [value for _, (_, each) in sorted(choices.items()) for value in each]
            right = right or (got, values)
            near = len(values) == len(right[1]) and all(
                math.isclose(*pair, abs_tol=0.01) for pair in zip(values, right[1], strict=True)
            )
            if got != right[0] or not near or drafted > on:
                return Verdict("drafts", f"{got}, not {right[0]}, for {asked_for}: {usage}")
        return Verdict("drafts: the same")

    def _read_calls(self, draw: Draw, calls: Calls, text: str, before: str) -> Verdict:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        for _ in range(3):
            reader = make_reader(self._tool_format, "think", schemas, inside=False)
            cuts = [0, *sorted(draw.rng.choices(range(len(text)), k=draw.rng.randrange(9))), len(text)]
            found = [event for a, b in itertools.pairwise(cuts) for event in reader.feed(text[a:b])]
            content, read = "", []
            for kind, words, *_ in merged(found + reader.finish()):
                if kind == CALL:
                    read.append((words, ""))
                elif kind == ARGUMENTS:
                    read[-1] = (read[-1][0], words)
                else:
                    content += words
            if wrong := wrong_calls(content, read, calls, before):
                return Verdict("calls in reasoning", f"{wrong}, for {text!r} cut at {cuts}")
        return Verdict("calls in reasoning: whole")

    def _body(self, draw: Draw, path: str) -> Any:
        if draw.chance(0.02):
            return draw.json()
        rng, kind = draw.rng, self.ROUTES[path]
        hints = typing.get_type_hints(kind)
        careful = draw.chance(0.5)  # or one value in five is any JSON: few such requests are answered
        body: dict[str, Any] = {"stream": True} if "stream" in hints and draw.chance(0.3) else {}
        for field in msgspec.structs.fields(kind):
            if field.required or draw.chance(2.5 / len(hints)):
                right = careful or draw.chance(0.8)
                body[field.name] = self._value(draw, field.name, hints[field.name]) if right else draw.json()
        if draw.chance(0.03):
            name = rng.choice(list(hints))
            body[name] = draw.beyond(name) or body.get(name)
        if "max_tokens" in hints or "max_output_tokens" in hints:
            name = "max_output_tokens" if path.endswith("responses") else "max_tokens"
            body.setdefault(name, rng.choice([1, 2, 5, 9]))
        if path == "/v1/completions" and draw.chance(0.1):
            body |= {"echo": True, "logprobs": rng.choice([0, 1, 5]), "stream": False}
            body |= {"prompt_logprobs": rng.choice([None, 0, 3])}
        if path == "/tokenize" and "messages" not in body:
            body.setdefault("prompt", draw.text())
        if draw.chance(0.03):
            body[draw.text()] = draw.json()
        return body

    def _value(self, draw: Draw, name: str, hint: Any) -> Any:
        """A value that the field could have."""
        rng = draw.rng
        if name in ("messages", "input"):
            return draw.text() if name == "input" and draw.chance(0.5) else self._messages(draw)
        if name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
            return rng.choice([1, 1, 2, 3, 8, 0, 200 if draw.long else 4])
        if name == "prompt":
            return rng.choice([draw.text(), [draw.text(), "b"], [5, 6, 7], [[5, 6], [7]], [draw.integer()]])
        if name == "tokens":
            return [draw.rng.choice([5, 60, 2047, draw.integer()]) for _ in range(rng.randrange(5))]
        if name == "model":
            return rng.choice(["tiny-chat", "tiny-chat", "gpt-4", draw.text()])
        if name in ("stop", "stop_token_ids"):  # special tokens among them, which are not in the text
            stops = [*SPECIAL_STOPS, draw.text()] if name == "stop" else [0, 1, 3, draw.integer()]
            return rng.sample(stops, 2) if draw.chance(0.7) else rng.choice(stops)
        if name == "tools":
            function = {"name": rng.choice(["f", draw.text()]), "parameters": draw.json()}
            return [{"type": "function", "function": function if draw.chance(0.8) else draw.json()}]
        if name == "tool_choice":
            forms = {"function": {"name": "f"}}, {"name": "f"}, {draw.text(): draw.json()}
            return rng.choice(["auto", "required", {"type": "function", **rng.choice(forms)}, draw.json()])
        if name == "include":
            return [rng.choice(["message.output_text.logprobs", "reasoning.encrypted_content", draw.text()])]
        words = str(hint)
        if "bool" in words:
            return draw.chance(0.5)
        if "float" in words:
            value = rng.choice([0.0, 0.5, 0.9, rng.choice(FLOATS)])
            return {"5": value} if "dict" in words else value
        if "int" in words:
            value = rng.choice([0, 1, 2, 5, draw.integer()])
            return [value] if "list" in words else value
        if "Any" in words or "Struct" in words or "Format" in words:
            guides = {"type": "json_object"}, {"regex": "[ab]+"}, {"choice": ["x", "yy"]}
            return rng.choice([draw.json(), *guides])
        return draw.text()

    def _messages(self, draw: Draw) -> list[Any]:
        made = []
        for _ in range(draw.rng.choice([1, 1, 2, 3])):
            role = draw.rng.choice(["user", "user", "system", "assistant", "tool", "x"])
            content = draw.rng.choice([draw.text(), draw.text(), [{"type": "text", "text": draw.text()}]])
            message: dict[str, Any] = {"role": role, "content": content}
            if draw.chance(0.1):
                name = draw.rng.choice(["content", "role", "tool_calls", "name", "tool_call_id", "x"])
                message[name] = draw.json()
            made.append(message if draw.chance(0.97) else draw.json())
        return made

    @staticmethod
    def _judge(path: str, status: int, kind: str, text: str) -> Verdict:
        name = path if path in OpenAiFuzz.ROUTES else "other paths"
        if status == 500:
            return Verdict(name, f"status 500: {text[:300]!r}")
        if kind.startswith("text/event-stream"):
            ends = "response.completed", "response.incomplete", "message_stop"
            ended = text.rstrip().endswith("[DONE]") or any(end in text for end in ends)
            events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            errors = [event["error"] for event in map(json.loads, events) if event.get("error")]
            wrong = next(filter(None, (judge_words(str(error.get("message"))) for error in errors)), "")
            unended = "" if ended or errors else f"no end: {text[-200:]!r}"
            return Verdict(f"{name}: stream", wrong or unended)
        if status >= 400:
            try:
                error = json.loads(text)["error"]
                message = error["message"]
            except (ValueError, KeyError, TypeError):
                return Verdict(name, f"status {status}: {text[:300]!r} is not an error in OpenAI's form")
            return Verdict(f"{name}: error", judge_words(message))
        wrong = "" if text or path == "/?a" else "an empty answer"
        if path == "/v1/completions" and status == 200:
            choices = json.loads(text)["choices"]
            found = [judge(choice) for choice in choices for judge in (judge_offsets, judge_prompt)]
            wrong = next(filter(None, found), wrong)
        return Verdict(f"{name}: whole", wrong)


@dataclass
class Findings:
    """Counts by kind, and what was wrong with which request."""

    counts: Counter[str]
    wrong: list[str]


def fuzz(
    target: TritonFuzz | OpenAiFuzz,
    requests: int,
    seed: int,
    first: int = 0,
    threads: int = 6,
    long: bool = False,
    minutes: float = math.inf,
) -> Findings:
    """Sends so many requests, from the number `first` on, or as many as go out in so many minutes; beside
    every 25th goes a right one."""
    until = time.monotonic() + 60 * minutes
    findings, lock, numbers = Findings(Counter(), []), threading.Lock(), iter(range(first, first + requests))
    before = target.alive()

    def guarded(send: Callable[[], Verdict], name: str) -> None:
        try:
            verdict = send()
        except Exception as error:
            verdict = Verdict("cut or silent", f"{type(error).__name__}: {error}")
        with lock:
            findings.counts[verdict.kind] += 1
            if verdict.wrong:
                findings.wrong.append(f"{name}: {verdict.kind}: {verdict.wrong}")
                print(findings.wrong[-1], file=sys.stderr, flush=True)

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None or len(findings.wrong) > 200 or time.monotonic() > until:
                return
            draw = Draw(seed, number, long)
            guarded(functools.partial(target.send, draw), f"--seed {seed} --first {number}")
            if number % 25 == 0:
                guarded(target.control, f"control request at {number}")

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if gone := before - target.alive():
        findings.wrong.append(f"processes that ended: {sorted(gone)}")
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Random requests to real servers.")
    parser.add_argument("--requests", type=integer(1), default=100_000, help="to each")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--first", type=integer(0), default=0, help="number of the first request")
    parser.add_argument("--threads", type=integer(1), default=6)
    parser.add_argument("--minutes", type=positive, default=math.inf, help="at most, for each")
    parser.add_argument("--api", choices=["triton", "openai", "both"], default="both")
    parser.add_argument("--tool-format", choices=sorted(WRITERS), default="qwen3_coder")
    options = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder, targets, bundled = Path(made), {}, resolve_model_dir("bundled")
        if options.api != "openai":
            repository = build_repository(
                folder, "max_seq_len=128", "check_invariants=true", "max_loras=2", *NGRAM, model=bundled
            )
            server = stack.enter_context(running(repository, folder, options=["--restarts", "0"]))
            targets["tritonserver"] = TritonFuzz(server)
        if options.api != "triton":
            tool_format = ["--tool-format", options.tool_format]
            model = model_with_template(folder, bundled)
            api = stack.enter_context(openai_running(model, folder, *EAGLE3, *tool_format))
            targets["the OpenAI API"] = OpenAiFuzz(api, options.tool_format)
        for name, target in targets.items():
            began = time.monotonic()
            numbers = options.requests, options.seed, options.first, options.threads
            findings = fuzz(target, *numbers, long=True, minutes=options.minutes)
            print(f"{name}: seed {options.seed}, {time.monotonic() - began:.0f} s")
            print(*(f"{count:>8} {kind}" for kind, count in sorted(findings.counts.items())), sep="\n")
            wrong += findings.wrong
            log = target.server.log
            lines = log.splitlines()
            for at, line in enumerate(lines):
                if line.startswith("serve: ") and "starting" in line:
                    before = "\n".join(lines[max(0, at - 5) : at + 1])
                    wrong.append(f"the server was started again:\n{before}")
            wrong += [f"{name} logs a traceback" for _ in range("Traceback" in log)]
            if "Traceback" in log:
                print(log[max(0, log.index("Traceback") - 500) :][:3000], file=sys.stderr)
    print(*wrong, f"{len(wrong)} findings", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
