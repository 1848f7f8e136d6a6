# SPDX-License-Identifier: Apache-2.0
"""A liveness probe that a broken server fails: exit status 1.

tritonserver says that it is ready while a model has lost its processes, so the probe asks for a token.
"""

import json
import sys

from flashinfer_backend.core.arguments import program, some_seconds
from flashinfer_backend.launch.local_http import ask, model_configs

WELL = ("queue", "try again", "writes no text")  # in the words of a server that is well, but refuses


def problem(url: str, model: str | None, timeout_s: float) -> str:
    """What is wrong with the server at `url`; empty when it answers, is full, or is being started again.
    model: None for all ensembles."""
    status, _ = _ask(f"{url}/v2/health/live", None, timeout_s)
    if status != 200:
        return f"it does not say that it is live ({status or 'no answer'})"
    if _ask(f"{url}/v2/health/ready", None, timeout_s)[0] != 200:
        return ""  # it starts, or serve starts it again, and ends where that does not help
    models = _ensembles(url, timeout_s) if model is None else [model]
    if not models:
        return "it says that it is ready, but names no ensemble"
    body = json.dumps({"text_input": "a", "max_tokens": 1}).encode()
    for name in models:
        status, text = _ask(f"{url}/v2/models/{name}/generate", body, timeout_s)
        if status != 200 and not any(word in text for word in WELL):
            said = f"{status or 'no answer'}) {text[:200]}".rstrip()
            return f"it says that it is ready, but {name} does not generate ({said}"
    return ""


def _ensembles(url: str, timeout_s: float) -> list[str]:
    """The server's ensembles; of several with the same steps, one."""
    try:
        steps = {
            name: config.get("ensemble_scheduling", {}).get("step")
            for name, config in model_configs(url, timeout_s).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return list({json.dumps(each): name for name, each in steps.items() if each}.values())


def _ask(url: str, body: bytes | None, timeout_s: float) -> tuple[int, str]:
    """Status and text; 0 without an answer in time."""
    try:
        status, answer = ask(url, body, timeout_s)
    except (OSError, ValueError):
        return 0, ""
    return status, answer.decode(errors="replace")


def main(argv: list[str] | None = None) -> int:
    parser = program("flashinfer_backend.launch.probe", __doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--model", metavar="NAME", help="the model to ask (default: all ensembles)")
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
