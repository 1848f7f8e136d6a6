# SPDX-License-Identifier: Apache-2.0
"""The short form of `make attack`: every kind of harm once, on one server under load at both doors."""

from __future__ import annotations

from pathlib import Path

import pytest
from attack import Attack
from running import both_running, build_repository, wait_for
from watching import PARTS


@pytest.mark.timeout(600)
def test_every_harm_is_survived(tmp_path: Path) -> None:
    options = ["--restarts", "0", "--stalled-client-seconds", "2", "--openai-max-connections", "64"]
    with both_running(build_repository(tmp_path), tmp_path, options) as server:
        attack = Attack(server, seed=3, streams=4, pause_s=0.3)

        def stall() -> str:
            """Those who do not read are cut, so that what they asked for does not stay in memory."""
            name = attack.stall(2, 0.5)
            wait_for(lambda: attack.look_at_slow_clients() or not attack.slow, "the end of slow clients", 90)
            return name

        def hold() -> str:
            """Nobody else is harmed, and the server is the same."""
            (before,) = server.matching(PARTS["tritonserver"])
            counted = {name: count for name, count in attack.outcomes.items() if not name.endswith("whole")}
            name = attack.hold(150)
            assert server.matching(PARTS["tritonserver"]) == [before]
            assert counted == {n: c for n, c in attack.outcomes.items() if not n.endswith("whole")}, counted
            wait_for(lambda: "connections that were silent" in server.log, "serve to say so")
            return name

        harms = [
            hold,
            stall,
            attack.hostile,
            lambda: attack.drop(100),
            lambda: attack.flood(100),
            attack.stop,
        ]
        harms += [lambda: attack.kill("OpenAI API"), attack.kill]
        try:
            for harm in harms:
                attack.round(harm)
        finally:
            attack.close()
        assert not attack.failures(), attack.outcomes
        for door in attack.ports:
            for outcome in ("whole", "hostile worded", "does not read, cut"):
                assert attack.outcomes[f"{door}: {outcome}"], (door, outcome, attack.outcomes)
        assert len(server.matching(PARTS["engine"])) == 1
        assert server.interrupt() == 0
        wait_for(lambda: not server.leftovers(), "nothing to be left")
