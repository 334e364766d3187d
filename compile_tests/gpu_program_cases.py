"""Models whose generated programs are run by the tests.

Each case runs twice. As users get it, every product's operands and every output have the bits of the graph. With
Inductor's ``emulate_precision_casts``, outputs, gradients and buffers have those of eager mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import gelu

import fp8compile as f8
from benchmarks.experts import experts_arguments
from benchmarks.experts import feed_forward as experts_feed_forward
from benchmarks.mlp import Mlp
from fp8compile.testing import eager_run, run_gpu_program
from fp8compile.testing.bits import bits

__all__ = ["CASES", "Case", "Row", "check"]

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "delayed")
SQUARES = "mxfp8, 32 x 32"  # both products of a weight read the same codes
Made = tuple[Callable, tuple[torch.Tensor, ...]]  # a module or function, and its arguments


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what is asked of it.

    Attributes:
        name: Of what is special about it.
        recipe: Of its layers.
        make: Makes the model and its arguments.
        steps: How many are taken; buffers go from one to the next.
        is_quick: Whether it is run each time, and not only with the slow tests.
        eager_as: For `eager_run`: the GPU, where scales are applied after the product; else None.
        in_ranks: Whether it needs a process group.
        rounded_once: Tensors for which Inductor adds inside of a product what eager mode adds to its rounded result:
            they are compared with eager mode to a rounding of each, 2**-8 of the largest element, twice.
        options: For `run_gpu_program`.
    """

    name: str
    recipe: str
    make: Callable[[str], Made]
    steps: int = 1
    is_quick: bool = False
    eager_as: str | None = None
    in_ranks: bool = False
    rounded_once: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, {self.recipe}"

    @property
    def arch(self) -> str:
        """The GPU that has the recipe's products."""
        return "b200" if self.recipe.startswith(("mxfp8", "nvfp4")) else "h200"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found.

    Attributes:
        products: Of all steps; of the program as users get it, if that ran.
        kernels: Generated ones that were launched, likewise.
        from_graph: Each difference from the graph.
        from_eager: For each output, gradient and buffer that differs from eager mode, how many elements do.
    """

    products: int
    kernels: int
    from_graph: tuple[str, ...]
    from_eager: dict[str, int]


def check(case: Case, *, as_users_get_it: bool = True, with_casts: bool = True) -> Row:
    """Run a case as users get it, with precision casts beside eager mode, or both, each beside its graph."""
    torch.manual_seed(0)
    model, args = case.make(case.recipe)
    module = copy.deepcopy(model) if not case.in_ranks else case.make(case.recipe)[0]
    eager = copy.deepcopy(model) if not case.in_ranks else case.make(case.recipe)[0]
    differences: list[str] = []
    unlike: dict[str, int] = {}
    products = kernels = 0
    for _ in range(case.steps):
        if with_casts:
            run = run_gpu_program(model, *args, arch=case.arch, precision_casts=True)
            differences += [f"precision casts: {each}" for each in run.differences]
            expected = eager_run(eager, *args, arch=case.eager_as)
            for name, (one, other) in _pairs(run, expected, model, eager).items():
                if count := _unlike(one, other, is_exact=name not in case.rounded_once):
                    unlike[name] = unlike.get(name, 0) + count
        if as_users_get_it:
            run = run_gpu_program(module, *args, arch=case.arch, **dict(case.options))
            differences += map(str, run.differences)
        products += len(run.products)
        kernels += sum(len(graph.launches) for graph in run.graphs)
    return Row(products=products, kernels=kernels, from_graph=tuple(differences), from_eager=unlike)


def _unlike(one: torch.Tensor, other: torch.Tensor, *, is_exact: bool) -> int:
    """How many elements differ, or differ by more than two roundings of bfloat16."""
    if is_exact:
        return int((bits(one) != bits(other)).sum())
    return int(((one - other).abs().float() > 2**-7 * other.abs().max().float()).sum())


def _pairs(run, expected, model, eager) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Outputs, gradients and buffers of both."""
    assert run.gradients.keys() == expected.gradients.keys()
    outputs = {f"output {at}": pair for at, pair in enumerate(zip(run.outputs, expected.outputs, strict=True))}
    gradients = {name: (grad, expected.gradients[name]) for name, grad in run.gradients.items()}
    buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if isinstance(model, nn.Module):
        others = dict(eager.named_buffers())
        buffers = {name: (buffer, others[name]) for name, buffer in model.named_buffers()}
    pairs = outputs | gradients | buffers
    return {name: tuple(map(_plain, pair)) for name, pair in pairs.items()}


