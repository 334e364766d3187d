"""compile: compile a model as one graph, in which repeated blocks are compiled once.

Dynamo inlines blocks by default, so 32 equal blocks take 32 times as long as one. A block whose forward is a
separately compiled region (`torch.compiler.nested_compile_region`) is compiled once, and the graph calls the compiled
code. Code is fused only within a block. A region can't return its inputs; outputs that are inputs bypass the region.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fp8compile import _compat
from fp8compile.inductor import PARTITIONERS
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.dynamic_classes import DynamicClass, dynamic_class

if TYPE_CHECKING:
    from fp8compile.saved_tensors import SavedAsCodes

__all__ = ["compile", "repeated_blocks"]

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def compile(
    model: Model,
    *,
    blocks: Iterable[nn.Module] | None = None,
    fullgraph: bool = True,
    saved: SavedAsCodes | None = None,
    **options: Any,
) -> Model:
    """Compile a model as a single graph, in which each kind of repeated block is compiled only once.

    The forward of each block becomes a separately compiled region. The class of each block is replaced in place with a
    subclass of the same name. Parameters, state dict, hooks, copies, pickles and eager results do not change.

    Args:
        model: Any module, whether `convert` has converted it or not.
        blocks: Modules of the model with the same structure, such as ``model.model.layers``. Blocks must not be
            nested. By default, the blocks that `repeated_blocks` finds. Pass ``()`` to use plain ``torch.compile``.
        fullgraph: Passed to ``torch.compile``, whose own default is False.
        saved: Which tensors saved for the backward are quantized, including those inside of blocks; None for none.
        **options: Other options of ``torch.compile``. With ``dynamic=True`` sizes may vary, but a new value of a
            float, such as an attribute of a module, recompiles.

    Returns:
        The ``OptimizedModule`` that ``torch.compile`` returns, with the attributes of ``model``. Type checkers see the
        type of ``model``.

    Raises:
        TypeError: The model or a block is not a module, or ``saved`` is not a `SavedAsCodes`.
        ValueError: A block is not part of the model, is nested in another block, or can't be compiled separately,
            because its forward is set on the instance or because PyTorch does not accept its parameters or buffers as
            arguments. Or ``saved`` is given with a backend other than Inductor, or with options that set a
            partitioner.

    Warns:
        UserWarning: Some repeated blocks can't be compiled separately and are inlined.
    """
    check_model("compile", model)
    if saved is not None:
        options = _with_partitioner(options, saved)
    chosen = _found(model) if blocks is None else _checked(model, list(blocks))
    alike = Counter(map(type, chosen))
    for block in chosen:
        if not issubclass(type(block), _Region):
            block.__class__ = _region_class(type(block), alike[type(block)])  # type: ignore[arg-type]  # it is hashable
    compiled: Any = torch.compile(model, fullgraph=fullgraph, **options)
    if chosen and options.get("dynamic"):
        compiled.forward = _compat.with_floats_pinned(compiled.forward)
    return compiled


def _with_partitioner(options: dict[str, Any], saved: SavedAsCodes) -> dict[str, Any]:
    """Return options of ``torch.compile`` with a partitioner that saves tensors as ``saved`` says.

    Raises a ValueError if the backend is not Inductor, or if the options have a partitioner already.
    """
    partitioner = PARTITIONERS.get(type(saved))
    if partitioner is None:
        raise TypeError(f"compile: `saved` is {saved!r}; it must be a fp8compile.SavedAsCodes, or None.")
    if (backend := options.get("backend", "inductor")) != "inductor":
        raise ValueError(
            f"compile: `saved` chooses Inductor's partitioner, but the backend is {backend!r}. Omit backend, or "
            "call the compiled model inside fp8compile.saved_as_codes(...), which works with any backend."
        )
    own = dict(options.get("options") or {})
    if own.get("custom_partitioner_fn") is not None:
        raise ValueError(
            "compile: `saved` can't be combined with the option custom_partitioner_fn, because Inductor uses only "
            "one partitioner. Omit one of them."
        )
    if (mode := options.get("mode")) is not None:  # torch.compile takes either a mode or options
        from torch._inductor import list_mode_options

        own = {**list_mode_options(mode, options.get("dynamic")), **own}
    others = {name: value for name, value in options.items() if name != "mode"}
    return {**others, "options": {**own, "custom_partitioner_fn": partitioner(saved)}}


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model, by name.

    A repeated block has children, and is in an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict`` that contains
    another module of the same class. It is not itself one of these three containers. If blocks are nested, only the
    outermost ones are returned.

    Args:
        model: Any module.

    Returns:
        Blocks by fully qualified name, in the order of ``model.named_modules()``.
    """
    return dict(_outermost_repeated(model, ""))


