# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API and tritonserver: one engine, two APIs."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from metering import idle, scrape, shown
from running import KEY, NGRAM, BothApis, both_running, build_repository, fetch, wait_for

from flashinfer_backend.openai.arguments import KEYS_VARIABLE

PROMPTS = ["Once upon a time", "The king said to his daughter that", "Why is the sky blue?\nAnswer:"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothApis]:
    folder = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS_VARIABLE, KEY)
        with both_running(build_repository(folder, *NGRAM), folder) as server:
            yield server


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_apis_give_the_same(both: BothApis, temperature: float) -> None:
    more = {"max_tokens": 24, "temperature": temperature, "seed": 11}
    for prompt in PROMPTS:
        body = {"text_input": prompt, "stream": False, "exclude_input_in_output": True, **more}
        if not temperature:
            del body["seed"]
        status, answer = both.post(body)
        assert status == 200, answer
        _, text = both.openai("/v1/completions", {"prompt": prompt, "return_token_ids": True, **more})
        (choice,) = json.loads(text)["choices"]
        assert choice["text"] == answer["text_output"]
        _, ids = both.openai("/tokenize", {"prompt": prompt + choice["text"]})
        assert choice["prompt_token_ids"] + choice["token_ids"] == json.loads(ids)["tokens"]


def test_one_engine_has_both_apis_requests(both: BothApis) -> None:
    assert len(both.matching("flashinfer_backend.engine")) <= 2, "the engine, and tee of its log"
    prompt = "A long story about a king and his three daughters. " * 8
    both.post({"text_input": prompt, "max_tokens": 2})
    _, text = both.openai("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64, "found by the other"


def test_drafts_are_counted_at_both_apis(both: BothApis) -> None:
    def counted() -> tuple[list[float], list[float]]:
        """Checked and accepted drafts, of tritonserver's metrics and of the API's."""
        names = [f"flashinfer_backend_{name}_total" for name in ("drafted_tokens", "accepted_draft_tokens")]
        api = both.openai("/metrics")[1]
        own = (f"flashinfer_backend_openai_engine_{name}_tokens" for name in ("drafted", "accepted"))
        found = (re.search(rf"^{name} (\S+)$", api, re.MULTILINE) for name in own)
        return [shown(both).get(name) for name in names], [float(each[1]) for each in found if each]

    idle(both)  # what earlier requests came to is counted
    wait_for(lambda: len({*map(tuple, counted())}) == 1, "both to know the same")
    before = counted()[0]
    body = {"prompt": "red blue green " * 20, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    details = json.loads(both.openai("/v1/completions", body)[1])["usage"]["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    drafted = accepted + details["rejected_prediction_tokens"]
    options = {"text_input": body["prompt"], "return_perf_metrics": True, "max_tokens": 40}
    answer = both.post(options)[1]
    drafted += answer["total_draft_tokens"]
    accepted += answer["total_accepted_draft_tokens"]
    assert drafted > accepted > 0
    off = both.openai("/v1/completions", body | {"speculative_decoding": False})[1]
    assert "accepted_prediction_tokens" not in json.dumps(json.loads(off)["usage"])
    after = [before[0] + drafted, before[1] + accepted]
    idle(both)
    wait_for(lambda: len({*map(tuple, counted())}) == 1, "both to know the same")
    assert counted()[0] == after, "these drafts and no others"


def test_tools_for_a_template_that_shows_none(both: BothApis) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    for choice in ("auto", "required"):
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "tool_choice": choice}
        status, answer = both.openai("/v1/chat/completions", body)
        message = json.loads(answer)["error"]["message"]
        assert (status, message) == (400, "the checkpoint's chat template makes no use of tools")


def workers(both: BothApis) -> list[int]:
    return sorted(process.pid for process in both.matching("flashinfer_backend.openai.worker"))


def api_metric(both: BothApis, api: str) -> float | None:
    """Whether an API is up, as tritonserver's metrics have it."""
    found = re.search(rf'api_up{{api="{api}"}} (\S+)', scrape(both))
    return float(found[1]) if found else None


def test_an_api_that_crashes_or_stops_comes_back_and_leaves_the_other_alone(both: BothApis) -> None:
    """Its process is killed twice and then stopped. Until it answers again, requests get an error that says
    so, and the other API's metrics show it."""
    servers = both.matching("bin/tritonserver")
    wait_for(lambda: api_metric(both, "openai") == api_metric(both, "triton") == 1.0, "both to be up")
    for number in [signal.SIGKILL] * 2 + [signal.SIGSTOP]:
        (before,) = wait_for(lambda: workers(both), "a process", 120)
        os.kill(before, number)
        wait_for(lambda old=before: old not in workers(both), "its end", 120)
        assert both.post({"text_input": "Once", "max_tokens": 1})[0] == 200
    status, answer = both.openai("/health")  # a second passes until the next start
    assert status == 503 and "being started again" in answer
    wait_for(lambda: api_metric(both, "openai") == 0.0, "the other API to say so")
    wait_for(lambda: both.openai("/health")[0] == 200, "the OpenAI API", 120)
    assert "has been stopped for 5 s: it is killed" in both.log
    assert both.matching("bin/tritonserver") == servers and "serve: ready again" not in both.log
    text = both.openai("/metrics")[1]
    assert 'api_up{api="triton"} 1.0' in text
    assert re.search(r'api_restarts_total{api="openai"} [3-9]', text)


def test_keys_are_in_no_environment_but_the_users_own(both: BothApis) -> None:
    """tritonserver, its stubs and the engine have none of them, nor have the API's processes."""
    assert fetch(f"http://127.0.0.1:{both.openai_port}/v1/models")[0] == 401
    found = {process: process.environ() for process in both.commands() if process.pid != both.launcher.pid}
    assert len(found) >= 7 and both.openai("/v1/models")[0] == 200
    assert not [process for process, environment in found.items() if KEYS_VARIABLE in environment]


def test_the_api_goes_on_while_tritonserver_is_started_again(both: BothApis) -> None:
    """The engine stays when a stub dies, so what the API has open must not notice, nor what comes next."""
    body = {"prompt": PROMPTS[0], "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    expected = both.openai("/v1/completions", body)
    assert expected[0] == 200
    engine, times = both.engine_pid(), both.log.count("serve: ready again")
    with ThreadPoolExecutor(1) as pool:
        meanwhile = pool.submit(both.openai, "/v1/completions", body)
        time.sleep(0.2)
        both.matching("/postprocessing/1/")[0].kill()
    wait_for(lambda: both.log.count("serve: ready again") > times, "tritonserver", 120)
    answers = expected, meanwhile.result(), both.openai("/v1/completions", body)
    texts = [json.loads(answer)["choices"][0]["text"] for status, answer in answers]
    assert texts[0] == texts[1] == texts[2] and both.engine_pid() == engine


def test_the_server_ends_with_both_apis(both: BothApis) -> None:
    """The last of them: it leaves no server."""
    assert both.matching("flashinfer_backend.openai.worker"), "it would be found"
    assert both.interrupt() == 0
    wait_for(lambda: not both.leftovers() and both.openai("/health")[0] == 0, "the end")
