# SPDX-License-Identifier: Apache-2.0
"""Tells request routers which prefixes an engine's cache has, in vLLM's form.

A message has three frames: the topic, a number that counts messages (8 bytes, big endian), and in msgpack
[time, events, number of the engine]. Events: ["BlockStored", keys, key before them or nil, token ids, tokens
of a block, nil, "GPU", adapter or nil], ["BlockRemoved", keys, "GPU"] and ["AllBlocksCleared"]. A key has 16
bytes.
https://docs.vllm.ai/en/stable/examples/online_serving/kv_events_subscriber
"""

from __future__ import annotations

import os
import re
import socket as sockets
import time
from typing import Any

import msgspec
import zmq

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import BUNDLED, resolve_model_dir
from flashinfer_backend.core.request import Request
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.slot_table import SlotTable

MEDIUM = "GPU"
WAITING = 100_000  # messages for a subscriber that does not keep up; later ones are dropped for it
IP_VARIABLE = "POD_IP"


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
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, WAITING)
        host, _, port = config.kv_events_endpoint.rpartition(":")
        endpoint = f"{host}:{int(port) + engine}"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"kv_events_endpoint {endpoint} cannot be bound: {error.strerror}") from None
        manager.events = self
        manager.pools[0].on_removed = self.removed

    def stored(self, request: Request, column: int) -> None:
        """As CacheEvents.stored."""
        size, keys = self._block_size, request.block_keys
        if request.slot >= 0:
            tokens = self._table.tokens[request.slot, column * size : (column + 1) * size].tolist()
        else:
            tokens = request.known_tokens[column * size : (column + 1) * size].tolist()
        last: list[Any] = self._events[-1] if self._events else [""]
        if last[0] == "BlockStored" and column and last[1][-1] == keys[column - 1]:
            last[1].append(keys[column])
            last[3].extend(tokens)
            return
        before = keys[column - 1] if column else None
        adapter = request.params.adapter or None
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
        self._socket.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1

    def close(self) -> None:
        self._socket.close()


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
