# SPDX-License-Identifier: Apache-2.0
"""The options of `client bench`."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from client import arguments, find_rate
from client.arguments import INT32, argument_parser, finite, integer, length_range, output_file, seconds
from client.datasets import DATASETS
from client.metrics import PERCENTILES
from client.wire import BACKENDS

# Sampling options and their types; laid over each request's body under the same names.
SAMPLING: dict[str, Any] = {
    **{"temperature": finite, "top_p": finite, "top_k": integer(*INT32), "repetition_penalty": finite},
    **{"presence_penalty": finite, "frequency_penalty": finite},
}
# What a scenario says and options may not.
OF_SCENARIO = {
    *("dataset", "input_len", "output_len", "part", "prefixes", "prefix_len", "turns", "think_time"),
    *("request_rate", "max_concurrency", "burstiness", "ramp", *SAMPLING),
    "priority_per_output_token",
}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Checks each option alone; what shows only with others or in files, bench.plan finds out."""
    p = argument_parser("client bench", description, "[options]")
    _server(p.add_argument_group("server"))
    _prompts(p.add_argument_group("prompts"))
    _load(p.add_argument_group("load"))
    _requests(
        p.add_argument_group("requests", "Sampling options are sent as they are; without them: greedy.")
    )
    _search(p.add_argument_group("the highest rate within limits"))
    _results(p.add_argument_group("results"))
    return p


def given_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """The options that the command line holds, whatever their values."""
    # Options that may be repeated copy what is there and append to it.
    unset = {action.dest: None if action.default == [] else parser for action in parser._actions}
    parsed = vars(parser.parse_args(argv, argparse.Namespace(**unset)))
    return {name for name, value in parsed.items() if value is not unset[name]}


def _server(group: Any) -> None:
    add = group.add_argument
    add("--backend", choices=BACKENDS, default="triton", help="API of the server (default: %(default)s)")
    add("--url", type=arguments.http_url,
        help="the server (default: http://127.0.0.1:8000; triton-grpc: port 8001)")  # fmt: skip
    add("--endpoint", help="path to post to; {model} stands for the model (default: the backend's)")
    add("--model",
        help="the server's model (default: ensemble, or the first that an OpenAI server lists; model where"
        " --ready-timeout 0 asks nothing)")  # fmt: skip
    add("--api-key-env", metavar="NAME", help="environment variable with the API's key")
    add("--ready-timeout", type=arguments.zero_or_more, default=60.0, metavar="S",
        help="wait up to S seconds for the server; 0: do not ask (default: 60)")  # fmt: skip
    add("--warm-up", type=integer(0), metavar="N",
        help="requests before the measurement (default: 1, or the scenario's)")  # fmt: skip


def _prompts(group: Any) -> None:
    add = group.add_argument
    add("--tokenizer", metavar="FOLDER",
        help="folder with tokenizer.json, or bundled, the backend's small model (default: the folder that the"
        " server names)")  # fmt: skip
    add("--scenario", metavar="NAME|FILE",
        help="prompts, lengths, rates and sampling of a TOML file; NAME: one of"
        " perf_configs/scenarios/")  # fmt: skip
    add("--data", metavar="FILE", help="file of conversations, for a scenario that needs one")
    add("--dataset", default="random", help=", ".join(DATASETS) + " (default: %(default)s)")
    add("--num-prompts", type=integer(1), metavar="N",
        help="prompts, or conversations, of a run (default: 100, or the scenario's)")  # fmt: skip
    add("--input-len", type=length_range, default=(128, 128), metavar="LOW[:HIGH]",
        help="tokens of a random prompt, of what follows a shared prefix, or of a turn"
        " (default: 128)")  # fmt: skip
    add("--output-len", type=length_range, default=(128, 128), metavar="LOW[:HIGH]",
        help="tokens of an answer to random text (default: 128)")  # fmt: skip
    add("--part", type=arguments.part, action="append", default=[], metavar="WEIGHT,IN,OUT",
        help="mixed: a kind of prompt and its share, such as 9,64:256,128; repeat it")  # fmt: skip
    add("--prefixes", type=integer(1), default=8, metavar="N",
        help="shared-prefix: how many prefixes (default: %(default)s)")  # fmt: skip
    add("--prefix-len", type=integer(1), default=512, metavar="N",
        help="shared-prefix: tokens of a prefix (default: %(default)s)")  # fmt: skip
    add("--turns", type=integer(1), default=4, metavar="N",
        help="multi-turn, conversations: most turns of one (default: %(default)s)")  # fmt: skip
    add("--seed", type=integer(0), default=0, metavar="N",
        help="of prompts and arrivals; a second run takes the next one (default: 0, or the"
        " scenario's)")  # fmt: skip


