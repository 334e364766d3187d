"""A plan of PyTorch's styles is ported name by name: same arguments, same defaults, same bits."""

from __future__ import annotations

import copy
import inspect
from functools import partial

import fsdp_models as models
import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

import fp8compile as f8

STYLES = ("ColwiseParallel", "RowwiseParallel")
# options of the first layer, options of the second one, and along which dim a rank has a part of x
PLANS = {
    "defaults": ({}, {}, None),
    "whole, said": ({"input_layouts": Replicate()}, {"output_layouts": Replicate()}, None),
    "batch": ({"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}, 0),
    "sequence": ({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}, 1),
    "sequence to whole": ({"input_layouts": Shard(1)}, {}, 1),
    "whole to sequence": ({}, {"output_layouts": Shard(1)}, None),
    "features": ({"input_layouts": Shard(-1)}, {"output_layouts": Shard(-1)}, 2),
}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


@pytest.mark.parametrize("name", STYLES)
def test_arguments_and_defaults_are_pytorchs(name):
    own, stock = getattr(f8.parallel, name), getattr(parallel, name)
    arguments = [
        [(each.name, each.kind, each.default) for each in inspect.signature(style).parameters.values()]
        for style in (own, stock)
    ]
    assert arguments[0] == arguments[1]
    for options in ({}, {"use_local_output": False}, {"input_layouts": Shard(1), "output_layouts": Shard(0)}):
        found, expected = own(**options), stock(**options)
        for attribute in ("input_layouts", "output_layouts", "use_local_output"):
            assert getattr(found, attribute) == getattr(expected, attribute), attribute


def results(model, styles, name, *, compiled):
    """Output, gradient of x and of each parameter, as this rank has them, after a plan by these styles."""
    up, down, dim = PLANS[name]
    mesh, group = models.mesh_1d("pair"), GROUPS["pair"]
    model = copy.deepcopy(model)
    plan = {"0": styles.ColwiseParallel(**up), "2": styles.RowwiseParallel(**down)}
    model = parallel.parallelize_module(model, mesh, plan)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    whole = torch.linspace(-1, 1, 2 * 4 * 32).view(2, 4, 32).bfloat16()
    x = (whole if dim is None else whole.chunk(2, dim)[group.rank()]).clone().requires_grad_()
    y = run(x)
    y.float().square().sum().backward()
    every = [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in every]


def same(what, found, expected):
    if what == "grad of 2.bias":
        # where tokens are cut, each rank rounds its sum over them to bfloat16 before ranks add
        return torch.allclose(found, expected, rtol=0, atol=2**-7 * expected.abs().max().item())
    return torch.equal(found, expected)


def ported(name, recipe, *, compiled):
    """Which of these differ between PyTorch's styles and ours, for one model, converted if a recipe is given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    if recipe is not None:
        f8.convert(model, f8.recipes.by_name(recipe), filter=lambda *_: True)
    expected, found = (results(model, styles, name, compiled=compiled) for styles in (parallel, f8.parallel))
    names = ("output", "grad of x", *(f"grad of {name}" for name, _ in model.named_parameters()))
    return [what for what, *both in zip(names, found, expected, strict=True) if not same(what, *both)]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", None])
@pytest.mark.parametrize("name", PLANS)
def test_a_ported_plan_has_pytorchs_bits(ranks, name, recipe):
    assert ranks.run(partial(ported, compiled=False), name, recipe) == [[]] * 4


def test_a_ported_plan_of_defaults_compiled(ranks):
    assert ranks.run(partial(ported, compiled=True), "defaults", "rowwise") == [[]] * 4


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 32), nn.Linear(32, 64)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def with_an_embedding(is_converted):
    """Whether a plan of our styles for an embedding and a head gives the logits of PyTorch's."""
    torch.manual_seed(0)
    model, found = Language().bfloat16(), []
    if is_converted:
        f8.convert(model, f8.recipes.rowwise(), filter="head")
    for styles in (parallel, f8.parallel):
        plan = {
            "embed": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        spread = parallel.parallelize_module(copy.deepcopy(model), models.mesh_1d("pair"), plan)
        found.append(spread(torch.arange(8).view(2, 4)))
    return torch.equal(*found)


@pytest.mark.parametrize("is_converted", [True, False])
def test_one_plan_serves_layers_in_fp8_and_others(ranks, is_converted):
    assert ranks.run(with_an_embedding, is_converted) == [True] * 4


def converted_after_its_plan(whose):
    """Convert a model after a plan of our styles or of PyTorch's, and return the error."""
    styles = {"ours": f8.parallel, "PyTorch": parallel}[whose]
    model, mesh = Language().bfloat16(), models.mesh_1d("pair")
    parallel.parallelize_module(model, mesh, {"head": styles.ColwiseParallel(input_layouts=Shard(1))})
    try:
        f8.convert(model, f8.recipes.rowwise(), filter="head")
    except ValueError as error:
        return str(error)
    return None


def test_convert_after_a_plan_of_our_styles_raises(ranks):
    """Its gathers would silently stay in high precision. Those of PyTorch's styles do in either order."""
    assert ranks.run(converted_after_its_plan, "PyTorch") == [None] * 4
    for error in ranks.run(converted_after_its_plan, "ours"):
        assert error.startswith("convert: a style of fp8compile.parallel was applied to head in high precision")
        assert error.endswith("Call convert first, then parallelize_module.")


def test_a_module_that_pytorch_has_no_style_for_raises():
    with pytest.raises(NotImplementedError, match=r"only support nn\.Linear and nn\.Embedding"):
        f8.parallel.ColwiseParallel()._apply(nn.RMSNorm(4), None)
