"""Ready recipes, by name; keyword arguments for what may vary.

The three ways to give scales to the three GEMMs of a linear layer:

    tensorwise           one scale a tensor: the fastest GEMM; one outlier coarsens the whole tensor
    rowwise              one scale a row or column: keeps outliers apart; each direction is cast for itself
    rowwise_bf16_wgrad   as rowwise, with grad_weight in high precision: the safest, two of three GEMMs in FP8
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from fp8compile.quantizers import CurrentScaling, Recipe

__all__ = ["Recipe", "by_name", "describe", "names", "rowwise", "rowwise_bf16_wgrad", "tensorwise"]

TENSOR, ROW, COLUMN = (-1, -1), (1, -1), (-1, 1)


def tensorwise(*, format: str = "e4m3", grad_format: str = "e5m2", scale: str = "fp32", eps: float = 0.0) -> Recipe:
    """One scale a tensor, all three GEMMs in FP8.

    Args:
        format: Of inputs and weights.
        grad_format: Of gradients, whose range is wider.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Floor under the amax.

    Source: Micikevicius et al. 2022, arXiv:2209.05433: e4m3 forward, e5m2 for gradients.
    """
    value = CurrentScaling(format=format, block=TENSOR, scale=scale, eps=eps)
    grad = CurrentScaling(format=grad_format, block=TENSOR, scale=scale, eps=eps)
    return Recipe(
        input=value,
        weight=value,
        grad_output=grad,
        weight_for_grad_input=value,
        grad_output_for_grad_weight=grad,
        input_for_grad_weight=value,
    )


def rowwise(*, format: str = "e4m3", grad_format: str = "e4m3", scale: str = "fp32", eps: float = 0.0) -> Recipe:
    """One scale a row of the left and a column of the right operand of each GEMM, all three in FP8.

    Args:
        format: Of inputs and weights.
        grad_format: Of gradients; with a scale a row, e4m3 has range enough.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Floor under the amax.
    """

    def quantizer(format: str, block: tuple[int, int]) -> CurrentScaling:
        return CurrentScaling(format=format, block=block, scale=scale, eps=eps)

    return Recipe(
        input=quantizer(format, ROW),
        weight=quantizer(format, ROW),
        grad_output=quantizer(grad_format, ROW),
        weight_for_grad_input=quantizer(format, COLUMN),
        grad_output_for_grad_weight=quantizer(grad_format, COLUMN),
        input_for_grad_weight=quantizer(format, COLUMN),
    )


def rowwise_bf16_wgrad(
    *, format: str = "e4m3", grad_format: str = "e4m3", scale: str = "fp32", eps: float = 0.0
) -> Recipe:
    """As ``rowwise`` for output and grad_input; grad_weight stays in the dtype of its operands.

    Args:
        format: Of inputs and weights.
        grad_format: Of gradients.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Floor under the amax.
    """
    full = rowwise(format=format, grad_format=grad_format, scale=scale, eps=eps)
    return Recipe(
        input=full.input,
        weight=full.weight,
        grad_output=full.grad_output,
        weight_for_grad_input=full.weight_for_grad_input,
    )


READY: dict[str, Callable[..., Recipe]] = {
    "tensorwise": tensorwise,
    "rowwise": rowwise,
    "rowwise_bf16_wgrad": rowwise_bf16_wgrad,
}


def names() -> tuple[str, ...]:
    """Names that ``by_name`` knows."""
    return tuple(READY)


def by_name(name: str, **arguments: object) -> Recipe:
    """A ready recipe by its name; keyword arguments as its function takes them.

    Raises:
        ValueError: No such recipe; the message names the closest.
    """
    if not isinstance(name, str) or name not in READY:
        close = difflib.get_close_matches(str(name), READY, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no recipe is called {name!r}; there are {', '.join(READY)}.{hint}")
    return READY[name](**arguments)


def describe(recipe: Recipe) -> str:
    """The name of a ready recipe with its default arguments, ``"custom"`` for any other."""
    return next((name for name, make in READY.items() if make() == recipe), "custom")
