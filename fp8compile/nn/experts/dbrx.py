"""Experts of transformers' DBRX: 2-D parameters of a child module hold the matrices of all experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8compile.nn.experts.host import Host, Layout, code_of
from fp8compile.nn.experts.sorted_rows import sorted_rows, summed
from fp8compile.nn.grouped import grouped_linear

__all__ = ["DBRX"]

FORWARD = ("transformers.models.dbrx.modeling_dbrx", "DbrxExperts.forward")


def _layout(module: Any) -> Layout:
    """The layout of DBRX's experts. ``w2`` has the shape of ``w1`` and ``v1``, but is multiplied transposed."""
    names, up = ("mlp.w1", "mlp.v1", "mlp.w2"), (module.ffn_hidden_size, module.hidden_size)
    weights = {name: module.mlp.get_parameter(name.removeprefix("mlp.")) for name in names}
    return Layout(weights=weights, matrices=(up, up, up[::-1]), num_experts=module.num_experts)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Map (batch, ..., hidden) to (batch, tokens / batch, hidden), the shape that DBRX's own forward returns."""
    tokens = hidden_states.reshape(-1, self.hidden_size)
    rows = sorted_rows(tokens, top_k_index, top_k_weights, num_experts=self.num_experts, recipe=self.recipe)
    w1, v1, w2 = (
        getattr(self.mlp, name).view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
        for name in ("w1", "v1", "w2")
    )
    gate = grouped_linear(rows.x, w1, rows.offsets, recipe=self.recipe)
    up = grouped_linear(rows.x, v1, rows.offsets, recipe=self.recipe)
    inner = self.mlp.activation_fn(gate) * up
    y = grouped_linear(inner, w2.transpose(-2, -1), rows.offsets, recipe=self.recipe)
    return summed(y, rows, self.recipe).to(hidden_states.dtype).view(hidden_states.shape[0], -1, self.hidden_size)


DBRX = Host(
    takes=lambda cls: code_of(cls) == FORWARD,
    method="forward",
    replacement=_forward,
    is_transposed=lambda module: False,
    layout=_layout,
)
