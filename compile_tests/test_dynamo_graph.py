"""What Dynamo sees of a converted block: one ``fp8compile::linear`` a layer, and no break."""

from __future__ import annotations

import contextlib

import expecttest
import pytest
import torch
from graphs import calls, layer_op, printed
from torch import nn

import fp8compile as f8
from benchmarks.mlp import Mlp, mlp
from fp8compile.testing import Recording, assert_fullgraph

SIZES = (4, 32, 64)  # M, d, h
LINEAR = "fp8compile.linear.default"

MODES = {
    "train": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def recorded(fn, *args, backend="aot_eager"):
    """The one graph of ``fn(*args)``, and its output."""
    recording = Recording(backend)
    out = torch.compile(fn, fullgraph=True, backend=recording)(*args)
    assert len(recording.graphs) == 1, f"{len(recording.graphs)} graphs"
    return recording.graphs[0].dynamo, out


class TestPrinted(expecttest.TestCase):
    def test_a_block_has_one_linear_a_layer(self):
        graph, _ = recorded(*mlp("tensorwise", *SIZES))
        self.assertExpectedInline(
            printed(graph),
            """\
normed = torch.rms_norm(x, (32,), norm, None)
y = torch.ops.fp8compile.linear.default(normed, gate, None, None, [], [], UNSHARDED, <recipe>)
silu = torch.nn.functional.silu(y)
y_1 = torch.ops.fp8compile.linear.default(normed, up, None, None, [], [], UNSHARDED, <recipe>)
x = silu * y_1
y_2 = torch.ops.fp8compile.linear.default(x, down, None, None, [], [], UNSHARDED, <recipe>)
add = x + y_2
return (add,)""",
        )

    def test_the_recipe_is_a_constant_that_says_all(self):
        model = f8.Linear(32, 16, bias=False, recipe=f8.recipes.rowwise_bf16_wgrad(), dtype=torch.bfloat16)
        graph, _ = recorded(model, torch.randn(4, 32, dtype=torch.bfloat16))
        self.assertExpectedInline(
            printed(graph, recipes=True).replace(", ", ",\n"),
            """\
y = torch.ops.fp8compile.linear.default(x,
l_self_parameters_weight_,
None,
None,
[],
[],
UNSHARDED,
fp8compile_quantizers_recipe_Recipe.from_graph('xxxxxxxx',
input=fp8compile_quantizers_current_scaling_CurrentScaling.from_graph('xxxxxxxx',
format='e4m3',
block=(1,
-1,
),
scale='fp32',
eps=0.0,
rounding='nearest',
seed=0),
weight=fp8compile_quantizers_current_scaling_CurrentScaling.from_graph('xxxxxxxx',
format='e4m3',
block=(1,
-1,
),
scale='fp32',
eps=0.0,
rounding='nearest',
seed=0),
grad_output=fp8compile_quantizers_current_scaling_CurrentScaling.from_graph('xxxxxxxx',
format='e4m3',
block=(1,
-1,
),
scale='fp32',
eps=0.0,
rounding='nearest',
seed=0),
weight_for_grad_input=fp8compile_quantizers_current_scaling_CurrentScaling.from_graph('xxxxxxxx',
format='e4m3',
block=(-1,
1,
),
scale='fp32',
eps=0.0,
rounding='nearest',
seed=0),
grad_output_for_grad_weight=None,
input_for_grad_weight=None,
fast_accumulation_output=True,
fast_accumulation_grad_input=False,
fast_accumulation_grad_weight=False,
weight_lifetime='call',
dequantized_output=False,
dequantized_gradients=False,
emulate=False,
by_mx=False))
return (y,)""",
        )

    def test_quantize_and_scaled_mm_are_primitive_ops(self):
        row = f8.CurrentScaling(block=(1, -1))

        def fn(x):
            codes = f8.quantize(x, row)
            return f8.scaled_mm(codes, codes.t(), out_dtype=torch.bfloat16)

        graph, _ = recorded(fn, torch.randn(4, 32, dtype=torch.bfloat16))
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.assertExpectedInline(
            "\n".join(dict.fromkeys(name for name in names if name.startswith("fp8compile"))),
            """\
fp8compile.amax.default
fp8compile.scale.default
fp8compile.cast.default
fp8compile.straight_through.default
fp8compile.scaled_mm.default
fp8compile.with_product_gradient.default""",
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", f8.recipes.names())
def test_a_step_of_a_block_is_one_graph(recipe, mode):
    dtype = torch.float32 if mode == "autocast" else torch.bfloat16
    model = f8.convert(Mlp(32, 64, dtype), f8.recipes.by_name(recipe))
    x = torch.randn(2, 3, 32, dtype=dtype, requires_grad=mode in ("train", "autocast"))
    with MODES[mode]():
        assert_fullgraph(model, x)
        graph, y = recorded(model, x)
    assert len(calls(graph, layer_op(recipe))) == 3, printed(graph)
    if y.requires_grad:
        y.float().sum().backward()
        missing = [name for name, p in [("x", x), *model.named_parameters()] if p.grad is None]
        assert not missing, f"no gradient for {missing}"
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_mode_are_each_one_graph(training):
    model = f8.convert(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)), f8.recipes.rowwise()).train(training)
    x = torch.randn(4, 32)
    assert_fullgraph(model, x)
    graph, y = recorded(model, x)
    assert len(calls(graph, LINEAR)) == 1, printed(graph)
    y.sum().backward()
    assert model[0].weight.grad is not None


def test_compiled_autograd_takes_the_backward_whole():
    model, x = mlp("rowwise", *SIZES)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(fullgraph=True, backend="aot_eager")):
        y.sum().backward()
    counters = torch._dynamo.utils.counters
    assert counters["compiled_autograd"]["captures"] == 1, counters["compiled_autograd"]
    assert not counters["graph_break"], counters["graph_break"]
    assert x.grad is not None


def test_a_break_is_found_and_named():
    model, x = mlp("rowwise", *SIZES)

    def broken(x):
        y = model.norm(x)
        torch._dynamo.graph_break(msg="on purpose")
        return model.gate(y)

    with pytest.raises(AssertionError, match="on purpose"):
        assert_fullgraph(broken, x)
