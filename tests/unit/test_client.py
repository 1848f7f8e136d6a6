# SPDX-License-Identifier: Apache-2.0
"""The load generator and the command-line client against a real local HTTP server."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import small_tokenizers
from streaming_server import StreamingServer

from client import bench, generate, wire
from client.datasets import Prompt, arrival_times, fingerprint, load_sharegpt, random_prompts
from client.load import Load, run_load
from client.metrics import RequestRecord, format_table, request_columns, summarise
from flashinfer_backend.transport.rundir import process_alive
from waiting import wait_for

BACKENDS = ("triton", "openai")


def send(server, backend, words, tokens=6, **options):
    """One request per prompt word."""
    prompts = [Prompt(f"{word} {i}", 2, tokens) for i, word in enumerate(words)]
    return run_load(Load(backend, server.url, **{"workers": 1, "time_limit": 30.0} | options), prompts)


BODIES = {
    "triton": {
        "text_input": "plain 0",
        "max_tokens": 6,
        "stream": True,
        "temperature": 0.0,
        "end_id": 1048576,
        "min_length": 6,
        "return_num_output_tokens": True,
    },
    "openai": {
        "model": "m",
        "prompt": "plain 0",
        "max_tokens": 6,
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "top_k": 1,
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_are_timed_and_counted_and_failures_leave_the_others_alone(server, backend):
    """With two workers, so that the processes' common clock is in use. Bodies are what the servers expect."""
    words = ["plain", "early", "error", "busy", "drop", "short", "plain", "split", "merge", "split"]
    own = {"model": "m", "extra_body": {"top_k": 1}} if backend == "openai" else {}
    result = send(server, backend, words, check_tokens=True, keep_text=True, workers=2, **own)
    errors = [r.error for r in result.records]
    early = "stream held 3 tokens, 6 were due" if backend == "triton" else "ended early, without [DONE]"
    assert early in errors[1]
    assert errors[2] == "in-band error: engine failed"
    assert errors[3] == "HTTP 503: Exceeds maximum queue size"
    assert "connection failed" in errors[4]
    assert "stream held 5 tokens, 6 were due" in errors[5]
    whole = [result.records[0], *result.records[6:]]
    assert [r.error for r in whole] == [None] * 5
    assert [r.text for r in whole] == [" w0 w1 w2 w3 w4 w5"] * 5
    assert [r.chunks for r in whole] == [6] * 5
    assert all(len(r.itl) == 5 and 0 < r.ttft <= r.latency for r in whole)
    assert result.summary["failed"] == 5 and result.summary["completed"] == 5
    assert result.summary["output_tokens"] == 30
    assert result.summary["client_workers"] == 2
    table = format_table(result.summary, "title")
    assert "FAILED 1 x: HTTP 503" in table
    if backend == "triton":  # which says nothing of prompts
        assert result.summary["requests_with_other_prompt_length"] == 0
        assert "another number of tokens" not in table
    assert BODIES[backend] in server.bodies


def test_results_longer_than_a_pipe_holds_arrive(server):
    """A worker's records of 10 000 tokens with their text take some 150 kB."""
    result = send(server, "triton", ["plain"] * 10, tokens=1000, keep_text=True)
    assert [r.error for r in result.records] == [None] * 10
    assert [len(r.itl) for r in result.records] == [999] * 10


def test_a_load_ends_at_its_time_limit(server):
    late = send(server, "triton", ["plain", "slow", "plain", "plain"], max_concurrency=1, time_limit=2.5)
    errors = [r.error for r in late.records]
    assert errors == [None, "not finished within the time limit", *["not sent within the time limit"] * 2]


def test_concurrency_is_bounded_over_all_workers():
    server = StreamingServer(chunk_seconds=0.01)
    try:
        result = send(server, "triton", ["plain"] * 15, max_concurrency=3, workers=2)
    finally:
        server.close()
    assert result.summary["completed"] == 15
    assert server.most_in_flight == 3
    # Without a rate, to wait for a slot is what was asked for.
    assert result.summary["requests_that_waited_for_a_slot"] == 0
    assert len({body["text_input"] for body in server.bodies}) == 15


