# SPDX-License-Identifier: Apache-2.0
"""`client bench`, `client report` and `client chat` against real servers."""

import csv
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

from openai_server import OpenAiServer
from running import ROOT, EngineWatch, Server, wait_for
from terminals import END_OF_FILE, INTERRUPT, terminal

from client import bench, generate, report
from client.configurations import base_label
from client.load import LoadResult, run_load
from client.scenarios import Point
from flashinfer_backend import __version__
from flashinfer_backend.core.paths import resolve_model_dir
from perf_configs import bench_openai
from perf_configs.plan import make_plan
from perf_configs.run import Benchmark, argument_parser
from ports import free_ports

LOAD = ["--tokenizer", "bundled", "--workers", "1", "--warm-up", "0"]
SMALL = ["--num-prompts", "6", "--input-len", "8:16", "--output-len", "4:8", "--max-concurrency", "3"]


def measured(folder: Path, backend: str, url: str, *more: str) -> tuple[dict[str, Any], list[str]]:
    """What --output holds of a run that must succeed, and the texts that were received."""
    files = ["--output", str(folder / f"{backend}.json"), "--csv", str(folder / f"{backend}.csv")]
    words = ["--backend", backend, "--url", url, *LOAD, *SMALL, *files, "--retokenize", *more]
    found: list[LoadResult] = []

    def noted(*args: Any) -> LoadResult:
        found.append(run_load(*args))
        return found[-1]

    with patch.object(bench, "run_load", noted):
        assert bench.main(words) == 0
    texts = [record.text for record in found[-1].records]
    return json.loads((folder / f"{backend}.json").read_text()), texts


def test_generate_writes_the_same_over_http_and_grpc(server: Server, capsys: Any) -> None:
    options = [
        "Once upon a time", "--max-tokens", "16", "--temperature", "0.9", "--seed", "3", "--top-k", "9",
    ]  # fmt: skip
    options += ["--top-k", "9", "--stop", "nothing like that", "--stop", "nor that"]
    assert generate.main([*options, "--url", server.url]) == 0
    text = capsys.readouterr().out
    assert generate.main([*options, "--grpc", "--url", server.grpc]) == 0
    assert capsys.readouterr().out == text and len(text) > 9
    assert generate.main(["--grpc", "--url", server.grpc, "--max-tokens", "-1", "Hello"]) == 1
    assert "request_output_len (max_tokens) is -1" in capsys.readouterr().err


def test_http_and_grpc_give_the_same_texts_and_grpc_samples_and_refuses(
    server: Server, tmp_path: Path, capsys: Any
) -> None:
    http, http_texts = measured(tmp_path, "triton", server.url, "--percentiles", "50,95")
    grpc, grpc_texts = measured(tmp_path, "triton-grpc", f"http://{server.grpc}", "--goodput", "ttft=60000")
    assert http["prompts_sha256"] == grpc["prompts_sha256"]
    assert http_texts == grpc_texts and all(grpc_texts)
    for run in (http, grpc):
        assert run["summary"]["completed"] == 6 and run["requests"]["finish_reason"] == ["length"] * 6
        assert run["requests"]["reported_tokens"] == run["requests"]["output_tokens"]
        assert run["server"].startswith("triton ") and run["machine"]["cores"]
    assert grpc["summary"]["goodput_share"] == 1.0
    rows = list(csv.DictReader((tmp_path / "triton.csv").open()))
    assert [int(row["output_tokens"]) for row in rows] == http["requests"]["output_tokens"]
    shown, told = capsys.readouterr()
    assert "P95" in shown and "goodput" in shown and max(map(len, shown.splitlines())) <= 80
    files = [str(tmp_path / f"triton-grpc.{end}") for end in ("json", "csv")]
    assert told.splitlines()[-1] == f"wrote {', '.join(files)}"

    # Sampling, and what the server refuses.
    url = f"http://{server.grpc}"
    how = ["--temperature", "2", "--top-p", "0.9"]
    sampled, texts = measured(tmp_path, "triton-grpc", url, *how, "--extra-body", '{"seed": 1}')
    assert sampled["arguments"]["temperature"] == 2.0
    assert sampled["prompts_sha256"] == grpc["prompts_sha256"]
    assert texts != grpc_texts
    arguments = ["--backend", "triton-grpc", "--url", url, *LOAD, *SMALL]
    output = tmp_path / "refused.json"
    assert bench.main([*arguments, "--extra-body", '{"beam_width": 3}', "--output", str(output)]) == 1
    ((message, count),) = json.loads(output.read_text())["summary"]["errors"].items()
    assert count == 6 and message.startswith("in-band error: ") and "beam" in message


