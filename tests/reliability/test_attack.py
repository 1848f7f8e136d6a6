# SPDX-License-Identifier: Apache-2.0
"""The short form of `make attack`: every kind of harm once, on one server under load at both doors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from attack import Attack
from running import both_running, build_repository, wait_for
from watching import PARTS

OPTIONS = ["--restarts", "0", "--stalled-client-seconds", "2"]


@pytest.mark.timeout(600)
def test_every_harm_is_survived(tmp_path: Path) -> None:
    with both_running(build_repository(tmp_path), tmp_path, OPTIONS) as server:
        attack = Attack(server, seed=3, streams=8)
        harms = [attack.hostile, lambda: attack.drop(100), lambda: attack.flood(100), attack.stop]
        harms += [lambda: attack.stall(2, 1.0), lambda: attack.kill("OpenAI API")]
        try:
            for harm in harms + [attack.kill] * 3:
                attack.round(harm)
        finally:
            attack.close()
        assert not attack.failures(), attack.outcomes
        for door in attack.ports:
            assert attack.outcomes[f"{door}: whole"] and attack.outcomes[f"{door}: hostile worded"]
        assert len(server.matching(PARTS["engine"])) == 1
        assert server.interrupt() == 0
        wait_for(lambda: not server.leftovers(), "nothing to be left")


@pytest.mark.timeout(300)
def test_clients_that_do_not_read_are_cut_and_harm_nobody(tmp_path: Path) -> None:
    """What they asked for does not stay in memory, and others are served all the while."""
    with both_running(build_repository(tmp_path), tmp_path, OPTIONS) as server:
        attack = Attack(server, seed=3, streams=4)
        try:
            attack.stall(2, 0.5)
            assert attack.slow and attack.answers()

            def all_cut() -> bool:
                attack.look_at_slow_clients()
                return not attack.slow

            wait_for(all_cut, "the slow ones to be cut", 60)
            began, before = time.monotonic(), dict(attack.outcomes)
            for door in attack.ports:
                more = f"{door}: whole"
                wait_for(lambda more=more: attack.outcomes[more] > before.get(more, 0), "others' answers")
            assert time.monotonic() > began
        finally:
            attack.close()
        assert not attack.failures(), attack.outcomes
