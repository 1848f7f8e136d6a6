# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings of embedding models; /v1/rerank and /v1/score of rerankers.

Each text is a sequence of one token to the engine, which gives the pooled values in place of its logits. Here
they become embeddings or scores.
"""

import base64
import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from flashinfer_backend.core.bounds import ALL_PROMPTS, MIB, MOST_INPUTS
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.answer import JsonResponse, Usage, note_sent
from flashinfer_backend.openai.errors import ApiError, field_error, wrong_value
from flashinfer_backend.openai.requests import EmbeddingRequest, EngineRequest, RerankRequest, ScoreRequest
from flashinfer_backend.openai.sampling import check_ids
from flashinfer_backend.openai.served_model import Answering, ServedModel
from flashinfer_backend.serving.generation import GenerationRequest

# Qwen3-Reranker's prompt: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def embeddings(served: ServedModel, request: EmbeddingRequest) -> Answering:
    name, given, pooling = request.prompt_name, request.input, served.pooling
    if name is not None and name not in served.prompts:
        known = ", ".join(served.prompts) or "none"
        raise field_error("prompt_name", f"is {shown(name)}; the checkpoint's prompts are: {known}")
    assert pooling is not None
    most = request.dimensions
    if most is not None and most > pooling.size:
        raise field_error("dimensions", f"is {most}; the model's embeddings have {pooling.size}")
    inputs: list[Any] = [given] if isinstance(given, str) or (given and type(given[0]) is int) else given
    _check_count("input", len(inputs))
    kinds, places = set(map(type, inputs)), _places("input", len(inputs))
    if kinds == {str}:
        _check_texts("input", inputs)
        before = served.prompts.get(name or served.default_prompt or "", "")
        inputs = [before + text for text in inputs] if before else inputs
    elif name is not None:
        raise field_error("prompt_name", "goes with texts, not with token ids")
    else:
        for place, ids in zip(places, inputs, strict=True):
            if kinds != {list} or not ids or set(map(type, ids)) != {int}:
                raise ApiError(
                    "input should be a text, a list of texts, a list of token ids or a list of those lists,"
                    f" none of them empty; {place} is {shown(ids)}",
                    param=place,
                )
            check_ids(place, (min(ids), max(ids)), served.limits)

    def shape(values: np.ndarray) -> msgspec.Raw:
        found = values[:most]
        if pooling.normalize or most is not None:
            found = found / max(float(np.linalg.norm(found)), 1e-12)
        # Written at once: JSON of thousands of embeddings would keep the loop for seconds.
        as_text = request.encoding_format == "base64"
        content = base64.b64encode(found.astype("<f4").tobytes()).decode() if as_text else found.tolist()
        return msgspec.Raw(msgspec.json.encode(content))

    def content(found: list[Any]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(found)]
        return {"object": "list", "data": data}

    async def answer() -> Response:
        is_text = kinds == {str}
        served.check_room()
        ids = await served.encode(inputs, request.add_special_tokens, places) if is_text else inputs
        return await _answer(served, request, "embd", ids, places, shape, content)

    return answer


def rerank(served: ServedModel, request: RerankRequest) -> Answering:
    _check_count("documents", len(request.documents))
    places = _places("documents", len(request.documents))
    documents = [_text(*each) for each in zip(places, request.documents, strict=True)]
    prompts = _pairs(served, request, "query", [request.query], "documents", documents)

    def content(found: list[float]) -> dict[str, Any]:
        best = sorted(range(len(found)), key=lambda i: -found[i])[: request.top_n or None]
        results = []
        for i in best:
            document = {"document": {"text": documents[i]}} if request.return_documents else {}
            results.append({"index": i, **document, "relevance_score": found[i]})
        return {"results": results}

    return partial(_scored, served, request, "rerank", prompts, places, content)


def score(served: ServedModel, request: ScoreRequest) -> Answering:
    sides: list[Any] = []
    for new, old in (("queries", "text_1"), ("documents", "text_2")):
        given = {name: value for name in (new, old) if (value := getattr(request, name)) is not None}
        if len(given) != 1:
            raise field_error(new, f"or {old} should be there, and not both")
        for name, value in given.items():
            sides += [name, [value] if isinstance(value, str) else value]
    prompts = _pairs(served, request, *sides)

    def content(found: list[float]) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": each} for i, each in enumerate(found)]
        return {"object": "list", "created": int(time.time()), "data": data}

    return partial(_scored, served, request, "score", prompts, _places(sides[2], len(prompts)), content)


async def _scored(
    served: ServedModel,
    request: RerankRequest | ScoreRequest,
    name: str,
    prompts: Sequence[str],
    places: Sequence[str],
    content: Callable[[list[Any]], dict[str, Any]],
) -> Response:
    """places: in the request, of what differs in each prompt. content: as _answer has it."""
    served.check_room()
    # The prompt's own last token is the one that is answered.
    ids = await served.encode(prompts, False, places)

    def probability(values: np.ndarray) -> float:
        """The share of yes in the softmax of both logits, or the sigmoid of one."""
        logit = float(values[0]) - (float(values[1]) if len(values) > 1 else 0.0)
        return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0

    return await _answer(served, request, name, ids, places, probability, content)


async def _answer(
    served: ServedModel,
    request: EngineRequest,
    name: str,
    prompts: Sequence[list[int]],
    places: Sequence[str],
    shape: Callable[[np.ndarray], Any],
    content: Callable[[list[Any]], dict[str, Any]],
) -> Response:
    """shape: turns the values float32 [n] of one prompt into a result. content: makes the answer of all
    results. Raises ApiError."""
    await served.prepare(len(prompts))
    most = served.limits.max_input_len
    has = "has" if isinstance(request, EmbeddingRequest) else "makes, with its query, a prompt of"
    folder, adapter = served.adapter(request.model)
    rows = []
    for place, ids in zip(places, prompts, strict=True):
        if not 1 <= len(ids) <= most:
            raise field_error(
                place,
                f"{has} {len(ids)} tokens; it should have 1 to {most}",
                code="context_length_exceeded" if ids else None,
            )
        params = SamplingParams(
            max_tokens=1, temperature=0.0, pooled=True, perf_metrics=True, adapter=folder,
            adapter_name=adapter,
        )  # fmt: skip
        timeout_us = round((request.queue_timeout or 0) * 1e6)
        row = GenerationRequest(
            np.array(ids, "<i4"), params, priority=request.priority, timeout_us=timeout_us
        )
        rows.append((row, 1))
    streams = await served.generate(rows, skip_special_tokens=False)
    own_id = f"{name}-{secrets.token_hex(16)}"
    usage = Usage(streams)

    async def body() -> dict[str, Any]:
        found: list[Any] = [None] * len(streams.all)
        async for stream, chunk in streams:
            usage.note(stream, chunk)
            del chunk.ids[:]  # the engine's one token means nothing
            note_sent(served, stream, chunk)
            values = [report.generation_logits for report in chunk.reports if report.generation_logits]
            pooled = np.frombuffer(values[0], "<f4")
            if not np.isfinite(pooled).all():  # JSON has no such numbers
                place = places[stream.index]
                raise ApiError(
                    f"{place}: the model computed numbers that are not finite; check its weights, or serve it"
                    " with dtype=bfloat16 or float32",
                    500,
                    place,
                )
            found[stream.index] = shape(pooled)
            chunk.reports.clear()
        counts = usage.body()
        del counts["completion_tokens"]
        return {"id": own_id, **content(found), "model": request.model or served.name, "usage": counts}

    return JsonResponse(served, streams, body, own_id)


def _pairs(
    served: ServedModel,
    request: RerankRequest | ScoreRequest,
    query: str,
    queries: list[Any],
    name: str,
    texts: list[Any],
) -> list[str]:
    """The prompts. query, name: the fields that hold the queries and the documents."""
    _check_texts(query, queries)
    _check_texts(name, texts)
    if len(queries) not in (1, len(texts)):
        raise field_error(
            query,
            f"has {len(queries)} texts and {name} has {len(texts)}; give one query for all documents,"
            " or as many of both",
        )
    queries = queries * len(texts) if len(queries) == 1 else queries
    # Before they are put together: each document brings its query.
    size, most = sum(map(len, queries + texts)), ALL_PROMPTS * (served.model.max_prompt_bytes or MIB)
    if size > most:
        raise field_error(
            name,
            f"has {size} characters, with the query of each; it should have at most {most} in a"
            " request. Send fewer documents in one",
        )
    task = INSTRUCTION if request.instruction is None else request.instruction
    return [RERANK_PROMPT.format(task, *pair) for pair in zip(queries, texts, strict=True)]


def _text(place: str, document: Any) -> Any:
    """A document's, which is a text or an object with one; what else an object has would not be scored."""
    if not isinstance(document, dict):
        return document
    if others := document.keys() - {"text"}:
        known = "a document is a text, or an object with `text` alone"
        raise field_error(place, f"has the key {shown(min(others))}, which is not known; {known}")
    return document.get("text")


def _places(name: str, count: int) -> list[str]:
    return [f"{name}[{i}]" for i in range(count)]


def _check_count(name: str, found: int) -> None:
    if not 1 <= found <= MOST_INPUTS:
        raise field_error(name, f"has {found} elements; it should have 1 to {MOST_INPUTS}")


def _check_texts(name: str, texts: Sequence[Any]) -> None:
    _check_count(name, len(texts))
    for place, text in zip(_places(name, len(texts)), texts, strict=True):
        if not isinstance(text, str) or not text:
            raise wrong_value(place if name != "query" else name, text, "a text that is not empty")
