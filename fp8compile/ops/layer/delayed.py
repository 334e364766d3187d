"""fp8compile::delayed_linear: fp8compile::linear for recipes with delayed scaling, which is given its state.

    state          amax_history (3, L), multiplier (3,): a row each for input, weight, grad_output
    forward        y, the multipliers that it used, amaxes of x and w
    backward       gradients, by those multipliers;  state <- next state(state, amaxes of x, w and dy)

The state is updated by the backward, once for each: where none runs (evaluation, no_grad) it stays, and activation
checkpointing, which runs the forward twice, updates it once. What the forward used are outputs of it, because another
backward may have updated the state by the time that its own runs. A tensor without delayed scaling keeps its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.ops import samples
from fp8compile.ops.amax import amax
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.inductor_hints import after, snapshot
from fp8compile.ops.layer.linear import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    for_gradients_of,
    grad_input_fake,
    grad_input_sharding,
    grad_weight_fake,
    grad_weight_sharding,
    layer_grad_input,
    layer_grad_weight,
    layer_output,
    outer_cuts,
    sample_grad,
    sum_of_tokens,
)
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.sharding import Cut, Split
from fp8compile.quantizers import TENSORS, CurrentScaling, DelayedScaling, Recipe
from fp8compile.quantizers.delayed_scaling import next_state

__all__ = [
    "ROW_OF_WEIGHT",
    "check_state",
    "delayed_grad_input",
    "delayed_grad_weight",
    "delayed_linear",
    "delayed_output",
    "kept_amax",
    "update_state",
]

ROW_OF_WEIGHT = 1


def amax_of(tensor: Tensor, quantizer: DelayedScaling | None) -> Tensor:
    """The amax, () float32; 0 for a tensor without delayed scaling, which leaves its row as it is."""
    if quantizer is None:
        return tensor.new_zeros((), dtype=torch.float32)
    return amax(tensor, quantizer).view(())


def kept_amax(history: Tensor) -> Tensor:
    """The amax, () float32, of what the codes of a weight were made of, which a parameter that is codes puts there."""
    return snapshot(history[ROW_OF_WEIGHT, 0])


def next_layer_state(history: Tensor, multiplier: Tensor, amaxes: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The layer's state after one more backward, from that before and three amaxes."""
    quantizers = recipe.delayed()
    rooms = [1.0 if quantizer is None else quantizer.room() for quantizer in quantizers]
    room = torch.stack([torch.full((), each, dtype=torch.float64, device=amaxes.device) for each in rooms])
    algorithm = next(quantizer.algorithm for quantizer in quantizers if quantizer is not None)
    updated, next_multiplier = next_state(history, multiplier, amaxes, room, algorithm)
    # PyTorch's partitioner would write the history first where nothing here depends on the backward's gradient, and
    # make the multiplier of what was written
    return after(updated, next_multiplier), next_multiplier


# ---------------------------------------------------------------------------------- gradients


def _grad_input(phase: Phase, grad_output: Tensor, weight: Tensor, multiplier: Tensor, recipe: Recipe) -> Tensor:
    return layer_grad_input(grad_output, weight, Operands(recipe, phase, multiplier))


def _grad_input_samples() -> Iterator[tuple]:
    for x, weight, _, _, multiplier, _, recipe in delayed_samples():
        yield sample_grad(x, weight), weight, multiplier, recipe


delayed_grad_input = register_product(
    "delayed_grad_input",
    GRAD_INPUT,
    _grad_input,
    fake=grad_input_fake,
    sharding=grad_input_sharding,
    samples=_grad_input_samples,
)


def _grad_weight(phase: Phase, grad_output: Tensor, x: Tensor, multiplier: Tensor, recipe: Recipe) -> Tensor:
    return layer_grad_weight(grad_output, x, Operands(recipe, phase, multiplier))


def _grad_weight_samples() -> Iterator[tuple]:
    for x, weight, _, _, multiplier, _, recipe in delayed_samples():
        yield sample_grad(x, weight), x, multiplier, recipe


delayed_grad_weight = register_product(
    "delayed_grad_weight",
    GRAD_WEIGHT,
    _grad_weight,
    fake=grad_weight_fake,
    sharding=grad_weight_sharding,
    samples=_grad_weight_samples,
)

