# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged attention modules, called beneath their wrappers.

The wrappers' plan() reads lengths with Python's max() and allocates; the module's plan takes tens of
microseconds and never synchronises. Its argument list is private to FlashInfer 0.6.18.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashinfer_backend.attention.contract import Scores, Variant
from flashinfer_backend.attention.metadata import PagedMetadata, PinnedEntry
from flashinfer_backend.attention.split import Lengths
from flashinfer_backend.attention.triton_prefix import SharedWork
from flashinfer_backend.attention.triton_sinks import apply_sinks

FLOAT_WORKSPACE = 1 << 30  # bytes; FA2's partial results for graphs of 1024 rows
INT_WORKSPACE = 8 << 20
_NON_CAUSAL, _CAUSAL, _NHD = 0, 1, 0
# FA3's tiles over the paged cache, queries x tokens, by head_dim: those that FlashInfer's templates name, and
# those that replace them. Its 32 tokens of heads of 256 make the tensor cores wait for shared memory.
FA3_TILES: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {256: ((128, 32), (128, 64))}

# Of FlashInfer's usual variant for FA3, which PagedCalls.run passes: names and types of tensors, of numbers.
_FA3_ARGUMENTS = (
    ["maybe_prefix_len_ptr", "maybe_token_pos_in_items_ptr", "maybe_max_item_len_ptr", "maybe_scale_v"],
    ["uint32_t", "uint16_t", "uint16_t", "float"],
    ["logits_soft_cap", "sm_scale", "scale_v_scalar", "token_pos_in_items_len"],
    ["double", "double", "double", "int64_t"],
)


@dataclass(frozen=True)
class Shape:
    """One attention layer: heads, block size of the cache in tokens, 16-bit type of queries, and the
    cache's, the same or e4m3."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


class Call(NamedTuple):
    """One planned kernel call: family, rows, FlashInfer's plan information; the Triton kernel's work items,
    the block table that they name rows of, where rows end if the device alone knows, and what rows share if
    it is read once."""

    backend: str
    rows: int
    info: Any = None
    items: Tensor | None = None
    table: Tensor | None = None
    lengths: Lengths | None = None
    shared: SharedWork | None = None


def declaration(variant: Variant) -> str:
    """CUDA text of a variant's struct."""
    return f"""
struct {variant.struct} : AttentionVariantBase {{
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ {variant.struct}(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {{
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = math::log2e;
  }}
{variant.transforms}}};
"""


def tiled(head_dim: int, soft_cap: bool) -> str:
    """CUDA text of TiledAttention, FA3's usual variant of attention with the tiles of FA3_TILES: kernels are
    templates of tiles and a variant, so what FlashInfer names as tiles becomes others for this one."""
    named, own = FA3_TILES[head_dim]
    sizes = "false, {0}, {0}, {1[0]}, {1[1]}, 2, Q, KV, O, Id, TiledAttention"  # 2: stages
    return f"""
#include <flashinfer/attention/hopper/kernel_traits.cuh>
#include <flashinfer/attention/hopper/variants.cuh>

namespace flashinfer {{
struct TiledAttention : DefaultAttention<{str(soft_cap).lower()}> {{
  using Base = DefaultAttention<{str(soft_cap).lower()}>;
  using Base::Base;
}};
template <class Q, class KV, class O, class Id>
struct AttentionKernelTraits<{sizes.format(head_dim, named)}>
    : AttentionKernelTraits<{sizes.format(head_dim, own)}> {{}};
}}  // namespace flashinfer
"""


def batch_spec(
    backend: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    window: bool = False,
    soft_cap: bool = False,
    variant: Variant | None = None,
) -> Any:
    """FlashInfer's description of how the module "fa2" or "fa3" is built. kv_dtype: of the cache; over one of
    e4m3, "fa3" reads copies in the type of queries. window, soft_cap: whether the module has them. variant:
    of "fa2" without either."""
    from flashinfer.jit.attention import modules

    if variant is not None:
        types = dtype, kv_dtype, dtype, torch.int32
        text = declaration(variant)
        named = repr((types, head_dim, variant.struct, text))
        uri = f"batch_prefill_{variant.struct.lower()}_{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        more = ["by_head"], ["float"], ["sm_scale"], ["double"], variant.struct, text
        return modules.gen_customize_batch_prefill_module("fa2", uri, *types, head_dim, head_dim, *more)
    kv_dtype = dtype if backend == "fa3" else kv_dtype
    if backend == "fa3" and head_dim in FA3_TILES:
        text = tiled(head_dim, soft_cap)
        named = repr((dtype, window, text))
        uri = f"batch_prefill_tiled_{hashlib.sha256(named.encode()).hexdigest()[:16]}_sm90"
        return modules.gen_customize_batch_prefill_module(
            "fa3", uri, dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, *_FA3_ARGUMENTS,
            "TiledAttention", text, use_sliding_window=window, use_logits_soft_cap=soft_cap,
        )  # fmt: skip
    options = (0, window, soft_cap, False)  # no rope or float16 reduction
    return modules.gen_batch_prefill_module(
        backend, dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, *options
    )


