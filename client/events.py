# SPDX-License-Identifier: Apache-2.0
"""One streamed answer over HTTP, event by event, with the standard library alone."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any

from client.wire import EventSplitter, authorization, error_message

NOTHING_LISTENS = "nothing listens there; start the server first, or name another with --url"


class ServerError(RuntimeError):
    """The server refused the request, failed during it, or was not reached; the message says which."""


def post_events(
    url: str, body: dict[str, Any], timeout: float, api_key: str | None = None
) -> Generator[dict[str, Any], None, None]:
    """Posts the JSON body and yields the events of the answer, [DONE] left out. Closing it closes the
    connection, which cancels the request. timeout: seconds between two reads. Raises ServerError, also for an
    event that holds an error, and ValueError for one that is no JSON object."""
    headers = {"Content-Type": "application/json"} | authorization(api_key)
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            splitter = EventSplitter()
            while data := response.read1(65536):
                for payload in splitter.feed(data):
                    if payload == b"[DONE]":
                        continue
                    event = json.loads(payload)
                    if not isinstance(event, dict):
                        raise ValueError(f"{payload[:100]!r} is no JSON object")
                    if "error" in event:
                        raise ServerError(error_message(payload.decode()))
                    yield event
    except urllib.error.HTTPError as error:
        message = error_message(error.read().decode(errors="replace"))
        raise ServerError(f"HTTP {error.code}: {message}") from None
    except http.client.HTTPException as error:
        raise ServerError(f"{url}: the server broke off its answer ({type(error).__name__})") from None
    except OSError as error:
        raise ServerError(f"{url}: {why_unreachable(error)}") from None


def why_unreachable(error: BaseException) -> str:
    """Why a server could not be asked, as a person reads it."""
    refused_by_http = isinstance(error, urllib.error.HTTPError)  # its reason lacks the status
    reason = error if refused_by_http else getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError):
        return NOTHING_LISTENS
    return str(reason)