# ---------------------------------------------------------------------------------- the layer


def check_state(x: Tensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> None:
    """Raise if the state is not of this recipe; in the words of `fp8compile.linear`, whose argument it is."""
    if _compat.is_stand_in(recipe):
        return
    rows, length = len(TENSORS), recipe.history()
    if not length:
        raise ValueError("linear: state is given and the recipe has no delayed scaling. Leave it out.")
    for name, tensor, shape in (("amax_history", amax_history, (rows, length)), ("multiplier", multiplier, (rows,))):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device != x.device:
            raise ValueError(
                f"linear: {name} of the state is {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}; for this "
                f"recipe and x it is {shape}, torch.float32, on {x.device}. Make it by "
                "fp8compile.DelayedState.initial(recipe, device=...)."
            )


def delayed_output(
    x: Tensor, weight: Tensor, bias: Tensor | None, amax_history: Tensor, multiplier: Tensor, operands: Operands
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, the multipliers that it used, and the amaxes of input and weight.

    Args:
        x: The input.
        weight: Of the layer, plain or codes, which ``operands`` then have.
        bias: Of the layer, or None.
        amax_history: Of the state.
        multiplier: Of the state.
        operands: Without multipliers yet.
    """
    recipe, is_codes = operands.recipe, operands.weight is not None
    check_state(x, amax_history, multiplier, recipe)
    used = snapshot(multiplier)
    of_input, of_weight, _ = recipe.delayed()
    is_kept = is_codes and of_weight is not None
    amax_of_weight = kept_amax(amax_history) if is_kept else amax_of(x if is_codes else weight, of_weight)
    amaxes = amax_of(x, of_input), amax_of_weight
    operands = replace(operands, multiplier=used, waits_for=amaxes if operands.phase is Phase.FORWARD else ())
    return layer_output(x, weight, bias, operands), used, *amaxes


def _delayed_linear(
    phase: Phase,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    amax_history: Tensor,
    multiplier: Tensor,
    group: str | None,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return delayed_output(x, weight, bias, amax_history, multiplier, Operands(recipe, phase))


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    amax_history: Tensor,
    multiplier: Tensor,
    group: str | None,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_state(x, amax_history, multiplier, recipe)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, torch.empty_like(multiplier), multiplier.new_empty(()), multiplier.new_empty(())


def _sharding(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    amax_history: Tensor,
    multiplier: Tensor,
    group: str | None,
    recipe: Recipe,
) -> list[Split]:
    """As the plain layer's; the amax of a tensor that is cut is the largest of its parts."""
    rows = outer_cuts(x.shape, recipe.input, range(x.ndim - 1))
    columns = outer_cuts(weight.shape, recipe.weight, [0])
    rest = (None,) * 4
    return [
        *(Split((cut, None, None, *rest), (cut.dim, None, "max", None), exact=False) for cut in rows),
        *(
            Split((None, cut, None if bias is None else Cut(0, cut.unit), *rest), (-1, None, None, "max"), exact=False)
            for cut in columns
        ),
    ]


def keep_used(ctx: Any) -> None:
    """What a layer's backward has to find as its forward left it: ``ctx`` has ``multiplier``, ``used``, ``amaxes``."""
    ctx.mark_non_differentiable(ctx.used, *ctx.amaxes)
    ctx.set_materialize_grads(False)
    inductor.never_recompute(ctx.used)
    ctx.version = _compat.version_in_eager(_compat.replicated(ctx.multiplier))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight, _, ctx.amax_history, ctx.multiplier, ctx.group, ctx.recipe = inputs
    _, ctx.used, *ctx.amaxes = output
    ctx.placements = _compat.placement_of(x)
    keep_used(ctx)
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # checkpointing gives what is saved from the forward that it repeats, what is set on ctx from the first
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, ctx.used)


def check_repeated_forward(ctx: Any, repeated: Tensor) -> None:
    """Raise if checkpointing repeated the forward by other multipliers than those of the first."""
    now = _compat.version_in_eager(_compat.replicated(ctx.multiplier))
    if ctx.version == now or torch.equal(*map(_compat.replicated, (repeated, ctx.used))):
        return
    raise RuntimeError(
        "Linear: activation checkpointing repeated this layer's forward by other scales, because "
        "a backward updated its state in between: the layer is called twice in a step, or several forwards ran before "
        "their backwards. Run torch.compile on the model with the checkpointing inside, which keeps the scales, or "
        "let a policy of selective checkpointing keep fp8compile.ops.GEMM_OPS."
    )


@torch.no_grad()
def update_state(state: Sequence[Tensor], amaxes: Tensor, recipe: Recipe, *, ran: Tensor | None = None) -> None:
    """Make a layer's state, its history and multiplier, the next one, in place.

    Args:
        state: The two tensors.
        amaxes: Of input, weight and grad_output, (3,) float32, over all ranks that share the state.
        recipe: Of the layer.
        ran: If it is given, and 0, the state stays: the backward has not run.

    Raises:
        RuntimeError: A transform of torch.func runs this backward, and the state is none of its function's arguments.
    """
    updated = next_layer_state(*state, amaxes, recipe)
    if ran is not None:
        updated = [torch.where(ran > 0, new, old) for old, new in zip(state, updated, strict=True)]
    try:
        for old, new in zip(state, updated, strict=True):
            old.copy_(new)
    except RuntimeError as error:
        if not torch._C._are_functorch_transforms_active():
            raise
        raise RuntimeError(
            "linear: a backward writes to the state of delayed scaling, and torch.func (grad, vjp, jacrev, vmap) lets "
            "nothing write to a tensor that its function was not given. Call backward() or torch.autograd.grad, or "
            "convert by a recipe without a state, such as fp8compile.recipes.tensorwise(). For torch.func.grad alone, "
            "make the buffers amax_history and multiplier arguments of the function too (functional_call)."
        ) from error


def _update_state_of(ctx: Any, grad_output: Tensor) -> None:
    # of a layer that is spread over ranks, all of them have the same state, and update their own
    state = [_compat.replicated(each) for each in (ctx.amax_history, ctx.multiplier)]
    amaxes = [*ctx.amaxes, amax_of(grad_output, ctx.recipe.delayed()[2])]
    amaxes = torch.stack([_compat.replicated(each) for each in amaxes])
    if ctx.group is not None:
        amaxes = all_reduce_amax(amaxes, ctx.group)
    update_state(state, amaxes, ctx.recipe)


def _backward(ctx: Any, grad_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, weight, repeated = ctx.saved_tensors
    check_repeated_forward(ctx, repeated)
    _update_state_of(ctx, grad_output)
    recipe = for_gradients_of(ctx.recipe, x=weight is not None, weight=x is not None)
    grad_x = None if weight is None else delayed_grad_input(grad_output, weight, ctx.used, recipe)
    return (
        _compat.scattered_like(grad_x, ctx.placements),
        None if x is None else delayed_grad_weight(grad_output, x, ctx.used, recipe),
        sum_of_tokens(grad_output) if ctx.needs_input_grad[2] else None,
        None,
        None,
        None,
        None,
    )


def _recipes() -> Iterator[Recipe]:
    """Delayed scaling everywhere, with grad_weight in high precision, and beside current scaling."""
    value, grad = DelayedScaling(history=4), DelayedScaling(format="e5m2", history=4, margin=1)
    own = CurrentScaling()
    every = {"input": value, "weight": value, "grad_output": grad, "weight_for_grad_input": value}
    yield Recipe(**every, grad_output_for_grad_weight=grad, input_for_grad_weight=value)
    yield Recipe(**every)
    yield Recipe(input=value, weight=own, grad_output=own, weight_for_grad_input=own)


def delayed_samples() -> Iterator[tuple]:
    """Arguments of the op, for tests of it and of its likes."""
    generator = torch.Generator().manual_seed(0)
    for x in samples.matrices():
        for recipe in _recipes():
            weight = torch.randn(40, x.shape[-1], generator=generator).to(x.dtype)
            state = torch.rand(3, 4, generator=generator), torch.tensor([100.0, 150.0, 1000.0])
            yield x, weight, torch.ones(40, dtype=x.dtype), *state, None, recipe
    yield x, weight, None, *state, None, recipe


delayed_linear = register_product(
    "delayed_linear",
    OUTPUT,
    _delayed_linear,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    sharding=_sharding,
    samples=delayed_samples,
    updates=("amax_history", "multiplier"),
)
