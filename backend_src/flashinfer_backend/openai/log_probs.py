# SPDX-License-Identifier: Apache-2.0
"""Log probabilities in the forms of /v1/completions, lists by token, of chats and of vLLM's prompt_logprobs,
an object for each token. All are written as JSON token by token.

Twenty alternatives of each token of a prompt are many objects. As text they take about a twentieth of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import mod
from typing import TypeVar

import msgspec
import numpy as np

from flashinfer_backend.core.bounds import MOST_LOG_PROBS, MOST_PROMPT_LOG_PROBS
from flashinfer_backend.core.step import TOP_LOGPROBS
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.serving.generation import Chunk, GenerationRequest
from flashinfer_backend.text.delta import CONTEXT_IDS, DeltaDecoder

MANY = 2000  # log probabilities that take some 4 ms to write
LOWEST = -9999.0  # JSON has no infinity; other servers also write this

encode = msgspec.json.encode
Text = TypeVar("Text", str, bytes)
Written = TypeVar("Written")


async def in_thread_if_many(write: Callable[[], Written], tokens: int, top: int) -> Written:
    """What `write` makes of the log probabilities of some tokens with `top` alternatives each: in a thread if
    there are many, so that streams go on."""
    return write() if tokens * (1 + top) < MANY else await asyncio.to_thread(write)


class TokenTexts(dict[int, Text]):
    """Tokens by their ids, each written once: at most the vocabulary, some 200 bytes of a token."""

    def __init__(self, write: Callable[[bytes], Text], decoder: DeltaDecoder) -> None:
        """write: makes a text of a token's bytes. decoder: writes tokens, also special ones."""
        super().__init__()
        self._write: Callable[[bytes], Text] = write
        self._decoder = decoder

    def __missing__(self, token: int) -> Text:
        self[token] = made = self._write(self._decoder.piece(token))
        return made


def text_of(data: bytes) -> str:
    return data.decode(errors="replace")


def completion_token(data: bytes) -> str:
    """A token of a completion: its text, or, of a part of a character, its bytes as OpenAI's completions
    write them ("bytes:\\xe2\\x80"). As replacement characters, different tokens would be the same key."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_token(data: bytes) -> bytes:
    """A token's object in a chat, with a place for its log probability as of printf."""
    text = encode(text_of(data)).replace(b"%", b"%%")
    return b'{"token":' + text + b',"logprob":%b,"bytes":' + encode(list(data)) + b"}"


def chat_log_probs(chunk: Chunk, texts: TokenTexts[bytes], top: int) -> list[msgspec.Raw]:
    """Log probabilities of each token of a chunk, and of its `top` likeliest alternatives, for a chat. texts:
    of chat_token."""
    found = []
    for token, value, likely in chunk.told(top):
        ids, values = zip((token, value), *likely, strict=True)
        own, *others = map(mod, map(texts.__getitem__, ids), _numbers(values))
        found.append(msgspec.Raw(own[:-1] + b',"top_logprobs":[' + b",".join(others) + b"]}"))
    return found


def _numbers(values: Sequence[float]) -> list[bytes]:
    """Log probabilities, one at least, as JSON."""
    if min(values) < LOWEST:
        values = [max(value, LOWEST) for value in values]
    return encode(values)[1:-1].split(b",")


def mean(chunk: Chunk) -> float:
    """The mean of the log probabilities of a chunk's tokens, 0 without any."""
    return float(np.maximum(chunk.log_probs, LOWEST).mean(dtype=np.float64)) if chunk.log_probs else 0.0


class TokenLists:
    """What is known of tokens in their order."""

    def __init__(
        self, texts: TokenTexts[str], written: DeltaDecoder, offset: int = 0, context_ids: Sequence[int] = ()
    ) -> None:
        """texts: tokens as completion_token writes them. written: writes the text, in which tokens have
        offsets. offset: characters of the text before the first token. context_ids: the last ids before
        it."""
        self._texts, self._written = texts, written
        self._context = list(context_ids)
        self._parts = {name: bytearray() for name in NAMES}
        self.offset = offset
        self.count = 0  # tokens that have a log probability

    def add(self, token: int, value: float | None, top: Iterable[tuple[int, float]]) -> None:
        """A token, its log probability (None: it has none) and the likeliest tokens in its place."""
        text, texts = self._texts[token], self._texts
        best: dict[str, float] | None = None
        if value is not None:
            value = max(value, LOWEST)
            best = {}
            for other, found in top:  # of tokens that look alike the likeliest counts
                best.setdefault(texts[other], max(found, LOWEST))
            best[text] = value
            self.count += 1
        for part, content in zip(self._parts.values(), (text, value, best, self.offset), strict=True):
            part += encode(content)
            part += b","
        self.offset += len(self._written.delta(self._context, [token], last=False))
        self._context = [*self._context[1 - CONTEXT_IDS :], token]

    def add_chunk(self, chunk: Chunk, top: int) -> None:
        """A chunk's tokens, each with its likeliest alternatives."""
        for token, value, likely in chunk.told(top):
            self.add(token, value, likely)

    def followed_by(self, later: TokenLists) -> TokenLists:
        """These tokens and then those of `later`, whose offset has to begin where this one ends."""
        both = TokenLists(self._texts, self._written, later.offset)
        both._parts = {name: part + later._parts[name] for name, part in self._parts.items()}
        return both

    def json(self) -> dict[str, msgspec.Raw]:
        """What the API answers, for a JSON encoder."""
        return {name: msgspec.Raw(b"[" + part[:-1] + b"]") for name, part in self._parts.items()}


NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class PromptLogProbs:
    """Log probabilities of a prompt's tokens from the second on, packed: JSON takes ten times as much."""

    def __init__(self, prompt: np.ndarray, data: bytes) -> None:
        """prompt: int32 [n]. data: of a report, int32 [n - 1, 1 + most, 2]."""
        self.prompt = prompt
        found = np.frombuffer(data, TOP_LOGPROBS)
        self._rows = found.reshape(len(prompt) - 1, -1) if data else found.reshape(0, 1)

    def told(self, most: int) -> Iterator[tuple[int, float, int, list[tuple[int, float]]]]:
        """Each token, its log probability and rank, and the `most` likeliest in its place with theirs."""
        for token, row in zip(self.prompt[1:].tolist(), self._rows[:, : 1 + most], strict=True):
            (rank, value), *likely = row.tolist()
            yield token, value, rank, likely


def prompt_lists(
    found: PromptLogProbs, top: int, texts: TokenTexts[str], written: DeltaDecoder
) -> TokenLists:
    """The lists of a prompt, with the `top` likeliest alternatives of each token. The first token has no log
    probability. texts, written: see TokenLists."""
    lists = TokenLists(texts, written)
    lists.add(int(found.prompt[0]), None, ())
    for token, value, _, likely in found.told(top):
        lists.add(token, value, likely)
    return lists


def prompt_log_probs(found: PromptLogProbs, top: int, texts: TokenTexts[str]) -> msgspec.Raw:
    """vLLM's prompt_logprobs of a prompt, as JSON; arguments as in prompt_lists. null for the first token,
    then an object by id of the token and the `top` likeliest, each with its log probability, its rank from 1
    on and its text."""
    text = bytearray(b"[null")
    for token, value, own_rank, likely in found.told(top):
        told = {token: (value, own_rank)}
        for rank, (other, other_value) in enumerate(likely, 1):
            told.setdefault(other, (other_value, rank))
        text += b"," + encode(
            {
                str(each): {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": texts[each]}
                for each, (value, rank) in told.items()
            }
        )
    return msgspec.Raw(text + b"]")


def check_log_probs(
    rows: Iterable[tuple[GenerationRequest, int]],
    told: int,
    stream: bool | None,
    streamable: bool,
    *fields: str,
) -> None:
    """rows: of a request, each with its number of answers. told: log probabilities of each token of a prompt
    that is told of. stream, streamable: whether the answer streams, and could. fields: what the number
    depends on, first what asks for them. Raises ApiError where an answer could have too many."""
    found = 0
    for row, count in rows:
        params = row.params
        if params.log_probs and not stream:
            found += count * params.max_tokens * (1 + params.top_logprobs)
        if params.prompt_log_probs is not None:  # kept once for all answers
            found += (own := len(row.prompt) * told)
            if own > MOST_PROMPT_LOG_PROBS:
                raise ApiError(
                    f"{fields[0]}: a prompt of {len(row.prompt)} tokens would have {own} log probabilities,"
                    " of its tokens and their alternatives; it should have at most"
                    f" {MOST_PROMPT_LOG_PROBS}. Give a lower {fields[0]}, or a shorter prompt",
                    param=fields[0],
                )
    if found > MOST_LOG_PROBS:
        raise ApiError(
            f"{fields[0]}: the answer could have {found} log probabilities, of its tokens and their"
            f" alternatives; without streaming it should have at most {MOST_LOG_PROBS}. Give a"
            f" lower {' or '.join(fields)}" + (", or set stream to true" if streamable else ""),
            param=fields[0],
        )
