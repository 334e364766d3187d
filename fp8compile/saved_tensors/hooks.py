"""saved_as_codes: context in which calls save tensors as codes, eager or compiled by any backend.

Its pack and unpack hooks are FX graphs: AOTAutograd inlines the hooks into the graphs of a compiled call, and
Dynamo recompiles if the hooks are new objects. In eager mode, autograd calls the hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8compile import _compat
from fp8compile.quantizers import Quantizer
from fp8compile.saved_tensors.choice import Filter, SavedAsCodes
from fp8compile.saved_tensors.eager import Watch, packed_in_eager
from fp8compile.saved_tensors.packing import Packing
from fp8compile.saved_tensors.partitioner import packing_of

__all__ = ["saved_as_codes"]

PACKING = "fp8compile_packing"  # in the meta of a saved node
GRAPHS: set[fx.Graph] = set()  # of our hooks
VALUES: dict[str, SavedAsCodes] = {}  # by the text that stands for them in graphs


@contextmanager
def saved_as_codes(
    saved: SavedAsCodes | None = None, *, quantizer: Quantizer | None = None, filter: Filter = None
) -> Iterator[None]:
    """Context in which calls save tensors for the backward as codes, eager or compiled by any backend.

    Use the context around the call of a model; the backward may run outside. A model called inside and outside of the
    context is compiled twice. Tensors that a compiled region saves are packed after the region, by additional kernels;
    ``fp8compile.compile(model, saved=...)`` packs inside of the region. Make a filter function only once, because
    a new function object compiles the call again.

    Args:
        saved: Which tensors become codes, and how. Give either this value, or its fields as the next two arguments.
        quantizer: Makes the codes, as in `SavedAsCodes`.
        filter: Which tensors become codes, as in `SavedAsCodes`.

    Raises:
        TypeError: Both a value and fields are given, or an argument is of another type.
        ValueError: See `SavedAsCodes`.
        RuntimeError: Dynamo traces the context itself, or other hooks on saved tensors are active, such as those of
            ``save_on_cpu`` or of a checkpointed region.
        NotImplementedError: A compiled forward saves something that PyTorch loses when inlining hooks, such as the
            mesh of tensor parallelism.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "saved_as_codes: Dynamo is tracing this context, and it traces no hooks on saved tensors. Put the context "
            "around the call of the compiled model, or take fp8compile.compile(model, saved=...)."
        )
    if saved is not None and not isinstance(saved, SavedAsCodes):
        raise TypeError(f"saved_as_codes: saved is {saved!r}; it is a fp8compile.SavedAsCodes, or leave it out.")
    if saved is not None and (quantizer is not None or filter is not None):
        raise TypeError("saved_as_codes: a SavedAsCodes has its quantizer and filter. Give the value or the fields.")
    _check_hooks_around()
    value = saved or SavedAsCodes(quantizer, filter)
    with Watch(value) as watch, torch.autograd.graph.saved_tensors_hooks(*_hooks(value, value.uuid())):
        yield
        watch.settle()


def _check_hooks_around() -> None:
    around = _compat.active_saved_tensor_hooks()
    if around is not None and getattr(around[0], "graph", None) not in GRAPHS:
        raise RuntimeError(
            f"saved_as_codes: other hooks on saved tensors are active, {around[0]!r}, and autograd calls the "
            "innermost ones alone. Put this context around a checkpointed region and not into it. To offload codes, "
            "call a model of fp8compile.compile(model, saved=...) in the context of the other hooks."
        )


@cache
def _hooks(saved: SavedAsCodes, name: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the pack and unpack hooks for ``saved``, cached because Dynamo guards on the identity of hooks.

    ``name`` is the ``uuid()`` of ``saved``.
    """
    VALUES[name] = saved
    return _as_graph(pack_hook, name), _as_graph(unpack_hook, name)


def _as_graph(function: Any, name: str) -> fx.GraphModule:
    graph = fx.Graph()
    call = graph.call_function(function, (graph.placeholder("x"), name))
    # without both marks AOTAutograd's cache is bypassed
    call.meta.update(is_wrapped=True, user_cache_hash=f"{function.__name__} {name}")
    graph.output(call)
    GRAPHS.add(graph)
    return fx.GraphModule(nn.Module(), graph)


def _traced_packing(saved: SavedAsCodes) -> Any:
    """Return the `Packing` of the tensor that AOTAutograd is saving; None if it does not become codes.

    Return NotImplemented in eager mode.
    """
    context = _compat.saved_tensor_context()
    if context is None:
        return NotImplemented
    node, backward = context["_node"], context["_bw_graph"]
    if (lost := _compat.lost_by_hooks(backward)) is not None:
        raise NotImplementedError(
            f"saved_as_codes: this compiled forward saves {lost}, which PyTorch loses where it inlines hooks on saved "
            "tensors. Leave the context out, and take fp8compile.compile(model, saved=fp8compile.SavedAsCodes(...))."
        )
    # asked once: the operators of the packing, which PyTorch puts into the graph, read the node too
    if PACKING not in node.meta:
        place = next((each for each in backward.find_nodes(op="placeholder") if each.name == node.name), None)
        node.meta[PACKING] = None if place is None else packing_of(node, place, saved)
    packing: Packing | None = node.meta[PACKING]
    return packing


def pack_hook(x: Tensor, name: str) -> Any:
    """Return what autograd saves for ``x``: codes and scales, a `Kept` in eager mode, or ``x`` itself.

    ``name`` is the key of a `SavedAsCodes` in `VALUES`.
    """
    packing = _traced_packing(VALUES[name])
    if packing is NotImplemented:
        return packed_in_eager(x, VALUES[name])
    return x if packing is None else packing.pack(x)


def unpack_hook(kept: Any, name: str) -> Tensor:
    """Return the saved tensor from ``kept``, the result of `pack_hook` with the same ``name``."""
    if isinstance(kept, Tensor):  # it was not packed
        return kept
    packing = _traced_packing(VALUES[name])
    return kept.tensor() if packing is NotImplemented else packing.unpack(kept)
