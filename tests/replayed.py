# SPDX-License-Identifier: Apache-2.0
"""A CUDA graph whose replay calls the function that was captured: graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ReplayedGraph:
    def __init__(self, work: Callable[[], torch.Tensor], capture: ReplayedCapture) -> None:
        self._work, self._capture = work, capture
        with torch.inference_mode():
            self.result = work()

    def replay(self) -> None:
        with torch.inference_mode():
            self.result.copy_(self._work())
        self._capture.replays += 1


class ReplayedCapture:
    """In place of GraphCapture."""

    def __init__(self) -> None:
        self.sizes = self.replays = 0

    def __call__(self, work: Callable[[], torch.Tensor], warm_up: Any = None) -> tuple[Any, torch.Tensor]:
        with torch.inference_mode():
            (warm_up or work)()
        graph = ReplayedGraph(work, self)
        return graph, graph.result
