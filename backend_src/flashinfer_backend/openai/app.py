# SPDX-License-Identifier: Apache-2.0
"""The paths of the API."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashinfer_backend import __version__
from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.adapters import (
    LoadRequest,
    UnloadRequest,
    load_adapter,
    served_by_load,
    served_by_unload,
    unload_adapter,
)
from flashinfer_backend.openai.anthropic import count_tokens, message
from flashinfer_backend.openai.chat import chat
from flashinfer_backend.openai.completions import completions
from flashinfer_backend.openai.compressed_bodies import decompressed, encoding_of
from flashinfer_backend.openai.connection import client_left
from flashinfer_backend.openai.embeddings import embeddings, rerank, score
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.link import SHUTTING_DOWN, unavailable
from flashinfer_backend.openai.metrics import Metrics, ModelState, Pages
from flashinfer_backend.openai.openapi import schema
from flashinfer_backend.openai.profiling import (
    StartProfile,
    StopProfile,
    served_by_profile,
    start_profile,
    stop_profile,
)
from flashinfer_backend.openai.request_ids import RequestIds
from flashinfer_backend.openai.requests import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ItemsQuery,
    MessagesRequest,
    RerankRequest,
    ResponseQuery,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    convert,
    decode,
)
from flashinfer_backend.openai.responses import input_page, input_tokens, reads_kept, responses, store_of
from flashinfer_backend.openai.served_model import Answering, ServedModel, find_model
from flashinfer_backend.openai.tokens import detokenize, tokenize
from flashinfer_backend.openai.turns import Turns

PAGE = Path(__file__).with_name("page.html")
OPEN_PATHS = ("/", "/health", "/metrics")  # without a key
# Of bodies that browsers send for any page without asking first: https://fetch.spec.whatwg.org/#cors-safelisted-request-header
UNASKED_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
VERSIONS = ("/v1", "")  # in front of most paths
SWITCHED_OFF = {
    **dict.fromkeys(("/start_profile", "/stop_profile"), "the knob profile_dir"),
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter"), "--lora-root"),
}  # paths that need a setting
MANY_BODIES = 8  # of the largest size, at the same time
LARGE_BODY = 1 << 14  # bytes from which a body is read in a thread, so that streams go on
SMALL_BODY = 1 << 12  # bytes up to which a request does not wait for many larger ones that came before
READERS = 2  # threads for them; further large bodies wait
Read = TypeVar("Read")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _served_by_name(models: Sequence[ServedModel], request: Any) -> ServedModel:
    return find_model(models, request.model)


class Post(NamedTuple):
    """A path that takes a body. kind: the body's struct. read: does all the work that grows with the body,
    except tokenizing; it may raise ApiError. tasks: the tasks of models that serve the path; none: all models
    do. choose: finds the model from the body. no_body: what a request without a body means. grows: whether
    the work grows with more than the body."""

    path: str
    kind: type[msgspec.Struct]
    read: Callable[[ServedModel, Any], Answering]
    tasks: Sequence[str] = ()
    versions: Sequence[str] = VERSIONS
    choose: Callable[[Sequence[ServedModel], Any], ServedModel] = _served_by_name
    no_body: bytes = b""
    grows: Callable[[Any], bool] = lambda asked: False

    def paths(self) -> list[str]:
        return [prefix + self.path for prefix in self.versions]


def make_app(
    models: Sequence[ServedModel], max_body_bytes: int, keys: Sequence[str] = (), origins: Sequence[str] = ()
) -> ASGIApp:
    """The ASGI application of one process. models: all that it serves. keys: of clients; without any, all may
    send requests. origins: whose pages may, in browsers."""
    shared, posts, bodies, turns = models[0].metrics, _posts(models), Bodies(max_body_bytes), Turns()
    routes = [
        Route(path, _endpoint(post, models, bodies, turns), methods=["POST"])
        for post in posts
        for path in post.paths()
    ]
    routes += [*_of_models(models), *_of_kept_responses(models[0]), *_of_state(models)]

    async def openapi(request: Request) -> Response:
        kinds = {path: post.kind for post in posts for path in post.paths()}
        return _json(schema(kinds, _paths(routes, "GET"), _paths(routes, "DELETE"), bool(keys)))

    routes.append(Route("/openapi.json", openapi))
    app = Starlette(routes=routes, exception_handlers=_answers_to_errors(shared))
    guarded: ASGIApp = Ending(Guard(app, shared, keys, origins), shared)
    if origins:  # in front of the guard: browsers ask without a key whether they may
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    return RequestIds(guarded)


def _paths(routes: Sequence[Route], method: str) -> list[str]:
    return [route.path_format for route in routes if method in (route.methods or ())]


def _posts(models: Sequence[ServedModel]) -> list[Post]:
    generate, embed, score_ = ("generate",), ("embed",), ("score",)
    found = [
        Post("/chat/completions", ChatRequest, chat, generate),
        Post("/completions", CompletionRequest, completions, generate),
        Post("/responses", ResponsesRequest, responses, generate, grows=reads_kept),
        Post("/responses/input_tokens", ResponsesRequest, input_tokens, generate, grows=reads_kept),
        Post("/messages", MessagesRequest, message, generate),
        Post("/messages/count_tokens", CountTokensRequest, count_tokens),
        Post("/embeddings", EmbeddingRequest, embeddings, embed),
        Post("/rerank", RerankRequest, rerank, score_, ("/v1", "/v2", "")),
        Post("/score", ScoreRequest, score, score_),
        Post("/tokenize", TokenizeRequest, tokenize),
        Post("/detokenize", DetokenizeRequest, detokenize),
    ]
    if any(served.adapters is not None and served.model.lora_root is not None for served in models):
        load = partial(load_adapter, models)
        found += [
            Post("/load_lora_adapter", LoadRequest, load, choose=served_by_load),
            Post("/unload_lora_adapter", UnloadRequest, unload_adapter, choose=served_by_unload),
        ]
    if any(served.model.profiles for served in models):
        of = (), ("",), served_by_profile, b"{}"
        found += [
            Post("/start_profile", StartProfile, start_profile, *of),
            Post("/stop_profile", StopProfile, stop_profile, *of),
        ]
    return found


def _endpoint(
    post: Post, models: Sequence[ServedModel], bodies: Bodies, turns: Turns
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        async with bodies.arriving(request) as body:
            await turns.take(len(body) > SMALL_BODY)
            if client_left():
                raise ClientDisconnect
            asked = await bodies.read(len(body), decode, post.kind, body or post.no_body)
            served = post.choose(models, asked)
            if post.tasks:
                served.check_task(request.url.path, post.tasks)
            await served.attached()
            size = LARGE_BODY if post.grows(asked) else len(body)
            answering = await bodies.read(size, post.read, served, asked)
        del body, asked  # which its answer would hold until its end
        answer = await answering()
        return answer if isinstance(answer, Response) else _json(answer)

    return endpoint


def _of_models(models: Sequence[ServedModel]) -> Iterator[Route]:
    async def list_models(request: Request) -> Response:
        data = [_model(served, name) for served in models for name in served.all_names]
        return _json({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        if not (name := request.path_params["name"]):
            return await list_models(request)
        served = find_model(models, name)
        return _json(_model(served, name))

    for prefix in VERSIONS:
        yield Route(f"{prefix}/models", list_models)
        yield Route(prefix + "/models/{name:path}", model)


def _of_kept_responses(served: ServedModel) -> Iterator[Route]:
    async def response(request: Request) -> Response:
        name = request.path_params["name"]
        convert(ResponseQuery, request.query_params)
        if request.method != "DELETE":
            return Response(store_of(served).response(name), media_type="application/json")
        store_of(served).delete(name)
        return _json({"id": name, "object": "response", "deleted": True})

    async def input_items(request: Request) -> Response:
        store, query = store_of(served), convert(ItemsQuery, request.query_params)
        name = request.path_params["name"]
        return await asyncio.to_thread(lambda: _json(input_page(store, name, query)))

    for prefix in VERSIONS:
        yield Route(prefix + "/responses/{name}/input_items", input_items)
        yield Route(prefix + "/responses/{name}", response, methods=["GET", "DELETE"])


def _of_state(models: Sequence[ServedModel]) -> Iterator[Route]:
    """Paths that tell how the server is, and the page."""

    async def health(request: Request) -> Response:
        return Response(status_code=200 if all(served.link.engines.up for served in models) else 503)

    async def version(request: Request) -> Response:
        return _json({"version": __version__})

    def metrics_page() -> bytes:
        states = [
            ModelState(
                served.name,
                served.link.engines.statuses,
                None if served.adapters is None else served.adapters.folders,
                served.model.engine.max_loras,
            )
            for served in models
        ]
        return models[0].metrics.text(states)

    pages = Pages(metrics_page)

    async def metrics(request: Request) -> Response:
        return Response(await pages.next(), headers={"content-type": METRICS_TYPE})

    shown = PAGE.read_bytes()

    async def page(request: Request) -> Response:
        return Response(shown, media_type="text/html")

    yield from (Route("/health", health), Route("/version", version), Route("/metrics", metrics))
    yield Route("/", page)


def _answers_to_errors(metrics: Metrics) -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    """How exceptions are answered, and counted, by their class."""

    async def api_error(request: Request, error: ApiError) -> Response:
        metrics.error(error.status)
        return error.response(request.scope)

    async def http_error(request: Request, error: HTTPException) -> Response:
        headers, path = dict(error.headers or {}), request.url.path
        need = SWITCHED_OFF.get(path.removeprefix("/v1"))
        words = {
            404: f"there is no {path}" + (f": this server was started without {need}" if need else ""),
            405: f"{path} takes {headers.get('Allow')}, not {request.method}",
        }
        wrong = ApiError(words.get(error.status_code, str(error.detail)), error.status_code)
        answer = await api_error(request, wrong)
        answer.headers.update(headers)
        return answer

    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client has left

    async def unexpected(request: Request, error: Exception) -> Response:
        traceback.print_exception(error, file=sys.stderr)
        return await api_error(request, ApiError("internal error; the server's log has the rest of it", 500))

    return {ApiError: api_error, HTTPException: http_error, ClientDisconnect: left, Exception: unexpected}


class Ending:
    """Answers requests that the server's end cuts off. uvicorn cancels them when their time is over; it
    would log a traceback for each and send a 500 without words.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        def noted(message: Message) -> Awaitable[None]:
            nonlocal begun
            begun = True
            return send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not begun:
                self._metrics.error(503)
                await unavailable(SHUTTING_DOWN).response(scope)(scope, receive, send)


