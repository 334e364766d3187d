"""Ops that collect statistics of the operands of a layer's GEMMs, beside the layer's own ops.

    y = linear(x, weight, bias, ...)                                  the layer's op, unchanged
    y, totals = observe(y, x, weight, ...)                            y again; totals of input and weight
        its backward: observe_gradient(grad_output, x, weight, ...)   totals of grad_output and of the codes made in
                                                                      the backward; then adds all totals to buffers

In a graph, these ops ask for the codes that the GEMMs read; equal nodes are merged, and counting fuses with the cast.
Of forward and backward, the one that casts also counts; the other would read the tensor again. In eager mode, codes
are made a second time. The backward writes the buffers once, even if checkpointing repeats the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import inductor
from fp8compile._compat import OpOverload, is_traced
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.monitor.add_pieces import FIRST_SUMS, Pieces, rows_of
from fp8compile.monitor.definitions import columns_of
from fp8compile.monitor.execution_order import OBSERVE_OPS, note_call
from fp8compile.monitor.pieces import FOR_GRADIENTS, Seen, counted
from fp8compile.ops.groups.group_cast import group_cast
from fp8compile.ops.inductor_hints import after
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_args import LayerArgs, part_of_tokens
from fp8compile.ops.layer.layer_ops import register_layer_op
from fp8compile.ops.layer.layer_sharding import LayerSharding
from fp8compile.ops.layer.operands import GRAD_INPUT, OUTPUT, Phase
from fp8compile.quantizers import TENSORS, Recipe
from fp8compile.quantizers.recipe import ROLES

__all__ = ["Observer", "beside_output", "is_here", "observe", "observe_gradient", "totals_of_op"]

FORWARD_ROLES = (*TENSORS["input"], *TENSORS["weight"])


class Observer(NamedTuple):
    """The buffers that accumulate the totals of one layer's operands; a role is a field of the recipe.

    Attributes:
        sums: (roles, sums, E) float64, with `FIRST_SUMS` before the totals that are sums; E is the number of matrices
            or groups.
        maxima: (roles, maxima, E) float32.
        totals: Names of the totals, such as ``"amax,underflow"`` (`totals_of`).
        first: Index of this rank's first matrix among the E matrices.
        recipe: The recipe whose quantizers are observed; None for the layer's recipe.
    """

    sums: Tensor
    maxima: Tensor
    totals: str
    first: int = 0
    recipe: Recipe | None = None

    @classmethod
    def empty(cls, totals: str, matrices: int, device: torch.device, recipe: Recipe | None = None) -> Observer:
        """Make buffers for totals before anything is observed: sums are 0, maxima are -inf.

        ``totals`` has names, such as ``"amax,underflow"`` (`totals_of`); ``matrices`` is the number of matrices or
        groups. ``recipe`` is the recipe to observe; None for the layer's recipe.
        """
        sums, maxima = columns_of(totals)
        shape = len(ROLES), len(FIRST_SUMS) + len(sums), matrices
        return cls(
            torch.zeros(shape, dtype=torch.float64, device=device),
            torch.full((len(ROLES), len(maxima), matrices), -torch.inf, device=device),
            totals,
            recipe=recipe,
        )

    def placed(self, first: int) -> Observer:
        """Return a copy with the same buffers, for a rank whose first matrix has the index ``first``."""
        return self._replace(first=first)

    def observe(
        self,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        offs: Tensor | None,
        known: Sequence[Tensor | None],
        sizes: Sequence[int],
        sharding: LayerSharding,
        recipe: Recipe,
    ) -> Tensor:
        """Add statistics of one call of a layer in its backward; see `fp8compile.ops.layer.observer.Observer`."""
        tensors = y, x.detach(), weight.detach(), self.sums, self.maxima
        constants = self.first, torch.compiler.is_compiling(), self.totals
        recipe = recipe if self.recipe is None else self.recipe
        return observe(*tensors, *constants, offs, known, sizes, sharding, recipe)[0]

    def note_call(self) -> None:
        """Note in all `ExecutionOrder` objects that the layer runs now."""
        note_call(self.sums)

    def reset(self) -> None:
        """Reset sums to 0 and maxima to -inf, in place."""
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)


# ---------------------------------------------------------------------------------- ops


def is_here(role: str, found: Quantized | None, *, gradient: bool, later: bool) -> bool:
    """Whether an op, and not the layer's other op that observes, counts the codes of a field of the recipe.

    Args:
        role: The field, such as ``"weight"``.
        found: Codes of the field; None if they are not made yet.
        gradient: Whether this is the backward's op.
        later: Whether the backward counts the codes that it makes of input and weight.
    """
    if role not in FOR_GRADIENTS:
        return gradient is (role not in FORWARD_ROLES)
    if found is None:
        return later or not gradient
    if not later or not is_traced(found.codes):
        return gradient is later
    return gradient is (inductor.is_fusible(found.codes) or _is_made_in_backward(found.codes))


def _is_made_in_backward(codes: Tensor) -> bool:
    return inductor.is_left_in_backward(codes) or inductor.is_result_of(codes, (group_cast,))


def observed(
    phase: Phase,
    tensors: Sequence[Any],
    args: LayerArgs,
    totals: str,
    *,
    gradient: bool,
    later: bool,
    weight: Seen | None = None,
) -> Any:
    """Compute the results of an op that observes.

    Args:
        phase: Whether the op runs in eager mode, or in which kind of graph.
        tensors: Output or grad_output, and input and weight, or None.
        args: The arguments of the layer.
        totals: Names of the totals.
        gradient: Whether this is the backward's op.
        later: Whether the backward counts the codes that it makes of input and weight.
        weight: The weight, if it is kept as codes.
    """
    first, x, values = tensors
    operands, sharding = args.operands(phase), args.sharding
    tokens = first if gradient else x
    layouts = args.sharding.layouts(tokens.ndim, args.sizes, args.offs)
    seen: dict[str, Seen] = {}
    if gradient:
        seen["grad_output"] = Seen(part_of_tokens(tokens, layouts.output), sharding.counts(layouts.output))
    if x is not None:
        seen["input"] = Seen(part_of_tokens(x, layouts.input), sharding.counts(layouts.input))
    if weight is None and values is not None:
        weight = Seen(Plain(sharding.cast(values, tokens.dtype), layouts.weight), sharding.counts(layouts.weight))
    here = partial(is_here, gradient=gradient, later=later)
    found = counted(seen, operands, totals, here)
    if weight is not None:
        found |= counted({"weight": weight}, operands, totals, here, sharding.first_matrix(args.offs))
    rows = totals_of_op(args.offs, totals, first, found, gradient=gradient)
    return rows if gradient else beside_output(first, rows, args.offs, phase)


def totals_of_op(
    offs: Tensor | None, totals: str, like: Tensor, found: Mapping[str, Pieces | None], *, gradient: bool
) -> Tensor:
    """Combine partial counts, ``found`` by field, to totals on the device of ``like``."""
    sums, maxima = columns_of(totals)
    roles, matrices = ROLES if gradient else FORWARD_ROLES, 1 if offs is None else offs.shape[0]
    return rows_of(found, roles, (len(sums), len(maxima)), matrices, like)


def beside_output(y: Tensor, rows: Tensor, offs: Tensor | None, phase: Phase) -> tuple[Tensor, Tensor]:
    """Return what the forward's op returns: the layer's output and the totals."""
    if phase is Phase.EAGER:
        return y.clone(), rows
    # Only the backward reads the totals. Unless the forward needs them, the partitioner computes them there. With
    # groups y is a product whose last rows are masked, which the backward does better again than to read it.
    with nullcontext() if offs is None else inductor.recomputed():
        return after(y, rows), rows


# ---------------------------------------------------------------------------------- the backward's op


def _of_gradient(
    phase: Phase,
    grad_output: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    first: int,
    later: bool,
    totals: str,
    args: LayerArgs,
    /,
    seen: Seen | None = None,
) -> Tensor:
    tensors = grad_output, x, weight
    return observed(phase, tensors, args, totals, gradient=True, later=later, weight=seen)


def _empty_gradient(
    grad_output: Tensor, x: Any, weight: Any, first: int, later: bool, totals: str, offs: Tensor | None, *_: Any
) -> Tensor:
    return totals_of_op(offs, totals, grad_output, {}, gradient=True)


observe_gradient: OpOverload = register_layer_op(
    "observe_gradient", GRAD_INPUT, _of_gradient, fake=_empty_gradient, backward=None
)

# ---------------------------------------------------------------------------------- the forward's op


def _of_output(
    phase: Phase,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    sums: Tensor,
    maxima: Tensor,
    first: int,
    later: bool,
    totals: str,
    args: LayerArgs,
    /,
    seen: Seen | None = None,
) -> tuple[Tensor, Tensor]:
    return observed(phase, (y, x, weight), args, totals, gradient=False, later=later, weight=seen)


def _empty(y: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, totals, offs, _, _, _, _ = others
    return torch.empty_like(y), totals_of_op(offs, totals, y, {}, gradient=False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, x, weight, *buffers, first, later, totals, offs, known, sizes, sharding, recipe = inputs
    _, rows = output
    ctx.buffers, ctx.constants, ctx.args = buffers, (first, later, totals), (sizes, sharding, recipe)
    ctx.mark_non_differentiable(rows)
    ctx.set_materialize_grads(False)
    inductor.never_recompute(rows)
    own = (x, weight) if later else (None, None)
    ctx.save_for_backward(rows, *own, offs, *Known.last_set(known))


def _largest(of_forward: Tensor, of_backward: Tensor, place: Sequence[int]) -> Tensor:
    placed = (pad(of_forward, place, value=-torch.inf), pad(of_backward, place[:2], value=-torch.inf))
    return torch.maximum(*placed)


@torch.no_grad()
def _backward(ctx: Any, grad_output: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    others = (None,) * 12
    rows, x, weight, offs, *known = ctx.saved_tensors
    if grad_output is None or rows is None:
        return None, *others
    found = observe_gradient(grad_output, x, weight, *ctx.constants, offs, known, *ctx.args)
    first, *_ = ctx.constants
    own_sums, own_maxima = ctx.buffers
    behind, columns = own_sums.shape[-1] - first - rows.shape[-1], own_sums.shape[1]
    within = first, behind, 0, 0, 0, len(ROLES) - len(FORWARD_ROLES)  # of the forward's rows in the buffer
    sums = pad(rows[:, :columns], within) + pad(found[:, :columns], within[:2])
    own_sums.copy_(own_sums + sums)
    own_maxima.copy_(torch.maximum(own_maxima, _largest(rows[:, columns:], found[:, columns:], within).float()))
    return grad_output, *others


observe: OpOverload = register_layer_op(
    "observe",
    OUTPUT,
    _of_output,
    fake=_empty,
    setup_context=_setup_context,
    backward=_backward,
    updates=("sums", "maxima"),
)
OBSERVE_OPS[observe] = 3