class PagedCalls:
    """plan and run of the modules "fa2" and "fa3" for decode (causal False) and prefill rows.

    window: the latest tokens that a token sees; None: all. soft_cap: whether scores have one. variants: of
    layers; None is the usual one. like: calls of the same device that run one after another with these, and
    share a workspace with them.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        window: int | None = None,
        soft_cap: bool = False,
        like: PagedCalls | None = None,
        variants: Sequence[Variant | None] = (None,),
    ) -> None:
        self._shape, self._soft_cap, self._variants = shape, soft_cap, variants
        self._window_left = -1 if window is None else window - 1
        if like is None:
            self._float_workspace = torch.empty(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        else:
            self._float_workspace = like._float_workspace
        # Decode and prefill plans of one step are alive together.
        self._int_workspace = torch.empty(2, INT_WORKSPACE, dtype=torch.uint8, device=device)
        self._modules: dict[tuple[str, Variant | None], Any] = {}

    def load(self, backends: list[str]) -> None:
        """Load the modules now rather than in the step that first calls them."""
        for backend in backends:
            for variant in self._variants:
                self._module(backend, variant)

    def plan(
        self,
        backend: str,
        causal: bool,
        entry: PinnedEntry,
        tokens: int,
        rows: int,
        graph: bool,
        kv_starts: Tensor | None = None,
    ) -> Any:
        """FlashInfer's plan information for `rows` rows staged in `entry`; copies asynchronously from it.
        kv_starts: where rows begin in copies, int32 [rows + 1] on the host."""
        shape, host = self._shape, entry.host(rows)
        arguments = [
            self._float_workspace, self._int_workspace[int(causal)], entry.workspace,
            host.qo_indptr, host.kv_indptr if kv_starts is None else kv_starts, host.kv_lens, tokens, rows,
            shape.num_heads, shape.num_kv_heads, shape.block_size, graph, shape.head_dim, shape.head_dim,
            causal, self._window_left,
        ]  # fmt: skip
        if backend == "fa2":
            # No fixed split, splitting allowed, nothing co-located; in graphs every row has one query.
            arguments += [-1, False, 0, 1 if graph else 0]
        # Modules of all variants have the same plan.
        return self._module(backend, self._variants[0]).plan(*arguments)

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
        scores: Scores | None = None,
    ) -> None:
        """Attend q[T, Hq, D] of the planned rows to (K, V) and write out[T, Hq, D]. backend "copied": FA3
        over copies, each [tokens, Hkv, D]. kv_scales: what the elements of a cache of e4m3 are multiplied by.
        scores: None: their scale is 1 / sqrt(D)."""
        k_scale, v_scale = kv_scales
        scores = scores or Scores(1.0 / math.sqrt(self._shape.head_dim))
        sm_scale, cap = scores.scale * k_scale, scores.soft_cap or 0.0
        lse = None if scores.sinks is None else torch.empty(q.shape[:2], device=q.device)
        # Scales of V by head, soft cap, scale, scale of V, -.
        more: list[Any] = [None, cap, sm_scale, v_scale, 0]
        unused: list[Any] = [None] * 3
        if backend == "fa2":
            # Block scales, soft cap, scale, rope, -. FlashInfer's own wrapper applies both scales this way.
            more = [None, None, cap, sm_scale, 1.0, 1.0, 0]
            unused = [None] * 6  # custom masks, ALiBi and multi-item scoring
        if scores.variant is not None:
            unused, more = [scores.by_head], [sm_scale]
        module = self._module(backend, scores.variant)
        run, blocks = module.paged_run, [metadata.indices, metadata.last_page_len(rows)]
        if backend == "copied":
            run, blocks = module.ragged_run, []
        run(
            self._float_workspace, self._int_workspace[int(causal)], info, q, *cache,
            metadata.qo_indptr(rows), metadata.kv_indptr(rows), *blocks,
            out, lse,  # of the scores, to the base of 2
            _CAUSAL if causal else _NON_CAUSAL, _NHD, self._window_left,
            True,  # programmatic dependent launch
            *unused, *more,
        )  # fmt: skip
        if backend == "fa2" and v_scale != 1.0:
            out.mul_(v_scale)
        if lse is not None and scores.sinks is not None:
            apply_sinks(out, lse, scores.sinks, metadata.qo_indptr(rows))

    def _module(self, backend: str, variant: Variant | None) -> Any:
        backend = "fa3" if backend == "copied" else backend  # which has both kernels
        key = backend, variant
        if key not in self._modules:
            shape, options = self._shape, (self._window_left >= 0, self._soft_cap, variant)
            spec = batch_spec(backend, shape.dtype, shape.kv_dtype, shape.head_dim, *options)
            self._modules[key] = spec.build_and_load()
        return self._modules[key]
