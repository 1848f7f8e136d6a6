# SPDX-License-Identifier: Apache-2.0
"""The products of a decoder layer with and without adapters (LoRA), each and all four behind each other.

    python perf_configs/kernels/bench_adapted.py [--rows 1,32] [--adapters 8] [--rank 16] [--trials 10]
        [--alternatives]

Of an 8B Llama's shape in bfloat16 with random values. A row of x has one of the adapters, in turns. Each time
is that of a CUDA graph of some layers' calls over their number; the layers are more than L2 holds.

--alternatives: also with the tilings of `alternatives` below. Each one compiles a kernel, for some seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import torch
from bench_step import graph_time
from torch import Tensor
from triton.runtime.errors import OutOfResources

from client.arguments import argument_parser, integer, integers
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.core.tuned import Tiling
from flashinfer_backend.ops import tilings
from flashinfer_backend.ops.weight import Chosen, LowRank, Weight

LAYERS, TIMES = 6, 4  # layers with values of their own; how often a graph goes through them
HIDDEN, INNER = 4096, 14336
# Role -> columns, rows of its modules.
SHAPES = {
    "qkv": (HIDDEN, (HIDDEN, 1024, 1024)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
Call = Callable[[int, Chosen | None], object]


def values(*shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") * 0.02).bfloat16()


def make_weight(role: str, adapters: int, rank: int) -> Weight:
    columns, modules = SHAPES[role]
    ends = tuple(torch.tensor(modules).cumsum(0).tolist())
    weight = Weight(role, values(ends[-1], columns))
    room = max(16, 1 << (rank - 1).bit_length())
    down, up = values(adapters, len(modules), room, columns), values(adapters, ends[-1], room)
    weight.adapters = LowRank(down, up, ends)
    return weight


def alternatives(role: str, rows: int, weight: Weight) -> Iterator[tuple[str, Tiling]]:
    """Tilings next to those of the device's file."""
    own = tilings.choose_adapted(role, rows, weight.data)
    if own is None:
        return
    fields = [{"split": 1}, {"split": 2}, {"stages": own.stages + 1}, {"stages": own.stages - 1}]
    fields += [{"prefetch": 0}, {"prefetch": 131072}, {"rows": 128, "inner": 128}]
    for changed in fields:
        tiling = msgspec.structs.replace(own, **changed)
        if tiling != own and tiling.fits(weight.shape, role == "gate_up", rows):
            yield " ".join(f"{name} {value}" for name, value in changed.items()), tiling


class Bench:
    """Layers with random values, and a step's rows."""

    def __init__(self, layers: Sequence[dict[str, Weight]], adapters: int, rows: int, trials: int) -> None:
        from flashinfer_backend.ops import cuda_ops, triton_linear

        self._layers, self._trials, self._ops, self._triton = layers, trials, cuda_ops, triton_linear
        self._x, self._inner, self._residual = values(rows, HIDDEN), values(rows, INNER), values(rows, HIDDEN)
        self._norm = values(HIDDEN) + 1
        places = torch.arange(rows, device="cuda") % adapters
        self._chosen = cuda_ops.group_adapters(places.int(), adapters)

    def served(self, role: str, layer: int, chosen: Chosen | None) -> None:
        """As the engine computes it."""
        weight = self._layers[layer][role]
        if role == "qkv":
            self._ops.norm_linear(self._x, self._norm, 1e-5, weight, None, chosen=chosen)
        elif role == "gate_up":
            self._ops.norm_gate_up_silu(self._x, self._norm, 1e-5, weight, chosen)
        else:
            self._ops.linear_add(self._x if role == "o" else self._inner, weight, self._residual, chosen)

    def all_four(self, layer: int, chosen: Chosen | None) -> None:
        for role in SHAPES:
            self.served(role, layer, chosen)

    def cut(self, role: str, tiling: Tiling, layer: int, chosen: Chosen | None) -> None:
        """By a tiling."""
        weight, normed = self._layers[layer][role], role in ("qkv", "gate_up")
        assert weight.adapters is not None
        self._triton.linear(
            self._inner if role == "down" else self._x,
            weight.data,
            tiling,
            self._norm if normed else None,
            1e-5,
            residual=None if normed else self._residual,
            gated=role == "gate_up",
            adapters=None if chosen is None else (weight.adapters, chosen),
        )

    def measure(self, call: Call) -> str:
        """Microseconds of a call without adapters and with."""
        times = []
        for chosen in (None, self._chosen):
            layers = list(range(len(self._layers))) * TIMES
            body = lambda chosen=chosen, layers=layers: [call(i, chosen) for i in layers]  # noqa: E731
            times.append(graph_time(body, self._trials) / len(layers))
            self._residual.normal_()  # cuBLAS adds to it in place
        return f"{times[0]:7.2f} -> {times[1]:7.2f} {times[1] - times[0]:+6.2f}"


def main() -> None:
    parser = argument_parser(None, __doc__)
    parser.add_argument("--rows", type=integers(1), default="1,32", help="(default: %(default)s)")
    parser.add_argument("--adapters", type=integer(1), default=8, help="(default: %(default)s)")
    parser.add_argument("--rank", type=integer(1, 256), default=16, help="(default: %(default)s)")
    parser.add_argument("--trials", type=integer(1), default=20, help="(default: %(default)s)")
    parser.add_argument("--alternatives", action="store_true")
    options = parser.parse_args()
    require_cuda(parser)
    layers = [
        {role: make_weight(role, options.adapters, options.rank) for role in SHAPES} for _ in range(LAYERS)
    ]
    print(f"{torch.cuda.get_device_name()}, {options.adapters} adapters of rank {options.rank}")
    print("| rows | product | us without -> with adapters | by |\n|---:|---|---|---|")
    for rows in options.rows:
        bench = Bench(layers, options.adapters, rows, options.trials)
        for role in SHAPES:
            tiling = tilings.choose_adapted(role, rows, layers[0][role].data)
            found = bench.measure(partial(bench.served, role))
            print(f"| {rows} | {role} | {found} | as served: {tiling} |", flush=True)
        print(f"| {rows} | all four | {bench.measure(bench.all_four)} | as served |", flush=True)
        for role in SHAPES if options.alternatives else ():
            for name, tiling in alternatives(role, rows, layers[0][role]):
                try:
                    found = bench.measure(partial(bench.cut, role, tiling))
                except OutOfResources as error:
                    found = str(error)
                print(f"| {rows} | {role} | {found} | {name} |", flush=True)


if __name__ == "__main__":
    main()
