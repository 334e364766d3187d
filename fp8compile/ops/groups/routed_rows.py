"""fp8compile::routed_rows: copy each token once for each of its experts, in rows sorted by expert.

``order``, (R,), has the index of each row's (token, expert) pair; ``places`` is the inverse permutation. The gradient
sums each token's rows in a fixed order. PyTorch's gradient of ``x[order // top_k]`` could add them in any order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Recipe

__all__ = ["routed_rows"]


def _times(pairs: int, tokens: int) -> int:
    """Return the number of experts for each token."""
    return pairs // tokens if tokens else 1


def _kernel(x: Tensor, order: Tensor, places: Tensor, recipe: Recipe) -> Tensor:
    return x[order // _times(order.shape[0], x.shape[0])]


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Recipe], output: Tensor) -> None:
    x, _, places, _ = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(places)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (places,) = ctx.saved_tensors
    of_tokens = grad[places]
    if (times := _times(places.shape[0], ctx.tokens)) > 1:
        of_tokens = of_tokens.view(ctx.tokens, times, *grad.shape[1:]).sum(dim=1)
    return of_tokens, None, None, None


routed_rows: OpOverload = register_op(
    "fp8compile::routed_rows",
    _kernel,
    fake=lambda x, order, places, recipe: x.new_empty((order.shape[0], *x.shape[1:])),
    setup_context=_setup_context,
    backward=_backward,
    decompose=_kernel,
    sharding=None,
)
