# SPDX-License-Identifier: Apache-2.0
"""The short form of `make soak`: some seconds of mixed traffic, every answer compared."""

import contextlib
import time
from pathlib import Path

import pytest
import soak as program
from reference import cases
from running import both_running, build_repository, wait_for
from soak import APIS, KNOBS, Soak, problems_at_rest, report
from watching import KEEPERS, PARTS

from engine.harness import shallow_model

KV_TOKENS = 4096  # three long prompts fill it


@pytest.mark.timeout(500)
def test_every_answer_is_the_references(tmp_path: Path) -> None:
    known = cases(40, 5, tmp_path / "reference", shallow_model())
    with both_running(build_repository(tmp_path, *KNOBS, kv_tokens=KV_TOKENS), tmp_path) as server:
        soak = Soak(server, known, seed=5, clients=12)
        soak.sample()
        soak.start()
        try:
            began = time.monotonic()
            wait_for(lambda: soak.wrong or min(soak.counts[api] for api in APIS) >= 6, "traffic", 240)
            wait_for(lambda: soak.wrong or time.monotonic() > began + 2, "more traffic")
        finally:
            soak.close()
        assert not soak.wrong, "\n".join(soak.wrong)
        assert not problems_at_rest(server)
        assert server.engine_status().prompt_tokens_reused, "no request had another one's blocks"
        soak.sample()
        for sample in soak.samples:
            assert set(sample.usage) >= {*PARTS, *KEEPERS, "shared memory"}, sample
            assert all(used.memory for used in sample.usage.values()), sample
        assert "| tritonserver |" in report(soak)


def test_options_reach_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(Exception):
        """With what the traffic would begin."""

    def begin(server: object, known: object, seed: int, clients: int, apis: list[str]) -> None:
        raise Begun(seed, clients, apis)

    monkeypatch.setattr(program, "both_running", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(program, "Soak", begin)
    with pytest.raises(Begun) as begun:
        program.main(["--cases", "1", "--seed", "3", "--clients", "2", "--apis", APIS[0]])
    assert begun.value.args == (3, 2, [APIS[0]])
