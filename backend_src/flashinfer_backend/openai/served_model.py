# SPDX-License-Identifier: Apache-2.0
"""What all requests to one process for one model share: tokenizer, template, limits, the engines' link."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect

from flashinfer_backend.core.bounds import ALL_PROMPTS, FIELDS, GUIDE, WORD_IDS
from flashinfer_backend.core.values import some
from flashinfer_backend.models.pooling import read_pooling, read_prompts
from flashinfer_backend.openai.connection import client_left
from flashinfer_backend.openai.errors import ApiError, field_error
from flashinfer_backend.openai.formats import choice
from flashinfer_backend.openai.link import EngineLink, Streams, unavailable
from flashinfer_backend.openai.log_probs import TokenTexts, chat_token, completion_token, text_of
from flashinfer_backend.openai.metrics import Metrics
from flashinfer_backend.openai.model import Model
from flashinfer_backend.openai.requests import Sampling
from flashinfer_backend.openai.response_store import ResponseStore
from flashinfer_backend.openai.sampling import (
    Defaults,
    EngineLimits,
    Guide,
    Length,
    NamedTokens,
    sampling_params,
)
from flashinfer_backend.openai.template import ChatTemplate
from flashinfer_backend.serving.adapters import AdapterNames
from flashinfer_backend.serving.generation import GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport.endpoint import ENGINE_DOWN

# Of a request that was read: answers it, by a Response or by what becomes JSON. Raises ApiError.
Answering = Callable[[], Awaitable[Any]]
SEEN_S, LOOK_S = 1.0, 0.02  # until each process has seen an engine that one has seen
FEW_SEQUENCES = 64  # up to which a request does not wait for many larger ones
LONG_TEXT = 4096  # characters from which a text is tokenized in a thread, so that streams go on
# From here on it has to wait for a thread of few: each takes half a gigabyte for as long as a second.
FEW_THREADS, LONGEST_TEXT = ThreadPoolExecutor(2, "longest texts"), 1 << 16


class ServedModel:
    """One process's access to one model. `find_model` chooses among several."""

    def __init__(
        self,
        model: Model,
        metrics: Metrics,
        adapters: AdapterNames | None = None,
        store: ResponseStore | None = None,
    ) -> None:
        """adapters: None where the engine has no room for any. store: None where no responses are kept.
        All models of a process share metrics and store. Raises ValueError or OSError for a checkpoint that
        cannot be read."""
        self.model, self.metrics, self.adapters, self.store = model, metrics, adapters, store
        self.link: EngineLink  # set once the event loop runs
        self.tokenizer = TextTokenizer(model.tokenizer_folder)
        self.pooling = read_pooling(model.folder, model.tokenizer_folder, model.engine.task)
        self.prompts, self.default_prompt = read_prompts(model.folder)
        template = Path(model.template_file) if model.template_file else None
        self.template = ChatTemplate.load(model.tokenizer_folder, template)
        self.defaults = Defaults() if model.openai_defaults else Defaults.load(model.folder)
        # Of messages, calls and functions, besides the API's.
        self.read = self.template.keys if self.template else frozenset[str]()
        sources = (self.template.tool_source, self.template.source) if self.template else ("", "")
        found = model.tool_format, model.reasoning_format
        self.tool_format = choice.detect_tools(sources[0]) if found[0] == "auto" else found[0]
        self.reasoning_format = choice.detect_reasoning(sources[1]) if found[1] == "auto" else found[1]
        # Now, or the first request would wait: two tables of 128 000 tokens take 0.3 s.
        self._decoders = {skip: DeltaDecoder(self.tokenizer.backend, skip) for skip in (True, False)}
        if self.template is not None:  # which is compiled here too
            with contextlib.suppress(ApiError):  # it may want other messages
                self.template.render([{"role": "user", "content": "?"}])

    def decoder(self, skip_special_tokens: bool = True) -> DeltaDecoder:
        """Writes text with special tokens or without."""
        return self._decoders[skip_special_tokens]

    @cached_property
    def token_texts(self) -> TokenTexts[str]:
        return TokenTexts(text_of, self.decoder(skip_special_tokens=False))

    @cached_property
    def completion_tokens(self) -> TokenTexts[str]:
        return TokenTexts(completion_token, self.decoder(skip_special_tokens=False))

    @cached_property
    def chat_tokens(self) -> TokenTexts[bytes]:
        return TokenTexts(chat_token, self.decoder(skip_special_tokens=False))

    @property
    def name(self) -> str:
        return self.model.names[0]

    @property
    def all_names(self) -> list[str]:
        """Under which requests may ask for the model or for one of its adapters."""
        return [*self.model.names, *(self.adapters.folders if self.adapters is not None else ())]

    def has(self, name: str) -> bool:
        return name in self.model.names or self.adapter_folder(name) is not None

    async def attached(self) -> None:
        """Waits a moment for an engine: another process, asked for /health, may have seen it already."""
        until = time.monotonic() + SEEN_S
        while not self.link.engines.up and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    @property
    def limits(self) -> EngineLimits:
        """Raises ApiError while the engine has never been there."""
        status = self.link.engines.status
        if status is None:
            raise unavailable(ENGINE_DOWN)
        guided = self.model.engine.guided_decoding_backend != "none"
        return EngineLimits(status.vocab_size, status.max_seq_len, status.max_input_len, guided)

    def check_task(self, path: str, tasks: Sequence[str]) -> None:
        """Raises ApiError where the model is for another task than a path's."""
        pooling = self.pooling
        if (pooling.task if pooling is not None else "generate") in tasks:
            return
        if pooling is None:
            needs = "an embedding model" if "embed" in tasks else "a reranker"
            says = f"writes text, and {path} needs {needs} (docs/embeddings.md)"
        else:
            says = f"is {pooling.what}"
        raise ApiError(f"The model `{self.name}` {says}", 404, "model")

    def adapter(self, name: str) -> tuple[str, str]:
        """Folder and name of the adapter that a request names as its model, for its SamplingParams."""
        folder = self.adapter_folder(name)
        return ("", "") if folder is None else (folder, name)

    def adapter_folder(self, name: str) -> str | None:
        """The folder of the adapter that a request names as its model; None where it names the model
        itself."""
        if self.adapters is None or not name or name in self.model.names:
            return None
        return self.adapters.folder(name)

    def check_room(self, count: int = 1) -> None:
        """Before work for `count` sequences. Raises ClientDisconnect, and ApiError where not all would go."""
        if client_left():
            raise ClientDisconnect
        self.link.check_room(count)

    async def prepare(self, count: int) -> None:
        """Waits until it is the turn of a request to prepare `count` sequences. Raises as check_room does."""
        await self.link.turns.take(count > FEW_SEQUENCES)
        self.check_room(count)

    async def encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        places: Sequence[str] = (),
        field: str = "prompt",
    ) -> list[list[int]]:
        """Ids of each text. places: where the request has each text; without places each text is a prompt, of
        the request's `field`. Raises ApiError for a text that is too long to be tokenized."""
        most = self.model.max_prompt_bytes
        for number, text in enumerate(texts) if most else ():
            if (size := len(text.encode(errors="replace"))) > most:
                name = places[number] if places else "the prompt"
                raise ApiError(
                    f"{name} is too long: it has {size} bytes; this server takes at most {most}"
                    " (--max-prompt-bytes)",
                    param=places[number] if places else field,
                    code="context_length_exceeded",
                )
        if most and (size := sum(map(len, texts))) > ALL_PROMPTS * most:
            name = places[0].partition("[")[0] if places else field
            raise field_error(
                name,
                f"has {size} characters in {len(texts)} texts; it should have at most"
                f" {ALL_PROMPTS * most} in a request. Send fewer texts in one",
            )
        return await self._encoded(texts, add_special_tokens)

    async def _encoded(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        size, encode = sum(map(len, texts)), self.tokenizer.encode_batch
        if size < LONG_TEXT:
            return encode(texts, add_special_tokens)
        threads = None if size < LONGEST_TEXT else FEW_THREADS  # None: the loop's own
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, encode, texts, add_special_tokens)

    async def count(self, text: str) -> int:
        """Number of tokens of a part of an answer."""
        (ids,) = await self._encoded([text], False)
        return len(ids)

    def special_stops(self, words: Sequence[str]) -> list[list[int]]:
        """The ids of those stop words that hold special tokens, which are left out of the text."""
        decoder, named = self.decoder(), self.tokenizer.backend.id_to_token
        return [
            ids
            for word, ids in zip(words, self.tokenizer.encode_batch(words, False), strict=True)
            if any(not decoder.writes_all([i]) and (named(i) or word) in word for i in ids)
        ]

    async def generate(
        self,
        rows: Sequence[tuple[GenerationRequest, int]],
        skip_special_tokens: bool,
    ) -> Streams:
        """Submits sequences; see EngineLink.generate. Raises ApiError also where they would take too much to
        the engine, each its own. Raises ClientDisconnect."""
        if client_left():  # thousands of sequences would take a tenth of a second of all other clients
            raise ClientDisconnect
        for name, held, bound in (
            ("prompt", lambda row: len(row.prompt), FIELDS["input_ids"]),
            ("bad_words", lambda row: sum(map(len, row.params.bad_words)), WORD_IDS),
            ("allowed_token_ids", lambda row: len(row.params.allowed_ids), FIELDS["allowed_token_ids"]),
            ("the guide", lambda row: len(row.params.grammar), GUIDE),
        ):
            found = sum(held(row) * count for row, count in rows)
            if bound.sequences is not None and found > bound.sequences:
                of = "characters" if bound is GUIDE else bound.of
                raise ApiError(
                    f"{name} has {found} {of} for all answers of the request together; it should have at most"
                    f" {bound.sequences}. Ask for fewer answers at a time",
                    param="n",
                )
        if skip_special_tokens and rows:
            words = rows[0][0].stop_words  # the same in all rows
            find = partial(self.special_stops, words)
            special = find() if sum(map(len, words)) < LONG_TEXT else await asyncio.to_thread(find)
            for row, _ in rows:
                row.params.stop_sequences += special
        return self.link.generate(list(rows), self.decoder(skip_special_tokens))


