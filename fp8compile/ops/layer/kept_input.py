"""fp8compile::kept_input and grad_weight_of_codes: the codes that eager mode keeps of a layer's input.

    x_MK --cast along tokens, in the forward--> codes, scale, outer scale --kept--> grad_weight_of_codes

A layer that saves its input for grad_weight keeps two bytes an element, which the backward would read for nothing but
codes. Codes of four bits are made in the forward and kept in the input's place: 0.56 bytes with their scales. They are
the same codes, so all bits stay. Three layers that read one input, such as q, k and v, each keep codes and are still
below the input; with codes of eight bits they would not be, so those recipes keep the input.

Compiled code does not need it: there the partitioner sees input and codes, and keeps what is smaller. The weight is a
parameter, which is in memory anyway, so eager mode keeps no codes of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops import samples
from fp8compile.ops.layer.local_shards import LocalShard, QuantizedShard
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.products import multiply_shards
from fp8compile.ops.layer.quantize_shard import OPS_OF_STEPS, PYTHON_OF_STEPS, Steps, quantize_shard
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import GEMMS, Quantizer, Recipe, TwoLevelScaling
from fp8compile.quantizers.blocks import as_matrix

__all__ = ["grad_weight_of_codes", "kept_input", "keeps_codes"]

GRAD_WEIGHT = GEMMS[2]
BITS = 4

# ---------------------------------------------------------------------------------- kept_input


def keeps_codes(x: Tensor, recipe: Recipe) -> bool:
    """Whether a layer keeps codes of this input in its place: in eager mode, of a plain tensor, of four bits."""
    if _compat.is_stand_in(recipe):
        return False
    quantizer = recipe.quantizer_read(GRAD_WEIGHT.b)
    if quantizer is None or quantizer.code_bits() > BITS or not quantizer.has_outer_scale():
        return False
    if quantizer.block[0] == 1 and x.shape[-1] % 2:
        return False  # what two codes a byte stand for could be one column more
    is_plain = type(x) in (Tensor, torch.nn.Parameter)
    return is_plain and not _compat.is_traced(x) and not _compat.is_transformed(x)


def _quantized(x: Tensor, quantizer: Quantizer, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    found = quantize_shard(LocalShard(as_matrix(x)), quantizer, steps)
    return found.local, found.scale, found.outer_scale


def _kernel(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    return _quantized(x, quantizer, PYTHON_OF_STEPS)


def _decompose(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    return _quantized(x, quantizer, OPS_OF_STEPS)


def _fake(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    shape = as_matrix(x).shape
    quantizer = quantizer.for_shape(shape)
    codes = x.new_empty(quantizer.codes_shape(shape), dtype=torch.uint8)
    scale = x.new_empty(quantizer.scale_shape(shape), dtype=quantizer.scale_dtype())
    return codes, scale, x.new_empty((1,), dtype=torch.float32)


def _quantizers() -> Iterator[TwoLevelScaling]:
    pillar = TwoLevelScaling(block=(16, 1), packed="columns")
    yield pillar
    yield TwoLevelScaling(block=(16, 1), packed="columns", scale="torchao", hadamard=(1, -1) * 8)


def _samples() -> Iterator[tuple]:
    for x in samples.matrices():
        for quantizer in _quantizers():
            yield x, quantizer


kept_input = register_op(
    "fp8compile::kept_input",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_decompose,
    sharding=None,  # its codes are packed, and ranks can't cut them
    samples=_samples,
)
"""Codes of an input for grad_weight, the scales of their blocks and the outer scale."""

# ---------------------------------------------------------------------------------- grad_weight_of_codes


def _grad_weight(
    phase: Phase, grad_output: Tensor, codes: Tensor, scale: Tensor, outer_scale: Tensor, recipe: Recipe
) -> Tensor:
    grad_MN = as_matrix(grad_output)
    quantizer = recipe.quantizer_read(GRAD_WEIGHT.b).for_shape((grad_MN.shape[0], _features(codes, recipe)))
    kept = QuantizedShard(codes, scale, quantizer, (), outer_scale=outer_scale)
    operands = Operands(recipe, phase, input=kept)
    return multiply_shards(GRAD_WEIGHT, LocalShard(grad_MN), LocalShard(codes), operands).local


def _grad_weight_fake(
    grad_output: Tensor, codes: Tensor, scale: Tensor, outer_scale: Tensor, recipe: Recipe
) -> Tensor:
    return grad_output.new_empty((grad_output.shape[-1], _features(codes, recipe)))


def _features(codes: Tensor, recipe: Recipe) -> int:
    """Columns of the input that codes are of."""
    return recipe.quantizer_read(GRAD_WEIGHT.b).values_shape(codes.shape)[1]


def _grad_weight_samples() -> Iterator[tuple]:
    generator = torch.Generator().manual_seed(0)
    for x, quantizer in _samples():
        recipe = Recipe(grad_output_for_grad_weight=quantizer, input_for_grad_weight=quantizer)
        grad_output = torch.randn((40, *x.shape[:-1]), generator=generator).to(x.dtype).movedim(0, -1)
        yield grad_output, *_kernel(x, quantizer), recipe


grad_weight_of_codes = register_product(
    "grad_weight_of_codes", GRAD_WEIGHT, _grad_weight, fake=_grad_weight_fake, samples=_grad_weight_samples
)
"""grad_weight, (N, K), from codes of the input that `kept_input` made."""
