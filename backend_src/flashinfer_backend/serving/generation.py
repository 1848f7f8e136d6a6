# SPDX-License-Identifier: Apache-2.0
"""One sequence from its request to its end: gathers the engine's tokens and cuts them into chunks.

Nothing here knows who asked: Triton's stubs and the OpenAI API share it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import TOP_LOGPROBS
from flashinfer_backend.serving.timing import SequenceTiming
from flashinfer_backend.text.chunk import NO_LIMIT
from flashinfer_backend.text.delta import CONTEXT_IDS, DeltaDecoder
from flashinfer_backend.text.stop_words import StopWordMatcher, StopWords, stop_word_texts
from flashinfer_backend.transport import protocol

FINISH_REASONS = {
    protocol.FINISHED_END_ID: "stop",
    protocol.FINISHED_STOP_WORDS: "stop",
    protocol.FINISHED_LENGTH: "length",
    protocol.FINISHED_CANCELLED: "cancelled",
}
Item = tuple[int, int, protocol.RowReport | None]  # token, finish code, report
ITEM_BYTES, REPORT_BYTES = 104, 256  # of one, and of its report if it has log probabilities


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt with the engine's parameters, and how its text is cut into chunks. `exclude_input`: whether
    the one chunk of a request without streaming leaves the prompt out. `priority`, `timeout_us`: see
    protocol.Submit. `free_of_stops`: number of first tokens of the answer that complete no stop word.
    `guide_field`: what the client knows the guide by, in errors."""

    prompt: np.ndarray  # int32 [n]
    params: SamplingParams
    streaming: bool = False
    exclude_input: bool = False
    stop_words: list[str] = field(default_factory=list)  # matched on text
    exclude_stop_words: bool = False
    priority: int = 0
    timeout_us: int = 0
    free_of_stops: int = 0
    guide_field: str = "guided_decoding_guide"

    @property
    def stops(self) -> tuple[list[str], list[list[int]], bool]:
        """Stop words, stop sequences of ids, and whether both are left out of the text."""
        return self.stop_words, self.params.stop_sequences, self.exclude_stop_words


