# SPDX-License-Identifier: Apache-2.0
"""A real engine in a thread, spoken to over its real socket."""

import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

from editing import edit_config, edit_tensors
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.loop import EngineLoop
from flashinfer_backend.engine.start import Core, start
from flashinfer_backend.speculate.proposer import MakeProposer, Proposer
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.engine_socket import EngineSocket

TIMEOUT_S = 120


def make_prompts(count: int, longest: int = 100, vocab: int = 250) -> list[list[int]]:
    """Random ids of random lengths below `longest`."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


class Client:
    """A stub's side of the protocol, for one thread."""

    def __init__(self, run_dir: Path, loop: EngineLoop) -> None:
        self.loop = loop
        self.pid = os.getpid()
        self._next = 1
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(protocol.socket_address(run_dir))
        self._socket.send(protocol.encode(protocol.Hello(self.pid)))
        self.tokens: dict[int, list[int]] = {}
        self.code: dict[int, int] = {}
        self.failure: dict[int, protocol.Failure] = {}
        self.reports: dict[int, list[protocol.RowReport]] = {}
        self.statuses: list[protocol.Status] = []
        self.thread: threading.Thread | None = None

    def submit(self, prompt: list[int], params: SamplingParams, share_with: int | None = None) -> int:
        local_id, self._next = self._next, self._next + 1
        handle = protocol.make_handle(self.pid, local_id)
        share = 0 if share_with is None else protocol.make_handle(self.pid, share_with)
        data = np.array(prompt, "<i4").tobytes()
        self._socket.send(protocol.encode(protocol.Submit(handle, data, params, share, 0, 0)))
        self.tokens[local_id] = []
        return local_id

    def submit_together(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[int]:
        """Submit requests of which none is planned before all have come: steps then do not depend on how
        fast they come. One that waits for an adapter or for room for logits has come: steps free both."""
        scheduler, first = self.loop.scheduler, self._next
        handles = [protocol.make_handle(self.pid, first + i) for i in range(len(prompts))]
        plan = scheduler.schedule

        def schedule(*args: Any) -> Any:
            waiting = len(self.loop.adapters) + len(self.loop.logits)
            if len(set(handles) - scheduler.requests.keys()) > waiting:
                return None
            scheduler.schedule = plan
            return plan(*args)

        scheduler.schedule = schedule  # type: ignore[method-assign]
        return [self.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def cancel(self, local_id: int) -> None:
        self._socket.send(protocol.encode(protocol.Cancel(protocol.make_handle(self.pid, local_id))))

    def goodbye(self) -> None:
        self._socket.send(protocol.encode(protocol.Goodbye(self.pid)))

    def receive(self, timeout_ms: int = 1000) -> None:
        """Take in one message, if one comes."""
        if not self._socket.poll(timeout_ms):
            return
        kind, body, *rest = self._socket.recv_multipart()
        if kind == protocol.TOKENS:
            for local_id, token, code in protocol.unpack_tokens(body).tolist():
                assert local_id not in self.code, "tokens after the end of a sequence"
                if token != protocol.NO_TOKEN:
                    self.tokens[local_id].append(token)
                if code != protocol.RUNNING:
                    self.code[local_id] = code
            for report in protocol.unpack_reports(rest):
                self.reports.setdefault(report.local_id, []).append(report)
        elif kind == protocol.FAILURE:
            failure = protocol.decode_failure(body)
            self.failure[protocol.split_handle(failure.handle)[1]] = failure
        elif kind == protocol.STATUS:
            self.statuses.append(protocol.decode_status(body))

    def wait(self, local_ids: list[int]) -> None:
        """Until each has ended or failed."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(i not in self.code and i not in self.failure for i in local_ids):
            assert time.monotonic() < deadline, "the engine did not finish in time"
            assert self.thread and self.thread.is_alive(), "the engine's loop has ended"
            self.receive()

    def queue_times(self, local_ids: list[int]) -> list[list[int]]:
        """The queue times that came for each, in nanoseconds; there should be one."""
        reports = [self.reports.get(i, []) for i in local_ids]
        return [[e.queue_ns for e in each if e.queue_ns is not None] for each in reports]

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[list[int]]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        ids = self.submit_together(prompts, each)
        self.wait(ids)
        assert not self.failure, self.failure
        return [self.tokens[i] for i in ids]

    def generate_after_failures(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        self.failure.clear()
        return self.generate(prompts, params)

    def wait_idle(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.loop.scheduler.requests or self.loop.in_flight:
            assert time.monotonic() < deadline, "requests were left over"
            assert self.thread and self.thread.is_alive(), "the engine's loop has ended"
            time.sleep(0.005)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def serve(core: Core, run_dir: Path) -> Iterator[Client]:
    """Run `core`'s loop in a thread; on leaving, check that no slot and no block is left behind."""
    run_dir.mkdir(parents=True, exist_ok=True)
    socket = EngineSocket(run_dir, os.getpid())
    loop = EngineLoop(core, socket)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = Client(run_dir, loop)
    client.thread = thread
    try:
        yield client
        client.wait_idle()
    finally:
        socket.closed = True
        thread.join(TIMEOUT_S)
        client.close()
        socket.close()
    assert not errors, errors
    # Only now: the loop forgets a request before it frees what that held.
    pools, table = core.scheduler.kv_manager.pools, core.scheduler.table
    assert all(pool.available == pool.num_blocks and not pool.committed for pool in pools), "blocks leaked"
    assert table.free == core.config.max_num_seqs, "slots leaked"
    assert core.scheduler.reserved_blocks == 0, "reservations leaked"


@functools.cache
def _shallow() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory(prefix="shallow-")
    folder = Path(made.name) / "bundled"
    shutil.copytree(resolve_model_dir("bundled"), folder)
    edit_config(folder, num_hidden_layers=2)
    edit_tensors(folder, _without_last_layers)
    return made


def _without_last_layers(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(("model.layers.2.", "model.layers.3."))]:
        del tensors[name]


def shallow_model() -> Path:
    """The bundled model with two of its four layers, which takes half the time: for tests of any text."""
    return Path(_shallow().name) / "bundled"


def fewer(kind: str) -> dict[str, Any]:
    """Sizes for a kind of checkpoints.KINDS whose steps take long, for tests of what surrounds its layers:
    two that keep states and one with attention, and half of the experts."""
    sizes: dict[str, Any] = {}
    if kind.startswith(("qwen3.5", "qwen3-next")):
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        sizes |= {"num_hidden_layers": 3, "layer_types": kinds}
    if kind.startswith(("qwen2-moe", "qwen3-moe", "qwen3.5-moe", "qwen3-next")):
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    return sizes


def start_core(
    model_dir: Path,
    on_loss: Callable[[str], None] | None = None,
    proposer: Proposer | None = None,
    make_proposer: MakeProposer | None = None,
    **settings: object,
) -> Core:
    """An engine on the CPU in float32 with small limits unless `settings` say otherwise."""
    values: dict[str, object] = {
        "device": "cpu",
        "max_num_seqs": 8,
        "max_num_tokens": 64,
        "max_num_tokens_while_decoding": 64,
        "max_seq_len": 256,
        "kv_cache_free_gpu_mem_fraction": 0.02,  # several engines may share one test process
    } | settings
    config = EngineConfig(model_dir=str(model_dir), **values)  # type: ignore[arg-type]
    if proposer is not None:
        make_proposer = lambda *_: proposer  # noqa: E731
    return start(config, on_loss=on_loss, make_proposer=make_proposer)


def asks(guide: str, **options: Any) -> SamplingParams:
    """Parameters of a greedy request whose answer follows a regular expression."""
    values = {"max_tokens": 20, "temperature": 0.0, "end_id": 1} | options
    return SamplingParams(grammar_type="regex", grammar=guide, **values)
