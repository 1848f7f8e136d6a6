# SPDX-License-Identifier: Apache-2.0
"""/tokenize and /detokenize."""

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from flashinfer_backend.openai.chat import Conversation, render
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.requests import DetokenizeRequest, TokenizeRequest
from flashinfer_backend.openai.sampling import check_ids
from flashinfer_backend.openai.served_model import LONG_TEXT, Answering, ServedModel
from flashinfer_backend.openai.template import plain_messages
from flashinfer_backend.openai.tools import read_tools


def tokenize(served: ServedModel, request: TokenizeRequest) -> Answering:
    """Ids of a prompt, or of what messages become. Raises ApiError."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("either prompt or messages should be there", param="prompt")
    text, field, special = request.prompt or "", "prompt", request.add_special_tokens is not False
    if request.messages is not None:
        field, special = "messages", bool(request.add_special_tokens)
        conversation = Conversation(
            plain_messages(request.messages, read=served.read),
            read_tools(request.tools, None, None, read=served.read),
            variables=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=request.continue_final_message,
        )
        text = render(served, conversation)

    async def answer() -> Response:
        (ids,) = await served.encode([text], special, field=field)
        most = served.limits.max_seq_len

        def content() -> bytes:
            found: dict[str, Any] = {"count": len(ids), "max_model_len": most, "tokens": ids}
            if request.return_token_strs:
                found["token_strs"] = [served.tokenizer.backend.id_to_token(i) for i in ids]
            return msgspec.json.encode(found)

        made = content() if len(ids) < LONG_TEXT else await asyncio.to_thread(content)
        return Response(made, media_type="application/json")

    return answer


def detokenize(served: ServedModel, request: DetokenizeRequest) -> Answering:
    """The text of ids, special tokens included. Raises ApiError."""
    ids = request.tokens
    check_ids("tokens", (min(ids, default=0), max(ids, default=0)), served.limits)
    text = served.decoder(skip_special_tokens=False).decode(ids)

    async def answer() -> dict[str, Any]:
        return {"prompt": text}

    return answer
