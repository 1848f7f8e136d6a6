# SPDX-License-Identifier: Apache-2.0
"""What the metrics port shows, on a server of its own with a KV cache that two sequences can fill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import ROOT, Server, running, wait_for
from test_generate import PROMPT, int32, stream, strings

from flashinfer_backend.config_tools import cli

ENDLESS = {"end_id": 1048576}
BLOCKS = 40
MODELS = ("ensemble", "preprocessing", "llm", "postprocessing")
HISTOGRAMS = (
    "nv_llm_input_token_len",
    "nv_llm_output_token_len",
    "flashinfer_backend_time_to_first_token_seconds",
    "flashinfer_backend_inter_token_latency_seconds",
    "flashinfer_backend_inter_token_latency_max_seconds",
    "flashinfer_backend_e2e_latency_seconds",
    "flashinfer_backend_queue_time_seconds",
)
SERIES = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("metrics") / "repository"
    knobs = ["device=cpu", "max_seq_len=512", f"max_tokens_in_paged_kv_cache={16 * BLOCKS}"]
    assert cli.main(ROOT / "model_repo", ["--output", str(repository), "--set", *knobs]) == 0
    with running(repository, tmp_path_factory.mktemp("server")) as started:
        # The metrics port opens after the one that says ready.
        wait_for(lambda: metrics_port_open(started), "the metrics port")
        yield started


def metrics_port_open(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return bool(scrape(server))
    return False


def scrape(server: Server) -> str:
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


class Shown:
    """The metrics at one moment. `text`: of the metrics port."""

    def __init__(self, text: str) -> None:
        self.types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
        self.series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, labels, value = SERIES.fullmatch(line).groups()
                key = (name, frozenset(LABEL.findall(labels or "")))
                assert key not in self.series, f"{key} is there twice"
                self.series[key] = float(value)

    def get(self, name: str, model: str = "llm", **labels: str) -> float:
        """Sum of the series with these labels among theirs."""
        wanted = {"model": model, **labels}.items()
        found = [v for (n, their), v in self.series.items() if n == name and wanted <= set(their)]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def named(self, name: str) -> list[float]:
        """Values of the series of a family, whatever their labels."""
        return [value for (n, _), value in self.series.items() if n == name]

    def ended(self, *reasons: str) -> float:
        name = "flashinfer_backend_sequences_finished_total"
        return sum(self.get(name, finish_reason=reason) for reason in reasons) if reasons else self.get(name)

    def blocks(self, kind: str) -> float:
        return self.get("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)

    def requests(self, kind: str) -> float:
        return self.get("nv_trt_llm_request_metrics", request_type=kind)

    def general(self, kind: str) -> float:
        return self.get("nv_trt_llm_general_metrics", general_type=kind)


def shown(server: Server) -> Shown:
    return Shown(scrape(server))


def shown_once(server: Server, condition: Callable[[Shown], bool], what: str) -> Shown:
    return wait_for(lambda: (now := shown(server)) and condition(now) and now, what)


def idle(server: Server) -> Shown:
    """The metrics once no sequence is open and all that have ended are noted."""
    before = shown(server)
    reported = before.general("timestamp")
    return shown_once(
        server,
        lambda s: s.general("timestamp") > reported + 0.2 and s.requests("active") == 0 == s.blocks("used"),
        "an idle engine",
    )


@contextlib.contextmanager
def leaving(server: Server, max_tokens: int) -> Iterator[None]:
    """A client of the ensemble that reads its stream's beginning and leaves at the end of the block."""
    body = {"text_input": PROMPT, "max_tokens": max_tokens, "stream": True, **ENDLESS}
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: {host}\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        assert b"text_output" in client.recv(65536) + client.recv(65536)
        yield


