# SPDX-License-Identifier: Apache-2.0
"""What formats cost a real model, and how often n-gram drafts are right, through the OpenAI API.

    python -m perf_configs.quality --model .cache/SmolLM2-135M-Instruct

Prints the perplexity of pages of this project's documentation with each format, and the drafts made and
accepted over a few chats. It runs on a CPU or a GPU.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client.arguments import argument_parser, integer

FORMATS: dict[str, list[str]] = {
    "16 bits": [],
    "FP8 weights": ["quantization=fp8"],
    "FP8 cache": ["kv_cache_dtype=fp8_e4m3"],
}
DRAFTS = ["speculative_method=ngram", "max_draft_len=4"]
PAGES = ("docs/reliability.md", "docs/security.md", "docs/queue.md")
CHARACTERS = 1500  # of each page, from where its first heading ends
LIST = "Tom: 31, Anna: 28, Mary: 45, Peter: 19"
CHATS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    f"Repeat this list word for word: {LIST}",
    f"Write this list as JSON, name and age of each person: {LIST}",
)


def call(url: str, path: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=500) as answer:
        return bytes(answer.read())


@contextmanager
def server(model: str, knobs: Sequence[str], port: int) -> Iterator[str]:
    """The URL of a started server."""
    command = [sys.executable, "-m", "flashinfer_backend.openai", "--model", model, "--port", str(port)]
    settings = ["max_seq_len=2048", "max_num_seqs=4", *knobs]
    process = subprocess.Popen([*command, "--set", *settings], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                call(url, "/health")
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise SystemExit(f"the server with {' '.join(knobs)} did not start")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def perplexity(url: str, texts: Sequence[str]) -> tuple[float, int]:
    """Of all texts together, and the number of tokens that were predicted."""
    total, count = 0.0, 0
    for text in texts:
        body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
        (choice,) = json.loads(call(url, "/v1/completions", body))["choices"]
        found = choice["logprobs"]["token_logprobs"][
            1:-1
        ]  # not the first token, nor the one that was sampled
        total, count = total - sum(found), count + len(found)
    return math.exp(total / count), count


def drafts(url: str) -> dict[str, float]:
    """Counters of drafts by the end of their names."""
    text = call(url, "/metrics").decode()
    found = re.findall(r"^\w*?(draft\w*|accepted\w*)(?:{.*})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found if not name.endswith("created")}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.quality", __doc__)
    parser.add_argument("--model", metavar="DIR", required=True, help="checkpoint folder")
    parser.add_argument("--port", type=integer(1), default=9700, help="a free one (default: %(default)s)")
    options = parser.parse_args(argv)
    root = Path(__file__).parents[1]
    texts = [(root / page).read_text(encoding="utf-8").partition("\n")[2][:CHARACTERS] for page in PAGES]
    for name, knobs in FORMATS.items():
        with server(options.model, knobs, options.port) as url:
            value, tokens = perplexity(url, texts)
            print(f"{name:>12}  perplexity {value:.3f} of {tokens} tokens", flush=True)
    with server(options.model, DRAFTS, options.port) as url:
        before = drafts(url)
        for question in CHATS:
            asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60}
            answer = json.loads(call(url, "/v1/chat/completions", asked))
            after = drafts(url)
            grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
            print(f"{question[:40]!r}: {answer['usage']['completion_tokens']} tokens, {grown}", flush=True)
            before = after


if __name__ == "__main__":
    main()
