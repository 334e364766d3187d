"""QuantizedStack: codes and scales that stand for a stack of matrices, each quantized for itself, as a layer's weight.

The weights of experts are such stacks. What FSDP2 gathers of one is in the layer's hands only, which multiplies by its
codes in both directions, so nothing but views that keep each matrix whole has a meaning here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile.layout.shapes import values_shape
from fp8compile.quantizers import Gemm, Quantizer
from fp8compile.tensor.quantized import LAYERS, QuantizedTensor, alias_of, place_of_values
from fp8compile.tensor.refusals import refuse_operators

__all__ = ["QuantizedStack"]

aten = torch.ops.aten


class QuantizedStack(Tensor):
    """Codes and scales of a stack of matrices, the weight of a grouped layer.

    Works with ``detach``, ``clone``, ``transpose(-2, -1)``, views of its own shape, and as the weight of
    ``fp8compile.grouped_linear`` and ``grouped_mm``. Any other op raises a TypeError.

    Attributes:
        codes: (E, N, K), uint8; of four bits two may share a byte.
        scale: (E, blocks, blocks): for each matrix, ``quantizer.scale_shape((N, K))``; float32, or uint8 for E8M0.
        quantizer: Of each of the matrices.
        outer_scale: Of each matrix, (E,) float32, where the quantizer has two levels of scales; else None.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer
    outer_scale: Tensor | None

    @staticmethod
    def __new__(
        cls: type[QuantizedStack],
        codes: Tensor,
        scale: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        outer_scale: Tensor | None = None,
    ) -> QuantizedStack:
        """Wrap codes and scales that a quantizer made of matrices of this dtype."""
        with torch.inference_mode(torch.is_inference_mode_enabled() and codes.is_inference()):
            shape = values_shape(codes.shape, quantizer)
            strides, offset = place_of_values(codes, shape)
            return Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=codes.device
            )

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        outer_scale: Tensor | None = None,
    ) -> None:
        self.codes, self.scale, self.quantizer, self.outer_scale = codes, scale, quantizer, outer_scale

    is_in_turns = False  # whether its memory holds other codes in the backward than in the forward

    def sets(self) -> tuple[QuantizedStack, ...]:
        """All sets of codes that it has: this one. A `QuantizedPair` has two."""
        return (self,)

    def parts(self) -> tuple[Tensor, ...]:
        """The plain tensors that it is made of."""
        scales = (self.scale,) if self.outer_scale is None else (self.scale, self.outer_scale)
        return self.codes, *scales

    def read_by(self, gemm: Gemm) -> QuantizedStack:
        """The set of codes that a product of a layer multiplies: this one, whichever it is."""
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        names = ["codes", "scale"] if self.outer_scale is None else ["codes", "scale", "outer_scale"]
        return names, (self.quantizer, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict, metadata: tuple, outer_size: Any, outer_stride: Any) -> QuantizedStack:
        return QuantizedStack(inner["codes"], inner["scale"], *metadata, inner.get("outer_scale"))

    _stable_hash_for_caching = QuantizedTensor._stable_hash_for_caching

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"QuantizedStack(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"quantizer={self.quantizer!r})"
        )

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS:
            return LAYERS[func](func, *args)
        handler = HANDLERS.get(func)
        if handler is None and func._can_decompose():  # below autograd, composites come here before what they are of
            return func.decompose(*args, **kwargs)
        result = None if handler is None else handler(func, *args, **kwargs)
        if result is None:
            raise TypeError(_no_meaning(func))
        return result if func is aten.clone.default else return_and_correct_aliasing(func, args, kwargs, result)


def _no_meaning(op: object) -> str:
    return (
        f"{op} has no FP8 meaning for the weights of experts, which were gathered as codes with scales of each "
        "matrix. Multiply by fp8compile.grouped_linear or grouped_mm, which take them transposed too, or leave these "
        "experts to a gather in high precision."
    )


refuse_operators(QuantizedStack, _no_meaning)

# ---------------------------------------------------------------------------------- views, None for one that it hasn't


def _same(func: Any, x: QuantizedStack, **kwargs: Any) -> QuantizedStack:
    outer = None if x.outer_scale is None else func(x.outer_scale)
    return QuantizedStack(func(x.codes, **kwargs), func(x.scale), x.quantizer, x.dtype, outer)


def _transpose(func: Any, x: QuantizedStack, *dims: int) -> QuantizedStack | None:
    if {dim % x.ndim for dim in dims} != {1, 2}:
        return None
    codes, scale, outer = func(x.codes, *dims), func(x.scale, *dims), alias_of(x.outer_scale)
    return QuantizedStack(codes, scale, x.quantizer.transposed(), x.dtype, outer)


def _whole_view(
    func: Any, x: QuantizedStack, size: Any, stride: Any = None, storage_offset: int | None = None
) -> QuantizedStack | None:
    """A view that shows what it is a view of: FSDP2 and AOTAutograd ask for it by ``as_strided``."""
    whole = torch.empty(x.shape, device="meta").view(size).shape if func is aten.view.default else tuple(size)
    strides = x.stride() if stride is None else tuple(stride)
    if whole != x.shape or strides != x.stride() or storage_offset not in (None, x.storage_offset()):
        return None
    return _same(aten.alias.default, x)


HANDLERS = {
    aten.alias.default: _same,
    aten.as_strided.default: _whole_view,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.transpose.int: _transpose,
    aten.view.default: _whole_view,
}
