# SPDX-License-Identifier: Apache-2.0
"""Prints which weight each tensor of a checkpoint fills, and which part of it each rank reads."""

import signal
from collections.abc import Sequence

from flashinfer_backend.core.arguments import program, whole
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import destinations
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.weight import ALL, Stored


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 with wrong arguments."""
    parser = program("flashinfer_backend.models.where", __doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder; config.json suffices")
    named = "part of tensors' names, or one as the checkpoint has it; default: all"
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help=named)
    told = "also print the part of each of RANKS ranks (default: 1)"
    parser.add_argument("--tensor-parallel-size", type=whole(1), default=1, metavar="RANKS", help=told)
    options = parser.parse_args(argv)
    size = options.tensor_parallel_size
    try:
        spec = read_spec(resolve_model_dir(options.checkpoint))
        shares = [spec.share(Shard(rank, size)) for rank in range(size)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    by_rank = [destinations(Transformer(share, torch_ops, spec.dtype, "meta", 1)) for share in shares]
    asked = spec.known_name(options.name)
    names = [name for name in by_rank[0] if asked in name]
    if not names:
        parser.error(f"no tensor that config.json asks for has {options.name!r} in its name")
    for name in names:
        stored = [targets[name] for targets in by_rank]
        shapes = " or ".join(str(list(shape)) for shape in stored[0].shapes)
        optional = " (can be missing)" if stored[0].optional else ""
        print(f"{name} {shapes}{optional}" + ("" if size > 1 else f" -> {stored[0].fills}"))
        for rank, each in enumerate(stored if size > 1 else []):
            print(f"  rank {rank}: {_part(each)} -> {each.fills}")
    return 0


def _part(stored: Stored) -> str:
    """What a rank reads of a tensor, by the last of its shapes."""
    whole = [slice(0, length) for length in stored.shapes[-1]]
    matrix = len(whole) < 3
    names = ("rows", "columns") if matrix else [f"dimension {index}" for index in range(len(whole))]
    cuts = zip(names, stored.cut(stored.shapes[-1]), whole, strict=False)
    parts = [f"{name} {cut.start}:{cut.stop}" for name, cut, every in cuts if cut not in (ALL, every)]
    return ", ".join(parts) or "all"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    raise SystemExit(main())
