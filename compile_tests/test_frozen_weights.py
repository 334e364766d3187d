"""A frozen weight, in each placement of the layer: grad_output is quantized for the one gradient that is wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fp8compile as f8
from fp8compile import ops
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import UNSHARDED, OverFsdp, OverGroup
from fp8compile.ops.layer.make_weight_codes import sets_of_weight
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.graphs.recording import op_name

M, K, N, EXPERTS = 256, 256, 512, 2
RECIPE = f8.recipes.blockwise()
DELAYED = f8.DelayedScaling(history=4)
DELAYED_OUTPUT = replace(RECIPE, input=DELAYED, weight=DELAYED)
STATE = torch.ones(3, 4), torch.ones(3)
ENDS = torch.tensor([128, M], dtype=torch.int32)


def layer(offs=None, known=(), sizes=(), sharding=UNSHARDED):
    return lambda x, weight: ops.linear(x, weight, None, offs, known, sizes, sharding, RECIPE)


def delayed(*state, sharding=UNSHARDED):
    return lambda x, weight: ops.delayed_linear(x, weight, None, *state, None, None, [], [], sharding, DELAYED_OUTPUT)[
        0
    ]


def known_codes(*shape):
    return Known.sets(*sets_of_weight(torch.ones(shape), RECIPE))


OVER_GROUP = OverGroup(weight_dim=0, ranks=1, rank=0, group="")
PLACEMENTS = {
    "plain": (layer(), ()),
    "shared scale": (layer(known=[*Known(outer_amax=torch.ones(1))]), ()),
    "known codes": (layer(known=known_codes(N, K)), ()),
    "known codes, groups": (layer(ENDS, known_codes(EXPERTS, N, K)), (EXPERTS,)),
    "over a group": (layer(sizes=[N], sharding=OVER_GROUP), ()),
    "FSDP": (layer(sharding=OverFsdp(Rows.alone(N))), ()),
    "delayed": (delayed(None, None, *STATE), ()),
    "delayed, FSDP": (
        delayed(torch.zeros(3), torch.zeros(1), None, STATE[1], sharding=OverFsdp(Rows.alone(N))),
        (),
    ),
    "groups": (layer(ENDS), (EXPERTS,)),
    "groups over a group": (layer(ENDS, sizes=[N], sharding=OVER_GROUP), (EXPERTS,)),
    "groups, FSDP": (layer(ENDS, sharding=OverFsdp(Rows.alone(EXPERTS))), (EXPERTS,)),
}


def made_twice(name, *, frozen):
    """Results of the kernels that quantize in both directions, in the backward."""
    run, batch = PLACEMENTS[name]
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(*batch, N, K, dtype=torch.bfloat16, requires_grad=not frozen)
    _, backward = gpu_graphs(run, (x, weight), GPUS["h200"])
    names = [op_name(node.target) for node in backward.graph.graph.nodes if node.op == "call_function"]
    return sum("cast_transpose" in each for each in names)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_frozen_weight_has_grad_output_quantized_in_one_direction(name):
    assert made_twice(name, frozen=True) == 0
    assert made_twice(name, frozen=False) == 1