def _load(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=arguments.rates, default=[math.inf], metavar="R[,R...]",
        help="requests/s, a run for each; inf: all at once (default)")  # fmt: skip
    add("--max-concurrency", type=arguments.integers(1), default=[None], metavar="N[,N...]",
        help="most requests in flight, a run for each (default: no bound)")  # fmt: skip
    add("--burstiness", type=arguments.burstiness, default=1.0, metavar="X",
        help="of arrivals; 1: Poisson, less: in bursts, more: more even, inf: fixed gaps"
        " (default: 1)")  # fmt: skip
    add("--ramp", type=arguments.ramp, metavar="FROM:TO[:exponential]",
        help="a rate in requests/s that changes during the run, such as 2:20; instead of"
        " --request-rate")  # fmt: skip
    add("--think-time", type=arguments.zero_or_more, default=0.0, metavar="S",
        help="seconds between an answer and the next turn of a conversation (default: 0)")  # fmt: skip
    add("--workers", type=integer(0), default=0, metavar="N",
        help="processes that send (default: 0, which is half the cores, at most 8)")  # fmt: skip
    add("--time-limit", type=seconds, metavar="S",
        help="seconds of a run; requests that have not ended then fail (default: 300 more than the arrivals"
        " take, at least 600; with --find-rate twice --try-seconds and 10)")  # fmt: skip


def _requests(group: Any) -> None:
    add = group.add_argument
    for name, kind in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X")
    add("--priority-per-output-token", type=integer(*INT32), default=0, metavar="N",
        help="OpenAI servers: each request's priority, N times its output tokens; with -1 those that order"
        " by it, the smallest first, take the longest answers first")  # fmt: skip
    add("--lora-modules", default="", metavar="NAME,...",
        help="names of adapters that requests ask for in turns: an OpenAI server by `model`, Triton by"
        " `lora_name`")  # fmt: skip
    add(
        "--respect-eos",
        action="store_true",
        help="let answers end at their end token (default: each has the length asked for)",
    )
    add("--check-tokens", action=argparse.BooleanOptionalAction, default=True,
        help="Triton: have every chunk's token count reported and compare it, which costs the server an"
        " output a chunk (default: on)")  # fmt: skip
    add("--extra-body", type=arguments.json_object, default={}, metavar="JSON",
        help='fields laid over each request, such as {"min_p": 0.1}')  # fmt: skip


def _search(group: Any) -> None:
    add = group.add_argument
    add("--find-rate", type=arguments.rate_span, metavar="LOW:HIGH",
        help="search the highest request rate between these, in requests/s, that keeps --limit")  # fmt: skip
    add("--limit", type=find_rate.limit, action="append", default=[], metavar="METRIC=MS",
        help="a limit in ms: mean, median or a percentile of ttft, tpot, itl or latency, such as"
        " p99_ttft=200; repeat it")  # fmt: skip
    add("--try-seconds", type=seconds, default=20.0, metavar="S",
        help="seconds for which each try sends requests (default: %(default)g)")  # fmt: skip
    add("--search-seconds", type=seconds, default=600.0, metavar="S",
        help="seconds for all tries (default: %(default)g)")  # fmt: skip


def _results(group: Any) -> None:
    add = group.add_argument
    add("--percentiles", type=arguments.percentiles, default=list(PERCENTILES), metavar="P[,P...]",
        help="percentiles to show (default: 50,90,99)")  # fmt: skip
    add("--goodput", type=arguments.goodput_limit, action="append", default=[], metavar="TIME=MS",
        help="count requests/s that keep within a limit in ms on ttft, tpot or latency, such as ttft=200;"
        " repeat it")  # fmt: skip
    add("--label", metavar="NAME", help="what reports call the server (default: what it calls itself)")
    add("--retokenize", action="store_true", help="also count the tokens of the received text")
    add("--save-itl", action="store_true", help="write every time between chunks to --output and --csv")
    add("--output", type=output_file, metavar="FILE", help="write everything as JSON")
    add("--csv", type=output_file, metavar="FILE", help="write every request as CSV")
