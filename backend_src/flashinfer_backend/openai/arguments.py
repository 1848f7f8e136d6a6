# SPDX-License-Identifier: Apache-2.0
"""Arguments of the API itself, whoever starts the engine: `python -m flashinfer_backend.openai` takes them
under these names, flashinfer_backend.serve with a prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashinfer_backend.core.arguments import count, whole, whole_seconds
from flashinfer_backend.openai.formats.choice import REASONING_FORMATS, TOOL_FORMATS

AUTO = "auto"
KEYS_VARIABLE = "FLASHINFER_BACKEND_API_KEYS"
RECEIVE_S = 60
LOGITS_ROOM = 512 << 20  # bytes, for logits of prompts
CONNECTIONS = "max-connections"

# What argparse's add_argument takes for each.
API_ARGUMENTS: dict[str, dict[str, Any]] = {
    "workers": {
        "metavar": "N",
        "type": whole(1, 1024),
        "default": 1,
        "help": "processes that answer requests (default: 1)",
    },
    "served-model-name": {
        "metavar": "NAME",
        "action": "append",
        "help": "the model's name in requests, more than once for several (default: its folder's name)",
    },
    "api-key-file": {
        "metavar": "FILE",
        "type": Path,
        "help": f"keys of clients, one a line (also: {KEYS_VARIABLE}, with commas; default: none is needed)",
    },
    "chat-template": {
        "metavar": "FILE",
        "type": Path,
        "help": "a Jinja file instead of the checkpoint's chat template",
    },
    "tool-format": {
        "choices": (AUTO, *TOOL_FORMATS),
        "default": AUTO,
        "metavar": "FORMAT",
        "help": f"how the model writes tool calls: {', '.join(TOOL_FORMATS)} (default: {AUTO}, as its chat"
        " template shows)",
    },
    "reasoning-format": {
        "choices": (AUTO, *REASONING_FORMATS),
        "default": AUTO,
        "metavar": "FORMAT",
        "help": f"how the model writes its reasoning: {', '.join(REASONING_FORMATS)} (default: {AUTO}, as its"
        " chat template shows)",
    },
    "default-sampling": {
        "choices": ("checkpoint", "openai"),
        "default": "checkpoint",
        "help": "where a request is silent: what generation_config.json recommends (default), or OpenAI's"
        " defaults",
    },
    "max-request-bytes": {
        "metavar": "BYTES",
        "type": whole(1),
        "default": 32 << 20,
        "help": "largest body (default: 32 MiB)",
    },
    "max-prompt-bytes": {
        "metavar": "BYTES",
        "type": count,
        "default": 1 << 20,
        "help": "longest text that is tokenised, 0: any (default: 1 MiB, as the ensemble's max_prompt_bytes)",
    },
    "prompt-logits-mib": {
        "metavar": "MIB",
        "type": count,
        "default": LOGITS_ROOM >> 20,
        "help": "memory of each process for logits of prompts whose log probabilities are wanted; one prompt"
        f" may have it all to itself, however large (default: {LOGITS_ROOM >> 20})",
    },
    "receive-seconds": {
        "metavar": "S",
        "type": whole_seconds,
        "default": RECEIVE_S,
        "help": f"cut a client whose request is not whole after so long, 0: never (default: {RECEIVE_S})",
    },
    CONNECTIONS: {
        "metavar": "N",
        "type": count,
        "default": 0,
        "help": "of each process, 0: as many as it may open files (default)",
    },
}
