# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of its prefix cache, as a request router keeps it."""

import contextlib
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from engine.harness import serve, shallow_model, start_core
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.kv_events import MOST_RECEIVED, MOST_TOPICS, Publisher, Replay, _bound
from ports import free_ports
from waiting import wait_for


class Index:
    """Which blocks an engine has, by their keys: the tokens in them and the key before."""

    def __init__(self, endpoint: str) -> None:
        self.blocks: dict[bytes, tuple[tuple[int, ...], bytes | None]] = {}
        self.topics: set[bytes] = set()
        self.removed, self.next = 0, 0
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._socket.connect(endpoint)

    def take_in(self) -> None:
        while self._socket.poll(200):
            topic, sequence, data = self._socket.recv_multipart()
            assert int.from_bytes(sequence, "big") == self.next
            self.next += 1
            self.topics.add(topic)
            self.take(data)

    def take(self, data: bytes) -> None:
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
    endpoint, again = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    few = {"max_num_tokens": 32, "max_num_tokens_while_decoding": 32, "max_tokens_in_paged_kv_cache": 256}
    core = start_core(
        shallow_model(),
        max_num_seqs=6,
        max_seq_len=160,
        tokens_per_block=16,
        check_invariants=True,
        kv_events_endpoint=endpoint,
        kv_events_replay_endpoint=again,
        **few,
    )
    index, choose = Index(endpoint), random.Random(5)
    late = zmq.Context.instance().socket(zmq.DEALER)
    late.linger = 0
    late.connect(again)
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
    # What a router gets that has been here from the start, one that comes later can ask for.
    late.send_multipart([b"short"])
    late.send_multipart([b"", b"\0" * 7])
    later, pieces = Index(endpoint), []
    for first in (0, index.next - 3, index.next):
        late.send_multipart([b"", first.to_bytes(8, "big")])
        for number in [*range(first, index.next), 2**64 - 1]:
            assert late.poll(10_000)
            empty, sent, data = late.recv_multipart()
            assert (empty, int.from_bytes(sent, "big")) == (b"", number) and bool(data) == (number < 2**63)
            if not first and data:
                later.take(data)
            pieces.append(data)
    assert later.blocks == index.blocks and pieces[index.next - 3 : index.next] == pieces[-5:-2]
    late.close()
    later.close()
    index.close()
    with serve(core, tmp_path / "later") as client:
        client.generate([starts[0]] * 2, SamplingParams(max_tokens=4))
    core.close()


@pytest.mark.parametrize("knob", ["kv_events_endpoint", "kv_events_replay_endpoint"])
def test_what_cannot_be_bound_is_said(knob: str) -> None:
    with zmq.Context.instance().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        endpoints = {"kv_events_endpoint": f"tcp://127.0.0.1:{free_ports(1)[0]}"}
        with pytest.raises(ValueError, match=f"{knob} tcp://127.0.0.1:{port} cannot be bound"):
            start_core(Path("bundled"), **endpoints | {knob: f"tcp://127.0.0.1:{port}"})


def replaying(sizes: list[int]) -> tuple[Replay, str]:
    """A replay that keeps messages of these sizes, and where it answers."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    replay = Replay(router)
    for number, size in enumerate(sizes):
        replay.keep(number.to_bytes(8, "big"), bytes(size))
    return replay, f"tcp://127.0.0.1:{port}"


def test_messages_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer_backend.engine.kv_events.KEPT", 5)
    monkeypatch.setattr("flashinfer_backend.engine.kv_events.KEPT_BYTES", 100)
    replay, address = replaying([30] * 3 + [10] * 6 + [90])
    with zmq.Context.instance().socket(zmq.DEALER) as late:
        late.connect(address)
        late.send_multipart([b"", bytes(8)])
        found = [late.recv_multipart() for _ in range(3)]
    replay.close()
    assert [(number[-1], len(data)) for _, number, data in found] == [(8, 10), (9, 90), (255, 0)]


@pytest.mark.parametrize("kinds", [(zmq.XPUB, zmq.SUB), (zmq.ROUTER, zmq.DEALER)])
def test_who_sends_too_much_is_cut(kinds: tuple[int, int]) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    config = EngineConfig(model_dir="bundled", kv_events_endpoint=endpoint)
    with _bound(kinds[0], "kv_events_endpoint", config, 0), zmq.Context.instance().socket(kinds[1]) as router:
        router.linger = 0
        monitor = router.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        router.connect(endpoint)
        assert monitor.poll(10_000)
        monitor.recv_multipart()
        for size, cut in ((MOST_RECEIVED - 16, False), (MOST_RECEIVED + 1, True)):
            text = b"x" * size
            if kinds[1] == zmq.SUB:  # some bytes in front of it say that it is a subscription
                router.subscribe(text)
            else:
                router.send(text)
            assert bool(monitor.poll(10_000 if cut else 300)) == cut
        router.disable_monitor()


def test_the_end_does_not_wait_for_a_router_that_reads_slowly() -> None:
    replay, address = replaying([7000] * 9000)
    with zmq.Context.instance().socket(zmq.DEALER) as late:
        late.connect(address)
        late.send_multipart([b"", bytes(8)])
        assert late.poll(10_000)
        ending = threading.Thread(target=replay.close)
        ending.start()
        numbers = []
        while late.poll(500):
            numbers.append(late.recv_multipart()[1])
        ending.join()
    assert 0 < len(numbers) < 9000 and numbers[-1] != b"\xff" * 8


def test_a_router_that_reads_slowly_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads on, so that no message waits for READS_S."""
    monkeypatch.setattr("flashinfer_backend.engine.kv_events.ANSWER_S", 0.3)
    monkeypatch.setattr("flashinfer_backend.engine.kv_events.READS_S", 60.0)
    replay, address = replaying([7000] * 9000)
    with (
        zmq.Context.instance().socket(zmq.DEALER) as slow,
        zmq.Context.instance().socket(zmq.DEALER) as other,
    ):
        slow.rcvhwm, slow.rcvbuf = 1, 4096
        for each, first in ((slow, 0), (other, 8999)):
            each.connect(address)
            each.send_multipart([b"", first.to_bytes(8, "big")])
            assert slow.poll(10_000)
        read = 0
        while not other.poll(2):
            read += len(slow.recv_multipart()) > 0
        assert [other.recv_multipart()[1][-2:] for _ in range(2)] == [b"\x23\x27", b"\xff\xff"]
    replay.close()
    assert read < 3000 and "the rest is not sent" in caplog.text


