# SPDX-License-Identifier: Apache-2.0
"""Tells request routers which prefixes an engine's cache has, in vLLM's form.

A message has three frames: the topic, a number that counts messages (8 bytes, big endian), and in msgpack
[time, events, number of the engine]. Events: ["BlockStored", keys, key before them or nil, token ids, tokens
of a block, nil, "GPU", the adapter's name or nil], ["BlockRemoved", keys, "GPU"] and ["AllBlocksCleared"]. A
key has 16 bytes.

A router that has missed messages asks for them by the first one's number, on a second socket. It gets the
number and the third frame of each that is kept, and at the end a message whose third frame is empty.
https://docs.vllm.ai/en/stable/examples/online_serving/kv_events_subscriber
"""

import contextlib
import logging
import os
import re
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from flashinfer_backend.core.bounds import MOST_KV_CONNECTIONS
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import BUNDLED, resolve_model_dir
from flashinfer_backend.core.request import Request
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.slot_table import SlotTable

log = logging.getLogger(__name__)

MEDIUM = "GPU"
KEPT, KEPT_BYTES = 10_000, 64 << 20  # messages that can be asked for again, and bytes of them
WAITING = KEPT  # messages for a subscriber that does not keep up; later ones are dropped for it
MOST_RECEIVED = 512  # bytes of a subscription or request; one of 200 MB held the engine up for 92 s
MOST_TOPICS = 256  # different subscriptions of all connections; libzmq has a node for each byte of one
UNREAD = 16  # subscriptions or requests of a connection that wait in libzmq
LOG_EVERY_S = 60.0
END = b"\xff" * 8  # the number of an answer's last message
CLOSE_S, READS_S = 0.2, 1.0  # until the end is noticed; for a router that asks and does not read
ANSWER_S = 10.0  # for all that one asked for, while others wait
BIND_AGAIN_S = 0.05
IP_VARIABLE = "POD_IP"


class SparseLog:
    """Warnings about what clients do, at most one in LOG_EVERY_S."""

    def __init__(self) -> None:
        self._last, self._left_out = -LOG_EVERY_S, 0

    def warning(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < LOG_EVERY_S:
            self._left_out += 1
            return
        more = f" ({self._left_out} warnings were left out)" if self._left_out else ""
        log.warning("%s%s", text, more)
        self._last, self._left_out = now, 0


class Connections:
    """Those of a bound socket. One more than MOST_KV_CONNECTIONS is closed at once: libzmq has no bound, and
    each takes one of the files that the engine may have open."""

    def __init__(self, socket: zmq.Socket[bytes], log: SparseLog) -> None:
        self._socket, self._log = socket, log
        self._port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._open: set[int] = set()  # file descriptors
        address = f"inproc://kv-connections-{id(socket)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.events: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # or libzmq's thread would wait while they are not read
        self.events.connect(address)

    def take_in(self) -> None:
        """What has happened. `events` has something to read then."""
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(event["value"])
            elif len(self._open) < MOST_KV_CONNECTIONS:
                self._open.add(event["value"])
            else:
                self._shut(event["value"])

    def _shut(self, fd: int) -> None:
        """libzmq then closes it. By now the number may be that of another file, which stays as it is."""
        with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as connection:
            if connection.getsockname()[1] == self._port:
                connection.shutdown(sockets.SHUT_RDWR)
        self._log.warning(
            f"port {self._port} of KV events has {MOST_KV_CONNECTIONS} connections: a further one is closed."
            " A router needs one to each port"
        )

    def close(self) -> None:
        self._socket.disable_monitor()
        self.events.close(linger=0)


class Replay:
    """The latest messages, and a thread that sends them again to those who ask."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """socket: a ROUTER, bound, which is the thread's from now on."""
        self._socket, self._closed = socket, threading.Event()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._held = 0
        self._lock, self._log = threading.Lock(), SparseLog()
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDTIMEO, round(READS_S * 1000))
        self._connections = Connections(socket, self._log)
        self._thread = threading.Thread(target=self._serve, name="kv events again", daemon=True)
        self._thread.start()

    def keep(self, number: bytes, batch: bytes) -> None:
        with self._lock:
            self._kept.append((number, batch))
            self._held += len(batch)
            while len(self._kept) > KEPT or self._held > KEPT_BYTES:
                self._held -= len(self._kept.popleft()[1])

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._connections.events, self._socket):
            poller.register(socket, zmq.POLLIN)
        while not self._closed.is_set():
            ready = dict(poller.poll(round(CLOSE_S * 1000)))
            self._connections.take_in()
            if self._socket not in ready:
                continue
            client, *rest = self._socket.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != 8:
                self._log.warning("a request for KV events is not an empty frame and a number of 8 bytes")
                continue
            with self._lock:
                wanted = [kept for kept in self._kept if kept[0] >= rest[1]]
            until = time.monotonic() + ANSWER_S
            try:
                for number, batch in [*wanted, (END, b"")]:
                    if self._closed.is_set():
                        break
                    if time.monotonic() > until:
                        self._log.warning(
                            f"a router took more than {ANSWER_S:g} s to read KV events that it asked for"
                            " again; the rest is not sent. It should ask for that by the next number"
                        )
                        break
                    self._socket.send_multipart([client, b"", number, batch])
            except zmq.ZMQError as error:
                self._log.warning(f"KV events could not be sent again: {error.strerror}")
        self._connections.close()
        self._socket.close()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


