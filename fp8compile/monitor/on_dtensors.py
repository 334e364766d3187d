"""Handlers with which DTensor runs the ops that collect statistics."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.layout.cuts import Sharding
from fp8compile.layout.quantized import Plain
from fp8compile.monitor.observe import beside_output, is_here, observe, observe_gradient, totals_of_op
from fp8compile.monitor.on_quantized_weights import codes_seen
from fp8compile.monitor.pieces import Seen, counted
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_ops import TAIL
from fp8compile.ops.layer.operands import GRAD_INPUT, OUTPUT, Operands, Phase
from fp8compile.parallel.dtensor_layer import HANDLERS, check_on_mesh, codes_of_shard, rows_over_fsdp, whole_state
from fp8compile.parallel.dtensor_placements import part_of, whole_of
from fp8compile.quantizers import Recipe
from fp8compile.tensor import has_codes

__all__ = ["register"]


def _counts(cuts: Sharding, mesh: DeviceMesh) -> bool:
    """Whether this rank counts its elements in statistics; of ranks with the same elements, only the first does.

    ``cuts`` says how each dim of ``mesh`` shards the tensor.
    """
    return all(cut is not None or mesh.get_local_rank(index) == 0 for index, cut in enumerate(cuts))


def _weight_seen(part: Plain, recipe: Recipe, *, counts: bool) -> Seen:
    if not has_codes(part.local):
        return Seen(part, counts)
    read = [gemm for gemm in (OUTPUT, GRAD_INPUT) if gemm.b in codes_seen(part.local, recipe).codes]
    return Seen(None, counts, {gemm.b: codes_of_shard(gemm, part, recipe) for gemm in read})


def _observed(op: OpOverload, *args: Any) -> Any:
    """Run a layer's statistics op on DTensors; ``args`` are the op's arguments.

    Totals are plain tensors, because they cover only this rank's elements.
    """
    gradient, layer = op is observe_gradient, LayerArgs.of(*args[-TAIL:])
    first, x, weight, *_ = args
    *_, later, totals = args[:-TAIL]
    check_on_mesh(op.name(), layer)
    rows, recipe, known = layer.sharding.fsdp_shards(), layer.recipe, layer.known
    tokens, mesh = first if gradient else x, first.device_mesh
    gemm, multiplier = GRAD_INPUT if gradient else OUTPUT, whole_state(known.multiplier)
    given = {"grad_output": first if gradient else None, "input": x}
    parts = {name: part_of("linear", tensor) for name, tensor in given.items() if tensor is not None}
    seen = {name: Seen(part, _counts(part.cuts, mesh)) for name, part in parts.items()}
    phase = Phase.of(gemm, next(iter(parts.values())).local)
    more: dict[str, Any] = {}
    if weight is not None and rows is not None:
        right = rows_over_fsdp(gemm, tokens, weight, rows)
        more = {"weight_amax": known.amax, **right.given}
        seen["weight"] = Seen(right.part, _counts(right.part.cuts, mesh))
    elif weight is not None:
        part = part_of("linear", weight)
        if not (gradient and has_codes(part.local)):  # the forward has counted the weight's codes
            seen["weight"] = _weight_seen(part, recipe, counts=_counts(part.cuts, mesh))
    here = partial(is_here, gradient=gradient, later=later)
    found = counted(seen, Operands(recipe, phase, multiplier, **more), totals, here)
    if gradient:
        return totals_of_op(layer.offs, totals, parts["grad_output"].local, found, gradient=True)
    own = _compat.local_itself(first)
    counts = totals_of_op(layer.offs, totals, own, found, gradient=False)
    local, rows_of_totals = beside_output(own, counts, layer.offs, phase)
    return whole_of(local, mesh, first.placements, first.shape), rows_of_totals


def register() -> None:
    """Add the handlers to those of layers."""
    HANDLERS.update({op.name(): partial(_observed, op) for op in (observe, observe_gradient)})
