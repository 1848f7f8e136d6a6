# SPDX-License-Identifier: Apache-2.0
"""Messages between the stubs of a model, one of which takes none."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flashinfer_backend.transport.peers import PeerSocket


def test_a_stub_that_takes_no_messages_keeps_none_from_the_others(tmp_path: Path) -> None:
    (tmp_path / "stubs").mkdir()
    peers = PeerSocket(tmp_path)
    peers._sender.settimeout(0.05)
    deaf = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(4)]
    try:
        for number, each in enumerate(deaf):  # some of them are listed before this process
            each.bind(str(tmp_path / f"stubs/{number}.sock"))
        with pytest.raises(TimeoutError):
            while True:
                peers.tell_all(b"Sone")
                assert peers.receive() == [b"Sone"]
        peers.receive()
        with pytest.raises(TimeoutError, match=r"process \d and \d and \d and \d of the model takes no"):
            peers.tell_all(b"Stwo")
        assert peers.receive() == [b"Stwo"]
    finally:
        peers.close()
        for each in deaf:
            each.close()
