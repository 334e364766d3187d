"""f8.compile: one graph, in which blocks that repeat are traced and compiled once, with the bits of the whole."""

from __future__ import annotations

import copy
import itertools
import pickle
from contextlib import nullcontext

import pytest
import torch
from eight_bits import EIGHT_BITS
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config, metrics
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from benchmarks.mlp import Mlp
from fp8compile import _compat
from fp8compile.testing import Recording, gpu_kernels, memory_report, run_gpu_program

BLOCKS = 3


class CheckpointInside(Mlp):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointAround(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = stack()

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class HandsOn(nn.Module):
    """A block that makes a tensor where it is given none, and returns what it is given."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp(32, 48)

    def forward(self, x, *, shift=None):
        shift = x.mean(-1, keepdim=True) if shift is None else shift
        return self.mlp(x) + shift, {"shift": shift}


class HandingOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(HandsOn() for _ in range(BLOCKS))

    def forward(self, x):
        kept = {}
        for block in self.blocks:
            x, kept = block(x, **kept)
        return x


class Small(nn.Module):
    """A norm, a layer, a residual: what Inductor is asked to compile, kernel by kernel of C++."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(dim), nn.Linear(dim, dim, bias=False)
        self.bfloat16()

    def forward(self, x):
        return x + self.layer(self.norm(x)).relu()


def stack(cls=Mlp, blocks=BLOCKS):
    return nn.Sequential(*(cls(32, 48) for _ in range(blocks)))


def converted(make, recipe):
    torch.manual_seed(0)
    return f8.convert(make(), f8.recipes.by_name(recipe))


def trained(model, compiled, *, rows=(24, 24), context=nullcontext):
    """Outputs, gradients and buffers of some steps."""
    found = []
    for step, count in enumerate(rows):
        torch.manual_seed(step)
        x = torch.randn(count, 32, dtype=next(model.parameters()).dtype, requires_grad=True)
        with context():
            y = compiled(x)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad / 1024
    return found


def assert_same_bits(make, recipe, backend="aot_eager", **how):
    """As a whole and by blocks; returns the graphs of the blocks, as Dynamo hands them to AOTAutograd."""
    whole, by_blocks = converted(make, recipe), converted(make, recipe)
    right = trained(whole, torch.compile(whole, fullgraph=True, backend=backend), **how)
    torch._dynamo.reset()
    recording = Recording()
    compiled = f8.compile(by_blocks, backend=recording if backend == "aot_eager" else backend)
    for actual, expected in zip(trained(by_blocks, compiled, **how), right, strict=True):
        assert torch.equal(actual, expected)
    return [kept.dynamo for kept in recording.graphs]


def graphs_of(model, *inputs):
    """The graphs that Dynamo hands on."""
    recording = Recording()
    f8.compile(model, backend=recording)(*inputs)
    return [kept.dynamo for kept in recording.graphs]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def rows_of(*size):
    return torch.randn(*size, dtype=torch.bfloat16, requires_grad=True)  # else the first block is another one


# ---------------------------------------------------------------------------------- one graph, one body, the same bits


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_blocks_are_traced_once_and_have_the_bits_of_the_whole(recipe):
    (graph,) = assert_same_bits(stack, recipe)
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    bodies = {node.args[0].target for node in calls}
    assert len(calls) == BLOCKS, graph.print_readable(print_output=False)
    if _compat.TORCH_VERSION >= (2, 13):  # Dynamo of 2.11 leaves it to AOTAutograd to find equal bodies
        assert len(bodies) == 1, graph.print_readable(print_output=False)
    body = getattr(graph, min(bodies))
    layers = [node for node in body.graph.nodes if str(node.target).startswith("fp8compile.")]
    assert len(layers) == 3, body.print_readable(print_output=False)


@pytest.mark.parametrize(
    ("recipe", "make", "how"),
    [
        pytest.param("rowwise", CheckpointAround, {}, id="checkpoint around"),
        pytest.param("delayed", CheckpointAround, {}, id="checkpoint around, delayed"),
        pytest.param("delayed", lambda: stack(CheckpointInside), {}, id="checkpoint inside, delayed"),
        pytest.param("rowwise", HandingOn, {}, id="a tensor handed on"),
        pytest.param("delayed", stack, {"rows": (24, 32, 40)}, id="other rows, delayed"),
        pytest.param("rowwise", lambda: stack().float(), {"context": lambda: torch.autocast("cpu")}, id="autocast"),
    ],
)
def test_blocks_have_the_bits_of_the_whole_beside_other_features(recipe, make, how):
    assert_same_bits(make, recipe, **how)


@pytest.mark.skipif(_compat.TORCH_VERSION < (2, 13), reason="before PyTorch 2.13 precision casts are not exact")
def test_inductor_gives_blocks_the_bits_of_the_whole_where_it_keeps_every_rounding():
    with config.patch(emulate_precision_casts=True):
        assert_same_bits(lambda: stack(Small, 2), "delayed", backend="inductor")


def test_twice_the_blocks_are_no_kernel_more():
    counts = []
    for blocks in (BLOCKS, 2 * BLOCKS):
        torch._dynamo.reset()
        metrics.reset()
        model = f8.convert(stack(Small, blocks), f8.recipes.rowwise())
        # code that came out of a cache would not be counted; what the C++ compiler made of it may come from there
        with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            f8.compile(model)(rows_of(24, 32)).sum().backward()
        counts.append((metrics.ir_nodes_pre_fusion, metrics.generated_kernel_count))
    (nodes, kernels), (nodes_of_twice, kernels_of_twice) = counts
    assert kernels == kernels_of_twice
    assert nodes < nodes_of_twice  # a call is a node
    assert (nodes <= 75, kernels <= 43) == (True, True), counts  # as on 2.11 and on 2.13


class Experts(nn.Module):
    def __init__(self, dim, _):
        super().__init__()
        self.before = nn.Identity()
        self.weight = nn.Parameter(torch.randn(2, dim, dim, dtype=torch.bfloat16))
        self.register_buffer("offsets", torch.tensor([10, 24], dtype=torch.int32))

    def forward(self, x):
        return x + f8.grouped_linear(self.before(x), self.weight, self.offsets, recipe=f8.recipes.rowwise())


def test_a_call_inside_of_a_region_finds_the_class_of_its_quantizer():
    model, x = stack(Experts, 2), rows_of(24, 32).detach()
    with torch.no_grad():
        assert torch.equal(f8.compile(model)(x), model(x))


# ---------------------------------------------------------------------------------- the module stays what it was


def test_a_compiled_model_is_copied_pickled_and_run_without_compiling_as_before():
    model = converted(stack, "rowwise")
    names, x = list(model.state_dict()), rows_of(24, 32)
    right = model(x)
    f8.compile(model)
    assert type(model[0]).__name__ == "Mlp"
    assert isinstance(model[0], Mlp)
    assert list(model.state_dict()) == names
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same(x), right)
        torch._dynamo.reset()
        (graph,) = graphs_of(same, x)
        assert [str(node.target) for node in graph.graph.nodes].count("invoke_subgraph") == BLOCKS
    with torch.no_grad():
        copied = copy.deepcopy(model)
        copied[0].down.weight.zero_()
    assert torch.equal(model(x), right)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.skipif(_compat.TORCH_VERSION < (2, 13), reason="Dynamo of PyTorch 2.11 can't tell who exports")
