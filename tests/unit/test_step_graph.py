# SPDX-License-Identifier: Apache-2.0
"""Which steps a whole-step graph takes; tests/gpu/test_step_graph.py has what it computes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import flashinfer_backend.attention
from flashinfer_backend.attention import split
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import DecodeAttention
from flashinfer_backend.kv_cache.cache import KVCache
from flashinfer_backend.ops import device

DECODE_ROWS = 40


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
    for kernels in ("triton_decode", "metadata"):
        stand_in = ModuleType(kernels)
        stand_in.PagedMetadata = stand_in.PinnedEntry = stand_in.PinnedRing = object
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
    assert state.plan(batch) is taken
    assert (attention.uploads > before) is taken


@pytest.mark.parametrize(("decode", "taken"), [(0, False), (1, True)])
def test_along_one_stream_a_decode_row_must_wait_for_the_prompts(
    decode: int, taken: bool, step_graph: ModuleType
) -> None:
    table = torch.empty(0)
    state = step_graph.StepGraphState(FakeAttention(), 64, DECODE_ROWS, table)
    lens = np.array([1] * decode + [20], np.int32)
    assert state.plan(AttentionBatch(lens, lens, np.arange(decode + 1), table)) is taken


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


@pytest.mark.parametrize(("dtype", "programs"), [(torch.bfloat16, (2, 2)), (torch.float8_e4m3fn, (16, 4))])
def test_room_for_decode_work_is_that_of_the_cache(
    dtype: torch.dtype, programs: tuple[int, int], step_graph: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs and eager steps split rows as the tiles of this cache want, in buffers that hold what any number
    of rows is split into."""
    few, many = DecodeAttention(16, 64, 3, 2, 16, 8, 16), DecodeAttention(None, 64, 3, 2, 16, 8, 4)
    plain = (DecodeAttention(None, 64, 3, 2, 16, 8, 2),)
    room: list[int] = []

    def workspace(rows: int, items: int, *_: Any) -> None:
        room.append(items)

    for name in ("PagedCalls", "PagedMetadata"):
        monkeypatch.setattr(step_graph, name, MagicMock())
    monkeypatch.setattr(step_graph, "PinnedRing", Ring)
    monkeypatch.setattr(step_graph.triton_decode, "DecodeWorkspace", workspace, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    cache = tuple(torch.zeros(2, 16, 8, 128, dtype=torch.bfloat16).to(dtype) for _ in "kv")
    scales = ((1.0, 1.0),) if dtype != torch.bfloat16 else ()
    numbers = replace(tuned.fallback(), decode_attention=plain, fp8_decode_attention=(few, many))
    with device.use(numbers):
        attention = step_graph.FlashInferAttention(
            KVCache.over([cache], scales), 32, DECODE_ROWS, 4, dtype=torch.bfloat16
        )
        counts = zip((16, 40), programs, strict=True)
        each = {rows: rows + -(-count * device.sms() // 8) for rows, count in counts}
        most = max(each.values())
        assert len(attention.items) == most and room == [most]
        for rows, items in each.items():
            assert attention.graph_words(rows) == items * split.ITEM_WORDS
            lens, table = np.full(rows, 9, np.int32), torch.empty(0)
            call = attention.plan_decode("triton", lens, np.arange(rows, dtype=np.int32), table)
            assert call.items is not None and len(call.items) == items