def documented() -> dict[str, str]:
    """Family and type of each row of the tables in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    return dict(re.findall(r"^\| ((?:nv_|flashinfer_)\w+) \| (\w+) \|", text, re.MULTILINE))


def test_the_documented_families_are_those_that_are_shown(server: Server) -> None:
    types = shown(server).types
    ours = re.compile("nv_trt_llm_|nv_llm_|flashinfer_backend_")
    assert {name: kind for name, kind in types.items() if ours.match(name)} == documented()


def test_labels_and_buckets_of_tensorrt_llm(server: Server) -> None:
    now = shown_once(server, lambda s: s.blocks("max") > 0, "the engine's first report")
    expected = {
        ("nv_trt_llm_request_metrics", "request_type"): "active max scheduled context waiting",
        ("nv_trt_llm_runtime_memory_metrics", "memory_type"): "cpu gpu pinned",
        ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"): (
            "max free used tokens_per reused fraction"
        ),
        ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"): (
            "total_context_tokens generation_requests micro_batch_id paused_requests"
        ),
        ("nv_trt_llm_general_metrics", "general_type"): "timestamp iteration_counter",
        ("nv_llm_input_token_len_bucket", "le"): "10 50 100 500 1000 +Inf",
        ("nv_llm_output_token_len_bucket", "le"): "10 50 100 500 1000 +Inf",
    }
    for (name, label), values in expected.items():
        labels = [dict(their) for n, their in now.series if n == name]
        assert sorted(each[label] for each in labels) == sorted(values.split()), name
        assert all((each["model"], each["version"]) == ("llm", "1") for each in labels)
    assert now.get("nv_llm_output_token_len_count", response_metric_type="total_output_tokens") >= 0
    assert now.blocks("max") == BLOCKS and now.blocks("tokens_per") == 16
    assert now.requests("max") == 256
    assert now.get("nv_trt_llm_runtime_memory_metrics", memory_type="cpu") > 10 << 20
    assert now.get("flashinfer_backend_engine_up") == 1


def test_counts_equal_what_was_sent(server: Server) -> None:
    before = idle(server)
    prompt = {"text_input": PROMPT, "return_num_input_tokens": True, **ENDLESS}
    lengths = [2, 12, 60]
    for length in lengths:
        status, answer = server.post({**prompt, "max_tokens": length})
        assert status == 200 and "kv_cache_reused_blocks" not in answer
    prompt_tokens = answer["num_input_tokens"]
    for length in lengths:
        server.post({**prompt, "max_tokens": length, "stream": True}, stream=True)
    several = {**prompt, "max_tokens": 7, "num_return_sequences": 3, "stream": True, "temperature": 1.0}
    server.post(several, stream=True)
    lengths += [*lengths, 7, 7, 7]
    batch = {
        "text_input": strings(PROMPT, PROMPT),
        "max_tokens": int32(3, 4),
        "end_id": int32(1048576, 1048576),
    }
    stream(server, "ensemble", [("", batch)])
    lengths += [3, 4]
    count = len(lengths)

    after = shown_once(server, lambda s: s.ended() == before.ended() + count, "all ends to be noted")
    after = idle(server)

    def moved(name: str) -> float:
        return after.get(name) - before.get(name)

    assert after.ended("length") - before.ended("length") == count
    for name in HISTOGRAMS:
        assert moved(f"{name}_count") == count, name
        at_most_inf = after.get(f"{name}_bucket", le="+Inf") - before.get(f"{name}_bucket", le="+Inf")
        assert at_most_inf == count, name
    assert moved("nv_llm_input_token_len_sum") == prompt_tokens * count
    assert moved("nv_llm_output_token_len_sum") == sum(lengths)
    le_50 = after.get("nv_llm_output_token_len_bucket", le="50")
    assert le_50 - before.get("nv_llm_output_token_len_bucket", le="50") == sum(n <= 50 for n in lengths)
    assert moved("flashinfer_backend_prompt_tokens_total") == prompt_tokens * count
    assert moved("flashinfer_backend_generated_tokens_total") == sum(lengths)
    # Parts of one time: a sequence waits, gets its first token, then the others.
    first = moved("flashinfer_backend_time_to_first_token_seconds_sum")
    mean = moved("flashinfer_backend_inter_token_latency_seconds_sum")
    longest = moved("flashinfer_backend_inter_token_latency_max_seconds_sum")
    assert 0 < moved("flashinfer_backend_queue_time_seconds_sum") < first
    assert 0 < mean <= longest
    assert first + longest < moved("flashinfer_backend_e2e_latency_seconds_sum")
    assert after.general("iteration_counter") > before.general("iteration_counter")


def test_one_token_has_no_inter_token_latency(server: Server) -> None:
    before = idle(server)
    server.text(PROMPT, 1)
    after = shown_once(server, lambda s: s.ended() > before.ended(), "the end")
    first, between = "flashinfer_backend_time_to_first_token_seconds_count", HISTOGRAMS[3] + "_count"
    assert after.get(first) == before.get(first) + 1
    assert after.get(between) == before.get(between)


def test_gauges_follow_a_sequence_whose_client_leaves(server: Server) -> None:
    before = idle(server)
    with leaving(server, 500):
        during = shown_once(
            server, lambda s: s.requests("active") == 1 and s.blocks("used") > 0, "a sequence"
        )
        assert during.blocks("used") + during.blocks("free") == BLOCKS
        assert during.blocks("fraction") == pytest.approx(during.blocks("used") / BLOCKS)
    after = shown_once(server, lambda s: s.ended("cancelled") == before.ended("cancelled") + 1, "the end")
    assert after.ended() == before.ended() + 1
    after = idle(server)
    assert after.blocks("free") == BLOCKS and after.blocks("fraction") == 0
    assert after.requests("scheduled") == after.requests("waiting") == 0
    tokens = "nv_llm_output_token_len_sum"
    assert 0 < after.get(tokens) - before.get(tokens) < 500


def test_stop_words_and_mistakes_are_told_apart(server: Server) -> None:
    before = idle(server)
    full = server.text(PROMPT, 40)
    server.text(PROMPT, 40, stop_words=[full[17:23]])
    assert server.post({"text_input": PROMPT, "max_tokens": 0})[0] == 400
    after = shown_once(server, lambda s: s.ended() == before.ended() + 3, "three ends")
    assert [after.ended(r) - before.ended(r) for r in ("length", "stop", "refused")] == [1, 1, 1]


def test_prefix_cache_hits(server: Server) -> None:
    name = "flashinfer_backend_prefix_cache_hit_tokens_total"
    before = idle(server)
    body = {
        "text_input": "A bird, a fish and a frog met. " * 8,
        "max_tokens": 4,
        "return_num_input_tokens": True,
    }
    first = server.post(body)[1]
    again = server.post(body)[1]
    assert first["text_output"] == again["text_output"]
    after = shown_once(server, lambda s: s.blocks("reused") > before.blocks("reused"), "a hit")
    # All full blocks but the one with the last token, which has to be computed.
    assert after.get(name) - before.get(name) == (first["num_input_tokens"] - 1) // 16 * 16 > 0


def test_preemptions(server: Server) -> None:
    name = "flashinfer_backend_preemptions_total"
    before = idle(server)
    threads = [
        threading.Thread(target=server.text, args=(f"{PROMPT} {word}", 400), kwargs=ENDLESS)
        for word in ("in", "on")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = shown_once(server, lambda s: s.ended("length") == before.ended("length") + 2, "both ends")
    assert after.get(name) > before.get(name)


def test_base_metrics_of_the_four_models_agree(server: Server) -> None:
    before = idle(server)
    for _ in range(4):
        server.text(PROMPT, 3)
    after = idle(server)
    for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count"):
        moved = {model: after.get(name, model) - before.get(name, model) for model in MODELS}
        assert moved["ensemble"] == moved["preprocessing"] == moved["llm"] == 4, name
        assert moved["postprocessing"] >= 4, name  # also llm's questions whether a client has left
    for model in MODELS:
        assert after.get("nv_inference_pending_request_count", model) == 0
        failures = "nv_inference_request_failure"
        assert after.get(failures, model) == before.get(failures, model)
        assert after.get("nv_inference_request_duration_us", model) > before.get(
            "nv_inference_request_duration_us", model
        )


def load_report(text: str) -> dict[str, float]:
    """What a server with load reports makes of its metrics: its pattern takes plain decimals only, and
    the last matching series of each kind wins."""
    found = re.findall(r"nv_trt_llm_kv_cache_block_metrics(?:{(.*?)})(?:\s*)(\d+(?:\.\d+)?)", text)
    values = {dict(LABEL.findall(labels))["kv_cache_block_type"]: float(value) for labels, value in found}
    return {
        "kv_cache_utilization": values["used"] / values["max"],
        "max_token_capacity": values["max"] * values["tokens_per"],
    }


CAPACITY = {"kv_cache_utilization": 0.0, "max_token_capacity": 16.0 * BLOCKS}


def test_load_report_of_the_metrics(server: Server) -> None:
    idle(server)
    assert load_report(scrape(server)) == CAPACITY


def test_load_report_in_the_response_header(server: Server) -> None:
    request = urllib.request.Request(
        f"{server.url}/v2/models/ensemble/generate",
        json.dumps({"text_input": PROMPT, "max_tokens": 2}).encode(),
        {"endpoint-load-metrics-format": "json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        report = answer.headers["endpoint-load-metrics"]
    if report is None:
        pytest.skip("this server sends no load reports, which are younger than release 24.10 (2.51)")
    assert json.loads(report.removeprefix("JSON "))["named_metrics"].keys() == CAPACITY.keys()


def expressions(node: Any) -> Iterator[str]:
    """Every PromQL expression in a dashboard."""
    if isinstance(node, dict):
        yield from (node[key] for key in ("expr", "definition") if key in node)
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from expressions(child)


def test_the_dashboard_uses_metrics_that_exist(server: Server) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) and dashboard["title"]
    series = shown(server).series
    used = set()
    for expression in expressions(dashboard):
        assert expression.count("(") == expression.count(")"), expression
        names = re.findall(r"\b(?:nv|flashinfer)_\w+", expression)
        assert names, expression
        used.update(names)
        for name, labels in re.findall(r"\b((?:nv|flashinfer)_\w+)\{(.*?)\}", expression):
            wanted = set(LABEL.findall(labels.replace("$model", "llm")))
            assert any(n == name and wanted <= their for n, their in series), expression
    assert used <= {name for name, _ in series} and len(used) > 10
    ours = {name for name in documented() if name.startswith("flashinfer_backend_")}
    assert ours <= {name.removesuffix("_bucket") for name in used}


def test_a_new_engine_shows_nothing_of_the_old_one(server: Server) -> None:
    old = server.engine_pid()
    with leaving(server, 500):
        before = shown_once(server, lambda s: s.blocks("used") > 0, "a sequence")
        os.kill(old, signal.SIGKILL)
    # The old engine's gauges go to 0 or vanish, unless the new one is there before we look.
    up = "flashinfer_backend_engine_up"

    def replaced(now: Shown) -> bool:
        return not any(now.named(up)) or now.general("iteration_counter") < before.general(
            "iteration_counter"
        )

    down = shown_once(server, replaced, "the end of the old engine's gauges")
    if not any(down.named(up)):
        for name, kind in down.types.items():
            if name.startswith("nv_trt_llm_"):
                assert kind == "gauge" and not any(down.named(name)), name
    wait_for(lambda: server.ready() and server.engine_pid() != old, "the new engine")
    after = idle(server)
    assert after.get(up) == 1
    assert after.general("iteration_counter") < before.general("iteration_counter")
    assert after.blocks("max") == BLOCKS
    count = after.ended()
    server.text(PROMPT, 3)
    shown_once(server, lambda s: s.ended() == count + 1, "the end")
    assert np.isfinite(list(shown(server).series.values())).all()


def writer(server: Server) -> int:
    """Pid of the llm instance that writes the engine's metrics."""
    inode = (server.run_dir / "metrics.lock").stat().st_ino
    (pid,) = re.findall(rf"FLOCK +ADVISORY +WRITE (\d+) \S+:{inode} ", Path("/proc/locks").read_text())
    return int(pid)


def test_another_instance_takes_over_from_the_writer(server: Server) -> None:
    name = "flashinfer_backend_generated_tokens_total"
    server.text(PROMPT, 9)
    before = idle(server)
    assert before.get(name) > 0
    pid = writer(server)
    os.kill(pid, signal.SIGKILL)
    after = idle(server)  # waits for newer reports
    assert writer(server) != pid
    assert after.get(name) == before.get(name)  # the new writer has not added the totals again
    answered = sum(server.post({"text_input": PROMPT, "max_tokens": 9})[0] == 200 for _ in range(6))
    assert answered > 0
    tokens = before.get(name) + 9 * answered
    assert shown_once(server, lambda s: s.get(name) >= tokens, "the tokens").get(name) == tokens