class Publisher:
    """Sends messages to all subscribers, in a thread: subscriptions cost the engine's steps nothing."""

    def __init__(self, bind: Callable[[], zmq.Socket[bytes]]) -> None:
        """bind: makes the XPUB socket, bound. Raises its ValueError."""
        self._bind, self._log, self._closed = bind, SparseLog(), threading.Event()
        self._poller = zmq.Poller()
        self._listen(bind())
        address = f"inproc://kv-events-{id(self)}"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inside = context.socket(zmq.PULL)
        self._inside.setsockopt(zmq.RCVHWM, WAITING)
        self._inside.bind(address)
        self._outside = context.socket(zmq.PUSH)
        self._outside.setsockopt(zmq.SNDHWM, WAITING)
        self._outside.setsockopt(zmq.LINGER, 0)
        self._outside.connect(address)
        self._poller.register(self._inside, zmq.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="kv events", daemon=True)
        self._thread.start()

    def send(self, parts: list[bytes]) -> None:
        """A message that finds no room is lost: its subscribers notice by the numbers."""
        with contextlib.suppress(zmq.Again):
            self._outside.send_multipart(parts, zmq.NOBLOCK)

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._topics = socket, 0
        self._connections = Connections(socket, self._log)
        for each in (socket, self._connections.events):
            self._poller.register(each, zmq.POLLIN)

    def _leave(self) -> None:
        """Without any connection."""
        for each in (self._socket, self._connections.events):
            self._poller.unregister(each)
        self._connections.close()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            ready = dict(self._poller.poll())
            if self._inside in ready and not self._closed.is_set():
                self._socket.send_multipart(self._inside.recv_multipart())
            self._connections.take_in()
            if self._socket in ready:
                asked = self._socket.recv()
                self._topics += {b"\1": 1, b"\0": -1}.get(asked[:1], 0)
                if self._topics > MOST_TOPICS:
                    self._start_again()
        self._inside.close()
        if not self._socket.closed:
            self._leave()

    def _start_again(self) -> None:
        """Subscribers connect again by themselves."""
        self._log.warning(
            f"there are more than {MOST_TOPICS} different subscriptions to KV events: all connections are"
            " closed. A subscriber needs one topic"
        )
        self._leave()
        while self._socket.closed:
            with contextlib.suppress(ValueError):  # the port is not free yet
                self._listen(self._bind())
            if self._closed.wait(BIND_AGAIN_S):
                return

    def close(self) -> None:
        self._closed.set()
        self.send([b""])  # which wakes the thread
        self._thread.join()
        self._outside.close()