def test_of_a_chat_only_what_the_model_said_counts():
    """Servers differ in what they send before it and after it."""
    role, end = {"role": "assistant", "content": ""}, {"delta": {}, "finish_reason": "length"}
    nulls = {"delta": {"role": None, "content": None}, "finish_reason": "length"}
    drafts = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 3}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "completion_tokens_details": drafts}
    usage = {"choices": [], "usage": usage}

    def read(*choices):
        sent = [*({"choices": [choice]} for choice in choices), usage]
        data = [(1.0 + i, f"data: {json.dumps(event)}\n\n".encode()) for i, event in enumerate(sent)]
        return wire.read_stream("openai-chat", [*data, (9.0, b"data: [DONE]\n\n")], 2, exact=True)

    first, second = ({"delta": {"content": text}} for text in "ab")
    for before in ([{"delta": role}], []):
        for after in ([second, end], [second, nulls], [second | {"finish_reason": "length"}]):
            summary = read(*before, first, *after)
            assert (summary.text, summary.error, summary.reported_tokens) == ("ab", None, 2)
            assert summary.accepted_drafts == 1
            assert summary.chunk_times == [1.0 + len(before), 2.0 + len(before)]
    # A token without text is one, and an answer of nothing else has its end for a chunk.
    empty = {"delta": {"content": ""}, "finish_reason": "stop"}
    assert read(first, empty).chunk_times == [1.0, 2.0]
    assert read({"delta": role}, end).chunk_times == [2.0]


def test_prompts_that_a_server_counts_otherwise_are_told(server):
    """It says 1 of each. A server that adds or leaves out a special token does other work than the others."""
    prompts = [Prompt(f"a {i}", count, 3) for i, count in enumerate((1, 2))]
    result = run_load(Load("openai", server.url, workers=1), prompts)
    assert result.summary["requests_with_other_prompt_length"] == 1
    assert [record.prompt_tokens for record in result.records] == [1, 2]
    assert "1 prompts had another number of tokens" in format_table(result.summary, "t")


def test_stream_reading_on_a_constructed_timeline():
    def event(text):
        return b"data: " + json.dumps({"text_output": text}).encode() + b"\n\n"

    whole = event("") + event("a") + event("b")
    reads = [(1.0, whole[:20]), (2.0, whole[20:-3]), (3.0, whole[-3:])]
    summary = wire.read_stream("triton", reads, 3, exact=True)
    assert (summary.text, summary.error) == ("ab", None)
    assert summary.chunk_times == [2.0, 2.0, 3.0] and summary.first_text_time == 2.0
    assert "inside an event" in wire.read_stream("triton", reads[:2], 3, exact=True).error
    assert wire.read_stream("triton", [], 3, exact=True).error == "stream ended without a chunk"
    assert (
        "5 chunks for at most 3" in wire.read_stream("triton", [(1.0, event("x") * 5)], 3, exact=True).error
    )
    assert "no text_output" in wire.read_stream("triton", [(1.0, b"data: {}\n")], 3, exact=True).error
    assert "not JSON" in wire.read_stream("triton", [(1.0, b"data: {\n")], 3, exact=True).error


def test_error_bodies_of_both_servers():
    assert wire.error_message('data: {"error":"too long"}') == "too long"
    assert wire.error_message('{"error":{"message":"no model","code":404}}') == "no model"
    assert wire.error_message("<html>bad gateway</html>") == "<html>bad gateway</html>"


def test_splitter_gives_the_same_events_for_every_cut():
    data = b'event: x\r\ndata: {"a": "\xc3\xa9"}\r\n\r\n: comment\ndata:{"b": 2}\n\n'
    for cut in range(len(data) + 1):
        splitter = wire.EventSplitter()
        events = splitter.feed(data[:cut]) + splitter.feed(data[cut:])
        assert events == ['{"a": "é"}'.encode(), b'{"b": 2}']


