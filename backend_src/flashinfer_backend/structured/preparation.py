# SPDX-License-Identifier: Apache-2.0
"""Gets the grammars of requests ready in threads, next to the engine's loop."""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from flashinfer_backend.core.deadlines import Waiting
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Grammar, GrammarError

log = logging.getLogger(__name__)
MOST_THREADS = 8


class GrammarPreparation(Waiting[Future[Grammar]]):
    """Guided requests from their submission until their grammars are there.

    The limits of GrammarCompiler bound what each takes: a millisecond, or half a second of the largest.
    """

    poll_ms = 2
    overtaken = False

    def __init__(self, model_dir: str, vocab_size: int, enabled: bool) -> None:
        super().__init__(left=Future.cancel)
        self._compiler = GrammarCompiler(model_dir, vocab_size)
        threads = min(MOST_THREADS, max(2, len(os.sched_getaffinity(0)) - 2))
        self._threads = ThreadPoolExecutor(threads, "grammar")
        self._done: deque[tuple[Request, Future[Grammar]]] = deque()  # some may not be wanted any more
        if enabled and (resolve_model_dir(model_dir) / "tokenizer.json").is_file():
            self._threads.submit(self._load)

    def needed(self, params: SamplingParams) -> bool:
        return bool(params.grammar_type)

    def submit(self, request: Request) -> None:
        params = request.params
        future = self._threads.submit(
            self._compiler.compile, params.grammar_type, params.grammar, params.end_id
        )
        self.add(request, future)
        future.add_done_callback(lambda _: self._done.append((request, future)))

    def ready(self) -> Iterator[tuple[Request, str | None]]:
        """Requests that need not wait any more: with their grammar in place, or with what is wrong."""
        while self._done:
            request, future = self._done.popleft()
            if not self.holds(request):
                continue
            self.cancel(request.handle)
            try:
                request.grammar = future.result()
            except Exception as error:
                if not isinstance(error, GrammarError):
                    log.error("the grammar of request %d failed", request.handle, exc_info=error)
                yield request, str(error) or type(error).__name__
            else:
                yield request, None

    def _load(self) -> None:
        with contextlib.suppress(GrammarError):  # guided requests hear of it
            self._compiler.load_all()
