"""Observed: base of modules whose FP8 GEMMs a `fp8compile.Monitor` can observe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fp8compile._compat import is_dtensor
from fp8compile.nn.layer.ungathered_experts import UngatheredStack
from fp8compile.ops.layer.observer import Observer

if TYPE_CHECKING:
    from torch.nn import Module  # Observed is always combined with a Module
else:
    Module = object

__all__ = ["Observed", "first_expert"]


class Observed(Module):
    """Mixin for modules whose forward passes statistics buffers, from `observer`, to FP8 functions.

    For example, to monitor your own module that calls ``fp8compile.parallel.column_parallel_linear``, derive it from
    this mixin, list its weights, and pass ``observer=self.observer("weight")``. All converted modules do this.

    Attributes:
        observed_weights: Names of the parameters that the module uses in GEMMs; 3-D for stacked experts.
    """

    observed_weights: ClassVar[Sequence[str]] = ()
    _observers: dict[str, Observer] | None = None  # only in a step whose statistics are read

    def observer(self, name: str, stack: Any = None) -> Observer | None:
        """Return the statistics buffers of a weight; None if grad mode is off or the step is not monitored.

        Args:
            name: The name of the weight.
            stack: The experts' weights as the forward uses them, if a rank may have only some of the experts; else
                None.
        """
        if not torch.is_grad_enabled() or self._observers is None:  # an evaluation has no backward, which would write
            return None
        found = self._observers.get(name)
        if found is None:
            return None
        if not torch.compiler.is_compiling():  # of compiled code the graph tells it
            found.note_call()
        return found if stack is None else found.placed(first_expert(stack))

    def weights_to_observe(self) -> dict[str, int]:
        """Return the names of the module's weights, each with its number of matrices; 0 for a 2-D weight."""
        parameters: dict[str, Any] = {name: self.get_parameter(name) for name in self.observed_weights}
        return {name: each.shape[0] if each.ndim == 3 else 0 for name, each in parameters.items()}


def first_expert(stack: Any) -> int:
    """Return the index of this rank's first expert in stacked weights; 0 unless experts are spread over ranks."""
    if isinstance(stack, UngatheredStack):
        if stack.spread is None:
            return 0
        mesh, placements, own = stack.spread
    elif is_dtensor(stack):
        mesh, placements, own = stack.device_mesh, stack.placements, stack.to_local().shape[0]
    else:
        return 0
    ranks = [mesh.get_local_rank(index) for index, each in enumerate(placements) if each.is_shard(0)]
    return ranks[0] * own if ranks else 0
