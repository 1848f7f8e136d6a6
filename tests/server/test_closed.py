# SPDX-License-Identifier: Apache-2.0
"""What clients and other users of the machine may not do, and how it is opened."""

import json
import stat
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from asking import PROMPT
from running import Server, fetch, running
from tritonclient.utils import InferenceServerException

from flashinfer_backend.launch.launcher import CLOSED, UNSENDABLE

PATHS = {
    "shared-memory": "v2/systemsharedmemory/status",
    "trace": "v2/trace/setting",
    "logging": "v2/logging",
}


def get(server: Server, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    status, _, text = fetch(f"{server.url}/{path}", body, headers)
    return status, text


@pytest.mark.parametrize("name", CLOSED)
def test_apis_are_closed_over_http_whatever_key_is_sent(server: Server, name: str) -> None:
    key, _, value = UNSENDABLE.partition("=")
    assert get(server, PATHS[name])[0] == 403
    assert get(server, PATHS[name], **{key.partition(":")[0]: value})[0] == 403
    if name != "shared-memory":
        assert get(server, PATHS[name], b"{}")[0] == 403


def test_apis_are_closed_over_grpc(server: Server) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for call in (
            client.get_system_shared_memory_status,
            client.get_cuda_shared_memory_status,
            client.get_trace_settings,
            client.get_log_settings,
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
            key, _, value = UNSENDABLE.partition("=")
            with pytest.raises(InferenceServerException, match=r"[Ii]llegal|restricted|metadata"):
                call(headers={f"triton-grpc-protocol-{key}": value})


def test_models_are_listed_and_nobody_loads_them(server: Server) -> None:
    status, text = get(server, "v2/repository/index", b"{}")
    models = {entry["name"]: entry["state"] for entry in json.loads(text)}
    names = ("ensemble", "llm", "postprocessing", "preprocessing")
    assert status == 200 and models == dict.fromkeys(names, "READY")
    for verb in ("load", "unload"):
        status, text = get(server, f"v2/repository/models/llm/{verb}", b"{}")
        assert status != 200 and "not allowed" in text
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert len(client.get_model_repository_index().models) == 4
        with pytest.raises(InferenceServerException, match="not allowed"):
            client.unload_model("llm")
    assert server.text(PROMPT, 4)


def test_other_users_can_read_neither_shared_memory_nor_files(server: Server) -> None:
    regions = list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))
    assert regions and {stat.S_IMODE(path.stat().st_mode) for path in regions} == {0o600}
    files = [path for path in server.run_dir.rglob("*") if path.is_file()]
    assert files and not any(path.stat().st_mode & 0o077 for path in [*files, server.run_dir.parent])


SMALL = """backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""


def test_an_api_is_opened_by_name(tmp_path: Path) -> None:
    version = tmp_path / "repository/small/1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(SMALL)
    (version / "model.py").write_text("class TritonPythonModel:\n    def execute(self, requests): ...\n")
    options = ["--open", "shared-memory", "--open", "logging"]
    with running(tmp_path / "repository", tmp_path, options=options) as server:
        assert get(server, PATHS["shared-memory"])[0] == 200
        assert get(server, PATHS["logging"])[0] == 200
        assert get(server, PATHS["trace"])[0] == 403


def test_requests_that_need_a_deep_stack_do_not_end_the_server(server: Server) -> None:
    """A megabyte of brackets, which is what a proxy lets through (docs/security.md), and large bodies of
    the content type that curl -d sends."""
    (tritonserver,) = server.matching("bin/tritonserver")
    path, form = "v2/models/ensemble/generate", "application/x-www-form-urlencoded"
    for depth in (50_000, 500_000):
        body = b'{"max_tokens": 1, "text_input": ' + b"[" * depth + b"]" * depth + b"}"
        assert get(server, path, body, **{"Content-Type": "application/json"})[0] == 400
    for letter in (b"a", b"&"):
        body = b'{"max_tokens": 1, "text_input": "' + letter * (5 << 20) + b'"}'
        assert get(server, path, body, **{"Content-Type": form})[0] == 400
    assert server.matching("bin/tritonserver") == [tritonserver] and server.text(PROMPT, 4)
