"""Run the ops that collect statistics on the codes of a weight that is a QuantizedTensor."""

from __future__ import annotations

from functools import partial
from typing import Any

from fp8compile import _compat
from fp8compile.monitor.observe import observe, observe_gradient
from fp8compile.monitor.pieces import Seen
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_ops import COMPUTE, TAIL
from fp8compile.ops.layer.operands import Phase
from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.tensor.as_layer_weight import codes_for, is_served, unserved
from fp8compile.tensor.quantized_tensor import LAYERS, QuantizedTensor, has_codes, no_meaning

__all__ = ["codes_seen"]


def _observe(func: Any, *args: Any) -> Any:
    """Run a layer's statistics op on the codes and scales of its weight."""
    (first, x, weight, *others), layer = args[:-TAIL], LayerArgs.of(*args[-TAIL:])
    if not is_served(layer):
        raise TypeError(no_meaning(func, weight if has_codes(weight) else None))
    gradient = func is observe_gradient
    seen = None if gradient else codes_seen(weight, layer.recipe)  # the forward has counted the weight's codes
    run = partial(COMPUTE[func], seen=seen)
    own = first, x, None if gradient else weight
    return _compat.as_kernel(run)(Phase.of(GEMMS[gradient], first), *own, *others, layer)


def codes_seen(weight: QuantizedTensor, recipe: Recipe) -> Seen:
    """Return the codes of a quantized weight by the recipe's field, such as ``"weight"``, for statistics.

    Codes for grad_input are left out if they share memory with those for the output. No codes if none fit ``recipe``.
    """
    if unserved(weight.quantizer, recipe, weight.quantizer_for_grad_input) is not None:
        return Seen(None)
    read = GEMMS[:1] if weight.in_memory is not None else GEMMS[:2]
    return Seen(None, codes={gemm.b: codes_for(weight, gemm) for gemm in read})


LAYERS.update({observe: _observe, observe_gradient: _observe})
