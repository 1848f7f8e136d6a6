# SPDX-License-Identifier: Apache-2.0
"""When the loop plans the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer_backend.engine.pacing import Pacer


def decodes(rows: int, prefill: int = 0) -> Any:
    return SimpleNamespace(num_decode=rows, num_prefill=prefill)


def run(pacer: Pacer, steps: int, seconds: float, late: bool = False, start: float = 10.0) -> float:
    """`steps` back-to-back steps of `seconds`; the time at which the last ended."""
    now = start
    for _ in range(steps):
        pacer.finished(decodes(16), now, late, next_runs=True)
        now += seconds
    pacer.finished(decodes(16), now, late, next_runs=True)
    return now


def test_nothing_known_means_no_wait():
    pacer = Pacer()
    assert pacer.deadline(decodes(16)) == 0.0
    pacer.finished(decodes(16), 10.0, late=False, next_runs=True)
    assert pacer.deadline(decodes(16)) == 0.0


def test_plans_shortly_before_the_running_step_ends():
    pacer = Pacer()
    now = run(pacer, 20, 0.005)
    assert now + 0.002 < pacer.deadline(decodes(17)) < now + 0.005
    assert pacer.deadline(decodes(200)) == 0.0, "another class of steps"
    assert pacer.deadline(decodes(16, prefill=1)) == 0.0, "steps with prompts are not timed"


def test_a_slow_host_plans_earlier():
    pacer = Pacer()
    now = run(pacer, 20, 0.005)
    before = pacer.deadline(decodes(16))
    for _ in range(50):
        pacer.planned(0.003)
    assert pacer.deadline(decodes(16)) == pytest.approx(before - 1.5 * 0.002, abs=1e-4)
    assert pacer.deadline(decodes(16)) < now + 0.001


def test_being_late_never_feeds_itself():
    """If plans come late, steps seem longer; the estimate must shrink all the same."""
    pacer = Pacer()
    now = run(pacer, 20, 0.005)
    now = run(pacer, 30, 0.006, late=True, start=now)
    assert pacer.deadline(decodes(16)) < now


def test_an_idle_device_starts_afresh():
    pacer = Pacer()
    now = run(pacer, 20, 0.005)
    pacer.finished(decodes(16), now + 0.005, late=False, next_runs=False)
    assert pacer.deadline(decodes(16)) == 0.0
