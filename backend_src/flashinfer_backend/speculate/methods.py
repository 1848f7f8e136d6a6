# SPDX-License-Identifier: Apache-2.0
"""Which proposer an engine has."""

from __future__ import annotations

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_drafter_dir, resolve_model_dir
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.eagle3 import load_eagle3
from flashinfer_backend.speculate.heads import HeadProposer
from flashinfer_backend.speculate.mtp import load_mtp
from flashinfer_backend.speculate.ngram import make_ngram
from flashinfer_backend.speculate.proposer import MakeProposer


def chosen(config: EngineConfig) -> MakeProposer | None:
    """What makes the proposer of speculative_method; None for none."""
    makers: dict[str, MakeProposer | None] = {
        "none": None,
        "ngram": make_ngram,
        "eagle3": _make_eagle3,
        "mtp": _make_mtp,
    }
    return makers[config.speculative_method]


def _make_mtp(config: EngineConfig, target: Transformer) -> HeadProposer:
    head = load_mtp(resolve_model_dir(config.model_dir), target, config.load_format)
    return HeadProposer(head, target, config.max_draft_len)


def _make_eagle3(config: EngineConfig, target: Transformer) -> HeadProposer:
    return load_eagle3(
        resolve_drafter_dir(config.draft_model), target, config.max_draft_len, config.max_seq_len,
        config.load_format, fp8=config.quantization == "fp8",
    )  # fmt: skip
