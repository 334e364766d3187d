"""Weights that a model multiplies past their layer's forward: seen at the first forward, told of, and reported."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import pickle
import re
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.nn.parameter_uses.eager import Watching
from fp8compile.nn.parameter_uses.uses import Kind

RECIPE = f8.recipes.rowwise()
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::mv")


def plain_products(model, *args):
    """Names of the parameters that a product in high precision reads in a forward."""
    names, found = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}, set()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name().split(".")[0] in PRODUCTS:
                tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
                found.update(names.get(tensor.untyped_storage().data_ptr()) for tensor in tensors)
            return func(*args, **(kwargs or {}))

    with Products():
        model(*args)
    return {name for name in found - {None} if name.endswith("weight")}


class Parent(nn.Module):
    """``a`` is called in every case; what becomes of ``b``, ``c`` and ``layers`` is the case's own."""

    fused = True

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.register_parameter("nothing", None)
        self.by_name = {"b": self.b}

    def projected(self, x):
        return x @ self.b.weight.t()


def multiply(x, matrix, bias=None):
    return F.linear(x, matrix, bias)


def attend(module, x):
    return F.linear(x, module.b.weight)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix):
        return x @ matrix.t()


class Functional(Parent):
    def forward(self, x):
        return F.linear(self.a(x), self.b.weight, self.b.bias)


class Product(Parent):
    def forward(self, x):
        return (self.b.weight @ self.a(x).transpose(-1, -2)).transpose(-1, -2)


class Handed(Parent):
    def forward(self, x):
        return multiply(self.a(x), matrix=self.b.weight, bias=self.b.bias)


class HandedTheModule(Parent):
    def forward(self, x):
        return attend(self, self.a(x))


class Inherited(Functional):
    pass


class CallsSuper(Functional):
    def forward(self, x):
        return super().forward(x) + 1


class InAMethod(Parent):
    def forward(self, x):
        return self.projected(self.a(x))


class ByAnotherModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = InAMethod()

    def forward(self, x):
        return self.inner.projected(self.inner.a(x))


class AsAProperty(Parent):
    @property
    def matrix(self):
        return self.b.weight

    def forward(self, x):
        return self.a(x).matmul(self.matrix.T)


class ByGetattr(Parent):
    def forward(self, x):
        return F.linear(self.a(x), getattr(getattr(self, "b"), "weight"))  # noqa: B009


class ByAnotherName(Parent):
    def forward(self, x):
        layer, y = self.by_name["b"], self.a(x)
        matrix = layer.weight.to(x.dtype)
        return F.linear(y, weight=matrix)


class Concatenated(Parent):
    def forward(self, x):
        return F.linear(self.a(x), torch.cat([self.b.weight, self.c.weight]))


class InALoop(Parent):
    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = F.linear(x, layer.weight) if place else F.linear(x, layer.weight, layer.bias)
        return self.a(x)


class InAList(Parent):
    def forward(self, x):
        matrices = [layer.weight for layer in self.layers]
        return self.a(functools.reduce(F.linear, matrices, x))


class ByIndex(Parent):
    def forward(self, x):
        return self.layers[-1](self.a(F.linear(x, self.layers[0].weight)))


class Checkpointed(Parent):
    def forward(self, x):
        return checkpoint(self.projected, self.a(x), use_reentrant=False)


class InAClosure(Parent):
    def forward(self, x):
        def inner(y):
            return y @ matrix

        matrix = self.b.weight
        return (lambda y: inner(y))(self.a(x))


class ByAutograd(Parent):
    def forward(self, x):
        return Multiply.apply(self.a(x), self.b.weight)


class ScaledFirst(Parent):
    def forward(self, x):
        return F.linear(self.a(x), self.b.weight * 0.5 + self.c.weight)


class OneOfTwoWays(Parent):
    def forward(self, x):
        x = self.a(x)
        if x.shape[0] > 1000:
            return self.b(x)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x, self.b.weight)


class AsItWasMade(Parent):
    def forward(self, x):
        if self.fused and self.nothing is None:
            return F.linear(self.a(x), self.b.weight)
        return F.linear(self.a(x), self.c.weight)


