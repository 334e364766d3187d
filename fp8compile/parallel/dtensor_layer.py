"""The linear layer on DTensors: one handler for the ops of all layers.

    left operand      this rank's part of a DTensor
    right operand     its part of the weight, as values or codes; under FSDP in the graph, its rows of that part
    product           codes, messages of codes, GEMM, and the sum over ranks if there is one (`ops.layer.products`)

A result has the placements that a plain linear layer would give it, so stock plans work unchanged. On the way, ranks
send codes, one byte an element, and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8compile import _compat
from fp8compile.layout.cuts import axis_blocks, split_axes
from fp8compile.layout.packing import one_a_byte
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer import write_state
from fp8compile.ops.layer.amax_tokens import fsdp_tokens
from fp8compile.ops.layer.fsdp_gather import reduced
from fp8compile.ops.layer.kept_input import keep_input, kept_input_as_quantized, packed_while_kept
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, STEPS, Operands, Phase
from fp8compile.ops.layer.products import multiply_parts
from fp8compile.ops.layer.quantize import part_amax
from fp8compile.ops.layer.rows import Rows, placed_cuts
from fp8compile.parallel.placed import check_one_mesh, part_of, placements_of, whole_of
from fp8compile.quantizers import DelayedScaling, Gemm, Quantizer, Recipe
from fp8compile.tensor import check_serves, has_codes

__all__ = ["HANDLERS"]


@dataclass(frozen=True)
class _Weight:
    """The weight of a layer as the right operand of a product.

    Attributes:
        part: This rank's part and its cuts; under FSDP in the graph, this rank's rows of the part.
        shape: (N, K) of the whole weight.
        given: Arguments of `Operands` for codes that are not made from the part alone.
    """

    part: Plain
    shape: tuple[int, int]
    given: dict[str, Any] = field(default_factory=dict)


def _codes_of(gemm: Gemm, weight: Plain, recipe: Recipe) -> Quantized:
    """The codes of a weight that was quantized before FSDP gathered it."""
    function, quantized = gemm.name, weight.local
    assert has_codes(quantized), "the weight is quantized"
    check_serves(function, quantized, recipe)
    part, local = quantized.shape, quantized.set_of(gemm)
    sides = axis_blocks(part, weight.cuts, local.quantizer.block)
    whole = split_axes(part, weight.cuts, local.quantizer.block)
    shape = tuple(side.total if split else side.length for side, split in zip(sides, whole, strict=True))
    if tuple(local.scale.shape) != local.quantizer.scale_shape(shape):
        raise ValueError(
            f"{function}: weight has a QuantizedTensor of shape {tuple(part)} with scales "
            f"{tuple(local.scale.shape)} on this rank; cut like this, blocks {local.quantizer.block} have scales "
            f"{local.quantizer.scale_shape(shape)}. Quantize each rank's part by fp8compile.quantize with group=, "
            "shard_dim= and sizes=."
        )
    codes, quantizer = one_a_byte(local.codes, local.quantizer) if weight.cuts else (local.codes, local.quantizer)
    return Quantized(
        codes=codes,
        scale=local.scale,
        quantizer=quantizer,
        outer_scale=local.outer_scale,
        layout=weight.layout,
        has_scales_of_whole=whole,
    )


def _placed(gemm: Gemm, weight: DTensor, recipe: Recipe) -> _Weight:
    """Describe a weight that is a DTensor, of values or of codes."""
    part, (n, k) = part_of(gemm.name, weight), weight.shape
    if not has_codes(part.local):
        return _Weight(part, (n, k))
    codes = _codes_of(gemm, part, recipe)
    return _Weight(part, (n, k), {"weight": codes, "weight_in_turns": part.local.in_memory is not None})


def _rows_of(tokens: DTensor, shard: Tensor, amax: Tensor | None, rows: Rows) -> _Weight:
    """Describe a weight whose part on a tensor parallel rank is cut by FSDP; its codes are gathered to that part."""
    mesh = tokens.device_mesh
    cuts = placed_cuts(rows.placed, [mesh.get_group(index) for index in range(mesh.ndim)])
    part = Plain(shard.to(tokens.dtype), TensorLayout(cuts))
    shape = [sum(rows.sizes), shard.shape[1]]
    for cut in reversed(part.cuts):
        if cut is not None:
            shape[cut.dim] = cut.total
    return _Weight(part, (shape[0], shape[1]), {"weight_amax": amax, "rows": rows})


def _product_of_tokens(
    gemm: Gemm,
    tokens: DTensor,
    weight: _Weight,
    recipe: Recipe,
    multiplier: Tensor | None = None,
    bias: DTensor | None = None,
) -> DTensor:
    """The output (..., N) or grad_input (..., K) for tokens (..., m)."""
    a, mesh = part_of(gemm.name, tokens), tokens.device_mesh
    operands = Operands(recipe, Phase.of(gemm, a.local), multiplier, **weight.given)
    own = None if bias is None else part_of(gemm.name, bias)
    product = multiply_parts(gemm, a, weight.part, operands, own)
    shape = (*tokens.shape[:-1], weight.shape[0 if gemm is OUTPUT else 1])
    rows: list[Any] = [None if cut is None else cut.dim for cut in product.cuts]
    placements = placements_of(product.steps, {"m": rows, "n": [tokens.ndim - 1] * mesh.ndim})
    return whole_of(product.local.view(*product.shape[:-1], product.local.shape[1]), mesh, placements, shape)


# ---------------------------------------------------------------------------------- weights that are DTensors


def _linear(
    x: DTensor, weight: DTensor, bias: DTensor | None, recipe: Recipe, multiplier: Tensor | None = None
) -> DTensor:
    check_one_mesh("linear", {"x": x, "weight": weight, "bias": bias})
    return _product_of_tokens(OUTPUT, x, _placed(OUTPUT, weight, recipe), recipe, multiplier, bias)


def _grad_input(grad_output: DTensor, weight: DTensor, recipe: Recipe, multiplier: Tensor | None = None) -> DTensor:
    check_one_mesh("grad_input", {"grad_output": grad_output, "weight": weight})
    return _product_of_tokens(GRAD_INPUT, grad_output, _placed(GRAD_INPUT, weight, recipe), recipe, multiplier)


def _grad_weight(grad_output: DTensor, x: DTensor, recipe: Recipe, multiplier: Tensor | None = None) -> DTensor:
    mesh = check_one_mesh("grad_weight", {"grad_output": grad_output, "x": x})
    a, b = part_of("grad_weight", grad_output), part_of("grad_weight", x)
    product = multiply_parts(GRAD_WEIGHT, a, b, Operands(recipe, Phase.of(GRAD_WEIGHT, a.local), multiplier))
    placements = placements_of(product.steps, {"m": [0] * mesh.ndim, "n": [1] * mesh.ndim})
    return whole_of(product.local, mesh, placements, (grad_output.shape[-1], x.shape[-1]))


def _kept_input(x: DTensor, quantizer: Quantizer) -> tuple[DTensor, DTensor, DTensor]:
    """Codes of this rank's part, two a byte, cut as the input is; scales as they are on each rank."""
    part, mesh = part_of("kept_input", x), x.device_mesh
    codes, *scales = keep_input(part, quantizer, STEPS[Phase.EAGER])
    shape, placements = list(x.shape), [Replicate() if p.is_partial() else p for p in x.placements]
    shape[packed_while_kept(part.layout, quantizer)] //= 2
    scale, outer_scale = (whole_of(each, mesh, [Replicate()] * mesh.ndim, each.shape) for each in scales)
    return whole_of(codes, mesh, placements, shape), scale, outer_scale