@dataclass
class Chunk:
    """New ids of a sequence for one response. `code`: other than RUNNING in the last one. `max_chars`: length
    limit of the chunk's text. `log_probs`, `top_logprobs`: where they are asked for, of each id its log
    probability and equally many TOP_LOGPROBS. `prompt_log_probs`: see RowReport. All are packed, since they
    are kept until an answer without streaming ends. `reports`: what else was reported."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    code: int = protocol.RUNNING
    max_chars: int = NO_LIMIT
    log_probs: array[float] = field(default_factory=lambda: array("f"))
    top_logprobs: bytearray = field(default_factory=bytearray)
    prompt_log_probs: bytes = b""
    reports: list[protocol.RowReport] = field(default_factory=list)

    def add(self, report: protocol.RowReport) -> None:
        """Takes in what was reported of the next id."""
        if report.log_prob is not None:
            self.log_probs.append(report.log_prob)
            self.top_logprobs += report.top_logprobs or b""
            report.log_prob = report.top_logprobs = None
        if report.prompt_log_probs is not None:
            self.prompt_log_probs, report.prompt_log_probs = report.prompt_log_probs, None
        if report != protocol.RowReport(report.local_id, report.turn):
            self.reports.append(report)

    def told(self, most: int) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        """Each id, its log probability, and the `most` likeliest ids of its place with theirs."""
        count = max(1, len(self.log_probs))
        top = np.frombuffer(self.top_logprobs, TOP_LOGPROBS).reshape(count, -1)[:, :most]
        for token, value, likely in zip(self.ids, self.log_probs, top, strict=False):
            yield token, value, likely.tolist()

    def split(self, sent: int) -> Chunk:
        """Takes the ids from `sent` on off this chunk, with their log probabilities; returns them as one."""
        size = len(self.top_logprobs) // max(1, len(self.log_probs)) * sent
        rest = Chunk(self.ids[sent:], log_probs=self.log_probs[sent:], top_logprobs=self.top_logprobs[size:])
        del self.ids[sent:], self.log_probs[sent:], self.top_logprobs[size:]
        return rest

    @property
    def last(self) -> bool:
        return self.code != protocol.RUNNING

    @property
    def size(self) -> int:
        """Some bytes that it takes, with its text."""
        log_probs = 4 * len(self.log_probs) + len(self.top_logprobs) + len(self.prompt_log_probs)
        return 8 * len(self.ids) + log_probs


class _Followed(NamedTuple):
    """A row whose stop words are searched in its text. params: those left for the engine. prompt: its ids if
    the text continues it in one decode. prompt_chars: their length in that text."""

    params: SamplingParams
    words: StopWords
    prompt: list[int]
    prompt_chars: int


def _follow(row: GenerationRequest, decoder: DeltaDecoder, sibling: Generation | None) -> _Followed:
    stops = row.params.stop_sequences
    prompt = row.prompt.tolist() if not row.streaming and not row.exclude_input else []
    prompt_chars = len(decoder.delta([], prompt, last=False))
    if sibling is not None and sibling._followed is not None and sibling.row.stops == row.stops:
        ids = sibling._followed.params.stop_sequences
        params = msgspec.structs.replace(row.params, stop_sequences=ids)
        return _Followed(params, sibling._followed.words, prompt, prompt_chars)
    followed = set(row.stop_words)
    pairs = zip(stops, stop_word_texts(stops, decoder), strict=True)
    ids = [word for word, text in pairs if text not in followed or not text]
    # The engine says that a word ended the sequence, not where in the text it begins.
    cut_at = ids if row.exclude_stop_words else []
    return _Followed(
        msgspec.structs.replace(row.params, stop_sequences=ids),
        StopWords(row.stop_words, row.exclude_stop_words, cut_at),
        prompt,
        prompt_chars,
    )


class Generation:
    """A sink of the link (`endpoint.Sink`): filled by the link's thread, emptied by one other thread, always
    the same one.

    Tokens that arrive while that thread is busy become one chunk, so a slow thread keeps up with the tokens.
    """

    def __init__(
        self,
        row: GenerationRequest,
        cancel: Callable[[int], None],
        schedule: Callable[[Any], None],
        context_ids: Sequence[int] = (),
    ) -> None:
        """cancel: asks the engine to end the sequence with this handle. schedule: has its take() called soon,
        sometimes once more than needed. context_ids: DeltaDecoder.context of the prompt if the text continues
        it; without them the text starts over."""
        self.row: GenerationRequest = row
        self.handle = 0
        self.ended = False
        self.context_ids = list(context_ids)  # the last ids that were sent
        self.cum_log_prob = 0.0
        self.stop_word: str | None = None  # the one of the row's that ended it, if its text was matched
        self.failure: str | None = None
        self.refused = False  # with a failure: whether the engine never admitted the sequence
        self.timing = SequenceTiming()
        self._cancel, self._schedule = cancel, schedule
        self._arrived: deque[Item] = deque()
        self._scheduled = False
        self._kept = Chunk()  # arrived, but not to be sent yet
        self._stopped: Chunk | None = None  # the last one, which waits for the engine's end of the sequence
        self._matcher: StopWordMatcher | None = None
        self._followed: _Followed | None = None

    @property
    def follows_text(self) -> bool:
        """Whether its stop words need match_stop_words; else the engine finds their ids without help."""
        row = self.row
        return bool(row.stop_words or (row.exclude_stop_words and row.params.stop_sequences))

    def match_stop_words(self, decoder: DeltaDecoder, sibling: Generation | None = None) -> SamplingParams:
        """Follows the text for the row's stop words, and returns the parameters that remain for the engine.

        Words without text to follow stay with the engine, which finds their ids: words with special tokens
        that are left out of the text, and words given only as ids. `decoder`: same as the one that writes the
        text. `sibling`: a sequence of the same request whose words are reused, since thousands of words
        take part of a second.
        """
        if sibling is not None and sibling.row is self.row and sibling._followed is not None:
            self._followed = followed = sibling._followed
        else:
            self._followed = followed = _follow(self.row, decoder, sibling)
        self._matcher = StopWordMatcher(
            followed.words, decoder, followed.prompt or self.context_ids, self.row.free_of_stops
        )
        return followed.params

    def on_token(self, token: int, code: int, report: protocol.RowReport | None) -> None:
        if token != protocol.NO_TOKEN:
            self.timing.token()
        if report is not None and report.queue_ns is not None:
            self.timing.queued = report.queue_ns / 1e9
        self._arrived.append((token, code, report))
        self._wake()

    def on_failure(self, message: str, refused: bool) -> None:
        self.failure, self.refused = message, refused
        self._wake()

    @property
    def waiting_bytes(self) -> int:
        """Some bytes that what has arrived takes until it is taken."""
        params = self.row.params
        report = (REPORT_BYTES + TOP_LOGPROBS.itemsize * params.top_logprobs) if params.log_probs else 0
        return len(self._arrived) * (ITEM_BYTES + report)

    @property
    def ending(self) -> bool:
        """Whether its end has arrived, but was not taken yet. For the thread that takes."""
        arrived_end = bool(self._arrived) and self._arrived[-1][1] != protocol.RUNNING
        return arrived_end or self.failure is not None

    @property
    def failed(self) -> bool:
        """Whether it has failed, and what came before was taken. For the thread that takes."""
        return self.failure is not None and not self._arrived and not self.ended

    @property
    def crowded_out(self) -> bool:
        """Whether it failed because the engine's queue was full, or timed out there."""
        words = (protocol.QUEUE_FULL, protocol.QUEUE_TIMEOUT)
        return self.refused and self.failure is not None and self.failure.startswith(words)

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._schedule(self)

    def take(self) -> Chunk | None:
        """The next chunk to send, or None. Sets `ended` with the last one. Of a sequence that failed what
        there is comes, also what may begin a stop word."""
        # Cleared first: what arrives from here on schedules the sequence again.
        self._scheduled = False
        if self.ended:
            return None
        failed = self.failure is not None  # before this is read, all that came before it is there
        if self._stopped is not None:
            return self._take_stopped(self._stopped)
        chunk, matched = self._kept, False
        new_ids = array("i")
        while self._arrived and chunk.code == protocol.RUNNING:
            token, chunk.code, report = self._arrived.popleft()
            if token != protocol.NO_TOKEN:
                new_ids.append(token)
            if report is not None:
                chunk.add(report)
        if self._matcher is not None and new_ids:
            matched = self._match(self._matcher, chunk, new_ids)
        else:
            chunk.ids += new_ids
        held = 0
        if not chunk.last and self._matcher is not None and not failed:
            held = self._matcher.held
        if not chunk.last and (not self.row.streaming or len(chunk.ids) <= held):
            return None
        if matched:
            self._cancel(self.handle)
            if self.row.params.perf_metrics:
                self._stopped = chunk
                return self._take_stopped(chunk)
        self.ended = chunk.last
        self._keep(chunk, held)
        return chunk

    def _take_stopped(self, chunk: Chunk) -> Chunk | None:
        """The chunk that a stop word ended, once the engine's times and block counts are there: they come
        with the sequence's end."""
        ended = self.failure is not None
        while self._arrived and not ended:
            _, code, report = self._arrived.popleft()
            ended = code != protocol.RUNNING
            if ended and report is not None:
                chunk.reports.append(protocol.RowReport(report.local_id, perf=report.perf))
        if not ended:
            return None
        self.ended, self._stopped = True, None  # it may hold gigabytes of logits
        self._keep(chunk, 0)
        return chunk

    def _keep(self, chunk: Chunk, held: int) -> None:
        """Keeps the last `held` ids of a chunk, and their reports, for the next one."""
        self._kept = chunk.split(len(chunk.ids) - held)
        if held and self.row.params.generation_logits:  # then each id has its report
            at = len(chunk.reports) - held
            self._kept.reports, chunk.reports = chunk.reports[at:], chunk.reports[:at]
        self.cum_log_prob += sum(chunk.log_probs)

    def _match(self, matcher: StopWordMatcher, chunk: Chunk, new_ids: array[int]) -> bool:
        """Appends `new_ids`, up to the end of a stop word; whether the engine still has to be told."""
        match = matcher.feed(new_ids)
        if match is None:
            chunk.ids += new_ids
            return False
        running = chunk.code == protocol.RUNNING
        self.stop_word = dict(enumerate(self.row.stop_words)).get(match.word)
        chunk.ids += new_ids[: match.ids]
        chunk.code = protocol.FINISHED_STOP_WORDS
        if self.row.streaming:
            chunk.max_chars = match.begin if self.row.exclude_stop_words else match.end
        else:
            text_chars = match.text_begin if self.row.exclude_stop_words else match.text_end
            assert self._followed is not None
            chunk.max_chars = self._followed.prompt_chars + text_chars
        return running

    def sent(self, chunk: Chunk) -> None:
        """Notes that a chunk has gone out."""
        self.timing.sent += len(chunk.ids)
        self.context_ids = [*self.context_ids, *chunk.ids][-CONTEXT_IDS:]
