# SPDX-License-Identifier: Apache-2.0
"""Every query of the dashboard and of the autoscalers, asked of a Prometheus that scrapes real servers:
Triton's port twice, as it is and as if its series had a label `engine`, and the OpenAI API."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from asking import PROMPT
from openai_server import OpenAiServer
from running import ROOT, Server, wait_for

from ports import free_ports

DASHBOARD = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
PROMETHEUS = shutil.which("prometheus")
ON_A_GPU = re.compile(r"\b(?:nv_gpu_|DCGM_)")
# Series that are there once something has gone wrong.
ABSENT_WHILE_WELL = ("nv_inference_request_failure",)
OPENAI = "flashinfer_backend_openai_"

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's package prometheus")


def queries() -> list[str]:
    """PromQL of all panels but the OpenAI API's, and of the manifests that scale by a query."""
    found = [query for query in panels() if OPENAI not in query]
    (scaled,) = yaml.safe_load_all((ROOT / "docker/kubernetes-autoscaling.yaml").read_text())
    found += [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    _, served = yaml.safe_load_all((ROOT / "docker/kserve.yaml").read_text())
    metrics = served["spec"]["predictor"]["autoScaling"]["metrics"]
    return found + [each["external"]["metric"]["query"] for each in metrics]


def panels() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@contextlib.contextmanager
def scraping(folder: Path, *jobs: dict[str, Any]) -> Iterator[str]:
    """A Prometheus's address of queries."""
    (folder / "p.yml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": list(jobs)})
    )
    (port,) = free_ports(1)
    words = [PROMETHEUS, f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1/query?"
    finally:
        process.terminate()
        process.wait(120)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target = {"targets": [f"127.0.0.1:{server.metrics_port}"]}
    engines = {
        "job_name": "engines",
        "static_configs": [target | {"labels": {"instance": "engines"}}],
        "metric_relabel_configs": [{"target_label": "engine", "replacement": "1"}],
    }
    plain = {"job_name": "plain", "static_configs": [target]}
    with scraping(tmp_path_factory.mktemp("prometheus"), plain, engines) as url:
        # Rates are of what changes between two scrapes. The prompt is new, then known to the prefix cache.
        finished = "rate(flashinfer_backend_e2e_latency_seconds_count[30s]) > 0"
        wait_for(lambda: len(ask(url, "flashinfer_backend_engine_up")) == 2, "the first scrapes")
        for _ in range(2):
            server.text(PROMPT, 4)
        wait_for(lambda: len(ask(url, finished)) == 2, "rates")
        yield url


def ask(url: str, query: str) -> list[dict[str, Any]]:
    """The series of a query's answer; none while Prometheus starts."""
    try:
        with urllib.request.urlopen(url + urllib.parse.urlencode({"query": query}), timeout=120) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it starts
            return []
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:
        return []
    return list(found["data"]["result"])


def filled(query: str, instance: str = ".*", engine: str = ".*", api_model: str = ".*") -> str:
    """As Grafana asks it: All is `.*`."""
    names = {"$model": "llm", "$instance": instance, "$engine": engine}
    names |= {"$api_model": api_model, "$api": instance, "$__rate_interval": "30s"}
    for name, value in names.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


def test_every_query_has_data(prometheus: str) -> None:
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert variables["engine"]["allValue"] == variables["instance"]["allValue"] == ".*"
    for query in queries():
        found = ask(prometheus, filled(query))
        if not ON_A_GPU.search(query) and not any(name in query for name in ABSENT_WHILE_WELL):
            assert found, query


def test_every_query_of_the_openai_api_has_data(api: OpenAiServer, tmp_path: Path) -> None:
    asked = [query for query in panels() if OPENAI in query]
    assert len(asked) > 15
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert variables["api"]["allValue"] == variables["api_model"]["allValue"] == ".*"
    variable = variables["api"]["query"]["query"]
    series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable).groups()
    target = f"127.0.0.1:{api.port}"
    with scraping(tmp_path, {"job_name": "api", "static_configs": [{"targets": [target]}]}) as url:
        wait_for(lambda: [each["metric"][label] for each in ask(url, series)] == [target], "the first scrape")
        families = f"{OPENAI}sequences_finished_total", f"{OPENAI}errors_total"
        # A series begins with its first answer; rates are of what changes later.
        for wanted in (list(families), [f"rate({family}[30s]) > 0" for family in families]):
            for tokens, status in ((4, 200), (-1, 400)):
                assert api.call("/v1/completions", {"prompt": PROMPT, "max_tokens": tokens})[0] == status
            wait_for(lambda wanted=wanted: all(ask(url, query) for query in wanted), " and ".join(wanted))
        for query in asked:
            assert ask(url, filled(query)), query
            assert ask(url, filled(query, instance="127.*")), query
            assert not ask(url, filled(query, instance="other")), query
            if "$api_model" in query:  # which is a label where there are several
                assert not ask(url, filled(query, api_model="other")), query
        assert sum("$api_model" not in query for query in asked) == 1  # refusals are of no model


def test_a_chosen_engine_and_instance_narrow_every_query(prometheus: str) -> None:
    for query in queries():
        if "$engine" not in query:
            continue
        assert ask(prometheus, filled(query, engine="1")), query
        assert ask(prometheus, filled(query, instance="127.*")), query  # which has no label engine
        assert not ask(prometheus, filled(query, instance="127.*", engine="1")), query
        assert not ask(prometheus, filled(query, engine="2")), query


def test_the_engine_is_asked_of_the_families_that_have_its_label() -> None:
    section = (ROOT / "docs/metrics.md").read_text().partition("\n## Engine\n")[2].partition("\n## ")[0]
    labelled = set(re.findall(r"^\| ((?:nv|flashinfer)_\w+) \|", section, re.MULTILINE))
    assert len(labelled) > 8
    for query in queries():
        for name, labels in re.findall(r"\b((?:nv|flashinfer)_\w+)\{(.*?)\}", query):
            if "$model" in labels:  # autoscalers count all engines
                assert ("$engine" in labels) == (name in labelled), query


def test_the_variables_find_their_values(prometheus: str) -> None:
    for variable, values in (("instance", {"engines", "127"}), ("engine", {"1"})):
        (query,) = (v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["name"] == variable)
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        metrics = [each["metric"] for each in ask(prometheus, filled(series))]
        assert {m[label].partition(".")[0] for m in metrics if label in m} == values
