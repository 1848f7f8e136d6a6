# SPDX-License-Identifier: Apache-2.0
"""The device, the dtype and the kernels that a config and a checkpoint ask for; what they cannot compute is
refused."""

from __future__ import annotations

import os

import torch

from flashinfer_backend.core.config import GPU_HEAD_DIMS, EngineConfig
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models.quantization import BLOCK
from flashinfer_backend.models.spec import Experts, ModelSpec

EXPERT_GRAIN = 32  # on a GPU an expert's weights have multiples of it as rows and columns


def choose_device(config: EngineConfig, shard: Shard) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device; use device=cpu or auto")
    if name == "cpu" and config.attention_backend in ("fa2", "triton"):
        raise ValueError(
            f"attention_backend {config.attention_backend} needs a CUDA device; use auto or torch"
        )
    if shard.size == 1:
        return torch.device(name)
    if name == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // shard.size))
        return torch.device(name)
    if torch.cuda.device_count() < shard.size:
        raise ValueError(
            f"tensor_parallel_size={shard.size} needs as many GPUs, and {torch.cuda.device_count()} can be "
            "seen here (CUDA_VISIBLE_DEVICES chooses them)"
        )
    device = torch.device(name, shard.rank)
    torch.cuda.set_device(device)
    return device


def runs_plain_torch(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether everything runs in plain torch: on a CPU, or as the slow reference on any GPU."""
    if device.type == "cpu" or config.attention_backend == "torch":
        return True
    if dtype == torch.float32:
        raise ValueError(
            "the CUDA kernels compute in bfloat16 or float16: for float32 use attention_backend=torch"
        )
    if torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"the CUDA kernels need a Hopper GPU or newer, not {name}: use attention_backend=torch"
        )
    return False


def choose_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32  # what CPUs compute fast, and exactly enough to compare with
    return torch.float16 if spec.dtype == "float16" else torch.bfloat16


def check_cuda_formats(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ValueError for formats that the CUDA kernels do not compute."""
    slow = "attention_backend=torch computes it, slowly"
    if config.attention_backend in ("fa2", "triton"):
        _check_scores(config, spec)
    for dim in {mixer.head_dim for mixer in spec.attentions}.difference(GPU_HEAD_DIMS):
        raise ValueError(
            f"the checkpoint's head_dim is {dim}; on a GPU it should be one of"
            f" {', '.join(map(str, GPU_HEAD_DIMS))}: {slow}"
        )
    if spec.experts is not None:
        _check_experts(spec, spec.experts)
    for product in spec.products:
        if product.format == "dense":
            continue
        rows, inner = product.shape
        if product.format == "mxfp4":
            if dtype != torch.bfloat16:
                raise ValueError(f"weights in MXFP4 need dtype=bfloat16 on a GPU, not {dtype}; set it")
            continue
        if product.format.startswith("int4"):
            if inner % BLOCK:
                raise ValueError(
                    f"the {product.name} weights [{rows}, {inner}] of 4 bits should have columns in"
                    f" multiples of {BLOCK} on a GPU; {slow}"
                )
            continue
        if dtype != torch.bfloat16:
            raise ValueError(f"weights in FP8 need dtype=bfloat16 on a GPU, not {dtype}; set it")
        grain = BLOCK if product.format.startswith("fp8_block") else 16
        if rows % 16 or inner % grain:
            raise ValueError(
                f"the {product.name} weights [{rows}, {inner}] in FP8 should have rows in multiples of"
                f" 16 and columns in multiples of {grain} on a GPU; {slow}"
            )


def _check_scores(config: EngineConfig, spec: ModelSpec) -> None:
    mixers = spec.attentions
    found = {
        "windows": any(spec.windows(config.max_seq_len)),
        "soft caps": any(mixer.soft_cap for mixer in mixers),
        "scales of scores": any(mixer.scale for mixer in mixers),
        "sinks": any(mixer.sinks for mixer in mixers),
    }
    if config.attention_backend == "triton":
        variants = {mixer.variant for mixer in mixers if mixer.variant}
        found = {f"attention of the kind {variant}": True for variant in variants}
    for name in (name for name, there in found.items() if there):
        raise ValueError(
            f"attention_backend {config.attention_backend} has no {name} as this checkpoint has them: set"
            " attention_backend=auto"
        )


def _check_experts(spec: ModelSpec, experts: Experts) -> None:
    for name, size in {"hidden_size": spec.hidden_size, experts.size_key: experts.size}.items():
        if size % EXPERT_GRAIN:
            where = f" on each of {spec.shard.size} GPUs" if spec.shard.size > 1 else ""
            raise ValueError(
                f"{name} is {size}{where}; with experts it should be a multiple of {EXPERT_GRAIN} on a GPU;"
                " attention_backend=torch computes it, slowly"
            )
