"""Register other libraries' modules with convert: experts, and linears that are not a ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fp8compile.nn.experts.host import Host, Layout, inherits
from fp8compile.nn.experts.known_modules import add_host
from fp8compile.nn.experts.linear_like import linear_host

__all__ = ["register_experts", "register_linear_like"]


def _check(function: str, cls: object, method: str) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"{function}: given {cls!r}; it takes a class of modules.")
    if issubclass(cls, nn.Linear):
        raise TypeError(f"{function}: {cls.__name__} is a nn.Linear, which convert takes as it is.")
    if getattr(cls, method, None) in (None, getattr(nn.Module, method, None)):
        raise TypeError(f"{function}: {cls.__name__} has no method {method} that multiplies. Name the one that does.")


def register_linear_like(cls: type[nn.Module], *, is_transposed: bool = False) -> type[nn.Module]:
    """Make ``fp8compile.convert`` take modules of a linear class that is not a ``nn.Linear``.

    The forward of the class computes ``x @ weight.T + bias`` for x with any leading dims, and does nothing else. Its
    parameters are named ``weight`` and ``bias``; the bias may be missing or None. Subclasses that inherit the forward
    are converted too. The Conv1D of transformers is registered already.

    Args:
        cls: The class.
        is_transposed: Whether ``weight`` is (in_features, out_features), and the forward ``x @ weight + bias``.

    Returns:
        The class, so that this can be used as a decorator.

    Raises:
        TypeError: ``cls`` is not a class of modules, is a ``nn.Linear``, or has no forward.
    """
    _check("register_linear_like", cls, "forward")
    add_host(linear_host(lambda other: inherits(other, cls, "forward"), is_transposed=is_transposed))
    return cls


def register_experts(
    cls: type[nn.Module],
    *,
    method: str,
    replacement: Callable[..., Any],
    is_transposed: bool = False,
    layout: Callable[[nn.Module], Layout] | None = None,
) -> type[nn.Module]:
    """Make ``fp8compile.convert`` take the modules of a class that holds experts.

    A converted module gets a subclass of its class, in which ``replacement`` replaces ``method``. Subclasses that
    inherit the method are converted too.

    FSDP can gather codes, and ``quantized_parameters=True`` can replace the weights by codes, on two conditions: the
    weights are the module's own 3-D parameters, (experts, out_features, in_features), and ``replacement`` uses the
    weights only in products.

    Args:
        cls: The class.
        method: The name of the method that multiplies.
        replacement: The method in FP8, called with ``self`` and the arguments of ``method``. It multiplies with
            ``fp8compile.grouped_linear(..., recipe=self.recipe)`` or ``fp8compile.grouped_mm``.
        is_transposed: Whether each matrix is kept as (in_features, out_features).
        layout: Returns the matrices that a module multiplies by, if they are not its own 3-D parameters but, for
            example, the rows of one 2-D parameter. FSDP gathers weights of this kind unquantized, and convert can't
            keep them as codes.

    Returns:
        The class.

    Raises:
        TypeError: ``cls`` is not a class of modules, is a ``nn.Linear``, or has no method named ``method``, or
            ``replacement`` is not callable.
    """
    _check("register_experts", cls, method)
    if not callable(replacement):
        raise TypeError(f"register_experts: replacement is {replacement!r}; it is the method in FP8, a function.")
    host = Host(
        takes=lambda other: inherits(other, cls, method),
        method=method,
        replacement=replacement,
        is_transposed=lambda module: is_transposed,
        layout=layout,
    )
    add_host(host)
    return cls
