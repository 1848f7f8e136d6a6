# SPDX-License-Identifier: Apache-2.0
"""What adapters (LoRA) cost: decode steps of the engine without a server.

    python -m perf_configs.bench_adapters --model DIR [--batches 1,32] [--set KNOB=VALUE] [--out FILE.json]

The adapters have random weights in all modules of each layer. Two engines in one process, one without room
for adapters, decode sequences after prompts of 256 tokens, in turns, so that both have the same clocks. With
room for adapters there are two cases: no sequence has one, or the sequences share all of them out. For each
case it prints the median of the rounds' ms per step, its ratio to the engine without adapters, and the same
of the step's CUDA graph alone, replayed back to back.

`client bench --lora-modules` measures servers with adapters.
"""

import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from client.arguments import argument_parser, integer, integers
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.models.adapters import ADAPTER_CONFIG, PREFIX, WEIGHTS
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.spec import ModelSpec
from perf_configs.bench_engine import Driver, graph_seconds, random_prompts
from perf_configs.engine_start import add_engine_options, parameters_from, start_frozen

PROMPT, WARM, SPARE = 256, 16, 24  # tokens: of a prompt, of decode steps before the clock and behind it


def write_adapters(folder: Path, spec: ModelSpec, count: int, rank: int) -> list[Path]:
    """Adapters a0, a1, ... of all modules of all layers, as PEFT writes them, with random weights."""
    shapes = {
        f"{PREFIX}{layer.prefix}.{source.module}": source.part.whole
        for layer in spec.layers
        for product in layer.adaptable
        for source in product.sources
    }
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
    }  # fmt: skip
    made = []
    for number in range(count):
        generator = np.random.default_rng(number)
        tensors = {}
        for name, (rows, columns) in shapes.items():
            for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = generator.random(shape, np.float32) - 0.5
                tensors[f"{name}.lora_{letter}.weight"] = (values * 0.05).astype(np.float16)
        own = folder / f"a{number}"
        own.mkdir(parents=True, exist_ok=True)
        save_file(tensors, own / WEIGHTS)
        (own / ADAPTER_CONFIG).write_text(json.dumps(config))
        made.append(own)
    return made


class Case:
    """An engine with some of its requests' adapters."""

    def __init__(self, name: str, driver: Driver, adapters: Sequence[Path]) -> None:
        self.name, self.adapters = name, [str(each) for each in adapters] or [""]
        self._driver = driver

    def measure(self, batch: int, steps: int, vocab: int) -> tuple[float, float]:
        """Seconds of a decode step, and of its graph alone (nan without graphs)."""
        driver, core = self._driver, self._driver.core
        prompts = random_prompts(batch, PROMPT, vocab, seed=batch)
        driver.decode(prompts, WARM + steps + SPARE, self.adapters, WARM)
        began = time.perf_counter()
        for _ in range(steps):
            driver.step()
        seconds = (time.perf_counter() - began) / steps
        runner, graph = core.runner, float("nan")
        if runner.graphs is not None:
            graphs = runner.adapted_graphs[0] if any(self.adapters) else runner.graphs
            graph = graph_seconds(core, graphs)
        driver.drain()
        return seconds, graph


def measure_all(
    cases: Sequence[Case], batches: Sequence[int], rounds: int, steps: int, vocab: int
) -> list[dict[str, Any]]:
    """Rows of the table. A first round is not counted: it brings the adapters to the device."""
    rows = []
    for batch in batches:
        found: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
        for number in range(1 + rounds):
            for case in cases:
                times = case.measure(batch, steps, vocab)
                if number:
                    found[case.name].append(times)
        base: tuple[float, float] | None = None
        for name, each in found.items():
            step, graph = (statistics.median(column) * 1e3 for column in zip(*each, strict=True))
            base = base or (step, graph)
            spread = (max(s for s, _ in each) - min(s for s, _ in each)) * 1e3
            row = {"batch": batch, "case": name, "step_ms": step, "spread_ms": spread, "graph_ms": graph}
            row |= {"step_ratio": step / base[0], "graph_ratio": graph / base[1]}
            rows.append(row)
            cells = [str(batch), name, f"{step:.3f}", f"{spread:.3f}", f"{row['step_ratio'] - 1:+.2%}"]
            if not math.isnan(graph):
                cells += [f"{graph:.3f}", f"{row['graph_ratio'] - 1:+.2%}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.bench_adapters", __doc__)
    add_engine_options(parser)
    add = parser.add_argument
    add("--adapters", type=integer(1), default=8, metavar="N", help="(default: %(default)s)")
    add("--rank", type=integer(1, 256), default=16, metavar="N", help="of each (default: %(default)s)")
    add("--batches", type=integers(1), default="1,32", metavar="N,...", help="(default: %(default)s)")
    add("--rounds", type=integer(1), default=5, metavar="N", help="(default: %(default)s)")
    add("--steps", type=integer(1), default=100, metavar="N", help="of a round (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(argv)
    most = max(options.batches)
    length = PROMPT + WARM + options.steps + SPARE
    own = {"max_num_seqs": str(most), "max_seq_len": str(length), "max_queue_size": "0"}
    own["max_tokens_in_paged_kv_cache"] = str(most * (length + 64))
    parameters = parameters_from(parser, options, **own)
    spec = read_spec(resolve_model_dir(options.model))
    with tempfile.TemporaryDirectory(prefix="adapters-") as scratch:
        folders = write_adapters(Path(scratch), spec, options.adapters, options.rank)
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        room = {"max_loras": str(options.adapters), "max_lora_rank": str(options.rank)}
        room["lora_cache_host_memory_bytes"] = str(1 << 40)
        engines = [Driver(start_frozen(each)) for each in (parameters, parameters | room)]
        cases = [
            Case("no room for adapters", engines[0], ()),
            Case("none asked for", engines[1], ()),
            Case(f"up to {options.adapters} adapters", engines[1], folders),
        ]
        device = engines[0].core.runner.device
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(f"{where}, rank {options.rank}, {options.rounds} rounds of {options.steps} steps\n")
        print("| sequences | engine | step, ms | spread | to the first | graph, ms | to the first |")
        print("|---:|---|---:|---:|---:|---:|---:|", flush=True)
        rows = measure_all(cases, options.batches, options.rounds, options.steps, spec.vocab_size)
        for engine in engines:
            engine.core.close()
    if options.out:
        results = {"device": where, "parameters": parameters, "rank": options.rank, "rows": rows}
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
