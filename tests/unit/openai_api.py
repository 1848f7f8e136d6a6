# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API's application without an engine: what it says before it asks one."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.openai.app import make_app
from flashinfer_backend.openai.model import Model
from flashinfer_backend.openai.served_model import ServedModel
from flashinfer_backend.openai.turns import Turns


class Api:
    """The application of one process without an engine."""

    def __init__(
        self, template: str | None = None, longest: int = 1 << 20, model_dir: str = "bundled", **access: Any
    ) -> None:
        """template: its file, in place of the checkpoint's. longest: the engine's max_seq_len. access: of
        make_app."""
        metrics: Any = SimpleNamespace(error=lambda status: None)
        model = Model(["m"], EngineConfig(model_dir=model_dir), template_file=template)
        self.served = ServedModel(model, metrics)
        limits = SimpleNamespace(vocab_size=2048, max_seq_len=longest, max_input_len=longest - 1)
        self.engines = SimpleNamespace(status=limits, up=True)
        self.served.link = SimpleNamespace(  # type: ignore[assignment]
            engines=self.engines, check_room=lambda count=1: None, turns=Turns()
        )
        self._app = make_app([self.served], **{"max_body_bytes": 32 << 20, **access})

    def call(self, *asked: Any, **named: str) -> tuple[int, dict[str, str], Any]:
        return asyncio.run(self.ask(*asked, **named))

    async def ask(
        self, path: str, body: bytes = b"", method: str = "POST", **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": given, "query_string": b""}
        await self._app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent)
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], found, json.loads(text) if text.startswith(b"{") else text
