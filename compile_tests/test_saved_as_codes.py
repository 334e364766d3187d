"""Saved tensors as codes in compiled models: by the context and by the partitioner, the same bits, bytes and graphs.

Graphs are those that Inductor gets, and run as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import fake_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.saved_tensors import partitioner
from fp8compile.saved_tensors.saved_tensor import DEFAULT_KINDS
from fp8compile.testing import assert_fullgraph
from fp8compile.testing.bits import difference

TOKENS, D, H = 64, 128, 256
BF16 = 2


def chosen(tensor):
    """What the default chooses, and small tensors too."""
    return tensor.kind in DEFAULT_KINDS


SAVED = f8.SavedAsCodes(filter=chosen)


class Block(nn.Module):
    """RMSNorm, SwiGLU, residual."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.norm, self.checkpointed = nn.RMSNorm(D), checkpointed
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((D, H), (D, H), (H, D)))

    def own(self, x):
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def forward(self, x):
        return checkpoint(self.own, x, use_reentrant=False) if self.checkpointed else self.own(x)


def graphs_only(graph, inputs):
    """A backend with Inductor's decompositions and its choice of a partitioner, without its code."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import compile_fx

    return aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph),
        decompositions=compile_fx.select_decomp_table(),
        partition_fn=compile_fx.partition_fn,
    )(graph, inputs)


def model_of(recipe, case="whole"):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case == "checkpointed") for _ in range(1 if case == "one" else 2))).bfloat16()
    return f8.convert(model, f8.recipes.by_name(recipe), filter="*") if recipe else model


def tokens(case="whole"):
    torch.manual_seed(1)
    x = torch.randn(TOKENS, D).bfloat16().requires_grad_()
    if case == "dynamic":
        torch._dynamo.mark_dynamic(x, 0)
    return x


def opened(door, saved):
    """The context in which a door packs tensors; a partitioner by Inductor's option, which `f8.compile` sets."""
    if door is None:
        return contextlib.nullcontext()
    if door == "context":
        return f8.saved_as_codes(saved)
    return torch._inductor.config.patch(custom_partitioner_fn=partitioner(saved))


def rounding(block):
    """A context in which a compiled call saves bfloat16 tensors as values of codes in these blocks."""
    quantizer = f8.CurrentScaling(block=block, scale="pow2")

    def pack(x):
        made = x.dtype is torch.bfloat16 and x.ndim == 2 and not isinstance(x, nn.Parameter)
        return f8.quantize(x, quantizer).dequantize(x.dtype) if made and not x.requires_grad else x

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


def step(context, recipe, case="whole", backend=graphs_only):
    """Bytes kept beside arguments, then the result and gradients."""
    torch._dynamo.reset()
    model, x = model_of(recipe, case), tokens(case)
    call = (f8.compile if case == "region" else torch.compile)(model, fullgraph=True, backend=backend)
    with context:
        y = call(x)
    given = {t.untyped_storage()._cdata for t in (x, y, *model.parameters())}
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in y.grad_fn.saved_tensors}
    kept = sum(size for key, size in held.items() if key not in given)
    y.float().square().sum().backward()
    return kept, y, [x.grad, *(each.grad for each in model.parameters())]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) is None


@pytest.mark.parametrize("case", ["whole", "dynamic", "region", "checkpointed"])
def test_both_doors_give_the_bits_of_rounded_tensors_and_keep_a_byte_an_element(case):
    exact, y, _ = step(opened(None, SAVED), "rowwise", case)
    rounded = step(rounding((1, -1)), "rowwise", case)
    between = TOKENS * D  # the input of the second block
    packed = between if case == "checkpointed" else between + 4 * TOKENS * H  # and gate and up of both
    rows = TOKENS * (1 if case == "checkpointed" else 5)
    for door in ("context", "partitioner"):
        kept, result, gradients = step(opened(door, SAVED), "rowwise", case)
        assert exact - kept == packed * BF16 - (packed + rows * BF16)
        assert torch.equal(result, y)
        assert_same(gradients, rounded[2])


@pytest.mark.parametrize(
    ("recipe", "columns"), [(None, 128), ("tensorwise", None), ("blockwise", 128), ("mxfp8", 32), ("nvfp4", 16)]
)
def test_codes_are_in_the_blocks_of_the_recipe(recipe, columns):
    exact = step(opened(None, SAVED), recipe, "one")[0]
    rounded = step(rounding((1, columns or -1)), recipe, "one")
    kept, result, gradients = step(opened("partitioner", f8.SavedAsCodes(filter=lambda tensor: True)), recipe, "one")
    elements = 2 * TOKENS * H + (0 if recipe else TOKENS * (D + H))  # bf16 layers save the normed x and the activation
    scales = 2 * TOKENS if columns is None else elements // columns
    assert exact - kept == elements * BF16 - (elements + scales * BF16)
    assert torch.equal(result, rounded[1])
    assert_same(gradients, rounded[2])


