# SPDX-License-Identifier: Apache-2.0
"""The header x-request-id of every answer, by which clients and proxies name it in their logs; on the paths
of Anthropic's API also its request-id."""

import re
import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashinfer_backend.openai.errors import of_anthropic

HEADER = b"x-request-id"
SANE = re.compile(rb"[ -~]{1,200}")


class RequestIds:
    """An application whose answers have the request's id, or their own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                own = next((value for name, value in headers if name == HEADER), new)
                chosen = given if SANE.fullmatch(given) else own
                headers = [header for header in headers if header[0] != HEADER]
                headers.append((HEADER, chosen))
                if of_anthropic(scope):
                    headers.append((b"request-id", chosen))
                message = {**message, "headers": headers}
            return send(message)

        given = next((value for name, value in scope.get("headers", ()) if name == HEADER), b"")
        new = new_id()
        scope["request_id"] = (given if SANE.fullmatch(given) else new).decode()
        await self._app(scope, receive, named)


def new_id() -> bytes:
    return b"req_" + secrets.token_hex(16).encode()
