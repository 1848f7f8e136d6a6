# SPDX-License-Identifier: Apache-2.0
"""Chunks per second through a real tritonserver with the bundled model on a CPU: `make bench`.

The engine is part of it, so a change shows what it does to the whole; `chunks_per_s` is among the extra
information of the saved results (`--benchmark-json`) and is printed.
"""

import numpy as np
from running import build_repository, running

from client.datasets import Prompt
from client.load import Load, run_load
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.text.chunk import unpack_chunk
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server.outputs import chunk_outputs
from flashinfer_backend.triton_server.requests import Row
from flashinfer_backend.triton_server.sequence import ResponseIndices, Sequence

STREAMS, TOKENS = 32, 64
CHUNKS = 256


def test_chunks_through_the_ensemble(benchmark, tmp_path):
    prompts = [Prompt("One day, a cat named Tom", 8, TOKENS)] * STREAMS
    with running(build_repository(tmp_path, model="bundled"), tmp_path) as server:
        load = Load("triton", server.url, time_limit=60)
        results = []
        benchmark.pedantic(lambda: results.append(run_load(load, prompts)), rounds=3, warmup_rounds=1)
    for result in results:
        assert result.summary["completed"] == STREAMS and not result.summary["failed"]
        assert result.summary["output_tokens"] == STREAMS * TOKENS
    rate = float(np.median([result.summary["chunks_per_s"] for result in results[-3:]]))
    benchmark.extra_info["chunks_per_s"] = rate
    print(f"\n{rate:.0f} chunks/s, {STREAMS} streams of {TOKENS} tokens")


def test_chunks_of_a_stub(benchmark):
    """From the engine's token to the tensors of a response; 256 chunks a round, as for one step."""
    params = SamplingParams(max_tokens=9)
    row = Row(np.array([7, 8], np.int32), params, streaming=True)
    sequences = [Sequence(None, row, ResponseIndices(), lambda sequence: None) for _ in range(CHUNKS)]

    for sequence in sequences:
        sequence.handle = 9 << 32

    def step():
        made = []
        for sequence in sequences:
            sequence.on_token(5, protocol.RUNNING, None)
            chunk = sequence.take()
            made.append(chunk_outputs(sequence, chunk, 1, {"chunk"}))
            sequence.sent(chunk, 1)
        return made

    made = benchmark(step)
    chunks = [unpack_chunk(outputs["chunk"][0]) for outputs in made]
    assert [chunk.ids for chunk in chunks] == [[5]] * CHUNKS
    assert chunks[0].handle == 9 << 32
