"""Experts of transformers' JetMoE: a module has one product, and gets rows sorted by expert with each group's size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fp8compile.nn.experts.host import Host, code_of
from fp8compile.nn.grouped import grouped_linear

__all__ = ["SIZED"]

JETMOE = ("transformers.models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts.forward")


def _forward(self: Any, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
    """Map (rows, in_features) to (rows, out_features). The first ``expert_size[0]`` rows go to the first expert."""
    rows = sum(expert_size)
    if not torch.compiler.is_compiling() and rows != inputs.shape[0]:  # a graph knows no sizes
        raise ValueError(
            f"{type(self).__name__}: expert_size has {rows} rows in all and inputs {inputs.shape[0]}; each row is of "
            "one expert."
        )
    ends = torch.tensor(list(accumulate(expert_size)), dtype=torch.int32, device=inputs.device)
    return grouped_linear(inputs, self.weight, ends, recipe=self.recipe)


SIZED = Host(
    takes=lambda cls: code_of(cls) == JETMOE,
    method="forward",
    replacement=_forward,
    is_transposed=lambda module: False,
)
