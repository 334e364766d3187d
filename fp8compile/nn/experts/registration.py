"""Registration of other libraries' modules with convert: experts, and linears by another name."""

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
    """Have ``fp8compile.convert`` take the modules of a class that is a linear layer by another name.

    Its forward is ``x @ weight.T + bias``, x of any leading dims, and does nothing else. ``weight`` and ``bias`` are
    its parameters of these names; the bias may be missing or None. Subclasses that inherit the forward are taken too.
    The Conv1D of transformers is known already.

    Args:
        cls: The class.
        is_transposed: Whether ``weight`` is (in_features, out_features), and the forward ``x @ weight + bias``.

    Returns:
        The class, so that this is a decorator too.

    Raises:
        TypeError: It is no class of modules, is a ``nn.Linear``, or has no forward.
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
    """Have ``fp8compile.convert`` take the modules of a class that holds experts in a way of its own.

    A converted module gets a class that is a subclass of its own, in which ``replacement`` stands in the place of
    ``method``. Subclasses that inherit the method are taken too.

    Where the module's own 3-D parameters are the stacks, (experts, out_features, in_features), and ``replacement``
    does nothing but multiply by them, FSDP gathers codes of them, and ``quantized_parameters=True`` keeps codes.

    Args:
        cls: The class.
        method: The name of the method that multiplies.
        replacement: That method in FP8, given ``self`` and its arguments: it multiplies by
            ``fp8compile.grouped_linear(..., recipe=self.recipe)`` or ``fp8compile.grouped_mm``.
        is_transposed: Whether each matrix is kept as (in_features, out_features).
        layout: What a module multiplies by, where that is not its own 3-D parameters, such as matrices that stand
            below one another in one 2-D parameter. Such weights are gathered and kept in high precision.

    Returns:
        The class.

    Raises:
        TypeError: It is no class of modules, is a ``nn.Linear``, or has no such method, or ``replacement`` is none.
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
