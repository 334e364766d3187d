"""A test for each thing that tensor-parallel FP8 is blamed for, each seen to fail on the implementation to blame.

Elsewhere: options of a recipe that are lost on the way (`test_tensor_parallel.py`: "tensorwise pow2", "rowwise pow2");
a second group that overwrites the first (`test_explicit_groups.py`: two_groups_in_turn_keep_apart).

Here the wrong implementation is put in by the test itself, in each run of it, and has to be found.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from gloo_ranks import shared_ranks
from test_tensor_parallel import LAYOUTS, RECIPES, SHAPES, layer_on_ranks, mesh_of, placed, tensors_of

import fp8compile as f8
from fp8compile.layout.quantized import Plain
from fp8compile.ops.layer import operands
from fp8compile.ops.layer import quantize_over_ranks as quantizing
from fp8compile.quantizers import GEMMS

# 67 tokens on two ranks: 34 and 33; 150 on two: 75 and 75. Blocks of 128 and of 32 are cut.
NO_MULTIPLE_OF_128 = ("nothing divides", "cut blocks")


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def own_amax(amax, group):
    """The amax of this rank's shard alone."""
    return amax


def own_amax_in_backward(amax, group):
    """The same, of what a backward quantizes."""
    return amax if torch._C._current_autograd_node() is not None else REDUCED(amax, group)


REDUCED = quantizing.all_reduce_amax


def layer_with(amax, *case):
    """What differs from one process, if that is how amaxes are reduced."""
    with nullcontext() if amax is None else mock.patch.object(quantizing, "all_reduce_amax", amax):
        wrong = layer_on_ranks(*case)
    return sorted(wrong) if wrong is not None else None


# -------------------------------------------------------------------- blocks that ranks cut


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", NO_MULTIPLE_OF_128)
def test_block_scaled_all_gather_with_tokens_no_multiple_of_128(ranks, recipe, shape):
    case = recipe, "SP to colwise", shape, None, 2
    assert ranks.run(layer_with, None, *case)[:2] == [[], []]
    # Blocks along tokens are those of grad_weight: with a scale of each rank's half of them, it is another one.
    assert all("weight" in wrong for wrong in ranks.run(layer_with, own_amax, *case)[:2])


# -------------------------------------------------------------------- the backward's amax


@pytest.mark.parametrize("layout", ["SP to colwise", "rowwise to SP"])
def test_backward_quantizes_the_gathered_input_with_the_amax_across_ranks(ranks, layout):
    case = "tensorwise", layout, "cut blocks", None, 2
    assert ranks.run(layer_with, None, *case)[:2] == [[], []]
    # The forward stays right: it is the backward that would scale each rank's tokens by themselves.
    for wrong in ranks.run(layer_with, own_amax_in_backward, *case)[:2]:
        assert "weight" in wrong
        assert "y" not in wrong


# -------------------------------------------------------------------- quantized once


def once(part, quantizer, quantize):
    return quantize(part, quantizer)


def twice(part, quantizer, quantize):
    """Codes, their values, and codes of these: what a gather in high precision in between would make of it."""
    codes = quantize(part, quantizer)
    values = quantizer.dequantize(codes.codes, codes.scale, torch.float32).to(part.local.dtype)
    return quantize(Plain(values, part.layout), quantizer)


def quantized_operands(recipe, layout, implementation):
    """What a training step of a layer quantizes, and by what: x, weight, grad_output, or none of these."""
    mesh = mesh_of(2)
    if torch.distributed.get_rank() > 1:
        return None
    x, weight, grad, _ = tensors_of(SHAPES["even"])
    wheres = zip((x, weight, grad), LAYOUTS[layout], strict=True)
    spread = dict(zip(("x", "weight", "grad_output"), (placed(t, where, mesh) for t, where in wheres), strict=True))
    own = {name: t.to_local().clone() for name, t in spread.items()}
    right, seen = operands.quantize_part, []

    def watched(part, quantizer):
        names = [name for name, t in own.items() if t.shape == part.local.shape and torch.equal(t, part.local)]
        seen.append((names[0] if names else "none of these", quantizer))
        return right(part, quantizer)

    def quantize(part, quantizer, *_, **__):
        return implementation(part, quantizer, watched)

    with mock.patch.object(operands, "quantize_part", quantize):
        inputs = [spread[name].requires_grad_() for name in ("x", "weight")]
        y = f8.linear(*inputs, recipe=RECIPES[recipe])
        grad = spread["grad_output"]
        y.redistribute(placements=grad.placements).backward(grad)
    recipe = RECIPES[recipe]
    expected = [quantizer for gemm in GEMMS for quantizer in recipe.quantizers(gemm)]
    return [name for name, _ in seen], [quantizer for _, quantizer in seen] == expected


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("layout", ["SP to colwise", "rowwise"])
def test_each_operand_of_a_product_is_quantized_once_from_what_the_rank_has(ranks, recipe, layout):
    # the operands of the three products, each once: its own shard, in high precision, before anything is gathered
    names = ["x", "weight", "grad_output", "weight", "grad_output", "x"]
    assert ranks.run(quantized_operands, recipe, layout, once)[:2] == [(names, True)] * 2
    for seen, _ in ranks.run(quantized_operands, recipe, layout, twice)[:2]:
        assert len(seen) == 12
        assert "none of these" in seen
