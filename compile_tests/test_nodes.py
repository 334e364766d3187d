"""How many nodes a product costs: each is a millisecond of tracing, and is scheduled and printed after that.

Counted are the calls in the joint graph of a layer without bias, three products, as AOTAutograd makes it with
Inductor's decompositions. An operand that is cast by itself has 24: four of the rounding barrier, two of the amax,
eight of the multiplier, two of the scale, eight of the cast. The rest lays codes and scales out as products read them.
A change may lower these numbers; one that raises them makes every model compile longer.
"""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import select_decomp_table

import fp8compile as f8
from fp8compile._compat import cpu_has_rowwise_gemm
from fp8compile.target import pretend_target
from fp8compile.testing.gpu.gpus import GPUS

# a CPU has no kernel for four bits: each sum of a transform has sixteen terms, and a hash rounds each gradient
CPU_NODES = {"tensorwise": 159, "rowwise": 185, "blockwise": 225, "mxfp8": 438, "nvfp4": 1927}
GPU_NODES = {
    "tensorwise": ("h200", 151),
    "rowwise": ("h200", 167),
    "blockwise": ("h200", 143),
    "mxfp8": ("b200", 278),
    "nvfp4": ("b200", 197),
}
GPU_SIZES = 512, 512  # of which no GEMM pads one


def joint_nodes(recipe, sizes=(256, 128)):
    """Calls in the joint graph of a layer of so many features."""
    counts = []

    def partition(joint, inputs, **kwargs):
        counts.append(sum(node.op == "call_function" for node in joint.graph.nodes))
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def compiler(graph, inputs):
        (outputs,) = graph.graph.find_nodes(op="output")[0].args
        return make_boxed_func(lambda *_: [node if node is None else node.meta["val"] for node in outputs])

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table(), partition_fn=partition)
    torch._dynamo.reset()
    linear = nn.Linear(*sizes, bias=False, dtype=torch.bfloat16)
    layer = f8.Linear.from_linear(linear, f8.recipes.by_name(recipe))
    x = torch.ones(64, sizes[0], dtype=torch.bfloat16, requires_grad=True)
    torch.compile(layer, fullgraph=True, backend=backend)(x)
    torch._dynamo.reset()
    (count,) = counts
    return count


@pytest.mark.skipif(not cpu_has_rowwise_gemm(), reason="before PyTorch 2.13 a CPU emulates every product")
@pytest.mark.parametrize("recipe", CPU_NODES)
def test_a_layer_is_no_more_nodes_than_it_was(recipe):
    assert joint_nodes(recipe) <= CPU_NODES[recipe]


@pytest.mark.parametrize("recipe", GPU_NODES)
def test_a_layer_for_a_gpu_is_no_more_nodes_than_it_was(recipe):
    gpu, nodes = GPU_NODES[recipe]
    with pretend_target(GPUS[gpu].target):
        assert joint_nodes(recipe, GPU_SIZES) <= nodes
