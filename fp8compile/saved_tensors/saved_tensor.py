"""SavedTensor: description of a tensor that the forward saves for the backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

__all__ = ["DEFAULT_KINDS", "KINDS", "SMALLEST", "SavedTensor"]

KINDS = ("norm", "activation", "checkpoint", "attention", "gemm", "other")
# Their codes move gradients least, and generated kernels read them, so that no kernel has to write them again.
DEFAULT_KINDS = ("norm", "activation", "checkpoint")
# Smaller tensors save little. 65,536 elements in bfloat16 are 128 KiB, and codes save half of it.
SMALLEST = 65_536


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A floating-point tensor that the forward computes and saves for the backward.

    This excludes statistics (means, amaxes, the log-sum-exp of attention), random states and a graph's own arguments.

    Attributes:
        kind: How the tensor is used.

            - ``"norm"``: an input of a norm over the last dim, or a term of a sum that is such an input.
            - ``"activation"``: an input of SiLU, GELU, sigmoid or tanh, or a factor of an elementwise multiplication.
            - ``"checkpoint"``: an input of a checkpointed region.
            - ``"attention"``: read by the backward of attention.
            - ``"gemm"``: read by a GEMM of the backward, or by a layer that quantizes it.
            - ``"other"``: anything else, such as a tensor read by the backward of an unknown operator.
        shape: Shape of the tensor. For a dynamic size, the value that the graph was traced with.
        dtype: Dtype of the tensor.
        module: Fully qualified name of the module that computes the tensor, from Dynamo; empty if unknown.
        made_by: Name of the operator that computes the tensor, such as ``"add"``; empty in eager mode.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str = ""
    made_by: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def is_like(self, other: SavedTensor) -> bool:
        """Whether two descriptions are equal up to numbers in module names, such as layer numbers."""
        mine, others = (_unnumbered(each.module) for each in (self, other))
        return mine == others and replace(self, module="") == replace(other, module="")


def _unnumbered(module: str) -> tuple[str, ...]:
    return tuple("" if part.isdecimal() else part for part in module.split("."))
