# SPDX-License-Identifier: Apache-2.0
"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from flashinfer_backend.openai.chat import Conversation, render
from flashinfer_backend.openai.door import Door
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.requests import DetokenizeRequest, TokenizeRequest
from flashinfer_backend.openai.template import plain_messages
from flashinfer_backend.openai.tools import read_tools


async def tokenize(door: Door, request: TokenizeRequest) -> dict[str, Any]:
    """Ids of a prompt, or of what messages become. Raises ApiError."""
    door.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("either prompt or messages should be there", param="prompt")
    special = request.add_special_tokens
    if request.messages is not None:
        text = render(
            door,
            Conversation(
                plain_messages(request.messages),
                read_tools(request.tools, None, None),
                variables=request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
            ),
        )
        special = bool(special)
    else:
        text, special = request.prompt or "", special is not False
    (ids,) = await door.encode([text], special)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": door.limits.max_seq_len, "tokens": ids}
    if request.return_token_strs:
        body["token_strs"] = [door.tokenizer.backend.id_to_token(i) for i in ids]
    return body


async def detokenize(door: Door, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens included. Raises ApiError."""
    door.check_model(request.model)
    if any(not 0 <= token < door.limits.vocab_size for token in request.tokens):
        raise ApiError(f"token ids should lie in 0..{door.limits.vocab_size - 1}", param="tokens")
    return {"prompt": door.decoder(skip_special_tokens=False).decode(request.tokens)}