def test_an_exported_program_has_no_regions(strict):
    model = converted(stack, "rowwise")
    f8.compile(model)
    program = torch.export.export(model, (rows_of(24, 32),), strict=strict)
    assert "invoke_subgraph" not in str(program.graph)


def test_layers_of_compiled_blocks_are_converted_and_reported_as_of_plain_ones():
    model = stack()
    f8.compile(model)
    report = f8.conversion_report(f8.convert(model, f8.recipes.rowwise()))
    assert [row.converted for row in report.rows] == [True] * 3 * BLOCKS


# ---------------------------------------------------------------------------------- which blocks


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlps": nn.ModuleList([stack(), stack()])}) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.heads = nn.ModuleList([nn.Linear(8, 8), Mlp(8, 8)])


def test_repeated_blocks_have_parts_and_equals_beside_them():
    found = f8.repeated_blocks(Decoder())
    places = itertools.product(range(2), range(2), range(3))
    assert list(found) == [f"layers.{layer}.mlps.{mlp}.{block}" for layer, mlp, block in places]
    assert {type(block) for block in found.values()} == {Mlp}


def test_an_outer_block_goes_before_an_inner_one():
    assert list(f8.repeated_blocks(nn.ModuleList([HandingOn(), HandingOn()]))) == ["0", "1"]


