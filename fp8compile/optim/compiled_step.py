"""The step of an optimizer with quantized moments, as one function of tensors for all parameters.

It dequantizes the moments, runs the optimizer's update rule on float32 tensors, and quantizes the new moments. Numbers
that change with each step, such as the learning rate, are in the tensor ``scalars``, so that no step recompiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile import ops
from fp8compile._compat import asks_a_constant
from fp8compile.optim.moments import quantized
from fp8compile.quantizers import CurrentScaling
from fp8compile.quantizers.stochastic_rounding import noise, positions

__all__ = ["Job", "Rule", "advance"]

# (parameter, gradient, moments, scalars) -> (what is written, new moments); all float32
Rule = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


@dataclass(frozen=True)
class Job:
    """Tensors that a step reads and writes for one parameter, as this rank's shards.

    Attributes:
        shape: Shape in which the rule sees the parameter, from ``MomentRows.in_blocks``.
        parameter: The parameter: float32, bfloat16 or float16.
        grad: The parameter's gradient; zeros if it has none.
        target: Tensor that receives the rule's first result: the parameter, or another tensor of its size.
        moments: For each moment its values, or its codes and scales; values and codes have the shape ``shape``.
        quantizers: For each moment its quantizer; None for a moment that is not quantized.
        place: Row and column positions from `MomentRows.place`, for stochastic rounding; () means 0, 1, 2, ...
        bf16_seed: Seed of stochastic rounding of a bfloat16 target; None rounds to the nearest.
    """

    shape: tuple[int, ...]
    parameter: Tensor
    grad: Tensor
    target: Tensor
    moments: tuple[tuple[Tensor, ...], ...]
    quantizers: tuple[CurrentScaling | None, ...]
    place: tuple[Tensor, ...] = ()
    bf16_seed: int | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields as a tuple, which `advance` takes; Dynamo guards on a tuple faster than on this object."""
        own = self.parameter.detach(), self.grad.detach(), self.target.detach()
        return self.shape, own, self.moments, self.quantizers, self.place, self.bf16_seed


def advance(rule: Rule, scalars: Tensor, jobs: Sequence[tuple[Any, ...]]) -> None:
    """Run the update rule for each parameter, and write targets (see `Job`) and moments in place.

    Args:
        rule: The optimizer's arithmetic for one parameter.
        scalars: One row per job, float32. A row has 1, or 0 to leave the parameter and its moments unchanged because
            it has no gradient; then the step count, which varies the rounding noise; then the numbers for the rule.
        jobs: Results of `Job.arguments`.
    """
    for row, (shape, (parameter, grad, target), moments, quantizers, place, seed) in zip(scalars, jobs, strict=True):
        active, step, *numbers = row.unbind()
        before = [
            parts[0].float() if quantizer is None else ops.dequantize(*parts, quantizer, torch.float32)
            for parts, quantizer in zip(moments, quantizers, strict=True)
        ]
        values = parameter.float().reshape(shape), grad.float().reshape(shape)
        result, after = rule(*values, before, numbers)
        noisy = seed is not None or not all(map(is_local, quantizers))
        matrix = math.prod(shape[:-1]), math.prod(shape[-1:])
        place = _of_step(place or positions(matrix, parameter.device), step) if noisy else ()
        for parts, quantizer, moment in zip(moments, quantizers, after, strict=True):
            found = (moment,) if quantizer is None else quantized(moment, quantizer, place)
            for part, new in zip(parts, found, strict=True):
                _write(part, new, active)
        if seed is not None and target.dtype == torch.bfloat16:
            result = _rounded_to_bfloat16(result, seed, *place)
        _write(target, result, active)


@asks_a_constant
def is_local(quantizer: CurrentScaling | None) -> bool:
    """Whether a quantizer's codes depend only on values and not on positions; True for None."""
    return quantizer is None or quantizer.is_local()


def _of_step(place: tuple[Tensor, ...], step: Tensor) -> tuple[Tensor, Tensor]:
    """Add the step count, times 2**32, to the row positions, so that the rounding noise differs per step."""
    rows, columns = place
    return rows + step.to(torch.int64) * 2**32, columns


def _write(target: Tensor, values: Tensor, active: Tensor) -> None:
    target.copy_(torch.where(active > 0, values.reshape(target.shape).to(target.dtype), target))


def _rounded_to_bfloat16(x: Tensor, seed: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Round float32 values stochastically to bfloat16 numbers, without bias; the result stays float32.

    Noise depends on ``seed`` and on each value's position, ``rows`` and ``columns``. Values that bfloat16 represents,
    including infinities, do not change; a NaN stays a NaN.
    """
    matrix = x.reshape(len(rows), len(columns)).contiguous()
    below = (noise(matrix, seed, rows, columns) * 65536.0).to(torch.int32)  # less than the 16 bits that are cut
    rounded = ((matrix.view(torch.int32) + below) & -65536).view(torch.float32)
    # the NaN of CUDA, 0x7FFFFFFF, would overflow to -0.0
    return torch.where(matrix.isnan(), matrix, rounded).view(x.shape)
