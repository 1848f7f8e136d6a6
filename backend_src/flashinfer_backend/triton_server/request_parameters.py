# SPDX-License-Identifier: Apache-2.0
"""Parameters and timeout of a Triton request.

HTTP generate passes every name that is no input on as a parameter, through the ensemble as well. With gRPC
and HTTP infer some names are the server's: `timeout` arrives as the request's own, and `priority` is never
shown to a Python model. Hence `queue_priority`, which arrives from everywhere.
"""

import json
from typing import Any, NamedTuple

from flashinfer_backend.core.bounds import FIELDS, check
from flashinfer_backend.core.values import shown

REQUEST_TYPES = ("context_and_generation",)
# Priorities are Triton's: 1 comes first, 0 is the default. The engine's default is 0.
LAST_PRIORITY, DEFAULT_PRIORITY = 9, 5
PRIORITIES = ("priority", "queue_priority")
MOST_TIMEOUT_US = 2**63 - 1
SPECULATION = "speculative_decoding"
ADAPTER = "lora_name"
NAMES = ("request_type", "timeout", SPECULATION, ADAPTER, *PRIORITIES)


class RequestParameters(NamedTuple):
    """priority, timeout_us: as protocol.Submit has them. speculative_decoding: as in SamplingParams.
    lora_name: of the adapter; "": none."""

    priority: int = 0
    timeout_us: int = 0
    speculative_decoding: bool = True
    lora_name: str = ""


NO_PARAMETERS = RequestParameters()


def read_request_parameters(parameters: str, timeout_us: int) -> RequestParameters:
    """Read a request's parameters (JSON) and its own timeout (uint64 microseconds, 0 for none). Raises
    ValueError for a bad value, naming it, and for a request type that is not served."""
    if timeout_us > MOST_TIMEOUT_US:  # a negative number, as the server reads it
        raise ValueError(_bad_timeout(timeout_us - 2**64))
    # The server gives them to postprocessing with each chunk.
    check("the request's parameters", len(parameters), FIELDS["parameters"].size, "characters of JSON")
    if not any(name in parameters for name in NAMES):  # nearly always: nothing to decode
        return RequestParameters(timeout_us=timeout_us)
    given: dict[str, Any] = json.loads(parameters)
    kind = given.get("request_type", REQUEST_TYPES[0])
    if kind not in REQUEST_TYPES:  # disaggregated serving
        raise ValueError(f"request_type is {shown(kind)}; only {REQUEST_TYPES[0]} is supported")
    if "timeout" in given:
        timeout_us = given["timeout"]
        if type(timeout_us) is not int or not 0 <= timeout_us <= MOST_TIMEOUT_US:
            raise ValueError(_bad_timeout(timeout_us))
    drafts = given.get(SPECULATION, True)
    if type(drafts) is not bool:
        raise ValueError(f"{SPECULATION} is {shown(drafts)}; it should be true or false")
    name = given.get(ADAPTER, "")
    if not isinstance(name, str):
        raise ValueError(f"{ADAPTER} is {shown(name)}; it should be the name of an adapter")
    return RequestParameters(_priority(given), timeout_us, drafts, name)


def _priority(given: dict[str, Any]) -> int:
    found = {name: given[name] for name in PRIORITIES if name in given}
    for name, value in found.items():
        if type(value) is not int or not 0 <= value <= LAST_PRIORITY:
            raise ValueError(
                f"{name} is {shown(value)}; it should be an integer in 1..{LAST_PRIORITY}, of which 1 is"
                f" first, or 0 for the default, {DEFAULT_PRIORITY}"
            )
    if len(set(found.values())) > 1:
        both = " and ".join(f"{name} is {value}" for name, value in found.items())
        raise ValueError(f"{both}: they are two names of one value; give one, or the same value twice")
    level = next(iter(found.values()), 0) or DEFAULT_PRIORITY
    return level - DEFAULT_PRIORITY


def _bad_timeout(value: Any) -> str:
    return (
        f"timeout is {shown(value)}; it should be the microseconds that the request may wait for its turn, an"
        " integer of at least 1, or 0 for as long as it takes"
    )
