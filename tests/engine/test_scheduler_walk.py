# SPDX-License-Identifier: Apache-2.0
"""Nothing is lost and nothing is mixed up: short forms of tests/reliability/scheduler_walk.py."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from model_walk import KINDS, walk_model
from scheduler_walk import STUBS, Settings, World, walk

from engine.test_waiting import Engine
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.loop import EngineLoop
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.scheduler import Scheduler
from flashinfer_backend.transport import protocol
from thinned import some


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """The loop writes a traceback for each step that is made to fail."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_thousands_of_random_steps() -> None:
    counts = walk(4_000, seed=280)
    happened = ("whole answers", "cancelled", "refused", "late", "failed", "failed rows", "preemptions")
    happened += ("waits for room", "waits for a turn", "links that were made anew", "accepted drafts")
    happened += ("accepted drafts, windows", "restored states", "states kept within a row")
    happened += ("rows with adapters", "loads", "broken adapters", "replaced adapters")
    assert all(counts[name] >= 10 for name in happened), counts
    assert counts["prompt tokens from the cache"] > 1000


def test_the_scheduler_is_told_how_long_a_step_without_prompts_takes() -> None:
    """It cuts prompts beside slow ones only."""
    sizes = {"slots": 8, "block": 4, "blocks": 200, "longest": 90, "step_tokens": 90, "busy_step_tokens": 90}
    world = World(Settings(**sizes, reuse=False, slow=True), seed=0)
    for decode_s, prompt_tokens in ((None, 60), (0.02, 30)):
        world.submit(STUBS[0], [1, 2], SamplingParams(max_tokens=40))
        for _ in range(4):
            world.step()
        world.submit(STUBS[0], [1] * 60, SamplingParams(max_tokens=1))
        world.loop.pacer.decode_s = decode_s
        world.step()
        assert world.loop.last_plan == (1, 1, prompt_tokens)
        world.drain()


@pytest.mark.parametrize(
    ("mutated", "found"),
    [
        ("eviction", "has not the key of what request|key of other tokens"),
        ("key", "reads what is not its own|key of other tokens"),
        ("forget", "reads what is not its own|key of other tokens"),
        ("tail", "has less than it counted|: b['\"]"),
        ("promise", "blocks were promised, and|blocks are promised to sequences"),
        ("place", "is given to"),
        ("state", "list index out of range|another state than its own"),
        ("snapshot", "snapshot .* can be found by a key of other tokens"),
        ("order", "another state than its own|snapshot .* can be found by a key of other tokens"),
    ],
)
def test_a_broken_manager_is_found(mutated: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the walks are for: each of these would give one client's answer the context of another's. What the
    engine's own checker finds is in tests/unit/test_invariants.py."""
    save = Scheduler._save_generated

    def leaves_names(self: BlockPool, count: int) -> list[int] | None:
        if count > self.available:
            return None
        blocks = [self._free.pop() if self._free else self._lru.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def of_the_block_alone(
        self: KVCacheManager, tokens: np.ndarray, start: int = 0, parent: bytes = b""
    ) -> list[bytes]:
        size = self.block_size
        return [tokens[i * size : (i + 1) * size].tobytes() for i in range(start, len(tokens) // size)]

    broken: dict[str, tuple[type, str, Any]] = {
        "eviction": (BlockPool, "allocate", leaves_names),
        "key": (KVCacheManager, "prefix_keys", of_the_block_alone),
        "forget": (BlockPool, "forget", lambda self, block: None),
        "tail": (BlockPool, "serves", lambda self, keys, most: most),
        "promise": (KVCacheManager, "fit_chunk", lambda self, request, start, length: length),
        "place": (EngineLoop, "_with_adapters", lambda self: []),
        "state": (BlockPool, "latest", lambda self, keys, most: most),
        "snapshot": (
            Scheduler,
            "_save_generated",
            lambda self, slot, at: save(self, slot, at - self.config.tokens_per_block),
        ),
        "order": (KVCacheManager, "restore", lambda self, keys: 1),
    }
    monkeypatch.setattr(*broken[mutated])
    with pytest.raises(AssertionError, match=found):
        walk(40_000, seed=4)


@pytest.mark.parametrize("kind", some(KINDS, ["qwen3.5", "gemma3"]))
def test_answers_in_walks_of_real_models_are_those_of_requests_alone(kind: str) -> None:
    """With states and with windows; each of what can go wrong happens several times, the same each time."""
    counts = walk_model(kind, 0, seed=3130, length=50, episodes=2)
    assert counts["whole answers"] > 50 and counts["ends held back"] > 9
    assert counts["steps with adapters"] > 200
    assert counts["preemptions"] > 7 and counts["cancelled"] > 9 and counts["failed steps"]
    assert counts["prompt tokens from the cache"] > 500 and counts["rows that share a prefix"] > 25
    assert counts["accepted drafts"] > 60 and counts["walks with eagle3"] + counts["walks with mtp"]
    assert counts["answers with numbers"] > 15 and counts["replaced adapters"]
    assert bool(counts["restored states"]) == kind.startswith(("qwen3.5", "qwen3-next"))


def test_without_the_knob_nothing_is_checked() -> None:
    engine = Engine()
    engine.submit(1, 4)
    engine.step()
    engine.loop.scheduler.kv_manager.pools[0]._free.pop()
    assert engine.loop.step()


LEAKY = """
from flashinfer_backend.cache.pool import BlockPool

release = BlockPool.release
BlockPool.release = lambda self, blocks: release(self, blocks[1:])
from flashinfer_backend.engine import __main__
raise SystemExit(__main__.main())
"""


def test_the_engine_process_says_what_is_broken_and_ends(tmp_path: Path) -> None:
    config = EngineConfig(model_dir="bundled", device="cpu", max_seq_len=128, check_invariants=True)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    options = ["--run-dir", str(tmp_path), "--parent-pid", str(os.getpid())]
    command = [sys.executable, "-c", LEAKY, *options, "--config", str(tmp_path / "config.json")]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
        zmq.Context.instance().socket(zmq.DEALER) as stub,
    ):
        stub.linger = 0
        stub.connect(protocol.socket_address(tmp_path))
        stub.send(protocol.encode(protocol.Hello(os.getpid())))
        prompt = np.arange(40, dtype="<i4").tobytes()
        handle = protocol.make_handle(os.getpid(), 1)
        stub.send(protocol.encode(protocol.Submit(handle, prompt, SamplingParams(max_tokens=3), 0, 0, 0)))
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "CRITICAL" in errors and "block 1 counts 1 holders, and 0 sequences have it" in errors
    assert "Traceback" not in errors
