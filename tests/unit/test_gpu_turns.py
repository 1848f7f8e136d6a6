# SPDX-License-Identifier: Apache-2.0
"""The order in which engines on the same GPU take memory, between processes, without a GPU;
tests/gpu/test_gpu_turns.py has real engines. And how large their caches become."""

import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashinfer_backend.cache.groups import CacheGroup
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.worker import memory
from flashinfer_backend.worker.gpu_turns import Neighbours

ENGINE = """
import sys
from pathlib import Path
from flashinfer_backend.worker.gpu_turns import GpuTurn
turn = GpuTurn(Path(sys.argv[1]), sys.argv[2].split(","))
print("loads", flush=True)
for line in sys.stdin:
    word, _, cache = line.strip().partition(" ")
    if word == "take":
        print(*(f"{each.cache}/{each.waiting}" for each in turn.take()), flush=True)
    else:
        turn.ready(int(cache))
        print("ready", flush=True)
"""
SOON_S = 0.4  # four looks


class Engine:
    """A process that takes its turn when it is told to."""

    def __init__(self, run_dir: Path, gpus: str) -> None:
        run_dir.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(run_dir), gpus],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self.heard() == "loads"

    def tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")

    def heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def takes(self) -> str:
        self.tell("take")
        return self.heard()

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def waits(self) -> bool:
        return not select.select([self], [], [], SOON_S)[0]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(name: str, gpus: str = "GPU-a") -> Engine:
        made.append(Engine(tmp_path / name, gpus))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def test_each_waits_for_weights_and_for_the_one_that_takes(engine: Callable[..., Engine]) -> None:
    first, second, third = engine("1-chat"), engine("1-code"), engine("1-tale")
    first.tell("take")
    second.tell("take")
    assert first.waits() and second.waits(), "the third one reads its weights"
    third.kill()
    (one,) = select.select([first, second], [], [], 120)[0]
    other = second if one is first else first
    assert one.heard() == "0/1" and other.waits(), "the other one waits until this one is ready"
    one.tell("ready 40")
    assert one.heard() == "ready" and other.heard() == "40/0"
    other.tell("ready 30")
    assert other.heard() == "ready"
    assert engine("1-tale").takes() == "70/0", "the one that was started again"


def test_the_cache_of_an_engine_that_has_ended_is_not_counted(engine: Callable[..., Engine]) -> None:
    first, second = engine("1-chat"), engine("1-code")
    first.tell("take")
    assert first.waits()
    second.kill()
    assert first.heard() == "0/0"
    again = engine("1-code")
    again.tell("take")
    assert again.waits()
    first.kill()  # while it takes memory
    assert again.heard() == "0/0"


def test_engines_on_other_gpus_do_not_wait(engine: Callable[..., Engine]) -> None:
    one, pair = engine("1-chat"), engine("1-large", "GPU-b,GPU-c")
    assert one.takes() == "0/0" and pair.takes() == "0/0 0/0"
    across, last = engine("1-code", "GPU-a,GPU-c"), engine("1-last", "GPU-d")
    across.tell("take")
    one.tell("ready 7")
    assert one.heard() == "ready" and across.waits() and last.takes() == "0/0"
    pair.tell("ready 9")
    assert pair.heard() == "ready" and across.heard() == "7/0 9/0"


@pytest.mark.parametrize(
    ("free", "neighbours", "gib"),
    [
        (40, Neighbours(), 20),  # half
        (40, Neighbours(waiting=1), 18),  # of what the other's graphs leave
        (24, Neighbours(cache=16 << 30), 20),  # half of what there was before the other's cache
        (12, Neighbours(cache=28 << 30), 12),  # no more than there is
    ],
)
def test_a_share_is_of_what_the_weights_of_all_engines_leave(
    free: int, neighbours: Neighbours, gib: int
) -> None:
    config = EngineConfig(model_dir="", max_seq_len=64, kv_cache_free_gpu_mem_fraction=0.5)
    group = CacheGroup((0,), None, config.tokens_per_block, 1 << 20)
    assert memory.num_blocks_of(config, [group], [0], free << 30, neighbours) == gib << 10


def test_other_engines_are_named_where_they_leave_no_memory() -> None:
    config = EngineConfig(model_dir="", max_seq_len=64)
    group = CacheGroup((0,), None, config.tokens_per_block, 1 << 20)
    with pytest.raises(ValueError, match="the largest step and other engines on this GPU want 1"):
        memory.num_blocks_of(config, [group], [0], -(1 << 30), Neighbours(cache=1))
