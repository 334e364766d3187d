"""Tensors that a forward saves for its backward: who makes and reads them, and their size as codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fp8compile.saved_tensors import SavedAsCodes, SavedTensor
from fp8compile.saved_tensors.kind_from_graphs import block_beside, described
from fp8compile.saved_tensors.packing import Packing
from fp8compile.testing.explain.module_stack import Names, module_of_stack
from fp8compile.testing.gpu.graphs import GpuGraph, kept_nodes
from fp8compile.testing.gpu.schedule import Schedule, ScheduledLaunch, operator_of

__all__ = ["KeptTensor", "kept_tensors"]

CODES = SavedAsCodes()


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """A tensor that the forward computes and saves for the backward.

    Attributes:
        module: Name of the innermost module that computes the tensor; empty for the model itself, or if unknown.
        made_by: Name of the operator that computes the tensor, before decomposition, such as "aten.mm".
        read_in: Names of the modules whose backward reads the tensor, in the order of the backward.
        read_by: Names of the backward's operators that read the tensor, before decomposition.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        bytes: Bytes of the tensor's storage, which other tensors may share.
        saved: The tensor as a filter of `fp8compile.SavedAsCodes` sees it; None if it can't be quantized.
        block: Numbers of rows and columns that share a scale with ``SavedAsCodes()``; None if the tensor can't be
            quantized.
        code_bytes: Bytes of the quantized tensor and its scales; None if the tensor can't be quantized.
        moved: Lower bound of the additional bytes that a step reads and writes if the tensor is saved quantized;
            negative for fewer. This assumes that the kernel that computes the tensor also quantizes it, and that each
            generated kernel of the backward reads the quantized tensor. If a library call reads the tensor, an extra
            kernel dequantizes it first. None if the tensor can't be quantized, or if the code is not for a GPU.
    """

    module: str
    made_by: str
    read_in: tuple[str, ...]
    read_by: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    saved: SavedTensor | None
    block: tuple[int, int] | None
    code_bytes: int | None
    moved: int | None


def _maker(node: fx.Node) -> fx.Node:
    """Return the node that allocated the storage of a node's value."""
    storage = node.meta["val"].untyped_storage()._cdata
    while True:
        given = (each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor))
        before = next((each for each in given if each.meta["val"].untyped_storage()._cdata == storage), None)
        if before is None:
            return node
        node = before


def _readers(place: fx.Node) -> list[fx.Node]:
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
    """Return how many more bytes a step moves if it saves ``codes`` bytes instead of ``size``; see `KeptTensor.moved`.

    ``reads`` are the launches of the backward that read the tensor.
    """
    generated = sum(launch.kind == "triton" for launch in reads)
    made_again = codes + size if generated < len(reads) else 0
    return codes + generated * (codes - size) + made_again


def _launches_by_input(scheduled: Schedule) -> list[list[ScheduledLaunch]]:
    names = [node.name for node in scheduled.lowered.find_nodes(op="placeholder")]
    return [[launch for launch in scheduled.launches if name in launch.read] for name in names]


def _packed(node: fx.Node, place: fx.Node, saved: SavedTensor | None) -> tuple[tuple[int, int] | None, int | None]:
    """Return the block (rows, columns) that shares a scale, and the bytes, of a tensor saved by ``SavedAsCodes()``.

    (None, None) if the tensor can't be saved as codes.
    """
    value = node.meta["val"]
    packing = None if saved is None else Packing.of(value, CODES.quantizer_for(block_beside(node, place)))
    if packing is None:
        return None, None
    with value.fake_mode, torch.no_grad():
        parts = packing.pack(value)
    return packing.quantizer.block, sum(part.numel() * part.element_size() for part in parts)


def kept_tensors(
    forward: GpuGraph, backward: GpuGraph, scheduled: Schedule | None, names: Names
) -> Iterator[KeptTensor]:
    """Yield tensors that a forward saves for its backward, one per storage, in the order of its outputs.

    Args:
        forward: The forward graph.
        backward: The backward graph.
        scheduled: The backward's code for a GPU; None for a CPU.
        names: Names of the model's modules.
    """
    places = backward.graph.graph.find_nodes(op="placeholder")
    by_name: Mapping[str, int] = {node.name: at for at, node in enumerate(places)}
    reads = None if scheduled is None else _launches_by_input(scheduled)
    for node in kept_nodes(forward):
        at = by_name.get(node.name)
        if at is None:  # an output for the runtime, such as the new value of a buffer
            continue
        value, readers, made = node.meta["val"], _readers(places[at]), _maker(node)
        saved, size = described(node, places[at]), value.untyped_storage().nbytes()
        block, codes = _packed(node, places[at], saved)
        yield KeptTensor(
            module=module_of_stack(made, names) or "",
            made_by=operator_of(made),
            read_in=tuple(dict.fromkeys(filter(None, (module_of_stack(each, names) for each in readers)))),
            read_by=tuple(dict.fromkeys(map(operator_of, readers))),
            shape=tuple(value.shape),
            dtype=value.dtype,
            bytes=size,
            saved=None if codes is None else saved,
            block=block,
            code_bytes=codes,
            moved=None if codes is None or reads is None else _moved(size, codes, reads[at]),
        )
