# SPDX-License-Identifier: Apache-2.0
"""An application for Ray Serve: servers of the OpenAI API on the nodes of a Ray cluster, each with its GPUs.

    serve run flashinfer_backend.ray_serve:app model=/models/NAME max_servers=4

A server is a replica of the deployment Server: `python -m flashinfer_backend.openai` on its node, which needs
this package and the checkpoint. The deployment Proxy takes requests on Ray's HTTP port and passes them on. It
names the beginning of each prompt as the session, so Ray's ConsistentHashRouter sends prompts that begin
alike to one server, whose prefix cache has them.
"""

import asyncio
import hashlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import ray
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from flashinfer_backend.core.parent import end_with_parent

START_S = 1800.0  # the first start on a GPU compiles kernels
TRIES = 3  # of a request whose server ended before its first byte
PREFIX_CHARACTERS = 1024  # of a prompt by which a server is chosen: a system prompt and how a chat begins
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
NOT_PASSED_ON = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")


@dataclass
class Call:
    """An HTTP request. `prompt` is what a router reads."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)
    prompt: str = field(repr=False)


class Options(BaseModel, extra="forbid"):
    """Arguments of the application, given as NAME=VALUE."""

    model: str  # checkpoint folder, on every node
    arguments: list[str] = []  # further ones of flashinfer_backend.openai
    min_servers: int = Field(1, ge=1)
    max_servers: int = Field(1, ge=1)
    gpus: float = Field(1, ge=0)  # and CPUs and Ray's own resources that each server takes of a node
    cpus: float = Field(1, ge=0)
    resources: dict[str, float] = {}
    waiting_per_server: float = Field(8, gt=0)  # sequences in the queue beyond which a server is added
    upscale_delay_s: float = Field(10, ge=0)
    downscale_delay_s: float = Field(600, ge=0)
    max_ongoing_requests: int = Field(1024, ge=1)  # of a server: its own queue holds what does not run
    proxies: int = Field(1, ge=1)  # at most one a node
    proxy_resources: dict[str, float] = {}
    # A class of a request router, such as ray.serve.llm.request_router.PrefixCacheAffinityRouter.
    router: str = ROUTER


class Server:
    """A server of the OpenAI API as a child process; it ends with this replica."""

    async def __init__(self, model: str, arguments: list[str]) -> None:  # type: ignore[misc]  # Ray awaits it
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
        )
        command = [sys.executable, "-m", "flashinfer_backend.openai", "--model", model, "--port", str(port)]
        self._process = subprocess.Popen([*command, *arguments], preexec_fn=end_with_parent)
        until = asyncio.get_running_loop().time() + START_S
        while not await self._is_ready():
            if self._process.poll() is not None or asyncio.get_running_loop().time() > until:
                self._process.terminate()
                raise RuntimeError(f"the server of {model} did not become ready; its log says why")
            await asyncio.sleep(0.5)

    async def _is_ready(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def __call__(self, call: Call) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """Status and headers, then the body as it comes."""
        async with self._session.request(
            call.method, self._url + call.path, headers=call.headers, data=call.body
        ) as answer:
            headers = {
                name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON
            }
            yield answer.status, headers | {"x-ray-node": ray.get_runtime_context().get_node_id()}
            async for chunk in answer.content.iter_any():
                yield chunk

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Sequences that wait for a slot, and those that have one."""
        async with self._session.get(f"{self._url}/metrics") as answer:
            text = await answer.text()
        found = {
            name: re.findall(rf"^\w*requests_{name}(?:{{.*}})? (\S+)$", text, re.M)
            for name in ("waiting", "running")
        }
        return {name: sum(map(float, values)) for name, values in found.items()}

    def check_health(self) -> None:
        """Ray replaces a replica whose process has ended; an engine that ends is restarted by the server."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server has ended with status {self._process.returncode}")

    async def __del__(self) -> None:
        self._process.terminate()
        await self._session.close()


class ByQueue:
    """A policy of Ray's autoscaling: a server more while many sequences wait, one less while one idles."""

    def __init__(self, waiting_per_server: float) -> None:
        self._most = waiting_per_server

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """The wanted number of servers, within whose limits and delays Ray asks again."""
        found, servers = ctx.aggregated_metrics or {}, ctx.target_num_replicas
        waiting, running = (sum(found.get(name, {}).values()) for name in ("waiting", "running"))
        if waiting > self._most * servers:
            return ctx.current_num_replicas + 1, {}
        return (servers - 1 if waiting == 0 and running < servers else servers), {}


def beginning(body: bytes) -> str:
    """What the next turn of a request's chat begins with as well; of other prompts the first characters."""
    try:
        asked = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(asked, dict):
        return ""
    prompt = asked.get("messages") or asked.get("input") or asked.get("prompt") or ""
    if isinstance(prompt, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in prompt]
        prompt = prompt[: roles.index("user") + 1] if "user" in roles else prompt
    return json.dumps([asked.get("system"), asked.get("instructions"), prompt])[:PREFIX_CHARACTERS]


class Proxy:
    """Passes requests on to the servers, and their answers back as they come."""

    def __init__(self, servers: Any) -> None:
        self._servers = servers.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """An answer that has begun ends with its server; one that has not is asked for again."""
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in NOT_PASSED_ON}
        prompt = beginning(body)
        call = Call(request.method, path, headers, body, prompt)
        session = hashlib.sha256(prompt.encode()).hexdigest() if prompt else ""
        for _ in range(TRIES):
            parts = self._servers.options(session_id=session).remote(call)
            try:
                status, headers = await anext(parts)
                return StreamingResponse(parts, status, headers)
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError) as error:
                reason = type(error).__name__
        message = f"the servers that were asked ended before they answered ({reason}); send it again"
        return JSONResponse({"error": {"message": message, "type": "server_error"}}, 503)


def app(args: Options) -> serve.Application:
    """The application, by `serve run` or in a file of Ray Serve."""
    servers = serve.deployment(
        Server,
        max_ongoing_requests=args.max_ongoing_requests,
        ray_actor_options={"num_gpus": args.gpus, "num_cpus": args.cpus, "resources": args.resources},
        health_check_period_s=5,
        health_check_timeout_s=20,
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_servers,
            max_replicas=args.max_servers,
            upscale_delay_s=args.upscale_delay_s,
            downscale_delay_s=args.downscale_delay_s,
            metrics_interval_s=2,
            look_back_period_s=4,
            policy=AutoscalingPolicy(
                policy_function=ByQueue, policy_kwargs={"waiting_per_server": args.waiting_per_server}
            ),
        ),
        request_router_config=RequestRouterConfig(request_router_class=args.router),
    ).bind(args.model, args.arguments)
    return serve.deployment(
        Proxy,
        num_replicas=args.proxies,
        max_replicas_per_node=1,
        max_ongoing_requests=args.max_ongoing_requests * args.max_servers,
        ray_actor_options={"num_cpus": 0, "resources": args.proxy_resources},
    ).bind(servers)
