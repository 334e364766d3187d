"""Experts of transformers: each token goes to the few experts that its router chose.

`use_experts_implementation` of transformers writes flags into each such module (transposed weights, biases, a gate, a
norm behind), and replaces the forward by one that looks up an implementation in the config of the whole model. This
forward takes the place of the latter, in one module, and reads the same flags.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8compile.nn.experts.host import Host, code_of
from fp8compile.nn.experts.placed import group_of_experts, local_stack
from fp8compile.nn.experts.token_shares import all_shares, own_share
from fp8compile.nn.grouped import grouped_linear
from fp8compile.nn.not_sharded import warn_if_not_sharded
from fp8compile.nn.routes import Routes, expert_routes
from fp8compile.ops.groups.layout import sizes_of_groups
from fp8compile.ops.groups.routed_rows import routed_rows
from fp8compile.quantizers import Recipe

__all__ = ["ROUTED"]

DISPATCH = ("transformers.integrations.moe", "use_experts_implementation.<locals>.wrapper.<locals>.forward")


def _project(self: nn.Module, x: Tensor, offsets: Tensor, name: str) -> Tensor:
    warn_if_not_sharded(self)
    weight = local_stack(self, name)
    bias = local_stack(self, f"{name}_bias") if self.has_bias else None
    matrices = weight.transpose(-2, -1) if self.is_transposed else weight
    return grouped_linear(x.to(weight.dtype), matrices, offsets, bias, recipe=self.recipe)


def _routes(self: nn.Module, offsets: Tensor) -> Routes | None:
    """How rows reach the ranks that have their experts; None where this rank has all of them."""
    group = group_of_experts(self.down_proj)
    if group is None:
        return None
    routes = expert_routes(sizes_of_groups(offsets), group=group, capacity=self.dispatch_options.capacity)
    if routes.capacity is not None:
        self.overflowed_rows += routes.overflow
    return routes


def _traveling(self: nn.Module) -> Recipe | None:
    """The recipe whose codes travel, or None: rows travel as they are."""
    return self.recipe if self.dispatch_options.codes else None


def _forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' results for all tokens, or where other ranks have the same tokens, for a share and then for all.

    Args:
        self: The module.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, top_k): which experts.
        top_k_weights: (tokens, top_k): what each result is multiplied by.

    Returns:
        (tokens, hidden), the dtype of ``hidden_states``.
    """
    mesh = self.dispatch_options.same_tokens
    if mesh is None:
        return _by_experts(self, hidden_states, top_k_index, top_k_weights)
    shares = (own_share(each, mesh) for each in (hidden_states, top_k_index, top_k_weights))
    return all_shares(_by_experts(self, *shares), mesh, hidden_states.shape[0])


def _by_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows sorted by expert, two grouped products, and the weighted sum of each token's results.

    Rows of experts of other ranks have an index behind the last expert. They are sorted behind all groups, where
    `grouped_linear` reads nothing and gives zeros, in gradients too.
    """
    tokens, top_k = top_k_index.shape
    # stable, so that rows of an expert are in one order wherever this runs: blocks along tokens depend on it
    experts, pairs = torch.sort(top_k_index.reshape(-1), stable=True)
    every = torch.arange(self.down_proj.shape[0], device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(pairs.shape[0], device=pairs.device)  # scatter_ would be no code of Inductor's own

    has_gate, has_norm = getattr(self, "has_gate", True), getattr(self, "has_post_expert_norm", False)  # not in 5.0
    x = routed_rows(hidden_states, pairs, places, self.recipe)
    routes = _routes(self, offsets)
    if routes is not None:
        x, offsets = routes.dispatch(x, recipe=_traveling(self)), routes.offsets
    inner = _project(self, x, offsets, "gate_up_proj" if has_gate else "up_proj")
    inner = self._apply_gate(inner) if has_gate else self.act_fn(inner)
    y = _project(self, inner, offsets, "down_proj")
    y = self.post_expert_norm(y) if has_norm else y
    if routes is not None:
        y = routes.combine(y, pairs.shape[0], recipe=_traveling(self))
    y = y * routed_rows(top_k_weights.reshape(-1, 1), pairs, places, self.recipe)
    return routed_rows(y, places, pairs, self.recipe).view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


ROUTED = Host(
    takes=lambda cls: code_of(cls) == DISPATCH,
    method="forward",
    replacement=_forward,
    is_transposed=lambda module: module.is_transposed,
)
