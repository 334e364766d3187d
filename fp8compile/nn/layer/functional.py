"""fp8compile.linear: checks its arguments, applies autocast, and calls the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fp8compile._compat import autocast_dtype, is_dtensor, local_itself
from fp8compile.nn.layer.delayed_state import DelayedState, check_state
from fp8compile.ops import delayed_linear
from fp8compile.ops import linear as linear_op
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import UNSHARDED
from fp8compile.ops.layer.make_weight_codes import Sets
from fp8compile.ops.layer.observer import Observer
from fp8compile.quantizers import Recipe
from fp8compile.tensor import SOURCE_DTYPES, QuantizedTensor, check_serves, has_codes, not_dense, shown

__all__ = ["check_recipe", "check_tensor", "checked_operands", "in_dtype_of_autocast", "linear", "only_given"]

TAKE_CODES = (("weight", "linear"), ("weight", "grouped_linear"))
PLAIN = (Tensor, torch.nn.Parameter)  # classes without codes and without ranks


def check_recipe(function: str, recipe: object) -> None:
    """Raise a TypeError that names ``function``, the caller, unless ``recipe`` is a Recipe."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{function}: `recipe` is {shown(recipe)}; it must be a fp8compile.Recipe, such as "
            "fp8compile.recipes.rowwise() or fp8compile.recipes.by_name('rowwise')."
        )


def check_tensor(function: str, name: str, tensor: object, x: Tensor) -> None:
    """Raise a TypeError or ValueError unless ``tensor``, an operand, is dense, with the dtype and device of ``x``.

    ``function`` and ``name`` are the caller and the operand, for the error's text.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: `{name}` is a {type(tensor).__name__}; it must be a tensor.")
    is_plain = type(tensor) in PLAIN and type(x) in PLAIN
    if not is_plain or tensor.layout is not torch.strided or tensor.is_nested:
        _check_class(function, name, tensor, x)
    if tensor.dtype not in SOURCE_DTYPES:
        raise TypeError(
            f"{function}: `{name}` is {tensor.dtype}; it must be bfloat16, float16 or float32. Cast it, or leave "
            "this layer unconverted."
        )
    if tensor is x:
        return
    if tensor.dtype != x.dtype:
        raise TypeError(
            f"{function}: `{name}` is {tensor.dtype}, but x is {x.dtype}. Cast one of them to the dtype of the other, "
            "or run under torch.autocast."
        )
    if tensor.device != x.device:
        raise ValueError(
            f"{function}: `{name}` is on {tensor.device}, but x is on {x.device}. Move both to one device."
        )


def _check_class(function: str, name: str, tensor: Tensor, x: Tensor) -> None:
    if has_codes(tensor) and (name, function) not in TAKE_CODES:
        raise TypeError(
            f"{function}: `{name}` is a QuantizedTensor, but {function} quantizes its operands itself. Pass "
            ".dequantize(), or multiply quantized matrices with fp8compile.scaled_mm."
        )
    if (reason := not_dense(tensor)) is not None:
        raise TypeError(
            f"{function}: `{name}` {reason}; it must be a dense tensor. Call .to_dense() on a sparse tensor, or pad a "
            "nested tensor with .to_padded_tensor(0.0)."
        )
    if is_dtensor(tensor) != is_dtensor(x):
        one, other = ("x", name) if is_dtensor(x) else (name, "x")
        raise TypeError(
            f"{function}: {one} is a DTensor, but {other} is not. Shard the full layer, with parallelize_module, "
            "distribute_tensor or DTensor.from_local."
        )


def _check_castable(function: str, weight: object, dtype: torch.dtype) -> None:
    local = local_itself(weight)
    if has_codes(local) and local.dtype != dtype:
        raise TypeError(
            f"{function}: `weight` was quantized from {local.dtype}, but autocast is to {dtype}, which would "
            f"quantize it differently. Cast the weight to {dtype} before quantizing it, or disable autocast."
        )


def _check_shapes(function: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2:
        raise ValueError(f"{function}: `weight` must be (out_features, in_features), got {tuple(weight.shape)}.")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{function}: `x` has shape {tuple(x.shape)} and `weight` has shape {tuple(weight.shape)}; the last dim "
            f"of x must be in_features, {weight.shape[1]}."
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"{function}: `bias` has shape {tuple(bias.shape)} and `weight` has shape {tuple(weight.shape)}; bias "
            f"must be (out_features,), ({weight.shape[0]},)."
        )


def in_dtype_of_autocast(function: str, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's operands, cast to autocast's dtype if autocast is on.

    ``operands`` maps names, such as ``"x"``, to tensors; ``function`` names the caller in errors.
    """
    x = operands["x"]
    if not isinstance(x, Tensor) or (dtype := autocast_dtype(x)) is None:
        return operands
    _check_castable(function, operands["weight"], dtype)
    return {
        name: t.to(dtype) if isinstance(t, Tensor) and t.dtype in SOURCE_DTYPES else t for name, t in operands.items()
    }


