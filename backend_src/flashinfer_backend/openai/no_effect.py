# SPDX-License-Identifier: Apache-2.0
"""The table of fields that ask for nothing here.

A field is accepted where leaving it out could not change what the client gets, and refused by its name with
any other value. docs/openai.md shows the table.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from flashinfer_backend.core.values import shown, some
from flashinfer_backend.openai.errors import field_error

# The values that ask for nothing; None: all of the field's type do.
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    # Whose request it is, and for how long to keep what is cached anyway.
    "user": None,
    "safety_identifier": None,
    "metadata": None,
    "client_metadata": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "prompt_cache_options": None,
    "cache_control": None,
    # How it is billed. Other tiers ask to be served before others: priority does that here.
    "service_tier": ("auto", "default", "flex", "standard_only"),
    "speed": ("standard",),
    # Of beam search, which there is none of.
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    # Hints to OpenAI's models.
    "verbosity": ("low", "medium", "high"),
    # How clients of SGLang and vLLM ask for reasoning as it is answered here.
    "separate_reasoning": (True,),
    "include_reasoning": (True,),
    # Tools that the server runs, of which there are none: no answer has more calls of them.
    "max_tool_calls": None,
    # auto may drop the beginning of a prompt that is too long, and need not: it is an error.
    "truncation": ("disabled", "auto"),
}

# Of parts of messages, and of items: up to where to cache them, and what they had in an earlier answer.
OF_PARTS = (
    *("type", "cache_control", "prompt_cache_breakpoint", "annotations", "citations", "logprobs", "id"),
    *("index", "status", "phase", "caller", "async", "async_", "created_by", "toolset_name"),
    # OpenAI's and Anthropic's packages parse texts and arguments, and send the results back with them.
    *("parsed", "parsed_arguments", "parsed_output"),
    # LiteLLM and clients of OpenRouter and Copilot say the reasoning again, and what else an answer had.
    *("thinking_blocks", "reasoning_details", "reasoning_text", "reasoning_opaque"),
    *("provider_specific_fields", "extra_content"),
)
# Of functions: agno's notes on who runs them.
OF_FUNCTIONS = ("requires_confirmation", "external_execution", "approval_type")


def check_no_effect(body: msgspec.Struct) -> None:
    """Raises ApiError for a field of the table that asks for something."""
    for name in body.__struct_fields__:
        if name in NO_EFFECT:
            check_value(name, getattr(body, name), name)


def check_part(
    part: Mapping[str, Any], fields: Sequence[str], place: str, what: str, read: Collection[str] = ()
) -> None:
    """part: a message, or one of its parts, an item, a function or a call. fields: those of its kind. read:
    further ones that the chat template reads. Raises ApiError for any other that asks for something and is
    not in OF_PARTS."""
    for name, value in part.items():
        idle = value in (None, [], {}, "") or value is False
        if idle or name in fields or name in OF_PARTS or name in read:
            continue
        raise field_error(f"{place}.{name[:64]}", f"is not a field of {what}, which has {', '.join(fields)}")


def check_value(name: str, value: Any, place: str) -> None:
    """name: in the table. place: the field's in the request. Raises ApiError."""
    taken = NO_EFFECT[name]
    if value is not None and taken is not None and value not in taken:
        words = [shown(one) for one in taken]
        raise field_error(
            place,
            f"is {shown(value)}, which this server cannot follow; it should be"
            f" {'one of ' if len(words) > 1 else ''}{some(words)}, or left out",
        )
