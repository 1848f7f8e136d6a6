# SPDX-License-Identifier: Apache-2.0
"""A liveness probe that a broken server fails: exit status 1.

tritonserver says that it is ready while a model has lost its processes, so the probe asks for a token.
"""

from __future__ import annotations

import argparse
import json
import sys

from flashinfer_backend.core.arguments import some_seconds
from flashinfer_backend.launch.asking import ask

BUSY = ("queue", "try again")  # in the words of a server that is well, but refuses


def problem(url: str, model: str, timeout_s: float) -> str:
    """What is wrong with the server at `url`; empty when it answers, is full, or is being started again."""
    status, _ = _ask(f"{url}/v2/health/live", None, timeout_s)
    if status != 200:
        return f"it does not say that it is live ({status or 'no answer'})"
    if _ask(f"{url}/v2/health/ready", None, timeout_s)[0] != 200:
        return ""  # it starts, or serve starts it again, and ends where that does not help
    body = json.dumps({"text_input": "a", "max_tokens": 1}).encode()
    status, text = _ask(f"{url}/v2/models/{model}/generate", body, timeout_s)
    if status == 200 or any(word in text for word in BUSY):
        return ""
    return f"it says that it is ready, but does not generate ({status or 'no answer'}) {text[:200]}".rstrip()


def _ask(url: str, body: bytes | None, timeout_s: float) -> tuple[int, str]:
    """Status and text; 0 without an answer in time."""
    try:
        status, answer = ask(url, body, timeout_s)
    except (OSError, ValueError):
        return 0, ""
    return status, answer.decode(errors="replace")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashinfer_backend.launch.probe", description=__doc__
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--model", default="ensemble", help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=some_seconds, default=5.0, metavar="S", help="for each answer (default: 5)"
    )
    options = parser.parse_args(argv)
    found = problem(options.url.rstrip("/"), options.model, options.timeout)
    if found:
        print(f"probe: {options.url}: {found}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
