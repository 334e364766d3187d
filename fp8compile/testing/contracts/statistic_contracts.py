"""Contracts of statistics registered by `fp8compile.library.register_statistic`, one function each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile.layout.quantized import Plain
from fp8compile.monitor.definitions import STATISTICS, TOTALS, Total
from fp8compile.monitor.elements import Elements, elements_of
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import CurrentScaling, TwoLevelScaling
from fp8compile.testing.contracts.contract import BrokenContract, check_contracts, looked_at

__all__ = ["check_statistic"]

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "sum": (torch.bool, torch.int32, torch.float32, torch.float64),
    "max": (torch.float32,),
}
QUANTIZERS = (
    CurrentScaling(),
    CurrentScaling(block=(1, -1), format="e5m2"),
    TwoLevelScaling(block=(1, 16)).unpacked(),
)


def _samples() -> Iterator[Elements]:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    x[1] *= 2.0**-20
    for values in (x, x.index_fill(0, torch.tensor([3]), torch.nan), torch.zeros(2, 16)):
        for quantizer in QUANTIZERS:
            part = Plain(values.bfloat16())
            yield elements_of(part, quantize_part(part, quantizer, PYTHON_OF_STEPS), values.shape, along_tokens=False)


def _taken(elements: Elements, rows: Tensor) -> Elements:
    shape = elements.values.shape
    own = {
        each.name: getattr(elements, each.name).expand(shape)[rows]
        for each in fields(elements)
        if each.name in ("values", "codes", "scale")
    }
    return replace(elements, **own)


def returns_a_number_of_each_element(total: Total) -> None:
    """The statistic returns a number for each element, in a dtype that ``total.combine`` allows."""
    for elements in looked_at(_samples()):
        found: Any = total.compute(elements)
        is_right = isinstance(found, Tensor) and found.shape == elements.values.shape
        if not is_right or found.dtype not in DTYPES[total.combine]:
            names = ", ".join(str(each) for each in DTYPES[total.combine])
            raise BrokenContract(
                expected=f"shape {tuple(elements.values.shape)}, one of {names}",
                found=f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else repr(found),
                mend="compute a number of each element, and leave sums and maxima to combine",
            )


def a_part_has_the_numbers_of_the_whole(total: Total) -> None:
    """The number for an element depends on no other element, so that ranks may hold shards of a tensor."""
    for elements in looked_at(_samples()):
        rows = torch.tensor([1, 0])
        part, whole = total.compute(_taken(elements, rows)), total.compute(elements)[rows]
        if not torch.equal(
            part.nan_to_num(7.0) if part.is_floating_point() else part,
            whole.nan_to_num(7.0) if whole.is_floating_point() else whole,
        ):
            raise BrokenContract(
                expected="the same values for two rows alone as among all rows",
                found="other numbers",
                mend="compute elementwise; divide by totals['numel'] in finish",
            )


def reads_no_value_on_the_host(total: Total) -> None:
    """The statistic runs on fake tensors, so that it can be traced into a graph."""
    for elements in looked_at(_samples()):
        with FakeTensorMode() as mode:
            own = {each.name: getattr(elements, each.name) for each in fields(elements)}
            fake: dict[str, Any] = {
                name: mode.from_tensor(each) for name, each in own.items() if isinstance(each, Tensor)
            }
            try:
                total.compute(replace(elements, **fake))
            except Exception as error:
                raise BrokenContract(
                    expected="a result without data",
                    found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    mend="write plain PyTorch without .item(), float(), if on a tensor, or NumPy",
                ) from error


CONTRACTS = (returns_a_number_of_each_element, a_part_has_the_numbers_of_the_whole, reads_no_value_on_the_host)


def check_statistic(name: str) -> None:
    """Check that a registered statistic can be traced, and that shards give the same numbers as the full tensor.

    Prints each contract that holds.

    Args:
        name: The name that was passed to ``fp8compile.library.register_statistic``.

    Raises:
        ValueError: No statistic has this name.
        AssertionError: The statistic breaks a contract. The text says what was expected, found, and how to fix it.
    """
    if name not in STATISTICS:
        raise ValueError(f"check_statistic: there is no statistic {name!r}; statistics are {', '.join(STATISTICS)}.")
    for total in STATISTICS[name].totals:
        check_contracts(f"{name}: {total}" if total != name else name, CONTRACTS, (TOTALS[total],))
