# SPDX-License-Identifier: Apache-2.0
"""Which of several engines gets a request: the one with the longest cached prefix, unless it is clearly
busier.

Each stub and each process of the OpenAI API chooses separately, from shared data: the open sequences of each
process (transport/loads.py), the prompts that each engine got (transport/prefixes.py), and the engines'
reports.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashinfer_backend.core.output import say
from flashinfer_backend.transport.endpoint import Endpoint
from flashinfer_backend.transport.loads import LoadTable
from flashinfer_backend.transport.prefixes import PrefixTable, PromptHasher

# The cost of one more open sequence in an engine for a request there, in prompt tokens. On an H200 with
# Llama-3.1-8B in bfloat16 a token takes 4.05 ms alone and 5.47 ms with 63 other sequences (rows a and b of
# perf_configs/results/2026-11-21-h200.json), so each of these adds 4.5 ms to an answer of 200 tokens. The
# prefill of 2048 tokens takes 42.3 ms, so that of 218 tokens takes as long.
TOKENS_PER_SEQUENCE = 256
# An engine without a report for this long, and for this many report periods, hangs or is stopped. It gets no
# requests while others report. Reports come between steps; the longest, 8192 tokens of a 70B model, takes
# some 1 s on an H200.
SILENT_S = 3.0
SILENT_PERIODS = 3


@dataclass(frozen=True)
class Candidate:
    """An engine's state for one request. `cached`: cached tokens of the request's prompt. `open`: its running
    and waiting sequences; `places`: how many can run at a time. `to_compute`: tokens of other prompts that it
    has yet to compute. `silent`: it has stopped reporting."""

    cached: int = 0
    open: int = 0
    places: int = 1
    to_compute: int = 0
    silent: bool = False


def rank(candidates: Sequence[Candidate], first: int = 0) -> list[int]:
    """Indices of the candidates, the best one first; among equals `first` goes before the next ones.

    Silent engines come last, and before them those without a free place. The others are ordered by cached
    tokens of the prompt, less the tokens to compute for others, less TOKENS_PER_SEQUENCE for each open
    sequence.
    """

    def key(index: int) -> tuple[bool, bool, int, int]:
        it = candidates[index]
        worth = it.cached - it.to_compute - TOKENS_PER_SEQUENCE * it.open
        return it.silent, it.open >= it.places, -worth, (index - first) % len(candidates)

    return sorted(range(len(candidates)), key=key)


class Router:
    def __init__(self, endpoints: Sequence[Endpoint], run_dir: Path, reuse: bool, period_s: float) -> None:
        """run_dir: the model's. reuse: whether engines keep prefixes. period_s: of the engines' reports."""
        self._endpoints, self._run_dir, self._reuse = endpoints, run_dir, reuse
        self._silent_s = max(SILENT_S, SILENT_PERIODS * period_s)
        self._hasher: PromptHasher | None = None
        self._table: PrefixTable | None = None
        self._loads: LoadTable | None = None  # once there is one it stays
        self._telling = threading.Lock()  # so that the last value told is the newest
        self._opened = False  # whether opening the table of prefixes was tried
        self._first = os.getpid()  # processes take turns at different engines

    def engine_started(self) -> None:
        """The run directory may be another one, with another table of prefixes."""
        self._opened = False

    def load_changed(self, index: int) -> None:
        """Publishes this process's load of an engine, which has changed."""
        endpoint = self._endpoints[index]
        with self._telling:
            if self._loads is not None:
                self._loads.tell(index, endpoint.open_sequences, endpoint.tokens_to_compute)

    def close(self) -> None:
        if self._loads is not None:
            self._loads.close()

    def choose(self, prompt: np.ndarray, adapter: str = "") -> tuple[list[int], np.ndarray, list[int]]:
        """For a prompt, int32 [n], with an adapter (its folder; "": none): the engines that are up, best
        first; the prompt's keys; and the number of its tokens that each engine has probably cached."""
        if not self._opened and any(endpoint.status is not None for endpoint in self._endpoints):
            self._open()
        keys, cached = self._keys(prompt, adapter), [0] * len(self._endpoints)
        table, now = self._table, time.monotonic()
        others = [[0, 0]] * len(self._endpoints)
        if self._loads is not None and any(endpoint.up for endpoint in self._endpoints):
            others = self._loads.of_others().tolist()
        up, candidates = [], []
        for index, endpoint in enumerate(self._endpoints):
            status = endpoint.status
            if not endpoint.up or status is None:
                continue
            if len(keys) and table is not None:
                blocks = table.cached_blocks(index, keys, status)
                cached[index] = min(blocks * status.block_size, len(prompt) - 1)  # the last one is computed
            up.append(index)
            candidates.append(
                Candidate(
                    cached=cached[index],
                    open=endpoint.open_sequences + others[index][0],
                    places=status.max_num_seqs,
                    to_compute=endpoint.tokens_to_compute + others[index][1],
                    silent=now - endpoint.reported_at > self._silent_s,
                )
            )
        self._first += 1
        return [up[place] for place in rank(candidates, self._first)], keys, cached

    def sent(self, index: int, keys: np.ndarray) -> None:
        """A prompt with these keys has gone to an engine."""
        status, table = self._endpoints[index].status, self._table
        if len(keys) and table is not None and status is not None:
            table.add(index, keys, status)

    def _keys(self, prompt: np.ndarray, adapter: str) -> np.ndarray:
        status = next((e.status for e in self._endpoints if e.status is not None), None)
        if not self._reuse or status is None or len(prompt) < status.block_size:
            return np.empty(0, np.uint64)
        if self._hasher is None:
            self._hasher = PromptHasher(status.max_input_len, status.block_size)
        return self._hasher.keys(prompt, adapter)

    def _open(self) -> None:
        self._opened, self._table = True, None
        if self._loads is None:
            self._loads = LoadTable(self._run_dir, len(self._endpoints))
            for index in range(len(self._endpoints)):
                self.load_changed(index)
        if not self._reuse:
            return
        try:
            self._table = PrefixTable(self._run_dir, len(self._endpoints))
        except OSError as error:
            say(f"requests go to engines by load alone: prefixes are not known ({error})")