def _grad_weight_of_codes(
    grad_output: DTensor,
    codes: DTensor,
    scale: DTensor,
    outer_scale: DTensor,
    recipe: Recipe,
    multiplier: Tensor | None = None,
) -> DTensor:
    mesh = grad_output.device_mesh
    a, packed = part_of("grad_weight", grad_output), part_of("grad_weight", codes)
    quantizer: Any = recipe.quantizer_read(GRAD_WEIGHT.b)
    dim = packed_while_kept(packed.layout, quantizer) % codes.ndim
    cuts = tuple(
        replace(cut, sizes=tuple(2 * size for size in cut.sizes)) if cut is not None and cut.dim == dim else cut
        for cut in packed.cuts
    )
    kept = packed.local, *(_compat.local_itself(each) for each in (scale, outer_scale))
    x = kept_input_as_quantized(kept, quantizer, TensorLayout(cuts), a.local.shape[0])
    operands = Operands(recipe, Phase.of(GRAD_WEIGHT, a.local), multiplier, input=x)
    product = multiply_parts(GRAD_WEIGHT, a, Plain(x.codes, x.layout), operands)
    placements = placements_of(product.steps, {"m": [0] * mesh.ndim, "n": [1] * mesh.ndim})
    features = codes.shape[-1] * (2 if dim == codes.ndim - 1 else 1)
    return whole_of(product.local, mesh, placements, (grad_output.shape[-1], features))


