"""check_quantizer and check_op: our own pass, and each contract is broken by something made to break it."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from broken_contracts import BROKEN, ByIdentity, Saltless
from torch import Tensor
from torch.nn.functional import pad

import fp8compile as f8
from fp8compile._compat import cpu_has_rowwise_gemm
from fp8compile.library import Cut, Quantizer, Split, register_op
from fp8compile.ops import OPS, registry
from fp8compile.ops.layer import LAYER_OPS
from fp8compile.quantizers import constant
from fp8compile.testing import check_op, check_quantizer
from fp8compile.testing.contracts import op_contracts, quantizer_contracts
from fp8compile.testing.graphs import recording

QUANTIZER_CONTRACTS = [contract.__name__ for contract in quantizer_contracts.CONTRACTS]
OP_CONTRACTS = [contract.__name__ for contract in op_contracts.CONTRACTS]
PARTS = ("expected", "found", "to fix")
# processes take seconds each; one quantizer and one op show what they show for all
IN_PROCESSES = {"quantizer": ("text_in_a_fresh_process",), "op": ("cache_key_follows_its_source",)}
OURS = [
    f8.CurrentScaling(),
    f8.CurrentScaling(block=(1, -1), scale="pow2"),
    f8.CurrentScaling(block=(-1, 1), format="e5m2"),
    f8.CurrentScaling(block=(1, 128), eps=1e-6),
    f8.CurrentScaling(block=(16, 16)),
    f8.CurrentScaling(block=(1, 32), scale="e8m0_rceil"),
    f8.CurrentScaling(block=(32, 1), scale="e8m0_floor"),
]


def others(names, name):
    return [other for other in names if other != name]


# ---------------------------------------------------------------------------------- ours


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backends(request, monkeypatch):
    """Compiled contracts by AOTAutograd; with Inductor too, whose C++ is nine tenths of the time, in the full run."""
    chosen = ("aot_eager",) if request.param == "aot_eager" else recording.BACKENDS
    monkeypatch.setattr(quantizer_contracts, "BACKENDS", chosen)
    monkeypatch.setattr(op_contracts, "BACKENDS", chosen)
    return chosen


@pytest.mark.parametrize("quantizer", OURS, ids=repr)
def test_our_quantizers_keep_every_contract(quantizer, backends):
    check_quantizer(quantizer, skip=() if quantizer == OURS[0] else IN_PROCESSES["quantizer"])


# what the derivative of an op is meant to be, where autograd can't see it in the op's own code
MEANT = {
    # a layer's output passes; what is counted has no gradient
    "fp8compile::observe": lambda y, *others: y * 1,
    "fp8compile::straight_through": lambda values, x, quantizer: x.to(values.dtype),
    "fp8compile::with_product_gradient": lambda product, a, b, quantizer: a.to(product.dtype) @ b.to(product.dtype),
    # straight through the rounding of what travels; of one rank, rows stay where they are
    "fp8compile::dispatch": lambda rows, sent, received, sizes, length, role, recipe, group: pad(
        rows[: sent.sum()], (0, 0, 0, 0 if length is None else length - int(sent.sum()))
    ),
}
HELD_ELSEWHERE = {
    # its gradient travels as codes: test_expert_parallel.py holds it against layers that send none
    "fp8compile::combine",
}
QUANTIZES = "the values of the derivative, for "  # and a layer's own tests hold them against products of dequantize
# Gradients of Inductor's code are compared to the bit in test_shapes.py, test_delayed.py,
# test_grouped_linear.py and, on two ranks, test_explicit_groups.py and test_tensor_parallel.py.
BY_INDUCTOR_ELSEWHERE = {"fp8compile::grad_input", "fp8compile::grad_weight"}


def test_what_inductor_compiles_elsewhere_is_an_op_of_ours():
    assert set(OPS) >= BY_INDUCTOR_ELSEWHERE


@pytest.mark.parametrize("name", sorted(name for name in OPS if name.startswith("fp8compile::")))
def test_our_ops_keep_every_contract(name, backends, monkeypatch):
    if name in BY_INDUCTOR_ELSEWHERE:
        monkeypatch.setattr(op_contracts, "BACKENDS", ("aot_eager",))
    skip = () if name == "fp8compile::linear" else IN_PROCESSES["op"]
    skip = (*skip, *(("backward_is_the_derivative",) if name in HELD_ELSEWHERE else ()))
    unseen = check_op(OPS[name].overload, gradient=MEANT.get(name), skip=skip)
    unseen = {contract: reason for contract, reason in unseen.items() if contract not in skip}
    assert set(unseen) <= {"backward_is_the_derivative"}
    assert all(reason.startswith(QUANTIZES) for reason in unseen.values())
    assert not (unseen and name in MEANT)


# DTensor takes layers apart itself, or is given what one rank has
LAYERS = {*(op.name() for op in LAYER_OPS), "fp8compile::observe", "fp8compile::observe_gradient"}
OTHERS = (
    "scatter_sum",
    "quantize_weight",
    "fsdp_amax",
    "fsdp_gather",
    "fsdp_reduce",
    "add_pieces",
    "weight_codes",
)
TOKENS = ("fsdp_amax_carriers", "fsdp_amaxes_together", "counted")  # of one rank, whose tokens they are
# where rows of groups are cut is data
GROUPS = (
    *("routed_rows", "group_amax", "group_cast", "group_quantize", "group_cast_transpose", "group_quantize_rows"),
    *("group_two_levels", "group_outer_amaxes", "group_quantize_two_levels", "grouped_nvfp4_mm"),
    *("grouped_blockwise_mm", "scaled_grouped_mm", "grouped_mm", "group_sum", "checked_offsets"),
    *("dispatch", "combine", "exchange_rows"),  # of one rank, too
    # operands laid out for one GPU, and packed codes
    *("nvfp4_mm", "outer_amaxes", "quantize_two_levels"),
)
NO_RULE = LAYERS | {f"fp8compile::{name}" for name in (*OTHERS, *TOKENS, *GROUPS)}


def test_every_op_of_ours_has_a_sharding_rule_that_runs():
    for name in (name for name in OPS if name.startswith("fp8compile::") and name not in NO_RULE):
        check_op(name, skip=others(OP_CONTRACTS, "sharded_gives_the_bits_of_whole"))
        assert OPS[name].sharding is not None


# ---------------------------------------------------------------------------------- broken quantizers


def test_each_contract_of_a_quantizer_has_something_that_breaks_it():
    assert list(BROKEN) == QUANTIZER_CONTRACTS


@pytest.mark.parametrize("contract", QUANTIZER_CONTRACTS)
def test_a_quantizer_that_breaks_a_contract_is_told_so(contract):
    if contract == "products_are_those_of_dequantize" and not cpu_has_rowwise_gemm():
        pytest.skip("PyTorch 2.11 has no FP8 GEMM on a CPU, and an emulated product is that of dequantize")
    broken = BROKEN[contract]()
    with pytest.raises(AssertionError) as caught:
        check_quantizer(broken, skip=others(QUANTIZER_CONTRACTS, contract))
    text = str(caught.value)
    assert text.startswith(f"{broken!r} breaks 1 of 1 contracts:\n\n  {contract}\n"), text
    assert all(f"\n    {part}" in text for part in PARTS), text


def test_all_breaches_are_told_together():
    skip = ("text_in_a_fresh_process", "compiled_gives_the_bits_of_eager", "one_graph_for_every_size")
    with pytest.raises(AssertionError) as caught:
        check_quantizer(ByIdentity(), skip=skip)
    text = str(caught.value)
    assert f"breaks 4 of {len(QUANTIZER_CONTRACTS) - 3} contracts" in text
    told = [line.strip() for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
    assert told == [
        "equal_after_copy_and_pickle",
        "text_in_graphs_rebuilds_it",
        "transposed_is_of_the_transposed_matrix",
        "equal_one_runs_the_same_graph",
    ]


def test_what_is_no_quantizer_no_op_and_no_contract_is_refused():
    with pytest.raises(TypeError, match=r"check_quantizer: `quantizer` is <class .*instance"):
        check_quantizer(f8.CurrentScaling)
    with pytest.raises(
        TypeError, match=r"check_op: `op` is 'nothing'; .* are fp8compile::add_pieces, fp8compile::after"
    ):
        check_op("nothing")
    with pytest.raises(ValueError, match="`skip` contains 'speed'; the contracts are equal_after_copy_and_pickle, "):
        check_quantizer(f8.CurrentScaling(), skip=["speed"])


def define(**steps):
    cls = type("Near", (f8.CurrentScaling,), {"__annotations__": {}, "__module__": __name__, **steps})
    return dataclass(frozen=True, repr=False)(cls)(block=(1, -1))


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ({"multiplier": lambda self, amax: None}, "Near.multiplier returned None; it must return float32 of shape "
                                                  "(4, 1), that of amax."),
        ({"multiplier": lambda self, amax: amax.double()}, "Near.multiplier returned float64 of shape (4, 1); it "
                                                           "must return float32 of shape (4, 1), that of amax."),
        ({"multiplier": lambda self, amax: amax.mT}, "Near.multiplier returned float32 of shape (1, 4); it must "
                                                     "return float32 of shape (4, 1), that of amax."),
        ({"amax": lambda self, x: x.abs().amax()}, "Near.amax returned float32 of shape (); it must return float32 "
                                                   "of shape (4, 1), what scale_shape says."),
        ({"scale_of": lambda self, multiplier: 1.0}, "Near.scale_of returned 1.0; it must return float32 of shape "
                                                     "(4, 1), that of multiplier, in scale_dtype()."),
        ({"cast": lambda self, x, multiplier: x * multiplier}, "Near.cast returned float32 of shape (4, 8); it "
                                                               "must return uint8 of shape (4, 8), what "
                                                               "codes_shape says."),
        ({"dequantize": lambda self, codes, scale, dtype=torch.float32: (codes * scale).half()}, "Near.dequantize "
                                                                                                 "returned float16 "
                                                                                                 "of shape (4, 8); "
                                                                                                 "it must return "
                                                                                                 "float32 of shape "
                                                                                                 "(4, 8), what "
                                                                                                 "values_shape "
                                                                                                 "says."),
        ({"scale_dtype": lambda self: "float32", "scale_of": f8.CurrentScaling.scale_of,
          "scale_values": f8.CurrentScaling.scale_values, "stores_e8m0": lambda self: False},
         "Near.scale_dtype returned 'float32'; it must return a torch.dtype, such as torch.uint8."),
        ({"codes_shape": lambda self, shape: shape[0], "values_shape": lambda self, shape: shape,
          "transposed": lambda self: self,
          "cast": lambda self, x, multiplier: f8.CurrentScaling.cast(self, x, multiplier),
          "dequantize": lambda self, codes, scale, dtype: f8.CurrentScaling.dequantize(self, codes, scale, dtype)},
         "Near.codes_shape returned 4 for shape (4, 8); it must return a tuple of ints, one size "
         "per dim, such as (4, 8)."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
@pytest.mark.parametrize("backend", [None, "aot_eager"])  # raised while the graph is traced, for any backend
def test_a_step_that_returns_something_else_is_named(steps, text, backend):
    def quantize(x):
        return f8.quantize(x, q).dequantize()

    q, x = define(**steps), torch.randn(4, 8)
    if backend is not None:
        quantize = torch.compile(quantize, backend=backend)
    with pytest.raises(Exception, match=re.escape(text)):
        quantize(x)


def test_what_builds_on_a_broken_layout_is_not_told_again():
    q = define(multiplier=lambda self, amax: None)
    with pytest.raises(AssertionError) as caught:
        check_quantizer(q, skip=IN_PROCESSES["quantizer"])
    text = str(caught.value)
    assert text.count("Near.multiplier returned None") == 1
    assert "Not run, because they depend on layout_is_what_it_says: transposed_is_of_the_transposed_matrix, " in text


def counts_its_calls(self, amax: Tensor) -> Tensor:
    object.__setattr__(self, "calls", self.calls + 1)
    return f8.CurrentScaling.multiplier(self, amax)


def test_a_step_that_changes_a_field_is_told():
    q = define(__annotations__={"calls": int}, calls=0, multiplier=counts_its_calls)
    with pytest.raises(
        AssertionError, match=r"(?s)nothing_but_the_arguments_decides\n.*the checked object is unchanged.*'calls'"
    ):
        check_quantizer(q, skip=others(QUANTIZER_CONTRACTS, "nothing_but_the_arguments_decides"))


@pytest.mark.parametrize("check", [check_quantizer, check_op])
def test_one_name_alone_is_no_list_of_names(check):
    with pytest.raises(TypeError, match=r"`skip` is 'passes_opcheck'; .* skip=\('passes_opcheck',\)"):
        check({check_quantizer: f8.CurrentScaling(), check_op: "fp8compile::amax"}[check], skip="passes_opcheck")


# ---------------------------------------------------------------------------------- broken ops


def impl(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x * 3


def fake(x: Tensor, quantizer: Quantizer) -> Tensor:
    return torch.empty_like(x)


def setup_context(ctx, inputs, output):
    pass


def backward(ctx, grad):
    return grad * 3, None


def sharding(x, quantizer):
    return [Split((Cut(dim), None), (dim,)) for dim in range(x.ndim)]


def values():
    x = torch.linspace(-2, 2, 24).view(4, 6)
    return x, x.t(), x[:0]


def samples():
    return [(x, f8.CurrentScaling()) for x in values()]


def identity(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x


def in_place(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x.mul_(3).clone()


def other_when_traced(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x * 3 if type(x) is Tensor else x * 4


def other_gradient_when_traced(ctx, grad):
    return grad * (3 if type(grad) is Tensor else 4), None


def with_constant(make):
    return lambda: [(x, make()) for x in values()]


BROKEN_OPS = {
    "samples_cover_it": {"samples": lambda: samples()[:2]},
    "results_are_new": {"impl": identity, "decompose": None},
    "fake_is_like_the_result": {"fake": lambda x, quantizer: x.new_empty(x.shape, dtype=torch.float64)},
    "decompose_is_the_kernel": {"decompose": lambda x, quantizer: x * 2},
    "passes_opcheck": {"impl": in_place},
    "backward_is_there_or_raises": {"backward": lambda ctx, grad: (grad[:1], None)},
    "backward_is_the_derivative": {"backward": lambda ctx, grad: (grad * 2, None)},
    "compiled_gives_the_bits_of_eager": {"decompose": other_when_traced},
    "compiled_backward_gives_the_bits_of_eager": {"backward": other_gradient_when_traced},
    "equal_arguments_run_the_same_graph": {"samples": with_constant(ByIdentity)},
    "cache_key_follows_its_source": {"samples": with_constant(Saltless)},
    "sharded_gives_the_bits_of_whole": {"sharding": lambda x, quantizer: [Split((Cut(0), None), ("max",))]},
}


@pytest.fixture
def plant():
    """Registers ``planted::name`` with parts of the good op above replaced; forgets them all afterwards."""
    before, salted = set(OPS), set(constant.SALTED_MODULES)

    def plant(name, **parts):
        good = {"fake": fake, "decompose": impl, "sharding": sharding, "samples": samples}
        arguments = good | {"backward": backward, "setup_context": setup_context} | parts
        return register_op(f"planted::{name}", arguments.pop("impl", impl), **arguments)

    yield plant
    for name in set(OPS) - before:
        del OPS[name]
    if "planted" in registry.LIBRARIES:
        registry.LIBRARIES.pop("planted")._destroy()
    constant.SALTED_MODULES.intersection_update(salted)
    constant.source_salt.cache_clear()


def test_the_op_that_is_broken_below_keeps_every_contract(plant):
    # registered in this test and by no import, a fresh process has no such op; those of ours and of swiglu8 show that
    check_op(plant("good"), skip=IN_PROCESSES["op"])


def test_an_op_with_a_derived_fake_keeps_every_contract(plant):
    check_op(plant("derived", fake=None), skip=IN_PROCESSES["op"])


def test_each_contract_of_an_op_has_something_that_breaks_it():
    assert list(BROKEN_OPS) == OP_CONTRACTS


@pytest.mark.parametrize("contract", OP_CONTRACTS)
def test_an_op_that_breaks_a_contract_is_told_so(contract, plant):
    op = plant(contract, **BROKEN_OPS[contract])
    with pytest.raises(AssertionError) as caught:
        check_op(op, skip=others(OP_CONTRACTS, contract))
    text = str(caught.value)
    assert text.startswith(f"planted::{contract} breaks 1 of 1 contracts:\n\n  {contract}\n"), text
    assert all(f"\n    {part}" in text for part in PARTS), text


def test_a_derivative_that_autograd_cannot_see_is_held_against_slopes(plant, capsys):
    @torch._dynamo.disable
    def by_numpy(x: Tensor, quantizer: Quantizer) -> Tensor:
        return torch.from_numpy(np.asarray(x.detach()) ** 2)

    parts = {"impl": inspect.unwrap(by_numpy), "decompose": None, "fake": fake}
    squares = {"backward": lambda ctx, grad: (grad * 2 * ctx.saved_tensors[0], None)}
    squares["setup_context"] = lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
    skip = others(OP_CONTRACTS, "backward_is_the_derivative")
    unseen = check_op(plant("numpy_square", **parts | squares), skip=skip)
    assert "backward_is_the_derivative" not in unseen
    assert "planted::numpy_square: backward_is_the_derivative holds" in capsys.readouterr().out
    wrong = squares | {"backward": lambda ctx, grad: (grad * ctx.saved_tensors[0], None)}
    with pytest.raises(AssertionError, match=r"(?s)input +\(4, 6\) float32.*slope from float64 differences"):
        check_op(plant("numpy_wrong", **parts | wrong), skip=skip)


def test_what_was_not_looked_at_is_said(plant, capsys):
    def rounds(x: Tensor, quantizer: Quantizer) -> Tensor:
        return torch.from_numpy(np.round(np.asarray(x.detach()) * 3))

    skip = others(OP_CONTRACTS, "backward_is_the_derivative")
    unseen = check_op(plant("numpy_rounds", impl=rounds, decompose=None), skip=skip)
    assert unseen["backward_is_the_derivative"].startswith("the values of the derivative, for 2 inputs, the first")
    assert "backward_is_the_derivative was not checked: the values" in capsys.readouterr().out
    assert unseen["passes_opcheck"] == "skipped"


def test_a_decomposition_that_is_wrong_for_a_dtype_of_empty_samples_is_found(plant):
    def wrong_for_float16(x, quantizer):
        return x * (4 if x.dtype == torch.float16 else 3)

    half_is_empty = [*samples(), (torch.empty(0, 6, dtype=torch.float16), f8.CurrentScaling())]
    op = plant("float16", decompose=wrong_for_float16, samples=lambda: half_is_empty)
    for contract in ("decompose_is_the_kernel", "compiled_gives_the_bits_of_eager"):
        with pytest.raises(AssertionError, match=r"\(4, 6\) float16"):
            check_op(op, skip=others(OP_CONTRACTS, contract))


def test_a_derivative_of_its_own_is_held_against_the_function_given(plant):
    def straight(x: Tensor, quantizer: Quantizer) -> Tensor:
        return (x * 3).round()

    op = plant("straight", impl=straight, decompose=straight)
    skip = others(OP_CONTRACTS, "backward_is_the_derivative")
    with pytest.raises(AssertionError, match=r"(?s)for impl, .*straight-through estimator.*gradient=\.\.\."):
        check_op(op, skip=skip)
    check_op(op, gradient=lambda x, quantizer: x * 3, skip=skip)
    with pytest.raises(AssertionError, match="autograd computes for the reference"):
        check_op(op, gradient=lambda x, quantizer: x * 2, skip=skip)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (list, r"yields nothing; it must yield tuples of impl's arguments, \(x, quantizer\)"),
        (lambda: [torch.ones(2)], r"yields \(2,\) float32; it must yield tuples"),
        (lambda: [(torch.ones(2),)], r"yields \(2,\) float32; it must yield tuples"),
    ],
)
def test_samples_are_looked_at_first(samples, text, plant, request):
    op = plant(f"samples_{request.node.callspec.indices['samples']}", samples=samples)
    with pytest.raises(TypeError, match=rf"check_op: samples of planted::samples_\d {text}"):
        check_op(op)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda x, quantizer: [Split((Cut(0), None), (1,))], r"on 2 ranks, result 0: shape \(2, 12\) instead of"),
        (lambda x, quantizer: [Split((Cut(0), None), (None,))], r"on 2 ranks, result 0: shape \(2, 6\) instead of"),
        (lambda x, quantizer: [Split((Cut(2), None), (0,))], r"Cut\(dim=2, unit=1\) is for \(4, 6\)"),
        (lambda x, quantizer: [Split((Cut(0), Cut(0)), (0,))], r"Cut\(dim=0, unit=1\) is for CurrentScaling"),
        (lambda x, quantizer: [Split((Cut(0),), (0,))], "it has 1 inputs, but the op has 2 arguments"),
        (lambda x, quantizer: [Split((Cut(0), None), (0, 0))], "it has 2 outputs, but the op returns 1"),
        (lambda x, quantizer: [Split((None, None), (None,))], r"its sharded arguments have \[\] units"),
        (lambda x, quantizer: [], r"none in 3 samples; for the first the rule returns \[\]"),
        (lambda x, quantizer: [Split((Cut(0), None), (0,))] if x.sum() else [], "meta"),
    ],
)
def test_a_wrong_sharding_rule_is_told_so(rule, text, plant, request):
    op = plant(f"rule_{request.node.callspec.indices['rule']}", sharding=rule)
    with pytest.raises(AssertionError, match=text):
        check_op(op, skip=others(OP_CONTRACTS, "sharded_gives_the_bits_of_whole"))


def test_a_sum_in_another_order_passes_only_as_not_exact(plant):
    def total(x: Tensor, quantizer: Quantizer) -> Tensor:
        return x.sum().view(1)

    def cut(exact):
        return lambda x, quantizer: [Split((Cut(0), None), ("sum",), exact=exact)]

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = {"fake": None, "decompose": None, "backward": None, "setup_context": None}
    made = {
        exact: plant(
            f"sum_{exact}", impl=total, sharding=cut(exact), samples=lambda: [(x, f8.CurrentScaling())], **parts
        )
        for exact in (True, False)
    }
    skip = others(OP_CONTRACTS, "sharded_gives_the_bits_of_whole")
    check_op(made[False], skip=skip)
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        check_op(made[True], skip=skip)
