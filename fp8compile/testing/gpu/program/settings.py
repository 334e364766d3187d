"""Options for generating and running a GPU's code, and the ways to run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.program.arithmetic import Arithmetic

__all__ = ["Settings", "RunConfig"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `run_gpu_program`, after validation."""

    gpu: Gpu
    precision_casts: bool
    arithmetic: Arithmetic
    poison: int
    orders: tuple[str, ...]
    configurations: tuple[int, ...] | None  # None: the largest blocks; empty: all
    templates: tuple[int, ...] | None  # None: all; empty: products by the GPU's libraries


@dataclass(frozen=True)
class RunConfig:
    """One way to run generated kernels: an order of Triton programs, and a configuration.

    Attributes:
        order: Order in which the Triton programs of a launch run.
        configuration: Number of the configuration that each kernel uses; None: with the fewest Triton programs.
    """

    order: str
    configuration: int | None

    def __str__(self) -> str:
        blocks = "the largest blocks" if self.configuration is None else f"configuration {self.configuration}"
        return f"programs {self.order}, {blocks}"

    def choose(self, grids: list[tuple[int, ...]]) -> int:
        """Number of the configuration to use; ``grids`` has the grid of each of a kernel's configurations."""
        if self.configuration is not None:
            return min(self.configuration, len(grids) - 1)
        return min(range(len(grids)), key=lambda number: torch.Size(grids[number]).numel())
