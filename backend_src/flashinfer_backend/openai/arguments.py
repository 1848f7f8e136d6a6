# SPDX-License-Identifier: Apache-2.0
"""Arguments of the API, independent of the engine's start: `python -m flashinfer_backend.openai` takes them
under these names, flashinfer_backend.serve with a prefix."""

import argparse
import re
from pathlib import Path
from typing import Any

from flashinfer_backend.core.arguments import count, whole, whole_seconds
from flashinfer_backend.openai.formats.choice import REASONING_FORMATS, TOOL_FORMATS

AUTO = "auto"
KEYS_VARIABLE = "FLASHINFER_BACKEND_API_KEYS"
RECEIVE_S = 60
REQUEST_BYTES = 32 << 20
PROMPT_BYTES = 1 << 20
CONNECTIONS = "max-connections"
STORE = "store-mib"


def origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+", text):
        raise argparse.ArgumentTypeError(
            f"{text}: an origin is a scheme, a host and perhaps a port in small letters, such as"
            " https://chat.example:8443, with nothing behind; or *"
        )
    return text


def model_name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a name should not be empty")
    return text


# What argparse's add_argument takes for each.
API_ARGUMENTS: dict[str, dict[str, Any]] = {
    "workers": {
        "metavar": "N", "type": whole(1, 1024),
        "help": "processes that answer requests (default: four for each engine, but at most one for every"
        " four cores; one with device=cpu or --store-mib)",
    },
    "served-model-name": {
        "metavar": "NAME", "type": model_name, "action": "append",
        "help": "the model's name in requests; repeat it for several names (default: its folder's name)",
    },
    "api-key-file": {
        "metavar": "FILE", "type": Path,
        "help": f"keys of clients, one on each line; the variable {KEYS_VARIABLE} can also hold keys,"
        " with commas between (default: no key is needed)",
    },
    "chat-template": {
        "metavar": "FILE", "type": Path,
        "help": "a Jinja file instead of the checkpoint's chat template",
    },
    "tool-format": {
        "choices": (AUTO, *TOOL_FORMATS), "default": AUTO, "metavar": "FORMAT",
        "help": f"how the model writes tool calls: {', '.join(TOOL_FORMATS)} (default: {AUTO}, as its chat"
        " template shows)",
    },
    "reasoning-format": {
        "choices": (AUTO, *REASONING_FORMATS), "default": AUTO, "metavar": "FORMAT",
        "help": f"how the model writes its reasoning: {', '.join(REASONING_FORMATS)} (default: {AUTO}, as its"
        " chat template shows)",
    },
    "ignore-effort": {
        "action": "store_true", "default": False,
        "help": "accept reasoning_effort if the chat template has no efforts, with a line in the log"
        " (default: refuse it)",
    },
    "allowed-origins": {
        "metavar": "ORIGIN", "type": origin, "action": "append",
        "help": "a web origin whose pages can use the API, such as https://chat.example, or * for all; repeat"
        " it for several (default: only the API's own page)",
    },
    "lora-root": {
        "metavar": "DIR", "type": Path,
        "help": "folder from which /v1/load_lora_adapter loads adapters (default: it loads none)",
    },
    "default-sampling": {
        "choices": ("checkpoint", "openai"), "default": "checkpoint",
        "help": "for omitted parameters: values of generation_config.json (default), or OpenAI's defaults",
    },
    "max-request-bytes": {
        "metavar": "BYTES", "type": whole(1), "default": REQUEST_BYTES,
        "help": f"largest body of a request, in bytes (default: {REQUEST_BYTES}, {REQUEST_BYTES >> 20} MiB)",
    },
    "max-prompt-bytes": {
        "metavar": "BYTES", "type": count, "default": PROMPT_BYTES,
        "help": "longest prompt, in bytes; 0: no limit"
        f" (default: {PROMPT_BYTES}, {PROMPT_BYTES >> 20} MiB)",
    },
    STORE: {
        "metavar": "MIB", "type": count, "default": 0,
        "help": "MiB of memory to store responses that later requests continue (previous_response_id); needs"
        " one process (default: 0, none are stored)",
    },
    "receive-seconds": {
        "metavar": "S", "type": whole_seconds, "default": RECEIVE_S,
        "help": f"time limit for receiving a request, in seconds; 0: none (default: {RECEIVE_S})",
    },
    CONNECTIONS: {
        "metavar": "N", "type": count, "default": 0,
        "help": "most connections of each process; 0: the open-file limit less 128 (default: 0)",
    },
}  # fmt: skip
