# SPDX-License-Identifier: Apache-2.0
"""Attention that FlashInfer compiles from a declaration, next to the same in plain torch: one file each."""

from flashinfer_backend.attention.contract import Variant
from flashinfer_backend.attention.variants.alibi import ALIBI
from flashinfer_backend.attention.variants.chunked import CHUNKED

# By the name that a layer's spec has (models.spec.FullAttention.variant).
VARIANTS: dict[str, Variant] = {"alibi": ALIBI, "chunked": CHUNKED}
