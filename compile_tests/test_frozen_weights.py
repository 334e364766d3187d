"""A frozen weight, in each placement of the layer: grad_output is quantized for the one gradient that is wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fp8compile as f8
from fp8compile import ops
from fp8compile.ops import delayed_linear, fsdp_delayed_linear
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.make_weight_codes import flat_sets, sets_of_weight
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.graphs.recording import op_name

M, K, N, EXPERTS = 256, 256, 512, 2
RECIPE = f8.recipes.blockwise()
DELAYED = f8.DelayedScaling(history=4)
DELAYED_OUTPUT = replace(RECIPE, input=DELAYED, weight=DELAYED)
STATE = torch.ones(3, 4), torch.ones(3)
ENDS = torch.tensor([128, M], dtype=torch.int32)


def dense(op, *where, recipe=RECIPE):
    return lambda x, weight: op(x, weight, None, *where, recipe)


def grouped(op, *where):
    return lambda x, weight: op(x, weight, ENDS, None, *where, RECIPE)


PLACEMENTS = {
    "linear": (dense(ops.linear), ()),
    "shared_scale_linear": (dense(ops.shared_scale_linear, torch.ones(1)), ()),
    "known_codes_linear": (dense(ops.known_codes_linear, *flat_sets(sets_of_weight(torch.ones(N, K), RECIPE))), ()),
    "known_codes_grouped_linear": (
        grouped(ops.known_codes_grouped_linear, *flat_sets(sets_of_weight(torch.ones(EXPERTS, N, K), RECIPE))),
        (EXPERTS,),
    ),
    "sharded_linear": (dense(ops.sharded_linear, 0, [N], None, [0], 0, ""), ()),
    "fsdp_linear": (dense(ops.fsdp_linear, None, None, Rows.alone(N)), ()),
    "delayed_linear": (lambda x, w: delayed_linear(x, w, None, *STATE, None, DELAYED_OUTPUT)[0], ()),
    "fsdp_delayed_linear": (
        lambda x, w: fsdp_delayed_linear(
            x, w, None, torch.zeros(3), torch.zeros(1), None, None, STATE[1], Rows.alone(N), DELAYED_OUTPUT
        )[0],
        (),
    ),
    "grouped_linear": (grouped(ops.grouped_linear), (EXPERTS,)),
    "sharded_grouped_linear": (grouped(ops.sharded_grouped_linear, 1, [N], 0, ""), (EXPERTS,)),
    "fsdp_grouped_linear": (grouped(ops.fsdp_grouped_linear, Rows.alone(EXPERTS)), (EXPERTS,)),
}


def made_twice(name, *, frozen):
    """Results of the kernels that quantize in both directions, in the backward."""
    layer, batch = PLACEMENTS[name]
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(*batch, N, K, dtype=torch.bfloat16, requires_grad=not frozen)
    _, backward = gpu_graphs(layer, (x, weight), GPUS["h200"])
    names = [op_name(node.target) for node in backward.graph.graph.nodes if node.op == "call_function"]
    return sum("quantize_both" in each for each in names)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_frozen_weight_has_grad_output_quantized_in_one_direction(name):
    assert made_twice(name, frozen=True) == 0
    assert made_twice(name, frozen=False) == 1
