"""The arguments that a layer's ops share: combinations that nobody spelled out, and those that have no meaning."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8
from fp8compile import ops
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_sharding import UNSHARDED, OverFsdp, OverGroup
from fp8compile.ops.layer.make_weight_codes import sets_of_weight
from fp8compile.ops.layer.operands import Phase

M, K, N, EXPERTS = 24, 32, 48, 2
OFFS = torch.tensor([8, 20], dtype=torch.int32)
ROWS = Rows(sizes=(EXPERTS, EXPERTS), rank=0, group="", replicas="", reduce_dtype="float32")
OUTPUT_ONLY = f8.Recipe(input=f8.CurrentScaling(), weight=f8.CurrentScaling())
GROUP = OverGroup(weight_dim=0, ranks=1, rank=0, group="")
TWO = OverGroup(weight_dim=0, ranks=2, rank=0, group="")
RECIPE = f8.recipes.tensorwise()
SHARED = [*Known(outer_amax=torch.full((1,), 9.0))]


def operands(*batch):
    generator = torch.Generator().manual_seed(0)
    shapes = (M, K), (*batch, N, K)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def trained(known, sizes, sharding, recipe=RECIPE):
    x, weight = operands()
    y = ops.linear(x, weight, None, None, known, sizes, sharding, recipe)
    return y, *torch.autograd.grad(y.float().square().sum(), (x, weight))


@pytest.mark.parametrize(("sizes", "sharding"), [([N], GROUP), ([], OverFsdp(Rows.alone(N, "bfloat16")))])
def test_sharded_weights_share_a_scale(sizes, sharding, assert_bits_equal):
    found, expected = trained(SHARED, sizes, sharding), trained(SHARED, [], UNSHARDED)
    for one, other in zip(found, expected, strict=True):
        assert_bits_equal(one, other)
    assert not torch.equal(expected[0], trained([], [], UNSHARDED)[0])


def known_codes(weight, recipe):
    return Known.sets(*sets_of_weight(weight.detach(), recipe))


def one_set(weight, recipe):
    return known_codes(weight, recipe)[: len(NOTHING)]


NOTHING = [*Known()]


@pytest.mark.parametrize(("sizes", "sharding"), [([N], GROUP), ([], OverFsdp(Rows.alone(N, "bfloat16")))])
def test_known_data_of_a_weight_that_one_rank_has(sizes, sharding, assert_bits_equal):
    known = known_codes(operands()[1], RECIPE)
    for one, other in zip(trained(known, sizes, sharding), trained([], [], UNSHARDED), strict=True):
        assert_bits_equal(one, other)


@pytest.mark.parametrize("recipe", [RECIPE, f8.recipes.rowwise(), OUTPUT_ONLY], ids=["both", "two sets", "output"])
def test_known_data_of_the_output_alone(recipe, assert_bits_equal):
    codes, scale, _ = ops.weight_codes(operands()[1].detach(), "weight", recipe)
    known = [*Known(codes, scale), *NOTHING]
    found, expected = (trained(each, [], UNSHARDED, recipe) for each in (known, []))
    for one, other in zip(found, expected, strict=True):
        assert_bits_equal(one, other)


def amax_of(weight, recipe):
    return [*Known(amax=ops.amax(weight.detach()[0], recipe.weight))]


REFUSED = {
    "FP8 data of a shard": (
        (),
        None,
        known_codes,
        TWO,
        "`known` has FP8 data of the weight, but the weight is sharded over a process group",
    ),
    "FP8 data of rows": (
        (),
        None,
        known_codes,
        OverFsdp(ROWS),
        "`known` has FP8 data of the weight, but FSDP shards the weight",
    ),
    "FP8 data of some of FSDP's experts": (
        (EXPERTS,),
        OFFS,
        known_codes,
        OverFsdp(ROWS),
        "but FSDP shards the weight, and the op gathers what it quantizes itself",
    ),
    "a second set with an amax of a stack": (
        (EXPERTS,),
        OFFS,
        lambda *_: [*NOTHING, *SHARED],
        UNSHARDED,
        "`known` has an amax of the weight, but with `offs`",
    ),
    "an amax of a stack": (
        (EXPERTS,),
        OFFS,
        amax_of,
        UNSHARDED,
        "`known` has an amax of the weight, but with `offs`",
    ),
    "a shared scale of a stack": (
        (EXPERTS,),
        OFFS,
        lambda *_: SHARED,
        UNSHARDED,
        "`known` has an amax of the weight, but with `offs`",
    ),
    "groups of sharded rows": (
        (EXPERTS,),
        OFFS,
        lambda *_: [],
        OverGroup(weight_dim=0, ranks=2, rank=0, group="", sequence_dim=0),
        "`sequence_dim` is 0, which is not supported with `offs`",
    ),
}


@pytest.mark.parametrize(("batch", "offs", "known", "sharding", "text"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_is_refused(batch, offs, known, sharding, text):
    x, weight = operands(*batch)
    with pytest.raises(ValueError, match=f"linear: .*{text}"):
        ops.linear(x, weight, None, offs, known(weight, RECIPE), [], sharding, RECIPE)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("batch", "offs", "known", "sharding", "text"), REFUSED.values(), ids=REFUSED)
def test_gradients_refuse_what_the_output_refuses(batch, offs, known, sharding, text, device):
    (x, weight), grad = operands(*batch), torch.ones(M, N, dtype=torch.bfloat16)
    own = Known.last_set(known(weight, RECIPE))
    x, weight, grad = (each.detach().to(device) for each in (x, weight, grad))
    tail = offs, own, [], sharding, RECIPE
    with pytest.raises(ValueError, match=f"grad_input: .*{text}"):
        ops.grad_input(grad, weight, *tail)
    with pytest.raises(ValueError, match=f"grad_weight: .*{text}"):
        ops.grad_weight(grad, x, x.dtype, *tail)


NOT_READ = {
    "both GEMMs in high precision": (f8.Recipe(), "linear: .* but output does not read it"),
    "grad_input in high precision": (OUTPUT_ONLY, "linear: .* but grad_input does not read it"),
    "other data of each GEMM": (f8.recipes.rowwise(), "linear: `known` has one set with FP8 data or amaxes of blocks"),
}


@pytest.mark.parametrize(("recipe", "text"), NOT_READ.values(), ids=NOT_READ)
def test_one_set_is_refused_if_a_gemm_does_not_read_it(recipe, text):
    x, weight = operands()
    with pytest.raises(ValueError, match=text):
        ops.linear(x, weight, None, None, one_set(weight, RECIPE), [], UNSHARDED, recipe)


def test_one_set_of_amaxes_is_refused_if_grad_input_has_other_blocks():
    (x, weight), recipe = operands(), f8.recipes.rowwise()
    known = [*Known(amax=ops.amax(weight.detach(), recipe.weight))]
    with pytest.raises(ValueError, match="linear: `known` has one set with FP8 data or amaxes of blocks"):
        ops.linear(x, weight, None, None, known, [], UNSHARDED, recipe)


def test_one_set_of_a_four_bit_stack_is_refused():
    (x, weight), recipe = operands(EXPERTS), f8.recipes.nvfp4()
    assert recipe.shares_weight_codes()
    with pytest.raises(ValueError, match="linear: `known` has one set with FP8 data or amaxes of blocks"):
        ops.linear(x, weight, None, OFFS, one_set(weight, recipe), [], UNSHARDED, recipe)


def test_grad_weight_refuses_data_of_the_weight():
    x, weight = (each.detach() for each in operands())
    with pytest.raises(ValueError, match=r"grad_weight: .* but grad_weight does not read it"):
        ops.grad_weight(x.new_ones(M, N), x, x.dtype, None, one_set(weight, RECIPE), [], UNSHARDED, RECIPE)


def test_grad_input_refuses_two_sets():
    _, weight = (each.detach() for each in operands())
    with pytest.raises(ValueError, match="grad_input: `known` has two sets"):
        ops.grad_input(weight.new_ones(M, N), weight, None, known_codes(weight, RECIPE), [], UNSHARDED, RECIPE)


def test_data_of_a_weight_is_given_once():
    _, weight = operands()
    own, _ = sets_of_weight(weight.detach(), RECIPE)
    args = LayerArgs.of(None, one_set(weight, RECIPE), [], UNSHARDED, RECIPE)
    with pytest.raises(AssertionError, match="given twice"):
        args.operands(Phase.EAGER, weight, "weight", weight=own)


DELAYED = {
    "full tensors": (UNSHARDED, "no state was passed"),
    "a group": (GROUP, "only layers keep its state"),
    "FSDP": (OverFsdp(Rows.alone(N)), "does not support delayed scaling of FSDP's shards"),
}


@pytest.mark.parametrize(("sharding", "text"), DELAYED.values(), ids=DELAYED)
def test_the_op_without_state_takes_no_delayed_scaling(sharding, text):
    x, weight = operands()
    with pytest.raises(ValueError, match=text):
        ops.linear(x, weight, None, None, [], [N], sharding, f8.recipes.delayed())
