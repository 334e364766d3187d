"""How a moment of a parameter lies in an optimizer's state: as values, or as codes and scales of blocks of a row.

    parameter (N, K)        exp_avg_codes (N, K) uint8     exp_avg_scale (N, ceil(K / 128)) float32
    (E, N, K)               (E, N, K)                      (E, N, ceil(K / 128))
    (N, C, 3, 3), C >= 15   (N, C, 3, 3)                   (N, ceil(9 * C / 128))    trailing dims make one row

A block lies within one row, so that rows which FSDP2 shards have their scales with them: codes and scales are plain
tensors, cut as the parameter is, and any number of ranks loads them to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile import ops
from fp8compile._compat import is_dtensor, local_itself
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.nn.local import wrapped_like
from fp8compile.ops.layer.quantize import positions
from fp8compile.quantizers import CurrentScaling, Quantizer, RootScaling
from fp8compile.tensor import sharding_of

__all__ = ["CODES", "STORED", "MomentRows", "StoredMoment", "quantized"]

CODES = torch.float8_e4m3fn
STORED = (torch.float32, torch.bfloat16, CODES)  # dtypes of moments in the state
BLOCK = 128  # values of a row that share a scale: 1 + 4 / 128 bytes a value
# Moments of fewer values stay float32, as in bitsandbytes and torchao: norms and biases, which save nothing.
SMALLEST = 4096
SHORTEST_ROW = 16  # shorter rows stay float32: a scale for each would be a quarter of a byte a value, or more


@dataclass(frozen=True)
class MomentRows:
    """The rows in which the moments of one parameter have their blocks.

    Attributes:
        num_dims: Number of dims of the view as rows: the parameter's, or fewer if trailing dims make one row.
        local: Shape of this rank's part of that view.
        whole: Shape of the view of the whole parameter.
        cuts: How ranks cut that view.
    """

    num_dims: int
    local: tuple[int, ...]
    whole: tuple[int, ...]
    cuts: tuple[DimSharding, ...]

    @staticmethod
    def of(parameter: Tensor) -> MomentRows | None:
        """The rows of a parameter; None if it is so small that its moments stay float32, on every number of ranks.

        Raises:
            ValueError: Ranks cut rows within a block.
        """
        whole = _as_rows(parameter.shape)
        if len(whole) < 2 or math.prod(whole) < SMALLEST or whole[-1] < SHORTEST_ROW:
            return None
        count = len(whole)
        local = local_itself(parameter).shape
        cuts = tuple(_cut_of_rows(cut, parameter, count) for cut in sharding_of(parameter))
        return MomentRows(count, (*local[: count - 1], math.prod(local[count - 1 :])), whole, cuts)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a view as rows."""
        return CurrentScaling(block=(1, BLOCK)).scale_shape(shape)

    def place(self, device: torch.device, quantizers: Sequence[Quantizer | None]) -> tuple[Tensor, ...]:
        """Positions of this rank's rows and columns in the whole, for stochastic rounding; () where nothing needs them.

        They are the arguments ``rows`` and ``columns`` of `fp8compile.ops.cast`, int64.
        """
        found = [each for each in quantizers if each is not None and not each.is_local()]
        if not self.cuts or not found:
            return ()
        without_memory = torch.empty((), device=device).expand(self.local)
        return positions(Plain(without_memory, TensorLayout(self.cuts)), found[0])


