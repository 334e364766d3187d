"""Functions that rebuild quantized tensors from pickles, which name these functions: never rename one.

``torch.load(weights_only=True)`` calls registered functions only. The four functions here are registered, and check
their arguments. No tensor class is registered, because a file could then set its attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.shapes import scale_shape, values_shape
from fp8compile.quantizers import Quantizer
from fp8compile.tensor.check_arguments import SOURCE_DTYPES
from fp8compile.tensor.fsdp2_gather_policy import BOTH, GatherPolicy
from fp8compile.tensor.quantized_parameter import EXTENTS, SLICE, QuantizedParameter, as_leaf
from fp8compile.tensor.quantized_tensor import QuantizedTensor

__all__ = ["load_pair", "load_parameter", "load_stack", "load_tensor"]


def _check(
    codes: Tensor,
    scale: Tensor,
    quantizer: Quantizer,
    dtype: torch.dtype,
    outer_scale: Tensor | None = None,
    *,
    matrices: int | None = None,
) -> None:
    kinds = ((codes, Tensor), (scale, Tensor), (quantizer, Quantizer), (dtype, torch.dtype))
    if not all(isinstance(value, kind) for value, kind in kinds):
        found = [type(value).__name__ for value, _ in kinds]
        raise TypeError(f"load: a quantized tensor must have codes, a scale, a quantizer and a dtype, got {found}.")
    if dtype not in SOURCE_DTYPES:
        raise ValueError(f"load: the file has a quantized tensor of {dtype}; it must be bfloat16, float16 or float32.")
    if matrices is None:
        expected = quantizer.scale_shape(quantizer.values_shape(codes.shape))
    else:
        expected = scale_shape(values_shape(codes.shape, quantizer), quantizer)
    if codes.dtype != torch.uint8 or scale.dtype != quantizer.scale_dtype() or scale.shape != expected:
        raise ValueError(
            f"load: the file has codes {tuple(codes.shape)}, {codes.dtype}, and a scale {tuple(scale.shape)}, "
            f"{scale.dtype}. For {quantizer!r}, codes must be torch.uint8, and the scale must be {tuple(expected)}, "
            f"{quantizer.scale_dtype()}. Was the file modified after torch.save?"
        )
    outer_shape = (matrices or 1,)
    has_outer = (
        isinstance(outer_scale, Tensor) and outer_scale.shape == outer_shape and outer_scale.dtype == torch.float32
    )
    if has_outer != quantizer.has_outer_scale() or (outer_scale is not None and not has_outer):
        raise ValueError(
            f"load: the file has a global scale {outer_scale!r}. For {quantizer!r}, it must be "
            f"{f'torch.float32 of shape {outer_shape}' if quantizer.has_outer_scale() else 'None'}."
        )


def load_tensor(
    codes: Tensor, scale: Tensor, quantizer: Quantizer, dtype: torch.dtype, outer_scale: Tensor | None = None
) -> QuantizedTensor:
    """Rebuild a pickled QuantizedTensor from its parts; ``dtype`` is the dtype before quantization.

    Raises a TypeError or ValueError if the parts are inconsistent.
    """
    _check(codes, scale, quantizer, dtype, outer_scale)
    return QuantizedTensor(codes, scale, quantizer, dtype, outer_scale=outer_scale)


def load_parameter(*parts: Any) -> QuantizedParameter:
    """Make the QuantizedParameter of a pickle: a matrix without separate codes for grad_input.

    ``parts`` are the arguments of `_parameter` after the first, as ``QuantizedParameter.__reduce_ex__`` wrote them.
    """
    return _parameter(None, *parts)


def load_stack(codes: Tensor, *parts: Any) -> QuantizedParameter:
    """Make the QuantizedParameter of a pickle: stacked matrices without separate codes for grad_input.

    ``codes`` and ``parts`` are the arguments of `_parameter` after the first; see `load_parameter`.
    """
    if not isinstance(codes, Tensor) or codes.ndim != 3:
        got = f"shape {tuple(codes.shape)}" if isinstance(codes, Tensor) else type(codes).__name__
        raise ValueError(f"load: the file has codes of expert weights with {got}; they must have three dims.")
    return _parameter(codes.shape[0], codes, *parts)


def _parameter(
    matrices: int | None,
    codes: Tensor,
    scale: Tensor,
    quantizer: Quantizer,
    dtype: torch.dtype,
    kept: tuple[Any, ...],
    leaf: tuple[bool, bool],
    outer_scale: Tensor | None = None,
) -> QuantizedParameter:
    _check(codes, scale, quantizer, dtype, outer_scale, matrices=matrices)
    batch = 0 if matrices is None else 1
    found = QuantizedParameter(codes, scale, quantizer, dtype, outer_scale=outer_scale, batch=batch)
    extent, written, initial, *frozen = kept  # older files have the first three
    if extent not in EXTENTS:
        raise ValueError(f"load: the file has a QuantizedParameter of extent {extent!r}; it must be one of {EXTENTS}.")
    if initial is not None and not (type(initial) is Tensor and initial.is_floating_point()):
        raise ValueError("load: the initial values of a QuantizedParameter must be a plain floating point tensor.")
    found.extent, found.written, found.initial, found.frozen = extent, bool(written), initial, any(frozen)
    return as_leaf(found, *map(bool, leaf))


def load_pair(
    sets: tuple[Any, ...], leaf: tuple[bool, bool], policy: tuple[bool, str] = (False, "weight")
) -> QuantizedParameter:
    """Make the QuantizedParameter of a pickle: a weight with separate codes for grad_input.

    ``sets`` are two parameters, with the output's and with grad_input's codes. ``leaf`` says whether the result
    requires a gradient, and whether it is an ``nn.Parameter``. ``policy`` has ``checkpointed`` and ``name`` of its
    `GatherPolicy`.
    """
    if len(sets) != 2 or not all(isinstance(each, QuantizedParameter) for each in sets):
        raise TypeError(f"load: a pair must be two quantized parameters, got {[type(s).__name__ for s in sets]}.")
    first, second = sets
    if first.shape != second.shape or first.dtype != second.dtype or first.batch != second.batch:
        raise ValueError(
            "load: the two quantized versions of a weight must have equal shapes; the file has "
            f"{[tuple(each.shape) for each in sets]}."
        )
    found = QuantizedParameter.of_sets([*first.sets(), *second.sets()], first.dtype, batch=first.batch)
    found.extent = SLICE if second.extent == SLICE else first.extent
    found.written, found.initial, found.frozen = first.written, first.initial, first.frozen
    checkpointed, name = policy
    found.gathers = GatherPolicy(BOTH, bool(checkpointed), name=str(name))
    return as_leaf(found, *map(bool, leaf))


torch.serialization.add_safe_globals([load_tensor, load_parameter, load_stack, load_pair])
QuantizedTensor.load = staticmethod(load_tensor)
QuantizedParameter.loaders = {"matrix": load_parameter, "stack": load_stack, "pair": load_pair}
