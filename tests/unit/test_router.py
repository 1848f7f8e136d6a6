# SPDX-License-Identifier: Apache-2.0
"""Which engine a request goes to: prefixes, load, silence; and which GPUs engines get."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.serving.router import SILENT_S, TOKENS_PER_SEQUENCE, Candidate, Router, rank
from flashinfer_backend.transport import loads, prefixes, rundir
from flashinfer_backend.transport.gpus import visible_devices
from flashinfer_backend.transport.loads import LoadTable
from flashinfer_backend.transport.prefixes import PrefixTable, PromptHasher
from flashinfer_backend.transport.protocol import Status

BLOCK, BLOCKS = 16, 1000


def status(pid: int = 1000, **more: int) -> Status:
    return Status(pid, "cpu", 2048, 2048, 2047, 8, BLOCK, BLOCKS, **more)


def prompt(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2048, tokens, dtype=np.int32)


def test_the_longest_prefix_wins_unless_its_engine_is_clearly_busier() -> None:
    cached = 10 * TOKENS_PER_SEQUENCE
    for others, best in ((0, 0), (9, 0), (11, 1), (100, 1)):
        engines = [Candidate(cached, open=others, places=256), Candidate(0, open=0, places=256)]
        assert rank(engines)[0] == best, f"{others} others in the engine with the prefix"
    # What both have cached decides nothing.
    assert rank([Candidate(cached, open=3, places=256), Candidate(cached, open=2, places=256)])[0] == 1


def test_prompts_that_an_engine_has_yet_to_compute_count_like_tokens_of_this_one() -> None:
    assert rank([Candidate(2000, places=8, to_compute=1900), Candidate(places=8)])[0] == 0
    assert rank([Candidate(2000, places=8, to_compute=2100), Candidate(places=8)])[0] == 1


def test_an_engine_without_a_free_place_waits_for_those_with_one() -> None:
    full, free = Candidate(2000, open=2, places=2), Candidate(0, open=1, places=2)
    assert rank([full, free]) == [1, 0]
    assert rank([full, Candidate(0, open=2, places=2)]) == [0, 1]  # all are full: the prefix counts again


def test_a_silent_engine_comes_last() -> None:
    assert rank([Candidate(2000, places=8, silent=True), Candidate(open=8, places=8)]) == [1, 0]
    assert rank([Candidate(2000, silent=True, places=8), Candidate(silent=True, places=8)]) == [0, 1]


def test_equal_engines_take_turns() -> None:
    assert [rank([Candidate()] * 3, first)[0] for first in range(5)] == [0, 1, 2, 0, 1]


def test_keys_stand_for_all_tokens_up_to_the_block() -> None:
    one, other = PromptHasher(2047, BLOCK), PromptHasher(2047, BLOCK)
    tokens = prompt(0, 10 * BLOCK + 5)
    keys = one.keys(tokens)
    assert len(keys) == 10 and len(set(keys.tolist())) == 10
    assert np.array_equal(keys, other.keys(tokens))  # as another process would have them
    assert np.array_equal(one.keys(tokens[: 4 * BLOCK]), keys[:4])
    for token in (0, 1, 2047):
        assert len(set(one.keys(np.full(10 * BLOCK, token, np.int32)).tolist())) == 10
    for at in (0, 3 * BLOCK, 5 * BLOCK - 1):
        changed = tokens.copy()
        changed[at] ^= 1
        assert (one.keys(changed) == keys).tolist() == [n < at // BLOCK for n in range(10)]
    swapped = tokens.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert not (one.keys(swapped) == keys).any()
    assert not (one.keys(tokens, "/sql") == keys).any()
    assert np.array_equal(one.keys(tokens, "/sql"), other.keys(tokens, "/sql"))
    assert len(one.keys(prompt(1, 5000))) == 2047 // BLOCK  # the rest would be refused anyway


def test_processes_share_what_engines_have_had(tmp_path: Path) -> None:
    tables, hasher = [PrefixTable(tmp_path, 2) for _ in range(2)], PromptHasher(2047, BLOCK)
    tokens = prompt(0, 640)
    keys = hasher.keys(tokens)
    tables[0].add(1, keys, status())
    for table in tables:
        assert table.cached_blocks(0, keys, status()) == 0
        assert table.cached_blocks(1, keys, status()) == 40
        longer = np.concatenate([tokens[:320], prompt(1, 320)])
        assert table.cached_blocks(1, hasher.keys(longer), status()) == 20
        assert table.cached_blocks(1, hasher.keys(prompt(2, 640)), status()) == 0
    # The engine has been started again since.
    assert tables[1].cached_blocks(1, keys, status(pid=1001)) == 0


def test_what_an_engine_has_had_is_forgotten_as_its_cache_is_written_anew(tmp_path: Path) -> None:
    table, keys = PrefixTable(tmp_path, 1), PromptHasher(2047, BLOCK).keys(prompt(0, 640))
    table.add(0, keys, status(prompt_tokens=5000, prompt_tokens_reused=1000, generated_tokens=70))
    for written, blocks in ((16000 - 1, 40), (16000, 0)):
        later = status(prompt_tokens=9000 + written, prompt_tokens_reused=5000, generated_tokens=70)
        assert table.cached_blocks(0, keys, later) == blocks
    table.add(0, keys, later)  # used again
    assert table.cached_blocks(0, keys, later) == 40


def test_an_entry_that_another_prompt_has_taken_hides_no_longer_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "ENTRIES", 64)
    table, hasher = PrefixTable(tmp_path, 1), PromptHasher(2047, BLOCK)
    keys = hasher.keys(prompt(0, 20 * BLOCK))
    table.add(0, keys, status())
    table.add(0, hasher.keys(prompt(1, 4 * BLOCK)), status())
    assert table.cached_blocks(0, keys, status()) in (18, 19, 20)


class Engine(SimpleNamespace):
    """What the router sees of a link."""

    def __init__(self, pid: int, **more: Any) -> None:
        values = {"up": True, "open_sequences": 0, "tokens_to_compute": 0, "reported_at": time.monotonic()}
        super().__init__(**{**values, "status": status(pid), **more})


def router(tmp_path: Path, *engines: Engine, reuse: bool = True) -> Router:
    return Router(engines, tmp_path, reuse, 0.1)  # type: ignore[arg-type]


def test_two_processes_send_a_prompt_to_the_same_engine(tmp_path: Path) -> None:
    one, other = (router(tmp_path, *(Engine(pid) for pid in (7, 8, 9))) for _ in range(2))
    for seed in range(6):
        tokens = prompt(seed, 1500)
        order, keys, cached = one.choose(tokens)
        assert sorted(order) == [0, 1, 2] and cached == [0, 0, 0]
        one.sent(order[0], keys)
        again, _, found = other.choose(np.concatenate([tokens, prompt(99, 100)]))
        assert again[0] == order[0] and found[order[0]] == 1500 // BLOCK * BLOCK
        assert other.choose(tokens)[2][order[0]] < len(tokens)  # the last token is always computed


def test_engines_that_are_down_or_silent(tmp_path: Path) -> None:
    tokens = prompt(0, 1500)
    assert router(tmp_path, Engine(7, up=False, status=None)).choose(tokens)[0] == []
    first, second = Engine(7), Engine(8)
    mine = router(tmp_path, first, second)
    _, keys, _ = mine.choose(tokens)
    mine.sent(0, keys)
    assert mine.choose(tokens)[0] == [0, 1]
    first.reported_at = time.monotonic() - SILENT_S - 1
    assert mine.choose(tokens)[0] == [1, 0]
    first.up = False
    assert mine.choose(tokens)[0] == [1]
    second.up = False
    assert mine.choose(tokens)[0] == []
    first.up, first.status = True, status(pid=77)  # started again: its cache is empty
    mine.engine_started()
    assert mine.choose(tokens)[::2] == ([0], [0, 0])


OTHER = """
import sys
from pathlib import Path
from flashinfer_backend.transport import loads
loads.LOOK_AGAIN_S = 0.0
table = loads.LoadTable(Path(sys.argv[1]), 2)
table.tell(0, 3, 500)
table.of_others()
print("told", flush=True)
for line in sys.stdin:
    table.of_others()
    table.tell(0, *map(int, line.split()))
    print("told", flush=True)
