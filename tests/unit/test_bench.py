# SPDX-License-Identifier: Apache-2.0
"""The load generator's data, arrivals, limits and search; its conversations against a local HTTP server."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import small_tokenizers
from streaming_server import StreamingServer

from answering import answering, response
from client import bench, find_rate, grpc_wire, measured, ready, report, wire
from client.bench_options import make_parser
from client.datasets import Part, Prompt, Ramp, arrival_times, load_prompts
from client.load import Load, run_load
from client.metrics import RequestRecord, format_table, goodput, summarise
from client.scenarios import find_scenario, read_scenario, scenario_files
from client.wire import BACKENDS

ROOT = Path(__file__).parents[2]


def record(index, ttft, latency, tokens=11, error=None, end=1.0):
    return RequestRecord(index, 5, tokens, ttft=ttft, latency=latency, end=end, chunks=tokens, error=error)


def test_ramps_offer_the_rates_that_they_say():
    for ramp in (Ramp(2, 10), Ramp(10, 2), Ramp(2, 10, exponential=True), Ramp(5, 5)):
        times = arrival_times(3000, math.inf, 0, burstiness=math.inf, ramp=ramp)
        assert times == sorted(times) and times[-1] == pytest.approx(3000 / ramp.mean)
        for gaps, rate in ((times[:11], ramp.start), (times[-11:], ramp.end)):
            assert 10 / (gaps[-1] - gaps[0]) == pytest.approx(rate, rel=0.05)
    half = Ramp(1, 16, exponential=True)
    times = np.array(arrival_times(4000, math.inf, 0, burstiness=math.inf, ramp=half))
    middle = times[-1] / 2
    assert ((times > middle - 5) & (times < middle + 5)).sum() / 10 == pytest.approx(4.0, rel=0.05)
    with pytest.raises(ValueError, match="between two rates over 0"):
        Ramp(0, 5)


def test_data_sets_have_the_lengths_that_were_asked_for():
    tokenizer = small_tokenizers.byte_level()
    parts = [Part(3, (5, 8), (2, 2)), Part(1, (40, 40), (9, 9))]
    mixed = load_prompts("mixed", tokenizer, 20, 1, parts=parts)
    assert sorted(p.output_tokens for p in mixed) == [2] * 15 + [9] * 5
    assert [p.output_tokens for p in mixed] != [2] * 15 + [9] * 5  # not one kind after the other
    lengths = {"input_range": (4, 6), "output_range": (3, 3)}
    shared = load_prompts("shared-prefix", tokenizer, 12, 1, prefixes=3, prefix_tokens=20, **lengths)
    heads = {}
    for p in shared:
        ids = tokenizer.encode(p.text).ids
        assert len(ids) == p.prompt_tokens and p.prompt_tokens >= 24
        heads.setdefault(tuple(ids[:18]), []).append(p)
    assert [len(found) for found in heads.values()] == [4, 4, 4]
    talks = load_prompts("multi-turn", tokenizer, 2, 1, turns=3, **lengths)
    assert [len(p.later) for p in talks] == [2, 2]
    with pytest.raises(ValueError, match="mixed needs parts"):
        load_prompts("mixed", tokenizer, 2, 1, parts=[])


def test_conversations_of_a_file(tmp_path):
    turns = ["how do you do", "well", "and now", "better", "no answer follows"]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": [{"value": text} for text in turns]}]))
    tokenizer = small_tokenizers.byte_level()
    (whole,) = load_prompts(f"conversations:{path}", tokenizer, 1, 0, turns=9)
    assert (whole.text, [p.text for p in whole.later]) == (turns[0], [turns[2]])
    assert whole.later[0].output_tokens == len(tokenizer.encode(turns[3], add_special_tokens=False).ids)
    (short,) = load_prompts(f"conversations:{path}", tokenizer, 1, 0, turns=1)
    assert short.later == ()
    with pytest.raises(ValueError, match="1 usable conversations, 2 were asked for"):
        load_prompts(f"conversations:{path}", tokenizer, 2, 0, turns=9)


@pytest.mark.parametrize("slots", [None, 1])
def test_a_later_turn_holds_all_that_was_said(server, slots):
    talks = [
        Prompt(f"{word} {i}", 2, 3, (Prompt(" and more", 2, 2), Prompt(" the end", 2, 1)))
        for i, word in enumerate(("plain", "busy"))
    ]
    result = run_load(Load("triton", server.url, workers=1, max_concurrency=slots, time_limit=20), talks)
    said = [body["text_input"] for body in server.bodies if body["text_input"].startswith("plain")]
    assert said == ["plain 0", "plain 0 w0 w1 w2 and more", "plain 0 w0 w1 w2 and more w0 w1 the end"]
    assert [r.index for r in result.records] == list(range(6))
    assert [r.turn for r in result.records] == [0, 1, 2] * 2
    assert [r.error for r in result.records[:3]] == [None] * 3
    assert [r.prompt_tokens for r in result.records[:3]] == [2, 2 + 3 + 2, 7 + 2 + 2]
    assert "HTTP 503" in result.records[3].error
    assert [r.error for r in result.records[4:]] == [
        "not sent: an earlier turn of the conversation failed"
    ] * 2


def test_percentiles_goodput_and_the_table():
    records = [record(i, 0.1 * (i + 1), 0.1 * (i + 1) + 0.5) for i in range(9)] + [record(9, 0, 0, error="x")]
    summary = summarise(records, (10, 50, 99.9))
    assert summary["p10_ttft_ms"] == pytest.approx(180) and summary["median_ttft_ms"] == pytest.approx(500)
    assert summary["p99.9_ttft_ms"] < 900 and "p90_ttft_ms" not in summary
    found = {"goodput_requests_per_s": 3.0, "goodput_share": 0.3, "goodput_limits_ms": {"ttft": 350}}
    assert goodput(records, {"ttft": 350}) == found
    assert goodput(records, {"tpot": 49})["goodput_share"] == 0
    summary |= goodput(records, {"latency": 650}) | {"unfinished": 4}
    table = format_table(summary, "title", (10, 99.9))
    assert "P99.9" in table and "median" not in table
    assert "goodput 1.0 requests/s: 10.0% of the requests have\nlatency <= 650 ms\n" in table
    assert "INCOMPLETE" in table
    assert max(map(len, table.splitlines())) <= 80


def search(limit, low=1.0, high=64.0, seconds=60.0):
    """(what was found, whether it was the end, the rates tried) where all up to `limit` are good."""
    tried, said = [], []

    def attempt(rate):
        tried.append(rate)
        return rate <= limit

    return (*find_rate.Search(low, high, seconds).run(attempt, said.append), tried, said)


def test_the_search_for_a_rate():
    found, ended, tried, _ = search(21.0)
    assert ended and 20 <= found <= 21 and tried[:6] == [1, 2, 4, 8, 16, 32] and len(tried) < 12
    assert search(1000)[:2] == (64.0, True)
    found, ended, tried, said = search(0.5)
    assert (found, ended, tried) == (None, True, [1.0]) and "begin lower" in said[0]
    assert search(21.0, seconds=1e-9)[:3] == (None, False, [])


def test_every_scenario_can_be_read_and_says_what_it_serves_for():
    files = scenario_files()
    protocols = {name for name, path in files.items() if path.parent.name == "protocols"}
    assert {"rates-1-2-5-8", "prompts-4k", "top-p", "penalties", "multi-turn", "mixed", "small"} <= protocols
    assert sum(name.startswith("trtllm-") for name in protocols) == 7
    for name, path in files.items():
        scenario = read_scenario(path)
        assert scenario.row == name and scenario.title
        assert scenario.serves or name not in protocols
    assert [p.request_rate for p in find_scenario("rates-1-2-5-8").points] == [1, 2, 5, 8]
    assert {p.num_prompts for p in find_scenario("rates-1-2-5-8").points} == {1000}
    assert find_scenario("shared-prefix").lengths["prefixes"] == 8
    assert find_scenario("mixed").lengths["parts"][1] == Part(1, (8192, 8192), (256, 256))
    assert find_scenario("top-p").sampling["top_p"] == 0.9
    # vLLM takes a slower path for requests with a seed of their own.
    assert not any("seed" in read_scenario(path).sampling for path in files.values())
    with pytest.raises(ValueError, match=r"no scenario 'nothing': give a TOML file or one of a, b"):
        find_scenario("nothing")


def test_a_wrong_scenario_is_named_with_its_file_and_key(tmp_path):
    text, path = (ROOT / "perf_configs/scenarios/protocols/small.toml").read_text(), tmp_path / "s.toml"
    for old, new, words in [
        ("title", "other_title", "the key title is missing"),
        ("dataset = ", "dataset = 'none' # ", "dataset 'none' must be one of"),
        ("[load]", "[load]\nmore = 1", r"unknown keys \['more'\]"),
        ("[load]", "[load", "is not TOML"),
    ]:
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=rf"s\.toml:? {words}"):
            read_scenario(path)


def test_a_scenario_of_known_lengths_tells_them_by_priority(server, load, tmp_path):
    text, path = (ROOT / "perf_configs/scenarios/protocols/small.toml").read_text(), tmp_path / "s.toml"
    for wrong in ("true", "-0.5"):
        path.write_text(text.replace("[load]", f"[load]\npriority_per_output_token = {wrong}"))
        with pytest.raises(ValueError, match=r"priority_per_output_token .* must be an integer"):
            read_scenario(path)
    path.write_text(text.replace("[load]", "[load]\npriority_per_output_token = -2"))
    parser = make_parser("")
    loads = {}
    for backend in BACKENDS:
        args = parser.parse_args([*load, "--backend", backend, "--scenario", str(path)])
        loads[backend] = bench.plan(args, set(), "").load
    # The ensemble's own priority has nine levels; schedule_policy=lof reads max_tokens.
    told = {backend: made.priority_per_output_token for backend, made in loads.items()}
    assert told == {"triton": 0, "triton-grpc": 0, "openai": -2, "openai-chat": -2}
    prompts = [Prompt("plain", 2, 3, (Prompt(" and more", 2, 2),)), Prompt("other", 2, 9)]
    assert not any(record.error for record in run_load(loads["openai"], prompts).records)
    assert sorted(body["priority"] for body in server.bodies) == [-18, -6, -4]
    assert all(body["priority"] == -2 * body["max_tokens"] for body in server.bodies)


def test_conversations_ask_for_adapters_in_turns(server):
    load = Load("openai", server.url, model="model", workers=1, lora_modules=("sql", "chat"))
    prompts = [
        Prompt("plain", 2, 3, (Prompt(" and more", 2, 2),)),
        Prompt("other", 2, 9),
        Prompt("last", 2, 4),
    ]
    assert not any(record.error for record in run_load(load, prompts).records)
    asked = sorted((body["max_tokens"], body["model"]) for body in server.bodies)
    assert asked == [(2, "sql"), (3, "sql"), (4, "sql"), (9, "chat")]
    with pytest.raises(ValueError, match="lora_modules is for HTTP"):
        Load("triton-grpc", "http://127.0.0.1:8001", lora_modules=("sql",))


RAMP = "ramp.toml"  # a scenario
FIND = ["--find-rate", "1:2", "--limit", "p99_ttft=1"]
WRONG = [
    (["--priority-per-output-token", "-1"], "a Triton ensemble knows the length by max_tokens"),
    (["--scenario", "small", "--priority-per-output-token", "-1"], "the scenario says that"),
    (["--backend", "openai", "--priority-per-output-token", "-1", "--extra-body", '{"priority": 1}'],
     "must not hold priority together with"),
    (["--scenario", "small", "--request-rate", "3"], "--request-rate: the scenario says that"),
    (["--scenario", "rates-1-2-5-8"], "scenario rates-1-2-5-8 needs --data FILE"),
    (["--scenario", "small", "--data", "x"], "takes no --data"),
    (["--data", "x"], "--data is for --scenario"),
    (["--turns", "3"], "--turns means nothing to dataset 'random'"),
    (["--think-time", "3"], "--think-time means nothing to dataset 'random'"),
    (["--find-rate", "1:4"], "--find-rate and --limit go together"),
    (["--limit", "p99_ttft=100"], "--find-rate and --limit go together"),
    (["--limit", "ttft=100"], "must have the form p99_ttft=200"),
    (["--find-rate", "4:1", "--limit", "p99_ttft=1"], "two rates LOW:HIGH"),
    (["--ramp", "1:4", "--request-rate", "3"], "--ramp says the rate"),
    (["--ramp", "1:4:fast"], "such as 5:50 or 5:50:exponential"),
    (["--percentiles", "50,101"], "numbers from 0 to 100"),
    (["--goodput", "itl=3"], "the form ttft=200"),
    (["--part", "1,2"], "the form WEIGHT,IN,OUT"),
    (["--burstiness", "0"], "must be a number over 0"),
    (["--temperature", "nan"], "'nan' must be a number"),
    (["--burstiness", "0.5"], "--burstiness shapes arrivals"),
    (["--find-rate", "1:4", "--limit", "p99_ttft=1", "--num-prompts", "9"],
     "sends its rate times --try-seconds"),
    (["--scenario", "small", "--find-rate", "1:4", "--limit", "p99_ttft=1"], "scenarios that say a rate"),
    (["--scenario", RAMP, "--find-rate", "1:4", "--limit", "p99_ttft=1"], "scenarios that say a rate"),
    (["--try-seconds", "3"], "--try-seconds is for --find-rate"),
    (["--save-itl"], "--save-itl needs --output or --csv"),
    (["--respect-eos", "--no-check-tokens"], "with --respect-eos nothing else says"),
    (["--backend", "openai", "--no-check-tokens"], "are for Triton"),
    (["--goodput", "ttft=1", "--goodput", "ttft=9"], "--goodput limits a time twice"),
    (["--api-key-env", "NO_SUCH_KEY"], "there is no such environment variable"),
    (["--backend", "triton-grpc", "--endpoint", "/x"], "takes no endpoint"),
    (["--temperature", "1", "--top-p", "0.5", "--extra-body", '{"top_p": 1}'], "must not hold top_p too"),
    (["--top-p", "0.5"], "--top-p: requests are greedy and take no notice of it; also give --temperature"),
    (["--top-k", "5", "--temperature", "0"], "--top-k: requests are greedy"),
    (["--top-k", "5", "--extra-body", '{"temperature": 0}'], "--top-k: requests are greedy"),
    (["--dataset", "multi-turn", "--turns", "1", "--think-time", "3"], "--think-time is between two turns"),
    (["--tokenizer", "/nonexist"], "must name a folder that holds tokenizer.json"),
    (["--dataset", "foo"],
     "dataset 'foo' must be random, sharegpt:FILE, mixed, shared-prefix, multi-turn or conversations:FILE"),
    (["--dataset", "sharegpt:/nonexist"], "/nonexist cannot be read (No such file or directory)"),
    (["--request-rate", "0"], "'0' must be a number of requests/s over 0, or inf"),
    (["--max-concurrency", "0"], "'0' must be a whole number of at least 1"),
    (["--seed", "-1"], "'-1' must be a whole number of at least 0"),
    (["--time-limit", "nan"], "'nan' must be a number of seconds over 0"),
    (["--input-len", "5:2"], "LOW:HIGH with 1 <= LOW <= HIGH"),
    (["--output-len", "many"], "'many' must be a length such as 128"),
    (["--extra-body", "[1]"], "'[1]' must be a JSON object"),
    (["--extra-body", '{"top_p": NaN}'], "is not JSON"),
    (["--extra-body", '{"prompt": "", "stream": false}'], "extra_body must not hold prompt, stream"),
    (["--endpoint", "/v2/{foo}"], "endpoint '/v2/{foo}' must begin with / and may hold {model}"),
    (["--endpoint", "/v2/x", "--model", "y"], "--model: --endpoint /v2/x says which; write {model} in it"),
    (["--url", "foo"], "'foo' must have the form http://host:port"),
    (["--output", "/nonexist/x.json"], "'/nonexist/x.json' cannot be written"),
    (["--output", "/"], "'/' is a folder"),
    (["--label", "mine"], "--label is for --output"),
    ([*FIND, "--goodput", "ttft=1"], "--goodput: --find-rate prints its limits alone"),
    ([*FIND, "--percentiles", "95"], "--percentiles: --find-rate prints its limits alone"),
    ([*FIND, "--retokenize"], "--retokenize: --find-rate prints its limits alone"),
    (["--output", "same", "--csv", "./same"], "must be files of their own"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, message", WRONG)
def test_wrong_arguments(server, load, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    if RAMP in arguments:
        text = (ROOT / "perf_configs/scenarios/protocols/small.toml").read_text()
        Path(RAMP).write_text(re.sub("request_rates = .*", "ramp = { start = 1.0, end = 5.0 }", text))
    before = {*tmp_path.iterdir()}
    with pytest.raises(SystemExit) as end:
        bench.main([*load, *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert server.bodies == [] and {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("more", [["--temperature", "1"], ["--extra-body", '{"temperature": 1}']], ids=len)
def test_top_p_beside_a_temperature(load, more):
    args = make_parser("").parse_args([*load, "--num-prompts", "1", "--top-p", "0.5", *more])
    body = bench.plan(args, set(), "").load.body("a", 3)
    assert (body["top_p"], body["temperature"]) == (0.5, 1)


def test_a_model_that_the_server_does_not_have_is_named():
    def answer(path, _):
        """As tritonserver 2.51."""
        if path.endswith("/ready"):
            return response(400, json.dumps({"error": "Model version not ready"}))
        return response(404, json.dumps({"error": "Request for unknown model: 'x' is not found"}))

    with answering(answer) as base:
        said = f"{base}/v2/models/x: HTTP 404 Request for unknown model: 'x' is not found"
        assert ready.missing(Load("triton", base, model="x")) == said


def test_grpc_answers_tell_what_those_over_http_do():
    import numpy as np
    from tritonclient.grpc import service_pb2

    def message(final: bool, **outputs: str | int) -> bytes:
        answer = service_pb2.ModelStreamInferResponse()
        answer.infer_response.parameters["triton_final_response"].bool_param = final
        for name, value in outputs.items():
            text = value.encode() if isinstance(value, str) else b""
            words = len(text).to_bytes(4, "little") + text
            answer.infer_response.outputs.add(name=name)
            own = words if isinstance(value, str) else np.int32(value).tobytes()
            answer.infer_response.raw_output_contents.append(own)
        return answer.SerializeToString()

    drafts = {"total_draft_tokens": 9, "total_accepted_draft_tokens": 4}
    reads = [
        (1.0, message(False, text_output="a", num_output_tokens=2)),
        (2.0, message(False, text_output="é", num_output_tokens=5, finish_reason="length", **drafts)),
        (3.0, message(True)),
    ]
    summary = wire.read_stream("triton-grpc", reads, 7, exact=True)
    assert (summary.text, summary.error, summary.accepted_drafts) == ("aé", None, 4)
    assert summary.reported_tokens == 7


def test_grpc_requests_hold_what_the_model_takes():
    types = {"text_input": "BYTES", "max_tokens": "INT32", "top_p": "FP32", "seed": "UINT64"}
    body = {"text_input": "é", "max_tokens": 3, "top_p": 1, "seed": 2**64 - 1}
    assert "é".encode() in grpc_wire.request_message("m", body, types)
    for wrong in ({"max_tokens": 2**31}, {"max_tokens": 1.5}, {"seed": -1}, {"top_p": "much"}):
        with pytest.raises(ValueError, match=f"input '{next(iter(wrong))}' is of type"):
            grpc_wire.request_message("m", wrong, types)
    with pytest.raises(ValueError, match="has no input 'min_p'; it has max_tokens"):
        grpc_wire.request_message("m", {"min_p": 1}, types)


def test_drafts_that_were_accepted_lengthen_a_step():
    records = [record(0, 0.1, 0.6), record(1, 0, 0, error="HTTP 503")]
    assert summarise(records)["accepted_length"] is None
    records[0].accepted_drafts = 6  # of 11 tokens, so these took 5 steps
    assert (summary := summarise(records))["accepted_length"] == 2.2
    assert "accepted_length" in format_table(summary, "title")


def test_runs_of_a_sweep_share_no_prompt_and_each_can_be_repeated_by_its_seed(server, load, tmp_path, capsys):
    output, found = tmp_path / "out.json", []
    for more in ("--request-rate 50,100", "--request-rate 100 --seed 1"):
        work = f"--num-prompts 3 --output-len 2 --output {output} {more}"
        assert bench.main([*load, *work.split()]) == 0
        found.append(json.loads(output.read_text()))
    prompts = [body["text_input"] for body in server.bodies]
    assert len(set(prompts[:6])) == 6 and sorted(prompts[6:]) == sorted(prompts[3:6])
    sweep, again = found
    assert [(run["request_rate"], run["seed"]) for run in sweep["runs"]] == [(50, 0), (100, 1)]
    assert again["prompts_sha256"] == sweep["runs"][1]["prompts_sha256"]
    scheduled = sweep["runs"][1]["requests"]["scheduled"]
    assert again["requests"]["scheduled"] == pytest.approx(scheduled, abs=1e-5)
    shown = capsys.readouterr()
    assert "\n100 requests/s\n" in shown.out and shown.err == f"wrote {output}\n" * 2


def test_a_report_of_committed_results_compares_servers_at_the_same_loads(tmp_path):
    committed = ROOT / "perf_configs/results/2026-11-21-h200.json"
    assert (
        report.main([str(committed), "--rows", "s", "--out", str(tmp_path / "page"), "--title", "a < b"]) == 0
    )
    page = (tmp_path / "page.html").read_text()
    assert "<h1>a &lt; b</h1>" in page and "NVIDIA H200" in page and page.count("<svg") == 3
    assert "2 further runs are left out" in page  # of ten; the others are four loads of two servers
    runs = [run for run in measured.read(committed) if run.row == "s"]
    from client import report_plots

    shown = report_plots._spread_out(runs)
    assert [run.rate for run in shown if run.label == "ours"] == [10, 20, 46, 60]
    assert [run.rate for run in shown if run.label == "vllm"] == [10, 20, 46, 60]
    with pytest.raises(ValueError, match="cannot be read"):
        measured.read(tmp_path / "missing.json")


@pytest.mark.parametrize("limit, status", [("p99_ttft=60000", 0), ("p99_ttft=0.001", 1)])
def test_the_search_for_a_rate_says_each_try(load, capsys, limit, status):
    search = f"--find-rate 40:40 --limit {limit} --try-seconds 0.2 --input-len 8 --output-len 4"
    assert bench.main([*load, *search.split()]) == status
    shown = capsys.readouterr().out
    assert re.search(r"^ +40 requests/s: p99_ttft [\d.]+ ms: (good|no, p99_ttft)", shown)
    assert ("highest rate: 40 requests/s" in shown) == (status == 0)


def test_a_search_does_not_take_a_rate_that_slots_held_back(load, capsys):
    running = StreamingServer(chunk_seconds=0.02)
    lengths = "--input-len 8 --output-len 10 --max-concurrency 1"
    search = "--find-rate 40:40 --limit p99_ttft=60000 --try-seconds 0.2"
    try:
        status = bench.main([*load, "--url", running.url, *lengths.split(), *search.split()])
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
