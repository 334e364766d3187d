"""Recipes whose output multiplies values of codes: W4A16, W8A16, W4A8; straight-through gradients, one graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gloo_ranks import shared_ranks
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION

NVFP4, ROWS = f8.TwoLevelScaling(block=(1, 16)), f8.CurrentScaling(block=(1, -1))
RECIPES = {
    "W4A16": f8.recipes.weight_only(),
    "W8A16": f8.recipes.weight_only(ROWS),
    "MX weights": f8.recipes.weight_only(f8.CurrentScaling(block=(1, 32), scale="e8m0_rceil")),
    "W4A16, transformed": f8.recipes.weight_only(f8.TwoLevelScaling(block=(1, 16), hadamard=(1, -1) * 8)),
    "W16A8": f8.Recipe(input=ROWS, dequantized_output=True, dequantized_gradients=True),
    "W4A8": f8.Recipe(input=ROWS, weight=NVFP4, dequantized_output=True, dequantized_gradients=True),
}


def layer_of(recipe):
    torch.manual_seed(0)
    return f8.Linear(64, 48, recipe=recipe, dtype=torch.bfloat16)


def rows(count=10, features=64, seed=1):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed)).bfloat16()


def values(tensor, quantizer):
    return tensor.detach() if quantizer is None else f8.quantize(tensor.detach(), quantizer).dequantize()


@pytest.mark.parametrize("run", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", RECIPES)
def test_output_and_gradients_are_those_of_the_values(name, run):
    recipe = RECIPES[name]
    layer, x, grad = layer_of(recipe), rows().requires_grad_(), rows(10, 48, seed=2)
    step = layer if run == "eager" else torch.compile(layer, fullgraph=True, backend=run)
    w, seen = values(layer.weight, recipe.weight), values(x, recipe.input)
    y = step(x)
    y.backward(grad)
    assert torch.equal(y, nn.functional.linear(seen, w, layer.bias))
    assert torch.equal(x.grad, grad @ w)
    assert torch.equal(layer.weight.grad, grad.t() @ seen)


@pytest.mark.parametrize("name", ["W4A16", "W4A8"])
def test_groups_have_the_bits_of_their_linears(name):
    recipe, x = RECIPES[name], rows()
    weight = torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = f8.grouped_linear(x, weight, torch.tensor([3, 3, 8], dtype=torch.int32), recipe=recipe)
    for expert, (first, last) in {0: (0, 3), 2: (3, 8)}.items():
        assert torch.equal(y[first:last], f8.linear(x[first:last], weight[expert], recipe=recipe))
    assert not y[8:].any()


def test_gradients_of_a_recipe_in_fp8_stay_in_fp8():
    recipe = replace(f8.recipes.rowwise(), input=None, weight=NVFP4, dequantized_output=True)
    one, other = layer_of(recipe), layer_of(f8.recipes.rowwise())
    for layer in (one, other):
        x = rows().requires_grad_()
        layer(x).backward(rows(10, 48, seed=2))
        layer.grad_of_x = x.grad
    assert torch.equal(one.grad_of_x, other.grad_of_x)
    assert torch.equal(one.weight.grad, other.weight.grad)
    assert not torch.equal(one(rows()), other(rows()))


def test_four_bit_weights_are_trained_in_one_graph_and_served_as_trained(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).bfloat16()
    f8.convert(model, f8.recipes.weight_only(), filter="*")
    graphs = CompileCounterWithBackend("aot_eager")
    step, optimizer = torch.compile(model, fullgraph=True, backend=graphs), torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = (step(rows()) - rows(seed=4)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert graphs.frame_count == 1
    report = f8.export.save_pretrained(model, tmp_path / "served", "compressed-tensors")
    assert "W4A16" not in str(report)  # nothing differs from training
    f8.export.check(tmp_path / "served")
    with torch.no_grad():
        trained = model(rows())
        f8.freeze_weights(model)
        assert model[0].weight.codes.nbytes == 64 * 96 // 2
        assert torch.equal(model(rows()), trained)


def test_the_report_says_what_is_multiplied():
    report = str(f8.conversion_report(nn.Sequential(layer_of(RECIPES["W4A16"]))))
    assert "the output is computed in high precision" in " ".join(report.split())


def test_a_forward_is_set_to_one_side_and_back():
    model = nn.Sequential(layer_of(f8.recipes.rowwise()))
    before = model(rows())
    f8.set_recipe(model, forward=RECIPES["W8A16"])
    assert torch.equal(model(rows()), layer_of(RECIPES["W8A16"])(rows()))
    f8.set_recipe(model, forward=f8.recipes.rowwise())
    assert torch.equal(model(rows()), before)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"weight": NVFP4}, "dequantized_output=True, the output can use one operand's dequantized values"),
        ({"dequantized_output": True}, "Use such a quantizer for one of them"),
        ({"weight": f8.DelayedScaling(), "dequantized_output": True}, "with current scaling"),
        ({"grad_output": ROWS, "weight": NVFP4, "dequantized_output": True}, "the GEMM of grad_input has a quantizer"),
    ],
    ids=["one side", "no side", "delayed", "gradient"],
)
def test_what_is_no_recipe_is_said(fields, text):
    with pytest.raises(ValueError, match=text):
        f8.Recipe(**fields)


# ------------------------------------------------------------------------------------------------- ranks


def on_ranks(name):
    """On a rank: what differs between a model over a pair of ranks and the whole one, in words."""
    from gloo_ranks import GROUPS
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, recipe, wrong = DeviceMesh.from_group(GROUPS["pair"], "cpu"), RECIPES[name], []
    x, grad = rows(), rows(10, 48, seed=2)
    whole = nn.Sequential(layer_of(recipe))
    expected = whole(x)
    expected.backward(grad)
    for way in ("FSDP2", "FSDP2 gathers codes", "columns"):
        model = nn.Sequential(layer_of(recipe))
        if way == "columns":
            parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
        else:
            if way == "FSDP2 gathers codes":
                f8.parallel.fsdp_float8_all_gather(model)
            fully_shard(model, mesh=mesh)
        y = model(x)
        y.backward(grad)
        if not torch.equal(y, expected):
            wrong.append(f"{way}: output")
        if not torch.equal(model[0].weight.grad.full_tensor(), whole[0].weight.grad):
            wrong.append(f"{way}: gradient")
    return wrong


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups of ranks in a subclass need PyTorch 2.12")
@pytest.mark.parametrize("name", ["W4A16", "W4A8"])
def test_ranks_have_the_bits_of_one_process(name):
    assert shared_ranks().run(on_ranks, name) == [[]] * 4
