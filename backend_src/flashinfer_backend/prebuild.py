# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU's kernels ahead: `python -m flashinfer_backend.prebuild`, for an image; needs no GPU."""

import argparse
import logging
import os
import re
import sys
from pathlib import Path

import torch

from flashinfer_backend.config_tools.settings import engine_parameters
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import BUNDLED
from flashinfer_backend.core.shard import WHOLE, Shard


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m flashinfer_backend.prebuild",
        description="Compile the GPU kernels that an engine needs, so that its first start does not. A second"
        " run compiles nothing.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a checkpoint (config.json suffices); without it, what models with heads of 128 need",
    )
    parser.add_argument(
        "--arch",
        type=_arch,
        help="such as sm_90, for a machine without the GPU; without it, this machine's GPUs",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help="also copy the libraries there, for an image: the engine finds them by"
        " FLASHINFER_BACKEND_KERNELS=DIR",
    )  # fmt: skip
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE",
        help="knobs as they will be served; dtype, quantization, attention_backend, kv_cache_dtype,"
        " tokens_per_block, tensor_parallel_size, expert_parallel_size, speculative_method and draft_model"
        " count",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.arch:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = options.arch  # FlashInfer reads it when it is imported
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="[prebuild] %(message)s")
    # They import what reads that variable.
    from flashinfer_backend.worker import prebuild
    from flashinfer_backend.worker.formats import choose_dtype
    from flashinfer_backend.worker.start import read_specs

    try:
        settings = engine_parameters(options.set, {"model_dir": "--model"}) | {
            "model_dir": options.model or BUNDLED
        }
        config = EngineConfig.from_parameters(settings)
        if config.device == "cpu":
            raise ValueError("device=cpu: an engine on a CPU has no kernels to compile; leave it out")
        if options.model:
            shard = Shard(0, config.tensor_parallel_size, config.expert_parallel_size)
            config, model, drafter = read_specs(config, shard)
        else:
            sizes = {"head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336}
            longest = {"max_position_embeddings": config.max_seq_len} if config.max_seq_len else {}
            config, model, drafter = read_specs(config, WHOLE, sizes | longest)
        dtype = choose_dtype(config, model, torch.device("cuda"))
        compiled = prebuild.prepare(config, model, dtype, drafter)
        if options.output:
            print(prebuild.export(options.output))
    except (ValueError, OSError) as error:
        print(f"prebuild: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"prebuild: {error}; install the extra cuda: pip install -e '.[cuda]'", file=sys.stderr)
        return 1
    print(f"compiled {compiled} kernel modules" if compiled else "nothing to compile")
    return 0


def _arch(text: str) -> str:
    """sm_90 or sm_90a -> 9.0, as FlashInfer wants it."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)[af]?", text)
    if not match or int(match[1]) < 9:
        raise argparse.ArgumentTypeError(f"{text!r} should be like sm_90, and at least that (Hopper)")
    return f"{match[1]}.{match[2]}"


if __name__ == "__main__":
    sys.exit(main())
