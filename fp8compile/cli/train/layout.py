"""How the processes of a run share the training: who has which rows of the batch, and which part of the model.

    rank = (replica * shards + shard) * tp + part

Ranks with one replica and one shard cut the model over `tp` parts and see the same rows. `shards` of them have a part
of each parameter (FSDP), which `replicas` hold again (HSDP). Experts are spread over --ep ranks that follow one
another (EP), and the next ones have them again; without FSDP the rest has a replica for each part of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from fp8compile.cli.train.config import TrainConfig
    from fp8compile.cli.train.ranks import Ranks

__all__ = ["Layout", "layout_of"]

REPLICAS = 2  # of --hsdp


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where this process is among those of the run.

    Attributes:
        rank: Its number.
        replicas: How often there is each shard of a parameter.
        shards: Over how many a parameter is sharded.
        tp: Over how many the model is cut.
    """

    rank: int = 0
    replicas: int = 1
    shards: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """Parts of the batch."""
        return self.replicas * self.shards

    @property
    def size(self) -> int:
        """Processes."""
        return self.dp * self.tp

    @property
    def _names(self) -> tuple[str, ...]:
        data = () if self.dp == 1 else ("shard",) if self.replicas == 1 else ("replicate", "shard")
        return (*data, "tp") if self.tp > 1 else data

    def rows(self, batch: int) -> slice:
        """Return which rows of a batch are this process' own."""
        own = batch // self.dp
        first = self.rank // self.tp * own
        return slice(first, first + own)

    def mean(self, values: list[float]) -> float:
        """Return the mean over the parts of the batch, added in their order.

        Args:
            values: One of each rank; those of one part are the same.
        """
        return sum(values[:: self.tp]) / self.dp

    def tp_mesh(self, device_type: str) -> DeviceMesh:
        """Return the ranks that the model is cut over."""
        return _mesh(self, device_type)["tp"]

    def data_mesh(self, device_type: str) -> DeviceMesh:
        """Return the ranks that parameters are sharded over; before them their replicas, if there are any."""
        names = tuple(name for name in self._names if name != "tp")
        mesh = _mesh(self, device_type)
        return mesh if names == self._names else mesh[names if len(names) > 1 else names[0]]

    def experts_mesh(self, device_type: str, ep: int) -> DeviceMesh:
        """Return the ranks that this one's experts are spread over, ``ep`` of them."""
        return _experts_mesh(self.size, ep, device_type)["ep"]

    def experts_replicas(self, device_type: str, ep: int) -> ProcessGroup | None:
        """Return the ranks that have the same experts as this one, if experts are spread over fewer than all."""
        return None if ep == self.size else _experts_mesh(self.size, ep, device_type).get_group("again")

    def data_group(self) -> ProcessGroup:
        """Return the ranks that see different rows and have the same part of the model."""
        return _data_group(self)


# Once a run, not once a training: a group costs a connection.
@cache
def _mesh(layout: Layout, device_type: str) -> DeviceMesh:
    sizes = {"replicate": layout.replicas, "shard": layout.shards, "tp": layout.tp}
    names = layout._names
    return torch.distributed.init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


@cache
def _experts_mesh(size: int, ep: int, device_type: str) -> DeviceMesh:
    names = ("again", "ep")
    return torch.distributed.init_device_mesh(device_type, (size // ep, ep), mesh_dim_names=names)


@cache
def _data_group(layout: Layout) -> ProcessGroup:
    # Every process makes every group, in the same order.
    groups = [torch.distributed.new_group(list(range(part, layout.size, layout.tp))) for part in range(layout.tp)]
    return groups[layout.rank % layout.tp]


def _start_by(processes: int) -> str:
    return f"start it by torchrun --nproc-per-node {processes} -m fp8compile train"


def _started(size: int) -> str:
    return "this is one" if size == 1 else f"torchrun started {size}"


def _data_parallel(config: TrainConfig, size: int) -> int:
    """Into how many parts a run with --fsdp of so many processes cuts its batch."""
    flag = "--hsdp" if config.hsdp else "--graph-fsdp" if config.graph_fsdp else "--fsdp"
    flags = flag if config.tp == 1 else f"{flag} --tp {config.tp}"
    unit = config.tp * (2 * REPLICAS if config.hsdp else 1)
    least = unit if config.hsdp else 2 * unit
    if size < least or size % unit:
        takes = f"{unit} processes or a multiple of them" if least == unit else f"{least} processes or more"
        multiple = f", a multiple of {unit}" if least > unit > 1 else ""
        raise UserError(f"{flags} takes {takes}{multiple}, and {_started(size)}; {_start_by(least)}")
    return _as_begun(config, size)


def _as_begun(config: TrainConfig, size: int) -> int:
    """Into how many parts the batch is cut, which is as many as when the run began."""
    if config.dp not in (0, size // config.tp):
        raise UserError(
            f"the run began with {config.dp * config.tp} processes and torchrun started {size}; other numbers of them "
            f"add in another order: {_start_by(config.dp * config.tp)}"
        )
    return size // config.tp


def layout_of(config: TrainConfig, ranks: Ranks) -> Layout:
    """Return how the processes share a run.

    Args:
        config: The run's configuration.
        ranks: The processes.

    Raises:
        UserError: There are more or fewer than it takes.
    """
    if ranks.size % config.ep:
        raise UserError(
            f"--ep {config.ep} takes {config.ep} processes or a multiple of them, and {_started(ranks.size)}; "
            f"{_start_by(config.ep)}"
        )
    if config.fsdp:
        replicas = REPLICAS if config.hsdp else 1
        shards = _data_parallel(config, ranks.size) // replicas
        return Layout(rank=ranks.rank, replicas=replicas, shards=shards, tp=config.tp)
    if config.ep > 1:
        return Layout(rank=ranks.rank, replicas=_as_begun(config, ranks.size), tp=config.tp)
    if config.tp == ranks.size:
        return Layout(rank=ranks.rank, tp=config.tp)
    if ranks.size == 1:
        raise UserError(f"--tp {config.tp} takes {config.tp} processes and this is one; {_start_by(config.tp)}")
    raise UserError(
        f"torchrun started {ranks.size} processes and --tp is {config.tp}; add --fsdp, which shards parameters and "
        f"batch over them, or --tp {ranks.size}, which cuts the model; or start "
        f"{'without torchrun' if config.tp == 1 else f'{config.tp} processes'}"
    )