def _plain(tensor):
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------------------------- models


def _input(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype).requires_grad_()


def _recipe(name: str, **options: object) -> f8.Recipe:
    return f8.recipes.mxfp8(weight_block=(32, 32)) if name == SQUARES else f8.recipes.by_name(name, **options)


def feed_forward(
    recipe: str | f8.Recipe, *, size=(33, 72, 100), dtype=torch.bfloat16, options=(), **convert: object
) -> Made:
    """RMSNorm, SwiGLU, residual; sizes that are padded."""
    tokens, dim, hidden = size
    model = Mlp(dim, hidden, dtype=dtype)
    chosen = _recipe(recipe, **dict(options)) if isinstance(recipe, str) else recipe
    return f8.convert(model, chosen, filter="*", **convert), (_input(tokens, dim, dtype=dtype),)


class Attention(nn.Module):
    """Causal attention of two heads, a bias here and there, a frozen weight, a block behind it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        kind = {"dtype": torch.bfloat16}
        self.norm = nn.RMSNorm(dim, **kind)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, **kind), nn.Linear(dim, dim, bias=False, **kind)
        self.up, self.down = nn.Linear(dim, hidden, **kind), nn.Linear(hidden, dim, **kind)
        self.out.weight.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2)).float() * (dim // 2) ** -0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(x.dtype)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(gelu(self.up(x), approximate="tanh"))


def attention(recipe: str) -> Made:
    return f8.convert(Attention(64, 96), _recipe(recipe), filter="*"), (_input(2, 24, 64),)


def kept_codes(recipe: str, *, keep: bool) -> Made:
    return feed_forward(replace(_recipe(recipe), weight_lifetime="pass" if keep else "call"))


def not_finite(recipe: str) -> Made:
    """A NaN, an infinity, rows of zeros."""
    model, (x,) = feed_forward(recipe)
    with torch.no_grad():
        x[3, 5], x[20, 9], x[9] = torch.nan, torch.inf, 0
        model.up.weight[7] = 0
    return model, (x,)


def dynamic(recipe: str) -> Made:
    model, (x,) = feed_forward(recipe)
    torch._dynamo.mark_dynamic(x, 0)
    return model, (x,)


def experts(recipe: str, *, ends: tuple[int, ...]) -> Made:
    """Gate and up, SwiGLU, down of four experts; NaN behind the last one's rows."""
    # a GPU's grouped product takes e4m3 alone
    chosen = _recipe(recipe, grad_format="e4m3") if recipe == "tensorwise" else _recipe(recipe)
    arguments = [torch.randn(each.shape).bfloat16().requires_grad_() for each in experts_arguments(96, 64, 48, 4)[:4]]
    with torch.no_grad():
        arguments[0][ends[-1] :] = torch.nan
    return partial(experts_feed_forward, recipe=chosen), (*arguments, torch.tensor(ends, dtype=torch.int32))


def model_in_ranks(recipe: str, *, how: str) -> Made:
    """One rank's part of the block, under tensor and sequence parallel or FSDP in the graph."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, parallel

    mesh = DeviceMesh("cpu", torch.arange(2))
    model = Mlp(64, 128, dtype=torch.float32 if how == "fsdp" else torch.bfloat16)
    model = f8.convert(model, _recipe(recipe), filter="*")
    if how == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return _filled(f8.parallel.graph_fsdp(model, mesh, mp_policy=policy)), (_input(32, 64),)
    colwise = f8.parallel.ColwiseParallel(use_local_output=False)
    rowwise = f8.parallel.RowwiseParallel(output_layouts=Shard(1))  # its rank's tokens, as the residual has
    plan = {"norm": parallel.SequenceParallel(), "gate": colwise, "up": colwise, "down": rowwise}
    return _filled(parallel.parallelize_module(model, mesh, plan)), (_input(2, 16, 64),)


def _filled(model: nn.Module) -> nn.Module:
    """The same numbers each time: a group that isn't there sends no parameters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            local = _plain(parameter)
            local.copy_(torch.randn(local.shape, generator=generator) * 0.1)
    return model


def _model(make: Callable[..., Made], **options: object) -> Callable[[str], Made]:
    return partial(make, **options) if options else make


def _of_recipes(
    name: str,
    make: Callable[[str], Made],
    *,
    quick: tuple[str, ...] = (),
    recipes: tuple[str, ...] = RECIPES,
    **how: object,
) -> list[Case]:
    """A case for each recipe; those named quick are run each time."""
    return [Case(name=name, recipe=each, make=make, is_quick=each in quick, **how) for each in recipes]


