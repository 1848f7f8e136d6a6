# SPDX-License-Identifier: Apache-2.0
"""What guided requests cost through OpenAI APIs, next to plain requests of the same run:

    .venv/bin/python -m perf_configs.bench_guided --url http://127.0.0.1:9000
    .venv/bin/python -m perf_configs.bench_guided --servers ours-openai,vllm --model-dir CHECKPOINT

The first table has the time per output token (TPOT) and to the first one (TTFT) at each concurrency: plain,
guided, and half of each. The second has the TTFT with a new grammar in each request. --servers starts servers
of servers.toml one after the other, and ends with a table of all.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from client.arguments import argument_parser, integer
from perf_configs.servers import Running, ServerSpec, StartError, serve_each, server_names

PROFILE = Path(__file__).parent / "profiles/h200-8b.toml"
WORDS = ("time", "river", "stone", "paper", "garden", "winter", "engine", "copper", "letter", "window")


def schema(name: str, longest: int | None = None) -> dict[str, Any]:
    """Strings without an end before max_tokens, of up to `longest` characters or of any length. name: of a
    property, which makes it another schema."""
    text = {"type": "string"} if longest is None else {"type": "string", "maxLength": longest}
    texts = {"type": "array", "items": text, "minItems": 1000}
    return {"type": "object", "properties": {name: texts}, "required": [name], "additionalProperties": False}


@dataclass
class Answer:
    ttft_s: float
    tpot_s: float
    tokens: int


async def ask(
    session: aiohttp.ClientSession, args: argparse.Namespace, guide: dict[str, Any] | None
) -> Answer:
    words = random.choices(WORDS, k=args.input_words)
    body: dict[str, Any] = {
        "model": args.model,
        "messages": [{"role": "user", "content": "Write a long story in JSON about " + " ".join(words)}],
        "max_tokens": args.output_tokens,
        "temperature": 0.8,
        "seed": random.randrange(2**31),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if guide is None:
        body["ignore_eos"] = True
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": guide}}
    began = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async with session.post(f"{args.url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in event["choices"]):
                last = time.perf_counter()
                first = first or last
    return Answer(first - began, (last - first) / max(tokens - 1, 1), tokens)


def median_ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3


Found = dict[tuple[int, str], tuple[float, float]]  # TPOT and TTFT in ms, by requests at once and their kind


async def at_once(session: aiohttp.ClientSession, args: argparse.Namespace, count: int, kind: str) -> Found:
    """Rows of the first table, which are printed."""
    known = schema("story", args.longest_string)
    guides = [known if kind == "guided" or (kind == "mixed" and i % 2) else None for i in range(count)]
    answers = await asyncio.gather(*(ask(session, args, guide) for guide in guides))
    found: Found = {}
    for guided in (False, True):
        of_kind = [a for a, guide in zip(answers, guides, strict=True) if (guide is not None) == guided]
        if of_kind:
            name = f"{kind}, {'guided' if guided else 'plain'} half" if kind == "mixed" else kind
            tpot, ttft = median_ms([a.tpot_s for a in of_kind]), median_ms([a.ttft_s for a in of_kind])
            tokens = sum(a.tokens for a in of_kind) / len(of_kind)
            print(f"| {count} | {name} | {tpot:.2f} | {ttft:.1f} | {tokens:.0f} |", flush=True)
            found[count, name] = tpot, ttft
    return found


async def run(args: argparse.Namespace) -> Found:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    found: Found = {}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.get(f"{args.url}/v1/models") as response:
            args.model = args.model or (await response.json())["data"][0]["id"]
        print("| at once | requests | TPOT, ms | TTFT, ms | tokens |\n|---:|---|---:|---:|---:|")
        for kind in ("plain", "guided"):  # the first row of each is to warm up
            await at_once(session, args, min(max(args.concurrency), 16), kind)
        for count in args.concurrency:
            for kind in ("plain", "guided", *(["mixed"] if count > 1 else [])):
                found |= await at_once(session, args, count, kind)
        print("\n| one at a time | TTFT, ms: median | worst |\n|---|---:|---:|")
        short = argparse.Namespace(**{**vars(args), "output_tokens": 8})
        for name, guided in (("plain", False), ("grammars never seen", True)):
            times = []
            for i in range(args.new_grammars):
                unseen = schema(f"p{random.randrange(2**31)}_{i}") if guided else None
                times.append((await ask(session, short, unseen)).ttft_s)
            print(f"| {name} | {median_ms(times):.1f} | {max(times) * 1e3:.1f} |", flush=True)
    return found


def compare(args: argparse.Namespace) -> None:
    """Start servers one after the other and measure each. Raises StartError."""
    results: dict[str, Found] = {}
    variables = {
        "MODEL_DIR": str(args.model_dir.resolve()),
        "PROFILE": str(args.profile.resolve()),
        "KNOBS": " ".join(["--set", *args.set]) if args.set else "",
        "LOAD_FORMAT": args.load_format,
        "TENSOR_PARALLEL_SIZE": "1",
    }

    def measure(spec: ServerSpec, running: Running) -> None:
        print(f"\n{spec.label} {running.version} ({running.since})\n", flush=True)
        random.seed(0)  # the same requests for each
        of = {**vars(args), "url": running.url, "model": running.model}
        results[spec.label] = asyncio.run(run(argparse.Namespace(**of)))

    serve_each(args.servers, variables, args.port, "bench_guided", measure)
    print("\n| at once | " + " | ".join(f"{n}: plain | guided | ratio" for n in results) + " |")
    print("|---:" * (1 + 3 * len(results)) + "|")
    for count in args.concurrency:
        cells = []
        for found in results.values():
            plain, guided = found[count, "plain"][0], found[count, "guided"][0]
            cells += [f"{plain:.2f}", f"{guided:.2f}", f"{guided / plain:.2f}"]
        print(f"| {count} | " + " | ".join(cells) + " |")
    print("TPOT in ms: the median of the requests")


def main() -> None:
    parser = argument_parser("perf_configs.bench_guided", __doc__)
    parser.add_argument(
        "--url", default="http://127.0.0.1:9000", help="a running OpenAI API (default: %(default)s)"
    )
    parser.add_argument(
        "--servers",
        type=server_names,
        help="names of servers.toml to start instead, such as ours-openai,vllm",
    )
    parser.add_argument("--model-dir", type=Path, help="checkpoint of these servers")
    parser.add_argument("--load-format", default="dummy", help="dummy (random weights) or auto")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="knobs of ours")
    parser.add_argument("--set", nargs="+", metavar="NAME=VALUE", help="further knobs of ours")
    parser.add_argument("--port", type=integer(1, 65_533), default=9100)
    parser.add_argument(
        "--model", default="", help="the model's name (default: the first that the API lists)"
    )
    parser.add_argument("--concurrency", type=integer(1), nargs="+", default=[1, 32, 128])
    parser.add_argument(
        "--longest-string", type=integer(1), metavar="N", help="maxLength of strings (default: none)"
    )
    parser.add_argument("--input-words", type=integer(1), default=100)
    parser.add_argument("--output-tokens", type=integer(2), default=256)
    parser.add_argument("--new-grammars", type=integer(1), default=20)
    args = parser.parse_args()
    random.seed(0)
    if args.servers and args.model_dir is None:
        parser.error("--servers needs --model-dir")
    try:
        if args.servers:
            compare(args)
        else:
            asyncio.run(run(args))
    except StartError as error:
        parser.exit(1, f"{error}\n")
    except (RuntimeError, aiohttp.ClientError) as error:
        parser.exit(1, f"{args.url}: {error}\n")


if __name__ == "__main__":
    main()
