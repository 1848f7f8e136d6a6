# SPDX-License-Identifier: Apache-2.0
"""The short form of `make attack`: every kind of harm once, on one server under load at both APIs."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attack as attacks
import psutil
import pytest
from attack import Attack
from running import both_running, build_repository, wait_for
from watching import PARTS


@pytest.mark.timeout(600)
def test_every_harm_is_survived(tmp_path: Path) -> None:
    options = ["--restarts", "0", "--stalled-client-seconds", "2", "--openai-max-connections", "64"]
    with both_running(build_repository(tmp_path), tmp_path, options) as server:
        attack = Attack(server, seed=3, streams=4, pause_s=0.8)

        def stall() -> str:
            """Those who do not read are cut, so that what they asked for does not stay in memory."""
            name = attack.stall(2, 0.5)
            wait_for(lambda: attack.look_at_slow_clients() or not attack.slow, "the end of slow clients", 120)
            return name

        def hold() -> str:
            """Nobody else is harmed, and the server is the same."""
            (before,) = server.matching(PARTS["tritonserver"])
            counted = {name: count for name, count in attack.outcomes.items() if not name.endswith("whole")}
            name = attack.hold(90)
            assert server.matching(PARTS["tritonserver"]) == [before]
            assert counted == {n: c for n, c in attack.outcomes.items() if not n.endswith("whole")}, counted
            wait_for(lambda: "connections that were silent" in server.log, "serve to say so")
            return name

        by_clients = [hold, stall, attack.hostile, lambda: attack.drop(100), lambda: attack.flood(100)]
        to_processes = [
            lambda: attack.stop("llm"),  # whose answers would come out of others' streams
            lambda: attack.stop("postprocessing"),  # after which this tritonserver mostly aborts under load
            lambda: attack.kill("engine"),
        ]
        try:
            for harm in by_clients:  # of which nothing is noticed that late, and other rounds follow
                attack.round(harm, late_s=0.0)
            for harm in to_processes:
                attack.round(harm)
        finally:
            attack.close()
        assert not attack.failures(), attack.outcomes
        for api in attack.ports:
            for outcome in ("whole", "hostile worded", "does not read, cut"):
                assert attack.outcomes[f"{api}: {outcome}"], (api, outcome, attack.outcomes)
        assert len(server.matching(PARTS["engine"])) == 1
        assert server.interrupt() == 0
        wait_for(lambda: not server.leftovers(), "nothing to be left")


def test_the_failure_says_how_little_time_a_silent_server_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the failure has the CPU time of the harmed server's processes, and what it logged last."""
    monkeypatch.setattr(attacks, "BACK_S", 0.6)
    myself = psutil.Process()

    def busy() -> bool:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        return False

    server: Any = SimpleNamespace(
        url="http://127.0.0.1:1",
        openai_port=1,
        text=lambda *_: "",
        engine_status=lambda: SimpleNamespace(vocab_size=2048),
        ready=busy,
        commands=lambda: {myself: "the server"},
        log="first line" + attacks.LOG_END * "." + "last line",
    )
    with pytest.raises(AssertionError) as failure:
        Attack(server, seed=1, streams=0).round(lambda: "a harm")
    said = str(failure.value)
    assert re.search(r"answers after: a harm\. In \d+\.\d s the server's processes had ", said)
    assert said.endswith("last line")
    assert "first line" not in said
    assert 0.2 <= float(said.partition("had ")[2].partition(" s of CPU time")[0]) < 10, said