def test_a_scenario_and_its_report(server: Server, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "small.json"
    scenario = ["--scenario", "small", "--num-prompts", "6", "--output", str(output)]
    assert bench.main(["--url", server.url, *LOAD, *scenario]) == 0
    runs = json.loads(output.read_text())["runs"]
    assert [run["request_rate"] for run in runs] == [10.0, 20.0]
    assert report.main([f"ours={output}", f"other={output}", "--out", str(tmp_path / "page")]) == 0
    text, page = (tmp_path / "page.md").read_text(), (tmp_path / "page.html").read_text()
    assert re.search(r"^\| ours \| 20 req/s \| 6 \| 0 \|", text, re.MULTILINE)
    assert "python -m client bench" in text and "cores" in text
    assert page.count("<svg") == 3 and "Latency against request rate" in page
    loaded = re.findall(r"""(?:src|href)=["'](?!#)([^"']+)""", page)
    assert not [place for place in loaded if not place.startswith("#")] and "<script" not in page
    assert report.main([str(tmp_path / "page.md")]) == 2
    assert "holds no results" in capsys.readouterr().err


def test_a_run_that_is_interrupted_keeps_what_it_has(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "part.json"
    load = ["--num-prompts", "500", "--input-len", "8", "--output-len", "40", "--max-concurrency", "4"]
    with terminal("bench", "--url", server.url, *LOAD, *load, "--output", str(output)) as shell:
        shell.until(lambda shown: bool(re.search(r"[1-9]\d*/500 done, \d+ running, 0 failed", shown)))
        shell.type(INTERRUPT)
        assert shell.rest() == 130
        shown = shell.shown
    assert "stopping, with what there is" in shown and "INCOMPLETE: interrupted with" in shown
    run = json.loads(output.read_text())
    summary = run["summary"]
    assert run["interrupted"] and summary["failed"] == 0 and summary["completed"] > 0
    assert summary["completed"] + summary["unfinished"] == 500
    assert len(run["requests"]["index"]) == summary["completed"]


def test_openai_completions_and_chat(api: OpenAiServer, tmp_path: Path) -> None:
    plain, _ = measured(tmp_path, "openai", api.url)
    chat, texts = measured(tmp_path, "openai-chat", api.url, "--dataset", "multi-turn", "--turns", "2")
    assert plain["model"] == chat["model"] == "tiny-chat" and plain["summary"]["completed"] == 6
    assert chat["summary"]["completed"] == 12 and chat["requests"]["turn"] == [0, 1] * 6
    said = chat["requests"]["prompt_tokens"]
    assert all(second > first for first, second in zip(said[::2], said[1::2], strict=True))
    assert chat["requests"]["chunks"] and all(texts)


def test_the_benchmark_starts_and_measures_the_openai_api(tmp_path: Path) -> None:
    model, bundled = tmp_path / "model", resolve_model_dir("bundled")
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_bytes((bundled / name).read_bytes())
    profile = tmp_path / "cpu.toml"
    knobs = 'device = "cpu"\nmax_num_seqs = 7\nmax_tokens_in_paged_kv_cache = 16384\nschedule_policy = "lof"'
    profile.write_text(f"[knobs]\n{knobs}\n")
    arguments = ["--model-dir", str(model), "--profile", str(profile), "--server", "ours-openai:workers-1"]
    arguments += ["--rows", "small", "--knob", "max_queue_size=9", "--workers", "1", "--commit", "c"]
    arguments += ["--port", str(free_ports(1)[0]), "--out", str(tmp_path / "out")]
    args = argument_parser().parse_args(arguments)
    plan = make_plan(args)
    small = replace(plan.scenarios["small"], points=(Point(math.inf, 12),), priority_per_output_token=-1)
    benchmark = Benchmark(args, replace(plan, scenarios={"small": small}))
    benchmark.run_server(plan.servers[0])
    assert benchmark.problems == [] and benchmark.failed_requests == 0
    (found,) = benchmark.document["runs"]
    assert found["load"]["priority_per_output_token"] == -1, "of known lengths"
    assert base_label(found) == "ours-openai:workers-1" and found["flags"] == "--workers 1"
    assert found["version"] == __version__ and found["warm_up"]["requests_with_checked_length"] == 4
    assert found["summary"]["completed"] == 12 and found["knobs"] == "--set max_queue_size=9"
    assert found["requests"]["reported_tokens"] == found["requests"]["output_tokens"]


def test_what_a_stream_holds_is_counted_however_it_is_cut() -> None:
    counted: list[int] = []
    event = b'data: {"text":"a"}\n\n'
    stream = b"HTTP/1.1 200 OK\r\n\r\n" + 3 * event + bench_openai.END
    for size in (1, 2, 5, 8, 13, len(stream)):
        counted.clear()
        reader, sent = bench_openai.Reader(b"again", counted.append, Mock()), Mock()
        reader.connection_made(sent)
        for at in range(0, len(stream), size):
            reader.data_received(stream[at : at + size])
        assert sum(counted) == 3 and sent.write.call_count == 2, size


def test_chat_in_a_terminal(server: Server, watch: EngineWatch) -> None:
    with terminal("chat", "--url", server.url, "--form", "question", "--max-tokens", "12") as shell:
        shell.until("you> ")
        shell.type("Who is Anna?\n")
        line = re.compile(r"\[\d+ tokens, TTFT [\d,]+ ms, [\d.,]+ tok/s, [\d.]+ s\]")
        shell.until(lambda shown: bool(line.search(shown)))
        at = len(shell.shown)
        shell.type("/system Be brief.\n")
        shell.until("system prompt: Be brief.", at)
        shell.type("/history\n")
        shown = shell.until("model: ", at)
        assert "system: Be brief." in shown and "you: Who is Anna?" in shown

        # A long answer, without words that would end it, stopped: the server forgets it.
        before = watch.status().cancellations
        for words in ("/set max_tokens 1500", "/set temperature 9", "/set end_id 1048576", "/reset"):
            shell.type(words + "\n")
        shell.until(lambda shown: "is forgotten" in shown and shown.endswith("you> "), at)
        at = len(shell.shown)
        shell.type("Tell me a story.\n")
        shell.until(lambda shown: len(shown) > 160, at)
        shell.type(INTERRUPT)
        shell.until("stopped]", at)
        wait_for(lambda: watch.status().cancellations == before + 1, "the cancellation")
        shell.type("/nonsense\n")
        # At a prompt: before, the terminal would take it for the end of what nobody reads.
        shell.until(lambda shown: "/nonsense; " in shown and shown.endswith("you> "), at)
        time.sleep(0.2)
        shell.type(END_OF_FILE)
        assert shell.rest() == 0


def test_chat_through_a_pipe(api: OpenAiServer) -> None:
    words = [sys.executable, "-m", "client", "chat", "--backend", "openai-chat", "--url", api.url]
    lines = "What is it?\nAnd then?\n/set temperature -1\nOnce more?\n/history\n"
    done = subprocess.run(
        [*words, "--max-tokens", "8", "--temperature", "0"],
        cwd=ROOT, input=lines, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.count(" tokens, TTFT") == 2 and "\x1b" not in done.stdout and "you>" not in done.stdout
    assert done.stderr.startswith("error: HTTP 4") and "temperature" in done.stderr
    assert "you: And then?" in done.stdout and "you: Once more?" not in done.stdout
