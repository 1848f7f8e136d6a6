# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's form, and in Anthropic's on the paths of its API."""

import re

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from flashinfer_backend.core.values import shown

RETRY_S = 2  # what a client is told to wait while the engine is started

# By status; of all others INVALID.
INVALID = "invalid_request_error"
KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_ANTHROPIC_PATHS = re.compile("(/v1)?/messages(/.*)?", re.DOTALL)


class ApiError(Exception):
    """An error for the client. `param`: the field of the request that is wrong."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self, scope: Scope) -> dict[str, object]:
        """The JSON of the error, in the form of the request's path."""
        if of_anthropic(scope):
            kind = ANTHROPIC_KINDS.get(self.status, INVALID)
            error: dict[str, object] = {"type": kind, "message": self.message}
            if self.code:
                error["details"] = {"error_code": self.code}
            return {"type": "error", "error": error, "request_id": scope.get("request_id")}
        kind = KINDS.get(self.status, INVALID)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def event(self, scope: Scope) -> bytes:
        """The server-sent event that ends a stream which has begun."""
        name = b"event: error\n" if of_anthropic(scope) else b""
        return name + b"data: " + msgspec.json.encode(self.body(scope)) + b"\n\n"

    def response(self, scope: Scope) -> Response:
        """The answer to a request that has had none."""
        headers = {"Retry-After": str(RETRY_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(
            msgspec.json.encode(self.body(scope)), self.status, headers, media_type="application/json"
        )


def field_error(place: str, what: str, code: str | None = None) -> ApiError:
    """What is wrong with a field of the request; `what` goes on behind its place."""
    return ApiError(f"{place} {what}", param=place, code=code)


def wrong_value(place: str, value: object, wanted: str) -> ApiError:
    """The error for a field's value; wanted: what it should be."""
    return field_error(place, f"is {shown(value)}; it should be {wanted}")


def of_anthropic(scope: Scope) -> bool:
    return _ANTHROPIC_PATHS.fullmatch(scope.get("path", "")) is not None
