# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' drafter has the accepted length that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from perf_configs.replaying import make_replaying, share_kept


@pytest.mark.parametrize("accepted", [1.0, 2.5, 4.0])
def test_steps_keep_as_many_tokens_as_asked_for(accepted: float, tmp_path: Path):
    checkpoint = make_checkpoint("llama", tmp_path / "target", initializer_range=0.02)
    core = start_core(checkpoint, load_format="dummy", make_proposer=make_replaying(3, accepted))
    length = 200
    with serve(core, tmp_path) as client:
        params = SamplingParams(max_tokens=length, temperature=0.0, end_id=-1)
        (found,) = client.generate([[5, 6, 7]], params)
        steps = client.loop.iteration
    assert len(set(found)) == length  # once round the vocabulary
    assert abs(length / steps - accepted) < 0.3


def test_a_share_of_right_drafts_gives_the_accepted_length():
    share = share_kept(3, 2.5)
    assert abs(1 + share + share**2 + share**3 - 2.5) < 1e-9
    with pytest.raises(ValueError, match="with 3 drafts, not"):
        share_kept(3, 4.5)
