"""Memory policy for torchtitan's GraphTrainer that quantizes tensors saved for the backward."""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8compile.saved_tensors import SavedAsCodes
from fp8compile.saved_tensors.joint_graph import pack_in_joint_graph
from fp8compile.tensor import shown

__all__ = ["register_memory_policy"]


def register_memory_policy(
    saved: SavedAsCodes | None = None, *, name: str = "saved_as_codes", base: str = "default"
) -> str:
    """Register a memory policy with GraphTrainer; select it with ``config.compile.memory_policy = name``.

    The policy first runs another policy, ``base``, which decides what is saved and what is recomputed. ``saved`` then
    selects saved tensors to quantize. The backward dequantizes them.

    Args:
        saved: Which tensors to quantize, and how; None for `SavedAsCodes()`.
        name: Name of the new policy.
        base: Name of the policy that runs first. If ``base`` offloads, quantized tensors are not offloaded.

    Returns:
        ``name``.

    Raises:
        TypeError: ``saved`` is no `SavedAsCodes`.
        ValueError: There is no policy ``base``, or there is one ``name`` already.
    """
    from torchtitan.experiments.graph_trainer import memory_policy as policies  # it registers its own
    from torchtitan.experiments.graph_trainer import registry
    from torchtitan.experiments.graph_trainer.common_utils import _is_backward_node

    value = SavedAsCodes() if saved is None else saved
    if not isinstance(value, SavedAsCodes):
        raise TypeError(
            f"register_memory_policy: `saved` is {shown(saved)}; it must be a fp8compile.SavedAsCodes, or None."
        )
    known: dict[str, Any] = registry.MEMORY_POLICY_REGISTRY
    if base not in known:
        raise ValueError(
            f"register_memory_policy: `base` is {base!r}; it must be one of {', '.join(known)} of {policies.__name__}."
        )
    if name in known:
        raise ValueError(f"register_memory_policy: a policy {name!r} already exists. Choose another name.")
    first = known[base]

    @registry.register_memory_policy(name)
    def policy(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        graph: fx.GraphModule = first(gm, config=config)
        pack_in_joint_graph(graph, value, _is_backward_node)
        return graph

    return name
