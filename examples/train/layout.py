"""How the processes of a run share the training: which rows of the batch, and which part of the model, each has.

    rank = (replica * shards + shard) * tp + part

The `tp` ranks with the same replica and shard have different parts of the model, and see the same rows. With FSDP,
each of `shards` groups of such ranks has a shard of each parameter; with HSDP, there are `replicas` copies of the
shards. Experts are spread over `ep` neighbouring ranks, and the next `ep` ranks have the same experts again. Without
FSDP, all other parameters are replicated for each part of the batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from examples.train.config import TrainConfig, UsageError

REPLICAS = 2  # number of replicas with --hsdp


@contextmanager
def joined() -> Iterator[None]:
    """Start the process group if torchrun started this process; in this context only the first rank prints."""
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        with open(os.devnull, "w") as nowhere, nullcontext() if is_first() else redirect_stdout(nowhere):
            yield
    finally:
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is the one that prints and writes metrics."""
    return not dist.is_initialized() or dist.get_rank() == 0


def all_values(value: float) -> list[float]:
    """Gather a number from each rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor(value, dtype=torch.float64))
    return [each.item() for each in values]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The numbers of ranks in each kind of parallelism, and the number of this process.

    Attributes:
        rank: Number of this process.
        replicas: Number of copies of each shard of a parameter.
        shards: Number of shards into which FSDP cuts a parameter.
        tp: Number of parts into which tensor parallelism cuts the model.
        ep: Number of ranks that have all experts together.
    """

    rank: int = 0
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Number of parts of the batch."""
        return self.replicas * self.shards

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.dp * self.tp

    @property
    def _names(self) -> tuple[str, ...]:
        data = () if self.dp == 1 else ("shard",) if self.replicas == 1 else ("replicate", "shard")
        return (*data, "tp") if self.tp > 1 else data

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this process trains on."""
        own = batch // self.dp
        first = self.rank // self.tp * own
        return slice(first, first + own)

    def mean(self, values: list[float]) -> float:
        """The mean of the ranks' values over the parts of the batch; ranks of one part have the same value."""
        return sum(values[:: self.tp]) / self.dp

    def tp_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of tensor parallel ranks; None if the model is not cut."""
        return _mesh(self, device_type)["tp"] if self.tp > 1 else None

    def data_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh that FSDP shards over. If there are replicas, they are its first dim."""
        names = tuple(name for name in self._names if name != "tp")
        mesh = _mesh(self, device_type)
        return mesh if names == self._names else mesh[names if len(names) > 1 else names[0]]

    def experts_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of ranks that experts are spread over."""
        return _experts_mesh(self.size, self.ep, device_type)["ep"]

    def experts_replicas(self, device_type: str) -> ProcessGroup | None:
        """The group of ranks that have the same experts as this one; None if no other rank has them."""
        mesh = _experts_mesh(self.size, self.ep, device_type)
        return None if self.ep == self.size else mesh.get_group("again")

    def data_group(self) -> ProcessGroup:
        """The group of ranks that have the same part of the model and see different rows."""
        return _data_group(self)


# Cached for the whole run, because each process group costs a connection.
@cache
def _mesh(layout: Layout, device_type: str) -> DeviceMesh:
    sizes = {"replicate": layout.replicas, "shard": layout.shards, "tp": layout.tp}
    names = layout._names
    return init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


@cache
def _experts_mesh(size: int, ep: int, device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (size // ep, ep), mesh_dim_names=("again", "ep"))


@cache
def _data_group(layout: Layout) -> ProcessGroup:
    # Every process has to create every group, in the same order.
    groups = [dist.new_group(list(range(part, layout.size, layout.tp))) for part in range(layout.tp)]
    return groups[layout.rank % layout.tp]


def layout_of(config: TrainConfig, *, rank: int = 0, size: int = 1) -> Layout:
    """The layout of a run's processes; raises a `UsageError` if its options need another number of processes."""
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    unit = config.tp * (2 * REPLICAS if config.hsdp else 1)
    least = max(unit, config.ep, 2 * config.tp if config.is_sharded else 1)
    shares_batch = config.is_sharded or config.ep > 1
    if size < least or size % unit or size % config.ep or (size > least and not shares_batch):
        more = f" or more, a multiple of {max(unit, config.ep)}" if shares_batch else "; --fsdp takes more"
        raise UsageError(
            f"these options take {least} processes{more}, and there {'is' if size == 1 else 'are'} {size}; start by "
            f"torchrun --nproc-per-node {least} -m examples.train"
        )
    parts = size // config.tp
    if config.batch % parts:
        raise UsageError(f"--batch is {config.batch}, which {parts} processes share; make it a multiple of {parts}")
    replicas = REPLICAS if config.hsdp else 1 if config.is_sharded else parts
    return Layout(rank=rank, replicas=replicas, shards=parts // replicas, tp=config.tp, ep=config.ep)