def _outermost_repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    parts = [(f"{prefix}{name}", part) for name, part in module.named_children()]
    often = Counter(type(part) for _, part in parts) if isinstance(module, CONTAINERS) else Counter()
    for name, part in parts:
        if often[type(part)] > 1 and not isinstance(part, CONTAINERS) and any(True for _ in part.children()):
            yield name, part
        else:
            yield from _outermost_repeated(part, f"{name}.")


def _found(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that can be compiled separately; warn about the other repeated blocks."""
    blocks = repeated_blocks(model)
    reasons = {name: reason for name, block in blocks.items() if (reason := _why_no_region(block)) is not None}
    if reasons:
        name, reason = next(iter(reasons.items()))
        warnings.warn(
            f"compile: {len(reasons)} of {len(blocks)} repeated blocks can't be compiled as a shared region: block "
            f"{name!r} {reason}. Pass blocks=() to inline them all, so that each is compiled separately.",
            stacklevel=3,
        )
    return [block for name, block in blocks.items() if name not in reasons]


def _why_no_region(block: nn.Module) -> str | None:
    """Return why a block can't be compiled as a region, as text after "block 'name'"; None if it can."""
    if "forward" in vars(block):
        return "has a forward replaced on the instance, which is called instead of the forward of its class"
    tensors = itertools.chain(block.named_parameters(), block.named_buffers())
    other = next(((name, each) for name, each in tensors if type(each) not in PLAIN), None)
    if other is not None:
        return f"has {other[0]}, a {type(other[1]).__name__}, but PyTorch passes only plain tensors to a region"
    return None


def _checked(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        if not isinstance(block, nn.Module):
            raise TypeError(f"compile: `blocks` contains a {type(block).__name__}; it must be modules of the model.")
        if block not in names:
            raise ValueError(
                f"compile: `blocks` contains a {type(block).__name__} that is not in the model. Pass its own."
            )
        if (reason := _why_no_region(block)) is not None:
            raise ValueError(
                f"compile: block {names[block]!r} {reason}, so it can't be a region. Remove it from `blocks`."
            )
        for part in block.modules():
            if part is not block and part in blocks:
                inner, outer = names[part], names[block]
                raise ValueError(f"compile: block {inner!r} is inside block {outer!r}. Pass only one of the two.")
    return blocks


# ---------------------------------------------------------------------------------- the class of a block


class _Region(DynamicClass, nn.Module):
    """Base of the classes that `_region_class` makes; a forward runs as a separately compiled region."""


@cache
def _region_class(plain: type[nn.Module], often: int) -> type[nn.Module]:
    forward, made_by = _as_region(plain.forward, often), (_region_class, plain, often)
    return dynamic_class(_Region, plain, made_by, forward=forward, __module__=plain.__module__)


def _as_region(forward: Callable[..., Any], often: int) -> Callable[..., Any]:
    """Wrap a forward so that it is compiled separately, as a region that returns only new tensors.

    ``often`` is the number of blocks with this forward; Dynamo may compile a version for each of these blocks.
    """

    def body(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[Any], list[int | None], Any]:
        given = pytree.tree_leaves((args, kwargs))
        leaves, spec = pytree.tree_flatten(forward(self, *args, **kwargs))
        places = [next((at for at, one in enumerate(given) if one is leaf), None) for leaf in leaves]
        return [leaf for leaf, place in zip(leaves, places, strict=True) if place is None], places, spec

    region = _compat.as_region(body, often)

    @functools.wraps(forward)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() or _compat.is_exporting():
            return forward(self, *args, **kwargs)
        made, places, spec = region(self, *args, **kwargs)
        given, new = pytree.tree_leaves((args, kwargs)), iter(made)
        return pytree.tree_unflatten([next(new) if place is None else given[place] for place in places], spec)

    return called