def test_metrics_of_a_constructed_run():
    records = []
    for index, gap in enumerate((0.010, 0.020, 0.030)):
        record = RequestRecord(index, prompt_tokens=10, output_tokens=5, scheduled=1.0 + index)
        start = 101.001 + index
        record.set_chunk_times(start, [start + 0.1 + gap * k for k in range(5)], start + 0.1, 100.0)
        record.end = record.start + record.latency
        records.append(record)
    records.append(RequestRecord(3, 10, 1, start=4.0, end=5.0, ttft=0.1, latency=0.1))
    records.append(RequestRecord(4, 10, 500, start=4.0, end=10.0, error="broken"))
    assert [r.tpot for r in records[:4]] == [*map(pytest.approx, (0.010, 0.020, 0.030)), None]
    s = summarise(records)
    assert (s["completed"], s["failed"], s["errors"]) == (4, 1, {"broken": 1})
    assert s["duration_s"] == 10.0
    assert s["output_tokens_per_s"] == pytest.approx(16 / 10)
    assert s["total_tokens_per_s"] == pytest.approx(56 / 10)
    assert s["median_tpot_ms"] == pytest.approx(20.0)
    assert s["p90_tpot_ms"] == pytest.approx(28.0)  # linear between 20 and 30
    assert s["p99_tpot_ms"] == pytest.approx(29.8)
    assert s["median_ttft_ms"] == pytest.approx(100.0)
    assert s["median_itl_ms"] == pytest.approx(20.0)
    assert s["median_send_delay_ms"] == pytest.approx(1.0)
    columns = request_columns(records)
    assert columns["output_tokens"] == [5, 5, 5, 1, 500] and columns["error"][4] == "broken"
    json.dumps(columns, allow_nan=False)


def test_summary_of_failures_only_has_no_values():
    s = summarise([RequestRecord(0, 1, 1, error="x")])
    assert s["completed"] == 0 and s["median_ttft_ms"] is None and s["output_tokens_per_s"] == 0.0
    assert "ttft" in format_table(s, "t")


@pytest.fixture
def sharegpt(tmp_path):
    rng = random.Random(3)
    words = ["fox", "dog", "jumps", "lazy", "quick"]
    rows = [
        {
            "conversations": [
                {"value": " ".join(rng.choices(words, k=rng.randint(1, 60)))} for _ in range(turns)
            ]
        }
        for turns in [2] * 40 + [1] * 5 + [3] * 5
    ]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(rows))
    return path


def test_sharegpt_prompts_are_filtered_counted_and_repeatable(sharegpt):
    tokenizer = small_tokenizers.byte_level()
    limits = {"max_prompt_tokens": 100, "max_total_tokens": 150}
    prompts = load_sharegpt(sharegpt, tokenizer, 10, seed=1, **limits)
    answers = {
        row["conversations"][0]["value"]: row["conversations"][1]["value"]
        for row in json.loads(sharegpt.read_text())
        if len(row["conversations"]) > 1
    }
    for p in prompts:
        assert p.prompt_tokens == len(tokenizer.encode(p.text).ids)
        assert p.output_tokens == len(tokenizer.encode(answers[p.text], add_special_tokens=False).ids)
        assert (
            4 <= p.prompt_tokens <= 100 and p.output_tokens >= 4 and p.prompt_tokens + p.output_tokens <= 150
        )
    again = load_sharegpt(sharegpt, tokenizer, 10, seed=1, **limits)
    other = load_sharegpt(sharegpt, tokenizer, 10, seed=2, **limits)
    assert fingerprint(again) == fingerprint(prompts) != fingerprint(other)
    with pytest.raises(ValueError, match="usable conversations, 50 were asked for"):
        load_sharegpt(sharegpt, tokenizer, 50, seed=1, **limits)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace"])