class Guard:
    """Lets only those in who have a key, and no web page that did not ask whether it may."""

    def __init__(self, app: ASGIApp, metrics: Metrics, keys: Sequence[str], origins: Sequence[str]) -> None:
        self._app, self._metrics, self._origins = app, metrics, origins
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._metrics.error(error.status)
        await error.response(scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(reversed(scope["headers"]))
        if self._keys and scope["path"] not in OPEN_PATHS and not self._known(headers):
            return ApiError(
                "Incorrect API key provided; send one that this server knows as `Authorization: Bearer KEY`"
                " or `x-api-key: KEY`",
                401,
                code="invalid_api_key",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        if scope["method"] != "POST" or not origin or kind not in UNASKED_TYPES:
            return None
        if "*" in self._origins or origin in self._origins:
            return None
        return ApiError(
            f"a web page of {shown(origin)} sent this as {shown(kind)}; its Content-Type should be"
            " application/json, and --allowed-origins should name pages that are not this server's own",
            403,
        )

    def _known(self, headers: Mapping[bytes, bytes]) -> bool:
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer.strip()] if kind.lower() == b"bearer" else []
        given += [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
        # All are compared, each in the same time, whichever it is.
        pairs = [(_digest(key), known) for key in given for known in self._keys]
        return any([hmac.compare_digest(*pair) for pair in pairs])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(eq=False)
class _Body:
    """A body that a task has. size: bytes that it has or says that it has. held: those that have arrived, and
    what they become."""

    task: asyncio.Task[Any]
    size: int
    held: int = 0


class Bodies:
    """Bodies that arrive at one process, or wait to be read, and what they hold together. Where that is too
    much, the largest gives way: clients with small bodies are served, however many hold large ones."""

    def __init__(self, most: int) -> None:
        """most: bytes of one body; together they may have MANY_BODIES times as many."""
        self._most, self._held = most, 0
        self._open: set[_Body] = set()
        self.readers = ThreadPoolExecutor(READERS, "large bodies")

    @asynccontextmanager
    async def arriving(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body. Raises ApiError where it is too large, or too much with the others, before all of
        it has arrived."""
        parts, task = [], asyncio.current_task()
        assert task is not None
        headers = request.headers
        encoding = encoding_of(headers.get("content-encoding", ""), headers.get("transfer-encoding", ""))
        declared = headers.get("content-length", "").lstrip("0")
        own = _Body(task, int(declared) if declared.isdigit() else 0)
        if own.size > self._most:
            raise _too_large(self._most)
        self._open.add(own)
        try:
            async for part in request.stream():
                self._hold(own, len(part))
                if own.held > self._most:
                    raise _too_large(self._most)
                parts.append(part)
            body = b"".join(parts)
            if encoding is not None:  # of whatever size: a small body can become a large one
                loop = asyncio.get_running_loop()
                whole = await loop.run_in_executor(self.readers, decompressed, body, encoding, self._most)
                if whole is None:
                    raise _too_large(self._most)
                self._hold(own, len(whole))
                body = whole
            yield body
        except asyncio.CancelledError:
            if own in self._open:
                raise
            raise _too_many() from None
        finally:
            self._release(own)

    async def read(self, size: int, function: Callable[..., Read], *arguments: Any) -> Read:
        """Calls a function that reads a body of this size, in a thread if that is large."""
        if size < LARGE_BODY:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.readers, function, *arguments)

    def _hold(self, own: _Body, size: int) -> None:
        self._held += size
        own.held += size
        own.size = max(own.size, own.held)
        while self._held > MANY_BODIES * self._most:
            largest = max(self._open, key=lambda body: body.size)
            if largest.size == own.size:
                raise _too_many()
            self._release(largest)
            largest.task.cancel()

    def _release(self, body: _Body) -> None:
        self._open.discard(body)
        self._held -= body.held
        body.held = 0


def _too_many() -> ApiError:
    return ApiError("too many large requests are arriving at the same time; try again", 503)


def _too_large(most: int) -> ApiError:
    return ApiError(f"the request's body is larger than {most} bytes, the most this server takes", 413)


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _model(served: ServedModel, name: str) -> dict[str, Any]:
    status, adapter = served.link.engines.status, served.adapter_folder(name)
    of_adapter = {} if adapter is None else {"root": adapter, "parent": served.name}
    return {
        "id": name,
        "object": "model",
        "created": served.model.created,
        "owned_by": "flashinfer-backend",
        **of_adapter,
        **({} if served.pooling is None else {"task": served.pooling.task}),
        "max_model_len": status.max_seq_len if status else None,
    }
