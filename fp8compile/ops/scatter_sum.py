"""fp8compile::scatter_sum: stands for the reduce-scatter of a layer's output; its gradient stays as it is.

The kernel here, for plain tensors, only copies; `fp8compile.parallel.dtensor_layer` reduce-scatters partial sums of a
DTensor. In the backward, DTensor's own redistribution would gather the gradient in high precision. This op returns the
gradient sharded; the layer then quantizes the shard, and ranks gather codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Recipe

__all__ = ["scatter_sum"]


def _kernel(x: Tensor, dim: int, recipe: Recipe) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


scatter_sum: OpOverload = register_op(
    "fp8compile::scatter_sum",
    _kernel,
    fake=lambda x, dim, recipe: x.new_empty(x.shape),
    setup_context=lambda ctx, inputs, output: None,
    backward=lambda ctx, grad: (grad, None, None),
    decompose=_kernel,
    sharding=None,  # fp8compile.parallel.dtensor_layer redistributes DTensors
)