def test_four_bits_by_choice_take_a_quarter():
    four = f8.SavedAsCodes(f8.TwoLevelScaling(), filter=chosen)
    exact = step(opened(None, four), "rowwise")[0]
    by_context, by_partitioner = (step(opened(door, four), "rowwise") for door in ("context", "partitioner"))
    elements = TOKENS * D + 4 * TOKENS * H
    assert by_context[0] == by_partitioner[0] == exact - elements * BF16 + elements * 9 // 16 + 5 * 4
    assert_same(by_context[2], by_partitioner[2])


def test_a_backend_without_decompositions_packs_too():
    exact, y, _ = step(opened(None, SAVED), None, backend="aot_eager")
    kept, result, _ = step(opened("context", SAVED), None, backend="aot_eager")
    assert torch.equal(result, y)
    assert kept <= exact - (TOKENS * D + 4 * TOKENS * H) * (BF16 - 1 - BF16 / 128)


def test_a_filter_is_told_what_each_tensor_is():
    told = []

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.o = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x):
            q, k, v = (each.view(1, -1, 4, D // 4).transpose(1, 2) for each in self.q(self.norm(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            h = x + self.o(mixed)
            return h + F.gelu(self.o(self.norm(h)))

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Attention().bfloat16(), tokens()
    with opened("partitioner", f8.SavedAsCodes(filter=lambda tensor: told.append(tensor) or False)):
        torch.compile(model, fullgraph=True, backend=graphs_only)(x)
    found = {(each.kind, each.module) for each in told}
    assert ("activation", "o") in found
    assert "norm" in {kind for kind, _ in found}
    assert {each.kind for each in told if each.shape[-1] == D // 4} == {"attention"}
    assert not [each for each in told if each.shape[-1] == 1 or each.dtype is torch.float32]  # no statistics


def test_what_a_softmax_reads_stays():
    """Logits with a cap, as Gemma's: tanh reads them, and a softmax its result."""
    told = []

    def capped(x, weight, targets):
        logits = 30 * torch.tanh((x * 2) @ weight / 30)
        return F.cross_entropy(logits.float(), targets)

    torch._dynamo.reset()
    x, weight = tokens(), torch.randn(D, H).bfloat16().requires_grad_()
    with opened("partitioner", f8.SavedAsCodes(filter=lambda tensor: told.append(tensor) or False)):
        torch.compile(capped, fullgraph=True, backend=graphs_only)(x, weight, torch.arange(TOKENS))
    kinds = {each.kind for each in told if each.shape == (TOKENS, H)}
    assert kinds == {"other"}


def test_hooks_of_others_get_codes():
    torch._dynamo.reset()
    model, x, sent = model_of("rowwise", "one"), tokens(), []
    call = torch.compile(model, fullgraph=True, backend=graphs_only)

    def away(tensor):
        sent.append((tensor.dtype, tensor.numel()))
        return tensor.clone()

    with opened("partitioner", SAVED), torch.autograd.graph.saved_tensors_hooks(away, lambda tensor: tensor):
        y = call(x)
    y.float().square().sum().backward()
    assert sent.count((torch.uint8, TOKENS * H)) == 2  # gate and up
    assert (torch.bfloat16, TOKENS * H) not in sent
    assert_same(
        [x.grad, *(each.grad for each in model.parameters())], step(opened("partitioner", SAVED), "rowwise", "one")[2]
    )


def test_delayed_scaling_by_both_doors():
    exact, rounded = (step(context, "delayed", "one") for context in (opened(None, SAVED), rounding((1, -1))))
    for door in ("context", "partitioner"):
        kept, result, gradients = step(opened(door, SAVED), "delayed", "one")
        assert exact[0] - kept == 2 * TOKENS * H * (BF16 - 1) - 2 * TOKENS * BF16
        assert torch.equal(result, exact[1])
        assert_same(gradients, rounded[2])


def test_a_gradient_inside_of_the_graph_saves_nothing():
    model, x = model_of("rowwise", "one").requires_grad_(requires_grad=False), tokens().detach()

    def gradient(x):
        return torch.func.grad(lambda x: model(x).float().square().sum())(x)

    found = []
    for door in (None, "partitioner"):
        torch._dynamo.reset()
        with opened(door, SAVED):
            found.append(torch.compile(gradient, fullgraph=True, backend=graphs_only)(x))
    assert torch.equal(*found)


@pytest.mark.parametrize("door", ["context", "partitioner"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_models(wrapper, door):
    _, _, expected = step(opened(door, SAVED), "rowwise", "one")
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = model_of("rowwise", "one"), tokens()
        wrapped = nn.parallel.DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
        with opened(door, SAVED):
            y = torch.compile(wrapped, backend=graphs_only)(x)
        y.float().square().sum().backward()
        found = [getattr(each.grad, "full_tensor", lambda each=each: each.grad)() for each in model.parameters()]
    finally:
        dist.destroy_process_group()
    assert_same([x.grad, *found], expected)


CACHED = """
import contextlib, json, torch, fp8compile as f8
from torch._dynamo.utils import counters

def chosen(tensor):
    return tensor.kind == "activation"

torch.manual_seed(0)
x = torch.randn(32, 64).bfloat16().requires_grad_()
model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.SiLU()).bfloat16()
f8.convert(model, f8.recipes.rowwise(), filter="*")
saved = f8.SavedAsCodes(filter=chosen)

def step(call, context):
    torch._dynamo.reset()
    counters.clear()
    with context:
        y = call(x)
    assert torch.uint8 in [each.dtype for each in y.grad_fn.saved_tensors]
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    return gradient.view(torch.int16).tolist(), {k: v for k, v in counters["aot_autograd"].items() if "cache" in k}

by_context = step(torch.compile(model, fullgraph=True), f8.saved_as_codes(saved))
print(json.dumps([by_context, step(f8.compile(model, saved=saved), contextlib.nullcontext())]))
"""


def test_a_warm_start_hits_the_cache(tmp_path):
    (tmp_path / "program.py").write_text(CACHED)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py")]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    cold, warm = (json.loads(run.stdout) for run in runs)
    for (gradient, missed), (again, hit) in zip(cold, warm, strict=True):
        assert gradient == again
        assert (missed["autograd_cache_miss"], missed["autograd_cache_saved"]) == (1, 1)
        assert hit == {"autograd_cache_hit": 1}
    assert cold[0][0] == cold[1][0]


def test_one_graph_and_one_for_calls_outside():
    torch._dynamo.reset()
    model, x = model_of("rowwise"), tokens()
    with f8.saved_as_codes():
        assert_fullgraph(model, x)
    compiled = torch.compile(model, fullgraph=True, backend=graphs_only)
    torch._dynamo.utils.counters.clear()
    made = torch._dynamo.utils.counters["stats"]
    for _ in range(2):
        with f8.saved_as_codes(filter=chosen):
            compiled(x).sum().backward()
        compiled(x).sum().backward()
        with f8.saved_as_codes(f8.SavedAsCodes(filter=chosen)):
            compiled(x).sum().backward()
    assert made["unique_graphs"] == 2


def test_what_compile_can_not_do_is_refused():
    model = model_of(None)
    with pytest.raises(TypeError, match=r"`saved` is 'all'; it must be a fp8compile\.SavedAsCodes"):
        f8.compile(model, saved="all")
    with pytest.raises(ValueError, match="chooses Inductor's partitioner, but the backend is 'aot_eager'"):
        f8.compile(model, saved=SAVED, backend="aot_eager")
    with pytest.raises(ValueError, match="Inductor uses only one partitioner"):
        f8.compile(model, saved=SAVED, options={"custom_partitioner_fn": partitioner(SAVED)})

    def inside(x):
        with f8.saved_as_codes():
            return model(x)

    with pytest.raises(Exception, match="Dynamo is tracing this context"):
        torch.compile(inside, fullgraph=True, backend="eager")(tokens())


# ---------------------------------------------------------------------------------- ranks


def kept_on_a_rank(placement):
    """Bytes that one of two ranks keeps, exact and by each door, with Inductor's decompositions."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, found = DeviceMesh("cpu", torch.arange(2)), []
    for door in (None, "partitioner", "context"):
        torch._dynamo.reset()
        model, x = model_of("rowwise"), tokens()
        if placement == "graph_fsdp":
            model = f8.parallel.graph_fsdp(model, mesh)
        else:
            column, row = f8.parallel.ColwiseParallel(), f8.parallel.RowwiseParallel()
            for block in model:
                parallelize_module(block, mesh, {"gate": column, "up": column, "down": row})
        call = torch.compile(model, fullgraph=True, backend=graphs_only)
        try:
            with opened(door, SAVED):
                y = call(x)
        except Exception as error:
            found.append(str(error))
            continue
        given = {t.untyped_storage()._cdata for t in (x, y)}
        held = {t.untyped_storage()._cdata: t for t in y.grad_fn.saved_tensors if t.dtype is not torch.float32}
        found.append(sum(t.untyped_storage().nbytes() for key, t in held.items() if key not in given))
        y.float().sum().backward()
    return found


@pytest.mark.parametrize("placement", ["tensor_parallel", "graph_fsdp"])
def test_a_rank_keeps_codes_of_its_own_part(placement):
    with fake_rank(0, 2) as elsewhere:
        exact, kept, refused = elsewhere.submit(kept_on_a_rank, placement).result()
    hidden = H // 2 if placement == "tensor_parallel" else H
    packed, rows = TOKENS * D + 4 * TOKENS * hidden, 5 * TOKENS
    assert exact - kept == packed * BF16 - (packed + rows * BF16)
    assert "which PyTorch loses when it inlines hooks" in refused
