"""The tensors that a forward saves for its backward: who makes and who reads each, and what it would be as codes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fp8compile.nn.candidates import is_converted
from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.testing.explain.module_stack import Names, module_of_stack
from fp8compile.testing.gpu.graphs import GpuGraph, kept_nodes
from fp8compile.testing.gpu.schedule import Schedule, ScheduledLaunch, operator_of

__all__ = ["KeptTensor", "Recipes", "kept_tensors"]

VALUES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_BYTES = 2  # a scale that is a power of two is a bfloat16 number
WHOLE, ROW, ALONE = (-1, -1), (1, -1), (1, 128)


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """A tensor that the forward makes and saves for the backward.

    Attributes:
        module: Name of the innermost module that makes it; empty for the model itself, or if that isn't known.
        made_by: The operator that makes it, by its name before decomposition, such as "aten.mm".
        read_in: Names of the modules in whose backward it is read, in the order of the backward.
        read_by: The operators that read it there, by their names before decomposition.
        shape: Its shape.
        dtype: Its dtype.
        bytes: Bytes of its storage, which other tensors may share.
        block: The rows and columns that share a scale of its codes, -1 for the whole row. They are those of the recipe
            of the layers beside it, 1 x 128 where there are none. None if it can't become codes: it is no matrix of
            floating-point values, or it is a statistic, or codes already.
        code_bytes: Bytes of its e4m3 codes and their bfloat16 scales; None if it can't become codes.
        moved: Bytes that a step reads and writes more at least, if codes are kept in its place; negative if it moves
            fewer. The forward writes the codes in a kernel that has the values at hand. Each generated kernel of the
            backward reads codes instead of values. If a library's call reads the tensor, a kernel before it makes
            the values again. None if it can't become codes, or if the code is not for a GPU.
    """

    module: str
    made_by: str
    read_in: tuple[str, ...]
    read_by: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    block: tuple[int, int] | None
    code_bytes: int | None
    moved: int | None


class Recipes:
    """The recipes of a model's converted layers, asked by the name of a module beside them."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = () if model is None else model.named_modules()
        self._recipes: dict[str, Recipe] = {name: each.recipe for name, each in modules if is_converted(each)}

    def block_beside(self, module: str) -> tuple[int, int]:
        """The block for codes of a tensor that a module makes.

        The recipe is that of the module itself, or of the first converted layer in the closest module around it.
        """
        parts = module.split(".") if module else []
        for length in range(len(parts), -1, -1):
            around = ".".join(parts[:length])
            for name, recipe in self._recipes.items():
                if not around or name == around or name.startswith(f"{around}."):
                    return _block(recipe)
        return ALONE


def _block(recipe: Recipe) -> tuple[int, int]:
    """Blocks along rows: those in which the recipe quantizes a layer's input, whole rows for whole tensors."""
    quantizers = next((found for gemm in GEMMS if (found := recipe.quantizers(gemm)) is not None), None)
    block = ALONE if quantizers is None else quantizers[0].block
    return ROW if block == WHOLE else block if block[0] == 1 else ALONE


def _code_bytes(shape: tuple[int, ...], block: tuple[int, int]) -> int:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    blocks = 1 if block[1] == -1 else -(-columns // block[1])
    return rows * (columns + SCALE_BYTES * blocks)


def _may_be_codes(made: fx.Node, value: Tensor) -> bool:
    """Whether a saved tensor has rows of values. A scale of columns and a row's statistic are no such tensors."""
    is_beside = made.target is operator.getitem and made.args[1] != 0  # such as the sums of attention
    is_matrix = value.ndim > 1 and value.shape[-1] > 1 and math.prod(value.shape[:-1]) > 1
    return is_matrix and value.dtype in VALUES and not is_beside


def _maker(node: fx.Node) -> fx.Node:
    """The node that made the memory in which a node's value lies."""
    storage = node.meta["val"].untyped_storage()._cdata
    while True:
        given = (each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor))
        before = next((each for each in given if each.meta["val"].untyped_storage()._cdata == storage), None)
        if before is None:
            return node
        node = before


def _readers(place: fx.Node) -> list[fx.Node]:
    """The nodes of a backward that read a saved tensor, also by views of it, in order."""
    storage = place.meta["val"].untyped_storage()._cdata
    found, pending = set(), [place]
    while pending:
        for user in pending.pop().users:
            value = user.meta.get("val")
            if isinstance(value, Tensor) and value.untyped_storage()._cdata == storage:
                pending.append(user)
            elif user.op != "output":
                found.add(user)
    return sorted(found)


def _moved(size: int, codes: int, reads: list[ScheduledLaunch]) -> int:
    """See `KeptTensor.moved`."""
    generated = sum(launch.kind == "triton" for launch in reads)
    made_again = codes + size if generated < len(reads) else 0
    return codes + generated * (codes - size) + made_again


def _launches_by_input(scheduled: Schedule) -> list[list[ScheduledLaunch]]:
    """For each argument of a graph, the launches that read it."""
    names = [node.name for node in scheduled.lowered.find_nodes(op="placeholder")]
    return [[launch for launch in scheduled.launches if name in launch.read] for name in names]


def kept_tensors(
    forward: GpuGraph, backward: GpuGraph, scheduled: Schedule | None, names: Names, recipes: Recipes
) -> Iterator[KeptTensor]:
    """The tensors that a forward keeps for its backward, one for each storage, in the order of its outputs.

    Args:
        forward: The forward graph.
        backward: The backward graph.
        scheduled: The backward's code for a GPU; None for a CPU.
        names: Names of the model's modules.
        recipes: Recipes of the model's layers.
    """
    places = backward.graph.graph.find_nodes(op="placeholder")
    by_name: Mapping[str, int] = {node.name: at for at, node in enumerate(places)}
    reads = None if scheduled is None else _launches_by_input(scheduled)
    for node in kept_nodes(forward):
        at = by_name.get(node.name)
        if at is None:  # an output for the runtime, such as the new value of a buffer
            continue
        value, readers, made = node.meta["val"], _readers(places[at]), _maker(node)
        module, size = module_of_stack(made, names) or "", value.untyped_storage().nbytes()
        block = recipes.block_beside(module) if _may_be_codes(made, value) else None
        codes = None if block is None else _code_bytes(tuple(value.shape), block)
        yield KeptTensor(
            module=module,
            made_by=operator_of(made),
            read_in=tuple(dict.fromkeys(filter(None, (module_of_stack(each, names) for each in readers)))),
            read_by=tuple(dict.fromkeys(map(operator_of, readers))),
            shape=tuple(value.shape),
            dtype=value.dtype,
            bytes=size,
            block=block,
            code_bytes=codes,
            moved=None if codes is None or reads is None else _moved(size, codes, reads[at]),
        )