def test_random_prompts_encode_to_their_length(kind):
    tokenizer = getattr(small_tokenizers, kind)()
    prompts = random_prompts(tokenizer, 20, (5, 40), (3, 9), seed=5)
    for p in prompts:
        assert len(tokenizer.encode(p.text).ids) == p.prompt_tokens
        assert 5 <= p.prompt_tokens <= 40 and 3 <= p.output_tokens <= 9
    assert len({p.prompt_tokens for p in prompts}) > 5
    assert fingerprint(prompts) == fingerprint(random_prompts(tokenizer, 20, (5, 40), (3, 9), seed=5))
    with pytest.raises(ValueError, match="low <= high"):
        random_prompts(tokenizer, 1, (9, 5), (3, 9), seed=5)


def test_arrivals_are_poisson_with_the_exact_rate():
    times = arrival_times(2000, 50.0, seed=0)
    assert times == arrival_times(2000, 50.0, seed=0) and times == sorted(times)
    assert times[-1] == pytest.approx(40.0)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(1.0, abs=0.1)  # exponential gaps
    assert arrival_times(3, math.inf, 0) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="positive"):
        arrival_times(3, 0.0, 0)


def test_both_backends_are_sent_the_same_work(server, load, tmp_path, capsys):
    work = "--num-prompts 6 --input-len 4:9 --output-len 2:5 --request-rate 200 --retokenize --save-itl"
    outputs = []
    for backend in BACKENDS:
        outputs.append(tmp_path / f"{backend}.json")
        own = ["--backend", backend, "--output", str(outputs[-1])]
        assert bench.main([*load, *work.split(), *own]) == 0
    triton, openai = (json.loads(path.read_text()) for path in outputs)
    assert triton["prompts_sha256"] == openai["prompts_sha256"]
    for name in ("prompt_tokens", "output_tokens", "scheduled"):
        assert triton["requests"][name] == openai["requests"][name]
    sent = sorted((b.get("text_input") or b["prompt"], b["max_tokens"]) for b in server.bodies)
    assert sent[::2] == sent[1::2] and len(sent) == 12
    # Triton is asked for the numbers of tokens unless told otherwise.
    assert all(body["return_num_output_tokens"] for body in server.bodies if "text_input" in body)
    assert triton["summary"]["retokenized_output_tokens"] > 0 and triton["requests"]["itl"][0]
    printed = capsys.readouterr().out
    assert "output_tokens_per_s" in printed
    assert f"the received text is {triton['summary']['retokenized_output_tokens']} tokens" in printed


