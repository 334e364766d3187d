"""Registry of the modules of other libraries that `convert` knows, and queries about such modules."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from fp8compile.nn.experts.linear_like import CONV1D
from fp8compile.nn.experts.module_spec import Layout, ModuleSpec, stacks
from fp8compile.nn.experts.torchtitan_experts import METHOD
from fp8compile.nn.experts.transformers_experts import ROUTED
from fp8compile.nn.experts.transformers_own_forwards import DBRX, JETMOE, LLAMA4
from fp8compile.quantizers import Quantizer

__all__ = [
    "add_spec",
    "as_it_lies",
    "has_spec",
    "holds_no_stacks",
    "is_experts",
    "is_transposed",
    "layout_of",
    "method_that_multiplies",
    "spec_of",
    "spec_of_class",
]

SPECS = [ROUTED, LLAMA4, DBRX, JETMOE, METHOD, CONV1D]


@cache
def spec_of_class(plain: type[nn.Module]) -> ModuleSpec | None:
    """Return the registered `ModuleSpec` that describes ``plain``, a class of modules; None if there is none."""
    return next((spec for spec in SPECS if spec.takes(plain)), None)


def add_spec(spec: ModuleSpec) -> None:
    """Register a `ModuleSpec`. If several specs describe a class, the one that was registered last is used."""
    SPECS.insert(0, spec)
    spec_of_class.cache_clear()


def spec_of(module: nn.Module) -> ModuleSpec | None:
    """Return the `ModuleSpec` that describes a module, or by which it was converted; None if there is none."""
    return getattr(type(module), "_own_spec", None) or spec_of_class(type(module))  # type: ignore[arg-type]  # it is hashable


def has_spec(module: nn.Module) -> bool:
    """Whether a `ModuleSpec` describes a module, converted or not, by its layout or by 3-D weights."""
    spec = spec_of(module)
    return spec is not None and (spec.layout is not None or bool(stacks(module)))


def is_experts(module: nn.Module) -> bool:
    """Whether a module, converted or not, holds experts that `convert` can convert."""
    spec = spec_of(module)
    return has_spec(module) and spec is not None and not spec.is_linear


def holds_no_stacks(module: nn.Module) -> str | None:
    """Return an error text if experts are not their module's own 3-D parameters, so can't be codes; else None."""
    spec = spec_of(module)
    if spec is None or spec.layout is None or spec.is_linear:
        return None
    return "does not store its experts as 3-D parameters of shape (experts, out_features, in_features)"


def is_transposed(module: nn.Module) -> bool:
    """Whether a module stores its matrices transposed, as (in_features, out_features)."""
    spec = spec_of(module)
    return spec is not None and spec.is_transposed(module)


def as_it_lies(module: nn.Module, quantizer: Quantizer) -> Quantizer:
    """Return ``quantizer``, transposed if the module stores its matrices transposed."""
    return quantizer.transposed() if is_transposed(module) else quantizer


def layout_of(module: nn.Module) -> Layout:
    """Return the matrices by which a module multiplies."""
    spec: Any = spec_of(module)
    if spec.layout is not None:
        return spec.layout(module)
    own = stacks(module)
    shapes = [each.shape[1:] for each in own.values()]
    matrices = tuple((n, k) if not spec.is_transposed(module) else (k, n) for n, k in shapes)
    return Layout(weights=own, matrices=matrices, num_experts=next(iter(own.values())).shape[0])


def method_that_multiplies(module: nn.Module) -> str:
    """Return the name of the method that multiplies tokens by the module's weights, such as ``"forward"``."""
    spec: Any = spec_of(module)
    return spec.method
