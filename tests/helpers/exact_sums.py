"""A model whose sums over ranks round nothing, so that ranks have the bits of one process in all that they compute.

    codes       E4M3 with scales that are powers of two: multiples of 2**-9 of a scale, below 2**9 of it
    weights     1 and -1 times a power of two: a product is a code of the other operand, a sum of 32 below 2**14
    dtype       float32, which has 24 bits: 2**14 in steps of 2**-9 are 23

What is left of tensor parallelism is then what it decides: which scale, which code, which operand, whose gradient.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile import parallel

__all__ = ["DIM", "RECIPES", "Blocks", "cut_tokens", "gradients", "made", "spread"]

DIM, HIDDEN = 16, 32
RECIPES = {
    "tensorwise": f8.recipes.tensorwise(grad_format="e4m3", scale="pow2"),
    "rowwise": f8.recipes.rowwise(scale="pow2"),
    "rowwise_bf16_wgrad": f8.recipes.rowwise_bf16_wgrad(scale="pow2"),
    "blockwise": f8.recipes.blockwise(scale="pow2"),
    "mxfp8": f8.recipes.mxfp8(),
}


class Block(nn.Module):
    """A norm, a gate and what it lets through; the input added."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    """Some of them, run again in the backward if so told."""

    def __init__(self, count=2):
        super().__init__()
        self.blocks, self.is_checkpointed = nn.ModuleList([Block() for _ in range(count)]), False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def made(recipe, dtype=torch.float32, *, exact=True):
    """The converted model, the same in every process."""
    torch.manual_seed(0)
    model = Blocks().to(dtype)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and exact:
                module.weight.copy_(module.weight.sign() / 4)
    return f8.convert(model, recipe, filter=lambda *_: True)


def spread(model, mesh, *, sequence=False):
    """The model over the ranks of a mesh, whose tokens each has, or with sequence parallelism a part of them."""
    cut = {"input_layouts": Shard(1)} if sequence else {}
    plan = {}
    for index in range(len(model.blocks)):
        plan[f"blocks.{index}.gate"] = plan[f"blocks.{index}.up"] = parallel.ColwiseParallel(
            **cut, use_local_output=False
        )
        plan[f"blocks.{index}.down"] = parallel.RowwiseParallel(
            **({"output_layouts": Shard(1), "use_local_output": False} if sequence else {})
        )
        if sequence:
            plan[f"blocks.{index}.norm"] = SequenceParallel()
    return parallelize_module(model, mesh, plan)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def cut_tokens(x, mesh):
    """A sequence, of which each rank has a part."""
    return distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None)


def gradients(model, x, *, run=None):
    """The output, and the gradients of the input and of all parameters, whole and by name.

    Args:
        model: What has the parameters.
        x: The input.
        run: What is called, if not the model.
    """
    x = x.detach().requires_grad_()
    y = (model if run is None else run)(x)
    weights = torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)
    (whole(y) * weights).square().sum().backward()
    found = {"y": whole(y).detach(), "x": whole(x.grad)}
    return found | {name: whole(p.grad) for name, p in model.named_parameters()}
