"""FSDP in the graph: one graph for the model, what it sends in each pass, and what it keeps between them.

A fake process group traces what a real one would run, in a process of its own: PyTorch keeps meshes beyond their
group. Graphs are those that Inductor gets: decomposed, and cut into forward and backward by its partitioner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod

import pytest
import torch
from expecttest import assert_expected_inline
from processes import fake_rank
from torch import nn

import fp8compile as f8
from fp8compile import _compat
from fp8compile.testing import assert_fullgraph, assert_no_recompile, graph_report

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "delayed")
DIM, HIDDEN, BLOCKS, TOKENS = 256, 1024, 2, 64
# replicas and ranks that share the rows
MESHES = ((2,), (4,), (8,), (2, 4))


class Block(nn.Module):
    """RMSNorm, SwiGLU, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a function in the process with the group."""
    with fake_rank(0, 8) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


# ---------------------------------------------------------------------------------- there


def model_of(recipe, shape):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = None if shape is None else DeviceMesh("cpu", torch.arange(prod(shape)).view(shape))
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if recipe is not None:
        group = mesh.get_group(mesh.ndim - 1) if recipe == "delayed" and mesh is not None else None
        model = f8.convert(model, f8.recipes.by_name(recipe), amax_group=group)
    if shape is None:
        return model.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return f8.parallel.graph_fsdp(model, mesh, mp_policy=policy)


def tokens():
    return torch.randn(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)


def report_of(recipe, shape):
    return graph_report(model_of(recipe, shape), tokens(), calls=[tokens(), tokens()])


@dataclass(frozen=True)
class Sent:
    """A message: what a rank puts in, once a tensor."""

    op: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self):
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


def sent(graph):
    found = []
    for node in graph.graph.nodes:
        if "_c10d_functional" not in str(node.target) or "wait" in str(node.target):
            continue
        for value in node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]:
            value = value.meta["val"]
            found.append(Sent(node.target._opname, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
    return found


def saved(forward, backward):
    """Elements and bytes of each tensor that is kept between the two, beside the forward's inputs."""
    given = {node.name for node in forward.graph.find_nodes(op="placeholder")}
    kept = [node for node in backward.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    values = [node.meta["val"] for node in kept if node.name not in given]
    return [(each.numel(), each.numel() * each.element_size()) for each in values if isinstance(each, torch.Tensor)]


@cache
def compiled(recipe, shape, passes=()):
    """What `compiled_model` says of a model of these; kept, for several tests ask."""
    return compiled_model(model_of(recipe, shape), dict(passes))


def compiled_model(model, passes=None, x=None):
    """Messages of forward and backward, and what is saved; after these passes of Inductor, as its options, if any."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    graphs = []

    def keep(graph, inputs, **options):
        if passes:
            with V.set_fake_mode(detect_fake_mode(inputs)):
                post_grad_passes(graph, is_inference=False)
        graphs.append(graph)
        return make_boxed_func(graph)

    def backend(graph, inputs):
        return compile_fx(graph, inputs, inner_compile=keep)

    torch._dynamo.reset()
    with config.patch(**(passes or {})):
        torch.compile(model, fullgraph=True, backend=backend)(tokens() if x is None else x).float().sum().backward()
    forward, backward = graphs
    return sent(forward), sent(backward), saved(forward, backward)


def checkpointed_model(recipe):
    """A model whose blocks are checkpointed."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model_of(recipe, None).float()

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return f8.parallel.graph_fsdp(Checkpointed(), DeviceMesh("cpu", torch.arange(4)), mp_policy=policy)


def checkpointed(recipe):
    """All-reduces of `checkpointed_model`."""
    messages = compiled_model(checkpointed_model(recipe))[:2]
    return Counter((each.op, each.dtype) for part in messages for each in part if each.op == "all_reduce")


def evaluation(recipe):
    """Graphs and breaks of a forward of `checkpointed_model` without gradients."""
    with torch.no_grad():
        return graph_report(checkpointed_model(recipe), tokens())


# ---------------------------------------------------------------------------------- here


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_without_breaks_or_recompiles(elsewhere, recipe):
    report = elsewhere(report_of, recipe, (4,))
    assert_fullgraph(report)
    assert_no_recompile(report)
    assert len(report.graphs) == 1


def text_of(messages):
    return "\n".join(f"{each.op} {each.dtype} {list(each.shape)}" for each in messages)


def test_what_tensorwise_sends(elsewhere):
    forward, backward, _ = elsewhere(compiled, "tensorwise", (4,))
    assert_expected_inline(
        text_of(forward),
        """\
all_reduce int32 [6]
all_gather_into_tensor bfloat16 [64]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [64, 1024]
all_gather_into_tensor bfloat16 [64]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [64, 1024]""",
    )
    assert_expected_inline(
        text_of(sorted(backward, key=str)),  # in which order it is, versions of PyTorch differ
        """\
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [64, 1024]
all_gather_into_tensor uint8 [64, 1024]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [256, 1024]
reduce_scatter_tensor float32 [256, 1024]
reduce_scatter_tensor float32 [256]
reduce_scatter_tensor float32 [256]""",
    )


def test_what_rowwise_sends(elsewhere):
    """Codes along rows and their scales forward, codes along columns backward, whose scales all ranks know."""
    forward, backward, _ = elsewhere(compiled, "rowwise", (4,))
    assert_expected_inline(
        text_of(forward),
        """\
all_reduce int32 [3072]
all_gather_into_tensor bfloat16 [64]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor float32 [256, 1]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor float32 [256, 1]
all_gather_into_tensor uint8 [64, 1024]
all_gather_into_tensor float32 [64, 1]
all_gather_into_tensor bfloat16 [64]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor float32 [256, 1]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor float32 [256, 1]
all_gather_into_tensor uint8 [64, 1024]
all_gather_into_tensor float32 [64, 1]""",
    )
    assert_expected_inline(
        text_of(sorted(backward, key=str)),  # in which order it is, versions of PyTorch differ
        """\
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [256, 256]
all_gather_into_tensor uint8 [64, 1024]
all_gather_into_tensor uint8 [64, 1024]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [1024, 256]
reduce_scatter_tensor float32 [256, 1024]
reduce_scatter_tensor float32 [256, 1024]
reduce_scatter_tensor float32 [256]
reduce_scatter_tensor float32 [256]""",
    )


def test_what_delayed_scaling_sends(elsewhere):
    """As tensorwise, but for the amaxes: four a layer, in one message at the end of the backward."""
    parts = {recipe: elsewhere(compiled, recipe, (4,))[:2] for recipe in ("tensorwise", "delayed")}
    amaxes = [Sent("all_reduce", "int32", (BLOCKS * 3 * 4,))]
    gathers = [each for each in parts["tensorwise"][0] if each.op != "all_reduce"]
    assert parts["delayed"][0] == gathers
    assert parts["delayed"][1][-1:] == amaxes
    assert sorted(parts["delayed"][1][:-1], key=str) == sorted(parts["tensorwise"][1], key=str)


@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorwise", "rowwise"))]
)
def test_meshes_of_any_size_send_the_same(elsewhere, recipe):
    """But for the mean over replicas; all layers' amaxes are one message, wherever ranks need any."""
    kinds = {}
    for shape in MESHES:
        messages = [[(each.op, each.dtype) for each in part] for part in elsewhere(compiled, recipe, shape)[:2]]
        of_replicas = [each for each in messages[1] if each == ("all_reduce", "float32")]
        assert len(of_replicas) == (BLOCKS * 4 if len(shape) == 2 else 0)
        messages[1] = [each for each in messages[1] if each not in of_replicas]
        assert sum(each == ("all_reduce", "int32") for part in messages for each in part) <= 1
        kinds[shape] = messages
    assert all(each == kinds[2,] for each in kinds.values()), kinds


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_travel_and_at_most_0_55_of_bfloat16s_bytes(elsewhere, recipe):
    forward, backward, _ = elsewhere(compiled, recipe, (4,))
    rows = {dim // 4 for dim in (DIM, HIDDEN)}
    for messages in (forward, backward):
        gathers = [each for each in messages if "all_gather" in each.op]
        norms = [each for each in gathers if each.dtype == "bfloat16"]
        assert {each.shape for each in norms} <= {(DIM // 4,)}
        codes = [each for each in gathers if each.dtype == "uint8" and rows & {*each.shape} and min(each.shape) >= 64]
        assert len(codes) == BLOCKS * 3
        bf16 = sum(2 * prod(each.shape) for each in codes)
        assert sum(each.bytes for each in gathers if each not in norms) <= 0.55 * bf16, gathers


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", None])
def test_no_gathered_weight_is_kept_for_the_backward(elsewhere, recipe):
    """Beside what the unsharded model keeps: codes of this rank's rows, for each pass, and numbers a row, a column."""
    kept = {shape: elsewhere(compiled, recipe, shape)[2] for shape in (None, (8,))}
    assert DIM * HIDDEN not in [elements for elements, _ in kept[8,]], kept
    alone, sharded = (sum(size for _, size in kept[shape]) for shape in (None, (8,)))
    assert sharded - alone <= 2 * BLOCKS * 3 * (DIM * HIDDEN // 8 + 4 * (DIM + HIDDEN)), kept


def test_inductor_puts_gathers_together(elsewhere):
    """Of all dtypes, in one message a pass. Of one dtype it takes neighbours only, and norms are between codes."""
    passes = {"bucket_all_gathers_fx": "all"}
    if _compat.TORCH_VERSION >= (2, 13):
        passes["bucket_all_gathers_bucket_mode"] = "custom_ops_multidtype"
    counts = {}
    for options in ({}, passes):
        parts = elsewhere(compiled, "tensorwise", (4,), tuple(options.items()))[:2]
        counts[bool(options)] = [sum("all_gather" in each.op for each in part) for part in parts]
    assert counts[False] == [BLOCKS * 4, BLOCKS * 3]  # the backward has the norms
    assert counts[True] == [1, 1] if _compat.TORCH_VERSION >= (2, 13) else counts[True][0] < counts[False][0]


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_amaxes_stay_one_message_with_checkpointing(elsewhere, recipe):
    counts = elsewhere(checkpointed, recipe)
    assert counts == Counter({("all_reduce", "int32"): 1})


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "delayed"])
def test_a_checkpointed_model_is_evaluated_in_one_graph(elsewhere, recipe):
    # without gradients, ranks exchange no amaxes for grad_input: nothing is to be written in checkpointed code
    report = elsewhere(evaluation, recipe)
    assert_fullgraph(report)
    assert len(report.graphs) == 1
