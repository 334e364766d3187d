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
VALUES: dict[str, SavedAsCodes] = {}  # by their `uuid()`, which graphs hold; values of one text are alike


@contextmanager
def saved_as_codes(
    saved: SavedAsCodes | None = None, *, quantizer: Quantizer | None = None, filter: Filter = None
) -> Iterator[None]:
    """Context manager that quantizes tensors saved for the backward, in eager mode or with any compile backend.

    Wrap the call of a model in this context; the backward may run outside of it. A model called both inside and
    outside of the context is compiled twice. Tensors saved by a compiled region are quantized after the region, by
    additional kernels; ``fp8compile.compile(model, saved=...)`` quantizes them inside of the region. If caches can't
    compare a filter function, such as a closure (see `SavedAsCodes`), create it only once, because each new one
    recompiles the call and is kept alive.

    Args:
        saved: Which tensors to quantize, and how. Pass either this or the next two arguments.
        quantizer: Quantizer for the tensors, as in `SavedAsCodes`.
        filter: Which tensors to quantize, as in `SavedAsCodes`.

    Raises:
        TypeError: ``saved`` is combined with another argument, or an argument has a wrong type.
        ValueError: See `SavedAsCodes`.
        RuntimeError: The context is entered inside a compiled function, or other saved-tensor hooks are active, such
            as those of ``save_on_cpu`` or of a checkpointed region.
        NotImplementedError: A compiled forward saves an object that PyTorch loses when it inlines hooks, such as the
            device mesh of tensor parallelism.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "saved_as_codes: Dynamo is tracing this context, but it does not support hooks on saved tensors. Use "
            "the context around the call of the compiled model, or call fp8compile.compile(model, saved=...)."
        )
    if saved is not None and not isinstance(saved, SavedAsCodes):
        raise TypeError(f"saved_as_codes: `saved` is {saved!r}; it must be a fp8compile.SavedAsCodes, or be omitted.")
    if saved is not None and (quantizer is not None or filter is not None):
        raise TypeError(
            "saved_as_codes: `saved` was passed together with `quantizer` or `filter`, but it already contains both. "
            "Pass either `saved` alone, or `quantizer` and `filter`."
        )
    _check_hooks_around()
    value = saved or SavedAsCodes(quantizer, filter)
    name = value.uuid()
    VALUES[name] = value
    with Watch(value, name) as watch, torch.autograd.graph.saved_tensors_hooks(*_hooks(name)):
        yield
        watch.settle()


def _check_hooks_around() -> None:
    around = _compat.active_saved_tensor_hooks()
    if around is not None and getattr(around[0], "graph", None) not in GRAPHS:
        raise RuntimeError(
            f"saved_as_codes: other hooks on saved tensors are active, {around[0]!r}, but autograd calls only the "
            "innermost hooks. Use this context around a checkpointed region and not inside it. To offload compressed "
            "activations, call a model of fp8compile.compile(model, saved=...) inside the context of the other hooks."
        )


@cache
def _hooks(name: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the pack and unpack hooks for a key of `VALUES`, cached because Dynamo guards on their identity."""
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
            f"saved_as_codes: this compiled forward saves {lost}, which PyTorch loses when it inlines hooks on saved "
            "tensors. Omit the context, and use fp8compile.compile(model, saved=fp8compile.SavedAsCodes(...))."
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
        return packed_in_eager(x, name)
    return x if packing is None else packing.pack(x)


def unpack_hook(kept: Any, name: str) -> Tensor:
    """Return the saved tensor from ``kept``, the result of `pack_hook` with the same ``name``."""
    if isinstance(kept, Tensor):  # it was not packed
        return kept
    packing = _traced_packing(VALUES[name])
    return kept.tensor() if packing is NotImplemented else packing.unpack(kept)
