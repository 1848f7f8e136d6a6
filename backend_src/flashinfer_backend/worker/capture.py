# SPDX-License-Identifier: Apache-2.0
"""Captures CUDA graphs, all on one stream and in one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class GraphCapture:
    """Each stream that graphs are captured on brings workspaces of cuBLAS, so there is one. Graphs share a
    pool of memory: they replay one after another, and what one computes is used up before the next."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self.sizes = 0  # of steps by now, each of one or more graphs; for whoever waits

    def __call__(
        self, work: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `work` launches, and what it returns. `warm_up` (or `work`) is run before, outside
        the capture, for what is initialised at first use."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            (warm_up or work)()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            result = work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result
