# SPDX-License-Identifier: Apache-2.0
"""Asks Triton's llm model for the logits of many prompts at once, and writes down what that took of the
engine, the llm processes, tritonserver and shared memory, and how long a stream beside them waited.

`python tests/reliability/triton_logits.py --requests 16 --tokens 250 --vocabulary 128256`
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)] + [str(Path(__file__).parents[1] / "server")]

import numpy as np  # noqa: E402
import tritonclient.grpc as grpc  # noqa: E402
from prompt_logits import forget, memory, waits  # noqa: E402
from running import Server, build_repository, running  # noqa: E402

from client.arguments import integer  # noqa: E402
from flashinfer_backend.core.paths import resolve_model_dir  # noqa: E402

TIMEOUT_S = 600
LOOK_S = 0.02


def write_checkpoint(folder: Path, vocabulary: int) -> Path:
    """The bundled model's shape and tokenizer with another vocabulary, and no weights."""
    shutil.copytree(resolve_model_dir("bundled"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": vocabulary}))
    return folder


def ask(server: Server, tokens: int, more: dict[str, np.ndarray], outputs: list[str]) -> str:
    """What became of one request: its outputs' shapes, or its error. Takes each answer and forgets it."""
    ended, found = threading.Event(), Counter[str]()

    def take(result: grpc.InferResult | None, error: Exception | None) -> None:
        if error is not None:
            found[re.sub(r"\d+", "N", str(error))] += 1
            ended.set()
            return
        assert result is not None
        for output in result.get_response().outputs:
            found[f"{output.name}{list(output.shape)}"] += 1
        if result.get_response().parameters["triton_final_response"].bool_param:
            ended.set()

    values = {
        "input_ids": np.arange(5, 5 + tokens, dtype=np.int32)[None] % 2000,
        "input_lengths": np.array([[tokens]], np.int32),
        "request_output_len": np.array([[2]], np.int32),
        **more,
    }
    kinds = {np.dtype(np.int32): "INT32", np.dtype(bool): "BOOL"}
    inputs = [grpc.InferInput(name, list(value.shape), kinds[value.dtype]) for name, value in values.items()]
    for each, value in zip(inputs, values.values(), strict=True):
        each.set_data_from_numpy(value)
    wanted = [grpc.InferRequestedOutput(name) for name in outputs]
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(take)
        client.async_stream_infer("llm", inputs, outputs=wanted, enable_empty_final_response=True)
        assert ended.wait(TIMEOUT_S), "no answer"
    return ", ".join(sorted(found))


def stream_beside(server: Server, stop: threading.Event, chunks: list[float]) -> None:
    """A client that streams all the time; how long each chunk took."""
    while not stop.is_set():
        last = time.monotonic()

        def take(result: grpc.InferResult | None, error: Exception | None) -> None:
            nonlocal last
            chunks.append(time.monotonic() - last)
            last = time.monotonic()

        values = {
            "input_ids": np.array([[7, 8, 9]], np.int32),
            "input_lengths": np.array([[3]], np.int32),
            "request_output_len": np.array([[50]], np.int32),
            "streaming": np.array([[True]]),
        }
        inputs = []
        for name, value in values.items():
            kind = "BOOL" if value.dtype == bool else "INT32"
            inputs.append(grpc.InferInput(name, list(value.shape), kind).set_data_from_numpy(value))
        with grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(take)
            client.async_stream_infer("llm", inputs, outputs=[grpc.InferRequestedOutput("output_ids")])
            client.stop_stream()


def shared_memory(server: Server) -> int:
    """MiB in use by the server's regions."""
    return sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").glob(f"{server.shm_prefix}*")) >> 20


def run(server: Server, options: argparse.Namespace) -> None:
    pids = {"engine": server.engine_pid()}
    pids |= {f"llm {n}": stub.pid for n, stub in enumerate(server.matching("/llm/1/model.py"))}
    pids["tritonserver"] = next(p.pid for p, line in server.commands().items() if "/tritonserver " in line)
    more: dict[str, np.ndarray] = {}
    outputs = ["output_ids"]
    if options.generation:
        more["request_output_len"] = np.array([[options.generation]], np.int32)
        more["return_generation_logits"] = np.array([[True]])
        outputs.append("generation_logits")
    else:
        more["return_context_logits"] = np.array([[True]])
        outputs.append("context_logits")
    if options.stream:
        more["streaming"] = np.array([[True]])
    ask(server, 4, more | {"request_output_len": np.array([[2]], np.int32)}, outputs)
    before = {name: memory(pid, "VmRSS") for name, pid in pids.items()}
    for pid in pids.values():
        forget(pid)
    stop, chunks, answers = threading.Event(), list[float](), Counter[str]()
    beside = threading.Thread(target=stream_beside, args=(server, stop, chunks))
    beside.start()
    time.sleep(1)
    chunks.clear()
    most, most_shared, began = 0, 0, time.monotonic()
    threads = [
        threading.Thread(target=lambda: answers.update([ask(server, options.tokens, more, outputs)]))
        for _ in range(options.requests)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        own = sum(memory(pid, "RssAnon") for pid in pids.values()) - sum(before.values())
        shared = shared_memory(server)
        most, most_shared = max(most, own + shared), max(most_shared, shared)
        time.sleep(LOOK_S)
    took = time.monotonic() - began
    stop.set()
    beside.join()
    rows = options.generation or options.tokens
    mib = rows * options.vocabulary * 4 >> 20
    print(f"{options.requests} x {rows} tokens' logits, {mib} MiB each: {took:.1f} s")
    for answer, count in answers.items():
        print(f"  {count} x {answer}")
    for name, pid in pids.items():
        print(f"  {name}: {memory(pid, 'VmHWM') - before[name]} MiB more at most")
    print(f"  shared memory: {most_shared} MiB at most; own and shared of all together: {most} MiB more")
    print(f"  between two chunks of a stream: {waits(chunks)}")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--requests", type=integer(1), default=8)
    parser.add_argument("--tokens", type=integer(1), default=250)
    parser.add_argument(
        "--generation", type=integer(0), default=0, help="logits of so many tokens of each answer"
    )
    parser.add_argument("--stream", action="store_true", help="the requests stream, too")
    parser.add_argument("--vocabulary", type=integer(1), default=128256)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name, "model"), options.vocabulary)
        knobs = [f"model_dir={checkpoint}", "load_format=dummy", "max_num_seqs=64", *options.set]
        with running(build_repository(Path(name), *knobs), Path(name)) as server:
            run(server, options)


if __name__ == "__main__":
    main()
