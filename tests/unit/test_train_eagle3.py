# SPDX-License-Identifier: Apache-2.0
"""tools/train_eagle3.py on chats that its target samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer_backend.core.paths import BUNDLED, resolve_model_dir
from flashinfer_backend.models.hf import read_drafter, read_spec

ROOT = Path(__file__).parents[2]


def test_a_head_is_trained_on_the_targets_own_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import train_eagle3

    sampled: list[list[int]] = []
    own_chats = train_eagle3.own_chats

    def kept(*args: Any) -> list[list[int]]:
        sampled.extend(own_chats(*args))
        return sampled

    monkeypatch.setattr(train_eagle3, "own_chats", kept)
    monkeypatch.setattr(train_eagle3, "CHATS", 2)
    monkeypatch.setattr(train_eagle3, "CHAT_TOKENS", 12)
    sizes = ["--known", "64", "--intermediate-size", "64", "--steps", "1", "--rows", "1", "--length", "32"]
    threads = torch.get_num_threads()
    try:
        train_eagle3.main(["--output", str(tmp_path), "--chats", "3", "--dtype", "bfloat16", *sizes])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        sys.modules.pop("train_eagle3")
    assert len(sampled) == 3 and len({tuple(chat) for chat in sampled}) == 3  # of two rounds
    before = [chat[:-12] for chat in sampled]
    assert before[0] == before[1] == before[2] and before[0]
    read_drafter(tmp_path).check_fits(read_spec(resolve_model_dir(BUNDLED)), 256)
