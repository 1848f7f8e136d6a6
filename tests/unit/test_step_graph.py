# SPDX-License-Identifier: Apache-2.0
"""Which steps a whole-step graph takes; tests/gpu/test_step_graph.py has what it computes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import flashinfer_backend.attention
from flashinfer_backend.attention import split
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Scores, StepShape
from flashinfer_backend.cache.device import KVCache, KVCacheFormat
from flashinfer_backend.cache.groups import CacheGroup
from flashinfer_backend.core import tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.tuned import DecodeAttention
from flashinfer_backend.ops import device
from flashinfer_backend.worker.device_state import DeviceState
from tables import entries

DECODE_ROWS = 40
NO_WORDS = np.empty(0, np.int32)


class FakeAttention:
    """Counts uploads; FA2 takes prompts over a long prefix. Like the real one, it must be given some."""

    items = torch.zeros(1000, 8)

    def __init__(self) -> None:
        self.uploads = 0

    def choose_prefill(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> str:
        return "fa2" if int(kv_lens.max()) > 512 else "fa3"

    def max_items(self, rows: int) -> int:
        return 2 * rows

    def plan_items(self, *_: Any) -> None:
        self.uploads += 1

    def plan_prompts(self, *_: Any) -> list[int]:
        self.uploads += 1
        return [1, 2, 3]


@pytest.fixture
def step_graph(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, where Triton is not installed, too."""
    name = "flashinfer_backend.attention.flashinfer_paged"
    for kernels in ("triton_copy", "triton_decode", "triton_sinks", "metadata"):
        stand_in = ModuleType(kernels)
        stand_in.PagedMetadata = stand_in.PinnedEntry = stand_in.PinnedRing = object
        stand_in.Copies = stand_in.apply_sinks = object
        monkeypatch.setitem(sys.modules, f"flashinfer_backend.attention.{kernels}", stand_in)
        monkeypatch.setattr(flashinfer_backend.attention, kernels, stand_in, raising=False)
    monkeypatch.delitem(sys.modules, "flashinfer_backend.attention.flashinfer_calls", raising=False)
    monkeypatch.setattr(flashinfer_backend.attention, "flashinfer_paged", None, raising=False)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)  # so that it leaves with the rest
    return module


@pytest.mark.parametrize(
    ("decode", "q_lens", "kv_lens", "taken"),
    [
        (0, [90], [90], True),
        (DECODE_ROWS, [18] * 16, [18] * 16, True),
        (DECODE_ROWS, [], [], False),  # more rows than the largest decode graph has
        (0, [15] * 17, [15] * 17, False),
        (DECODE_ROWS + 1, [90], [90], False),
        (3, [5], [4000], False),
    ],
)
def test_steps_that_it_takes(
    decode: int, q_lens: list[int], kv_lens: list[int], taken: bool, step_graph: ModuleType
) -> None:
    attention, table = FakeAttention(), torch.empty(0)
    state = step_graph.StepGraphState(attention, 512, DECODE_ROWS, table)
    rows, before = decode + len(q_lens), attention.uploads
    batch = AttentionBatch(
        q_lens=np.array([1] * decode + q_lens, np.int32),
        kv_lens=np.array([9] * decode + kv_lens, np.int32),
        slots=np.arange(rows, dtype=np.int32),
        block_table=table,
    )
    assert state.plan(batch, NO_WORDS) is taken
    assert (attention.uploads > before) is taken


@pytest.mark.parametrize(("decode", "taken"), [(0, False), (1, True)])
def test_along_one_stream_a_decode_row_must_wait_for_the_prompts(
    decode: int, taken: bool, step_graph: ModuleType
) -> None:
    table = torch.empty(0)
    state = step_graph.StepGraphState(FakeAttention(), 64, DECODE_ROWS, table)
    lens = np.array([1] * decode + [20], np.int32)
    assert state.plan(AttentionBatch(lens, lens, np.arange(decode + 1), table), NO_WORDS) is taken


def test_has_no_more_tokens_than_its_plan_has_room_for(step_graph: ModuleType) -> None:
    with pytest.raises(ValueError, match="1025 tokens"):
        step_graph.StepGraphState(FakeAttention(), 1025, DECODE_ROWS, torch.empty(0))


