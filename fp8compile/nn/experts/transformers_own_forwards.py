"""Experts of transformers' models that define their own forward of experts: Llama 4, JetMoE and DBRX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fp8compile.nn.experts.module_spec import Layout, ModuleSpec, code_of
from fp8compile.nn.experts.sorted_rows import sorted_rows, summed
from fp8compile.nn.layer.forward_dtype import note_forward_dtype
from fp8compile.nn.layer.grouped_linear import grouped_linear

__all__ = ["DBRX", "JETMOE", "LLAMA4"]


def _product(self: Any, x: Tensor, name: str, matrices: Any, offsets: Tensor, *, is_turned: bool = False) -> Tensor:
    note_forward_dtype(self, name)
    known, observer = self.step_codes(name, is_turned=is_turned), self.observer(name)
    return grouped_linear(x, matrices, offsets, recipe=self.recipe, weight_codes=known, observer=observer)


def _llama4(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute Llama 4's experts in FP8: map (experts * tokens, hidden) to the same shape.

    Each expert gets all tokens; tokens that chose another expert are zeros.
    """
    experts, hidden, _ = self.gate_up_proj.shape
    tokens = hidden_states.view(experts, -1, hidden).shape[1]
    offsets = torch.arange(1, experts + 1, device=hidden_states.device, dtype=torch.int32) * tokens
    rows = hidden_states.reshape(-1, hidden)
    both = _product(self, rows, "gate_up_proj", self.gate_up_proj.transpose(-2, -1), offsets, is_turned=True)
    gate, up = both.chunk(2, dim=-1)
    inner = up * self.act_fn(gate)
    return _product(self, inner, "down_proj", self.down_proj.transpose(-2, -1), offsets, is_turned=True)


def _jetmoe(self: Any, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
    """Compute JetMoE's experts in FP8: map (rows, in_features) to (rows, out_features).

    The first ``expert_size[0]`` rows go to the first expert, and so on.
    """
    rows = sum(expert_size)
    if not torch.compiler.is_compiling() and rows != inputs.shape[0]:  # a graph knows no sizes
        raise ValueError(
            f"{type(self).__name__}: expert_size sums to {rows} rows, but inputs has {inputs.shape[0]}; each row "
            "must belong to one expert."
        )
    ends = torch.tensor(list(accumulate(expert_size)), dtype=torch.int32, device=inputs.device)
    return _product(self, inputs, "weight", self.weight, ends)


def _dbrx_layout(module: Any) -> Layout:
    """Return DBRX's matrices, which are rows of 2-D parameters of a child module.

    ``w2`` has the shape of ``w1``, but the forward multiplies by the transpose of ``w2``.
    """
    up = module.ffn_hidden_size, module.hidden_size
    weights = {f"mlp.{name}": module.mlp.get_parameter(name) for name in ("w1", "v1", "w2")}
    return Layout(weights=weights, matrices=(up, up, up[::-1]), num_experts=module.num_experts)


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute DBRX's experts in FP8: map (batch, ..., hidden) to (batch, tokens / batch, hidden).

    For ``top_k_index`` and ``top_k_weights`` see `sorted_rows`.
    """
    tokens = hidden_states.reshape(-1, self.hidden_size)
    rows = sorted_rows(tokens, top_k_index, top_k_weights, num_experts=self.num_experts, recipe=self.recipe)
    w1, v1, w2 = (
        getattr(self.mlp, name).view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
        for name in ("w1", "v1", "w2")
    )
    gate = _product(self, rows.x, "mlp.w1", w1, rows.offsets)
    up = _product(self, rows.x, "mlp.v1", v1, rows.offsets)
    inner = self.mlp.activation_fn(gate) * up
    y = _product(self, inner, "mlp.w2", w2.transpose(-2, -1), rows.offsets)
    return summed(y, rows, self.recipe).to(hidden_states.dtype).view(hidden_states.shape[0], -1, self.hidden_size)


LLAMA4 = ModuleSpec(
    takes=lambda cls: code_of(cls) == ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts.forward"),
    method="forward",
    replacement=_llama4,
    is_transposed=lambda module: True,
)
JETMOE = ModuleSpec(
    takes=lambda cls: code_of(cls) == ("transformers.models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts.forward"),
    method="forward",
    replacement=_jetmoe,
    is_transposed=lambda module: False,
)
DBRX = ModuleSpec(
    takes=lambda cls: code_of(cls) == ("transformers.models.dbrx.modeling_dbrx", "DbrxExperts.forward"),
    method="forward",
    replacement=_dbrx,
    is_transposed=lambda module: False,
    layout=_dbrx_layout,
)