def _as_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Merge trailing dims into one until a row has a block, but never the first dim, which FSDP2 cuts."""
    rows = tuple(shape)
    while len(rows) > 2 and rows[-1] < BLOCK:
        rows = (*rows[:-2], rows[-2] * rows[-1])
    return rows


def _cut_of_rows(cut: DimSharding, parameter: Tensor, count: int) -> DimSharding:
    """A cut of the parameter as a cut of its view as rows, of ``count`` dims."""
    if cut.dim < count - 1:
        return cut
    inner = math.prod(parameter.shape[count:])
    ends = [sum(cut.sizes[: rank + 1]) * inner for rank in range(len(cut.sizes))]
    if cut.dim > count - 1 or any(end % BLOCK for end in ends if end < ends[-1]):
        raise ValueError(
            f"moments as codes: ranks cut a parameter of shape {tuple(parameter.shape)} along dim {cut.dim} to "
            f"{cut.sizes}, and a block of {BLOCK} values of a row would lie on two of them. Cut another dim, or give "
            "this parameter a group whose moments are torch.float32, such as exp_avg_dtype=torch.float32."
        )
    return DimSharding(cut.group, cut.rank, count - 1, tuple(size * inner for size in cut.sizes))


@dataclass(frozen=True)
class StoredMoment:
    """One moment of an optimizer in the state of its parameters.

    Attributes:
        name: Its key, as in ``torch.optim``: ``exp_avg``. Codes have the keys ``exp_avg_codes`` and ``exp_avg_scale``,
            so that nobody reads codes for values.
        dtype: ``torch.float8_e4m3fn`` for codes, else the dtype of the values.
        quantizer: How its values become codes.
    """

    name: str
    dtype: torch.dtype
    quantizer: Quantizer

    @staticmethod
    def of_group(name: str, group: dict[str, Any], *, root: bool = False) -> StoredMoment:
        """The moment as a parameter group of an optimizer asks for it; ``root`` if it is never negative."""
        kind = RootScaling if root else CurrentScaling
        quantizer = kind(block=(1, BLOCK), rounding=group["rounding"], seed=group["seed"])
        return StoredMoment(name, group[f"{name}_dtype"], quantizer)

    def quantizer_for(self, rows: MomentRows | None) -> Quantizer | None:
        """The quantizer of the moment of a parameter with these rows; None if its values are kept."""
        return self.quantizer if rows is not None and self.dtype == CODES else None

    def dtype_for(self, rows: MomentRows | None) -> torch.dtype:
        """The dtype of values that are kept."""
        return torch.float32 if rows is None or self.dtype == CODES else self.dtype

    def keys(self, rows: MomentRows | None) -> tuple[str, ...]:
        """The keys of the tensors in the state."""
        return (self.name,) if self.quantizer_for(rows) is None else (f"{self.name}_codes", f"{self.name}_scale")

    def zeros(self, parameter: Tensor, rows: MomentRows | None) -> dict[str, Tensor]:
        """The state of a moment of zeros; DTensors that are cut as the parameter, if that is one."""
        local = local_itself(parameter)
        if rows is None or self.quantizer_for(rows) is None:
            zeros = torch.zeros(local.shape, dtype=self.dtype_for(rows), device=local.device)
            return {self.name: wrapped_like(zeros, parameter)}
        codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
        scale = torch.ones(rows.scale_shape(rows.local), device=local.device)
        return self._of_codes(codes, scale, parameter, rows)

    def _of_codes(self, codes: Tensor, scale: Tensor, parameter: Tensor, rows: MomentRows) -> dict[str, Tensor]:
        whole = torch.empty(rows.scale_shape(rows.whole), device="meta")
        scale = wrapped_like(scale, parameter, whole)
        return dict(zip(self.keys(rows), (wrapped_like(codes, parameter), scale), strict=True))

    def loaded(self, state: dict[str, Any], parameter: Tensor, rows: MomentRows | None) -> dict[str, Tensor]:
        """This moment of a state that was saved: codes stay codes; values become codes, and codes values, if asked.

        Raises:
            KeyError: The state has neither codes nor values of the moment.
        """
        device, given = parameter.device, [f"{self.name}_codes", f"{self.name}_scale"]
        quantizer = self.quantizer_for(rows)
        if all(key in state for key in given):
            parts = [local_itself(state[key]).detach().to(device, copy=True) for key in given]
            if quantizer is not None and rows is not None:
                return self._of_codes(*parts, parameter, rows)
            values = _values(*parts, self.quantizer)
        elif self.name in state:
            values = local_itself(state[self.name]).detach().to(device)
        else:
            raise KeyError(
                f"moments as codes: the state of a parameter has {sorted(state)}, and neither {self.name} nor {given}. "
                "Load a state of the same kind of optimizer."
            )
        if quantizer is None or rows is None:
            return {self.name: wrapped_like(values.to(self.dtype_for(rows), copy=True), parameter)}
        place = rows.place(device, [quantizer])
        codes, scale = quantized(values.float().reshape(rows.local), quantizer, place)
        return self._of_codes(codes.view(values.shape), scale, parameter, rows)


def _values(codes: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    rows = codes.view(*scale.shape[:-1], -1) if codes.numel() else codes.view(*scale.shape[:-1], 0)
    return ops.dequantize(rows, scale, quantizer, torch.float32).view(codes.shape)


def quantized(values: Tensor, quantizer: Quantizer, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment's rows, float32.

    No block is cut, so that ranks exchange nothing. ``place`` is what `MomentRows.place` returned.
    """
    multiplier, scale = ops.scale(ops.amax(values, quantizer), quantizer)
    return ops.cast(values, multiplier, quantizer, *place), scale