def _of_dtype(dtype: torch.dtype, *, quick: str = "") -> list[Case]:
    """Scales of rows are applied after a product whose result isn't bfloat16."""
    name, make = str(dtype).removeprefix("torch."), _model(feed_forward, dtype=dtype)
    rows = ("rowwise", "rowwise_bf16_wgrad")
    others = tuple(each for each in RECIPES if each not in rows)
    return [
        *_of_recipes(name, make, quick=(quick,), recipes=others),
        *_of_recipes(name, make, quick=(quick,), recipes=rows, eager_as="h200"),
    ]


def _of_experts(name: str, make: Callable[[str], Made], *, quick: tuple[str, ...] = ()) -> list[Case]:
    """On 9.0, our grouped GEMM multiplies by both scales in float32; the CPU GEMM rounds once.

    Most results in bfloat16 are equal. In a group of one row, both FP8 values are +-448 and the result is the product
    of two bfloat16 values, which is often halfway between two others.
    """
    by_our_gemm = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise")
    others = tuple(each for each in GROUPED if each not in by_our_gemm)
    return [
        *_of_recipes(name, make, quick=quick, recipes=others),
        *_of_recipes(name, make, quick=quick, recipes=by_our_gemm, eager_as="h200"),
    ]


GROUPED = (
    *(each for each in RECIPES if each != "delayed"),
    "blockwise_bf16_wgrad",
    "nvfp4",
    SQUARES,
)  # delayed has one amax a tensor
EVERY_WAY = (("orders", ("backwards", "shuffled")), ("configurations", "all"))
STOCHASTIC = (("grad_rounding", "stochastic"),)
# delayed: exchanged on a group that is given
SCALED_BY_TENSOR = (*(each for each in RECIPES if each != "delayed"), SQUARES)

CASES = (
    *_of_recipes("feed-forward, odd sizes", feed_forward, quick=("mxfp8", "delayed")),
    *_of_recipes("feed-forward, odd sizes", feed_forward, quick=(SQUARES,), recipes=(SQUARES,)),
    *_of_recipes("feed-forward, 128 x 128 x 256", _model(feed_forward, size=(128, 128, 256))),
    *_of_recipes("attention, bias, frozen weight", attention, quick=("rowwise",)),
    *_of_recipes("quantized parameters", _model(feed_forward, weight_lifetime="parameter"), quick=("tensorwise",),
                 recipes=("tensorwise", "blockwise", SQUARES)),
    *_of_recipes("kept weight codes", _model(kept_codes, keep=True), recipes=("tensorwise", SQUARES)),
    *_of_recipes("freed weight codes", _model(kept_codes, keep=False), recipes=("delayed",)),
    *_of_recipes("three steps", feed_forward, recipes=("delayed",), steps=3),
    *_of_recipes("stochastic rounding", _model(feed_forward, options=STOCHASTIC), quick=("tensorwise",),
                 recipes=("tensorwise", "rowwise")),
    *_of_dtype(torch.float16),
    *_of_dtype(torch.float32, quick="rowwise"),
    *_of_recipes("NaN, infinity, zeros", not_finite, quick=("blockwise",)),
    *_of_recipes("dynamic tokens", dynamic, quick=("rowwise_bf16_wgrad",)),
    *_of_recipes("split reductions", _model(feed_forward, size=(4096, 32, 32)), recipes=("tensorwise", "rowwise")),
    *_of_recipes("long rows", _model(feed_forward, size=(16, 2048, 64)), recipes=("tensorwise", "rowwise")),
    *_of_recipes("all configurations and orders", feed_forward, recipes=("tensorwise", "blockwise"),
                 options=EVERY_WAY),
    *_of_experts("experts, even", _model(experts, ends=(24, 48, 72, 96))),
    *_of_experts("experts, empty ones, NaN behind", _model(experts, ends=(0, 50, 51, 80)),
                 quick=("rowwise", "mxfp8", SQUARES)),
    *_of_recipes("one rank of two, TP and SP", _model(model_in_ranks, how="tp"), quick=("blockwise",),
                 recipes=SCALED_BY_TENSOR, in_ranks=True),
    *_of_recipes("one rank of two, FSDP in the graph", _model(model_in_ranks, how="fsdp"), quick=("rowwise",),
                 in_ranks=True, recipes=(*RECIPES, SQUARES)),
)  # fmt: skip
