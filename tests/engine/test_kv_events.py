# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of its prefix cache, as a request router keeps it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from ports import free_ports


class Index:
    """Which blocks an engine has, by their keys: the tokens in them and the key before."""

    def __init__(self, endpoint: str) -> None:
        self.blocks: dict[bytes, tuple[tuple[int, ...], bytes | None]] = {}
        self.topics: set[bytes] = set()
        self.removed, self._next = 0, 0
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._socket.connect(endpoint)

    def take_in(self) -> None:
        while self._socket.poll(200):
            topic, sequence, data = self._socket.recv_multipart()
            assert int.from_bytes(sequence, "big") == self._next
            self._next += 1
            self.topics.add(topic)
            seconds, events, engine = msgspec.msgpack.decode(data)
            assert abs(time.time() - seconds) < 60 and engine == 0
            for event in events:
                self._take(*event)

    def _take(self, kind: str, keys: Any = (), before: Any = None, *rest: Any) -> None:
        if kind == "AllBlocksCleared":
            self.blocks.clear()
        elif kind == "BlockRemoved":
            for key in keys:
                del self.blocks[key]
            self.removed += len(keys)
        else:
            assert kind == "BlockStored"
            tokens, size, lora_id, medium, _adapter = rest
            assert len(tokens) == size * len(keys) and (lora_id, medium) == (None, "GPU")
            for number, key in enumerate(keys):
                assert key not in self.blocks and (before is None or before in self.blocks)
                self.blocks[key] = tuple(tokens[number * size : (number + 1) * size]), before
                before = key

    def close(self) -> None:
        self._socket.close()


def test_an_index_of_the_events_is_the_cache(tmp_path: Path, monkeypatch: Any) -> None:
    """Prefix hits, eviction, preemption, cancels; and an engine whose subscriber has gone."""
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    few = {"max_num_tokens": 32, "max_num_tokens_while_decoding": 32, "max_tokens_in_paged_kv_cache": 256}
    core = start_core(
        Path("bundled"),
        max_num_seqs=6,
        max_seq_len=160,
        tokens_per_block=16,
        check_invariants=True,
        kv_events_endpoint=endpoint,
        **few,
    )
    index, choose = Index(endpoint), random.Random(5)
    time.sleep(0.5)  # until the subscription has come to the engine
    starts = [[choose.randrange(3, 250) for _ in range(60)] for _ in range(4)]
    with serve(core, tmp_path) as client:
        for turn in range(6):
            asked = [
                client.submit(
                    choose.choice(starts)[: choose.randrange(20, 60)] + [turn, number],
                    SamplingParams(max_tokens=choose.randrange(20, 60), temperature=0.8, seed=turn),
                )
                for number in range(8)
            ]
            client.cancel(asked[3])
            client.wait(asked)
            index.take_in()
    time.sleep(0.1)
    index.take_in()
    pool, size = core.scheduler.kv_manager.pools[0], 16
    assert index.blocks.keys() == pool._block_of.keys()
    assert index.topics == {b"kv@10.0.0.7:9000@bundled"}
    assert index.removed and core.scheduler.preemptions and core.scheduler.prompt_tokens_reused
    manager = core.scheduler.kv_manager
    for key, (tokens, before) in index.blocks.items():  # a router may also make keys of its own
        assert len(tokens) == size
        assert manager.prefix_keys(np.array(tokens, np.int32), 0, before or b"") == [key]
    index.close()
    with serve(core, tmp_path / "later") as client:
        client.generate([starts[0]] * 2, SamplingParams(max_tokens=4))
    core.close()


def test_what_cannot_be_bound_is_said() -> None:
    with zmq.Context.instance().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ValueError, match=f"kv_events_endpoint tcp://127.0.0.1:{port} cannot be bound"):
            start_core(Path("bundled"), kv_events_endpoint=f"tcp://127.0.0.1:{port}")