table.close()
"""


def tells(other: subprocess.Popen[str], text: str) -> None:
    """What the process has open in engine 0 from now on."""
    assert other.stdin is not None and other.stdout is not None
    print(text, file=other.stdin, flush=True)
    assert other.stdout.readline() == "told\n"


def own_name() -> str:
    return f"load-{rundir.start_ticks(os.getpid())}-{os.getpid()}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("load-*"))


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Another process of the model, which has 3 sequences and 500 prompt tokens open in engine 0 of 2."""
    monkeypatch.setattr(loads, "LOOK_AGAIN_S", 0.0)
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "told\n"
        yield process
        process.kill()


def test_processes_see_at_once_what_others_have_open(other: subprocess.Popen[str], tmp_path: Path) -> None:
    table = LoadTable(tmp_path, 2)
    table.tell(1, 9, 9)  # its own is not among the others'
    assert table.of_others().tolist() == [[3, 500], [0, 0]]
    tells(other, "1 20")
    assert table.of_others().tolist() == [[1, 20], [0, 0]]
    other.communicate(timeout=120)  # it closes its table
    assert table.of_others().tolist() == [[0, 0], [0, 0]]
    table.close()
    assert not list(tmp_path.glob("load-*"))


def test_a_look_at_who_else_is_there_holds_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "LOOK_AGAIN_S", 1000.0)
    table, parent = LoadTable(tmp_path, 2), os.getppid()
    table.of_others()
    np.array([3, 500, 0, 0]).tofile(tmp_path / f"load-{rundir.start_ticks(parent)}-{parent}")
    assert table.of_others().tolist() == [[0, 0], [0, 0]]
    assert LoadTable(tmp_path, 2).of_others().tolist() == [[3, 500], [0, 0]]