def find_model(models: Sequence[ServedModel], name: str) -> ServedModel:
    """The model that a request names. A server's only model need not be named. Raises ApiError."""
    if len(models) == 1 and not name:
        return models[0]
    for served in models:
        if served.has(name):
            return served
    has = f"this server has {some([each for served in models for each in served.all_names])}"
    if not name:
        raise field_error("model", f"is missing; {has}")
    raise ApiError(f"The model `{name}` does not exist; {has}", 404, "model", "model_not_found")


def find_able_model(
    models: Sequence[ServedModel], name: str, able: Callable[[ServedModel], bool]
) -> ServedModel:
    """The same where few models may be able to do what is asked: one alone need not be named."""
    found = [served for served in models if able(served)]
    return found[0] if len(found) == 1 and not name else find_model(models, name)


def generation_request(
    served: ServedModel,
    request: Sampling,
    prompt: Sequence[int],
    tokens: NamedTokens,
    length: Length,
    streaming: bool,
    guide: Guide,
    stops: Sequence[str] = (),
) -> GenerationRequest:
    """What is submitted for a prompt. tokens: what named_tokens returned. guide: what the answer follows.
    stops: words that end it next to the request's own. Raises ApiError for what does not fit."""
    end_id = served.tokenizer.eos_id
    params = sampling_params(request, served.defaults, served.limits, tokens, end_id, length, guide)
    params.adapter, params.adapter_name = served.adapter(request.model)
    stops = list(dict.fromkeys([*request.stops, *stops]))
    return GenerationRequest(
        np.array(prompt, "<i4"),
        params,
        streaming,
        exclude_input=True,
        stop_words=stops,
        exclude_stop_words=not request.include_stop_str_in_output and bool(stops or request.stop_token_ids),
        priority=request.priority,
        timeout_us=round((request.queue_timeout or 0) * 1e6),
        free_of_stops=request.min_tokens,
        guide_field=guide.field,
    )
