# SPDX-License-Identifier: Apache-2.0
"""Generates text from a running server and prints it as it arrives.

python -m client generate "The quick brown fox" --max-tokens 64
python -m client generate --grpc --url localhost:8001 --temperature 0.8 --seed 7 "Once upon a time"
echo "a long prompt" | python -m client generate -
"""

from __future__ import annotations

import argparse
import contextlib
import io
import queue
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

from client.arguments import INT32, UINT64, argument_parser, finite, http_url, integer, seconds
from client.events import NOTHING_LISTENS, ServerError, post_events

# Inputs of the ensemble by the options' names: Triton's type and the option's help.
OPTIONS = {
    "min_tokens": ("INT32", "fewest tokens of the answer"),
    "temperature": (
        "FP32", "of sampling; 0: greedy (default: greedy, unless --top-k, --top-p or --seed ask for sampling)"
    ),
    "top_k": ("INT32", "sample from the N likeliest tokens"),
    "top_p": ("FP32", "sample from the likeliest tokens that together have this probability"),
    "seed": ("UINT64", "of sampling; the same one gives the same tokens"),
    "repetition_penalty": ("FP32", "over 1: fewer repetitions (default: 1)"),
    "presence_penalty": ("FP32", "over 0: fewer tokens that were there before (default: 0)"),
    "frequency_penalty": ("FP32", "the same, counting how often they were (default: 0)"),
}  # fmt: skip
TYPES = {"INT32": (integer(*INT32), "N"), "UINT64": (integer(*UINT64), "N"), "FP32": (finite, "X")}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argument_parser("client generate", "Generate text, streamed.", "[options] PROMPT")
    p.add_argument("prompt", metavar="PROMPT", help="the prompt, or - to read it from standard input")
    p.add_argument("--url", help="the server (default: http://127.0.0.1:8000, with --grpc 127.0.0.1:8001)")
    p.add_argument("--grpc", action="store_true", help="use gRPC (needs tritonclient[grpc]) instead of HTTP")
    p.add_argument(
        "--model", metavar="NAME", default="ensemble", help="the server's model (default: %(default)s)"
    )
    p.add_argument(
        "--max-tokens", type=integer(*INT32), metavar="N", default=128,
        help="most tokens of the answer (default: %(default)s)",
    )  # fmt: skip
    for name, (dtype, text) in OPTIONS.items():
        kind, metavar = TYPES[dtype]
        p.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated"
    )
    p.add_argument(
        "--bad", action="append", default=[], metavar="TEXT", help="a word not to write; may be repeated"
    )
    p.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    p.add_argument(
        "--timing", action="store_true", help="print time to first chunk and chunks/s to standard error"
    )
    p.add_argument(
        "--timeout", type=seconds, metavar="S", default=300.0,
        help="give up after S seconds without an answer (default: %(default)g)",
    )  # fmt: skip
    args = p.parse_args(argv)
    sampling = [name for name in ("top_k", "top_p", "seed") if getattr(args, name) is not None]
    if args.temperature == 0 and sampling:
        option = f"--{sampling[0].replace('_', '-')}"
        p.error(f"argument {option}: --temperature 0 is greedy and takes no notice of it; leave out one")
    if args.url is None:
        args.url = "127.0.0.1:8001" if args.grpc else "http://127.0.0.1:8000"
    if args.grpc and "://" in args.url:
        p.error(f"argument --url: {args.url!r} must have the form host:port with --grpc")
    if not args.grpc:
        try:
            http_url(args.url)
        except argparse.ArgumentTypeError as error:
            p.error(f"argument --url: {error}")
    return args


def request_fields(args: argparse.Namespace, prompt: str) -> dict[str, tuple[Any, str]]:
    """Ensemble input name -> (value or list of words, Triton dtype); options not given are left to the
    server."""
    fields: dict[str, tuple[Any, str]] = {
        "text_input": (prompt, "BYTES"),
        "max_tokens": (args.max_tokens, "INT32"),
        "stream": (not args.no_stream, "BOOL"),
        "exclude_input_in_output": (True, "BOOL"),
    }
    for name, (dtype, _) in OPTIONS.items():
        if (value := getattr(args, name)) is not None:
            fields[name] = (value, dtype)
    for name, words in (("stop_words", args.stop), ("bad_words", args.bad)):
        if words:
            fields[name] = (words, "BYTES")
    return fields


def stream_http(
    url: str, model: str, fields: dict[str, tuple[Any, str]], timeout: float
) -> Generator[str, None, None]:
    """Text deltas over HTTP generate_stream; closing the iterator closes the connection, which cancels the
    request."""
    body = {name: value for name, (value, _) in fields.items()}
    for event in post_events(f"{url.rstrip('/')}/v2/models/{model}/generate_stream", body, timeout):
        text = event["text_output"]
        yield text if isinstance(text, str) else "\n".join(text)


def stream_grpc(
    url: str, model: str, fields: dict[str, tuple[Any, str]], timeout: float
) -> Generator[str, None, None]:
    """Text deltas over gRPC ModelStreamInfer; closing the iterator cancels the request."""
    import numpy as np
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    numpy_types = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}
    inputs = []
    for name, (value, dtype) in fields.items():
        if dtype == "BYTES":
            words = value if isinstance(value, list) else [value]
            array = np.array([[w.encode() for w in words]], dtype=object)
        else:
            array = np.array([[value]], dtype=numpy_types[dtype])
        inputs.append(triton.InferInput(name, list(array.shape), dtype))
        inputs[-1].set_data_from_numpy(array)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(url)
    try:
        client.start_stream(lambda result, error: answers.put((result, error)))
        # Where nothing listens, the stream may have failed by now; what is called back says why.
        with contextlib.suppress(InferenceServerException):
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        while True:
            try:
                result, error = answers.get(timeout=timeout)
            except queue.Empty:
                raise ServerError(f"{url}: no answer within {timeout:g} s") from None
            if error is not None:
                refused = "Connection refused" in str(error)  # gRPC's status says no more than UNAVAILABLE
                raise ServerError(f"{url}: {NOTHING_LISTENS}" if refused else str(error))
            response = result.get_response()
            if response.outputs:
                yield "\n".join(t.decode() for t in result.as_numpy("text_output").reshape(-1))
            if response.parameters["triton_final_response"].bool_param:
                return
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # models write what not every terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    except UnicodeDecodeError as error:
        print(f"error: standard input: {error}", file=sys.stderr)
        return 1
    start = time.monotonic()
    first, chunks = 0.0, 0
    stream = (stream_grpc if args.grpc else stream_http)(
        args.url, args.model, request_fields(args, prompt), args.timeout
    )
    try:
        for text in stream:
            chunks += 1
            first = first or time.monotonic() - start
            print(text, end="", flush=True)
        print(flush=True)
        if not chunks:
            raise ServerError(f"{args.url}: the answer holds no text_output")
    except ServerError as error:
        print("\n" * bool(chunks) + f"error: {error}", file=sys.stderr)
        return 1
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of another model or server
        print("\n" * bool(chunks) + f"error: an answer that is none: {error!r}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        stream.close()
        print("\ncancelled", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone
        stream.close()
        raise
    if args.timing:
        said = f"the answer came after {first * 1e3:.1f} ms, in one chunk"
        if chunks > 1:
            rate = (chunks - 1) / (time.monotonic() - start - first)
            said = f"first chunk {first * 1e3:.1f} ms, {chunks} chunks, {rate:.1f} chunks/s"
        print(said, file=sys.stderr)
    return 0