def test_what_a_killed_process_had_open_counts_no_more(other: subprocess.Popen[str], tmp_path: Path) -> None:
    table = LoadTable(tmp_path, 2)
    other.kill()
    other.wait(120)
    assert list(tmp_path.glob(f"load-*-{other.pid}"))
    assert table.of_others().tolist() == [[0, 0], [0, 0]]
    assert names(tmp_path) == [own_name()]  # nor is it left behind


def test_the_next_process_with_a_killed_one_s_pid_does_not_inherit_its_load(tmp_path: Path) -> None:
    killed, living = "load-1", str(os.getppid())  # nobody whom this user sees started in the first tick
    np.array([3, 500, 0, 0]).tofile(tmp_path / f"{killed}-{living}")
    assert LoadTable(tmp_path, 2).of_others().tolist() == [[0, 0], [0, 0]]
    assert names(tmp_path) == [own_name()]


def test_a_file_that_somebody_removed_is_made_again(other: subprocess.Popen[str], tmp_path: Path) -> None:
    table = LoadTable(tmp_path, 2)
    assert table.of_others().tolist() == [[3, 500], [0, 0]]
    for path in tmp_path.iterdir():
        path.unlink()
    assert table.of_others().tolist() == [[0, 0], [0, 0]]
    tells(other, "4 40")
    assert table.of_others().tolist() == [[4, 40], [0, 0]]
    table.close()
    table.of_others()
    assert own_name() not in names(tmp_path)


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """This process can write to no file meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_a_process_still_sees_the_others(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(loads, "say", said.append)
    (tmp_path / "load-1-1").touch()
    table = LoadTable(tmp_path, 2)
    table.tell(1, 9, 90)
    with no_room():
        for _ in range(2):
            assert table.of_others().tolist() == [[3, 500], [0, 0]]
    assert own_name() not in names(tmp_path)
    assert [text.partition(" (")[0] for text in said] == ["others do not know what this process has open"]
    table.of_others()  # there is room again
    assert np.fromfile(tmp_path / own_name(), np.int64).tolist() == [0, 0, 9, 90]


def test_without_descriptors_a_process_knows_the_others_that_it_knew(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    table = LoadTable(tmp_path, 2)
    assert table.of_others().tolist() == [[3, 500], [0, 0]]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = table.of_others().tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [[3, 500], [0, 0]]


def test_files_of_other_sizes_harm_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that has no room, that is just making its file, or that knows of another number of
    engines."""
    monkeypatch.setattr(loads, "LOOK_AGAIN_S", 0.0)
    table, parent = LoadTable(tmp_path, 2), os.getppid()
    path = tmp_path / f"load-{rundir.start_ticks(parent)}-{parent}"
    for held, seen in (
        ([], [[0, 0], [0, 0]]),
        ([1, 10], [[1, 10], [0, 0]]),
        ([1], [[0, 0], [0, 0]]),
        ([1, 10, 2, 20, 3, 30], [[1, 10], [2, 20]]),
    ):
        path.unlink(missing_ok=True)
        np.array(held, np.int64).tofile(path)
        assert table.of_others().tolist() == seen
        assert path.stat().st_size == 8 * len(held)


def test_an_engine_that_starts_again_leaves_the_load_where_others_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "LOOK_AGAIN_S", 0.0)
    mine = router(tmp_path, Engine(7, open_sequences=1), Engine(8), reuse=False)
    mine.choose(prompt(0, 100))
    with (tmp_path / own_name()).open() as seen:
        mine.engine_started()
        mine.choose(prompt(0, 100))
        assert os.fstat(seen.fileno()).st_nlink == 1


