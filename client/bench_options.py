# SPDX-License-Identifier: Apache-2.0
"""The options of `client bench`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from client import arguments, find_rate
from client.arguments import INT32, finite, integer, length_range, output_file, seconds
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


def make_parser(
    description: str | None, prog: str, ready_seconds: float, warm_up: int | None
) -> argparse.ArgumentParser:
    """Checks each option alone; what shows only with others or in files, bench.plan finds out."""
    p = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} --tokenizer FOLDER [options]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _server(p.add_argument_group("server"), ready_seconds, warm_up)
    _prompts(p.add_argument_group("prompts"))
    _load(p.add_argument_group("load"))
    _requests(p.add_argument_group("requests"))
    _search(p.add_argument_group("the highest rate within limits"))
    _results(p.add_argument_group("results"))
    return p


def given_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """The options that the command line holds, whatever their values."""
    # Options that may be repeated copy what is there and append to it.
    unset = {action.dest: None if action.default == [] else parser for action in parser._actions}
    parsed = vars(parser.parse_args(argv, argparse.Namespace(**unset)))
    return {name for name, value in parsed.items() if value is not unset[name]}


def _server(group: Any, ready_seconds: float, warm_up: int | None) -> None:
    add = group.add_argument
    add("--backend", choices=BACKENDS, default="triton")
    add("--url", type=arguments.http_url, help="default: http://127.0.0.1:8000, with triton-grpc :8001")
    add("--endpoint", help="path to post to, {model} replaced (default: by backend)")
    add("--model", help="default: ensemble for Triton, the first that an OpenAI server lists")
    add("--api-key-env", metavar="NAME", help="environment variable with the API's key")
    add("--ready-timeout", type=arguments.zero_or_more, default=ready_seconds, metavar="S",
        help=f"to wait until the server is ready; 0: no check (default {ready_seconds:g})")  # fmt: skip
    add("--warm-up", type=integer(0), default=warm_up, metavar="N",
        help="requests before the measurement (default: "
        + ("1, or the scenario's)" if warm_up is None else f"{warm_up})"))  # fmt: skip


def _prompts(group: Any) -> None:
    add = group.add_argument
    add("--tokenizer", required=True, help="folder with tokenizer.json")
    add("--scenario", metavar="NAME|FILE",
        help="a TOML file of perf_configs/scenarios/: prompts, lengths, rates, sampling")  # fmt: skip
    add("--data", metavar="FILE", help="the scenario's file of conversations")
    add("--dataset", default="random", help=", ".join(DATASETS))
    add("--num-prompts", type=integer(1), help="or conversations (default 100)")
    add("--input-len", type=length_range, default=(128, 128), metavar="LOW[:HIGH]",
        help="random text: tokens of a prompt, after a shared prefix, or of a turn")  # fmt: skip
    add("--output-len", type=length_range, default=(128, 128), metavar="LOW[:HIGH]",
        help="random text: tokens of an answer")  # fmt: skip
    add("--part", type=arguments.part, action="append", default=[], metavar="WEIGHT,IN,OUT",
        help="mixed: a kind of prompt, such as 9,64:256,128; repeat it")  # fmt: skip
    add("--prefixes", type=integer(1), default=8, help="shared-prefix: how many (default 8)")
    add("--prefix-len", type=integer(1), default=512, help="shared-prefix: tokens of each (default 512)")
    add("--turns", type=integer(1), default=4, help="multi-turn, conversations: at most (default 4)")
    add("--seed", type=integer(0), default=0)


def _load(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=arguments.rates, default=[math.inf], metavar="R[,R...]",
        help="requests/s, one run for each; inf (default): all at once")  # fmt: skip
    add("--max-concurrency", type=arguments.integers(1), default=[None], metavar="N[,N...]",
        help="most requests in flight, one run for each")  # fmt: skip
    add("--burstiness", type=arguments.burstiness, default=1.0, metavar="X",
        help="of arrivals: 1 Poisson, less in bursts, more evenly, inf fixed gaps")  # fmt: skip
    add("--ramp", type=arguments.ramp, metavar="FROM:TO[:exponential]",
        help="a rate that changes during the run, instead of --request-rate")  # fmt: skip
    add("--think-time", type=arguments.zero_or_more, default=0.0, metavar="S",
        help="seconds before each later turn of a conversation")  # fmt: skip
    add("--workers", type=integer(0), default=0, help="processes (0: min(8, cores/2))")
    add("--time-limit", type=seconds, metavar="S",
        help="for a run; unfinished requests then fail (default 600; arrivals and 300)")  # fmt: skip


def _requests(group: Any) -> None:
    add = group.add_argument
    for name, kind in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind)
    add("--priority-per-output-token", type=integer(*INT32), default=0, metavar="N",
        help="OpenAI servers: each request's priority, N times its output tokens; with -1 those that order"
        " by it, the smallest first, take the longest answers first")  # fmt: skip
    add("--respect-eos", action="store_true", help="let sequences end at their end token")
    add("--check-tokens", action=argparse.BooleanOptionalAction, default=True,
        help="Triton: have every chunk's token count reported and compared, which costs the server an"
        " output a chunk")  # fmt: skip
    add("--extra-body", type=arguments.json_object, default={}, metavar="JSON",
        help="object laid over each request")  # fmt: skip


def _search(group: Any) -> None:
    add = group.add_argument
    add("--find-rate", type=arguments.rate_span, metavar="LOW:HIGH", help="requests/s to search between")
    add("--limit", type=find_rate.limit, action="append", default=[], metavar="METRIC=MS",
        help="such as p99_ttft=200; repeat it")  # fmt: skip
    add("--try-seconds", type=seconds, default=20.0, metavar="S", help="of each try's arrivals (default 20)")
    add("--search-seconds", type=seconds, default=600.0, metavar="S", help="for all tries (default 600)")


def _results(group: Any) -> None:
    add = group.add_argument
    add("--percentiles", type=arguments.percentiles, default=list(PERCENTILES), metavar="P[,P...]",
        help="to show (default 50,90,99)")  # fmt: skip
    add("--goodput", type=arguments.goodput_limit, action="append", default=[], metavar="TIME=MS",
        help="what a good request keeps within: ttft, tpot or latency; repeat it")  # fmt: skip
    add("--label", help="what reports call the server (default: what it calls itself)")
    add("--retokenize", action="store_true", help="also count the tokens of the received text")
    add("--save-itl", action="store_true", help="write every inter-chunk time to --output and --csv")
    add("--output", type=output_file, help="write everything as JSON")
    add("--csv", type=output_file, help="write every request as CSV")
    add("--sglang-json", type=output_file, help="append each run as sglang's bench_serving does")
