"""Ops that write values to quantized parameters, and ops that read their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8compile.layout.quantized import Quantized
from fp8compile.tensor.check_arguments import SOURCE_DTYPES
from fp8compile.tensor.optimizer_steps import computed_values, values_of, write
from fp8compile.tensor.quantized_parameter import IF_DDP, SLICE, WRITES, QuantizedParameter
from fp8compile.tensor.quantized_tensor import QuantizedTensor, has_codes
from fp8compile.tensor.requantize import count_write

__all__ = ["READS", "UPDATES", "written_arguments"]

aten: Any = torch.ops.aten


def _overloads(*names: str) -> set[Any]:
    found = set()
    for name in names:
        packet = getattr(aten, name)
        found |= {getattr(packet, overload) for overload in packet.overloads() if "out" not in overload}
    return found


ARITHMETIC = ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp")
FILLING = ("zero_", "fill_", "uniform_", "normal_")
FUSED = ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_")
UPDATES = _overloads(
    *(f"{name}_" for name in ARITHMETIC), *(f"_foreach_{name}_" for name in ARITHMETIC), *FILLING, *FUSED
)
# out-of-place ops, which weight decay and averages of weights use
INTERPOLATION = _overloads("lerp", "lerp_", "_foreach_lerp", "_foreach_lerp_")
READS = _overloads("add", "sub", "_foreach_add", "_foreach_sub", "lerp", "norm", "linalg_vector_norm", "_foreach_norm")
SUMS = _overloads("add_", "sub_", "_foreach_add_", "_foreach_sub_")


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the op ``func`` writes to, by its schema; lists are flattened.

    Schemas of ``torch.distributed`` name no writes. Its ops whose names end in ``_`` write to their first argument.
    """
    name = func._schema.name
    is_message = name.startswith("c10d::") and name.endswith("_")
    found: list[Any] = []
    if not is_message and not func._schema.is_mutable:
        return found
    for index, argument in enumerate(func._schema.arguments):
        by_schema = argument.alias_info is not None and argument.alias_info.is_write
        if by_schema or (is_message and index == 0):
            found += tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _check_no_average(func: Any, args: tuple[Any, ...]) -> None:
    """Raise a TypeError if ``func`` updates an average of weights, such as an EMA.

    An average is interpolated, or it is a copy of the weights to which something is added outside of an optimizer.
    """
    averages = [each for each in tree_leaves(args[0]) if isinstance(each, QuantizedParameter) and each.pending is None]
    if (averages and func in INTERPOLATION) or (func in SUMS and any(each.is_copy for each in averages)):
        raise TypeError(
            f"{func} of a QuantizedParameter is only supported in an optimizer's step. If this averages weights (EMA, "
            "SWA), each update would be rounded to FP8, and small ones would be lost. Average plain tensors instead: "
            'the float32 masters, optimizer.state[p]["master"] of fp8compile.MasterWeights, or '
            "p.dequantize(torch.float32). See docs/parameters.md."
        )


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op ``func`` on parameters' values, then `write` the values of all parameters that it wrote to."""
    written: list[Any] = [each for each in written_arguments(func, args, kwargs) if has_codes(each)]
    for each in written:
        if not isinstance(each, QuantizedParameter):
            raise TypeError(
                f"{func} would write to a QuantizedTensor, which can't be modified. Create a new one with "
                "fp8compile.quantize."
            )
        each.check_writable(func)
    _check_no_average(func, args)
    values: dict[int, Tensor] = {}

    def value_of(x: QuantizedTensor) -> Tensor:
        if not isinstance(x, QuantizedParameter):
            raise TypeError(
                f"{func} can't read a QuantizedTensor, because tensors are never dequantized implicitly. Call "
                ".dequantize() first."
            )
        if id(x) not in values:
            values[id(x)] = values_of(x)
        return values[id(x)]

    plain_args, plain_kwargs = tree_map_only(QuantizedTensor, value_of, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    write(written, [values[id(each)] for each in written])
    if func in READS:
        return result
    return args[0] if func._schema.returns and isinstance(args[0], Tensor) else None


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Run ``copy_`` into a parameter: plain values are quantized; codes are copied with their scale."""
    if not isinstance(target, QuantizedParameter):
        raise TypeError(
            "copy_ of a QuantizedParameter into a plain tensor is not supported, because tensors are never "
            "dequantized implicitly. Use target.copy_(source.dequantize())."
        )
    if not has_codes(source):
        return _copy_values(target, source)
    parameter = source if isinstance(source, QuantizedParameter) else None
    if target.pending is not None and parameter is not None and (values := computed_values(parameter)) is not None:
        return _copy_values(target, values)
    own, given = target.sets(), source.sets()
    if source.shape != target.shape:
        raise TypeError(
            f"copy_ into a QuantizedParameter of shape {tuple(target.shape)} got a source of shape "
            f"{tuple(source.shape)}. The shapes must be equal."
        )
    if [each.quantizer for each in own] != [each.quantizer for each in given]:
        raise TypeError(
            f"copy_ into a QuantizedParameter of {target.quantizer!r} got a source of {source.quantizer!r}. Use "
            f"target.copy_(source.dequantize()), which quantizes the values again with {target.quantizer!r}."
        )
    if target.extent == SLICE and not all(map(_have_same_scales, own, given)):
        target.check_writable("copy_")
    for mine, theirs in zip(own, given, strict=True):
        mine.codes.copy_(theirs.codes)
        is_row_of_blocks = mine.has_all_scales and target.blank and mine.scale.shape != theirs.scale.shape
        if not is_row_of_blocks:  # else FSDP2 made the target from the same weight, with the scales of all its blocks
            mine.scale.copy_(theirs.scale)
        if mine.outer_scale is not None and theirs.outer_scale is not None:
            mine.outer_scale.copy_(theirs.outer_scale)
    count_write(target)
    target.written = parameter.written if parameter is not None and target.blank else True
    initial = None if parameter is None else parameter.initial
    target.keep(source if initial is None else initial)
    return target


def _have_same_scales(one: Quantized, other: Quantized) -> bool:
    return all(
        torch.equal(mine, theirs.to(mine.device)) for mine, theirs in zip(one.scales, other.scales, strict=True)
    )


def _copy_values(target: QuantizedParameter, source: Tensor) -> Tensor:
    if source.dtype not in SOURCE_DTYPES:
        raise TypeError(
            f"copy_ into a QuantizedParameter supports bfloat16, float16 and float32, got {source.dtype}. Cast the "
            "source first."
        )
    target.check_writable("copy_")
    values = source.to(target.device, target.dtype).expand(target.shape)
    write([target], [values if target.pending is None else values.clone()])  # the step will write to these values
    target.keep(source)  # before the cast to the target's dtype
    return target


def _refuse_cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise TypeError(f"aten.cat.default of QuantizedParameters is not supported. {IF_DDP}")


WRITES.update(dict.fromkeys(UPDATES | READS, _compute))
WRITES.update({aten.copy_.default: lambda func, args, kwargs: _copy(*args), aten.cat.default: _refuse_cat})
