# SPDX-License-Identifier: Apache-2.0
"""The page at / in a real browser, where there is one."""

import base64
import json
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAiServer
from running import TIMEOUT_S, wait_for

from ports import free_ports

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id in WebDriver's JSON


class Browser:
    """A session of headless Chromium, driven by the WebDriver protocol."""

    def __init__(self, folder: Path) -> None:
        assert DRIVER and CHROMIUM
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        log = (folder / "chromedriver.log").open("w")
        self._driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=subprocess.STDOUT)
        wait_for(lambda: _listens(port), "chromedriver")
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {
            "binary": CHROMIUM,
            "args": [*arguments, "--window-size=1200,800", f"--user-data-dir={folder / 'profile'}"],
        }
        capabilities = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._session = "/session/" + self._call("/session", capabilities)["sessionId"]

    def _call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        with urllib.request.urlopen(request, timeout=90) as answer:
            return json.loads(answer.read())["value"]

    def open(self, url: str) -> None:
        self._call(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._call(f"{self._session}/execute/sync", {"script": script, "args": []})

    def type(self, css: str, text: str) -> None:
        found = self._call(f"{self._session}/element", {"using": "css selector", "value": css})[ELEMENT]
        self._call(f"{self._session}/element/{found}/value", {"text": text})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call(f"{self._session}/screenshot")))

    def close(self) -> None:
        try:
            self._call(self._session, method="DELETE")
        finally:
            self._driver.terminate()
            self._driver.wait(TIMEOUT_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (DRIVER and CHROMIUM):
        pytest.skip("no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


def test_a_chat_in_the_page(api: OpenAiServer, browser: Browser, tmp_path: Path) -> None:
    _open_page(api, browser)
    assert browser.run("return document.activeElement.id") == "prompt"
    for name, value in {"temperature": 0, "seed": 3, "max_tokens": 30}.items():
        slide = f"e.value = {value}; e.dispatchEvent(new Event('input'))"
        browser.run(f"const e = document.getElementById('{name}'); {slide}")
    browser.run("document.getElementById('system').value = 'Speak plainly.'")
    browser.type("#prompt", "Why is the sky blue?\n")
    wait_for(lambda: "tokens in" in _text(browser, "#figures"), "the answer")
    messages = [{"role": "system", "content": "Speak plainly."}]
    messages += [{"role": "user", "content": "Why is the sky blue?"}]
    more = {"temperature": 0.0, "seed": 3, "max_tokens": 30}
    _, _, answer = api.call("/v1/chat/completions", {"messages": messages, **more})
    content = answer["choices"][0]["message"]["content"]
    assert _text(browser, ".assistant") == content.lstrip()
    assert browser.run("return messages[1].content") == content
    figures = _text(browser, "#figures")
    assert figures.startswith("tiny-chat") and "first token after" in figures and "tokens/s" in figures
    assert f"{answer['usage']['prompt_tokens']} tokens in" in figures
    assert browser.run("return document.querySelectorAll('.error').length") == 0

    # A second turn has the first in its prompt, and Stop ends it.
    browser.run("document.getElementById('max_tokens').value = 1500")
    browser.type("#prompt", "Tell me a story.\n")
    wait_for(lambda: _text(browser, ".message:nth-child(4)"), "the beginning of the second answer")
    browser.screenshot(tmp_path / "page.png")
    browser.run("document.getElementById('stop').click()")
    wait_for(lambda: browser.run("return !document.getElementById('send').disabled"), "the end")
    wait_for(lambda: api.metric("engine_requests_running") == 0, "nothing to run")
    assert browser.run("return messages.map(m => m.role).join()") == "user,assistant,user,assistant"


def test_the_bundled_model_is_said_to_be_tiny(api: OpenAiServer, browser: Browser) -> None:
    _open_page(api, browser)
    assert _text(browser, "#hint") == ""
    listed = json.dumps({"data": [{"id": "bundled"}]})
    browser.run(f"window.fetch = () => Promise.resolve(new Response({listed!r})); models()")
    wait_for(lambda: "is tiny" in _text(browser, "#hint"), "the hint")


def test_a_model_that_writes_no_text_says_so(api: OpenAiServer, browser: Browser) -> None:
    _open_page(api, browser)
    listed = json.dumps({"data": [{"id": "vectors", "task": "embed"}]})
    browser.run(f"window.fetch = () => Promise.resolve(new Response({listed!r})); models()")
    wait_for(lambda: "Send texts to /v1/embeddings" in _text(browser, "#figures"), "what the model is")
    assert browser.run("return document.getElementById('send').disabled")
    # Of several models, the first one that writes text is asked until another one is chosen.
    several = json.dumps({"data": [{"id": "vectors", "task": "embed"}, {"id": "bundled"}]})
    browser.run(f"window.fetch = () => Promise.resolve(new Response({several!r})); models()")
    wait_for(lambda: "is tiny" in _text(browser, "#hint"), "the other model")
    assert not browser.run("return document.getElementById('send').disabled")
    choose = "e.value = 'vectors'; e.dispatchEvent(new Event('change'))"
    browser.run(f"const e = document.getElementById('model'); {choose}")
    assert _text(browser, "#hint") == "" and "/v1/embeddings" in _text(browser, "#figures")
    assert browser.run("return document.getElementById('send').disabled")


def test_an_error_is_shown(api: OpenAiServer, browser: Browser) -> None:
    _open_page(api, browser)
    browser.run("document.getElementById('max_tokens').value = 99999")
    browser.type("#prompt", "Hi\n")
    wait_for(lambda: "maximum context length" in _text(browser, ".error"), "the error")
    wait_for(lambda: browser.run("return !document.getElementById('send').disabled"), "the end")
    # The next question is asked without the one that had no answer, which can be sent again.
    assert browser.run("return document.getElementById('prompt').value") == "Hi"
    assert browser.run("return messages.length") == 0


def test_an_error_of_a_proxy_is_told_in_words(api: OpenAiServer, browser: Browser) -> None:
    _open_page(api, browser)
    browser.run("window.fetch = () => Promise.resolve(new Response('<html>', {status: 502}))")
    browser.type("#prompt", "Hi\n")
    wait_for(lambda: "answered with status 502" in _text(browser, ".error"), "the error")
    browser.run("models()")
    wait_for(lambda: "answered with status 502" in _text(browser, "#figures"), "the error")


def test_a_new_chat_has_nothing_of_an_answer_that_still_ran(api: OpenAiServer, browser: Browser) -> None:
    _open_page(api, browser)
    browser.run("document.getElementById('max_tokens').value = 1500")
    browser.type("#prompt", "Tell me a story.\n")
    wait_for(lambda: _text(browser, ".assistant"), "the beginning of the answer")
    browser.run("document.getElementById('clear').click()")
    wait_for(lambda: browser.run("return !document.getElementById('send').disabled"), "the end")
    assert browser.run("return messages.length") == 0 and _text(browser, "#figures") == ""


def test_a_server_that_has_gone_is_told_in_words(api: OpenAiServer, browser: Browser) -> None:
    _open_page(api, browser)
    browser.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    browser.type("#prompt", "Hi\n")
    wait_for(lambda: "The server does not answer" in _text(browser, ".error"), "the error")


def _open_page(api: OpenAiServer, browser: Browser) -> None:
    browser.open(api.url + "/")
    wait_for(lambda: browser.run("return document.getElementById('model').value") == "tiny-chat", "models")


def _text(browser: Browser, css: str) -> str:
    return str(browser.run(f"const e = document.querySelector('{css}'); return e ? e.textContent : ''"))
