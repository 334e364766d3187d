"""Generator of a checkpoint's tensors, layer by layer; gathers one parameter at a time from all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from fp8compile.export.checkpoint_names import Place, in_checkpoint
from fp8compile.export.format_table import format_named
from fp8compile.export.plan import Plan, Weight, plan_of
from fp8compile.export.whole_weights import scale_of_input, whole_codes, whole_values
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.layout.quantized import Quantized
from fp8compile.nn.layer.linear import Linear

__all__ = ["PROBES", "Piece", "pieces", "positions", "tensors"]

PROBES = 16  # values of each matrix that `check` compares


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor of the checkpoint in high precision, or all tensors of one quantized matrix.

    Attributes:
        tensors: The tensors by name.
        probes: Dequantized values at `positions`, by layer name, for `check`; empty if the tensor is not quantized.
    """

    tensors: dict[str, Tensor]
    probes: dict[str, list[float]] = field(default_factory=dict)


def positions(shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the 16 sample values that `check` compares, for a matrix of this shape."""
    index = torch.arange(PROBES)
    return (index * 7919 + 3) % shape[0], (index * 104729 + 5) % shape[1]


def _values_at(matrix: Quantized, rows: Tensor, columns: Tensor) -> Tensor:
    """Dequantize the elements at (``rows``[i], ``columns``[i]) of a matrix, float32."""
    codes, quantizer = one_a_byte(matrix.codes[rows], matrix.quantizer)
    places = [
        torch.zeros_like(at) if size == -1 else at // size
        for at, size in zip((rows, columns), quantizer.block, strict=True)
    ]
    scale = quantizer.scale_values(matrix.grid()[places[0], places[1]])
    values = quantizer.element_format().decode(codes[torch.arange(len(rows)), columns]) * scale
    return values if matrix.outer_scale is None else values * matrix.outer_scale


def _part(matrix: Quantized, place: Place) -> Quantized:
    """Return the rows ``place`` of a quantized matrix, with a scale for each row if the rows are not whole blocks."""
    step, rows = matrix.quantizer.block[0], slice(place.start, place.stop, place.step)
    if step > 1 and (place.step > 1 or place.start % step):  # rows of several blocks: a scale for each row
        own = replace(matrix.quantizer, block=(1, matrix.quantizer.block[1]))
        codes, _ = one_a_byte(matrix.codes, matrix.quantizer)
        scale = matrix.scale.repeat_interleave(step, 0)[: codes.shape[0]]
        return replace(matrix, codes=codes[rows], scale=scale[rows], quantizer=own.unpacked() or own)
    if step == -1:
        return replace(matrix, codes=matrix.codes[rows])
    scale = matrix.scale[rows] if step == 1 else matrix.scale[place.start // step : -(-place.stop // step)]
    return replace(matrix, codes=matrix.codes[rows], scale=scale)


def _pieces_of(plan: Plan, weight: Weight, whole: Quantized, places: Sequence[Place]) -> list[Piece]:
    """Make a `Piece` of each checkpoint matrix in ``places``, whose rows come from the model's matrix ``whole``."""
    scheme, found = weight.scheme, []
    assert scheme is not None
    for place in places:
        matrix = _part(whole, place)
        stored = scheme.write(matrix)
        if scheme.input_scale is not None and isinstance(weight.layer, Linear):
            scale = scale_of_input(weight.layer)
            stored[scheme.input_scale] = scale.reshape(stored[scheme.suffixes[1]].shape)
        probes = _values_at(matrix, *(each.to(matrix.codes.device) for each in positions(matrix.shape))).tolist()
        found.append(
            Piece(
                tensors={f"{place.name}{suffix}": tensor.contiguous() for suffix, tensor in stored.items()},
                probes={place.name: probes},
            )
        )
    return found


def _quantized(plan: Plan, weight: Weight) -> Iterator[Piece]:
    assert weight.layer is not None
    codes = whole_codes(weight.layer, weight.tensor, weight.dtype)
    for expert, own in groupby(weight.places, key=lambda place: place.expert):
        found = _pieces_of(plan, weight, codes.matrix(expert), list(own))
        while found:  # a matrix is not held while the next one is made
            yield found.pop(0)


def _values(plan: Plan, weight: Weight) -> Iterator[Piece]:
    values = whole_values(weight.tensor, weight.dtype)
    found = {f"{each.name}.bias": values[each.expert, each.start : each.stop : each.step] for each in weight.places}
    for name, tensor in (found or in_checkpoint(plan.model, weight.name, values)).items():
        yield Piece(tensors={name: tensor.contiguous()})


def pieces(plan: Plan) -> Iterator[Piece]:
    """Yield the tensors of a plan in the plan's order; all ranks have to iterate to the end (collective)."""
    with torch.no_grad():
        for weight in plan.weights:
            yield from _values(plan, weight) if weight.scheme is None else _quantized(plan, weight)


def _pairs(stream: Iterator[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs of the pieces, without a reference to tensors that were yielded before."""
    for piece in stream:
        found = dict(piece.tensors)
        del piece
        while found:
            name = next(iter(found))
            yield name, found.pop(name)


def tensors(
    model: nn.Module, format: str, *, unfit: str = "raise", forward_dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's checkpoint in a serving format, with the quantized weights of training.

    Tensors are yielded in module order: all tensors of a layer come before those of the next layer. Each tensor is
    yielded once, unsharded, and under its name in a checkpoint file. A server that accepts a stream of weights, such
    as vLLM with its weight transfer, can load them as they arrive.

    If the model is distributed (FSDP2, tensor parallel, expert parallel), all ranks must call this and iterate over
    all tensors. Each rank quantizes its shard and sends quantized data. In addition to its shards, a rank holds one
    quantized matrix and a tile of 65536 values in float32. Parameters in high precision are gathered one at a time.

    Args:
        model: A model converted by `fp8compile.convert`, with or without FP8 parameters.
        format: ``"fine_grained_fp8"``, ``"compressed-tensors"`` or ``"modelopt"``.
        unfit: What to do if the format can't hold the weight of a converted layer: ``"raise"``, or ``"values"`` to
            write the weight in high precision.
        forward_dtype: Dtype to which the forward casts parameters before it quantizes them, such as the dtype of
            ``torch.autocast``. By default, each layer uses the dtype of its forward passes with gradients in this
            process, or else the dtype of FSDP2's ``MixedPrecisionPolicy`` or of its parameters.

    Returns:
        An iterator over pairs of a name and a tensor. A tensor may share memory with a parameter, so use or copy it
        before the next optimizer step.

    Raises:
        ValueError: The format is unknown, the model has no FP8 layer, the format does not support a weight, or the
            forward passes of a layer used several dtypes or a dtype other than ``forward_dtype``. The call itself
            raises this, not the first iteration.
    """
    plan = plan_of(model, format_named("tensors", format), unfit=unfit, forward_dtype=forward_dtype)
    return _pairs(pieces(plan))
