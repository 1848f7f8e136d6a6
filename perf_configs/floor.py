# SPDX-License-Identifier: Apache-2.0
"""What the machine itself can do, measured before the servers start: bytes/s of a copy within the device's
memory, FLOP/s of a large matrix product. Prints them as JSON.

    python -m perf_configs.floor
    python -m perf_configs.floor --device cpu

From both follows the floor of a decode step: its weights and its KV cache, read once.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from client.arguments import argument_parser
from flashinfer_backend.core.arguments import require_cuda

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 120.0  # seconds for the process that measures
TIMES = 10
# Bytes of the copied block, rows of the square product.
SIZES = {"cuda": (4 << 30, 8192), "cpu": (256 << 20, 1024)}


def measure(device: str) -> dict[str, Any]:
    """device: cuda (its first GPU) or cpu. copy_bytes_per_s counts bytes read and bytes written; the product
    is of bfloat16 on a GPU and of float32 on a CPU; medians."""
    import torch

    size, rows = SIZES[device]
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(rows, rows, device=device).to(kind) for _ in "ab")
    out = torch.empty_like(a)
    copy = _median_seconds(lambda: target.copy_(source), device)
    product = _median_seconds(lambda: torch.matmul(a, b, out=out), device)
    name = torch.cuda.get_device_name(0) if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "copy_bytes_per_s": round(2 * size / copy),
        "flops_per_s": round(2 * rows**3 / product),
        "product": f"{rows}^3 {str(kind).removeprefix('torch.')}",
        "torch": torch.__version__,
    }


def _median_seconds(body: Callable[[], object], device: str) -> float:
    import torch

    def once() -> float:
        began = time.perf_counter()
        body()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(3):
        once()
    return statistics.median(once() for _ in range(TIMES))


def measure_apart(python: str = sys.executable) -> dict[str, Any]:
    """measure() in a process of its own, which leaves nothing on the device; {"none": why} where it fails."""
    try:
        command = [python, "-m", "perf_configs.floor"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT, check=True
        )
        found = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        return {"none": (error.stderr.strip().splitlines() or ["no message"])[-1]}
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {"none": str(error)}
    return dict(found)


def bytes_of_a_step(config_file: Path, rows: int, context: float) -> float:
    """Bytes that a decode step of `rows` must read, in 16 bits: every matrix of the layers and of the
    vocabulary once, keys and values of `context` tokens a row. Embeddings are looked up, not read. Raises
    ValueError for a config.json that is not of a dense Llama-like decoder in 16 bits."""
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        vocabulary = int(config["vocab_size"])
        other = {
            "quantization_config",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
        } & config.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config_file} does not give a decoder's sizes: {error!r}") from None
    if other:
        raise ValueError(
            f"{config_file} has {', '.join(sorted(other))}: what its steps read is not known here"
        )
    layer = hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    cache = rows * context * 2 * kv_heads * head
    return 2.0 * (layers * (layer + cache) + vocabulary * hidden)


def main(argv: Sequence[str] | None = None) -> None:
    import torch

    parser = argument_parser("perf_configs.floor", __doc__)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=list(SIZES), default=found)
    device = parser.parse_args(argv).device
    if device == "cuda":
        require_cuda(parser)
    print(json.dumps(measure(device)))


if __name__ == "__main__":
    main()