MULTIPLIED = {
    **{parent: {"b"} for parent in (Functional, Product, Handed, HandedTheModule, Inherited, CallsSuper, InAMethod)},
    **{parent: {"b"} for parent in (AsAProperty, ByGetattr, ByAnotherName, Checkpointed, InAClosure, ByAutograd)},
    **{parent: {"b"} for parent in (OneOfTwoWays, AsItWasMade)},
    ByAnotherModule: {"inner.b"},
    Concatenated: {"b", "c"},
    ScaledFirst: {"b", "c"},
    InALoop: {"layers.0", "layers.1"},
    InAList: {"layers.0", "layers.1"},
    ByIndex: {"layers.0"},
}


WAYS = ("eager", "compiled", "fullgraph", "compiled inside")
PAST = "reads its weight directly, without calling the layer's forward"


class Around(nn.Module):
    """Calls a model that is compiled by itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def converted(parent, way, **options):
    """A converted model, what calls it, and the prefix of its layers' names."""
    model = Around(parent()) if way == "compiled inside" else parent()
    f8.convert(model, RECIPE, filter="*", **options)
    if way == "compiled inside":
        model.inner.compile(backend="aot_eager")
    is_compiled = way in ("compiled", "fullgraph")
    run = torch.compile(model, backend="aot_eager", fullgraph=way == "fullgraph") if is_compiled else model
    return model, run, "inner." if way == "compiled inside" else ""


def said(run, *args):
    """The warnings of weights that are multiplied past their layer, of one call."""
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        run(*args)
    return [str(each.message) for each in every if PAST in str(each.message)]


def past_forwards(model):
    return {row.fqn: row.past_forward for row in f8.conversion_report(model).rows if row.past_forward}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parent", MULTIPLIED, ids=lambda parent: parent.__name__)
def test_a_weight_that_is_multiplied_past_its_layer_is_told_of_once_by_the_first_forward(parent, way):
    if (parent, way) == (ByAutograd, "fullgraph"):
        pytest.skip("Dynamo takes no autograd.Function without a backward")
    torch._dynamo.reset()
    model, run, prefix = converted(parent, way)
    expected, x = {f"{prefix}{fqn}" for fqn in MULTIPLIED[parent]}, torch.randn(4, 32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        (warning,) = said(run, x)
        assert not said(run, x)
    assert set(past_forwards(model)) == expected
    assert all(re.search(rf"{PAST}: {fqn}|; \w+\.\w+ {PAST}: {fqn}", warning) for fqn in expected)
    assert plain_products(model, x) <= {f"{fqn}.weight" for fqn in expected}


@pytest.mark.parametrize("way", WAYS)
def test_strict_raises_at_the_first_forward(way):
    torch._dynamo.reset()
    _, run, prefix = converted(Functional, way, strict=True)
    for _ in range(2):  # it does not go on in silence
        with pytest.raises(RuntimeError, match=rf"Functional\.forward {PAST}: {prefix}b\. Call the layer"):
            run(torch.randn(4, 32))


class MetadataOnly(Parent):
    def forward(self, x):
        weight = self.b.weight
        if isinstance(self.b.weight, torch.Tensor) and x.dtype != self.b.weight.dtype:
            x = x.to(self.b.weight.dtype)
        assert weight is not None
        assert hasattr(self.b, "weight")
        assert x.shape[-1] == weight.shape[1] == weight.size(1)
        first, second = torch.split(weight, 16)
        x = x * (first.abs().max().item() + second.abs().max().item() > 0)
        x = x.to(weight.device) + torch.zeros_like(weight).sum() + weight.new_zeros(32)
        return self.b(self.a(x.type_as(weight)))


class Penalized(Parent):
    def forward(self, x):
        y = self.b(self.a(x))
        gram = self.b.weight @ self.b.weight.t()  # of the weight alone: no data is multiplied
        return y, self.b.weight.square().mean() + y.abs().mean() * gram.norm()


class Initialized(Parent):
    def __init__(self):
        super().__init__()
        self.reset_parameters()

    def _init_weights(self, module):
        nn.init.orthogonal_(module.weight @ self.b.weight)

    def reset_parameters(self):
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight @ self.c.weight)

    def fuse(self, x):
        return F.linear(x, self.b.weight)

    def forward(self, x):
        return self.b(self.a(x))