def test_blocks_are_those_that_are_given():
    model = stack()
    f8.compile(model, blocks=[model[0]])
    assert [type(block) is Mlp for block in model] == [False, True, True]
    model = stack()
    f8.compile(model, blocks=())
    assert all(type(block) is Mlp for block in model)


def test_blocks_that_cannot_be_regions_are_said_and_inlined():
    model = f8.convert(stack(), f8.recipes.tensorwise(), weight_lifetime="parameter")
    with pytest.warns(UserWarning, match="3 of 3 repeated blocks can't be.*'0' has gate.weight, a QuantizedParam"):
        compiled = f8.compile(model, backend="aot_eager")
    x = rows_of(24, 32)
    assert torch.equal(compiled(x), torch.compile(model, backend="aot_eager")(x))


def given_blocks(blocks):
    model = stack()
    model[1].forward = model[1].forward
    return f8.compile(model, blocks=blocks(model))


@pytest.mark.parametrize(
    ("blocks", "kind", "complaint"),
    [
        (lambda model: ["0"], TypeError, "`blocks` contains a str; it must be modules of the model"),
        (lambda model: [Mlp(8, 8)], ValueError, "`blocks` contains a Mlp that is not in the model"),
        (lambda model: [model[1]], ValueError, "block '1' has a forward replaced on the instance"),
        (lambda model: [model[0].up, model[0]], ValueError, "block '0.up' is inside block '0'"),
    ],
    ids=["no module", "of another model", "a forward replaced on the", "inside of another"],
)
def test_blocks_that_make_no_sense_raise(blocks, kind, complaint):
    with pytest.raises(kind, match=complaint):
        given_blocks(blocks)


def test_a_function_is_no_model():
    with pytest.raises(TypeError, match=r"`model` is a function; it must be a torch\.nn\.Module"):
        f8.compile(stack)


def test_code_of_a_gpu_is_not_looked_into_behind_a_region():
    model = stack()
    f8.compile(model)
    for look in (gpu_kernels, memory_report, run_gpu_program):
        with pytest.raises(Exception, match=r"the code of regions .* is not supported. To"):
            look(model, rows_of(16, 32))


class Scaled(nn.Module):
    """A block with floats: of its own, and a dropout's."""

    def __init__(self):
        super().__init__()
        self.up, self.drop, self.scale = nn.Linear(16, 16), nn.Dropout(0.0), 1.5

    def forward(self, x):
        return x + self.drop(self.up(x) * self.scale)


def test_dynamic_sizes_and_floats_of_blocks():
    torch._dynamo.reset()
    model = nn.Sequential(Scaled(), Scaled())
    before = torch._dynamo.config.specialize_float
    compiled = f8.compile(model, dynamic=True, backend="aot_eager")
    for rows in (8, 9, 5):
        with torch._dynamo.config.patch(error_on_recompile=True):
            x = torch.randn(rows, 16)
            assert torch.equal(compiled(x), model(x))
    for block in model:
        block.scale = 2.0  # a constant: another graph, and no old number
    assert torch.equal(compiled(x), model(x))
    assert torch._dynamo.config.specialize_float == before
