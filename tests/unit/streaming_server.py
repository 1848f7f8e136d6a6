# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that speaks both streaming wire forms, well or badly as a word in the prompt asks.

`early` ends the stream before its last token, `error` sends an in-band error, `busy` answers 503,
`drop` cuts the connection after the first chunk, `split` sends every event in two TCP segments, `merge`
packs all tokens into one segment, `short` omits a token but ends properly, `slow` waits a minute a token.
Triton's stream ends with a `finish_reason`: `cancelled` makes it that and `stopped` stop, both at half the
tokens and `stopped` with an empty chunk more; `unmarked` leaves it out, as TensorRT-LLM does.
`uncounted` reports no token counts, `wide` sends text beyond ASCII, `foreign` sends a chunk of another form,
`latin` answers 503 in Latin-1.
"""

import asyncio
import json
import re
import threading
from typing import Any


class StreamingServer:
    """Serves from a thread of its own until `close`; `bodies` holds each request's JSON as they came."""

    def __init__(self, chunk_seconds: float = 0.0) -> None:
        self.chunk_seconds = chunk_seconds
        self.bodies: list[dict[str, Any]] = []
        self.models: list[str] = []  # what it lists, where there are any
        self.tokenizer = ""  # the folder that it names, where it does
        self.in_flight = 0
        self.most_in_flight = 0
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(120)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self.loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(120)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if head.startswith("get"):
                    data = [{"id": name, "root": self.tokenizer} for name in self.models]
                    if "/ensemble/config" in head:
                        steps = [{"model_name": "first"}, {"model_name": "preprocessing"}]
                        await self._answer(writer, 200, {"ensemble_scheduling": {"step": steps}})
                        continue
                    if "/first/config" in head and self.tokenizer:
                        parameters = {"tokenizer_dir": {"string_value": self.tokenizer}}
                        await self._answer(writer, 200, {"parameters": parameters})
                        continue
                    await self._answer(writer, 200, {"version": "1.0"} | ({"data": data} if data else {}))
                    continue
                length = int(re.findall(r"content-length: *(\d+)", head)[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await self._stream(writer, body, triton="generate_stream" in head.splitlines()[0])
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], triton: bool) -> None:
        prompt, tokens = body["text_input" if triton else "prompt"], body["max_tokens"]
        if "busy" in prompt:
            await self._answer(writer, 503, {"error": "Exceeds maximum queue size"})
            return
        if "latin" in prompt:
            writer.write("HTTP/1.1 503 X\r\nContent-Length: 8\r\n\r\nüberlast".encode("latin-1"))
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        half = any(word in prompt for word in ("early", "cancelled", "stopped"))
        count = tokens // 2 if half else tokens - 1 if "short" in prompt else tokens
        if "uncounted" in prompt:
            body = body | {"return_num_output_tokens": False}
        suffix = "é\U0001f600" if "wide" in prompt else ""
        events = [self._chunk(triton, body, f" w{i}{suffix}") for i in range(count)]
        if triton:
            self._mark_end(prompt, body, events)
        if "foreign" in prompt:
            events[0] = {"text_output": " w0", "num_output_tokens": [1]}
        if "error" in prompt:
            events[1:] = [{"error": "engine failed" if triton else {"message": "engine failed", "code": 500}}]
        if not triton and "early" not in prompt and "error" not in prompt:
            events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}})
        packed = b""
        for event in events:
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            if "merge" in prompt:
                packed += data
                continue
            pieces = [data[:9], data[9:]] if "split" in prompt else [data]
            for piece in pieces:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(self.chunk_seconds)
            if "drop" in prompt:
                return writer.close()
            if "slow" in prompt:
                await asyncio.sleep(60)
        if not triton and "early" not in prompt:
            packed += b"data: [DONE]\n\n"
        if packed:
            writer.write(b"%x\r\n%s\r\n" % (len(packed), packed))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _mark_end(self, prompt: str, body: dict[str, Any], events: list[dict[str, Any]]) -> None:
        if "stopped" in prompt:
            events.append(self._chunk(True, body, "", tokens=0))
        if "early" not in prompt and "unmarked" not in prompt:
            reasons = {"cancelled": "cancelled", "stopped": "stop"}
            events[-1]["finish_reason"] = next((r for w, r in reasons.items() if w in prompt), "length")

    @staticmethod
    def _chunk(triton: bool, body: dict[str, Any], text: str, tokens: int = 1) -> dict[str, Any]:
        if not triton:
            return {"id": "1", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
        chunk = {"model_name": "ensemble", "model_version": "1", "text_output": text}
        return chunk | ({"num_output_tokens": tokens} if body.get("return_num_output_tokens") else {})