class Ring:
    """One entry, in memory that is not pinned."""

    def __init__(self, _entries: int, _bytes: int, _rows: int, items: int) -> None:
        self.items = torch.zeros(items, split.ITEM_WORDS, dtype=torch.int32)

    def next(self) -> Ring:
        return self

    def release(self, _: Ring) -> None:
        pass


class Metadata:
    """One row's, on the CPU."""

    def __init__(self, _ring: Ring, _rows: int, _blocks: int, block_size: int, _device: torch.device) -> None:
        self.block_size = block_size
        self.indices, self._indptr = torch.tensor([3, 1]), torch.tensor([0, 2])

    def kv_indptr(self, rows: int) -> torch.Tensor:
        return self._indptr[: rows + 1]


class Copies:
    """Notes what is copied."""

    def __init__(self, _cache: Any, _dtype: torch.dtype, blocks: int, _where: torch.device) -> None:
        self.blocks = blocks
        self.layer, self.indices = (torch.ones(1), torch.ones(1)), torch.arange(2)
        self.written: list[tuple[Any, ...]] = []

    def write(self, *arguments: Any) -> None:
        self.written.append(arguments)


def make_attention(
    step_graph: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    scales: tuple[tuple[float, float], ...] = (),
    copied_blocks: int = 0,
    decode_backend: str = "auto",
    workspace: Any = None,
    **variant: Any,
) -> Any:
    """The real one, of 32 heads and 8 of keys and values, on a Hopper GPU that launches nothing."""
    for name, stand_in in (("PagedCalls", MagicMock()), ("PagedMetadata", Metadata), ("PinnedRing", Ring)):
        monkeypatch.setattr(step_graph, name, stand_in)
    monkeypatch.setattr(step_graph.triton_decode, "DecodeWorkspace", workspace or MagicMock(), raising=False)
    monkeypatch.setattr(step_graph.triton_copy, "Copies", Copies)
    monkeypatch.setattr(step_graph, "has_fa3", lambda _: True)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    cache = tuple(torch.zeros(2, 16, 8, 128, dtype=torch.bfloat16).to(dtype) for _ in "kv")
    return step_graph.FlashInferAttention(
        KVCache.over([cache] * max(1, len(scales)), scales),
        32,
        DECODE_ROWS,
        4,
        decode_backend,
        dtype=torch.bfloat16,
        copied_blocks=copied_blocks,
        **variant,
    )