def _amax_over_ranks(tensor: DTensor, quantizer: DelayedScaling | None, like: Tensor) -> Tensor:
    """The amax of the whole tensor, (), the same on every rank; 0 for a tensor without delayed scaling."""
    return like.new_zeros(()) if quantizer is None else part_amax(part_of("linear", tensor), quantizer).view(())


def _state_of(multiplier: DTensor) -> Tensor:
    part = part_of("linear", multiplier)
    if any(part.cuts):
        raise ValueError(
            f"linear: the multiplier of the state has placements {multiplier.placements}; every rank has all of it, "
            "Replicate()."
        )
    return part.local


def _delayed_linear(
    x: DTensor,
    weight: DTensor,
    bias: DTensor | None,
    amax_history: DTensor,
    multiplier: DTensor,
    group: str | None,
    recipe: Recipe,
) -> tuple[DTensor, ...]:
    tensors = {"x": x, "weight": weight, "bias": bias, "amax_history": amax_history, "multiplier": multiplier}
    mesh = check_one_mesh("linear", tensors)
    write_state.check_state(x, amax_history, multiplier, recipe)
    used = snapshot(_state_of(multiplier))
    y = _linear(x, weight, bias, recipe, used)
    for_x, for_weight, _ = recipe.delayed()
    is_codes = for_weight is not None and has_codes(_compat.local_itself(weight))
    kept = write_state.kept_amax(_state_of(amax_history)) if is_codes else _amax_over_ranks(weight, for_weight, used)
    amaxes = _amax_over_ranks(x, for_x, used), kept
    everywhere = [Replicate()] * mesh.ndim
    return y, *(whole_of(each, mesh, everywhere, each.shape) for each in (used, *amaxes))


def _delayed_grad_input(grad_output: DTensor, weight: DTensor, multiplier: DTensor, recipe: Recipe) -> DTensor:
    return _grad_input(grad_output, weight, recipe, _state_of(multiplier))


def _delayed_grad_weight(grad_output: DTensor, x: DTensor, multiplier: DTensor, recipe: Recipe) -> DTensor:
    return _grad_weight(grad_output, x, recipe, _state_of(multiplier))


def _scatter_sum(x: DTensor, dim: int, recipe: Recipe) -> DTensor:
    return x.redistribute(placements=[Shard(dim) if p.is_partial() else p for p in x.placements])


# ---------------------------------------------------------------------------------- weights of FSDP in the graph


