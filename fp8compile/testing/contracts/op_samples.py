"""Inputs for an op's contracts: its own samples, and inputs derived from them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8compile.ops.registry import Op
from fp8compile.testing.contracts.contract import shown
from fp8compile.testing.samples import samples_of

__all__ = ["all_samples", "filled", "samples_on", "some_samples", "tensors_of", "without_nan"]

COMPILED_SAMPLES = 8


@cache
def all_samples(op: Op) -> tuple[tuple[Any, ...], ...]:
    """Tuples of arguments that the op declares as its samples, completed by the defaults of ``op.impl``.

    Raises:
        TypeError: The op yields something other than tuples of impl's arguments.
    """
    samples, parameters = list(samples_of(op)()), inspect.signature(op.impl).parameters
    defaults = [each.default for each in parameters.values()]
    given: list[Any] = samples or [None]
    for args in given:
        if not isinstance(args, (tuple, list)) or not _are_arguments(args, defaults):
            what = f"yields {shown((args,))}" if samples else "yields nothing"
            raise TypeError(
                f"check_op: samples of {op.name} {what}; it must yield tuples of impl's arguments, "
                f"({', '.join(parameters)})."
            )
    return tuple((*args, *defaults[len(args) :]) for args in samples)


def _are_arguments(args: Sequence[Any], defaults: Sequence[Any]) -> bool:
    """Whether ``args`` are neither too few nor too many for a function whose parameters have these ``defaults``."""
    return len(args) <= len(defaults) and inspect.Parameter.empty not in defaults[len(args) :]


def samples_on(op: Op, device: torch.device) -> list[tuple[Any, ...]]:
    """All samples of an op, moved to a device; strides are preserved."""
    return [tuple(_moved(arg, device) for arg in args) for args in all_samples(op)]


def _moved(arg: Any, device: torch.device) -> Any:
    if not isinstance(arg, Tensor) or arg.device == device:
        return arg
    moved = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
    return moved.copy_(arg)


def _dtypes(args: tuple[Any, ...]) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors_of(args))


def _has_elements(args: tuple[Any, ...]) -> bool:
    return all(tensor.numel() for tensor in tensors_of(args))


def _with_dtypes(args: tuple[Any, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...]:
    """Cast the tensors among the arguments to ``dtypes``, which has an entry for each tensor in order."""
    wanted = iter(dtypes)
    return tuple(arg.to(next(wanted)) if isinstance(arg, Tensor) else arg for arg in args)


def filled(op: Op, samples: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield arguments without empty tensors, for each combination of dtypes that only samples with empty tensors have.

    They are another sample, cast to these dtypes. If ``op.impl`` takes no such sample, nothing is yielded.
    """
    full = [args for args in samples if _has_elements(args)]
    seen = set(map(_dtypes, full))
    for dtypes in dict.fromkeys(map(_dtypes, samples)):
        for args in full if dtypes not in seen else ():
            pairs = list(zip(_dtypes(args), dtypes, strict=False))
            castable = all(a == b or (a.is_floating_point and b.is_floating_point) for a, b in pairs)
            if len(pairs) == len(dtypes) == len(tensors_of(args)) and castable:
                try:
                    op.impl(*(found := _with_dtypes(args, dtypes)))
                except Exception:  # the op refuses these options in that dtype; those of another sample may do
                    continue
                yield found
                break


def some_samples(op: Op, device: torch.device) -> list[tuple[Any, ...]]:
    """Up to 8 samples of an op, and a nonempty sample for each combination of dtypes that the 8 lack."""
    samples = samples_on(op, device)
    count = min(COMPILED_SAMPLES, len(samples))
    chosen = [samples[index * len(samples) // count] for index in range(count)]
    seen = {_dtypes(args) for args in chosen if _has_elements(args)}
    for args in (*samples, *filled(op, samples)):
        if _has_elements(args) and _dtypes(args) not in seen:
            chosen.append(args)
            seen.add(_dtypes(args))
    return chosen


def tensors_of(args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors among an op's arguments, including those in lists and tuples."""
    every = (each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return [each for each in every if isinstance(each, Tensor)]


def without_nan(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace each NaN in the arguments by 1, and each infinity by the largest finite number of its sign."""
    return tuple(a.nan_to_num(1.0) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
