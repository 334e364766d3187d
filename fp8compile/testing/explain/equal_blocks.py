"""Finds equal blocks of a model, such as transformer layers, and extrapolates from a few to all.

    N blocks     first, middle x (N - 2), last
    2 blocks     first, last
    3 blocks     first, middle, last               count(N) = count(2) + (N - 2) (count(3) - count(2))
    4 blocks     first, middle x 2, last           has to agree with the formula for N = 4

The graphs prove that the blocks are equal: each operator, with its shapes and constants, has to be in the graphs of
the whole model as often as the formula says. If an operator's count differs, or if the code of 4 blocks contradicts
the formula, nothing is extrapolated, and code is generated for the whole model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from fp8compile.tables import folded_names
from fp8compile.testing.explain.capture import Recorded, record
from fp8compile.testing.graphs.compiler_log import one_line

__all__ = ["FEWEST", "EqualBlocks", "equal_blocks", "longest_list", "shortened"]

log: logging.Logger = logging.getLogger(__name__)
FEWEST = 10  # blocks; with fewer, code for 2, 3 and 4 of them is no less work
Key = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class EqualBlocks:
    """Equal blocks of a model, the children of one module list.

    Attributes:
        name: Name of the ``nn.ModuleList`` or ``nn.Sequential``.
        count: Number of blocks.
    """

    name: str
    count: int

    def in_all(self, two: int, three: int) -> int:
        """Extrapolate a number linearly to all blocks; with 2 blocks it is ``two``, with 3 blocks ``three``."""
        return two + (self.count - 2) * (three - two)

    def place(self, layer: str) -> tuple[int, str] | None:
        """Block number of a layer, and its name inside the block; None for a layer outside of the blocks."""
        prefix = f"{self.name}." if self.name else ""
        number, _, inside = layer.removeprefix(prefix).partition(".")
        return (int(number), inside) if layer.startswith(prefix) and number.isdecimal() else None

    def layer(self, number: int, inside: str) -> str:
        """Full name of a layer, from its block number and its name inside the block."""
        return ".".join(filter(None, (self.name, str(number), inside)))

    def __str__(self) -> str:
        (name,) = folded_names(self.layer(number, "") for number in range(1, self.count - 1))
        return name


def _tensor_key(value: Any) -> Key:
    if not isinstance(value, Tensor):
        return (repr(value),)
    return type(value).__name__, tuple(value.shape), value.stride(), str(value.dtype), value.requires_grad


def _block_key(block: nn.Module) -> Key:
    return tuple(
        (
            name,
            type(module),
            repr(getattr(module, "recipe", None)),
            module.training,
            *((key, _tensor_key(value)) for key, value in {**module._parameters, **module._buffers}.items()),
        )
        for name, module in block.named_modules()
    )


def longest_list(model: nn.Module) -> EqualBlocks | None:
    """The longest module list of ten or more children with equal modules, recipes, modes and shapes; else None."""
    found = []
    for name, module in model.named_modules():
        blocks = list(module._modules.values()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        present = [block for block in blocks if block is not None]
        if len(present) == len(set(map(id, present))) >= FEWEST and len(set(map(_block_key, present))) == 1:
            found.append(EqualBlocks(name=name, count=len(present)))
    return max(found, key=lambda each: each.count, default=None)


@contextmanager
def shortened(model: nn.Module, blocks: EqualBlocks, count: int) -> Iterator[None]:
    """Context in which the model has only the first ``count`` of its equal blocks."""
    held = model.get_submodule(blocks.name)
    every = dict(held._modules)
    held._modules.clear()
    held._modules.update(list(every.items())[:count])
    try:
        yield
    finally:
        held._modules.clear()
        held._modules.update(every)


def _value_key(node: fx.Node) -> Any:
    return fx.node.map_aggregate(
        node.meta.get("val"), lambda each: str(_tensor_key(each)[1:4] if isinstance(each, Tensor) else each)
    )


def _counts(recorded: Sequence[Recorded]) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for each in recorded:
        for backward, graph in enumerate((each.kept.forward, each.kept.backward)):
            for node in graph.graph.nodes if graph is not None else ():
                if node.op == "call_function":
                    given = fx.map_arg((node.args, node.kwargs), _value_key)
                    found[len(recorded), backward, str(node.target), repr(given), repr(_value_key(node))] += 1
    return found


def _differs(
    model: nn.Module, blocks: EqualBlocks, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Sequence[Recorded]
) -> str:
    """Return why the whole model's graphs don't follow from those with 2 and 3 blocks; "" if they do."""
    counts = []
    for count in (2, 3):
        try:
            with shortened(model, blocks, count):
                counts.append(_counts(record(model, args, kwargs)))
        except Exception as error:  # the model needs all of its blocks
            return f"with {count} of {blocks.count} blocks: {type(error).__name__}: {one_line(str(error))[:200]}"
    two, three = counts
    found = _counts(whole)
    for key in found | two | three:
        expected = blocks.in_all(two[key], three[key])
        if found[key] != expected:
            return f"{key[2]} occurs {found[key]} times in the graphs, expected {expected} times for equal blocks"
    return ""


def equal_blocks(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Sequence[Recorded]
) -> EqualBlocks | None:
    """The model's longest list of blocks, if its graphs prove that they are equal; else None.

    Args:
        model: The model.
        args: Arguments of a call.
        kwargs: Keyword arguments of the call.
        whole: The graphs of that call.
    """
    blocks = longest_list(model)
    if blocks is None:
        return None
    log.info("comparing the %d blocks of %s", blocks.count, blocks.name or "the model")
    if why := _differs(model, blocks, args, kwargs, whole):
        log.info("generating code for each block of %s, because they differ: %s", blocks.name or "the model", why)
        return None
    return blocks
