# SPDX-License-Identifier: Apache-2.0
"""The header x-request-id of every answer, by which clients and proxies name it in their logs; on the paths
of Anthropic's API also its request-id."""

import re
import secrets
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashinfer_backend.openai.errors import of_anthropic

HEADER = "x-request-id"
SANE = re.compile("[ -~]{1,200}")


class RequestIds:
    """An application whose answers have the request's id, or their own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if is_given or HEADER not in headers:
                    headers[HEADER] = scope["request_id"]
                if of_anthropic(scope):
                    headers["request-id"] = headers[HEADER]
            return send(message)

        given = Headers(scope=scope).get(HEADER, "")
        is_given = SANE.fullmatch(given) is not None
        scope["request_id"] = given if is_given else new_id()
        await self._app(scope, receive, named)


def new_id() -> str:
    return f"req_{secrets.token_hex(16)}"
