"""The ops of sharded weights where tokens are DTensors: each tensor parallel rank shares what it has of the weight.

The weight is gathered over the ranks of FSDP first, which gives what a tensor parallel rank has of it, as codes; the
rest is what the layer does without FSDP (`fp8compile.parallel.dtensor_linear`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer.delayed import amax_of
from fp8compile.ops.layer.fsdp_delayed import fsdp_tokens
from fp8compile.ops.layer.fsdp_gather import reduced
from fp8compile.ops.layer.linear import GRAD_INPUT, GRAD_WEIGHT, OUTPUT
from fp8compile.ops.layer.local_shards import LocalShard
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.products import Product, add_bias, multiply_shards
from fp8compile.ops.layer.rows import Rows, placed_cuts
from fp8compile.parallel.dtensor_linear import amax_over_ranks, of_tokens
from fp8compile.parallel.placed import part_of, placements_of, whole_of
from fp8compile.quantizers import Gemm, Recipe

__all__ = ["HANDLERS"]


def _weight_part(a: DTensor, local: Tensor, rows: Rows) -> LocalShard:
    mesh = a.device_mesh
    return LocalShard(local, placed_cuts(rows.placed, [mesh.get_group(index) for index in range(mesh.ndim)]))


def _product_with_shard(
    gemm: Gemm,
    a: DTensor,
    shard: Tensor,
    amax: Tensor | None,
    multiplier: Tensor | None,
    rows: Rows,
    recipe: Recipe,
) -> tuple[Product, LocalShard]:
    """A product whose right operand is the weight, and how the weight is cut."""
    left, weight = part_of(gemm.name, a), _weight_part(a, shard.to(a.dtype), rows)
    operands = Operands(recipe, Phase.of(gemm, left.local), multiplier, weight_amax=amax, rows=rows)
    return multiply_shards(gemm, left, weight, operands), weight


def _whole_features(weight: LocalShard, rows: Rows) -> tuple[int, int]:
    """Rows and columns of the whole weight."""
    shape = [sum(rows.sizes), weight.local.shape[1]]
    for cut in reversed(weight.cuts):
        if cut is not None:
            shape[cut.dim] = cut.total
    return shape[0], shape[1]


def _output(
    x: DTensor,
    shard: Tensor,
    bias: DTensor | None,
    amax: Tensor | None,
    amax_for_grad_input: Tensor | None,
    rows: Rows,
    recipe: Recipe,
    multiplier: Tensor | None = None,
) -> DTensor:
    product, weight = _product_with_shard(OUTPUT, x, shard, amax, multiplier, rows, recipe)
    local = product.local if bias is None else add_bias(product, part_of("linear", bias), weight.cuts)
    return of_tokens(product, local, x.device_mesh, (*x.shape[:-1], _whole_features(weight, rows)[0]))


def _delayed_output(
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
    amax_of_x = amax_over_ranks(x, for_x, used)
    y = _output(x, shard, bias, amax, amax_for_grad_input, rows, recipe, used)
    return y, used, amax_of_x, amax_of(shard.to(x.dtype), for_weight)


def _grad_input(
    grad_output: DTensor,
    shard: Tensor,
    amax: Tensor | None,
    multiplier: Tensor | None,
    rows: Rows,
    recipe: Recipe,
) -> DTensor:
    product, weight = _product_with_shard(GRAD_INPUT, grad_output, shard, amax, multiplier, rows, recipe)
    shape = (*grad_output.shape[:-1], _whole_features(weight, rows)[1])
    return of_tokens(product, product.local, grad_output.device_mesh, shape)


def _grad_weight(
    grad_output: DTensor,
    x: DTensor,
    multiplier: Tensor | None,
    dtype: torch.dtype,
    rows: Rows,
    recipe: Recipe,
) -> Tensor:
    mesh = x.device_mesh
    left, right = part_of("grad_weight", grad_output), part_of("grad_weight", x)
    operands = Operands(recipe, Phase.of(GRAD_WEIGHT, left.local), multiplier)
    product = multiply_shards(GRAD_WEIGHT, left, right, operands)
    placements = placements_of(product.steps, {"m": [0] * mesh.ndim, "n": [1] * mesh.ndim})
    whole = whole_of(product.local, mesh, placements, (grad_output.shape[-1], x.shape[-1]))
    own = [Replicate() if cut is None else Shard(cut.dim) for cut in placed_cuts(rows.placed)]
    grad = whole.redistribute(placements=own).to_local()
    return reduced(grad, dtype, rows).contiguous()


def _tokens(origin: DTensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    return fsdp_tokens(multiplier, amax_history, multiplier, recipe)  # of the origin only its gradient matters


HANDLERS = {
    "fp8compile::fsdp_tokens": _tokens,
    "fp8compile::fsdp_linear": _output,
    "fp8compile::fsdp_delayed_linear": _delayed_output,
    "fp8compile::fsdp_grad_input": _grad_input,
    "fp8compile::fsdp_grad_weight": _grad_weight,
}
