# SPDX-License-Identifier: Apache-2.0
"""What formats cost a real model, and how often drafts are right, through the OpenAI API.

    python -m perf_configs.quality --model .cache/SmolLM2-135M-Instruct [--draft-model HEAD]

Prints the perplexity of pages of this project's documentation with each format, and the n-gram drafts made
and accepted over a few chats; or, with the folder of an EAGLE-3 head, only that head's. It runs on a CPU or a
GPU.
"""

import json
import math
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
TOPICS = (
    "Why do cats purr?",
    "Give me three tips for a job interview.",
    "Write a short story about a lighthouse keeper.",
    "How does a bicycle stay upright?",
    "Write a Python function that checks whether a word is a palindrome, and explain it.",
    "What should I see on two days in Rome?",
    "Explain photosynthesis to a child.",
    "Write a polite e-mail that moves a meeting from Monday to Wednesday.",
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


def chats(url: str, questions: Sequence[str], most: int) -> None:
    """Greedy answers of up to `most` tokens, and what was drafted for them."""
    tokens = right = 0
    for question in questions:
        asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": most}
        usage = json.loads(call(url, "/v1/chat/completions", asked))["usage"]
        details = usage.get("completion_tokens_details") or {}
        accepted, rejected = (
            details.get(f"{which}_prediction_tokens", 0) for which in ("accepted", "rejected")
        )
        tokens, right = tokens + usage["completion_tokens"], right + accepted
        print(
            f"{question[:40]!r}: {usage['completion_tokens']} tokens, {accepted + rejected} drafts checked,"
            f" {accepted} accepted",
            flush=True,
        )
    print(f"accepted length over all steps: {tokens / (tokens - right):.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.quality", __doc__)
    parser.add_argument("--model", metavar="DIR", required=True, help="checkpoint folder")
    parser.add_argument("--draft-model", metavar="DIR", help="folder of an EAGLE-3 head")
    parser.add_argument("--port", type=integer(1), default=9700, help="a free one (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.draft_model:
        head = ["speculative_method=eagle3", f"draft_model={options.draft_model}", "max_draft_len=3"]
        with server(options.model, head, options.port) as url:
            chats(url, CHATS + TOPICS, 200)
        return
    root = Path(__file__).parents[1]
    texts = [(root / page).read_text(encoding="utf-8").partition("\n")[2][:CHARACTERS] for page in PAGES]
    for name, knobs in FORMATS.items():
        with server(options.model, knobs, options.port) as url:
            value, tokens = perplexity(url, texts)
            print(f"{name:>12}  perplexity {value:.3f} of {tokens} tokens", flush=True)
    with server(options.model, DRAFTS, options.port) as url:
        chats(url, CHATS, 60)


if __name__ == "__main__":
    main()
