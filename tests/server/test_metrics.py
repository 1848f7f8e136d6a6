# SPDX-License-Identifier: Apache-2.0
"""Which metrics there are: families, labels and buckets, the server's own, and what reads them."""

import json
import re

import pytest
from asking import PROMPT
from metering import BLOCKS, LABEL, documented, idle, scrape, shown, shown_once
from running import ROOT, Server, fetch

MODELS = ("ensemble", "preprocessing", "llm", "postprocessing")


def test_the_documented_families_are_those_that_are_shown(metered: Server) -> None:
    types = shown(metered).types
    ours = re.compile("nv_trt_llm_|nv_llm_|flashinfer_backend_")
    assert {name: kind for name, kind in types.items() if ours.match(name)} == documented()


def test_labels_and_buckets_of_tensorrt_llm(metered: Server) -> None:
    now = shown_once(metered, lambda s: s.blocks("max") > 0, "the engine's first report")
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


def test_base_metrics_of_the_four_models_agree(metered: Server) -> None:
    before = idle(metered)
    for _ in range(4):
        metered.text(PROMPT, 3)
    after = idle(metered)
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


def test_load_report_of_the_metrics(metered: Server) -> None:
    idle(metered)
    assert load_report(scrape(metered)) == CAPACITY


def test_load_report_in_the_response_header(metered: Server) -> None:
    body = json.dumps({"text_input": PROMPT, "max_tokens": 2}).encode()
    asked = {"endpoint-load-metrics-format": "json"}
    _, headers, _ = fetch(f"{metered.url}/v2/models/ensemble/generate", body, asked)
    report = headers["endpoint-load-metrics"]
    if report is None:
        pytest.skip("this server sends no load reports, which are younger than release 24.10 (2.51)")
    assert json.loads(report.removeprefix("JSON "))["named_metrics"].keys() == CAPACITY.keys()


def test_the_dashboard_shows_every_family_of_ours() -> None:
    """And none of other names. test_dashboard.py asks a Prometheus its queries, the OpenAI API's too."""
    text = (ROOT / "docs" / "grafana-dashboard.json").read_text()
    panels = [panel["id"] for panel in json.loads(text)["panels"]]
    assert len(set(panels)) == len(panels)
    ours = {name for name in documented() if name.startswith("flashinfer_backend_")}
    used = set(re.findall(r"\bflashinfer_backend_(?!openai_)\w+", text))
    assert len(ours) > 10 and ours <= {name.removesuffix("_bucket") for name in used}
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in used} <= ours  # also in its variables
