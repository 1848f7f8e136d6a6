# SPDX-License-Identifier: Apache-2.0
"""When the loop plans the next step."""

from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer_backend.engine.pacing import Pacer

HOST = 0.001  # from planning a step to giving it to the device


def step(rows: int, prompt_tokens: int = 0) -> Any:
    return SimpleNamespace(num_rows=rows, num_prompt_tokens=prompt_tokens, num_tokens=rows + prompt_tokens)


def run(pacer: Pacer, kinds: list[Any], seconds: float, late: bool = False, now: float = 10.0) -> float:
    """Steps back to back, each of `seconds`, the next given to the device HOST before one ends, or after
    that if `late`; the last is running when this returns the time at which it began."""
    running = None
    for plan in kinds:
        given = now + HOST / 2 if late or running is None else now - HOST / 2
        pacer.planned(plan, given - HOST, given, running, late)
        if running is not None:
            pacer.finished(running, now)
        running = plan
        began = max(now, given)
        now = began + seconds
    return began


def test_nothing_known_means_no_wait():
    pacer = Pacer()
    assert pacer.deadline(step(16), False) == 0.0
    run(pacer, [step(16)], 0.005)
    assert pacer.deadline(step(16), False) == 0.0


def test_plans_shortly_before_the_running_step_ends():
    pacer = Pacer()
    began = run(pacer, [step(16)] * 20, 0.005)
    assert began + 0.002 < pacer.deadline(step(17), False) < began + 0.005
    assert pacer.deadline(step(200), False) == 0.0, "another class of steps"
    assert pacer.deadline(step(16, 100), False) == 0.0, "none with prompts was seen"


def test_steps_with_prompts_are_timed_by_their_tokens():
    pacer = Pacer()
    began = run(pacer, [step(16), step(16, 1000)] * 20 + [step(16), step(16, 1000)], 0.020)
    assert began + 0.014 < pacer.deadline(step(16, 1000), True) < began + 0.020
    shorter = pacer.deadline(step(16, 1000), True) - pacer.deadline(step(16, 980), True)
    assert shorter == pytest.approx(0.020 * 20 / 1016, rel=0.05)
    assert pacer.deadline(step(16, 100), True) == 0.0, "another class of steps"


def test_a_prompt_is_planned_earlier_if_that_takes_the_host_longer():
    pacer = Pacer()
    kinds = [step(16)] * 20
    began = run(pacer, kinds, 0.005)
    for _ in range(50):
        pacer.planned(step(0, 10), 0.0, 0.003, step(16), late=False)
    pacer._began = began  # only the host's times were of interest
    difference = pacer.deadline(step(16), False) - pacer.deadline(step(16), True)
    assert difference == pytest.approx(1.25 * 0.002, abs=1e-4)


def test_being_late_never_feeds_itself():
    """If plans come late, steps seem longer; the estimate must shrink all the same."""
    pacer = Pacer()
    now = run(pacer, [step(16)] * 20, 0.005)
    began = run(pacer, [step(16)] * 30, 0.006, late=True, now=now + 1)
    assert pacer.deadline(step(16), False) < began


def test_an_idle_device_starts_afresh():
    pacer = Pacer()
    now = run(pacer, [step(16)] * 20, 0.005)
    pacer.finished(step(16), now + 0.005)
    assert pacer.deadline(step(16), False) == 0.0
    pacer.planned(step(16), now + 1, now + 1 + HOST, None, late=False)
    assert now + 1 < pacer.deadline(step(16), False) < now + 1 + HOST + 0.005


def test_a_step_that_ended_before_its_deadline_is_not_waited_for_again():
    pacer = Pacer()
    began = run(pacer, [step(16)] * 20, 0.005)
    pacer.ended_early(step(16), began + 0.003)
    assert began < pacer.deadline(step(16), False) < began + 0.003
    pacer.ended_early(step(16), began + 0.004)
    assert pacer.deadline(step(16), False) < began + 0.003, "the shorter one counts"


def test_it_tells_how_long_steps_without_prompts_take():
    pacer = Pacer()
    assert pacer.decode_s is None
    now = run(pacer, [step(16, 500)] * 5, 0.030)
    assert pacer.decode_s is None
    now = run(pacer, [step(16)] * 20, 0.005, now=now + 1)
    assert pacer.decode_s == pytest.approx(0.005, abs=2e-4)
    now = run(pacer, [step(16, 500)] * 5, 0.030, now=now + 1)
    assert pacer.decode_s == pytest.approx(0.005, abs=2e-4)
    run(pacer, [step(64)] * 20, 0.007, now=now + 1)
    assert pacer.decode_s == pytest.approx(0.007, abs=2e-4)
    run(pacer, [step(64)] * 2 + [step(64)], 0.050, now=now + 2)
    assert pacer.decode_s < 0.013, "one slow step is no rule"
