# SPDX-License-Identifier: Apache-2.0
"""Whether postprocessing still answers.

tritonserver 2.51 never answers a request without rows to a model with a dynamic batcher (`"shape": [0, 0]`).
postprocessing keeps the order of its answers, so all later ones wait behind it indefinitely: one request
ends every stream, and the server says that it is live and ready.
"""

import json
import threading
import time
from collections.abc import Collection

from flashinfer_backend.launch.local_http import ask

EVERY_S = 5.0
ONE_TOKEN = [
    {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1, 1], "data": [0]},
    {"name": "SEQUENCE_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [1]},
]


class PostprocessingWatch:
    """Asks the server at `url` for the text of a token, again and again, from a thread."""

    def __init__(
        self,
        url: str,
        answer_s: float,
        every_s: float = EVERY_S,
        models: Collection[str] = ("postprocessing",),
    ) -> None:
        """answer_s: seconds that an answer may take. models: the server's models for postprocessing."""
        self._models = models
        self._url, self._answer_s, self._every_s = url, answer_s, every_s
        self._asked_at: float | None = None  # None: nothing is open
        self._ended = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def stuck(self) -> bool:
        """Whether an answer has not come in time."""
        asked_at = self._asked_at
        return asked_at is not None and time.monotonic() > asked_at + self._answer_s

    def close(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        body = json.dumps({"inputs": ONE_TOKEN}).encode()
        while not self._ended.wait(self._every_s):
            try:
                for model in self._models:
                    self._asked_at = time.monotonic()
                    # An answer of any kind will do, also an error.
                    ask(f"{self._url}/v2/models/{model}/infer", body, self._answer_s + 1)
            except TimeoutError:
                return  # it stays stuck
            except OSError:
                pass  # the server ends, and its process is watched elsewhere
            self._asked_at = None
