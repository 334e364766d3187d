"""saved_as_codes in eager mode: which tensors become codes, and that gradients are those of the rounded tensors."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8compile as f8

D, H = 256, 512
SEEN: list[f8.SavedTensor] = []


def everything(tensor):
    SEEN.append(tensor)
    return True


class Rms(nn.Module):
    """The norm of Hugging Face's models, written out in float32."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((D, H), (D, H), (H, D)))

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def tokens():
    torch.manual_seed(1)
    return torch.randn(256, D, dtype=torch.bfloat16, requires_grad=True)


def kinds(call, *args):
    """The kinds of tensors that a call saves, with their numbers."""
    SEEN.clear()
    with f8.saved_as_codes(filter=everything):
        call(*args)
    return sorted((each.kind, each.shape) for each in SEEN)


@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(D), lambda: nn.LayerNorm(D), Rms], ids=["rms", "layer", "own"])
def test_the_operator_that_takes_a_tensor_tells_its_kind(norm):
    block, x = Block(norm).bfloat16(), tokens()
    found = kinds(block, x * 1)
    assert ("norm", (256, D)) in found
    assert [each for each in found if each[0] == "activation"] == [("activation", (256, H))] * 3  # gate, silu, up
    assert {kind for kind, shape in found if shape == (256, H)} == {"activation", "gemm"}  # and the input of down


def test_codes_of_gelu_attention_and_layers_in_fp8():
    x = tokens()
    layer = f8.convert(nn.Sequential(nn.Linear(D, D, bias=False)).bfloat16(), f8.recipes.rowwise(), filter="*")
    assert [kind for kind, _ in kinds(lambda: F.gelu(layer(x * 1)))].count("activation") == 1
    q = x.view(1, 4, 64, D) * 1
    found = kinds(lambda: F.scaled_dot_product_attention(q, q * 2, q * 3))
    assert [kind for kind, _ in found if kind == "attention"] == ["attention"] * 3
    assert not {"activation", "norm", "checkpoint"} & {kind for kind, _ in found}


def gradients(call, model, x):
    loss = call(x)
    loss.float().square().sum().backward()
    found = [x.grad.clone(), *(each.grad.clone() for each in model.parameters())]
    x.grad = None
    model.zero_grad()
    return loss, found


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_gradients_are_those_of_the_rounded_tensors_and_results_stay(recipe):
    block, x = Block(lambda: nn.RMSNorm(D)).bfloat16(), tokens()
    if recipe:
        f8.convert(block, f8.recipes.by_name(recipe), filter="*")
    plain, expected = gradients(lambda x: block(x * 1), block, x)
    with f8.saved_as_codes():
        coded, found = gradients(lambda x: block(x * 1), block, x)
    assert torch.equal(plain, coded)
    moved = [
        (one.float() - other.float()).norm() / other.float().norm() for one, other in zip(found, expected, strict=True)
    ]
    assert moved[-1] == 0  # the input of down is as it was
    assert 0 < max(moved) < 0.05  # e4m3 rounds by 2**-4 at most, half of that on average, in some of the factors
    with f8.saved_as_codes(filter=lambda tensor: False):
        _, found = gradients(lambda x: block(x * 1), block, x)
    assert all(map(torch.equal, found, expected))


def test_an_input_of_a_checkpoint_becomes_codes_and_nothing_inside_of_it():
    block, x = Block(lambda: nn.RMSNorm(D)).bfloat16(), tokens()

    def two(x):
        return checkpoint(block, checkpoint(block, x * 1, use_reentrant=False), use_reentrant=False)

    assert kinds(two, x) == [("checkpoint", (256, D))] * 2
    with f8.saved_as_codes(f8.SavedAsCodes()):
        y = two(x)
    y.float().sum().backward()
    assert x.grad.isfinite().all()


def test_a_tensor_that_two_operators_save_is_packed_once():
    wide = tokens() * 1
    SEEN.clear()
    with f8.saved_as_codes(filter=everything):
        F.silu(wide) + F.gelu(wide)
    assert len(SEEN) == 1


def test_a_write_to_a_tensor_that_was_kept_as_it_is_raises():
    x = tokens()
    with f8.saved_as_codes(filter=("norm",)):
        y = x * 1
        z = F.silu(y)
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(256, 256\) .* was modified in place"):
        z.sum().backward()


def test_arguments_that_do_not_fit_are_refused():
    with (
        pytest.raises(TypeError, match="`saved` was passed together with `quantizer` or `filter`"),
        f8.saved_as_codes(f8.SavedAsCodes(), filter=("norm",)),
    ):
        pass
    with (
        pytest.raises(TypeError, match=r"`saved` is 'all'; it must be a fp8compile\.SavedAsCodes"),
        f8.saved_as_codes("all"),
    ):
        pass


def gradients_with_a_new_filter(model, x, between=lambda: None):
    with f8.saved_as_codes(filter=lambda tensor: True):
        hidden = model[0](x)
        between()
        y = model[1](hidden)
    return torch.autograd.grad(y.sum(), list(model.parameters()))


@pytest.mark.parametrize("in_thread", [False, True], ids=["nested", "thread"])
def test_a_context_keeps_its_filter_while_another_one_has_an_equal_one(in_thread):
    """The hooks found the last value of one text, and the first context then saved nothing in FP8."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(D, H), nn.SiLU()) for _ in range(2))

    def another():
        gradients_with_a_new_filter(other, tokens().float())

    def in_another_thread():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()

    exact = torch.autograd.grad(model(tokens().float()).sum(), list(model.parameters()))
    alone = gradients_with_a_new_filter(model, tokens().float())
    beside = gradients_with_a_new_filter(model, tokens().float(), in_another_thread if in_thread else another)
    assert all(map(torch.equal, alone, beside))
    assert not torch.equal(alone[0], exact[0])


def test_a_filter_created_in_each_call_compiles_the_call_once():
    compiled, x = torch.compile(nn.Sequential(nn.Linear(D, H), nn.SiLU()), backend="aot_eager"), tokens().float()
    torch._dynamo.reset()
    counters.clear()
    for _ in range(3):
        with f8.saved_as_codes(filter=lambda tensor: True):
            compiled(x).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
