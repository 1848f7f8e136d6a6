# SPDX-License-Identifier: Apache-2.0
"""What the load generator's figures must not hide, against a local HTTP server."""

import json

import pytest
from streaming_server import StreamingServer

from client import bench
from client.datasets import Prompt
from client.load import Load, run_load


@pytest.fixture
def run(server, tokenizer_folder):
    """`client bench` with these options, on the server: its exit status."""
    place = ["--url", server.url, "--tokenizer", tokenizer_folder, "--workers", "1"]
    short = ["--input-len", "8", "--warm-up", "0"]

    def call(*options, output_len="3"):
        return bench.main([*place, *short, "--output-len", output_len, *map(str, options)])

    return call


def test_a_search_does_not_take_a_rate_that_slots_held_back(tokenizer_folder, capsys):
    running = StreamingServer(chunk_seconds=0.02)
    try:
        status = bench.main(
            ["--url", running.url, "--tokenizer", tokenizer_folder, "--workers", "1", "--warm-up", "0"]
            + ["--input-len", "8", "--output-len", "10", "--max-concurrency", "1", "--find-rate", "40:40"]
            + ["--limit", "p99_ttft=60000", "--try-seconds", "0.2"]
        )
    finally:
        running.close()
    printed = capsys.readouterr().out
    assert status == 1 and "waited for one of --max-concurrency: the rate was not offered" in printed
    assert "even 40 requests/s is too much" in printed


def test_answers_that_end_early_need_a_count_of_their_tokens(server):
    """Otherwise the tokens asked for would be taken for those that came."""
    prompts = [Prompt("stopped uncounted", 4, 6), Prompt("stopped", 4, 6)]
    result = run_load(Load("triton", server.url, workers=1, ignore_eos=False, time_limit=20), prompts)
    uncounted, counted = result.records
    assert uncounted.error == "the server does not say how many tokens there were: leave out --respect-eos"
    assert (counted.error, counted.output_tokens) == (None, 3)
    assert result.summary["output_tokens"] == 3


def test_a_runs_seed_gives_its_arrivals_too(run, tmp_path):
    files = [tmp_path / "sweep.json", tmp_path / "again.json"]
    assert run("--request-rate", "100,200", "--num-prompts", "5", "--output", files[0]) == 0
    second = json.loads(files[0].read_text())["runs"][1]
    again = ["--request-rate", "200", "--num-prompts", "5", "--seed", second["seed"], "--output", files[1]]
    assert run(*again) == 0
    repeated = json.loads(files[1].read_text())
    assert repeated["prompts_sha256"] == second["prompts_sha256"]
    assert repeated["requests"]["scheduled"] == pytest.approx(second["requests"]["scheduled"], abs=1e-5)
