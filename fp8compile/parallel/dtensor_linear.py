"""The linear layer on DTensors: each of its products is taken apart into what a rank computes and what ranks send.

The placements of the result are those of a plain linear layer: stock plans work as they are. What is sent on the way
are codes, one byte an element, and scales (see `fp8compile.ops.layer.products`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8compile import _compat
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer import delayed
from fp8compile.ops.layer.linear import GRAD_INPUT, GRAD_WEIGHT, OUTPUT
from fp8compile.ops.layer.local_shards import LocalShard, QuantizedShard
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.products import Product, add_bias, multiply_shards
from fp8compile.ops.layer.quantize_shard import shard_amax
from fp8compile.ops.layer.shards import axis_blocks, split_axes
from fp8compile.parallel.placed import check_one_mesh, part_of, placements_of, whole_of
from fp8compile.quantizers import DelayedScaling, Gemm, Recipe
from fp8compile.tensor import check_serves, has_codes

__all__ = ["HANDLERS", "amax_over_ranks", "of_tokens"]


def of_tokens(product: Product, local: Tensor, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """A result (..., n) whose dims before the last are those of the left operand."""
    rows = [None if cut is None else cut.dim for cut in product.cuts]
    placements = placements_of(product.steps, {"m": rows, "n": [len(shape) - 1] * mesh.ndim})
    return whole_of(local.view(*product.shape[:-1], local.shape[1]), mesh, placements, shape)


def _codes_of(gemm: Gemm, weight: LocalShard, recipe: Recipe) -> QuantizedShard:
    """The codes of a weight whose part on this rank was quantized before: FSDP has gathered it so."""
    function, local = gemm.name, weight.local
    check_serves(function, local, recipe)
    local = local.read_by(gemm)
    sides = axis_blocks(local.shape, weight.cuts, local.quantizer.block)
    whole = split_axes(local.shape, weight.cuts, local.quantizer.block)
    shape = tuple(side.total if split else side.length for side, split in zip(sides, whole, strict=True))
    if tuple(local.scale.shape) != local.quantizer.scale_shape(shape):
        raise ValueError(
            f"{function}: weight has a QuantizedTensor of shape {tuple(local.shape)} with scales "
            f"{tuple(local.scale.shape)} on this rank; cut like this, blocks {local.quantizer.block} have scales "
            f"{local.quantizer.scale_shape(shape)}. Quantize each rank's part by fp8compile.quantize with group=, "
            "shard_dim= and sizes=."
        )
    return QuantizedShard(local.codes, local.scale, local.quantizer, weight.cuts, whole)


def operands_of(
    gemm: Gemm, a: LocalShard, weight: LocalShard | None, recipe: Recipe, multiplier: Tensor | None = None
) -> Operands:
    """What quantizes the operands of a product on DTensors; a weight that is quantized already has its codes."""
    local = None if weight is None else weight.local
    if not has_codes(local):
        return Operands(recipe, Phase.of(gemm, a.local), multiplier)
    codes = _codes_of(gemm, weight, recipe)
    return Operands(recipe, Phase.of(gemm, a.local), multiplier, weight=codes, weight_in_turns=local.is_in_turns)


def _output(
    x: DTensor, weight: DTensor, bias: DTensor | None, recipe: Recipe, multiplier: Tensor | None = None
) -> DTensor:
    mesh = check_one_mesh("linear", {"x": x, "weight": weight, "bias": bias})
    a, b = part_of("linear", x), part_of("linear", weight)
    product = multiply_shards(OUTPUT, a, b, operands_of(OUTPUT, a, b, recipe, multiplier))
    local = product.local if bias is None else add_bias(product, part_of("linear", bias), b.cuts)
    return of_tokens(product, local, mesh, (*x.shape[:-1], weight.shape[0]))


def _grad_input(grad_output: DTensor, weight: DTensor, recipe: Recipe, multiplier: Tensor | None = None) -> DTensor:
    mesh = check_one_mesh("grad_input", {"grad_output": grad_output, "weight": weight})
    a, b = part_of("grad_input", grad_output), part_of("grad_input", weight)
    product = multiply_shards(GRAD_INPUT, a, b, operands_of(GRAD_INPUT, a, b, recipe, multiplier))
    return of_tokens(product, product.local, mesh, (*grad_output.shape[:-1], weight.shape[1]))


def _grad_weight(grad_output: DTensor, x: DTensor, recipe: Recipe, multiplier: Tensor | None = None) -> DTensor:
    mesh = check_one_mesh("grad_weight", {"grad_output": grad_output, "x": x})
    a, b = part_of("grad_weight", grad_output), part_of("grad_weight", x)
    product = multiply_shards(GRAD_WEIGHT, a, b, operands_of(GRAD_WEIGHT, a, None, recipe, multiplier))
    placements = placements_of(product.steps, {"m": [0] * mesh.ndim, "n": [1] * mesh.ndim})
    return whole_of(product.local, mesh, placements, (grad_output.shape[-1], x.shape[-1]))


# ---------------------------------------------------------------------------------- delayed scaling


def amax_over_ranks(tensor: DTensor, quantizer: DelayedScaling | None, like: Tensor) -> Tensor:
    """The amax of the whole, (), on every rank; 0 for a tensor without delayed scaling."""
    return like.new_zeros(()) if quantizer is None else shard_amax(part_of("linear", tensor), quantizer).view(())


def _state_of(multiplier: DTensor) -> Tensor:
    part = part_of("linear", multiplier)
    if any(part.cuts):
        raise ValueError(
            f"linear: the multiplier of the state has placements {multiplier.placements}; every rank has all of it, "
            "Replicate()."
        )
    return part.local


def _delayed_output(
    x: DTensor,
    weight: DTensor,
    bias: DTensor | None,
    amax_history: DTensor,
    multiplier: DTensor,
    group: str | None,
    recipe: Recipe,
) -> tuple[DTensor, ...]:
    state = {"amax_history": amax_history, "multiplier": multiplier}
    mesh = check_one_mesh("linear", {"x": x, "weight": weight, "bias": bias, **state})
    delayed.check_state(x, amax_history, multiplier, recipe)
    used = snapshot(_state_of(multiplier))
    y = _output(x, weight, bias, recipe, used)
    everywhere = [Replicate()] * mesh.ndim
    of_input, of_weight, _ = recipe.delayed()
    is_codes = of_weight is not None and has_codes(_compat.local_itself(weight))
    kept = delayed.kept_amax(_state_of(amax_history)) if is_codes else amax_over_ranks(weight, of_weight, used)
    amaxes = amax_over_ranks(x, of_input, used), kept
    return y, whole_of(used, mesh, everywhere, used.shape), *(whole_of(a, mesh, everywhere, ()) for a in amaxes)


def _delayed_grad_input(grad_output: DTensor, weight: DTensor, multiplier: DTensor, recipe: Recipe) -> DTensor:
    return _grad_input(grad_output, weight, recipe, _state_of(multiplier))


def _delayed_grad_weight(grad_output: DTensor, x: DTensor, multiplier: DTensor, recipe: Recipe) -> DTensor:
    return _grad_weight(grad_output, x, recipe, _state_of(multiplier))


def _scatter_sum(x: DTensor, dim: int, recipe: Recipe) -> DTensor:
    return x.redistribute(placements=[Shard(dim) if p.is_partial() else p for p in x.placements])


HANDLERS = {
    "fp8compile::scatter_sum": _scatter_sum,
    "fp8compile::linear": _output,
    "fp8compile::grad_input": _grad_input,
    "fp8compile::grad_weight": _grad_weight,
    "fp8compile::delayed_linear": _delayed_output,
    "fp8compile::delayed_grad_input": _delayed_grad_input,
    "fp8compile::delayed_grad_weight": _delayed_grad_weight,
}
