# SPDX-License-Identifier: Apache-2.0
"""Keeps tritonserver serving: whatever of it dies, it is started again; the engine stays meanwhile.

tritonserver replaces no process that a model loses and goes on saying that it is ready, and this release has
no sound way to reload a model (docs/notes/triton-server.md). So the end of a stub, of the engine or of the
server itself has one answer: what is open gets an error, the server is ended with all its stubs, and started
again. Between, a maintenance server answers on the HTTP port.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from functools import partial

from flashinfer_backend.core.output import say
from flashinfer_backend.core.paths import SERVE_PID, processes_dir
from flashinfer_backend.launch.engine_watch import run_dirs
from flashinfer_backend.launch.environments import remove_environments
from flashinfer_backend.launch.openai_api import OpenAiApi
from flashinfer_backend.launch.server_run import ERRORS_S, TICK_S, Policy, ServerRun
from flashinfer_backend.transport.addresses import Address, reachable_at
from flashinfer_backend.transport.api_states import OPENAI, TRITON, ApiStates
from flashinfer_backend.transport.keeper_handle import end_engines
from flashinfer_backend.transport.maintenance_server import RESTARTING, maintenance_server
from flashinfer_backend.transport.restarts import Restarts
from flashinfer_backend.triton_server.freeze_guard import FreezeGuard

LOST = "A process of the server ended unexpectedly, and the server is being started again; please try again."
STOPPING = "The server is shutting down."


class Watchdog:
    """Runs one command line of tritonserver for as long as this process is not told to stop."""

    def __init__(
        self,
        args: list[str],
        env: dict[str, str],
        address: Address,
        port: int,
        policy: Policy,
        openai_api: OpenAiApi,
        ensembles: Sequence[str],
    ) -> None:
        """args: tritonserver and its arguments, listening at `address` with its HTTP port `port`. openai_api:
        the API on the same engines, which goes on whatever becomes of tritonserver. ensembles: those that
        clients ask, to be named once the server is ready."""
        self._args, self._policy, self._openai_api, self._ensembles = args, policy, openai_api, ensembles
        self._env = {**env, SERVE_PID: str(os.getpid())}
        self._address, self._port = address, port
        self._url = reachable_at(address, port)
        self._started_again = 0
        self._asked_at = 0.0  # when this process was told to stop; 0: not yet
        self._was_ready = False
        self._restarts = Restarts(policy.restarts)
        self._maintenance = contextlib.ExitStack()  # open from a death until the server is ready again

    def run(self) -> int:
        """Until SIGINT, SIGTERM or SIGHUP, or until starting again is given up; the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        # So that a single process of a model knows by this one whether it stood still alone.
        try:
            counting = FreezeGuard(processes_dir(os.getpid()))
        except OSError as error:
            _say(f"the server's processes have no place to meet: {error}")
            return 1
        names = (TRITON,) if self._openai_api.port is None else (TRITON, OPENAI)
        self._api_states = ApiStates(processes_dir(os.getpid()), names)
        try:
            self._openai_api.start(partial(self._api_states.note, OPENAI))
            while True:
                remove_environments()
                try:
                    server = ServerRun(self._args, self._env, self._url, self._policy)
                except OSError as error:  # no room for a process, say, or the program is being replaced
                    why = f"tritonserver cannot be started ({error})"
                    if not self._was_ready:
                        _say(why)
                        return 1
                    if not self._restart_after(None, why):
                        return 0 if self._asked_at else 1
                    continue
                reason = self._watch(server)
                if self._asked_at:
                    self._openai_api.stop()
                    server.stop(self._asked_at, STOPPING)
                    return 1 if self._openai_api.failed else 0
                self._started_again += 1
                self._api_states.note(TRITON, False, self._started_again)
                if not self._was_ready and (why := server.gave_up()):
                    _say(why)
                    return abs(server.end()) or 1
                if server.grown:  # it works: open requests end first, or have had their time
                    _say(f"{reason}; starting the server again")
                    self._answer_meanwhile()
                    server.stop(time.monotonic(), RESTARTING, end_s=ERRORS_S)
                elif not self._restart_after(server, reason):
                    return 0 if self._asked_at else 1
        finally:
            self._maintenance.close()
            self._openai_api.close()
            self._api_states.close()
            counting.close()
            end_engines(run_dirs())

    def _stop(self, *_: object) -> None:
        self._asked_at = self._asked_at or time.monotonic()

    def _watch(self, server: ServerRun) -> str:
        """Why the server has to be started again; nothing that counts when this process should end."""
        while not self._asked_at:
            if self._openai_api.failed:
                _say("the OpenAI API cannot serve, and the server ends")
                self._stop()
                break
            if reason := server.problem():
                return reason
            if not server.ready_at and server.look_ready():
                self._maintenance.close()
                self._api_states.note(TRITON, True, self._started_again)
                if self._was_ready:
                    _say("ready again")
                else:
                    _announce(self._url, self._openai_api.url, self._ensembles)
                self._was_ready = True
            server.wait(TICK_S)
        return ""

    def _answer_meanwhile(self) -> None:
        """Opens a maintenance server, later than whatever else listens; one that is open goes when it is
        there."""
        before, self._maintenance = self._maintenance, contextlib.ExitStack()
        self._maintenance.enter_context(maintenance_server(self._address, self._port))
        before.close()

    def _restart_after(self, server: ServerRun | None, reason: str) -> bool:
        """Ends what is left of a server, if it was started, and waits until the next one is due; False where
        none is."""
        lived = time.monotonic() - server.ready_at if server is not None and server.ready_at else 0.0
        delay = self._restarts.after(lived)
        if delay is not None:
            _say(f"{reason}; starting the server again" + (f" in {delay:g} s" if delay else ""))
            self._answer_meanwhile()
        else:
            _say(f"{reason}; started again {self._policy.restarts} times in a row, giving up")
        if server is not None:
            server.fail_open_requests(LOST)
            server.end()
        until = time.monotonic() + (delay or 0.0)
        while not self._asked_at and time.monotonic() < until:
            time.sleep(0.02)
        return delay is not None and not self._asked_at


def _say(text: str) -> None:
    say(f"serve: {text}")


def _announce(url: str, openai_url: str, ensembles: Sequence[str]) -> None:
    """openai_url: empty without the OpenAI API."""
    body = json.dumps({"text_input": "Once upon a time", "max_tokens": 32, "stream": True})
    openai = (
        f"The OpenAI API is at {openai_url}/v1, a page to try it at {openai_url}/\n" if openai_url else ""
    )
    tries = [f"  curl -N {url}/v2/models/{name}/generate_stream -d '{body}'\n" for name in ensembles]
    ready = "\n".join(["Ready. Try:\n", *(tries or [f"  curl {url}/v2\n"])])
    say(f"\n{ready}\n{openai}Ctrl-C stops the server.\n", 1)
