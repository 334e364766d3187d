"""Models, batches and training that the tests of FSDP share, run in each rank."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from gloo_ranks import GROUPS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, silu

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION

NUM_SYMBOLS = 32
SIZES = {"even": (32, 256), "uneven": (33, 201)}  # dim, hidden; over two ranks, 256 is cut between blocks of 128
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WITHIN = {"1-D": "pair", "three": "three", "HSDP": "all", "FSDP + TP": "all"}  # the ranks that a mesh takes
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": BF16}


FOUR_BITS = "nvfp4, 1 x 16"  # forward and backward multiply other codes of a weight
SQUARES = "mxfp8, 32 x 32"  # forward and backward multiply the same codes of a weight
OTHER_BLOCKS = {
    FOUR_BITS: f8.recipes.nvfp4(weight_block=(1, 16)),
    SQUARES: f8.recipes.mxfp8(weight_block=(32, 32)),
}


def recipe_of(name):
    """A ready recipe by its name, or by what these tests call it."""
    return OTHER_BLOCKS.get(name) or f8.recipes.by_name(name)


class FeedForward(nn.Module):
    """RMSNorm and SwiGLU, and the input added."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.inner = nn.ModuleDict(
            {
                "gate": nn.Linear(dim, hidden, bias=False),
                "up": nn.Linear(dim, hidden),
                "down": nn.Linear(hidden, dim, bias=False),
            }
        )

    def forward(self, x):
        y = self.norm(x)
        return x + self.inner["down"](silu(self.inner["gate"](y)) * self.inner["up"](y))


class Model(nn.Module):
    """Symbols to the loss of the next ones."""

    def __init__(self, dim, hidden, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS, dim)
        self.blocks = nn.ModuleList([FeedForward(dim, hidden) for _ in range(blocks)])
        self.head = nn.Linear(dim, NUM_SYMBOLS, bias=False)

    def forward(self, symbols):
        x = self.embed(symbols[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return cross_entropy(logits.flatten(0, 1).float(), symbols[:, 1:].flatten())


def model_of(sizes, recipe, *, seed=0, **options):
    """A model with FP8 layers in its blocks."""
    torch.manual_seed(seed)
    return f8.convert(Model(*SIZES[sizes]), recipe, filter=lambda _, fqn: fqn != "head", **options)


def batch(step, rank):
    """Symbols that follow one another in steps of three."""
    start = torch.randint(NUM_SYMBOLS, (4, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (start + 3 * torch.arange(9)) % NUM_SYMBOLS


def mesh_1d(name):
    """Of one of the groups."""
    return DeviceMesh.from_group(GROUPS[name], "cpu")


_MESHES: dict[tuple[str, str], DeviceMesh] = {}


def mesh_2d(*names):
    """Two by two ranks; all four have to ask for it."""
    if names not in _MESHES:
        _MESHES[names] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    return _MESHES[names]


def shard(model, mesh, policy, *, backend=None, **options):
    """`fully_shard` of each block and of what is left, the blocks compiled if so told."""
    for index, block in enumerate(model.blocks):
        if backend is not None:
            model.blocks[index] = torch.compile(block, fullgraph=True, backend=backend)
        fully_shard(model.blocks[index], mesh=mesh, mp_policy=policy, **options)
    return fully_shard(model, mesh=mesh, mp_policy=policy, **options)


def adamw(model):
    """The optimizer of these tests."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def trained(model, steps, rank, *, optimizer=None, start=0, context=nullcontext):
    """Losses of some steps."""
    optimizer = adamw(model) if optimizer is None else optimizer
    losses = []
    for step in range(start, start + steps):
        with context():
            loss = model(batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulated(model):
    """Two backwards, then a step; the first of them sends no gradient."""
    optimizer, losses = adamw(model), []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        loss = model(batch(step, dist.get_rank() % 2))
        loss.backward()
        losses.append(loss.item())
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def weights_of(model):
    """All parameters, whole and plain, by name without what `torch.compile` adds to it."""
    return {
        name.replace("_orig_mod.", ""): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }


def is_sharded(model):
    """Whether FSDP2 manages it."""
    return isinstance(model, FSDPModule)


def one_process(model, policy, steps, world=2):
    """This rank's losses, and the weights, that one process has: it adds ranks' gradients in float32, in order."""
    optimizer, losses = adamw(model), []
    cast = copy.deepcopy(model)
    for parameter in cast.parameters():  # buffers stay as they are, with `fully_shard` too
        parameter.data = parameter.data.to(POLICIES[policy].param_dtype or torch.float32)
    if TORCH_VERSION >= (2, 15):  # FSDP2 lets gradients come in the dtype that it sums them in: those of norms do
        for parameter in cast.parameters():
            parameter.grad_dtype = torch.float32
    for step in range(steps):
        grads, found = [], []
        for rank in range(world):
            cast.load_state_dict(model.state_dict())
            loss = cast(batch(step, rank))
            found.append(loss.item())
            loss.backward()
            grads.append([parameter.grad.float() for parameter in cast.parameters()])
            cast.zero_grad()
        for parameter, *own in zip(model.parameters(), *grads, strict=True):
            parameter.grad = sum(own[1:], own[0]) / world
        optimizer.step()
        losses.append(found)
    return [each[dist.get_rank() % world] for each in losses], weights_of(model)
