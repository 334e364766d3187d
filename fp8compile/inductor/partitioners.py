"""Partitioners for Inductor that run PyTorch's min-cut partitioner and then change the two graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

__all__ = ["PARTITIONERS", "min_cut_then"]

# for each class of values that `fp8compile.compile` accepts as ``saved``, a function that makes a partitioner of one
PARTITIONERS: dict[type[Any], Callable[[Any], Any]] = {}


def min_cut_then(
    change: Callable[[fx.GraphModule, fx.GraphModule, int], None],
    *,
    uuid: Callable[[], str],
    reduced: Callable[[], tuple[Any, ...]],
) -> Any:
    """Return a partitioner for Inductor's ``custom_partitioner_fn``: the min-cut partitioner, then ``change``.

    Args:
        change: Changes the forward and the backward graph in place; its third argument is the number of outputs that
            the forward's caller gets.
        uuid: Returns a text for the keys of compile caches; called for each key.
        reduced: Returns what ``__reduce__`` returns, for caches that pickle the partitioner.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def uuid(self) -> str:
            return uuid()

        def __reduce__(self) -> tuple[Any, ...]:
            return reduced()

        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            from torch._functorch.partitioners import min_cut_rematerialization_partition

            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            change(forward, backward, kwargs["num_fwd_outputs"])
            return forward, backward

    return Partitioner()
