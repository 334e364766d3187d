"""Scale rules of two levels: outer scale, blocks' scales and multipliers (1 / scale) from amaxes.

    outer_amax f32 --> outer_scale f32, one for the whole tensor -------------+
                                                                              +--> multiplier f32 of a block's values
    amax of a block, outer_amax --> block scale, an e4m3 number in a byte ----+

A value is its e2m1 code times the block's scale times the outer scale. The outer scale maps the largest amax to the
largest e2m1 number times the largest e4m3 number, 6 * 448 = 2688.

Sources: NVIDIA's TransformerEngine, ``custom_recipes/quantization_nvfp4.py``; torchao,
``prototype/mx_formats/nvfp4_tensor.py``. Each division is rounded to float32 as in these sources, see ``scale_rules``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.formats import E2M1, E4M3, FLOAT32_MAX
from fp8compile.quantizers.scale_rules import exact_quotient, nan_where_not_finite

__all__ = ["TWO_LEVEL_RULES", "TwoLevelRule"]

LARGEST = E2M1.max * E4M3.max
LARGEST_RECIPROCAL = 2.0**126  # the largest multiplier whose reciprocal is a normal float32
SMALLEST_BLOCK_SCALE = 2.0**-6  # torchao's least block scale: the smallest normal e4m3 number


@dataclass(frozen=True)
class TwoLevelRule:
    """Three functions that together compute a tensor's outer scale, its blocks' scales and multipliers.

    Attributes:
        outer_scale: Takes outer_amax, the whole tensor's amax, (1,), and returns the outer scale, (1,) float32.
        block_scale: Takes the blocks' amaxes and outer_amax, and returns the blocks' scales as e4m3 bytes.
        multiplier: Takes these bytes and the outer scale, and returns the multipliers (1 / scale) of the blocks'
            values, float32.
    """

    outer_scale: Callable[[Tensor], Tensor]
    block_scale: Callable[[Tensor, Tensor], Tensor]
    multiplier: Callable[[Tensor, Tensor], Tensor]


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() / b.double()).float()


# ---------------------------------------------------------------------------------- TransformerEngine


def _te_outer_multiplier(outer_amax: Tensor, most: float) -> Tensor:
    multiplier = exact_quotient(LARGEST, outer_amax).clamp(max=most)
    return nan_where_not_finite(outer_amax, multiplier)


def _te_outer_scale(outer_amax: Tensor, most: float = FLOAT32_MAX) -> Tensor:
    return exact_quotient(1.0, _te_outer_multiplier(outer_amax, most))


def _te_block_scale(amax: Tensor, outer_amax: Tensor, most: float = FLOAT32_MAX) -> Tensor:
    sixth = exact_quotient(1.0, torch.full((), E2M1.max, device=amax.device))
    return E4M3.encode(amax * (_te_outer_multiplier(outer_amax, most) * sixth))


def _te_multiplier(scale: Tensor, outer_scale: Tensor) -> Tensor:
    return exact_quotient(1.0, E4M3.decode(scale) * outer_scale).clamp(max=FLOAT32_MAX)


# ---------------------------------------------------------------------------------- for formats with reciprocals

# A format may store the reciprocal of the outer scale, which its reader inverts. TransformerEngine's outer scale is a
# reciprocal itself, and for normal numbers 1 / (1 / (1 / x)) is 1 / x (all 2**23 mantissas were tried). So the two
# rules differ only if the outer amax is below 2688 / 2**126.


def _reciprocal_outer_scale(outer_amax: Tensor) -> Tensor:
    return _te_outer_scale(outer_amax, LARGEST_RECIPROCAL)


def _reciprocal_block_scale(amax: Tensor, outer_amax: Tensor) -> Tensor:
    return _te_block_scale(amax, outer_amax, LARGEST_RECIPROCAL)


# ---------------------------------------------------------------------------------- torchao


def _ao_outer_scale(outer_amax: Tensor) -> Tensor:
    scale = (outer_amax.double() / LARGEST).float()
    # 1.0 for a tensor of zeros, or an amax whose scale underflows; torchao divides by zero in these cases
    return nan_where_not_finite(outer_amax, torch.where(scale == 0, 1.0, scale))


def _ao_block_scale(amax: Tensor, outer_amax: Tensor) -> Tensor:
    sixth = (amax.double() / E2M1.max).float()
    return E4M3.encode(_quotient(sixth, _ao_outer_scale(outer_amax)).clamp(min=SMALLEST_BLOCK_SCALE))


def _ao_multiplier(scale: Tensor, outer_scale: Tensor) -> Tensor:
    inverse = exact_quotient(1.0, outer_scale).clamp(max=FLOAT32_MAX)
    return _quotient(inverse, E4M3.decode(scale))


TWO_LEVEL_RULES = {
    "transformer_engine": TwoLevelRule(_te_outer_scale, _te_block_scale, _te_multiplier),
    "reciprocal": TwoLevelRule(_reciprocal_outer_scale, _reciprocal_block_scale, _te_multiplier),
    "torchao": TwoLevelRule(_ao_outer_scale, _ao_block_scale, _ao_multiplier),
}
