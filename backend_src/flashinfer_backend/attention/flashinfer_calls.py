# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged attention modules, called beneath their wrappers, and XQA.

The wrappers' plan() reads lengths with Python's max() and allocates; the module's plan takes tens of
microseconds and never synchronises. Its argument list is private to FlashInfer 0.6.18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashinfer_backend.attention.metadata import PagedMetadata, PinnedEntry

FLOAT_WORKSPACE = 1 << 30  # bytes; FA2's partial results for graphs of 1024 rows
INT_WORKSPACE = 8 << 20
_XQA_SEMAPHORES = 8 << 20
_NON_CAUSAL, _CAUSAL, _NHD = 0, 1, 0


@dataclass(frozen=True)
class Shape:
    """Of one attention layer: heads, block size of the cache in tokens, 16-bit type of queries, and the
    cache's, the same or e4m3."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


class Call(NamedTuple):
    """One planned kernel call: family, rows, FlashInfer's plan information; the Triton kernel's work items
    and the block table that they name rows of."""

    backend: str
    rows: int
    info: Any = None
    items: Tensor | None = None
    table: Tensor | None = None


def batch_spec(backend: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> Any:
    """FlashInfer's description of how the module "fa2" or "fa3" is built. kv_dtype: of the cache; over one of
    e4m3, "fa3" reads copies in the type of queries."""
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    kv_dtype = dtype if backend == "fa3" else kv_dtype
    plain = (0, False, False, False)  # no rope, sliding window, soft cap or float16 reduction
    return gen_batch_prefill_module(backend, dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, *plain)


class PagedCalls:
    """plan and run of the modules "fa2" and "fa3" for decode (causal False) and prefill rows; xqa."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape = shape
        self._sm_scale = 1.0 / math.sqrt(shape.head_dim)
        self._float_workspace = torch.empty(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        # Decode and prefill plans of one step are alive together.
        self._int_workspace = torch.empty(2, INT_WORKSPACE, dtype=torch.uint8, device=device)
        self._semaphores = torch.zeros(_XQA_SEMAPHORES, dtype=torch.uint8, device=device)
        self._modules: dict[str, Any] = {}

    def load(self, backends: list[str]) -> None:
        """Load the modules now rather than in the step that first calls them."""
        for backend in backends:
            self._module(backend)

    def plan(
        self, backend: str, causal: bool, entry: PinnedEntry, tokens: int, rows: int, graph: bool
    ) -> Any:
        """FlashInfer's plan information for `rows` rows staged in `entry`; copies asynchronously from it."""
        shape, host = self._shape, entry.host(rows)
        arguments = [
            self._float_workspace,
            self._int_workspace[int(causal)],
            entry.workspace,
            host.qo_indptr,
            host.kv_indptr,
            host.kv_lens,
            tokens,
            rows,
            shape.num_heads,
            shape.num_kv_heads,
            shape.block_size,
            graph,
            shape.head_dim,
            shape.head_dim,
            causal,
            -1,  # no sliding window
        ]
        if backend == "fa2":
            # No fixed split, splitting allowed, nothing co-located; in graphs every row has one query.
            arguments += [-1, False, 0, 1 if graph else 0]
        return self._module(backend).plan(*arguments)

    def run(
        self,
        backend: str,
        causal: bool,
        info: Any,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        out: Tensor,
        metadata: PagedMetadata,
        rows: int,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        indices: Tensor | None = None,
    ) -> None:
        """Attend q[T, Hq, D] of the planned rows to (K, V) and write out[T, Hq, D]. kv_scales: what the
        elements of a cache of e4m3 are multiplied by. indices: the rows' blocks in (K, V), if they are others
        than the metadata's."""
        k_scale, v_scale = kv_scales
        # Scales of V by head, soft cap, scale, scale of V, -.
        more: list[Any] = [None, 0.0, self._sm_scale * k_scale, v_scale, 0]
        unused = [None] * 3
        if backend == "fa2":
            # Block scales, soft cap, scale, rope, -. FlashInfer's own wrapper applies both scales this way.
            more = [None, None, 0.0, self._sm_scale * k_scale, 1.0, 1.0, 0]
            unused = [None] * 6  # custom masks, ALiBi and multi-item scoring
        self._module(backend).paged_run(
            self._float_workspace,
            self._int_workspace[int(causal)],
            info,
            q,
            *cache,
            metadata.qo_indptr(rows),
            metadata.kv_indptr(rows),
            metadata.indices if indices is None else indices,
            metadata.last_page_len(rows),
            out,
            None,  # no log-sum-exp
            _CAUSAL if causal else _NON_CAUSAL,
            _NHD,
            -1,  # no sliding window
            True,  # programmatic dependent launch
            *unused,
            *more,
        )
        if backend == "fa2" and v_scale != 1.0:
            out.mul_(v_scale)

    def xqa(
        self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, metadata: PagedMetadata, rows: int
    ) -> None:
        """Decode rows q[rows, Hq, D] through TensorRT-LLM's kernel, which needs no plan."""
        from flashinfer.xqa import xqa

        xqa(
            q.unsqueeze(1),
            *cache,
            metadata.table(rows),
            metadata.kv_lens(rows).view(torch.uint32).unsqueeze(1),
            out.unsqueeze(1),
            self._float_workspace,
            self._semaphores.view(torch.uint32),
            self._shape.num_kv_heads,
            self._shape.block_size,
            enable_pdl=True,
        )

    def _module(self, backend: str) -> Any:
        if backend not in self._modules:
            spec = batch_spec(backend, self._shape.dtype, self._shape.kv_dtype, self._shape.head_dim)
            self._modules[backend] = spec.build_and_load()
        return self._modules[backend]
