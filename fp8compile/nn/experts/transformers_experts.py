"""Experts of transformers: each token goes to the few experts that its router chose.

transformers' `use_experts_implementation` replaces the forward of an experts module by one that looks up an
implementation in the model's config. The decorator also sets flags on the module: transposed weights, biases, a gate,
a norm after the experts. The forward here reads these flags too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor
from torch.distributed import ProcessGroup

from fp8compile.nn.experts.adapters import with_additions
from fp8compile.nn.experts.module_spec import ModuleSpec, code_of
from fp8compile.nn.experts.overflow import count
from fp8compile.nn.experts.sorted_rows import SortedRows, sorted_rows, summed
from fp8compile.nn.experts.spread_over_ranks import group_of_experts, local_stack
from fp8compile.nn.layer.expert_routes import expert_routes
from fp8compile.nn.layer.forward_dtype import note_forward_dtype
from fp8compile.nn.layer.grouped_linear import grouped_linear
from fp8compile.nn.layer.raise_on_all_ranks import noted, tried
from fp8compile.ops.groups.padding import sizes_of_groups
from fp8compile.quantizers.check_returned import could_be

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ROUTED"]

DISPATCH = ("transformers.integrations.moe", "use_experts_implementation.<locals>.wrapper.<locals>.forward")


def _project(self: Any, x: Tensor, offsets: Tensor, name: str) -> Tensor:
    note_forward_dtype(self, name)
    observer = self.observer(name, getattr(self, name))
    weight = local_stack(self, name)
    bias: Any = local_stack(self, f"{name}_bias") if self.has_bias else None
    matrices: Any = weight.transpose(-2, -1) if self.is_transposed else weight
    x = x.to(weight.dtype)
    known = self.step_codes(name, is_turned=bool(self.is_transposed))
    y = grouped_linear(x, matrices, offsets, bias, recipe=self.recipe, weight_codes=known, observer=observer)
    return with_additions(self, name, x, offsets, y)


def _check_given(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    what = f"{type(self).__name__}:"
    weight = getattr(self, "gate_up_proj" if getattr(self, "has_gate", True) else "up_proj")
    features = weight.shape[-2 if self.is_transposed else -1]
    if hidden_states.ndim != 2 or not could_be(hidden_states.shape[1:], (features,)):
        raise ValueError(f"{what} hidden_states must be (tokens, {features}), got {tuple(hidden_states.shape)}.")
    if not hidden_states.is_floating_point():
        raise TypeError(f"{what} hidden_states is {hidden_states.dtype}; it must have a floating point dtype.")
    if top_k_index.ndim != 2 or not could_be(top_k_index.shape[:1], hidden_states.shape[:1]):
        raise ValueError(
            f"{what} top_k_index has shape {tuple(top_k_index.shape)} and hidden_states has shape "
            f"{tuple(hidden_states.shape)}; top_k_index must be (tokens, top_k), the experts of each token."
        )
    if not could_be((top_k_weights.numel(),), (top_k_index.numel(),)):
        raise ValueError(
            f"{what} top_k_weights has shape {tuple(top_k_weights.shape)} and top_k_index has shape "
            f"{tuple(top_k_index.shape)}; the shapes must be equal, one weight for each expert of a token."
        )
    given = {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    for name, each in given.items():
        if each.device != weight.device:
            raise ValueError(
                f"{what} {name} is on {each.device}, but the experts are on {weight.device}. Move both to one device."
            )


def _own_share(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part, along dim 0, of a tensor that is the same on all ranks of ``mesh``.

    If all ranks sent all tokens, the experts' gradients would count each token once per rank.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def _all_shares(local: Tensor, mesh: DeviceMesh, tokens: int) -> Tensor:
    """All-gather tokens that `_own_share` divided among ranks; return (tokens, features)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = Size((tokens, local.shape[1]))
    parts = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return parts.redistribute(placements=[Replicate()]).to_local()


def _rows(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> SortedRows:
    given: tuple[Any, ...] = (hidden_states, top_k_index, top_k_weights)
    _check_given(self, *given)
    if (mesh := self.dispatch_options.same_tokens) is not None:
        given = tuple(_own_share(each, mesh) for each in given)
    return sorted_rows(*given, num_experts=self.down_proj.shape[0], recipe=self.recipe)


def _products(self: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """Compute the experts' results for rows ``x``; ``offsets`` are the ends of the experts' rows."""
    has_gate, has_norm = getattr(self, "has_gate", True), getattr(self, "has_post_expert_norm", False)  # not in 5.0
    inner = _project(self, x, offsets, "gate_up_proj" if has_gate else "up_proj")
    inner = self._apply_gate(inner) if has_gate else self.act_fn(inner)
    y = _project(self, inner, offsets, "down_proj")
    return self.post_expert_norm(y) if has_norm else y


def _on_ranks(self: Any, rows: Any, error: Exception | None, group: ProcessGroup) -> Tensor:
    """Send `SortedRows` to the ranks of their experts, multiply there, send results back and sum them by token.

    If this rank found an ``error`` in its rows, all ranks of ``group`` raise.
    """
    experts, capacity = self.down_proj.shape[0], self.dispatch_options.capacity
    if error is None:
        counts = sizes_of_groups(rows.offsets)
    else:
        counts = torch.zeros(experts, dtype=torch.int64, device=self.down_proj.device)
    routes = expert_routes(counts, group=group, capacity=capacity, error=error)
    if capacity is not None:
        count(self, routes.overflow)
    traveling = self.recipe if self.dispatch_options.codes else None
    with noted():
        y = _products(self, routes.dispatch(rows.x, recipe=traveling), routes.offsets)
        y = routes.combine(y, rows.x.shape[0], recipe=traveling)
    return summed(y, rows, self.recipe)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the results of each token's experts, (tokens, hidden), in the input's dtype.

    For the arguments see `sorted_rows`. If ranks have the same tokens (``dispatch_options.same_tokens``), each rank
    computes a part of the tokens, and the results are all-gathered.
    """
    given = hidden_states, top_k_index, top_k_weights
    group, mesh = group_of_experts(self.down_proj), self.dispatch_options.same_tokens
    if group is None:
        rows = _rows(self, *given)
        return summed(_products(self, rows.x, rows.offsets), rows, self.recipe).to(hidden_states.dtype)
    rows, error = tried(_rows, self, *given)
    y = _on_ranks(self, rows, error, group).to(hidden_states.dtype)
    return y if mesh is None else _all_shares(y, mesh, hidden_states.shape[0])


ROUTED = ModuleSpec(
    takes=lambda cls: code_of(cls) == DISPATCH,
    method="forward",
    replacement=_forward,
    is_transposed=lambda module: bool(module.is_transposed),
    takes_additions=True,
)