def checked_operands(
    function: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check a linear layer's operands; return them cast to autocast's dtype if autocast is on.

    Raises the same errors as `linear`, with ``function`` as the caller's name.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"{function}: torch.jit.trace does not support recipes. Use torch.compile or torch.export, or trace the "
            "model after fp8compile.revert."
        )
    operands = {"x": x, "weight": weight}
    if bias is not None:
        operands["bias"] = bias
    operands = in_dtype_of_autocast(function, operands)
    x, weight, bias = operands["x"], operands["weight"], operands.get("bias")
    for name, tensor in operands.items():
        check_tensor(function, name, tensor, x)
    _check_shapes(function, x, weight, bias)
    return x, weight, bias


def _check_outer_amax(outer_amax: Tensor, weight: Tensor, state: DelayedState | None) -> None:
    if state is not None or has_codes(local_itself(weight)):
        raise ValueError(
            "linear: `outer_amax` can't be combined with delayed scaling or a quantized weight, whose scale is "
            "already known. Omit it."
        )
    if tuple(outer_amax.shape) != (1,) or outer_amax.dtype != torch.float32:
        raise ValueError(
            f"linear: `outer_amax` must be (1,), float32, got {tuple(outer_amax.shape)}, {outer_amax.dtype}."
        )


def only_given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, so that other packages' ``__torch_function__`` sees no unused option."""
    return {name: value for name, value in options.items() if value is not None}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    state: DelayedState | None = None,
    outer_amax: Tensor | None = None,
    weight_codes: Sets | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` with FP8 GEMMs in forward and backward, according to the recipe.

    It is differentiable once with respect to x, weight and bias. Under ``torch.autocast`` these are first cast to
    autocast's dtype, as in ``torch.nn.functional.linear``. In a traced graph it is a single node, such as
    ``fp8compile::linear``, or ``fp8compile::delayed_linear`` if the recipe has delayed scaling.

    Args:
        x: Shape (..., in_features), bfloat16, float16 or float32.
        weight: Shape (out_features, in_features), the dtype of ``x``. If it is a ``QuantizedTensor``, the GEMMs of
            output and grad_input read its data and scales; its gradient is a plain tensor.
        bias: Shape (out_features,), the dtype of ``x``, or None. The bias is added in this dtype.
        recipe: Quantizers for the operands of each GEMM.
        state: The layer's state; required if and only if the recipe has delayed scaling. The backward updates it in
            place.
        outer_amax: An amax, (1,) float32, at least the largest magnitude of the weight. The tensorwise or global scale
            of the weight is computed from this amax instead of its own. Pass the same amax for weights that share the
            scale. It is ignored if the weight has only block scales.
        weight_codes: The cached quantized ``weight`` for output and grad_input, if there is one
            (``Recipe.weight_lifetime``). It must be what the recipe computes from ``weight``.
        observer: Buffers in which the backward accumulates statistics of the operands, from an `fp8compile.Monitor`.

    Returns:
        Shape (..., out_features), the dtype of ``x`` (or of autocast).

    Raises:
        TypeError: ``recipe`` is not a recipe, or ``state`` is not a DelayedState. A dtype or layout is not supported,
            or dtypes differ, such as those of a quantized weight and of autocast.
        ValueError: Shapes or devices do not match. The recipe has delayed scaling, and the state is missing or does
            not match the recipe. ``outer_amax`` has a wrong shape, or is given with a state or a quantized weight. A
            quantized weight does not match the quantizers of the recipe, or is a shard that ends within a block.
        RuntimeError: This device has no GEMM for the recipe, or ``torch.jit.trace`` is running.
    """
    # as torch.nn.functional.linear does: torch.fx.symbolic_trace, modes and tensor subclasses take part in this way
    if has_torch_function((x, weight, bias)):
        given: Any = only_given(outer_amax=outer_amax, weight_codes=weight_codes, observer=observer)
        given |= {"recipe": recipe, "state": state}
        return handle_torch_function(linear, (x, weight, bias), x, weight, bias, **given)
    check_recipe("linear", recipe)
    x, weight, bias = checked_operands("linear", x, weight, bias)
    if state is not None:
        check_state(state)
    if isinstance(weight, QuantizedTensor):
        check_serves("linear", weight, recipe)  # the op checks too, but torch.compile would wrap its error
    if outer_amax is not None:
        _check_outer_amax(outer_amax, weight, state)
    known: list[Tensor | None] = []  # what an observer is told
    if state is not None:
        y, used, *_ = delayed_linear(x, weight, bias, None, None, *state, None, [], [], UNSHARDED, recipe)
        known = [*Known(multiplier=used)]
    elif outer_amax is not None:
        known = [*Known(outer_amax=outer_amax)]
        y = linear_op(x, weight, bias, None, known, [], UNSHARDED, recipe)
    else:
        codes = [] if weight_codes is None else Known.sets(*weight_codes)
        y = linear_op(x, weight, bias, None, codes, [], UNSHARDED, recipe)
    return y if observer is None else observer.observe(y, x, weight, None, known, [], UNSHARDED, recipe)
