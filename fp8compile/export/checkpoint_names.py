"""Mapping from a model's parameters to names in a checkpoint, matrix by matrix.

transformers' checkpoints have other names and shapes than the parameters of its models. Experts, for example, are one
stacked weight for gate and up in the model, and a matrix per expert and projection in the checkpoint. transformers can
convert each parameter to the checkpoint's tensors. Here the conversion gets row numbers in place of values, to
find where each row goes (E experts, I and H features):

    gate_up_proj (E, 2 I, H) --rows (E, 2 I, 1)--> experts.0.gate_proj.weight: rows 0 to I of expert 0, ...

transformers has no such conversion for quantized experts that are stored as (in_features, out_features), as in gpt-oss
and Llama 4. Such experts get the names that llm-compressor uses: a linear for each expert and projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Place", "in_checkpoint", "is_of_transformers", "places", "places_of_transposed", "tied_names"]


@dataclass(frozen=True)
class Place:
    """A matrix of a checkpoint: its name, and the rows of a model's parameter that it consists of.

    Attributes:
        name: Name in the checkpoint, without ``.weight``.
        expert: Index of the expert in the parameter; None if the parameter is one matrix.
        start: The matrix's first row in the parameter, or in the expert's part of the parameter.
        stop: The row after the matrix's last row.
        step: 2 if the matrix takes every other row, because the model interleaves gate and up; else 1.
    """

    name: str
    expert: int | None
    start: int
    stop: int
    step: int = 1

    @property
    def rows(self) -> int:
        """Return the number of rows of this matrix."""
        return len(range(self.start, self.stop, self.step))


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is a transformers model, whose checkpoint may have other names than its parameters."""
    return any(each.__module__ == "transformers.modeling_utils" for each in type(model).__mro__)


def in_checkpoint(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Map names in a checkpoint to the tensors that the checkpoint stores for the parameter or buffer ``name``.

    ``tensor`` has the values of the parameter or buffer.
    """
    if not is_of_transformers(model):
        return {name: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each tied parameter, which a checkpoint does not store, to the name of the parameter it is tied to.

    The mapping is empty for a model that is not of transformers.
    """
    tied: Any = getattr(model, "all_tied_weights_keys", None) if is_of_transformers(model) else None
    return dict(tied or {})


def places_of_transposed(experts: Any, name: str, out_features: int, count: int) -> list[Place]:
    """List the checkpoint's matrices for stacked weights of experts, each (in_features, out_features).

    The checkpoint stores each matrix as (out_features, in_features); rows of a `Place` are output features. ``name``
    is the stack's name in the model, such as ``"mlp.experts.gate_up_proj"``; ``count`` is the number of experts.
    """
    path, _, own = name.rpartition(".")
    parts = [(own, 0, out_features, 1)]
    if own == "gate_up_proj" and getattr(experts, "is_concatenated", True):
        parts = [("gate_proj", 0, out_features // 2, 1), ("up_proj", out_features // 2, out_features, 1)]
    elif own == "gate_up_proj":
        parts = [("gate_proj", 0, out_features, 2), ("up_proj", 1, out_features, 2)]
    return [Place(f"{path}.{index}.{part}", index, *rows) for index in range(count) for part, *rows in parts]


def places(model: nn.Module, name: str, weight: Tensor) -> list[Place] | str:
    """List the checkpoint's matrices for a weight, or return the reason, a text, why there are none.

    Only the shape of ``weight``, (N, K) or (E, N, K), is read.
    """
    shape = (*weight.shape[:-1], 1)
    found = in_checkpoint(model, name, torch.arange(weight.shape[:-1].numel()).view(shape))
    if not is_of_transformers(model) and weight.ndim == 3:
        rows = found.pop(name)
        found = {f"{name}.{index}.weight": rows[index] for index in range(rows.shape[0])}
    own: list[Place] = []
    for key, rows in found.items():
        first, count = int(rows.flatten()[0]), rows.numel()
        if not key.endswith(".weight") or rows.shape != (count, 1):
            return f"is stored in the checkpoint as {key}, which is not a matrix of its own"
        if not torch.equal(rows.flatten(), torch.arange(first, first + count)):
            return f"is stored in the checkpoint as {key}, with its rows in a different order"
        expert, start = divmod(first, weight.shape[-2])
        own.append(Place(key.removesuffix(".weight"), expert if weight.ndim == 3 else None, start, start + count))
    return own