def test_requests_go_where_other_processes_have_less_open(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    engines = [Engine(7), Engine(8)]
    mine = router(tmp_path, *engines, reuse=False)
    assert [mine.choose(prompt(0, 100))[0] for _ in range(3)] == [[1, 0]] * 3
    for open_sequences, best in ((3, 1), (6, 0)):  # 500 tokens are nearly 2 sequences
        engines[1].open_sequences = open_sequences
        mine.load_changed(1)
        assert mine.choose(prompt(0, 100))[0][0] == best
    assert np.fromfile(tmp_path / own_name(), np.int64).tolist() == [0, 0, 6, 0]
    mine.close()


def test_without_reuse_only_load_counts(tmp_path: Path) -> None:
    mine = router(tmp_path, Engine(7, open_sequences=1), Engine(8), reuse=False)
    order, keys, cached = mine.choose(prompt(0, 1500))
    assert (order, len(keys), cached) == ([1, 0], 0, [0, 0])
    assert not (tmp_path / "prefixes").exists()


def test_without_room_for_the_table_only_load_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = router(tmp_path / "missing", Engine(7, open_sequences=1), Engine(8))
    for _ in range(2):
        assert mine.choose(prompt(0, 1500))[0] == [1, 0]
    assert capfd.readouterr().err.count("by load alone: prefixes are not known") == 1


@pytest.mark.parametrize(
    ("settings", "shown", "expected"),
    [
        ({}, None, [None]),
        ({}, "3", [None]),
        ({"replicas": "3"}, None, ["0", "1", "2"]),
        ({"replicas": "2"}, "5, GPU-abc,7", ["5", "GPU-abc"]),
        ({"replicas": "2"}, "", [None, None]),
        ({"replicas": "2"}, "-1,0", [None, None]),
        ({"replicas": "2", "device": "cpu"}, "0", [None, None]),
        ({"gpu_device_ids": "3"}, None, ["3"]),
        ({"replicas": "2", "tensor_parallel_size": "2"}, None, ["0,1", "2,3"]),
        ({"gpu_device_ids": "2,0", "tensor_parallel_size": "2"}, "4,5,6", ["6,4"]),
        ({"replicas": "2", "gpu_device_ids": "1; 0"}, None, ["1", "0"]),
        ({"replicas": "2", "gpu_device_ids": "2;0"}, "4,5,6", ["6", "4"]),
    ],
)
def test_gpus_of_each_engine(settings: dict[str, str], shown: str | None, expected: list[str | None]) -> None:
    config = EngineConfig.from_parameters({"model_dir": "bundled", **settings})
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert visible_devices(config, environment) == expected


@pytest.mark.parametrize(
    ("settings", "shown", "message"),
    [
        ({"replicas": "3"}, "4,5",
         "replicas=3 needs 3 GPUs, and CUDA_VISIBLE_DEVICES=4,5 shows 2: .* replicas=2"),
        ({"gpu_device_ids": "0;2", "replicas": "2"}, "4,5",
         "gpu_device_ids=0;2 needs 3 GPUs, and .* shows 2"),
        ({"replicas": "2", "tensor_parallel_size": "2"}, "4,5,6", "replicas=2 needs 4 GPUs, .* replicas=1"),
        ({"gpu_device_ids": "0;1"}, None, "has the GPUs of 2 engines, and replicas=1: set replicas=2"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_refused(settings: dict[str, str], shown: str | None, message: str) -> None:
    config = EngineConfig.from_parameters({"model_dir": "bundled", **settings})
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    with pytest.raises(ValueError, match=message):
        visible_devices(config, environment)


def test_gpus_survive_their_way_to_the_engine() -> None:
    config = EngineConfig.from_parameters({"model_dir": "m", "replicas": "2", "gpu_device_ids": "0,1;2,3"})
    assert config.gpu_device_ids == [[0, 1], [2, 3]]
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("settings", "named", "driver", "fits"),
    [
        ({"replicas": "2"}, "1", False, True),  # a machine without GPUs: device=auto is the CPU
        ({"replicas": "2"}, "1", True, False),
        ({"replicas": "2", "device": "cuda"}, "1", False, False),
        ({"replicas": "2", "device": "cpu"}, "1", True, True),
        ({"gpu_device_ids": "7"}, "7", False, False),
        ({}, "7", True, True),  # as it was without replicas: _device says what it finds
    ],
)
def test_an_engine_whose_gpu_is_not_there_does_not_start(
    settings: dict[str, str], named: str, driver: bool, fits: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    from flashinfer_backend.engine import __main__ as engine

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(engine.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(engine, "DRIVER", tmp_path if driver else tmp_path / "missing")
    config = EngineConfig.from_parameters({"model_dir": "m", **settings})
    if fits:
        engine.check_gpus(config)
    else:
        with pytest.raises(ValueError, match=f"the GPU {named}, and torch sees 0 of 1: set replicas"):
            engine.check_gpus(config)
