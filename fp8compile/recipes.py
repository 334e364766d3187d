"""Ready recipes, by name; keyword arguments for what may vary.

The three ways to give scales to the three GEMMs of a linear layer:

    tensorwise           one scale a tensor: the fastest GEMM; one outlier coarsens the whole tensor
    rowwise              one scale a row or column: keeps outliers apart; each direction is cast for itself
    rowwise_bf16_wgrad   as rowwise, with grad_weight in high precision: the safest, two of three GEMMs in FP8
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from fp8compile._compat import constant_when_traced
from fp8compile.quantizers import CurrentScaling, Quantizer, Recipe, entry_points

__all__ = ["Recipe", "by_name", "describe", "names", "of_quantizer", "rowwise", "rowwise_bf16_wgrad", "tensorwise"]

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


def of_quantizer(quantizer: Quantizer) -> Recipe:
    """One quantizer for all operands: as it is where it fits, with rows and columns exchanged where a GEMM needs that.

    Args:
        quantizer: Of x_MK and w_NK for the output, as ``Recipe`` has them.

    Raises:
        TypeError: It is none.
        ValueError: No GEMM multiplies such blocks; the message names those that one does.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"of_quantizer: quantizer is {quantizer!r}; it is a quantizer, such as fp8compile.CurrentScaling()."
        )
    turned = quantizer.transposed()
    return Recipe(
        input=quantizer,
        weight=quantizer,
        grad_output=quantizer,
        weight_for_grad_input=turned,
        grad_output_for_grad_weight=turned,
        input_for_grad_weight=turned,
    )


READY: dict[str, Callable[..., Recipe]] = {
    "tensorwise": tensorwise,
    "rowwise": rowwise,
    "rowwise_bf16_wgrad": rowwise_bf16_wgrad,
}


def names() -> tuple[str, ...]:
    """Names of the ready recipes. ``fp8compile.library.quantizers`` has what installed packages add to them."""
    return tuple(READY)


@constant_when_traced
def _no_such_recipe(name: object) -> str:
    known = [*READY, *entry_points.installed()]
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"no recipe is called {name!r}; there are {', '.join(known)}.{hint}"


@constant_when_traced
def _installed_recipe(name: str, arguments: dict[str, object]) -> Recipe:
    if arguments:
        raise TypeError(
            f"by_name: {name!r} is of an installed package and takes no arguments, given are {', '.join(arguments)}. "
            "Make it with that package's own functions."
        )
    value = entry_points.load(name)
    return value if isinstance(value, Recipe) else of_quantizer(value)


def by_name(name: str, **arguments: object) -> Recipe:
    """A recipe by its name: a ready one, or what an installed package offers (see ``fp8compile.library``).

    Args:
        name: The name.
        arguments: As the ready recipe's function takes them; none for one of a package.

    Raises:
        ValueError: No such recipe; the message names the closest.
        ImportError: The package that offers it fails; the message names it.
        TypeError: The package offers something else, or arguments are given that it can't take.
    """
    if isinstance(name, str) and name in READY:
        return READY[name](**arguments)
    if isinstance(name, str) and name in entry_points.installed():
        return _installed_recipe(name, arguments)
    raise ValueError(_no_such_recipe(name))


def describe(recipe: Recipe) -> str:
    """The name of a ready recipe with its default arguments, ``"custom"`` for any other."""
    return next((name for name, make in READY.items() if make() == recipe), "custom")
