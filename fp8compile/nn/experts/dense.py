"""Experts of transformers' Llama 4: every expert gets all tokens; tokens that did not choose it are zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile.nn.experts.host import Host, code_of
from fp8compile.nn.grouped import grouped_linear

__all__ = ["DENSE"]

LLAMA4 = ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts.forward")


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Map (experts * tokens, hidden) to the same shape. All rows of the first expert come first, then the second's."""
    experts, hidden, _ = self.gate_up_proj.shape
    tokens = hidden_states.view(experts, -1, hidden).shape[1]
    offsets = torch.arange(1, experts + 1, device=hidden_states.device, dtype=torch.int32) * tokens
    rows = hidden_states.reshape(-1, hidden)
    both = grouped_linear(rows, self.gate_up_proj.transpose(-2, -1), offsets, recipe=self.recipe)
    gate, up = both.chunk(2, dim=-1)
    inner = up * self.act_fn(gate)
    return grouped_linear(inner, self.down_proj.transpose(-2, -1), offsets, recipe=self.recipe)


DENSE = Host(
    takes=lambda cls: code_of(cls) == LLAMA4,
    method="forward",
    replacement=_forward,
    is_transposed=lambda module: True,
)
