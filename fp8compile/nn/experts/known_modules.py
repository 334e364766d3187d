"""Registry of the modules of other libraries that `convert` knows, and queries about such modules."""

from __future__ import annotations

from functools import cache

from torch import nn

from fp8compile.nn.experts.host import Host, Layout, stacks
from fp8compile.nn.experts.linear_like import CONV1D
from fp8compile.nn.experts.torchtitan_experts import METHOD
from fp8compile.nn.experts.transformers_experts import ROUTED
from fp8compile.nn.experts.transformers_own_forwards import DBRX, JETMOE, LLAMA4
from fp8compile.quantizers import Quantizer

__all__ = [
    "add_host",
    "as_it_lies",
    "holds_no_stacks",
    "host_of",
    "host_of_class",
    "is_experts",
    "is_hosted",
    "is_transposed",
    "layout_of",
    "method_that_multiplies",
]

HOSTS = [ROUTED, LLAMA4, DBRX, JETMOE, METHOD, CONV1D]


@cache
def host_of_class(plain: type[nn.Module]) -> Host | None:
    """Return the registered `Host` that describes ``plain``, a class of modules; None if there is none."""
    return next((host for host in HOSTS if host.takes(plain)), None)


def add_host(host: Host) -> None:
    """Register a `Host`. If several hosts describe a class, the one that was registered last is used."""
    HOSTS.insert(0, host)
    host_of_class.cache_clear()


def host_of(module: nn.Module) -> Host | None:
    """Return the `Host` that describes a module, or by which it was converted; None if there is none."""
    return getattr(type(module), "_host", None) or host_of_class(type(module))  # type: ignore[arg-type]  # it is hashable


def is_hosted(module: nn.Module) -> bool:
    """Whether a `Host` describes a module, converted or not, whose weights are known by ``layout`` or are 3-D."""
    host = host_of(module)
    return host is not None and (host.layout is not None or bool(stacks(module)))


def is_experts(module: nn.Module) -> bool:
    """Whether a module, converted or not, holds experts that `convert` can convert."""
    return is_hosted(module) and not _host(module).is_linear


def _host(module: nn.Module) -> Host:
    host = host_of(module)
    assert host is not None
    return host


def holds_no_stacks(module: nn.Module) -> str | None:
    """Return an error text if experts are not their module's own 3-D parameters, so can't be codes; else None."""
    host = host_of(module)
    if host is None or host.layout is None or host.is_linear:
        return None
    return "does not store its experts as 3-D parameters of shape (experts, out_features, in_features)"


def is_transposed(module: nn.Module) -> bool:
    """Whether a module stores its matrices transposed, as (in_features, out_features)."""
    host = host_of(module)
    return host is not None and host.is_transposed(module)


def as_it_lies(module: nn.Module, quantizer: Quantizer) -> Quantizer:
    """Return ``quantizer``, transposed if the module stores its matrices transposed."""
    return quantizer.transposed() if is_transposed(module) else quantizer


def layout_of(module: nn.Module) -> Layout:
    """Return the matrices by which a module multiplies."""
    host = _host(module)
    if host.layout is not None:
        return host.layout(module)
    own = stacks(module)
    shapes = [each.shape[1:] for each in own.values()]
    matrices = tuple((n, k) if not host.is_transposed(module) else (k, n) for n, k in shapes)
    return Layout(weights=own, matrices=matrices, num_experts=next(iter(own.values())).shape[0])


def method_that_multiplies(module: nn.Module) -> str:
    """Return the name of the method that multiplies tokens by the module's weights, such as ``"forward"``."""
    return _host(module).method
