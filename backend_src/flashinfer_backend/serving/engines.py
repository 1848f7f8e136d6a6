# SPDX-License-Identifier: Apache-2.0
"""A model's engines, one or several, behind one set of calls for stubs and APIs."""

import contextlib
import os
import select
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from flashinfer_backend.core.paths import engine_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.serving.router import Router
from flashinfer_backend.transport import protocol, rundir
from flashinfer_backend.transport.endpoint import ENGINE_DOWN, LEADS, Endpoint, EngineDown, Sink
from flashinfer_backend.transport.keeper_handle import KeeperHandle
from flashinfer_backend.transport.peers import FAIL, STOP, PeerSocket

LOOK_AGAIN_S = 0.02


class Engines:
    """One process's links to all engines. Each has its own thread, so that no engine holds up another. In a
    stub a further thread receives messages of other stubs."""

    def __init__(
        self,
        run_dir: Path,
        count: int,
        keeper: KeeperHandle | None = None,
        reuse: bool = True,
        period_s: float = 0.1,
        on_stop: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """run_dir: the model's run directory. count: number of its engines. keeper: given by a stub; it
        starts the engines, and they end without it; None for a process that takes them as they are. reuse:
        whether engines keep prefixes. period_s: time between the engines' reports. on_stop: a stop request
        for this id reached some stub of the model.
        """
        self._keeper, self._on_stop = keeper, on_stop
        self._closed = False
        self._peers: PeerSocket | None = None
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if keeper is not None:
            with rundir.locked(run_dir):
                self._peers = PeerSocket(run_dir)
        self._pids = [0] * count  # of the engines that have reported
        self._endpoints: list[Endpoint] = []
        self._router = Router(self._endpoints, run_dir, reuse, period_s)
        for index in range(count):
            self._endpoints.append(
                Endpoint(
                    engine_dir(run_dir, index),
                    (lambda: None) if keeper is None else keeper.ensure,
                    on_status=partial(self._take_status, index),
                    on_load=partial(self._router.load_changed, index) if count > 1 else lambda: None,
                    index=index,
                    count=count,
                )
            )
        self._listener = threading.Thread(target=self._listen, name="peers", daemon=True)
        if self._peers is not None:
            self._listener.start()

    @property
    def up(self) -> bool:
        """Whether there is an engine that is ready."""
        return any(endpoint.up for endpoint in self._endpoints)

    @property
    def status(self) -> protocol.Status | None:
        """The latest report of an engine, for what all of them have in common; None before the first."""
        reports = [e.status for e in sorted(self._endpoints, key=lambda e: not e.up) if e.status is not None]
        return reports[0] if reports else None

    @property
    def statuses(self) -> list[protocol.Status | None]:
        """The latest report of each engine, None while it is not there."""
        return [endpoint.status if endpoint.up else None for endpoint in self._endpoints]

    def wait_ready(self) -> protocol.Status:
        """Waits until every engine is ready; of engines that are being restarted one suffices. Raises
        EngineStartError if an engine cannot start."""
        for endpoint in self._endpoints:
            if error := endpoint.wait_known():
                raise error
        while not self.up:
            for endpoint in self._endpoints:
                if endpoint.error is not None:
                    raise endpoint.error
            assert not self._closed, "closed before there was an engine"
            time.sleep(LOOK_AGAIN_S)
        assert self.status is not None
        return self.status

    def submit(
        self,
        sink: Sink,
        prompt: bytes,
        params: SamplingParams,
        share_prompt_with: int = 0,
        priority: int = 0,
        timeout_us: int = 0,
    ) -> int:
        """Hands a sequence to an engine and returns its handle; the arguments are Endpoint.submit's.
        Sequences that share a prompt go to one engine. Raises EngineDown where none is there."""
        rest = (params, share_prompt_with, priority, timeout_us)
        if len(self._endpoints) == 1:
            return self._endpoints[0].submit(sink, prompt, *rest)
        if share_prompt_with not in (0, LEADS):
            return self._of(share_prompt_with).submit(sink, prompt, *rest)
        tokens = np.frombuffer(prompt, "<i4")
        order, keys, cached = self._router.choose(tokens, params.adapter)
        down = EngineDown(ENGINE_DOWN)
        for index in order or [0]:  # where none is up, a link says why
            try:
                handle = self._endpoints[index].submit(sink, prompt, *rest, len(tokens) - cached[index])
            except EngineDown as error:  # since it was chosen
                down = error
            else:
                self._router.sent(index, keys)
                return handle
        raise down

    def refusal(self, count: int) -> str | None:
        """Why `count` sequences would not all be submitted now, or None if they would. Also None if there is
        no engine: submit reports that."""
        ready = [endpoint for endpoint in self._endpoints if endpoint.up]
        if not ready or sum(endpoint.room for endpoint in ready) >= count:
            return None
        return ready[0].refusal

    def profile(self, steps: int) -> dict[int, Future[protocol.Profiled]]:
        """Endpoint.profile of each engine that is there, by its number. Raises EngineDown where none is."""
        found = {}
        for index, endpoint in enumerate(self._endpoints):
            with contextlib.suppress(EngineDown):
                found[index] = endpoint.profile(steps)
        if not found:
            raise EngineDown(ENGINE_DOWN)
        return found

    def cancel(self, handle: int) -> None:
        """Asks a sequence's engine to end it; its sink gets FINISHED_CANCELLED if it still runs."""
        self._of(handle).cancel(handle)

    def freed(self, handle: int) -> None:
        self._of(handle).freed(handle)

    def tell_stop(self, request_id: str) -> None:
        """Makes every stub of the model, including this one, call on_stop(request_id), an id of at most 4096
        characters, which fit a message."""
        assert self._peers is not None, "only stubs stop each other's requests"
        self._peers.tell_all(STOP + request_id.encode())

    def close(self) -> None:
        """Ends the links; open sequences fail. The engines go with the last stub of the model."""
        self._closed = True
        for endpoint in self._endpoints:
            endpoint.close()
        self._router.close()
        os.eventfd_write(self._end, 1)
        if self._peers is not None:
            self._listener.join()
            self._peers.close()
        os.close(self._end)
        if self._keeper is not None:
            self._keeper.leave()

    def _of(self, handle: int) -> Endpoint:
        return self._endpoints[protocol.split_handle(handle)[1] % len(self._endpoints)]

    def _take_status(self, index: int, status: protocol.Status) -> None:
        if self._pids[index] != status.pid:
            self._pids[index] = status.pid
            self._router.engine_started()

    def _listen(self) -> None:
        assert self._peers is not None
        poller = select.poll()
        poller.register(self._peers.fileno(), select.POLLIN)
        poller.register(self._end, select.POLLIN)
        while self._end not in dict(poller.poll()):
            for message in self._peers.receive():
                try:
                    self._take_peer_message(message)
                except Exception:  # the next message may be one that is understood
                    traceback.print_exc()

    def _take_peer_message(self, message: bytes) -> None:
        kind, text = message[:1], message[1:].decode(errors="replace")  # any process of the user can send
        if kind == STOP:
            self._on_stop(text)
        elif kind == FAIL:
            for endpoint in self._endpoints:
                endpoint.refuse(text)