@pytest.mark.parametrize("backend", ["fa2", "xqa"])
def test_other_decode_backends_have_no_variants(
    backend: str, step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(decode_backend: str, **variant: Any) -> Any:
        return make_attention(
            step_graph, monkeypatch, torch.bfloat16, decode_backend=decode_backend, **variant
        )

    plain, sinks = Scores(128**-0.5), torch.zeros(32)
    make(backend, scores=[plain])
    for variant in (
        {"window": 100},
        {"scores": [plain._replace(scale=0.1)]},
        {"scores": [plain._replace(soft_cap=30.0)]},
        {"scores": [plain._replace(sinks=sinks)]},
    ):
        make("auto", **variant)
        with pytest.raises(ValueError, match=f"{backend} has no windows, sinks, soft caps or other scales"):
            make(backend, **variant)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "taken"),
    [
        ([400] * 4, [400] * 4, "fa3"),
        ([20], [20], "fa3"),  # so few tokens that copying costs nothing
        ([300], [1600], "fa3"),  # all of the room
        ([300], [1601], "fa2"),
        ([300, 100], [1584, 1], "fa3"),
        ([300, 100], [1584, 17], "fa2"),  # a block more
        ([20] * 3, [510] * 3, "fa2"),  # too few queries for what they read
        ([20, 240], [100, 1400], "fa3"),  # most of what is read has many queries
        ([240, 20], [100, 1400], "fa2"),
        ([5], [1500], "fa2"),  # as with 16 bits
    ],
)
def test_prompts_over_e4m3_take_fa3_where_copies_have_room_and_pay(
    q_lens: list[int], kv_lens: list[int], taken: str, step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 100 blocks of 16 tokens."""
    attention = make_attention(step_graph, monkeypatch, torch.float8_e4m3fn, ((1.0, 1.0),), 100)
    with device.use(tuned.fallback()):
        assert attention.choose_prefill(np.array(q_lens, np.int32), np.array(kv_lens, np.int32)) == taken
    none = make_attention(step_graph, monkeypatch, torch.float8_e4m3fn, ((1.0, 1.0),))
    plain = make_attention(step_graph, monkeypatch, torch.bfloat16)
    with device.use(tuned.fallback()):
        lens = np.array([300], np.int32), np.array([16000], np.int32)
        assert none.choose_prefill(*lens) == "fa2" and plain.choose_prefill(*lens) == "fa3"


def test_a_long_context_does_not_overflow(step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 768 queries of 131 072 tokens are more than an int32."""
    attention = make_attention(step_graph, monkeypatch, torch.float8_e4m3fn, ((1.0, 1.0),), 10000)
    with device.use(tuned.fallback()):
        assert attention.choose_prefill(np.array([32768], np.int32), np.array([131072], np.int32)) == "fa3"


def test_fa3_reads_the_copies_and_fa2_the_cache(
    step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = ((0.5, 0.25), (2.0, 4.0))
    attention = make_attention(step_graph, monkeypatch, torch.float8_e4m3fn, scales, 10)
    run, copies, q = attention._calls.run, attention._copies, torch.zeros(9, 32, 128)
    attention.run_prompts("fa3", "plan", 1, q, q, 1)
    (written,) = copies.written
    assert written[0] is attention.layers[1] and written[1] is attention._prefill.indices
    assert written[2].tolist() == [0, 2] and written[3] == 1
    arguments = run.call_args.args
    assert arguments[4] is copies.layer and arguments[-2] is copies.indices and arguments[-3] == scales[1]
    attention.run_prompts("fa2", "plan", 1, q, q, 1)
    assert len(copies.written) == 1
    assert run.call_args.args[4] is attention.layers[1] and run.call_args.args[-2] is None
    plain = make_attention(step_graph, monkeypatch, torch.bfloat16)
    plain.run_prompts("fa3", "plan", 0, q, q, 1)
    assert plain._copies is None and plain._calls.run.call_args.args[4] is plain.layers[0]


def test_modules_apply_scales_each_in_its_place(
    step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FA3 inside, as rows of others lie beside its own in `out`; and in its order of arguments."""
    calls = importlib.import_module("flashinfer_backend.attention.flashinfer_calls")
    shape = calls.Shape(32, 8, 64, 16, torch.bfloat16, torch.float8_e4m3fn)
    for name in ("FLOAT_WORKSPACE", "INT_WORKSPACE", "_XQA_SEMAPHORES"):
        monkeypatch.setattr(calls, name, 8)
    paged, module, metadata = calls.PagedCalls(shape, torch.device("cpu")), MagicMock(), MagicMock()
    monkeypatch.setattr(paged, "_module", lambda _: module)
    q, cache, own = torch.zeros(3, 32, 64), (torch.zeros(1), torch.zeros(1)), torch.arange(4)
    for backend, index, out_scale in (("fa2", None, 0.25), ("fa3", own, 1.0)):
        out = torch.ones(3, 32, 64)
        paged.run(backend, True, "plan", q, cache, out, metadata, 2, (0.5, 0.25), index)
        arguments = module.paged_run.call_args.args
        assert arguments[8] is (metadata.indices if index is None else index)
        assert (out == out_scale).all()
        behind = list(arguments[16:])
        if backend == "fa3":
            # prefix_len, token_pos, max_item_len, scale_v; soft cap, sm_scale, scale_v_scalar, item length
            assert behind == [None, None, None, None, 0.0, 0.125 * 0.5, 0.25, 0]
        else:
            assert behind == [None] * 8 + [0.0, 0.125 * 0.5, 1.0, 1.0, 0]


def test_fa3_is_built_for_16_bits_whatever_the_cache(
    step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: Any = ModuleType("modules")
    modules.gen_batch_prefill_module = MagicMock()
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.attention.modules", modules)
    calls = importlib.import_module("flashinfer_backend.attention.flashinfer_calls")
    query, stored = torch.float16, torch.float8_e4m3fn
    for backend, expected in (("fa2", stored), ("fa3", query)):
        calls.batch_spec(backend, query, stored, 128)
        assert modules.gen_batch_prefill_module.call_args.args[:4] == (backend, query, expected, query)
        assert modules.gen_batch_prefill_module.call_args.args[-3:] == (False, False, False)
    calls.batch_spec("fa3", query, stored, 128, window=True)
    assert modules.gen_batch_prefill_module.call_args.args[-3:] == (True, False, False)


@pytest.mark.parametrize("decode_backend", ["auto", "triton", "fa2"])
def test_steps_over_e4m3_are_graphs_where_there_is_room_for_copies(
    decode_backend: str, step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graph, "StepGraphState", MagicMock())
    for blocks in (0, 10):
        attention = make_attention(
            step_graph, monkeypatch, torch.float8_e4m3fn, ((1.0, 1.0),), blocks, decode_backend
        )
        state = attention.captured(StepShape(512, DECODE_ROWS, None), torch.empty(0), torch.empty(0))
        assert (state is not None) is (blocks > 0 and decode_backend != "fa2")


def test_an_engine_has_room_for_its_longest_sequence(
    step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = MagicMock()
    monkeypatch.setattr(step_graph, "FlashInferAttention", attention)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    config = EngineConfig(model_dir="", max_seq_len=100000, max_num_tokens=8192)
    heads = SimpleNamespace(heads=32, head_dim=128)
    model = SimpleNamespace(spec=SimpleNamespace(attention=heads, layers=()), dtype=torch.bfloat16)
    for stored, scales, blocks in (
        (torch.float8_e4m3fn, ((1.0, 1.0),), (100000 + 8192) // 16),
        (torch.bfloat16, (), 0),
    ):
        cache = SimpleNamespace(format=KVCacheFormat(1, 8, 128, 16, stored, scales))
        state: Any = SimpleNamespace(
            model=model, caches=[cache], device=torch.device("cuda"), max_blocks=6250
        )
        state._of_groups = lambda attentions: attentions[0]
        state.groups = [CacheGroup((0,), None, 16, cache.format.bytes_per_block)]
        DeviceState._flashinfer_attention(state, config)
        assert attention.call_args.kwargs["copied_blocks"] == blocks


@pytest.mark.parametrize(("dtype", "programs"), [(torch.bfloat16, (2, 2)), (torch.float8_e4m3fn, (16, 4))])
def test_room_for_decode_work_is_that_of_the_cache(
    dtype: torch.dtype, programs: tuple[int, int], step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs and eager steps split rows as the tiles of this cache want, in buffers that hold what any number
    of rows is split into."""
    few, many, plain = (DecodeAttention(64, 3, 2, 16, 8, count) for count in (16, 4, 2))
    forms = {"16 bits": entries((None, plain)), "e4m3": entries((16, few), (None, many))}
    room: list[int] = []

    def workspace(rows: int, items: int, *_: Any) -> None:
        room.append(items)

    scales = ((1.0, 1.0),) if dtype != torch.bfloat16 else ()
    numbers = replace(tuned.fallback(), decode_attention=forms)
    with device.use(numbers):
        attention = make_attention(step_graph, monkeypatch, dtype, scales, workspace=workspace)
        counts = zip((16, 40), programs, strict=True)
        each = {rows: rows + -(-count * device.sms() // 8) for rows, count in counts}
        most = max(each.values())
        assert len(attention.items) == most and room == [most]
        for rows, items in each.items():
            assert attention.graph_words(StepShape(rows, rows, 1)) == items * split.ITEM_WORDS
            lens, table = np.full(rows, 9, np.int32), torch.empty(0)
            call = attention.plan_decode("triton", lens, np.arange(rows, dtype=np.int32), table)
            assert call.items is not None and len(call.items) == items
