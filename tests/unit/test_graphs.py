# SPDX-License-Identifier: Apache-2.0
"""Which captured number of tokens a step is padded to, and that what is captured is the model's step."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer_backend.core.paths import BUNDLED, resolve_model_dir
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.worker import graphs as graphs_module
from flashinfer_backend.worker.graphs import MIXED_SIZES, GraphCapture, MixedGraphs, fastest_sizes
from specs import EXPERTS, bundled


def test_more_padding_where_it_is_faster():
    assert fastest_sizes([8, 16, 32, 64], [1.0, 2.0, 4.0, 3.0]) == [8, 16, 64, 64]
    assert fastest_sizes([8, 16, 32], [3.0, 2.0, 1.0]) == [32, 32, 32]
    assert fastest_sizes([8, 16, 32], [1.0, 2.0, 3.0]) == [8, 16, 32]


def test_sizes_ascend():
    assert sorted(set(MIXED_SIZES)) == MIXED_SIZES


class Doubling:
    """Attention that shows which layer it was called for, and on what."""

    def captured(self, *_: Any) -> Doubling:
        return self

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(q * (layer + 2))


def test_what_is_captured_is_the_models_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly, on a CPU: capturing runs what it records."""
    stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    graph = SimpleNamespace(capture_begin=lambda pool: None, capture_end=lambda: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "CUDAGraph": lambda: graph,
        "graph_pool_handle": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graphs_module, "MIXED_SIZES", [8])
    monkeypatch.setattr(MixedGraphs, "_layer_seconds", lambda *_: 1.0)
    folder = resolve_model_dir(BUNDLED)
    config = read_spec(folder)
    model = Transformer(config, torch_ops, torch.float32, "cpu", 64)
    load_weights(model, folder)
    heads = model.spec.attention
    caches = [tuple(torch.zeros(2, 16, heads.kv_heads, heads.head_dim) for _ in "kv") for _ in model.layers]
    table = torch.zeros(5, 4, dtype=torch.int32)
    state: Any = SimpleNamespace(
        model=model,
        attention=Doubling(),
        block_table=table,
        attended_lengths=None,
        kv_layers=caches,
        groups=[None],
        taps=lambda tokens: None,
        by_layer=lambda locations: locations,
    )
    graphs = MixedGraphs(state, capture := GraphCapture())
    assert capture.sizes == 1
    (full,) = graphs._full[8]
    with torch.inference_mode():
        expected = model(*graphs._inputs[:, :8], caches, Doubling())
        found = model.finish(graphs._attended[:8], full.hidden, None)
    assert full.decode_rows == 4
    assert torch.equal(found, expected)
    assert len(graphs._graphs[8]) == len(model.layers)


@pytest.mark.parametrize("experts", [False, True])
def test_sizes_are_timed_with_tokens_that_choose_different_experts(experts, monkeypatch):
    """The piece that is timed reads what the pieces before it compute; without experts any numbers do."""
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs = object.__new__(MixedGraphs)
    spec = bundled(**EXPERTS, num_experts=8, num_experts_per_tok=2) if experts else bundled()
    graphs._model = SimpleNamespace(spec=replace(spec, vocab_size=12))  # type: ignore[assignment]
    graphs._inputs = torch.zeros(3, 32, dtype=torch.int32)
    replayed: list[tuple[int, list[int]]] = []

    def piece(index: int) -> Any:
        return SimpleNamespace(replay=lambda: replayed.append((index, graphs._inputs[0, :16].tolist())))

    graphs._graphs = {16: [piece(0), piece(1), piece(2)]}
    assert graphs._layer_seconds(16) == 2e-3
    seen = [index for index, _ in replayed]
    if experts:
        assert seen[:2] == [0, 1] and set(seen[2:]) == {2}
        assert replayed[0][1] == [*range(12), *range(4)]
    else:
        assert set(seen) == {2} and replayed[0][1] == [0] * 16
