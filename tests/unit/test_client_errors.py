# SPDX-License-Identifier: Apache-2.0
"""The client against streams that end wrongly, wrong arguments, and its own sudden end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from streaming_server import StreamingServer

from client import bench, generate, wire
from client.datasets import Prompt
from client.load import Load, run_load
from client.metrics import RequestRecord, request_columns
from flashinfer_backend.transport.rundir import process_alive
from waiting import wait_for

ROOT = Path(__file__).parents[2]
NO_END = "stream ended without its last chunk (no finish_reason)"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def send(server, words, tokens=6, backend="triton", **options):
    prompts = [Prompt(f"{word} {i}", 2, tokens) for i, word in enumerate(words)]
    return run_load(Load(backend, server.url, **{"workers": 1, "time_limit": 30.0} | options), prompts)


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


def test_a_stream_without_its_last_chunk_is_an_error_where_others_have_theirs(server):
    result = send(server, ["plain", "early", "cancelled", "stopped", "unmarked"])
    assert [r.error for r in result.records] == [
        None,
        NO_END,
        "stream ended with finish_reason 'cancelled', 'length' was due",
        "stream ended with finish_reason 'stop', 'length' was due",
        NO_END,
    ]
    assert result.summary["output_tokens"] == 6
    reasons = ["length", None, "cancelled", "stop", None]
    assert request_columns(result.records)["finish_reason"] == reasons


def test_an_answer_of_another_form_fails_alone(server):
    foreign, latin, plain = send(server, ["foreign", "latin", "plain"]).records
    assert foreign.error.startswith("chunk is not of this form: {")
    assert (latin.error, plain.error) == ("HTTP 503: \ufffdberlast", None)


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
    (record,) = send(server, ["stopped"], ignore_eos=False).records
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


def test_tokens_are_checked_unless_told_otherwise(server, load, tmp_path):
    output = tmp_path / "out.json"
    for more in (["--output", str(output)], ["--no-check-tokens"]):
        assert bench.main([*load, "--num-prompts", "1", *more]) == 0
    assert ["return_num_output_tokens" in body for body in server.bodies] == [True, False]
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
