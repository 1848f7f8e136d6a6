# SPDX-License-Identifier: Apache-2.0
"""Waits for a server, and asks it what it is."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from client.wire import DEFAULT_MODELS, OPENAI, Load, authorization, error_message

LOOK_SECONDS = 2.0  # for one answer
SAY_SECONDS = 5.0  # between two lines about what is waited for


class NotReadyError(RuntimeError):
    """The server did not become ready in time; the message says what was asked and what it answered last."""


def wait_ready(
    load: Load, seconds: float, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
) -> None:
    """Returns once the server has the model ready; says what it waits for when that is not at once. Raises
    NotReadyError after so many seconds."""
    began = time.monotonic()
    said = 0.0
    while (problem := missing(load)) is not None:
        waited = time.monotonic() - began
        if waited >= seconds:
            raise NotReadyError(f"not ready after {seconds:g} s: {problem}")
        if waited - said >= SAY_SECONDS or said == 0.0:
            said = max(waited, 1e-9)
            say(f"waiting up to {seconds - waited:.0f} s more for {problem}")
        time.sleep(min(0.25, max(0.0, seconds - waited)))


def missing(load: Load) -> str | None:
    """What the server lacks to be ready, or None."""
    if load.backend == "triton-grpc":
        return _missing_grpc(load)
    model, base = load.asked_model, load.url.rstrip("/")
    # OpenAI servers have /v1/models in common, no path of health.
    path = "/v1/models" if load.backend in OPENAI else f"/v2/models/{model}/ready"
    if load.endpoint is not None and load.backend not in OPENAI:
        path = "/v2/health/ready"  # a path of its own may be of another model
    try:
        _get(base + path, load.api_key)
    except urllib.error.HTTPError as error:
        where = base + path
        if load.backend not in OPENAI and load.endpoint is None:
            # Triton answers the same there for a model that it lacks. The model's own path says it.
            asked = _refusal(base + f"/v2/models/{model}", load.api_key)
            where, error = (base + f"/v2/models/{model}", asked) if asked else (where, error)
        text = error_message(error.read().decode(errors="replace"))
        has = ""
        if load.backend not in OPENAI and error.code == 404:
            names = ensembles(base, load.api_key)
            has = f"; its ensembles are: {', '.join(names)} (--model)" if names else ""
        return f"{where}: HTTP {error.code} {text}".rstrip() + has
    except (OSError, ValueError) as error:
        return f"{base}{path}: {getattr(error, 'reason', error) or type(error).__name__}"
    return None


def first_model(url: str, api_key: str | None = None) -> str:
    """The first model that an OpenAI server lists. Raises OSError or ValueError."""
    return listed_models(url, api_key)[0]


def listed_models(url: str, api_key: str | None = None) -> list[str]:
    """The models that an OpenAI server lists, at least one. Raises OSError or ValueError."""
    listed = json.loads(_get(url.rstrip("/") + "/v1/models", api_key))
    try:
        names = [str(model["id"]) for model in listed["data"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise ValueError(f"{url}/v1/models lists no model; name one with --model")
    return names


def ensembles(url: str, api_key: str | None = None) -> list[str]:
    """The ensembles of a Triton server over HTTP; none where it does not say."""
    base, found = url.rstrip("/"), []
    try:
        for entry in json.loads(_get(f"{base}/v2/repository/index", api_key, b"{}")):
            config = json.loads(_get(f"{base}/v2/models/{entry['name']}/config", api_key))
            if "ensemble_scheduling" in config:
                found.append(str(entry["name"]))
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return found


def first_ensemble(url: str, api_key: str | None = None) -> str:
    """The default one where the server has it, or says nothing; else the first that it has."""
    names, default = ensembles(url, api_key), DEFAULT_MODELS["triton"]
    return default if default in names or not names else names[0]


def tokenizer_folder(load: Load) -> str:
    """The tokenizer's folder as the server names it: `tokenizer_dir` of the first step of a Triton ensemble,
    `root` of an OpenAI server's model, as vLLM lists it. Raises OSError, or ValueError without
    one."""
    told: Any = None
    model = load.asked_model
    if load.backend == "triton-grpc":
        import tritonclient.grpc as triton

        try:
            with triton.InferenceServerClient(load.target) as client:
                config = client.get_model_config(model, client_timeout=LOOK_SECONDS).config
                first = config.ensemble_scheduling.step[0].model_name
                config = client.get_model_config(first, client_timeout=LOOK_SECONDS).config
                told = config.parameters["tokenizer_dir"].string_value
        except (triton.InferenceServerException, IndexError):
            pass  # no such model, or no ensemble
    else:
        base = load.url.rstrip("/")
        path = "/v1/models" if load.backend in OPENAI else f"/v2/models/{model}/config"
        try:
            answer: Any = json.loads(_get(base + path, load.api_key))
            if load.backend in OPENAI:
                models = {model["id"]: model.get("root") for model in answer["data"]}
                told = models[load.model or next(iter(models))]
            else:
                first = answer["ensemble_scheduling"]["step"][0]["model_name"]
                answer = json.loads(_get(f"{base}/v2/models/{first}/config", load.api_key))
                told = answer["parameters"]["tokenizer_dir"]["string_value"]
        except (urllib.error.HTTPError, LookupError, TypeError, AttributeError, StopIteration):
            pass  # no such model, no ensemble, or another kind of server
    if not told or not isinstance(told, str):
        raise ValueError("the server does not name its tokenizer's folder: give it by --tokenizer FOLDER")
    return told


def server_version(load: Load) -> str:
    """Name and version as the server tells them, or "unknown"."""
    base = load.url.rstrip("/")
    try:
        if load.backend == "triton-grpc":
            import tritonclient.grpc as triton

            with triton.InferenceServerClient(load.target) as client:
                told = client.get_server_metadata(client_timeout=LOOK_SECONDS)
                return f"{told.name} {told.version}"
        if load.backend in OPENAI:
            listed: Any = json.loads(_get(base + "/v1/models", load.api_key))
            owner = listed["data"][0].get("owned_by", "")
            try:  # vLLM and others have it
                version = json.loads(_get(base + "/version", load.api_key))["version"]
            except (OSError, ValueError, KeyError):
                version = ""
            return f"{owner} {version}".strip() or "unknown"
        answer: Any = json.loads(_get(base + "/v2", load.api_key))
        return f"{answer.get('name', '')} {answer['version']}".strip()
    except Exception:  # of several libraries; the answer is a line of a report
        return "unknown"


def _refusal(url: str, api_key: str | None) -> urllib.error.HTTPError | None:
    try:
        _get(url, api_key)
    except urllib.error.HTTPError as error:
        return error
    except OSError:
        pass
    return None


def _missing_grpc(load: Load) -> str | None:
    import tritonclient.grpc as triton

    def is_ensemble(client: Any, name: str) -> bool:
        config = client.get_model_config(name, client_timeout=LOOK_SECONDS).config
        return bool(config.ensemble_scheduling.step)

    model = load.asked_model
    try:
        with triton.InferenceServerClient(load.target) as client:
            if client.is_model_ready(model, client_timeout=LOOK_SECONDS):
                return None
            index = client.get_model_repository_index(client_timeout=LOOK_SECONDS)
            known = [each.name for each in index.models]
            has = ""
            if model not in known and (there := [name for name in known if is_ensemble(client, name)]):
                has = f"; its ensembles are: {', '.join(there)} (--model)"
            return f"model {model!r} at gRPC {load.target}: not ready, or not there{has}"
    except triton.InferenceServerException as error:
        return f"gRPC {load.target}: {str(error.message() or error).splitlines()[0][:200]}"


def _get(url: str, api_key: str | None, body: bytes | None = None) -> bytes:
    """The answer to a GET, or to a POST of `body`."""
    request = urllib.request.Request(url, body, authorization(api_key))
    try:
        with urllib.request.urlopen(request, timeout=LOOK_SECONDS) as answer:
            return bytes(answer.read())
    except http.client.HTTPException as error:
        raise OSError(f"no answer of an HTTP server ({type(error).__name__})") from None
