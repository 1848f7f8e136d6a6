# SPDX-License-Identifier: Apache-2.0
"""Traces of engines that serve, of two ranks each; of two engines where all cases run."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai_server import OpenAiServer, openai_running
from running import wait_for

from perf_configs import read_trace
from thinned import some

LONG = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize("engines", some([1, 2], [1]))
def test_steps_are_traced_while_requests_run(
    engines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, first = tmp_path / "new" / "traces", "engine 0: " if engines > 1 else ""
    knobs = [f"replicas={engines}", "tensor_parallel_size=2", f"profile_dir={folder}"]
    with openai_running("bundled", tmp_path, *knobs) as server:
        assert server.error("/stop_profile", {})[:2] == (
            409,
            f"{first}no trace was started: POST /start_profile",
        )
        for steps in (0, 101):
            status, message, param, _ = server.error("/start_profile", {"steps": steps})
            assert (status, param) == (400, "steps") and message == f"steps is {steps}; it should be 1 to 100"
        assert server.error("/start_profile", {"step": 3})[0] == 400
        # Nothing runs, so the trace goes on.
        status, _, started = server.call("/start_profile", {"steps": 5})
        assert (status, started["steps"]) == (200, 5)
        assert server.error("/start_profile", b"")[:2] == (
            409,
            f"{first}a trace is being made, 5 steps are left: POST /stop_profile ends it",
        )
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(server.call, "/v1/completions", LONG)
            wait_for(lambda: all(Path(file).exists() for file in started["files"]), "the traces")
        assert server.call("/stop_profile", b"")[2] == {"files": started["files"]}  # they stay the latest
        check_files(server, folder, started["files"], engines, capsys)


def check_files(
    server: OpenAiServer, folder: Path, files: list[str], engines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [re.fullmatch(r".*-engine-(\d)-rank-(\d)\.json", Path(file).name) for file in files]
    expected = [(str(engine), str(rank)) for engine in range(engines) for rank in range(2)]
    assert [place and place.groups() for place in places] == expected
    assert sorted(files) == sorted(map(str, folder.iterdir()))
    read_trace.main([files[0]])
    said = capsys.readouterr().out
    assert len(re.findall(r"launch: \d decodes, \d+ tokens of \d prompts$", said, re.M)) >= 1, said
    for part in ("plan", "read", "receive", "gloo:all_reduce"):
        assert re.search(rf" {part}$", said, re.M), said
    counts = [int(found) for found in re.findall(r"^ +\S+ +(\d+) .* launch: ", said, re.M)]
    assert sum(counts) in (5, 6), said  # one is launched ahead
    for file in files:
        names = {event["name"] for event in read_trace.read_events(Path(file))}
        assert "aten::embedding" in names, f"{file} has no step"


def test_traces_are_off_unless_they_are_allowed(api: OpenAiServer) -> None:
    assert api.error("/start_profile", {})[:2] == (
        404, "there is no /start_profile: this server was started without the knob profile_dir",
    )  # fmt: skip
