# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one engine exchange while they compute a step.

All ranks call the same methods in the same order with tensors of the same shapes; a rank that calls one
waits for the others. On CUDA the calls only enqueue, and can be captured in graphs.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.shard import WHOLE, Shard

log = logging.getLogger(__name__)

# A rank that waits for another for longer than this gives up. Ranks launch the same steps at the same time:
# one that is late has stopped.
GLOO_TIMEOUT_S = 8.0
NCCL_TIMEOUT_S = 120.0  # while graphs are captured and kernels compiled
# Of FlashInfer's all-reduce; beyond, NCCL is as fast.
MOST_TOKENS = 1024


class Collectives:
    """The collectives of a single rank: there is nothing to exchange."""

    shard: Shard = WHOLE

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks of partial[T, H]. May overwrite it: use the returned tensor."""
        return partial

    def sum(self, values: Tensor) -> Tensor:
        """The same of a tensor of any shape and type."""
        return values

    def gather_columns(self, local: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """On rank 0: the first `width` of all ranks' columns side by side, local[R, n] -> [R, width], in
        `out` when given. Other ranks get `local` back."""
        return local

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        return values

    def minimum(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def agreed(self, values: list[float]) -> list[float]:
        """Rank 0's values, where what ranks measure must not differ."""
        return values

    def settle(self) -> None:
        """Wait until nothing that this rank has enqueued needs the others any more."""

    def close(self) -> None:
        """Forget the others, which have ended, so that this process can have a next engine."""


ALONE = Collectives()


class TorchCollectives(Collectives):
    """Over torch.distributed's default group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard, self._device = shard, device

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self.sum(partial)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def gather_columns(self, local: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        rows, columns = local.shape
        if not rows:
            return local.new_empty((0, width))
        if self.shard.rank:
            dist.gather(local, dst=0)
            return local
        parts = local.new_empty((self.shard.size, rows, columns))
        dist.gather(local, list(parts), dst=0)
        if out is None:
            out = local.new_empty((rows, width))
        for rank, part in enumerate(parts):
            own = out[:, rank * columns : (rank + 1) * columns]
            own.copy_(part[:, : own.shape[1]])
        return out

    def broadcast(self, values: Tensor) -> Tensor:
        if len(values):
            dist.broadcast(values, src=0)
        return values

    def minimum(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def agreed(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        return list(self.broadcast(tensor).tolist())

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        # NCCL would wait for the end of all graphs in which its sums are captured. They end with the process.
        if self._device.type != "cuda":
            dist.destroy_process_group()


class CudaCollectives(TorchCollectives):
    """As TorchCollectives, but up to MOST_TOKENS tokens are summed by FlashInfer's kernels over CUDA IPC: one
    shot for few, two for more, by FlashInfer's own rule.

    Never by NVLink multicast: the workspace is made for backend "trtllm", which has none.
    """

    def __init__(self, shard: Shard, device: torch.device, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(shard, device)
        from flashinfer import comm

        self._comm: Any = comm
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=shard.size,
            rank=shard.rank,
            max_token_num=MOST_TOKENS,
            hidden_dim=hidden_size,
            dtype=dtype,
            group=dist.group.WORLD,
        )

    def all_reduce(self, partial: Tensor) -> Tensor:
        if not 0 < len(partial) <= MOST_TOKENS:
            return super().all_reduce(partial)
        return self._comm.allreduce_fusion(
            partial,
            self._workspace,
            self._comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=True,
            output=torch.empty_like(partial),
        )


def connect(
    shard: Shard,
    rendezvous: str,
    device: torch.device,
    hidden_size: int,
    dtype: torch.dtype,
    plain_torch: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Collectives:
    """Join the ranks of one engine. rendezvous: a file that all of them name, in a folder that others cannot
    write to. plain_torch: without FlashInfer. Waits until all of them are there, and rank 0 has run `before`,
    which can take any time."""
    store = dist.FileStore(rendezvous, shard.size)
    # Weights may take one rank much longer than another. A rank that ends ends all ranks, so this wait ends.
    store.set(f"rank {shard.rank}", "ready")
    missing = set(range(shard.size))

    def how_far() -> str:
        absent = sorted(missing)
        return f"found {shard.size - len(absent)} of {shard.size} ranks; not yet {str(absent)[1:-1]}"

    with telling(how_far):
        while missing := {rank for rank in missing if not store.check([f"rank {rank}"])}:
            time.sleep(0.02)  # its own waiting keeps other threads from running
    log.info("found all %d ranks", shard.size)
    if shard.rank == 0:
        before()
        store.set("joining", "now")
    else:
        with telling(lambda: "waiting for rank 0", done=time.monotonic):
            while not store.check(["joining"]):
                time.sleep(0.02)
    with telling(lambda: f"joining {shard.size} ranks"):
        return _join(shard, store, device, hidden_size, dtype, plain_torch)


def _join(
    shard: Shard,
    store: dist.FileStore,
    device: torch.device,
    hidden_size: int,
    dtype: torch.dtype,
    plain_torch: bool,
) -> Collectives:
    """As connect, once all ranks are there."""
    cuda = device.type == "cuda"
    for interface in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # the ranks are on one host
        os.environ.setdefault(interface, "lo")
    timeout = datetime.timedelta(seconds=NCCL_TIMEOUT_S if cuda else GLOO_TIMEOUT_S)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=shard.rank,
        world_size=shard.size,
        timeout=timeout,
        device_id=device if cuda else None,
    )
    if cuda and not plain_torch:
        return CudaCollectives(shard, device, hidden_size, dtype)
    return TorchCollectives(shard, device)
