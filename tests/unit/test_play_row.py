# SPDX-License-Identifier: Apache-2.0
"""A measured row, played through the real scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flashinfer_backend.core import tuned
from perf_configs import play_row
from perf_configs.play_row import Engine, Row, Times

FOLDER = Path(play_row.__file__).parent
RESULT = FOLDER / "results" / "2026-11-23-h200x2-70b.json"
NUMBERS = tuned.fallback().scheduling
ROW = ["--result", str(RESULT), "--row", "tp2-70b-sharegpt"]
TIMES = ["--times", str(FOLDER / "times" / "h200x2-70b.json")]


def row(*requests: tuple[float, int, int]) -> Row:
    return Row(*(np.array(column) for column in zip(*requests, strict=True)))


def times(**fields: float) -> Times:
    return Times(
        "", [(1, 30.0), (1000, 30.0)], [(1, 20.0), (3, 40.0)], kv_ns=fields.pop("kv_ns", 0), **fields
    )


def test_a_request_alone_takes_its_steps():
    ttft, tpot = Engine(row((0.5, 200, 11)), times(answer_ms=3.0), NUMBERS, seed=0).play()
    assert 30 + 3 + 1.2 < ttft[0] < 1.1 * 30 + 3 + 2.2
    assert 20 < tpot[0] < 1.05 * 20


def test_more_rows_and_longer_contexts_take_longer():
    three = row(*[(0.0, 200, 50)] * 3)
    tpot = Engine(three, times(), NUMBERS, 0).play()[1]
    assert (tpot > 40).all() and (tpot < 1.05 * 40).all()
    longer = Engine(three, times(kv_ns=10_000), NUMBERS, 0).play()[1]  # 600 to 750 tokens: 6 to 7.5 ms
    assert ((longer - tpot > 5.5) & (longer - tpot < 8)).all()


def test_what_arrives_meanwhile_waits_for_the_next_step():
    ttft, tpot = Engine(row((0.0, 10, 100), (0.5, 10, 1)), times(), NUMBERS, 0).play()
    assert 30 < ttft[1] < 30 + 25 + 5
    assert len(tpot) == 1, "one token has no time between tokens"


def test_numbers_of_the_device_decide(capsys: pytest.CaptureFixture[str]):
    """The row on which prompts beside slow steps were tuned."""
    shown = []
    for more in ([], ["--set", "slow_step_ms=1000"]):
        play_row.main([*ROW, *TIMES, "--until", "12", "--runs", "1", *more])
        text = capsys.readouterr().out
        shown.append([float(word) for word in text.replace(",", "").split() if word[0].isdigit()])
    (first, *_, tpot, _, tpot_p99), (first_before, *_, before, _, before_p99) = shown
    assert first > first_before and tpot < before and tpot_p99 < before_p99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--row", "none"], "has no requests of the row none by ours"),
        (["--server", "sglang"], "has no requests of the row tp2-70b-sharegpt by sglang"),
        (["--until", "0.01"], "no request of tp2-70b-sharegpt arrives before 0.01 s"),
        (["--set", "slow_step=1"], "should be NAME=NUMBER with a name of prompts_together"),
        (["--set", "filled_step=x"], "--set filled_step=x: should be NAME=NUMBER"),
        (["--times", "nowhere.json"], "nowhere.json"),
        (["--times", str(RESULT)], "Object contains unknown field"),
    ],
)
def test_what_cannot_be_played_is_refused(
    change: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        play_row.main([*ROW, *TIMES, *change])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_times_that_are_here_can_be_read():
    found = [msgspec.json.decode(path.read_bytes(), type=Times) for path in (FOLDER / "times").glob("*.json")]
    assert len(found) >= 2
    for each in found:
        assert all(np.diff([x for x, _ in pairs]).min() > 0 for pairs in (each.tokens, each.rows))


def test_a_result_without_requests_is_refused(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"runs": [{"row": "c", "server": "ours", "requests": None}]}))
    with pytest.raises(ValueError, match="no requests of the row c"):
        play_row.read_row(path, "c")
    requests = {"scheduled": [0.0], "prompt_tokens": [8190], "output_tokens": [3]}
    path.write_text(json.dumps({"runs": [{"row": "c", "server": "ours", "requests": requests}]}))
    with pytest.raises(ValueError, match="a request of 8193 tokens; 8192 can be played"):
        play_row.read_row(path, "c")