def _fsdp_linear(
    x: DTensor,
    shard: Tensor,
    bias: DTensor | None,
    amax: Tensor | None,
    amax_for_grad_input: Tensor | None,
    rows: Rows,
    recipe: Recipe,
    multiplier: Tensor | None = None,
) -> DTensor:
    return _product_of_tokens(OUTPUT, x, _rows_of(x, shard, amax, rows), recipe, multiplier, bias)


def _fsdp_delayed_linear(
    x: DTensor,
    shard: Tensor,
    bias: DTensor | None,
    of_activations: Tensor | None,
    of_weight: Tensor | None,
    amax: Tensor | None,
    amax_for_grad_input: Tensor | None,
    multiplier: Tensor,
    rows: Rows,
    recipe: Recipe,
) -> tuple[DTensor, Tensor, Tensor, Tensor]:
    used = snapshot(multiplier)
    for_x, for_weight, _ = recipe.delayed()
    # the ranks that share a layer's tokens tell each other, as they do without FSDP; rows of the weight are for later
    amax_of_x = _amax_over_ranks(x, for_x, used)
    y = _fsdp_linear(x, shard, bias, amax, amax_for_grad_input, rows, recipe, used)
    return y, used, amax_of_x, write_state.amax_of(shard.to(x.dtype), for_weight)


def _fsdp_grad_input(
    grad_output: DTensor, shard: Tensor, amax: Tensor | None, multiplier: Tensor | None, rows: Rows, recipe: Recipe
) -> DTensor:
    weight = _rows_of(grad_output, shard, amax, rows)
    return _product_of_tokens(GRAD_INPUT, grad_output, weight, recipe, multiplier)


def _fsdp_grad_weight(
    grad_output: DTensor, x: DTensor, multiplier: Tensor | None, dtype: torch.dtype, rows: Rows, recipe: Recipe
) -> Tensor:
    return _reduced(_grad_weight(grad_output, x, recipe, multiplier), dtype, rows)


def _fsdp_grad_weight_of_codes(
    grad_output: DTensor,
    codes: DTensor,
    scale: DTensor,
    outer_scale: DTensor,
    multiplier: Tensor | None,
    dtype: torch.dtype,
    rows: Rows,
    recipe: Recipe,
) -> Tensor:
    kept = codes, scale, outer_scale
    return _reduced(_grad_weight_of_codes(grad_output, *kept, recipe, multiplier), dtype, rows)


def _reduced(grad_weight: DTensor, dtype: torch.dtype, rows: Rows) -> Tensor:
    """This rank's rows of its part of the weight's gradient."""
    own = [Replicate() if cut is None else Shard(cut.dim) for cut in placed_cuts(rows.placed)]
    return reduced(grad_weight.redistribute(placements=own).to_local(), dtype, rows).contiguous()


def _fsdp_tokens(origin: DTensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> Sequence[Tensor]:
    return fsdp_tokens(multiplier, amax_history, multiplier, recipe)  # of the origin only its gradient matters


HANDLERS: dict[str, Callable[..., Any]] = {
    "fp8compile::linear": _linear,
    "fp8compile::grad_input": _grad_input,
    "fp8compile::grad_weight": _grad_weight,
    "fp8compile::kept_input": _kept_input,
    "fp8compile::grad_weight_of_codes": _grad_weight_of_codes,
    "fp8compile::delayed_linear": _delayed_linear,
    "fp8compile::delayed_grad_input": _delayed_grad_input,
    "fp8compile::delayed_grad_weight": _delayed_grad_weight,
    "fp8compile::fsdp_linear": _fsdp_linear,
    "fp8compile::fsdp_grad_input": _fsdp_grad_input,
    "fp8compile::fsdp_grad_weight": _fsdp_grad_weight,
    "fp8compile::fsdp_grad_weight_of_codes": _fsdp_grad_weight_of_codes,
    "fp8compile::fsdp_delayed_linear": _fsdp_delayed_linear,
    "fp8compile::fsdp_tokens": _fsdp_tokens,
    "fp8compile::scatter_sum": _scatter_sum,
}
