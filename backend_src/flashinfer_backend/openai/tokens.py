# SPDX-License-Identifier: Apache-2.0
"""/tokenize and /detokenize."""

from typing import Any

from flashinfer_backend.openai.chat import Conversation, render
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.requests import DetokenizeRequest, TokenizeRequest, decode
from flashinfer_backend.openai.sampling import check_ids
from flashinfer_backend.openai.served_model import ServedModel
from flashinfer_backend.openai.template import plain_messages
from flashinfer_backend.openai.tools import read_tools


def read_tokenize(served: ServedModel, body: bytes) -> tuple[TokenizeRequest, str]:
    """A request, and the text that it asks for. Raises ApiError."""
    request = decode(TokenizeRequest, body)
    served.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("either prompt or messages should be there", param="prompt")
    if request.messages is None:
        return request, request.prompt or ""
    conversation = Conversation(
        plain_messages(request.messages),
        read_tools(request.tools, None, None),
        variables=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=request.continue_final_message,
    )
    return request, render(served, conversation)


async def tokenize(served: ServedModel, parsed: tuple[TokenizeRequest, str]) -> dict[str, Any]:
    """Ids of a prompt, or of what messages become. Raises ApiError."""
    request, text = parsed
    field = "prompt" if request.messages is None else "messages"
    special = request.add_special_tokens
    special = special is not False if field == "prompt" else bool(special)
    (ids,) = await served.encode([text], special, field=field)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": served.limits.max_seq_len, "tokens": ids}
    if request.return_token_strs:
        body["token_strs"] = [served.tokenizer.backend.id_to_token(i) for i in ids]
    return body


def read_detokenize(served: ServedModel, body: bytes) -> str:
    """The text of ids, special tokens included. Raises ApiError."""
    request = decode(DetokenizeRequest, body)
    served.check_model(request.model)
    ids = request.tokens
    check_ids("tokens", (min(ids, default=0), max(ids, default=0)), served.limits)
    return served.decoder(skip_special_tokens=False).decode(ids)


async def shown_text(served: ServedModel, text: str) -> dict[str, Any]:
    """The answer of /detokenize."""
    return {"prompt": text}