def test_failed_requests_set_the_exit_status(load, capsys):
    assert bench.main([*load, "--url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 1
    assert "FAILED 1 x: connection failed" in capsys.readouterr().out


def test_generate_prints_the_stream_and_reports_errors(server, capsys):
    arguments = ["--url", server.url, "--max-tokens", "4", "--temperature", "1", "--seed", "7", "--stop", "x"]
    assert generate.main(["split hello", *arguments]) == 0
    assert capsys.readouterr().out == " w0 w1 w2 w3\n"
    body = server.bodies[0]
    assert (body["text_input"], body["max_tokens"], body["seed"]) == ("split hello", 4, 7)
    assert body["stop_words"] == ["x"] and "top_p" not in body
    assert generate.main(["error", *arguments]) == 1
    assert "engine failed" in capsys.readouterr().err
    assert generate.main(["busy", *arguments]) == 1
    assert "HTTP 503" in capsys.readouterr().err
    assert generate.main(["drop", *arguments]) == 1
    assert "broke off its answer" in capsys.readouterr().err


ROOT = Path(__file__).parents[2]
NO_END = "stream ended without its last chunk (no finish_reason)"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def events(*chunks):
    """Triton's stream of these chunks, one read each, at 1 s, 2 s and so on."""
    return [
        (1.0 + i, b"data: " + json.dumps({"text_output": "x"} | chunk).encode() + b"\n\n")
        for i, chunk in enumerate(chunks)
    ]


def test_a_stream_must_end_for_the_reason_that_was_due():
    for reason in ("cancelled", "stop"):
        summary = wire.read_stream("triton", events({"finish_reason": reason}), 100, exact=True)
        assert summary.error == f"stream ended with finish_reason '{reason}', 'length' was due"
    merged = wire.read_stream("triton", events({"finish_reason": "length"}), 100, exact=True)
    assert (merged.error, merged.finish_reason) == (None, "length")
    stopped = wire.read_stream("triton", events({}, {"finish_reason": "stop"}), 100, exact=False)
    assert (stopped.error, stopped.finish_reason) == (None, "stop")
    cancelled = wire.read_stream("triton", events({"finish_reason": "cancelled"}), 100, exact=False)
    assert cancelled.error == "stream ended with finish_reason 'cancelled'"
    # What follows shows that the marked chunk was not the last.
    assert wire.read_stream("triton", events({"finish_reason": "length"}, {}), 3, True).finish_reason is None


def test_a_stream_without_its_last_chunk_or_of_another_form_fails_alone(server):
    """Where others have their last chunk."""
    words = ["plain", "early", "cancelled", "stopped", "unmarked", "foreign", "latin", "plain"]
    result = send(server, "triton", words)
    *others, foreign, latin, plain = result.records
    assert [r.error for r in others] == [
        None,
        NO_END,
        "stream ended with finish_reason 'cancelled', 'length' was due",
        "stream ended with finish_reason 'stop', 'length' was due",
        NO_END,
    ]
    assert foreign.error.startswith("chunk is not of this form: {")
    assert (latin.error, plain.error) == ("HTTP 503: \ufffdberlast", None)
    assert result.summary["output_tokens"] == 12
    reasons = ["length", None, "cancelled", "stop", None]
    assert request_columns(result.records)["finish_reason"][:5] == reasons


@pytest.mark.parametrize(
    "backend, event",
    [
        ("openai", {"choices": [None]}),
        ("openai", {"choices": 5}),
        ("openai", {"choices": [], "usage": {"prompt_tokens": 1}}),
        ("openai-chat", {"choices": [{"delta": "text"}]}),
        ("openai-chat", {"choices": [{"delta": {"content": ["text"]}}]}),
    ],
)
def test_chunks_of_another_form(backend, event):
    data = f"data: {json.dumps(event)}\n\n".encode()
    error = wire.read_stream(backend, [(1.0, data)], 3, exact=True).error
    assert error is not None and error.startswith("chunk is not of this form")


def test_an_empty_last_chunk_does_not_count_for_tpot(server):
    record = RequestRecord(0, 10, 3, ttft=1.0, latency=9.0, last_token=2.0)
    assert record.tpot == 0.5
    reads = events({"num_output_tokens": 1}, {"num_output_tokens": 2}, {"num_output_tokens": 0})
    assert wire.read_stream("triton", reads, 9, exact=False).last_token_time == 2.0
    (record,) = send(server, "triton", ["stopped"], ignore_eos=False).records
    assert (record.error, record.output_tokens, record.chunks) == (None, 3, 4)
    assert record.ttft + 2 * record.tpot == pytest.approx(record.last_token) and len(record.itl) == 3


@pytest.mark.parametrize("backend", ["triton", "openai"])
def test_the_server_names_the_tokenizer(server, tokenizer_folder, capsys, tmp_path, backend):
    server.models = ["m"]
    at_once = "--num-prompts 1 --workers 1 --ready-timeout 0 --warm-up 0"
    arguments = f"--backend {backend} --url {server.url} {at_once} --output {tmp_path}/out.json".split()
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    told = capsys.readouterr().err
    assert end.value.code == 2 and "does not name its tokenizer's folder: give it by --tokenizer" in told
    server.tokenizer = "/of/another/machine"
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "/of/another/machine/tokenizer.json does not exist; --tokenizer must" in capsys.readouterr().err
    server.tokenizer = str(tokenizer_folder)
    assert bench.main(arguments) == 0
    assert json.loads((tmp_path / "out.json").read_text())["arguments"]["tokenizer"] == str(tokenizer_folder)


def test_tokens_need_not_be_checked(server, load, tmp_path):
    output = tmp_path / "out.json"
    assert bench.main([*load, "--num-prompts", "1", "--no-check-tokens", "--output", str(output)]) == 0
    assert ["return_num_output_tokens" in body for body in server.bodies] == [False]
    text = output.read_text()
    assert json.loads(text)["arguments"]["request_rate"] is None
    assert "Infinity" not in text and "NaN" not in text
    assert not Load("triton", server.url).check_tokens  # what perf_configs measures with


def test_files_that_are_not_what_they_should_be(load, tmp_path, capsys):
    bad = tmp_path / "tokenizer.json"
    for arguments, content, message in (
        (["--dataset", f"sharegpt:{bad}"], "{", "is not a ShareGPT JSON file"),
        (["--dataset", f"sharegpt:{bad}"], "{}", "must hold a list of conversations"),
        (["--tokenizer", str(tmp_path)], "{}", "is not a tokenizer"),
    ):
        bad.write_text(content)
        with pytest.raises(SystemExit) as end:
            bench.main([*load, *arguments])
        assert end.value.code == 2 and message in capsys.readouterr().err


WRONG_GENERATE = [
    (["--url", "foo"], "'foo' must have the form http://host:port"),
    (["--url", "http://a..b:8000"], "must have the form http://host:port"),
    (["--url", "http://127.0.0.1:port"], "must have the form http://host:port"),
    (["--grpc", "--url", "http://127.0.0.1:8001"], "must have the form host:port with --grpc"),
    (["--grpc", "--seed", "-1"], "'-1' must be a whole number from 0 to 18446744073709551615"),
    (["--seed", str(2**64)], "must be a whole number from 0 to 18446744073709551615"),
    (["--max-tokens", "99999999999"], "must be a whole number from -2147483648 to 2147483647"),
    (["--top-k", str(2**31)], "must be a whole number from -2147483648 to 2147483647"),
    (["--min-tokens", "x"], "must be a whole number from -2147483648 to 2147483647"),
    (["--timeout", "0"], "must be a number of seconds over 0"),
    (["--temperature", "0", "--top-p", "0.5"], "--top-p: --temperature 0 is greedy"),
    (["--temperature", "0", "--seed", "0"], "--seed: --temperature 0 is greedy"),
]


@pytest.mark.parametrize("arguments, message", WRONG_GENERATE)
def test_wrong_arguments_of_generate(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        generate.main(["prompt", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def python(*arguments, env=None, **pipes):
    """A Python process with this one's import path."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | path | (env or {}), **pipes)


def test_generate_ends_quietly_when_its_reader_goes():
    server = StreamingServer(chunk_seconds=0.02)
    try:
        arguments = ["plain", "--url", server.url, "--max-tokens", "400"]
        with python("-m", "client", "generate", *arguments, **PIPES) as process:
            assert process.stdout.read(3) == b" w0"
            process.stdout.close()
            assert process.wait(120) == 128 + signal.SIGPIPE
            assert process.stderr.read() == b""
    finally:
        server.close()


def test_workers_end_with_a_load_generator_that_is_terminated(tokenizer_folder):
    server = StreamingServer(chunk_seconds=60.0)
    workers = []
    load = f"--url {server.url} --tokenizer {tokenizer_folder} --num-prompts 2 --workers 2"
    at_once = "--ready-timeout 0 --warm-up 0"
    process = python(*f"-m client bench {load} {at_once}".split(), stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: server.in_flight == 2)
        workers = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        assert len(workers) == 2
        process.terminate()
        assert process.wait(120) == -signal.SIGTERM
        wait_for(lambda: not any(process_alive(worker.pid) for worker in workers))
    finally:
        process.kill()
        process.wait(120)
        for worker in workers:
            if process_alive(worker.pid):
                worker.kill()
        server.close()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_generating_and_chatting_need_the_standard_library_alone(command):
    # -S: no site-packages. The folder of an editable install is on no path of it either.
    words = [sys.executable, "-S", "-E", "-m", "client", command, "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "--url" in done.stdout, done.stderr
