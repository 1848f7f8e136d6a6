# SPDX-License-Identifier: Apache-2.0
"""The short form of `make attack`: every kind of harm once, on one server under load."""

from __future__ import annotations

from pathlib import Path

import pytest
from attack import PARTS, Attack
from running import build_repository, running, wait_for


@pytest.mark.timeout(600)
def test_every_harm_is_survived(tmp_path: Path) -> None:
    with running(build_repository(tmp_path), tmp_path, options=["--restarts", "0"]) as server:
        attack = Attack(server, seed=3, streams=8)
        harms = [attack.hostile, lambda: attack.drop(100), lambda: attack.flood(100), attack.stop]
        try:
            for harm in harms + [attack.kill] * 3:
                attack.round(harm)
        finally:
            attack.close()
        assert not attack.failures(), attack.outcomes
        assert attack.outcomes["whole"] and attack.outcomes["hostile worded"]
        assert len(server.matching(PARTS[0])) == 1
        assert server.interrupt() == 0
        wait_for(lambda: not server.leftovers(), "nothing to be left")