class Tied(Parent):
    def tie_weights(self):
        self.b.weight = self.a.weight

    def forward(self, x):
        self.tie_weights()
        return self.b(self.a(x))


class TheOtherWay(Parent):
    fused = False

    def forward(self, x):
        x = self.a(x)
        if self.fused:
            x = F.linear(x, self.b.weight)
        elif self.nothing is not None or not self.c:
            return F.linear(x, self.c.weight)
        else:
            x = self.b(x)
        return x if self.nothing is None else x @ self.b.weight


class EmbeddingAsHead(Parent):
    """The embedding's weight is multiplied; the layer that has the same one is another layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.b.weight = self.embedding.weight

    def forward(self, x):
        return self.b(self.a(F.linear(x, self.embedding.weight)))


class NameOfAnother(Parent):
    def forward(self, x):
        weight = self.b.weight
        weight = torch.ones(32, 32)
        return self.b(self.a(x @ weight))


class OnAParameter(Parent):
    """``b`` is called on a parameter, so nothing but parameters is in what is multiplied by data."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(8, 32))

    def forward(self, x):
        return self.a(x) @ self.b(self.queries).t()


NOT_MULTIPLIED = [
    MetadataOnly, Penalized, Initialized, Tied, TheOtherWay, EmbeddingAsHead, NameOfAnother, OnAParameter,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parent", NOT_MULTIPLIED, ids=lambda parent: parent.__name__)
def test_other_reads_of_a_weight_are_told_of_by_nobody(parent, way):
    torch._dynamo.reset()
    model, run, _ = converted(parent, way, strict=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert not said(run, torch.randn(4, 32))
    rows = [row for row in f8.conversion_report(model).rows if row.module == "Linear"]
    assert all(row.converted and not row.past_forward for row in rows)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_after_the_first_forward_nothing_is_left(grad):
    model = f8.convert(Functional(), RECIPE, filter=["!c"])
    before = {name: set(vars(module)) for name, module in Functional().named_modules()}
    own = {"_recipe", "_recipe_under_fsdp", "_caches_weights", "_fp8compile_left_out"}
    with torch.set_grad_enabled(grad):
        assert said(model, torch.randn(4, 32))
    for name, module in model.named_modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks, **module._forward_hooks_always_called}
        assert not set(vars(module)) - before[name] - own
    assert torch._C._len_torch_dispatch_stack() == 0


def test_watching_an_eager_forward_imports_no_compiler():
    program = """
        import sys, torch, fp8compile as f8
        model = f8.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), f8.recipes.rowwise(), filter="*")
        model(torch.randn(4, 32)).sum().backward()
        assert not model._forward_hooks, "it was not watched"
        assert "torch._dynamo" not in sys.modules
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]


@pytest.mark.parametrize("parent", [Functional, InALoop, ByAnotherModule], ids=lambda parent: parent.__name__)
def test_eager_calls_between_compiled_ones_recompile_nothing(parent):
    torch._dynamo.reset()
    model = f8.convert(nn.Sequential(parent(), nn.ReLU()), RECIPE, filter="*")
    run, x = torch.compile(model, backend="aot_eager"), torch.randn(4, 32)
    assert said(run, x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert not said(model, x)
            assert not said(run, x)


def test_a_forward_that_fails_is_watched_again():
    model = f8.convert(Functional(), RECIPE, filter="*")
    with pytest.raises(ValueError, match="the last dim of x"):
        model(torch.randn(4, 7))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert said(model, torch.randn(4, 32))


def test_a_model_that_is_reverted_is_watched_no_more():
    model = f8.convert(Functional(), RECIPE, filter="*", strict=True)
    f8.revert(model)
    assert not model._forward_pre_hooks
    assert not said(model, torch.randn(4, 32))


@pytest.mark.parametrize("way", ["eager", "fullgraph"])
def test_a_copy_of_a_model_is_watched_as_the_model_is(way):
    torch._dynamo.reset()
    model = copy.deepcopy(f8.convert(Functional(), RECIPE, filter="*"))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "fullgraph" else model
    assert said(run, torch.randn(4, 32))
    assert past_forwards(model) == {"b": "Functional.forward"}


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="PyTorch 2.11 traces no vars() of a module")
def test_what_is_seen_while_compiling_is_kept_in_no_attribute_that_guards_a_graph():
    class GoesThroughItself(Parent):
        def forward(self, x):
            for name, value in vars(self).items():
                x = x if name != "training" else x * (2 - value)
            y = self.a(x)
            torch._dynamo.graph_break()
            return y @ self.b.weight  # the graph before is guarded already, and so is how many attributes there are

    torch._dynamo.reset()
    model = f8.convert(nn.Sequential(GoesThroughItself()), RECIPE, filter="*")
    run, x = torch.compile(model, backend="aot_eager"), torch.randn(4, 32)
    assert said(run, x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert not said(run, x)
    assert past_forwards(model) == {"0.b": "GoesThroughItself.forward"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_layer_is_known_to_be_multiplied_past_its_forward(copied):
    model = f8.convert(Functional(), RECIPE, filter="*")
    assert said(model, torch.randn(4, 32))
    other = copied(model)
    assert past_forwards(other) == past_forwards(model) == {"b": "Functional.forward"}
    assert not any("uses" in name for module in other.modules() for name in vars(module))


def test_regions_are_read_call_by_call():
    torch._dynamo.reset()
    model = f8.convert(nn.Sequential(Functional(), Functional(), nn.Linear(32, 32)), RECIPE, filter="*")
    said_of = said(f8.compile(model, backend="aot_eager"), torch.randn(4, 32))
    assert len(said_of) == 1
    assert set(past_forwards(model)) == {"0.b", "1.b"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_is_watched(reentrant):
    class Model(Parent):
        def forward(self, x):
            return checkpoint(self.projected, self.a(x), use_reentrant=reentrant)

    model = f8.convert(Model(), RECIPE, filter="*")
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        model(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert sum(PAST in str(each.message) for each in every) == 1
    assert set(past_forwards(model)) == {"b"}


def test_a_cast_of_autocast_is_followed():
    class Model(Parent):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(self.a(x), self.b.weight)

    model = f8.convert(Model(), RECIPE, filter="*")
    assert said(model, torch.randn(4, 32))
    assert set(past_forwards(model)) == {"b"}


def test_attention_of_pytorch_stays_as_it_is_and_its_packed_projection_is_reported():
    model = f8.convert(nn.Sequential(nn.MultiheadAttention(32, 2), nn.Linear(32, 32)), RECIPE, filter="*", strict=True)
    x = torch.randn(4, 2, 32)
    assert not said(lambda: model[1](model[0](x, x, x)[0]))
    rows = {row.fqn: row for row in f8.conversion_report(model, forward=lambda: model[0](x, x, x)).rows}
    assert rows["0.out_proj"].reason.startswith("MultiheadAttention.forward reads its weight directly")
    assert rows["0.in_proj_weight"].reason == "not a nn.Linear"


def test_a_head_that_has_the_embeddings_weight_is_called_or_told_of():
    class Head(nn.Module):
        def __init__(self, *, calls):
            super().__init__()
            self.embedding, self.body = nn.Embedding(64, 32), nn.Linear(32, 32)
            self.head, self.calls = nn.Linear(32, 64, bias=False), calls
            self.head.weight = self.embedding.weight

        def forward(self, i):
            x = self.body(self.embedding(i))
            return self.head(x) if self.calls else F.linear(x, self.head.weight)

    for calls in (True, False):
        model = f8.convert(Head(calls=calls), RECIPE, filter="*")
        assert bool(said(model, torch.zeros(4, dtype=torch.int64))) == (not calls)
        assert past_forwards(model) == ({} if calls else {"head": "Head.forward"})


def test_an_operator_of_another_library_counts_as_multiplying():
    model = Parent()
    model.forward = lambda x: torch.ops.fp8compile_tests.fused(model.a(x), model.b.weight)
    f8.convert(model, RECIPE, filter="*")
    assert said(model, torch.randn(4, 32))
    assert set(past_forwards(model)) == {"b"}


@torch.library.custom_op("fp8compile_tests::fused", mutates_args=())
def fused(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return x @ matrix.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(x)


def rounds(iterate, body):
    """A model that loops over blocks, or linears, in a way of its own."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
            self.named = nn.ModuleDict({"one": Block()})

    source = f"def forward(self, x):\n    for {iterate}:\n        x = {body}\n    return x\n"
    names = {"F": F, "checkpoint": checkpoint}
    path = f"<{iterate}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), names)
    Loop.forward = names["forward"]
    return Loop()


@pytest.mark.parametrize(
    ("iterate", "found"),
    [
        ("i, b in enumerate(self.blocks)", "blocks.0.proj"),
        ("b, l in zip(self.blocks, self.layers)", "blocks.1.proj"),
        ("i, (b, l) in enumerate(zip(self.blocks, self.layers))", "blocks.1.proj"),
        ("n, b in self.blocks.named_children()", "blocks.0.proj"),
        ("n, b in self.named.items()", "named.one.proj"),
        ("b in self.named.values()", "named.one.proj"),
        ("b in reversed(self.blocks)", "blocks.0.proj"),
    ],
)
def test_loops_over_pairs_find_what_they_multiply(iterate, found):
    model = rounds(iterate, "F.linear(b(x), b.proj.weight)")
    f8.convert(model, RECIPE, filter=lambda *_: True)
    assert said(model, torch.randn(4, 32))
    assert found in past_forwards(model)
    assert "layers.0" not in past_forwards(model)


def test_kinds_of_uses():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            names = ("multiplied", "added", "offset", "convolved", "unused", "vector")
            sizes = ((32, 32), (32, 32), (32, 32), (8, 32, 3), (32, 32), (32,))
            for name, size in zip(names, sizes, strict=True):
                self.register_parameter(name, nn.Parameter(torch.randn(size)))

        def forward(self, x):
            y = torch.addmm(self.offset, x + self.added, self.multiplied)
            return F.conv1d(y[None], self.convolved, padding=1) + x @ self.vector

    model = Kinds()
    with Watching(model) as watching:
        model(torch.randn(32, 32))
    assert {name: watching.uses.kind(model, name) for name, _ in model.named_parameters()} == {
        "multiplied": Kind.PRODUCT,
        "added": Kind.OTHER,
        "offset": Kind.OTHER,
        "convolved": Kind.CONVOLUTION,
        "unused": None,
        "vector": None,
    }


# ---------------------------------------------------------------------------------- what only a forward can tell


class Hidden(Parent):
    """Reads a weight as no source shows it, calls one layer by its forward, one as usual, and one not at all."""

    def forward(self, x):
        x = F.linear(x, dict(self.named_parameters())["a.weight"])
        return self.layers[0](self.b.forward(x))


def called(model, forward):
    return {row.fqn: row.called for row in f8.conversion_report(model, forward=forward).rows}


@pytest.mark.parametrize("way", ["eager", "compiled", "compiled in place"])
def test_the_report_of_a_forward_says_which_converted_layers_it_never_called(way):
    model, x = f8.convert(Hidden(), RECIPE, filter=["!c"]), torch.randn(4, 32)
    run, counters = model, torch._dynamo.utils.counters
    if way == "compiled":
        run = torch.compile(model, backend="aot_eager")
    elif way == "compiled in place":
        model.compile(backend="aot_eager")
    assert len(said(run, x)) == 1
    expected = run(x)
    attributes = [set(vars(module)) for module in model.modules()]
    frames = counters["frames"]["total"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert called(run, lambda: run(x)) == {
            f"{'_orig_mod.' if way == 'compiled' else ''}{fqn}": was
            for fqn, was in {"a": False, "b": True, "c": None, "layers.0": True, "layers.1": False}.items()
        }
        assert torch.equal(run(x), expected)
    assert counters["frames"]["total"] == frames
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert called(model, None) == {"a": False, "b": None, "c": None, "layers.0": None, "layers.1": None}


def test_what_was_never_called_is_printed_and_counted():
    model = f8.convert(Hidden(), RECIPE)
    printed = str(f8.conversion_report(model, forward=lambda: model(torch.randn(4, 32)))).splitlines()
    assert [line.split()[-2:] for line in printed[2:5]] == [["none", "[1]"], ["all", "three"], ["none", "[2]"]]
    assert "[1] Hidden.forward reads its weight directly, without calling the layer's forward" in printed
    assert "[2] the forward never called this layer" in printed
    assert printed[-1] == "2 of 5 converted, 3 more converted but never called"


class Twice(Functional):
    """Calls a layer, and multiplies its weight itself too."""

    def forward(self, x):
        return super().forward(x) + self.b(x)


@pytest.mark.filterwarnings("ignore:convert. a weight is used in a GEMM")
@pytest.mark.parametrize("way", ["eager", "compiled", "blocks"])
@pytest.mark.parametrize(("parent", "is_called"), [(Functional, False), (Twice, None)])
def test_a_weight_that_only_other_code_multiplies_is_not_counted_as_converted(parent, is_called, way):
    """The report said "all three" for it, and only a note said otherwise."""
    torch._dynamo.reset()
    model = f8.convert(parent(), RECIPE, filter="*")
    if way == "blocks":
        model.b.compile(backend="aot_eager")
    run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    run(torch.randn(4, 32))
    report = f8.conversion_report(copy.deepcopy(model))
    row = next(row for row in report.rows if row.fqn == "b")
    assert (row.past_forward.rpartition(".")[2], row.called) == ("forward", is_called)
    layers = len(report.rows)
    says = f"{layers} of {layers} converted"
    if is_called is False:
        says = f"{layers - 1} of {layers} converted, 1 more converted but never called"
    assert str(report).endswith(says)
    assert ("none [1]" in str(report)) is (is_called is False)


def test_a_forward_that_fails_leaves_the_model_as_it_was():
    model = f8.convert(Hidden(), RECIPE)
    before = [set(vars(module)) for module in model.modules()]
    with contextlib.suppress(ZeroDivisionError):
        f8.conversion_report(model, forward=lambda: 1 / 0)
    assert [set(vars(module)) for module in model.modules()] == before


def test_a_forward_replaced_on_a_converted_layer_is_there_again():
    model = f8.convert(Hidden(), RECIPE)
    model.b.forward = own = model.b.forward
    assert called(model, lambda: model(torch.randn(4, 32)))["b"]
    assert vars(model.b)["forward"] is own


@pytest.mark.parametrize("given", [3, "forward", nn.Linear(32, 32)], ids=["int", "str", "module"])
def test_a_forward_that_is_no_function_is_refused(given):
    with pytest.raises(TypeError, match=r"`forward` is .*; it must be a function without arguments"):
        f8.conversion_report(Hidden(), forward=given)


def test_a_layer_converted_before_it_got_such_a_parent_is_told_of_by_a_forward():
    model = Functional()
    f8.convert(model.b, RECIPE)
    report = f8.conversion_report(model, forward=lambda: model(torch.randn(4, 32)))
    row = next(row for row in report.rows if row.fqn == "b")
    assert (row.converted, row.past_forward, row.called) == (True, "Functional.forward", False)
    assert said(torch.compile(model, backend="aot_eager"), torch.randn(4, 32))


def test_jamba_of_hugging_face():
    """Its mixer multiplies ``dt_proj.weight``; the layer's own forward is for quantized models."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "mamba_d_state": 16, "mamba_dt_rank": 16, "num_experts": 1}
    config = transformers.JambaConfig(
        vocab_size=96, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, pad_token_id=0, **sizes
    )
    model = transformers.JambaForCausalLM(config)
    f8.convert(model, RECIPE, filter="*")
    assert said(lambda: model(input_ids=torch.randint(3, 96, (2, 8)), use_cache=False))
    assert past_forwards(model) == {"model.layers.0.mamba.dt_proj": "JambaMambaMixer.forward"}


def test_a_first_forward_through_code_that_was_compiled_with_checkpointing_and_random_numbers():
    """It runs each such operator by a higher-order one, which a plain dispatch mode refuses."""
    torch._dynamo.reset()
    block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))
    model = f8.convert(nn.Sequential(block), f8.recipes.rowwise())
    wrapped = checkpoint_wrapper(model[0], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    model[0] = torch.compile(wrapped, fullgraph=True, backend="aot_eager_decomp_partition")
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
