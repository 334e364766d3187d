"""A GPU's products played on the CPU: each call is checked as the GPU's library would, and computed in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile.target import pretend_target
from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.program.products import Products, is_product

__all__ = ["played_products"]


class _Played(TorchDispatchMode):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._products = Products(gpu)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_product(op):
            return self._products.multiply(op._schema.name.partition("::")[2], *args, **(kwargs or {}))
        return op(*args, **(kwargs or {}))


@contextmanager
def played_products(gpu: Gpu) -> Iterator[None]:
    """While this runs, GEMMs choose what a GPU would run, and its products are computed on the CPU.

    A product whose operands the GPU's library would refuse raises a ValueError. Results are rounded once.
    """
    with pretend_target(gpu.target), _Played(gpu):
        yield