class KVEvents:
    """Gathers a step's events and publishes them. Of several cache groups the first one's, which keeps whole
    sequences: a prefix that it lacks is no hit."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, table: SlotTable, engine: int) -> None:
        """engine: its number, which is added to the endpoint's port. Raises ValueError where the endpoint
        cannot be bound."""
        self._table, self._block_size, self._engine = table, config.tokens_per_block, engine
        self._events: list[list[Any]] = [["AllBlocksCleared"]]  # of an engine that was here before
        self._sequence = 0
        self._topic = topic(config).encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._replay: Replay | None = None
        self._publisher = Publisher(lambda: _bound(zmq.XPUB, "kv_events_endpoint", config, engine))
        if config.kv_events_replay_endpoint != "none":
            try:
                self._replay = Replay(_bound(zmq.ROUTER, "kv_events_replay_endpoint", config, engine))
            except ValueError:
                self._publisher.close()
                raise
        manager.events = self
        manager.pools[0].on_removed = self.removed

    def stored(self, request: Request, column: int) -> None:
        size, keys = self._block_size, request.block_keys
        tokens = self._table.tokens[request.slot, column * size : (column + 1) * size].tolist()
        last: list[Any] = self._events[-1] if self._events else [""]
        if last[0] == "BlockStored" and column and last[1][-1] == keys[column - 1]:
            last[1].append(keys[column])
            last[3].extend(tokens)
            return
        before = keys[column - 1] if column else None
        adapter = request.params.adapter_name or None
        event = ["BlockStored", [keys[column]], before, tokens, size, None, MEDIUM, adapter]
        self._events.append(event)

    def removed(self, key: bytes) -> None:
        """No block has this key any more."""
        if self._events and self._events[-1][0] == "BlockRemoved":
            self._events[-1][1].append(key)
        else:
            self._events.append(["BlockRemoved", [key], MEDIUM])

    def publish(self) -> None:
        """Send what has happened. A subscriber that is slow or gone costs nothing."""
        if not self._events:
            return
        batch, self._events = self._encode([time.time(), self._events, self._engine]), []
        number = self._sequence.to_bytes(8, "big")
        self._publisher.send([self._topic, number, batch])
        if self._replay is not None:
            self._replay.keep(number, batch)
        self._sequence += 1

    def close(self) -> None:
        self._publisher.close()
        if self._replay is not None:
            self._replay.close()


def _bound(kind: int, knob: str, config: EngineConfig, engine: int) -> zmq.Socket[bytes]:
    """A socket on the address of a knob, whose port the engine's number is added to. Raises ValueError."""
    host, _, port = getattr(config, knob).rpartition(":")
    endpoint = f"{host}:{int(port) + engine}"
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_RECEIVED)  # it closes a connection that sends more
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a router whose host is gone leaves room for others
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.RCVHWM, UNREAD)
    if kind == zmq.XPUB:
        socket.setsockopt(zmq.SNDHWM, WAITING)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ValueError(f"{knob} {endpoint} cannot be bound: {error.strerror}") from None
    return socket


def topic(config: EngineConfig) -> str:
    """kv_events_topic with {ip} and {model} filled in."""
    model = BUNDLED if config.model_dir == BUNDLED else resolve_model_dir(config.model_dir).resolve().name
    values = {"{ip}": lambda: os.environ.get(IP_VARIABLE) or _own_ip(), "{model}": lambda: model}
    return re.sub(r"\{ip\}|\{model\}", lambda found: values[found[0]](), config.kv_events_topic)


def _own_ip() -> str:
    try:
        return sockets.gethostbyname(sockets.gethostname())
    except OSError:
        return "127.0.0.1"
