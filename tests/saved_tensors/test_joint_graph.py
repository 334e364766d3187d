"""Saved tensors as codes in one graph of forward and backward, as torchtitan's GraphTrainer has it, and its policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.saved_tensors.joint_graph import pack_in_joint_graph
from fp8compile.testing.bits import difference

TOKENS, D, H = 32, 64, 128


def chosen(tensor):
    """What the default chooses, and small tensors too."""
    return tensor.kind in ("norm", "activation", "checkpoint")


SAVED = f8.SavedAsCodes(filter=chosen)


def is_backward(node):
    return node.meta.get("autograd_backward", False)


def loss_of(x, gate, up, down, scale):
    normed = nn.functional.rms_norm(x * 1, (D,), scale)
    return (nn.functional.silu(normed @ gate) * (normed @ up) @ down + x).float().square().sum()


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, D), (D, H), (D, H), (H, D), (D,)
    return [
        (torch.randn(shape, generator=generator) / shape[0] ** 0.5).bfloat16().requires_grad_() for shape in shapes
    ]


def step(*given):
    loss = loss_of(*given)
    return (loss, *torch.autograd.grad(loss, given))


def joint(tag):
    """The graph of a step; its forward's nodes are tagged by what ``tag`` says of a name of an operator."""
    graph = make_fx(step, tracing_mode="fake")(*tensors())
    names = [node for node in graph.graph.nodes if node.op == "call_function"]
    (first,) = [at for at, node in enumerate(names) if node.target is torch.ops.aten.ones_like.default]
    for at, node in enumerate(names):
        if at >= first:
            node.meta["autograd_backward"] = True
        else:
            node.meta["recompute"] = tag(node.target)
    return graph


def all_saved(target):
    return CheckpointPolicy.MUST_SAVE


def products_saved(target):
    is_product = target in (torch.ops.aten.mm.default,)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def moved(graph):
    """The graph after PyTorch's pass has moved what is made again."""
    from torch._functorch._activation_checkpointing import remat_using_tags_for_fwd_loss_bwd_graph_pass as remat

    return remat.remat_using_tags_for_fwd_loss_bwd_graph(graph)


def kept(graph):
    """Shapes and dtypes of what the forward makes and the backward reads, but for single numbers and rows."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and not is_backward(node) and any(map(is_backward, node.users)):
            value = node.meta["val"]
            if value.ndim == 2 and value.shape[1] > 1:
                found.append((tuple(value.shape), value.dtype))
    return sorted(found, key=str)


HIDDEN, WIDTH = (TOKENS, H), (TOKENS, D)
CODES, BF16, FLOAT32 = torch.uint8, torch.bfloat16, torch.float32
KEPT = {  # before, and after
    all_saved: (
        [*[(HIDDEN, BF16)] * 4, (WIDTH, BF16), *[(WIDTH, FLOAT32)] * 3],
        # products and SiLU's result are codes, and so is the norm's input
        [(HIDDEN, BF16), *[(HIDDEN, CODES)] * 3, (WIDTH, BF16), *[(WIDTH, FLOAT32)] * 2, (WIDTH, CODES)],
    ),
    products_saved: (
        [*[(HIDDEN, BF16)] * 2, (WIDTH, BF16)],
        [*[(HIDDEN, CODES)] * 2, (WIDTH, BF16)],
    ),
}


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="PyTorch's pass that makes tensors again is of 2.12")
@pytest.mark.parametrize("tag", KEPT)
def test_the_backward_reads_codes_and_the_forward_stays(tag):
    plain, packed = moved(joint(tag)), joint(tag)
    pack_in_joint_graph(packed, SAVED, is_backward)
    packed = moved(packed)
    assert (kept(plain), kept(packed)) == KEPT[tag]
    (loss, *exact), (same, *gradients) = plain(*tensors()), packed(*tensors())
    assert difference(loss, same) is None
    distances = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(gradients, exact, strict=True)]
    assert all(0 < each < 0.06 for each in distances[:3])  # two factors of e4m3


def test_nothing_chosen_changes_nothing():
    graph = joint(products_saved)
    before = str(graph.graph)
    assert pack_in_joint_graph(graph, f8.SavedAsCodes(filter=()), is_backward) == []
    assert str(graph.graph) == before
