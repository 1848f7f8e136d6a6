# SPDX-License-Identifier: Apache-2.0
"""Generates text from a running server and prints it as it arrives.

python -m client generate "The quick brown fox" --max-tokens 64
python -m client generate --grpc --url localhost:8001 --temperature 0.8 --seed 7 "Once upon a time"
echo "a long prompt" | python -m client generate -
"""

import argparse
import io
import sys
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

from client import grpc_wire
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
OTHER_TYPES = {
    **dict.fromkeys(("text_input", "stop_words", "bad_words"), "BYTES"),
    **{"max_tokens": "INT32", "stream": "BOOL", "exclude_input_in_output": "BOOL"},
}
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


def request_body(args: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """The ensemble's inputs; options not given are left to the server."""
    body = {
        "text_input": prompt,
        "max_tokens": args.max_tokens,
        "stream": not args.no_stream,
        "exclude_input_in_output": True,
    }
    given = {name: getattr(args, name) for name in OPTIONS} | {"stop_words": args.stop, "bad_words": args.bad}
    return body | {name: value for name, value in given.items() if value not in (None, [])}


def stream_http(
    url: str, model: str, body: dict[str, Any], timeout: float
) -> Generator[dict[str, Any], None, None]:
    """Events over HTTP generate_stream; closing the iterator closes the connection, which cancels the
    request."""
    yield from post_events(f"{url.rstrip('/')}/v2/models/{model}/generate_stream", body, timeout)


def stream_grpc(
    url: str, model: str, body: dict[str, Any], timeout: float
) -> Generator[dict[str, Any], None, None]:
    """The same over gRPC ModelStreamInfer; closing the iterator cancels the request."""
    message = grpc_wire.request_message(
        model, body, OTHER_TYPES | {k: kind for k, (kind, _) in OPTIONS.items()}
    )
    import grpc

    with grpc.insecure_channel(url, grpc_wire.UNBOUNDED) as channel:
        call, final = channel.stream_stream(grpc_wire.METHOD)(iter([message])), False
        try:
            while not final:
                late = threading.Timer(timeout, call.cancel)
                late.start()
                try:
                    event, final = grpc_wire.read_response(next(call))
                except grpc.RpcError as error:
                    if error.code() == grpc.StatusCode.CANCELLED:
                        raise ServerError(f"{url}: no answer within {timeout:g} s") from None
                    refused = "Connection refused" in (error.details() or "")  # the code says UNAVAILABLE
                    said = f"{url}: {NOTHING_LISTENS}" if refused else grpc_wire.error_of(error)
                    raise ServerError(said) from None
                finally:
                    late.cancel()
                if event is not None and "error" in event:
                    raise ServerError(event["error"])
                if event is not None:
                    yield event
        finally:
            call.cancel()


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
        args.url, args.model, request_body(args, prompt), args.timeout
    )
    try:
        for event in stream:
            chunks += 1
            first = first or time.monotonic() - start
            text = event["text_output"]
            print(text if isinstance(text, str) else "\n".join(text), end="", flush=True)
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
