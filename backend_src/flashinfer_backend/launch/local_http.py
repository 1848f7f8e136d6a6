# SPDX-License-Identifier: Apache-2.0
"""Questions over HTTP to a server of this machine."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

# Not through the proxy that the environment may name: it does not reach this machine's 127.0.0.1.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, body: bytes | None = None, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """(status, body) of the answer, whatever its status; a POST where there is a body.

    Raises OSError without a whole answer, among these TimeoutError where none has begun in time, and
    ValueError for what is no URL.
    """
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        try:
            answer = _OPENER.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read()
    except http.client.HTTPException as error:  # cut off, or no HTTP
        raise ConnectionError(f"{url}: {error!r}") from None


def model_configs(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """The configuration of each model of the tritonserver at `url`. Raises OSError where it does not say, and
    ValueError, KeyError or TypeError for what is not its answer."""

    def told(path: str, body: bytes | None = None) -> Any:
        status, text = ask(url + path, body, timeout_s)
        if status != 200:
            raise OSError(f"{path}: status {status}")
        return json.loads(text)

    names = [entry["name"] for entry in told("/v2/repository/index", b"{}")]
    return {name: told(f"/v2/models/{name}/config") for name in names}