def test_topics_and_warnings_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A client that subscribes to more and more is cut with all others, who connect again."""
    port, again = free_ports(2)
    config = EngineConfig(model_dir="bundled", kv_events_endpoint=f"tcp://127.0.0.1:{port}")
    made: list[Any] = []

    def bind() -> Any:
        made.append(_bound(zmq.XPUB, "kv_events_endpoint", config, 0))
        return made[-1]

    publisher, context = Publisher(bind), zmq.Context.instance()
    router = context.socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{again}")
    replay = Replay(router)
    with context.socket(zmq.SUB) as reader, context.socket(zmq.SUB) as greedy:
        for subscriber in (reader, greedy):
            subscriber.linger = subscriber.sndhwm = 0  # or it would leave some out
            subscriber.connect(config.kv_events_endpoint)
        reader.subscribe(b"kv@")
        for number in range(MOST_TOPICS - 1):
            greedy.subscribe(b"%d" % number)
        wait_for(lambda: publisher._topics == MOST_TOPICS, "the subscriptions")
        greedy.unsubscribe(b"0")
        greedy.subscribe(b"zero")
        publisher.send([b"kv@1", b"first"])
        assert reader.recv_multipart() == [b"kv@1", b"first"] and len(made) == 1
        for number in range(50):
            greedy.subscribe(b"further %d" % number)
        wait_for(lambda: len(made) > 1 and not made[-1].closed, "another socket")
        greedy.close()
        # libzmq subscribes again when the reader looks for messages.
        wait_for(lambda: reader.poll(10) or publisher._topics == 1, "the reader to connect again")
        publisher.send([b"kv@1", b"later"])
        assert reader.recv_multipart() == [b"kv@1", b"later"]
    with context.socket(zmq.DEALER) as wrong:
        wrong.connect(f"tcp://127.0.0.1:{again}")
        for _ in range(20):
            wrong.send(b"wrong")
        wrong.send_multipart([b"", bytes(8)])
        wrong.recv_multipart()
    publisher.close()
    replay.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if "different subscriptions" in text]) == 1
    assert len([text for text in texts if "is not an empty frame" in text]) == 1


@pytest.mark.parametrize("kind", [zmq.XPUB, zmq.ROUTER])
def test_connections_are_bounded(
    kind: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One more is closed, and the others keep theirs; one that has left makes room."""
    monkeypatch.setattr("flashinfer_backend.engine.kv_events.MOST_KV_CONNECTIONS", 3)
    (port,) = free_ports(1)
    config = EngineConfig(model_dir="bundled", kv_events_endpoint=f"tcp://127.0.0.1:{port}")

    def bind() -> Any:
        return _bound(kind, "kv_events_endpoint", config, 0)

    served = Publisher(bind) if kind == zmq.XPUB else Replay(bind())
    bounded = served._connections

    def greeted() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        assert connection.recv(1) == b"\xff"  # libzmq's
        return connection

    with contextlib.ExitStack() as opened:
        first, *_ = [opened.enter_context(greeted()) for _ in range(3)]
        wait_for(lambda: len(bounded._open) == 3, "the connections")
        for _ in range(2):
            further = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            with contextlib.suppress(ConnectionResetError):
                while further.recv(100):
                    pass
        assert len(bounded._open) == 3
        first.close()
        wait_for(lambda: len(bounded._open) == 2, "the one that has left")
        opened.enter_context(greeted())
        wait_for(lambda: len(bounded._open) == 3, "another one")
    wait_for(lambda: not bounded._open, "all to leave")
    served.close()
    (record,) = caplog.records
    assert f"port {port} of KV events has 3 connections: a further one is closed" in record.getMessage()
