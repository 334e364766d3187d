"""Keep users' attributes of a parameter when another object replaces the parameter."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8compile._compat import keep_grad_dtype

__all__ = ["KEPT_CODES", "REPLACED", "attributes_of_others", "in_place_of", "moved"]

KEPT_CODES = "_fp8compile_codes"  # attribute of a parameter: its `WeightCodes`, which are those of no other tensor
REPLACED = "_fp8compile_replaced"  # attribute of a parameter that a model no longer has: the function that replaced it

# `Module.to` and `Module.to_empty` replace a parameter of a tensor subclass by what these ops return
MOVES = {torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default}


@cache
def _declared(cls: type[Any]) -> set[str]:
    return {name for each in cls.__mro__ for name in inspect.get_annotations(each)}


def attributes_of_others(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's attributes that its class does not declare, such as attributes set by users.

    Attributes that fp8compile set for this tensor alone are left out.
    """
    own = {KEPT_CODES, REPLACED, *_declared(type(tensor))}
    return {name: value for name, value in vars(tensor).items() if name not in own}


def moved(op: Any, source: Tensor, result: Tensor) -> Tensor:
    """Return ``result``. If ``Module.to`` can call ``op``, first copy the attributes that users set on ``source``."""
    if op in MOVES:
        vars(result).update(attributes_of_others(source))
    return result


def in_place_of(parameter: Tensor, data: Tensor) -> Parameter:
    """Make a parameter from ``data`` with the ``requires_grad`` and attributes of ``parameter``.

    The attributes are ``grad_dtype`` and all attributes set by users.
    """
    found = Parameter(data, requires_grad=parameter.requires_grad)
    vars(found).update(attributes_of_others(parameter))
    keep_grad_dtype(parameter, found)
    return found
