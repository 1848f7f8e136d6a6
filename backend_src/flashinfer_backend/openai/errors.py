# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's form."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

RETRY_S = 2  # what a client is told to wait while the engine is started

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An error for the client. `param`: the field of the request that is wrong."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, object]:
        """The JSON of the error."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer to a request that has had none."""
        headers = {"Retry-After": str(RETRY_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(
            msgspec.json.encode(self.body),
            self.status,
            headers,
            media_type="application/json",
        )
