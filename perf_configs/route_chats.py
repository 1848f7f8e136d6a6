# SPDX-License-Identifier: Apache-2.0
"""How many prompt tokens of chats are found in the cache of the engine that they are sent to.

    python -m perf_configs.route_chats --engines 4 --processes 6

The real router and the real cache of blocks; the engines' times are played, after an H200 with Llama-3.1-8B.
Each turn comes through a process by chance, as it does through the instances of llm. "shared": all processes
have one table of prompts; "own": each has its own; "load": no table.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from client.arguments import argument_parser, integer, positive
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.serving.router import Router
from flashinfer_backend.transport.protocol import Status

BLOCK, PLACES, VOCABULARY = 16, 256, 32000
PROMPT_TOKEN_S, STEP_S, STEP_S_PER_SEQUENCE = 2.07e-5, 4e-3, 2e-5
THINKING_S = 4.0  # between an answer and the next turn, mean
QUESTION, ANSWER = (40, 300), (50, 350)  # tokens, from and below


class Engine:
    """Computes prompts one after the other. Decoding takes longer the more sequences are open."""

    def __init__(self, number: int, blocks: int) -> None:
        self.status = Status(number + 1, "none", VOCABULARY, 32768, 32767, PLACES, BLOCK, blocks)
        self.pool = BlockPool(blocks + 1)
        self.cache = KVCacheManager([self.pool], BLOCK, reuse=True)
        self.open, self.free_at = 0, 0.0

    def begin(self, prompt: np.ndarray, answer: int, now: float) -> tuple[float, float, list[int]]:
        """When the first token and the last one come, and the blocks that are held until then."""
        keys = self.cache.prefix_keys(prompt[:-1])
        held = self.pool.match(keys)
        cached = len(held) * BLOCK
        more = self.pool.allocate(-(-(len(prompt) + answer) // BLOCK) - len(held))
        assert more is not None, "the sequences that are open need more blocks than there are"
        for block, key in zip(more, keys[len(held) :], strict=False):
            self.pool.register(block, key)
        self.status.prompt_tokens += len(prompt)
        self.status.prompt_tokens_reused += cached
        self.status.generated_tokens += answer
        self.open += 1
        self.free_at = max(now, self.free_at) + (len(prompt) - cached) * PROMPT_TOKEN_S
        end = self.free_at + answer * (STEP_S + STEP_S_PER_SEQUENCE * self.open)
        return self.free_at, end, held + more


def play(routing: str, options: argparse.Namespace, folder: Path) -> str:
    rng = np.random.default_rng(options.seed)
    engines = [Engine(number, options.blocks) for number in range(options.engines)]
    routers: list[tuple[Router, list[Any]]] = []
    for process in range(options.processes):
        links = [
            SimpleNamespace(up=True, status=e.status, reported_at=time.monotonic() + 1e6, tokens_to_compute=0)
            for e in engines
        ]
        place = folder / (routing if routing == "shared" else f"{routing}-{process}")
        place.mkdir(exist_ok=True)
        routers.append((Router(links, place, routing != "load", 0.1), links))  # type: ignore[arg-type]
    system = rng.integers(0, VOCABULARY, options.system, dtype=np.int32)
    count, waits, spread, look_at = itertools.count(), [], [], 0.0
    beginnings = rng.uniform(0, options.chats * options.turns / options.rate, options.chats)
    events: list[Any] = [(at, next(count), None, 0, system) for at in beginnings.tolist()]
    heapq.heapify(events)
    while events:
        now, _, ended, turn, text = heapq.heappop(events)
        while look_at < now:
            look_at += 0.1
            spread.append(max(e.open for e in engines) - min(e.open for e in engines))
        if ended is not None:
            engine, blocks = ended
            engine.open -= 1
            engine.pool.release(blocks)
            if turn < options.turns:
                heapq.heappush(events, (now + rng.exponential(THINKING_S), next(count), None, turn, text))
            continue
        prompt = np.concatenate([text, rng.integers(0, VOCABULARY, rng.integers(*QUESTION), dtype=np.int32)])
        router, links = routers[rng.integers(len(routers))]
        for link, engine in zip(links, engines, strict=True):
            link.open_sequences = engine.open  # of all processes: they share it
        (best, *_), keys, _ = router.choose(prompt)
        router.sent(best, keys)
        answer = rng.integers(0, VOCABULARY, rng.integers(*ANSWER), dtype=np.int32)
        first, end, blocks = engines[best].begin(prompt, len(answer), now)
        waits.append(first - now)
        done = (engines[best], blocks)
        heapq.heappush(events, (end, next(count), done, turn + 1, np.concatenate([prompt, answer])))
    reused = sum(e.status.prompt_tokens_reused for e in engines) / sum(
        e.status.prompt_tokens for e in engines
    )
    times = f"{1e3 * np.mean(waits):.1f} | {1e3 * np.percentile(waits, 99):.1f}"
    return f"| {routing} | {100 * reused:.1f} | {times} | {np.mean(spread):.1f} |"


def main() -> None:
    parser = argument_parser("perf_configs.route_chats", __doc__)
    parser.add_argument("--engines", type=integer(1), default=4)
    parser.add_argument("--processes", type=integer(1), default=6, help="that send requests")
    parser.add_argument("--chats", type=integer(1), default=400)
    parser.add_argument("--turns", type=integer(1), default=6, help="of each chat")
    parser.add_argument("--rate", type=positive, default=40.0, help="turns a second, about")
    parser.add_argument("--system", type=integer(0), default=800, help="tokens that all chats begin with")
    parser.add_argument("--blocks", type=integer(1), default=20000, help=f"of {BLOCK} tokens, in each engine")
    parser.add_argument("--seed", type=integer(0), default=0)
    options = parser.parse_args()
    print(
        "| table | prompt tokens found, % | first token, mean ms | P99 ms | open sequences, most - fewest |"
    )
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for routing in ("shared", "own", "load"):
            print(play(routing, options, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
