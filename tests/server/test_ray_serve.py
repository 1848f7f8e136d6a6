# SPDX-License-Identifier: Apache-2.0
"""Servers on a Ray cluster of two nodes, where Ray is installed (pip install 'ray[serve]')."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ports import free_ports

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
pytestmark = pytest.mark.timeout(400)
STORE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
TOKENS = 150


class Cluster:
    """Two nodes with room for one server each, and Ray's HTTP port on the first one."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        from flashinfer_backend.ray_serve import Options, app

        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        room = {"num_cpus": 2, "resources": {"room": 1}, **STORE}
        self.nodes = Cluster(
            initialize_head=True, head_node_args={**room, "resources": {"room": 1, "head": 1}}
        )
        self.second = self.nodes.add_node(**room)
        ray.init(self.nodes.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        knobs = ["device=cpu", "max_num_seqs=1", "max_tokens_in_paged_kv_cache=4096"]
        options = Options(
            model="bundled", arguments=["--set", *knobs], gpus=0, cpus=0, resources={"room": 1},
            max_servers=2, waiting_per_server=2, upscale_delay_s=1, api_resources={"head": 0.1},
        )  # fmt: skip
        serve.run(app(options), route_prefix="/")

    def ask(self, number: int, stream: bool = False) -> tuple[str, str]:
        """The node and the text of an answer of TOKENS tokens; "" for one that was cut off."""
        messages = [{"role": "user", "content": f"Tell me story {number}."}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": stream}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            node = answer.headers["x-ray-node"]
            try:
                lines = answer.read().decode()
            except OSError:
                return node, ""
            except Exception as error:  # http.client's own, of a body that ends early
                assert type(error).__name__ == "IncompleteRead"
                return node, ""
        if not stream:
            return node, json.loads(lines)["choices"][0]["message"]["content"]
        *chunks, end = [line.removeprefix("data: ") for line in lines.split("\n\n") if line] or [""]
        if end != "[DONE]":
            return node, ""
        return node, "".join(
            json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks
        )

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self.nodes.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def test_servers_follow_the_queue_and_a_lost_node_takes_only_its_own_answers(cluster: Cluster) -> None:
    expected = {number: cluster.ask(number)[1] for number in range(4)}
    assert cluster.ask(1, stream=True)[1] == expected[1], "a stream says the same"
    deadline = time.monotonic() + 180
    with ThreadPoolExecutor(12) as pool:
        served: dict[int, str] = {}
        while len(set(served.values())) < 2:  # one server, with one slot, until the queue asks for another
            assert time.monotonic() < deadline, "no second server came"
            served = dict(zip(range(24), (node for node, _ in pool.map(cluster.ask, range(24))), strict=True))

        # Prompts that begin alike go to one server.
        again = dict(zip(range(24), (node for node, _ in pool.map(cluster.ask, range(24))), strict=True))
        assert again == dict(
            zip(range(24), (node for node, _ in pool.map(cluster.ask, range(24))), strict=True)
        )

        answers = [pool.submit(cluster.ask, number % 4, True) for number in range(24)]
        time.sleep(1)
        lost = cluster.second.node_id
        cluster.nodes.remove_node(cluster.second, allow_graceful=False)
        for number, answer in enumerate(answers):
            node, text = answer.result()
            if node != lost:
                assert text == expected[number % 4]
    assert cluster.ask(2)[1] == expected[2], "the other server goes on"


def test_a_chats_turns_and_alike_prompts_have_one_beginning() -> None:
    from flashinfer_backend.ray_serve import beginning

    turns: list[dict[str, str]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    more = [*turns, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Well?"}]
    first, second = (beginning(json.dumps({"messages": messages}).encode()) for messages in (turns, more))
    assert first == second and "Hi" in first
    assert beginning(b"no JSON") == beginning(b"[1]") == ""
    assert beginning(b'{"prompt": "Once"}') != beginning(b'{"prompt": "Twice"}')
