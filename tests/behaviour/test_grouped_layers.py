"""What works with experts, whose grouped products are one `f8.grouped_linear` a stack of weights."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from eight_bits import EIGHT_BITS
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils import checkpoint as ckpt
from ways import behaviour

import fp8compile as f8

RECIPE = f8.recipes.rowwise()
EACH_RECIPE = [f8.recipes.by_name(name) for name in EIGHT_BITS if name != "delayed"]


class Experts(nn.Module):
    """Two stacks of matrices, multiplied by the method that `convert` knows."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 48, 32, generator=generator))
        self.down = nn.Parameter(torch.randn(4, 32, 48, generator=generator))

    def _grouped_mm(self, *, A, B_t, offs):
        return F.grouped_mm(A, B_t, offs=offs)

    def forward(self, x, offsets):
        inner = self._grouped_mm(A=x, B_t=self.up.transpose(-2, -1), offs=offsets)
        return self._grouped_mm(A=inner.relu(), B_t=self.down.transpose(-2, -1), offs=offsets)


def experts(recipe=RECIPE):
    return f8.convert(Experts().bfloat16(), recipe)


def sample(*ends, dtype=torch.bfloat16):
    """40 rows, and where the groups end: an empty one, rows behind the last."""
    return torch.randn(40, 32).to(dtype), torch.tensor(ends or (7, 7, 30, 36), dtype=torch.int32)


def loss_of(y):
    return y.float().square().sum()


def gradients(model, x, offsets, call):
    """Those of x and of the parameters after one backward of ``call(x, offsets)``."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    loss_of(call(x, offsets)).backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.fixture
def assert_same(assert_bits_equal):
    """Two lists of tensors have the same bits."""

    def check(actual, expected):
        for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_bits_equal(a, e, f"tensor {number}")

    return check


# ------------------------------------------------------------------------------- autograd


@behaviour("Experts", "activation checkpointing, non-reentrant")
def test_checkpoint(way, assert_same):
    model, batch = experts(), sample()
    call = way(lambda x, offsets: ckpt.checkpoint(model, x, offsets, use_reentrant=False))
    assert_same(gradients(model, *batch, call), gradients(model, *batch, model))


def keep_products(ctx, op, *args, **kwargs):
    keep = op in f8.ops.GEMM_OPS
    return ckpt.CheckpointPolicy.MUST_SAVE if keep else ckpt.CheckpointPolicy.PREFER_RECOMPUTE


@behaviour("Experts", "selective checkpointing that keeps `f8.ops.GEMM_OPS`")
def test_selective_checkpoint(way, assert_same):
    model, batch = experts(), sample()
    contexts = partial(ckpt.create_selective_checkpoint_contexts, keep_products)
    call = way(lambda x, offsets: ckpt.checkpoint(model, x, offsets, use_reentrant=False, context_fn=contexts))
    assert_same(gradients(model, *batch, call), gradients(model, *batch, model))


@behaviour("Experts", "compiled autograd", ways=("compiled",))
def test_compiled_autograd(way, assert_same):
    model, batch = experts(), sample()
    expected = gradients(model, *batch, model)
    with compiled_autograd._enable(partial(torch.compile, backend="aot_eager", fullgraph=True)):
        actual = gradients(model, *batch, way(model))
    assert_same(actual, expected)


def functional_loss(parameters, model, x, offsets):
    return loss_of(torch.func.functional_call(model, parameters, (x, offsets)))


@behaviour("Experts", "`torch.func.functional_call` and `torch.func.grad`, each recipe but `delayed`")
def test_func_grad(way, assert_same):
    for model in map(experts, EACH_RECIPE):
        x, offsets = sample()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        grads = way(partial(torch.func.grad(functional_loss), model=model, x=x, offsets=offsets))(parameters)
        assert_same(list(grads.values()), gradients(model, x, offsets, model)[1:])


@behaviour("Experts", "double backward")
def test_double_backward(way):
    model, (x, offsets) = experts(), sample()
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(way(model)(x, offsets)), x, create_graph=True)
    said = ("does not currently support double backward",) if way.compiled else ("only once", "fp8compile.revert")
    with way.raises(RuntimeError, *said):
        grad.float().sum().backward()


@behaviour("Experts", "forward-mode derivatives (`torch.func.jvp`)")
def test_jvp(way):
    model, (x, offsets) = experts(), sample()
    call = way(lambda x: torch.func.jvp(lambda x: model(x, offsets), (x,), (torch.ones_like(x),))[1])
    with way.raises(RuntimeError, "forward-mode", "fp8compile.revert"):
        call(x)


# ------------------------------------------------------------------------------- groups


@behaviour("Experts", "other sizes of groups, experts without rows: one graph")
def test_sizes_are_data(way, assert_same):
    model, call = experts(), None
    call = way(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ends in ((7, 7, 30, 36), (0, 0, 0, 40), (40, 40, 40, 40), (0, 0, 0, 0)):
            batch = sample(*ends)
            assert_same(gradients(model, *batch, call), gradients(model, *batch, model))


@behaviour("Experts", "NaN behind the last group: zeros there, and nowhere NaN")
def test_nan_behind_the_last_group(way, assert_same):
    model, (x, offsets) = experts(), sample()
    expected = gradients(model, x, offsets, model)
    x[36:] = torch.nan
    actual = gradients(model, x, offsets, way(model))
    assert_same(actual, expected)
    assert not actual[0][36:].any()


@behaviour("Experts", "groups that end behind the rows", ways=("eager",))
def test_groups_behind_the_rows(way):
    with way.raises(ValueError, "offsets"):
        experts()(*sample(7, 7, 30, 41))


# ------------------------------------------------------------------------------- precision, state, graphs


@behaviour("Experts", "bf16 autocast over float32 parameters and inputs")
def test_autocast(way, assert_bits_equal):
    model, (x, offsets) = f8.convert(Experts(), RECIPE), sample(dtype=torch.float32)
    other = copy.deepcopy(model).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = way(model)(x, offsets)
    loss_of(y).backward()
    assert_bits_equal(y, other(x.bfloat16(), offsets))
    assert model.up.grad.dtype == torch.float32


@behaviour("Experts", "`copy.deepcopy`, `pickle`, `state_dict` into unconverted experts, `revert`")
def test_copies(way, assert_same):
    model, batch = experts(), sample()
    expected = gradients(model, *batch, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(gradients(other, *batch, way(other)), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = Experts().bfloat16()
    plain.load_state_dict(torch.load(file, weights_only=True))
    batch = sample(7, 7, 30, 40)  # behind the last group PyTorch writes nothing
    assert_same(gradients(plain, *batch, plain), gradients(f8.revert(model), *batch, model))


@behaviour("Experts", "on the meta device: shapes without a computation")
def test_meta(way):
    model, (x, offsets) = experts().to("meta"), sample()
    y = way(model)(x.to("meta"), offsets.to("meta"))
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")


@behaviour("Experts", "`torch.export`, strict and not, with any number of rows", ways=("compiled",))
@pytest.mark.parametrize("strict", [True, False])
def test_export(way, strict, assert_bits_equal):
    model, batch = experts(), sample()
    rows = torch.export.Dim("rows", min=2, max=1000)
    exported = torch.export.export(model, batch, dynamic_shapes=({0: rows}, None), strict=strict).module()
    x, offsets = torch.randn(60, 32).bfloat16(), torch.tensor([0, 20, 20, 60], dtype=torch.int32)
    assert_bits_equal(exported(x, offsets), model(x, offsets))
