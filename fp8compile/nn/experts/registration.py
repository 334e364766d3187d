"""Register other libraries' modules with convert: experts, and linears that are not a ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fp8compile.nn.experts.known_modules import add_spec
from fp8compile.nn.experts.linear_like import linear_spec
from fp8compile.nn.experts.module_spec import Layout, ModuleSpec, inherits

__all__ = ["register_experts", "register_linear_like"]


def _check(function: str, cls: object, method: str) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"{function}: expected a subclass of torch.nn.Module, got {cls!r}.")
    if issubclass(cls, nn.Linear):
        raise TypeError(
            f"{function}: {cls.__name__} is a nn.Linear, which convert already supports. Omit this registration."
        )
    if getattr(cls, method, None) in (None, getattr(nn.Module, method, None)):
        raise TypeError(
            f"{function}: {cls.__name__} has no method {method}. Pass the name of the method that computes the output."
        )


def register_linear_like(cls: type[nn.Module], *, is_transposed: bool = False) -> type[nn.Module]:
    """Make ``fp8compile.convert`` support a linear class that is not an ``nn.Linear``.

    The forward of the class must compute only ``x @ weight.T + bias``, for x with any leading dims. Its parameters
    must be named ``weight`` and ``bias``; the bias may be missing or None. Subclasses that inherit the forward are
    also converted. The Conv1D of transformers is already registered.

    Args:
        cls: The class.
        is_transposed: Whether ``weight`` is (in_features, out_features), and the forward ``x @ weight + bias``.

    Returns:
        The class, so this can be used as a decorator.

    Raises:
        TypeError: ``cls`` is not a module class, is an ``nn.Linear``, or does not have a forward.
    """
    _check("register_linear_like", cls, "forward")
    add_spec(linear_spec(lambda other: inherits(other, cls, "forward"), is_transposed=is_transposed))
    return cls


def register_experts(
    cls: type[nn.Module],
    *,
    method: str,
    replacement: Callable[..., Any],
    is_transposed: bool = False,
    layout: Callable[[nn.Module], Layout] | None = None,
) -> type[nn.Module]:
    """Make ``fp8compile.convert`` support a class of experts modules.

    The class of a converted module is replaced with a subclass in which ``replacement`` replaces ``method``.
    Subclasses that inherit the method are also converted.

    FP8 all-gather and ``weight_lifetime="parameter"`` are supported under two conditions: the weights are the module's
    own 3-D parameters, (experts, out_features, in_features), and ``replacement`` uses the weights only in GEMMs.

    Args:
        cls: The class.
        method: The name of the method that multiplies.
        replacement: The method in FP8, called with ``self`` and the arguments of ``method``. It multiplies with
            ``fp8compile.grouped_linear(..., recipe=self.recipe)`` or ``fp8compile.grouped_mm``.
        is_transposed: Whether each matrix is stored as (in_features, out_features).
        layout: Returns the matrices that a module multiplies by, if they are not its own 3-D parameters but, for
            example, the rows of one 2-D parameter. Such weights are all-gathered in high precision, and can't become
            FP8 parameters.

    Returns:
        The class.

    Raises:
        TypeError: ``cls`` is not a module class, is an ``nn.Linear``, or does not have a method named ``method``, or
            ``replacement`` is not callable.
    """
    _check("register_experts", cls, method)
    if not callable(replacement):
        raise TypeError(
            f"register_experts: `replacement` is {replacement!r}; it must be a function, the FP8 version of the "
            "method."
        )
    spec = ModuleSpec(
        takes=lambda other: inherits(other, cls, method),
        method=method,
        replacement=replacement,
        is_transposed=lambda module: is_transposed,
        layout=layout,
    )
    add_spec(spec)
    return cls
