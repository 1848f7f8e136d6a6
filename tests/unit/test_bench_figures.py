# SPDX-License-Identifier: Apache-2.0
"""What the load generator's figures must not hide, against a local HTTP server."""

import json

import pytest
from streaming_server import StreamingServer

from client import bench, find_rate
from client.datasets import Prompt, arrival_times
from client.load import Load, run_load
from client.metrics import format_table


@pytest.fixture
def run(server, tokenizer_folder):
    """`client bench` with these options, on the server: its exit status."""
    place = ["--url", server.url, "--tokenizer", tokenizer_folder, "--workers", "1"]
    short = ["--input-len", "8", "--warm-up", "0"]

    def call(*options, output_len="3"):
        return bench.main([*place, *short, "--output-len", output_len, *map(str, options)])

    return call


def slow_load(rate, slots):
    """Ten requests of some 0.1 s each."""
    running = StreamingServer(chunk_seconds=0.01)
    try:
        load = Load("triton", running.url, workers=1, request_rate=rate, max_concurrency=slots, time_limit=20)
        return run_load(load, [Prompt(f"p{i}", 2, 10) for i in range(10)])
    finally:
        running.close()


def test_a_rate_that_slots_hold_back_is_said():
    # All are due within 0.1 s, and each takes 0.1 s at least.
    held = slow_load(rate=100.0, slots=1)
    for before, record in zip(held.records, held.records[1:], strict=False):
        due = record.scheduled - record.slot_wait
        assert due < 0.101 and record.slot_wait >= before.end - due > 0
    assert held.records[0].slot_wait == 0 and held.summary["requests_that_waited_for_a_slot"] == 9
    longest = max(r.slot_wait for r in held.records)
    assert held.summary["longest_slot_wait_s"] == pytest.approx(longest, abs=1e-4)
    table = format_table(held.summary, "title")
    assert "9 requests were due before a slot was free, by up to" in table and "rate was not offered" in table
    assert max(map(len, table.splitlines())) <= 80


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


def test_limits_may_write_a_percentile_in_any_way(run, capsys):
    texts = ["p50_ttft=9000", "p99.0_tpot=9000", "p099_itl=9000", "p99.50_latency=9000"]
    metrics = ["median_ttft", "p99_tpot", "p99_itl", "p99.5_latency"]
    assert [find_rate.limit(text).metric for text in texts] == metrics
    limits = [word for text in texts for word in ("--limit", text)]
    assert run("--find-rate", "20:20", *limits, "--try-seconds", "0.2") == 0
    wanted = ", ".join(f"{metric} <= 9000 ms" for metric in metrics)
    assert f"highest rate: 20 requests/s with {wanted}" in capsys.readouterr().out


def test_a_search_ends_with_what_it_has_where_a_file_has_no_more_conversations(
    server, tokenizer_folder, tmp_path, capsys
):
    turns = [{"from": who, "value": "some words here"} for who in ("human", "gpt")]
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"conversations": turns}] * 5))
    place = ["--url", server.url, "--tokenizer", tokenizer_folder, "--workers", "1", "--warm-up", "0"]
    find = ["--find-rate", "20:40", "--limit", "p99_ttft=60000", "--try-seconds", "0.2"]
    assert bench.main([*place, "--dataset", f"sharegpt:{file}", *find]) == 1
    printed = capsys.readouterr().out
    assert "40 requests/s cannot be tried" in printed and "5 usable conversations, 8 were asked" in printed
    assert "highest rate: 20 requests/s at least (INCOMPLETE)" in printed


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


def test_bursts_beyond_what_numbers_hold_are_refused():
    assert arrival_times(5, 10.0, 0, burstiness=0.01)[-1] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="burstiness 1e-09 leaves no gap of the 5 above 0"):
        arrival_times(5, 10.0, 0, burstiness=1e-9)


@pytest.mark.parametrize("url", ["https://127.0.0.1:8001", "http://127.0.0.1:8001/v2", "http://127.0.0.1"])
def test_grpc_takes_no_address_of_which_it_would_leave_out_a_part(url):
    with pytest.raises(ValueError, match="must be http://host:port for gRPC"):
        Load("triton-grpc", url)
    assert Load("triton-grpc", "http://[::1]:8001").target == "[::1]:8001"


FIND = ["--find-rate", "1:2", "--limit", "p99_ttft=1"]
IDLE = [
    (["--label", "mine"], "--label is for --output"),
    ([*FIND, "--goodput", "ttft=1"], "--goodput: --find-rate prints its limits alone"),
    ([*FIND, "--percentiles", "95"], "--percentiles: --find-rate prints its limits alone"),
    ([*FIND, "--retokenize"], "--retokenize: --find-rate prints its limits alone"),
    (["--output", "same", "--csv", "same"], "must be files of their own"),
    (["--output", "same", "--sglang-json", "./same"], "must be files of their own"),
]


@pytest.mark.parametrize("options, message", IDLE)
def test_options_that_would_do_nothing_or_undo_each_other(
    run, tmp_path, monkeypatch, capsys, options, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        run(*options)
    assert exit.value.code == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())
