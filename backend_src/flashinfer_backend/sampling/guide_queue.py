# SPDX-License-Identifier: Apache-2.0
"""Requests whose guides are being compiled, beside the engine's loop."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

from flashinfer_backend.engine.request import Request
from flashinfer_backend.paths import resolve_model_dir
from flashinfer_backend.sampling.guided import Guide, GuideError
from flashinfer_backend.text.tokenizer import TextTokenizer

# Blanks between two elements of JSON: enough for deep indentation, an end for models that write nothing else.
MOST_BLANKS = 20
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")
CACHED_GUIDES = 128
COMPILING_THREADS = 2
# "[12:00:00] /project/cpp/x.cc:1: Check failed: (ok) is false: " in front of xgrammar's messages
SOURCE_POSITION = r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?"


class GuideCompiler:
    """Compiles guides in threads (xgrammar releases the interpreter) and keeps the last ones.

    xgrammar and the checkpoint's tokenizer are loaded with the first guide.
    """

    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._cache: OrderedDict[tuple[str, str], Future[Any]] = OrderedDict()
        self._turns = threading.Semaphore(COMPILING_THREADS)
        self._loading = threading.Lock()

    def compile(self, guide_type: str, text: str) -> Future[Any]:
        """An xgrammar.CompiledGrammar, soon; or GuideError, which says what is wrong with the guide."""
        key = (guide_type, text)
        future = self._cache.get(key)
        if future is None:
            future = self._cache[key] = Future()
            # A daemon: an engine that ends does not wait for a compilation.
            threading.Thread(target=self._run, args=(key, future), name="guide", daemon=True).start()
        self._cache.move_to_end(key)
        while len(self._cache) > CACHED_GUIDES:
            self._cache.popitem(last=False)
        return future

    def _run(self, key: tuple[str, str], future: Future[Any]) -> None:
        with self._turns:
            try:
                future.set_result(self._compile(*key))
            except Exception as error:
                future.set_exception(error)

    def _compile(self, guide_type: str, text: str) -> Any:
        with self._loading:
            compiler = self._compiler
        try:
            if guide_type == "json":
                return compiler.compile_builtin_json_grammar()
            if guide_type == "json_schema":
                return compiler.compile_json_schema(text, max_whitespace_cnt=MOST_BLANKS)
            if guide_type == "regex":
                return compiler.compile_regex(text)
            if guide_type == "ebnf_grammar":
                return compiler.compile_grammar(text)
        except Exception as error:  # xgrammar raises RuntimeError with a source position in front
            reason = re.sub(SOURCE_POSITION, "", str(error).strip())
            raise GuideError(f"guided_decoding_guide is not a valid {guide_type}: {reason}") from error
        raise GuideError(
            f"guided_decoding_guide_type is {guide_type!r}; it should be one of {', '.join(GUIDE_TYPES)}"
        )

    @cached_property
    def _compiler(self) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise GuideError(
                f"guided decoding needs the package xgrammar ({error}); install it, or set"
                " guided_decoding_backend none"
            ) from error
        try:
            info = tokenizer_info(resolve_model_dir(self._model_dir), self._vocab_size)
        except (OSError, ValueError) as error:
            raise GuideError(f"guided decoding needs the checkpoint's tokenizer: {error}") from error
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def tokenizer_info(folder: Path, vocab_size: int) -> Any:
    """xgrammar.TokenizerInfo of a checkpoint folder, for logits of vocab_size tokens."""
    import xgrammar

    tokenizer = TextTokenizer(folder)
    special = {t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if t.special}
    # Tokens without text are never allowed: special ones, and those that only pad the vocabulary.
    vocab = [""] * vocab_size
    for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if i < vocab_size and token not in special:
            vocab[i] = token
    found = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.backend.to_str())
    end = tokenizer.eos_id
    return xgrammar.TokenizerInfo(
        vocab,
        vocab_type=found["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=[end] if end is not None and end < vocab_size else None,
        add_prefix_space=found["add_prefix_space"],
    )


class GuideQueue:
    """Guided requests from their submission until their guides are compiled."""

    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._compiler = GuideCompiler(model_dir, vocab_size)
        self._waiting: dict[int, tuple[Request, Future[Any]]] = {}  # by handle, in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        params = request.params
        if request.handle in self._waiting:
            raise ValueError(f"handle {request.handle} is already in use by an open request")
        self._waiting[request.handle] = request, self._compiler.compile(params.guide_type, params.guide)

    def cancel(self, handle: int) -> Request | None:
        """Forget a waiting request; None if there is no such one."""
        request, _ = self._waiting.pop(handle, (None, None))
        return request

    def drop_stub(self, pid: int) -> None:
        """Forget all requests of a stub."""
        self._waiting = {h: entry for h, entry in self._waiting.items() if h >> 32 != pid}

    def compiled(self) -> Iterator[tuple[Request, str | None]]:
        """Requests that need not wait any more: with their guide in place, or with what is wrong."""
        for handle, (request, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[handle]
            try:
                request.guide = Guide(future.result(), request.params.end_id, self._vocab_size)
            except Exception as error:
                yield request, str(error)
            else:
                yield request, None
