# SPDX-License-Identifier: Apache-2.0
"""What GPU tests share: numbers that should be alike, engines next to the same in plain torch, and times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from compilations import watch

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.weight import Weight

Result = TypeVar("Result")

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # of 8B
# Heads and widths that FlashInfer has and that are whole blocks.
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
SETTINGS = {"device": "cuda", "max_num_tokens": 512, "max_num_tokens_while_decoding": 256, "max_num_seqs": 16}
SMALL = SETTINGS | {"max_tokens_in_paged_kv_cache": 16384}


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-2) -> None:
    """Relative error of each row, so that one wrong row cannot hide."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    actual, expected = actual.to(wide).flatten(1), expected.to(wide).flatten(1)
    assert actual.shape == expected.shape
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.isfinite().all() and error.max() < bound, f"largest relative row error {error.max():.2e}"


def compare_operations(
    tokens: int, qkv: Weight, gate_up: Weight, down: Weight, normed: float, added: float
) -> None:
    """A layer's products in bfloat16. normed, added: bounds of those behind a norm
    and of the one with a residual."""
    from flashinfer_backend.ops import cuda_ops

    x, residual, gated = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (4096, 4096, 14336))
    x, norm = x * 3, (1 + torch.randn(4096, device="cuda") * 0.1).bfloat16()
    for operation, *arguments in (("norm_linear", qkv, None), ("norm_gate_up_silu", gate_up)):
        ours, theirs = (getattr(ops, operation)(x, norm, 1e-5, *arguments) for ops in (cuda_ops, torch_ops))
        assert_close(ours, theirs, normed)
    ours, theirs = (ops.linear_add(gated, down, residual.clone()) for ops in (cuda_ops, torch_ops))
    assert_close(ours, theirs, added)


def compare_engines(
    name: str,
    checkpoint: Any,
    settings: dict[str, Any],
    tmp_path: Path,
    factor: float = 1.5,
    fewer: float = 0.1,
    longest: int = 150,
    rounds: int = 1,
    started: Callable[[str, Any], None] = lambda backend, core: None,
    **cache: bool,
) -> None:
    """Nothing compiles after start. Tokens are as near to the best ones, in the context that was produced, as
    those of the same engine in plain torch: one bit of bfloat16 can change a rounding to e4m3 there as well.

    checkpoint: its folder, and `logits` by the format's float64 model, which `cache` is handed to. factor: by
    how much tokens may be farther on average. fewer: the share of tokens that may be the best one less often.
    longest: of the prompts. rounds: how often they are sent. started: is shown each engine.
    """
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (12,), generator=generator).tolist()
    prompts = [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]

    def shortfalls(backend: str) -> torch.Tensor:
        """Of each token's logit, below the best one's."""
        produced: list[list[int]] = []
        with watch() as found:
            core = start_core(checkpoint.folder, **settings, attention_backend=backend)
            started(backend, core)
            found.clear()
            with serve(core, tmp_path / backend) as client:
                for _ in range(rounds):
                    produced += client.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0))
            assert backend == "torch" or not (found.triton or found.loaded or found.built), found
        short = []
        for prompt, tokens in zip(prompts * rounds, produced, strict=True):
            logits = checkpoint.logits(prompt + tokens, **cache)[len(prompt) - 1 : -1]
            short.append(logits.amax(-1) - logits[range(len(tokens)), tokens])
        return torch.cat(short)

    ours, plain = shortfalls("auto"), shortfalls("torch")
    for which, short in (("kernels", ours), ("torch", plain)):
        best = (short == 0).double().mean()
        print(f"{name} {which}: {best:.3f} best, on average {short.mean():.4f} short")
    assert (ours == 0).double().mean() > (plain == 0).double().mean() - fewer
    assert ours.mean() < factor * plain.mean() + 0.01


def capture(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of run(), and what it returns. It runs once before: nothing may compile during the capture."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def check_replays(run: Callable[[], torch.Tensor], change: Callable[[], object]) -> None:
    """A graph of run() that is replayed with other values computes, bit for bit, what run() does."""
    graph, out = capture(run)
    for _ in range(3):
        change()
        graph.replay()
        assert torch.equal(out, run())


def microseconds(work: Callable[[int], object], calls: int) -> float:
    """Of one call in a CUDA graph of `calls` of them, on other data each, so that none is in L2."""

    def run() -> None:
        for i in range(calls):
            work(i)

    graph, _ = capture(run)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / 20 / calls
