# SPDX-License-Identifier: Apache-2.0
"""Measures what is fastest on this GPU for a model's shape, and writes it to a file: docs/tuning.md.

It measures products in 16 bits, FP8 and 4 bits, and mixtures of experts; with --decode-attention
that alone. DIR needs only a config.json: weights are random, in the format that it names. Numbers
of several shapes gather in one FILE. A new one begins with this device's numbers in the package, or
else with the generic ones.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import torch

from flashinfer_backend.core import tuned
from flashinfer_backend.core.arguments import program, require_cuda, some_seconds, whole
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.core.tuned import MOST_ROW_TOKENS, Tuned
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.ops import blocks_linear, mxfp4_experts
from flashinfer_backend.tune import cases as kernels
from flashinfer_backend.tune.search import Bench, Case, Plan, changes, search

QUICK_LAYERS = 4  # enough for their weights not to fit the cache
QUICK_SECONDS = 60.0
ROUNDS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 without a GPU, 2 with wrong arguments."""
    form = argparse.RawDescriptionHelpFormatter
    parser = program("flashinfer_backend.tune", __doc__, formatter_class=form)
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument(
        "--output", required=True, metavar="FILE", type=Path,
        help="file to write; if it is there, its numbers are read first",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_LAYERS} layers, few sizes and no search: a minute or so"
    )
    fp8 = parser.add_mutually_exclusive_group()
    fp8.add_argument("--fp8", action="store_true", help="weights as with the knob quantization=fp8")
    fp8.add_argument(
        "--fp8-blocks", action="store_true", help="weights in FP8 with scales of 128x128 blocks, as Qwen's"
    )
    parser.add_argument(
        "--decode-attention",
        choices=get_args(tuned.Cache),
        help="only the decode kernel, over a cache of such elements",
    )
    parser.add_argument(
        "--tensor-parallel-size", type=whole(1), choices=(1, 2, 4, 8), default=1,
        help="measure the share of the model that each of these GPUs has; one GPU suffices",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=sizes, metavar="LIST",
        help="sizes of steps, such as 16,32,64: fields are chosen for these alone, and the numbers of the"
        " gated kernel and of experts stay",
    )  # fmt: skip
    parser.add_argument("--layers", type=whole(1), metavar="N", help="only N of the model's layers")
    parser.add_argument(
        "--seconds",
        type=some_seconds,
        metavar="S",
        help="what is not measured after S seconds keeps its numbers",
    )
    options = parser.parse_args(argv)
    try:
        spec = share(options)
        steps = sizes_of(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    require_cuda(parser)
    try:
        base = starting_point(options.output, torch.cuda.get_device_name())
        place = torch.device("cuda", torch.cuda.current_device())
        cases, plan = make_plan(options, spec, steps, base, teams=has_teams(spec, place))
        bench = make_bench(options, spec)
        if blocks_linear.module(place) is None:
            cases = [case for case in cases if case.table != "blocks_linear"]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    tune(base, cases, bench, plan, options.output, with_what(options.model, spec))
    return 0


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of tokens separated by commas, rising."""
    found = [whole(1)(each) for each in text.split(",")]
    if sorted(set(found)) != found:
        raise argparse.ArgumentTypeError(f"{text}: the numbers should rise")
    return tuple(found)


def share(options: argparse.Namespace) -> ModelSpec:
    """What of the model is measured. Raises ValueError where it cannot be had."""
    spec = read_spec(resolve_model_dir(options.model))
    if options.fp8:
        spec = spec.quantised_on_load()
    if options.fp8_blocks:
        spec = in_blocks(spec)
    layers = options.layers or (QUICK_LAYERS if options.quick else len(spec.layers))
    if options.layers and layers > len(spec.layers):
        raise ValueError(f"--layers {layers}: the model has {len(spec.layers)}")
    spec = replace(spec, layers=spec.layers[:layers])
    return spec.share(Shard(0, options.tensor_parallel_size))


def sizes_of(options: argparse.Namespace) -> kernels.Sizes:
    """The sizes of steps to measure, by table. Raises ValueError where --tokens has other values."""
    sizes = kernels.QUICK if options.quick else kernels.FULL
    if not options.tokens:
        return sizes
    if options.decode_attention:
        raise ValueError("--tokens is for products: of attention the last size stands for all more")
    tilings = dict.fromkeys(("linear", "linear_fp8", "linear_blocks", "int4"), options.tokens)
    tilings["blocks_linear"] = tuple(each for each in options.tokens if each <= MOST_ROW_TOKENS)
    # Of these the last size stands for all more.
    return sizes | tilings | {"blocks_fp8": (), "experts": ()}


def has_teams(spec: ModelSpec, place: torch.device) -> bool:
    """Whether ops.mxfp4_experts can compute all of the model's experts there."""
    experts = [product for product in spec.products if product.experts]
    fit = [each.format == "mxfp4" and each.shape[1] <= mxfp4_experts.WIDEST for each in experts]
    return bool(fit) and all(fit) and mxfp4_experts.module(place) is not None


def make_plan(
    options: argparse.Namespace, spec: ModelSpec, sizes: kernels.Sizes, base: Tuned, teams: bool = False
) -> tuple[list[Case], Plan]:
    """What is measured, and how much of it. teams: as in cases.of_model. Raises ValueError for what cannot
    be measured."""
    kind = None if options.tokens or options.decode_attention else kernels.kind_of_gated(spec)
    if options.decode_attention:
        cases = [kernels.of_decode_attention(options.decode_attention, sizes["decode_attention"])]
    else:
        cases = kernels.of_model(spec, sizes, base, gated=kind is not None, teams=teams)
    if options.quick:
        return cases, Plan(0, options.seconds or QUICK_SECONDS, kind)
    return cases, Plan(ROUNDS, options.seconds or math.inf, kind)


def in_blocks(spec: ModelSpec) -> ModelSpec:
    """The model as a checkpoint in FP8 with scales of 128x128 blocks has it. Raises ValueError for one that
    is quantised already, or whose parts are not whole blocks."""
    if spec.format != "dense":
        raise ValueError(
            f"--fp8-blocks is for checkpoints of 16 or 32 bits, and this one is quantised already"
            f" ({spec.format}); leave the option out to measure it as it is"
        )
    return spec.with_format("fp8_block")


def starting_point(output: Path, device: str) -> Tuned:
    """The numbers that `output` has, or the package. Raises ValueError where the file is another device's."""
    if output.exists():
        numbers = tuned.read(output)
        if tuned.slug(numbers.device) != tuned.slug(device):
            raise ValueError(
                f"{output} has the numbers of {numbers.device}, and this is {device}; name another"
            )
        return numbers
    numbers = tuned.load(device) or tuned.fallback()
    return msgspec.structs.replace(numbers, device=device)


def tune(
    base: Tuned, cases: Sequence[Case], bench: Bench, plan: Plan, output: Path, measured: dict[str, str]
) -> Tuned:
    """Measure, write, and print what is chosen otherwise now."""
    found = search(base, cases, bench, plan, say=lambda line: print(line, flush=True))
    shapes = dict.fromkeys([*filter(None, base.measured.get("shape", "").split("; ")), measured["shape"]])
    found = msgspec.structs.replace(found, measured=measured | {"shape": "; ".join(shapes)})
    tuned.write(output, found)
    assert tuned.read(output) == found
    lines = changes(base, found, cases)
    print("\n".join(["", "chosen otherwise than before:", *lines] if lines else ["", "chosen as before"]))
    print(f"{output}: the numbers of {found.device}")
    return found


def with_what(model: str, spec: ModelSpec) -> dict[str, str]:
    """What a reader wants to know of a measurement."""
    import triton

    versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "triton": triton.__version__}
    versions = {name: str(version) for name, version in versions.items()}  # torch's is no plain text
    size = spec.shard.size
    shape = Path(model).name + (f" on each of {size} GPUs" if size > 1 else "")
    return {"shape": shape, **versions, "by": "python -m flashinfer_backend.tune"}


def make_bench(options: argparse.Namespace, spec: ModelSpec) -> Bench:
    """The model, or a rank's share of it, on the GPU, with random weights; of attention only a cache."""
    from flashinfer_backend.models.transformer import Transformer
    from flashinfer_backend.models.weights import load_weights
    from flashinfer_backend.ops import cuda_ops
    from flashinfer_backend.tune.measure import DecodeBench, ModelBench

    if options.decode_attention:
        return DecodeBench(spec, options.decode_attention)
    dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
    model = Transformer(spec, cuda_ops, dtype, "cuda", max_seq_len=spec.longest_seq_len)
    load_weights(model, "", "dummy")
    return ModelBench(model)


if __name__ == "__main__":
    raise SystemExit(main())
