# SPDX-License-Identifier: Apache-2.0
"""Final responses that cannot be sent: no client is left without an end."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
from __future__ import annotations

from types import SimpleNamespace

import pytest
from responder_bench import FINAL, TIMEOUT_S, Bench, Sender, bench, feed, row

from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server import responder

ROOM = 300_000
FITS = 20_000  # ids: more than LARGE_BYTES, less than ROOM
TOO_MANY = 40_000


def finish(bench: Bench, sender: Sender, tokens: int) -> None:
    _, request = bench.open(row(streaming=False, exclude_input=True), sender=sender)
    feed(request.sequences[0], *range(tokens), end=protocol.FINISHED_LENGTH)
    assert sender.ended.wait(TIMEOUT_S)
    bench.wait_closed()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_large_response_is_sent_before_its_flag(bench: Bench, decoupled: bool) -> None:
    sender = Sender(ROOM, decoupled)
    finish(bench, sender, FITS)
    assert sender.ids == [list(range(FITS))]
    assert [flags for _, flags, _ in sender.sent] == [0, FINAL]


def test_a_small_response_carries_its_flag(bench: Bench) -> None:
    sender = Sender(ROOM)
    finish(bench, sender, 100)
    assert [flags for _, flags, _ in sender.sent] == [FINAL]


def test_what_does_not_fit_is_answered_with_an_error(bench: Bench) -> None:
    sender = Sender(ROOM)
    finish(bench, sender, TOO_MANY)
    _, flags, error = sender.sent[-1]
    assert error is not None and "cannot send a response: Failed to increase" in error.message
    assert flags == FINAL and len(sender.sent) == 1


def test_not_decoupled_what_does_not_fit_ends(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    """The one response that may be sent was tried: the server makes an error of an end without any. The log
    says why."""
    sender = Sender(ROOM, decoupled=False)
    finish(bench, sender, TOO_MANY)
    assert sender.sent == [({}, FINAL, None)]
    bench.responder.close()  # it writes to the log behind the end
    assert "Failed to increase the shared memory pool" in capfd.readouterr().err


@pytest.mark.parametrize("decoupled", [True, False])
def test_what_cannot_fit_is_not_tried(bench: Bench, monkeypatch: pytest.MonkeyPatch, decoupled: bool) -> None:
    full = SimpleNamespace(f_bavail=ROOM // 10, f_frsize=10)
    monkeypatch.setattr(responder.os, "statvfs", lambda _: full)
    sender = Sender(ROOM, decoupled)
    finish(bench, sender, TOO_MANY)
    ((_, flags, error),) = sender.sent
    assert error is not None and "has 0.5 MiB, and /dev/shm has room for 0.3 MiB" in error.message
    assert flags == FINAL
    another = Sender(ROOM, decoupled)
    finish(bench, another, FITS)
    assert another.ids == [list(range(FITS))]
