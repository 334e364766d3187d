"""Launch: one launch of a Triton kernel, in eager mode or in compiled code, with candidates to choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triton import Config

__all__ = ["Candidates", "Launch"]

Candidates = tuple[Config, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of a ``triton.jit`` kernel on an op's tensors.

    Attributes:
        kernel: The kernel.
        grid: Returns the numbers of programs, int or SymInt, for the constants of a candidate.
        arguments: The kernel's arguments by name: tensors (the op's arguments and results, no views of them), numbers,
            None, and constants that all candidates have. Candidates are a function of these constants, because
            Inductor tells kernels apart by the function and its constants.
        writes: Names of the pointers that the kernel writes to.
        zeroed: Names of those among them whose tensors are zeros before the launch. The kernel updates them by
            atomic maxima, so a candidate can be timed without making them zeros again.
        candidates: Numbers of warps and stages, and constants, by which the kernel computes the same bits. The first
            is taken in eager mode; compiled code times all of them on the user's GPU.
    """

    kernel: Any
    grid: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    arguments: Mapping[str, Any]
    writes: tuple[str, ...]
    zeroed: tuple[str, ...] = ()
    candidates: Candidates

    def __call__(self) -> None:
        """Launch the kernel with the first candidate."""
        first = self.candidates[0]
        for name in self.zeroed:
            self.arguments[name].zero_()
        grid = self.grid(first.kwargs)
        if 0 not in grid:
            options = {"num_warps": first.num_warps, "num_stages": first.num_stages}
            self.kernel[grid](**self.arguments, **first.kwargs, **options)
