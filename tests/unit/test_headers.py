# SPDX-License-Identifier: Apache-2.0
"""How models learn that an answer will be JSON. tests/server/test_logits_room.py asks a real server."""

import json

import pytest

from flashinfer_backend.core.headers import FORWARDED, forwarding, is_json

GRPC, HTTP = FORWARDED


@pytest.mark.parametrize(
    ("given", "grpc"),
    [
        ([], "^user-agent$"),
        (["--log-verbose", "1"], "^user-agent$"),
        ([GRPC, "my-.*"], "my-.*|^user-agent$"),
        ([f"{GRPC}=a=b"], "a=b|^user-agent$"),
        ([GRPC, "first", f"{GRPC}=second"], "second|^user-agent$"),
    ],
)
def test_headers_that_somebody_else_wants_are_forwarded_too(given: list[str], grpc: str) -> None:
    assert forwarding(given) == [GRPC, grpc, HTTP, "(?i)^inference-header-content-length$"]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, True),
        ({"priority": 1, "about": 'a "user-agent"'}, True),
        ({"user-agent": "grpc-python/1.62"}, False),
        ({"Inference-Header-Content-Length": "90"}, False),
    ],
)
def test_what_came_over_grpc_or_with_binary_inputs_is_not_answered_in_json(
    parameters: dict[str, object], expected: bool
) -> None:
    assert is_json(json.dumps(parameters)) is expected
