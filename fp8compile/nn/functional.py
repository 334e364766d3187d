"""fp8compile.linear: checks its arguments, applies autocast, and calls the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fp8compile._compat import autocast_dtype, is_dtensor, local_itself
from fp8compile.nn.delayed_state import DelayedState, check_state
from fp8compile.ops import delayed_linear, known_codes_linear, shared_scale_linear
from fp8compile.ops import linear as linear_op
from fp8compile.ops.layer.layer_ops import DELAYED, LINEAR, SHARED_SCALE
from fp8compile.ops.layer.make_weight_codes import Sets, flat_sets
from fp8compile.ops.layer.statistics.observe import Observer
from fp8compile.quantizers import Recipe
from fp8compile.tensor import SOURCE_DTYPES, QuantizedTensor, check_serves, has_codes, not_dense, shown

__all__ = ["check_recipe", "check_tensor", "checked_operands", "in_dtype_of_autocast", "linear", "only_given"]

TAKE_CODES = (("weight", "linear"), ("weight", "grouped_linear"))
PLAIN = (Tensor, torch.nn.Parameter)  # classes without codes and without ranks


def check_recipe(function: str, recipe: object) -> None:
    """Raise a TypeError that names ``function``, the caller, unless ``recipe`` is a Recipe."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{function}: recipe is {shown(recipe)}; it is a fp8compile.Recipe, such as fp8compile.recipes.rowwise() "
            "or fp8compile.recipes.by_name('rowwise')."
        )


def check_tensor(function: str, name: str, tensor: object, x: Tensor) -> None:
    """Raise a TypeError or ValueError unless ``tensor``, an operand, is dense, with the dtype and device of ``x``.

    ``function`` and ``name`` are the caller and the operand, for the error's text.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {name} is a {type(tensor).__name__}; it is a tensor.")
    is_plain = type(tensor) in PLAIN and type(x) in PLAIN
    if not is_plain or tensor.layout is not torch.strided or tensor.is_nested:
        _check_class(function, name, tensor, x)
    if tensor.dtype not in SOURCE_DTYPES:
        raise TypeError(
            f"{function}: {name} is {tensor.dtype}; FP8 layers take bfloat16, float16 and float32. Cast it, or leave "
            "this layer unconverted."
        )
    if tensor is x:
        return
    if tensor.dtype != x.dtype:
        raise TypeError(
            f"{function}: {name} is {tensor.dtype} and x is {x.dtype}; they have one dtype. Cast one of them, or run "
            "under torch.autocast."
        )
    if tensor.device != x.device:
        raise ValueError(f"{function}: {name} is on {tensor.device} and x on {x.device}; move them to one device.")


def _check_class(function: str, name: str, tensor: Tensor, x: Tensor) -> None:
    if has_codes(tensor) and (name, function) not in TAKE_CODES:
        raise TypeError(
            f"{function}: {name} is a QuantizedTensor; {function} quantizes its operands itself. Pass .dequantize(), "
            "or multiply quantized matrices by fp8compile.scaled_mm."
        )
    if (reason := not_dense(tensor)) is not None:
        raise TypeError(f"{function}: {name} {reason}; it is a dense tensor. Densify it first.")
    if is_dtensor(tensor) != is_dtensor(x):
        one, other = ("x", name) if is_dtensor(x) else (name, "x")
        raise TypeError(
            f"{function}: {one} is a DTensor and {other} is none; a layer is spread over ranks as a whole or not at "
            "all. Use parallelize_module, distribute_tensor or DTensor.from_local for all of it."
        )


def _check_castable(function: str, weight: object, dtype: torch.dtype) -> None:
    local = local_itself(weight)
    if has_codes(local) and local.dtype != dtype:
        raise TypeError(
            f"{function}: weight is a QuantizedTensor of {local.dtype}, under autocast to {dtype}; its codes would "
            f"not be those of the weight in {dtype}. Quantize the weight in {dtype}, or switch autocast off."
        )


def _check_shapes(function: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2:
        raise ValueError(f"{function}: weight has shape {tuple(weight.shape)}; it is (out_features, in_features).")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{function}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; the last dim of x has to be "
            f"in_features, {weight.shape[1]}."
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"{function}: bias has shape {tuple(bias.shape)} and weight {tuple(weight.shape)}; bias is "
            f"(out_features,), ({weight.shape[0]},)."
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
            f"{function}: torch.jit.trace has no type for a recipe. Use torch.compile or torch.export, or trace the "
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
            "linear: outer_amax is given with delayed scaling or with a quantized weight, whose scale is known. Leave "
            "it out."
        )
    if tuple(outer_amax.shape) != (1,) or outer_amax.dtype != torch.float32:
        raise ValueError(
            f"linear: outer_amax has shape {tuple(outer_amax.shape)}, {outer_amax.dtype}; it is (1,), float32."
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
    """Compute ``x @ weight.T + bias`` with FP8 GEMMs, forward and backward, as the recipe says.

    It is differentiable once in x, weight and bias. Under ``torch.autocast`` these are cast to autocast's dtype
    first, as in ``torch.nn.functional.linear``. A traced graph has one node for it, such as ``fp8compile::linear``, or
    ``fp8compile::delayed_linear`` if the recipe has delayed scaling.

    Args:
        x: Shape (..., in_features), bfloat16, float16 or float32.
        weight: Shape (out_features, in_features), the dtype of ``x``. If it is a ``QuantizedTensor``, the GEMMs of the
            output and of grad_input read its codes and scales; its gradient is a plain tensor.
        bias: Shape (out_features,), the dtype of ``x``, or None. The bias is added in this dtype.
        recipe: Quantizers for the operands of each GEMM.
        state: The layer's state, only for a recipe with delayed scaling. The backward updates it in place.
        outer_amax: An amax, (1,) float32, not less than the weight's largest magnitude. The weight's scale, if it
            is one number, or its outer scale is computed from this amax. Weights that share the scale get the same
            amax. The amax is ignored if the weight has only scales of blocks.
        weight_codes: The codes of ``weight`` that output and grad_input multiply, if the layer keeps them
            (``Recipe.cache_weights``). They must be the codes that the recipe makes from ``weight``.
        observer: Buffers to which the backward adds statistics of the operands, from a `fp8compile.Monitor`.

    Returns:
        Shape (..., out_features), the dtype of ``x`` (or of autocast).

    Raises:
        TypeError: ``recipe`` is not a recipe, or ``state`` no DelayedState; a dtype or layout is not supported, or
            dtypes differ, such as a quantized weight's and autocast's.
        ValueError: Shapes or devices do not fit. The recipe has delayed scaling, and the state is missing or does not
            fit the recipe. ``outer_amax`` has another shape, or is given with a state or a quantized weight. A
            quantized weight has other codes than the recipe asks for, or is a shard that ends within a block.
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
        y = shared_scale_linear(x, weight, bias, outer_amax, recipe)
        return (
            y if observer is None else SHARED_SCALE.observe(y, x, weight, outer_amax, observer=observer, recipe=recipe)
        )
    if state is None:
        if weight_codes is None:
            y = linear_op(x, weight, bias, recipe)
        else:
            y = known_codes_linear(x, weight, bias, *flat_sets(weight_codes), recipe)
        return y if observer is None else LINEAR.observe(y, x, weight, observer=observer, recipe=recipe)
    y, used, *_ = delayed_linear(x, weight, bias, *state, recipe)
    return y if observer is None else DELAYED.observe(y, x, weight, used, observer=observer, recipe=recipe)
