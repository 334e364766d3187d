"""What an optimizer's step leaves behind that raised midway, and what a compiled one may not do to codes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION


class Stumbles(torch.optim.SGD):
    """SGD that raises once, when it has written to all parameters."""

    stumbled = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
        if not self.stumbled:
            self.stumbled = True
            raise FloatingPointError("midway")


class WritesToAView(torch.optim.SGD):
    """SGD that writes to a view of each weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.t().mul_(0.5)


class RunsTheModel(torch.optim.SGD):
    """SGD whose step runs a forward, in the same graph."""

    @torch.no_grad()
    def step(self, closure=None):
        weight = self.param_groups[0]["params"][0]
        weight.mul_(0.5)
        f8.linear(torch.ones(4, 64).bfloat16(), weight, recipe=self.recipe)


def model_of(recipe="rowwise"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    return f8.convert(model, f8.recipes.by_name(recipe), filter=lambda *_: True, weight_lifetime="parameter")


def stumbled(model):
    optimizer = Stumbles(model.parameters(), lr=0.5)
    model(torch.randn(16, 64).bfloat16()).float().square().mean().backward()
    with pytest.raises(FloatingPointError, match="midway"):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_eager_mode_reads_what_a_step_that_raised_has_written(recipe, assert_bits_equal):
    model = model_of(recipe)
    weight, before = model[0].weight, model[0].weight.dequantize().detach()
    stumbled(model)
    written = before.add(weight.grad, alpha=-0.5)
    if recipe == "delayed":
        expected = f8.ops.cast(written, model[0].multiplier[1].view(1, 1), model[0].recipe.weight)
    else:
        expected = f8.quantize(written, model[0].recipe.weight).codes
    assert_bits_equal(model[0].weight_codes, expected)
    assert not torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_forward_after_a_step_that_raised_says_how_to_end_it(recipe):
    model = model_of(recipe)
    optimizer, x = stumbled(model), torch.randn(16, 64).bfloat16()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="If a step raised an error that you caught, call the optimizer's zero_grad"):
        compiled(x)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    torch._dynamo.reset()
    assert torch.equal(compiled(x), model(x))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # what makes views of subclasses
@pytest.mark.parametrize("kind", [WritesToAView, RunsTheModel])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_step_takes_ops_in_place_on_the_parameter_alone(recipe, kind):
    model = model_of(recipe)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.recipe = model[0].recipe
    model(torch.randn(16, 64).bfloat16()).float().square().mean().backward()
    refusal = "of a QuantizedParameter is not supported in a graph that was compiled during an optimizer's"
    if TORCH_VERSION < (2, 13):  # its Dynamo stops at a method of a quantizer before that
        refusal = f"{refusal}|Member 'transposed' is not registered"
    with pytest.raises(Exception, match=refusal):
        torch.compile(optimizer.step, backend="aot_eager", fullgraph=False)()
