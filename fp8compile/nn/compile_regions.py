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
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fp8compile import _compat
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.made_classes import MadeClass, made_class
from fp8compile.saved_tensors import SavedAsCodes, partitioner

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
    """Compile a model as one graph, and each kind of repeated block once.

    The blocks' forwards become regions, which are compiled separately. Each block's class is replaced in place by a
    subclass of the same name. Parameters, state dict, hooks, copies, pickles and results in eager mode stay the same.

    Args:
        model: Any module, whether `convert` has converted it or not.
        blocks: Modules of the model that are alike, such as ``model.model.layers``; no block contains another one.
            ``()``, for no blocks, is plain ``torch.compile``. By default those that `repeated_blocks` finds.
        fullgraph: Passed to ``torch.compile``, whose own default is False.
        saved: Which tensors the forward saves as codes for the backward, inside of blocks too; None for none.
        **options: Other options of ``torch.compile``. With ``dynamic=True`` sizes may vary, but a new value of a
            float, such as a module's attribute, compiles another graph.

    Returns:
        The module that ``torch.compile`` returns, an ``OptimizedModule``, with the attributes of ``model``. For type
        checkers it has the type of ``model``.

    Raises:
        TypeError: The model or a block is not a module, or ``saved`` is no `SavedAsCodes`.
        ValueError: A block is not a part of the model, is inside another block, or can't be compiled separately: its
            forward is set on the instance, or PyTorch does not accept its parameters or buffers as arguments. Or
            ``saved`` is given with another backend than Inductor, or with options that have a partitioner.

    Warns:
        UserWarning: Some repeated blocks can't be compiled separately, and are inlined.
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
    if not isinstance(saved, SavedAsCodes):
        raise TypeError(f"compile: saved is {saved!r}; it is a fp8compile.SavedAsCodes, or None.")
    if (backend := options.get("backend", "inductor")) != "inductor":
        raise ValueError(
            f"compile: saved is a choice of Inductor's partitioner, and the backend is {backend!r}. Leave backend "
            "out, or call the compiled model in fp8compile.saved_as_codes(...), which any backend takes."
        )
    own = dict(options.get("options") or {})
    if own.get("custom_partitioner_fn") is not None:
        raise ValueError(
            "compile: saved is given, and options have custom_partitioner_fn: Inductor takes one partitioner. Leave "
            "one of them out."
        )
    if (mode := options.get("mode")) is not None:  # torch.compile takes either a mode or options
        from torch._inductor import list_mode_options

        own = {**list_mode_options(mode, options.get("dynamic")), **own}
    others = {name: value for name, value in options.items() if name != "mode"}
    return {**others, "options": {**own, "custom_partitioner_fn": partitioner(saved)}}


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model, by name.

    A repeated block has children, and is in a ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict`` that has
    another module of the same class. It is itself none of these three. Of nested ones, only the outermost counts.

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
            f"compile: {len(reasons)} of {len(blocks)} repeated blocks are inlined, and each is compiled by itself: "
            f"block {name!r} {reason}. Pass blocks=() if that is meant.",
            stacklevel=3,
        )
    return [block for name, block in blocks.items() if name not in reasons]


def _why_no_region(block: nn.Module) -> str | None:
    """Return why a block can't be compiled as a region, as text after "block 'name'"; None if it can."""
    if "forward" in vars(block):
        return "has a forward of its own instance, which stands before that of its class"
    tensors = itertools.chain(block.named_parameters(), block.named_buffers())
    other = next(((name, each) for name, each in tensors if type(each) not in PLAIN), None)
    if other is not None:
        return f"has {other[0]}, a {type(other[1]).__name__}, and PyTorch passes only plain tensors to a region"
    return None


def _checked(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        if not isinstance(block, nn.Module):
            raise TypeError(f"compile: blocks has a {type(block).__name__}; it is modules of the model.")
        if block not in names:
            raise ValueError(f"compile: blocks has a {type(block).__name__} that is no part of the model.")
        if (reason := _why_no_region(block)) is not None:
            raise ValueError(
                f"compile: block {names[block]!r} {reason}: it can't be a region. Leave it out of blocks."
            )
        for part in block.modules():
            if part is not block and part in blocks:
                inner, outer = names[part], names[block]
                raise ValueError(f"compile: block {inner!r} is inside of block {outer!r}; give one of the two.")
    return blocks


# ---------------------------------------------------------------------------------- the class of a block


class _Region(MadeClass, nn.Module):
    """Base of the classes that `_region_class` makes; a forward runs as a separately compiled region."""


@cache
def _region_class(plain: type[nn.Module], often: int) -> type[nn.Module]:
    forward, made_by = _as_region(plain.forward, often), (_region_class, plain, often)
    return made_class(_Region, plain, made_by, forward=forward, __module__=plain.__module__)


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
