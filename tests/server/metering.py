# SPDX-License-Identifier: Apache-2.0
"""Reads the metrics port. The server behind it (the fixture `metered`) has a KV cache that two sequences can
fill."""

import contextlib
import re
from collections.abc import Callable, Iterator

from asking import PROMPT
from running import ROOT, Server, fetch, wait_for

ENDLESS = {"end_id": 1048576}
BLOCKS = 40
SERIES = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')


def metrics_port_open(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return bool(scrape(server))
    return False


def scrape(server: Server) -> str:
    return fetch(f"http://127.0.0.1:{server.metrics_port}/metrics")[2]


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
    with server.sent("ensemble/generate_stream", body) as client:
        assert b"text_output" in client.recv(65536) + client.recv(65536)
        yield


def documented() -> dict[str, str]:
    """Family and type of each row of the tables in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    return dict(re.findall(r"^\| ((?:nv_|flashinfer_)\w+) \| (\w+) \|", text, re.MULTILINE))
