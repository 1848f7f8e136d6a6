# SPDX-License-Identifier: Apache-2.0
"""Streams that are ahead of postprocessing: they wait, and go on with one chunk."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
from __future__ import annotations

import time

import pytest
from responder_bench import TIMEOUT_S, Bench, Sender, bench, feed, row

from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server import responder
from flashinfer_backend.triton_server.responder import AHEAD_NS, LOOK_AGAIN_S
from flashinfer_backend.triton_server.sequence import Sequence


def wait_for(sender: Sender, ids: list[list[int]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while sender.ids != ids and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sender.ids == ids


def run_ahead(bench: Bench, sender: Sender, sequence: Sequence) -> None:
    """Two chunks, of which postprocessing had the first only, and then a pause."""
    feed(sequence, 1)
    wait_for(sender, [[1]])
    bench.seen_ns = time.monotonic_ns()
    time.sleep(2 * AHEAD_NS / 1e9)
    feed(sequence, 2)
    wait_for(sender, [[1], [2]])


def third_waits_a_while(sender: Sender, sequence: Sequence) -> None:
    """A third chunk waits, and goes without postprocessing having had the second."""
    feed(sequence, 3)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2]]
    wait_for(sender, [[1], [2], [3]])


def test_a_stream_ahead_of_postprocessing_waits_and_goes_on_with_one_chunk(bench: Bench) -> None:
    sender, request = bench.open(row())
    run_ahead(bench, sender, request.sequences[0])
    feed(request.sequences[0], 3, 4)
    feed(request.sequences[0], 5)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2]]
    bench.seen_ns = None
    wait_for(sender, [[1], [2], [3, 4, 5]])
    feed(request.sequences[0], 6)
    wait_for(sender, [[1], [2], [3, 4, 5], [6]])


def test_the_end_of_a_stream_does_not_wait_for_postprocessing(bench: Bench) -> None:
    sender, request = bench.open(row())
    run_ahead(bench, sender, request.sequences[0])
    feed(request.sequences[0], 3)
    feed(request.sequences[0], protocol.NO_TOKEN, end=protocol.FINISHED_CANCELLED)
    assert sender.ended.wait(TIMEOUT_S)
    assert sender.ids == [[1], [2], [3]]


def test_streams_that_wait_are_sent_at_the_end(bench: Bench) -> None:
    sender, request = bench.open(row())
    run_ahead(bench, sender, request.sequences[0])
    feed(request.sequences[0], 3)
    time.sleep(5 * LOOK_AGAIN_S)
    bench.responder.close()
    assert sender.ids == [[1], [2], [3]]


def test_no_stream_waits_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Postprocessing has noted the older of its last two chunks: the stream would wait for a third."""
    monkeypatch.setattr(responder, "MOST_WAIT_NS", 300_000_000)
    sender, request = bench.open(row())
    run_ahead(bench, sender, request.sequences[0])
    third_waits_a_while(sender, request.sequences[0])


def test_a_stream_that_postprocessing_never_gets_waits_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has not requested the text. Should postprocessing only be late, the stream waits again."""
    monkeypatch.setattr(responder, "MOST_WAIT_NS", 300_000_000)
    bench.last_ns = 0
    sender, request = bench.open(row())
    run_ahead(bench, sender, request.sequences[0])
    third_waits_a_while(sender, request.sequences[0])
    feed(request.sequences[0], 4)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2], [3], [4]]
    bench.last_ns = 1
    feed(request.sequences[0], 5)
    time.sleep(5 * LOOK_AGAIN_S)
    assert sender.ids == [[1], [2], [3], [4]]
    wait_for(sender, [[1], [2], [3], [4], [5]])


def test_a_client_of_llm_itself_never_waits(bench: Bench) -> None:
    sender, request = bench.open(row())
    request.in_ensemble = False
    run_ahead(bench, sender, request.sequences[0])
    feed(request.sequences[0], 3)
    wait_for(sender, [[1], [2], [3]])
