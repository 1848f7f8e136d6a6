# SPDX-License-Identifier: Apache-2.0
"""What one rank takes to load a checkpoint: bytes from the disk, and host memory.

    python -m perf_configs.loading --layers 1 --width 40960 --rank 1 --size 2

writes a checkpoint of a Llama shape with random weights to a temporary folder (or takes --model), drops it
from the page cache and loads it on the CPU. Linux alone.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from client.arguments import argument_parser, integer
from flashinfer_backend.core.paths import named_folder
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops import torch_ops

LAYERS, WIDTH = 4, 8192  # of a random checkpoint
HIDDEN, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 2048, 8192, 16, 8, 128
MB = 1e6
SAMPLE_S = 0.002


def write_checkpoint(folder: Path, layers: int, width: int, dtype: torch.dtype) -> None:
    """A Llama with an MLP of this width and random weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (width, HIDDEN),
            "mlp.up_proj": (width, HIDDEN),
            "mlp.down_proj": (HIDDEN, width),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    tensors = {f"{name}.weight": torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    size, page = path.stat().st_size, mmap.PAGESIZE
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-size // page), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        status = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p)
        )
        del view
    assert status == 0, "mincore failed"
    return int((pages & 1).sum()) * page


def figure(file: str, name: str) -> int:
    """A number of this process's, in bytes."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * (1024 if line.endswith("kB") else 1)
    raise KeyError(name)


def measure(folder: Path, shard: Shard, dtype: torch.dtype) -> dict[str, float]:
    """Megabytes by what they are; memory beyond what there was before loading, at its most."""
    path, names = folder / "model.safetensors", ("RssAnon", "RssFile")
    model = Transformer(read_spec(folder).share(shard), torch_ops, dtype, torch.device("cpu"), 256)
    before = {name: figure("status", name) for name in names}
    most, read, loaded = dict(before), figure("io", "read_bytes"), threading.Event()

    def sample() -> None:
        while not loaded.wait(SAMPLE_S):
            most.update({name: max(most[name], figure("status", name)) for name in names})

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        load_weights(model, folder)
    finally:  # else it goes on indefinitely
        loaded.set()
        thread.join()
    found = {
        "file": path.stat().st_size,
        "share of the model": sum(parameter.nbytes for parameter in model.parameters()),
        "read from disk": figure("io", "read_bytes") - read,
        "page cache": cached_bytes(path),
        **{f"{name}, most": most[name] - before[name] for name in names},
        **{f"{name}, afterwards": figure("status", name) - before[name] for name in names},
    }
    return {name: value / MB for name, value in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.loading", __doc__)
    parser.add_argument(
        "--model", type=named_folder, help="a checkpoint of one file, instead of a random one"
    )
    parser.add_argument("--layers", type=integer(1), help=f"of the random one (default: {LAYERS})")
    parser.add_argument("--width", type=integer(1), help=f"of the random one's MLP (default: {WIDTH})")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rank", type=integer(0), default=0)
    parser.add_argument("--size", type=integer(1), default=1, help="number of ranks")
    parser.add_argument("--keep-cache", action="store_true", help="do not drop the file from the page cache")
    options = parser.parse_args(argv)
    if options.rank >= options.size:
        parser.error(f"--rank {options.rank} should be below --size {options.size}: ranks count from 0")
    for name in ("layers", "width"):
        if options.model is not None and getattr(options, name) is not None:
            parser.error(f"--{name} is of a random checkpoint, and --model names one: leave out one of them")
    if options.model is not None and not (options.model / "model.safetensors").is_file():
        parser.error(f"--model {options.model}: there is no model.safetensors, the one file that is loaded")
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary)
        if options.model is None:
            # In a process of its own: memory that this one frees would be taken again by the model.
            arguments = (folder, options.layers or LAYERS, options.width or WIDTH, dtype)
            writer = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=arguments)
            writer.start()
            writer.join()
        if not options.keep_cache:
            drop_from_cache(folder / "model.safetensors")
        for name, value in measure(folder, Shard(options.rank, options.size), dtype).items():
            print(f"{name}: {value:.0f} MB")


if __name__ == "__main__":
    main()
