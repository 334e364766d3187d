"""Layout of a moment in an optimizer's state: values, or codes and scales of blocks within rows.

    parameter (N, K)        exp_avg_codes (N, K) uint8     exp_avg_scale (N, ceil(K / 128)) float32
    (E, N, K), E experts    (E, N, K)                      (E, N, ceil(K / 128))
    (N, 64, 3, 3)           (N, 64, 3, 3)                  (N, 5): trailing dims make one row of 576

A block never crosses rows, so FSDP2 shards scales together with the rows. Codes and scales are two tensors, sharded
like the parameter; checkpoints load bit for bit on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8compile import ops
from fp8compile._compat import local_itself
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.nn.layer.redistribute_like import wrapped_like
from fp8compile.ops.layer.quantize_over_ranks import positions
from fp8compile.quantizers import CurrentScaling, RootScaling
from fp8compile.quantizers.blocks import grid_shape
from fp8compile.tensor import sharding_of

__all__ = ["CODES", "LARGEST_ROOT", "STORED", "MomentRows", "StoredMoment", "quantized"]

CODES = torch.float8_e4m3fn
STORED = (torch.float32, torch.bfloat16, CODES)  # dtypes of moments in the state
BLOCK = (1, 128)  # values of a row that share a scale: 1 + 4 / 128 bytes a value
# Moments of fewer values stay float32, as in bitsandbytes and torchao: norms and biases, which save nothing.
SMALLEST = 4096
LARGEST_ROOT = 1.8e19  # of a second moment; float32 holds its square, and that of a code that rounding puts above it
SHORTEST_ROW = 16  # a shorter row stays float32, because its scale would cost more than a quarter of a byte a value


@dataclass(frozen=True)
class MomentRows:
    """A parameter reshaped to rows, along which its moments are quantized: shapes and sharding.

    Attributes:
        local: Shape of this rank's shard, reshaped to rows.
        whole: Shape of the unsharded parameter, reshaped to rows.
        cuts: How ranks shard the reshaped parameter.
    """

    local: tuple[int, ...]
    whole: tuple[int, ...]
    cuts: tuple[DimSharding, ...]

    @staticmethod
    def of(parameter: Tensor) -> MomentRows:
        """Reshape a parameter to the rows in which its moments are quantized.

        Raises:
            ValueError: The parameter is sharded along a dim that is merged into rows, other than the first merged dim.
        """
        whole, local = _as_rows(parameter.shape), tuple(local_itself(parameter).shape)
        last = max(len(whole) - 1, 0)
        inner = math.prod(parameter.shape[last + 1 :])
        cuts = []
        for cut in sharding_of(parameter):
            if cut.dim > last:
                raise ValueError(
                    f"moments: a parameter of shape {tuple(parameter.shape)} is sharded along dim {cut.dim}, but its "
                    f"dims from {last} on form one row of its optimizer states. Shard dim {last} or an earlier one."
                )
            sizes = tuple(size * inner for size in cut.sizes) if cut.dim == last else cut.sizes
            cuts.append(DimSharding(cut.group, cut.rank, cut.dim, sizes))
        return MomentRows((*local[:last], math.prod(local[last:])) if local else (), whole, tuple(cuts))

    def are_small(self) -> bool:
        """Whether the unsharded parameter is too small for codes, so that its moments stay float32."""
        return len(self.whole) < 2 or math.prod(self.whole) < SMALLEST or self.whole[-1] < SHORTEST_ROW

    def check_blocks(self) -> None:
        """Raise a ValueError if a shard boundary divides a block of a row."""
        for cut in self.cuts if not self.are_small() else ():
            ends = [sum(cut.sizes[: rank + 1]) for rank in range(len(cut.sizes))]
            if cut.dim == len(self.whole) - 1 and any(end % BLOCK[1] for end in ends if end < cut.total):
                raise ValueError(
                    f"FP8 optimizer states: rows of {cut.total} values are sharded as {cut.sizes}, so a block of "
                    f"{BLOCK[1]} would span two ranks. Shard another dim, or in multiples of {BLOCK[1]}, or put "
                    "this parameter into a group with high-precision states, such as exp_avg_dtype=torch.float32."
                )

    def in_blocks(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return the shape in which a step computes this rank's rows, and the block in that shape.

        If the row length is a multiple of 128, each block becomes a row, and Inductor generates one kernel for a step.
        Otherwise it generates two, which exchange float32 moments through memory.
        """
        length = BLOCK[1]
        if self.local[-1:] and self.local[-1] % length == 0:
            return (math.prod(self.local) // length, length), (1, -1)
        return self.local, BLOCK

    def place(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return where the rows and columns of `in_blocks` lie in the unsharded parameter, int64; () if unsharded."""
        if not self.cuts:
            return ()
        without_memory = torch.empty((), device=device).expand(self.local)
        one_by_one = CurrentScaling(block=(1, 1), rounding="stochastic")
        rows, columns = positions(Plain(without_memory, TensorLayout(self.cuts)), one_by_one)
        shape, block = self.in_blocks()
        if block == BLOCK:
            return rows, columns
        length = shape[-1]
        return (rows.unsqueeze(1) + columns[::length]).flatten(), torch.arange(length, device=device)


def _as_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Merge trailing dims until a row has 128 elements or more; dim 0, which FSDP2 shards, is never merged."""
    rows = tuple(shape)
    while len(rows) > 2 and rows[-1] < BLOCK[1]:
        rows = (*rows[:-2], rows[-2] * rows[-1])
    return rows


@cache
def _quantizer(root: bool, block: tuple[int, int], rounding: str, seed: int) -> CurrentScaling:
    return (RootScaling if root else CurrentScaling)(block=block, rounding=rounding, seed=seed)


@dataclass(frozen=True)
class StoredMoment:
    """How an optimizer stores one of its moments.

    Attributes:
        name: Key in the state, as in ``torch.optim``, such as ``exp_avg``. Codes and scales have separate keys,
            ``exp_avg_codes`` and ``exp_avg_scale``, so that nobody mistakes codes for values.
        dtype: ``torch.float8_e4m3fn`` for codes, else the dtype of the values.
        quantizer: Quantizes the moment in blocks of 1 x 128 values.
    """

    name: str
    dtype: torch.dtype
    quantizer: CurrentScaling

    @staticmethod
    def of_group(name: str, group: dict[str, Any], *, root: bool) -> StoredMoment:
        """Return how the options of a parameter group ask to store the moment ``name``.

        If ``root``, the moment is never negative, and its square root is quantized.
        """
        quantizer = _quantizer(root, BLOCK, group["rounding"], group["seed"])
        return StoredMoment(name, group[f"{name}_dtype"], quantizer)

    def quantizer_for(self, rows: MomentRows) -> CurrentScaling | None:
        """Return the moment's quantizer for the shape ``rows.in_blocks()``; None if stored as values."""
        if self.dtype != CODES or rows.are_small():
            return None
        own = self.quantizer
        return _quantizer(isinstance(own, RootScaling), rows.in_blocks()[1], own.rounding, own.seed)

    def parts(self, state: dict[str, Any], rows: MomentRows) -> tuple[Tensor, ...]:
        """Return this rank's values, or codes and scales, of the moment in ``state``, the state of one parameter.

        The tensors are views in the shape ``rows.in_blocks()``.
        """
        shape, block = rows.in_blocks()
        shapes = shape, grid_shape(shape, block)
        return tuple(local_itself(state[key]).view(each) for key, each in zip(self.keys(rows), shapes, strict=False))

    def keys(self, rows: MomentRows) -> tuple[str, ...]:
        """Return the keys of the moment's tensors in a parameter's state."""
        return (self.name,) if self.quantizer_for(rows) is None else self.keys_of_codes()

    def is_in(self, state: dict[str, Any], rows: MomentRows) -> bool:
        """Whether a state stores this moment in this dtype; False if the group's options have changed since."""
        keys = self.keys(rows)
        if not all(key in state for key in keys):
            return False
        return len(keys) > 1 or state[self.name].dtype == self._dtype_of_values(rows)

    def _dtype_of_values(self, rows: MomentRows) -> torch.dtype:
        return torch.float32 if rows.are_small() else self.dtype

    def keys_of_codes(self) -> tuple[str, str]:
        """Return the keys of the moment's codes and of its scales in the state."""
        return f"{self.name}_codes", f"{self.name}_scale"

    def zeros(self, parameter: Tensor, rows: MomentRows) -> dict[str, Tensor]:
        """Return the initial state of the moment, zeros, by key; sharded DTensors if ``parameter`` is a DTensor."""
        local = local_itself(parameter)
        if self.quantizer_for(rows) is None:
            return self._of_values(torch.zeros(local.shape, device=local.device), parameter, rows)
        codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
        return self._of_codes(codes, torch.ones(grid_shape(rows.local, BLOCK), device=local.device), parameter, rows)

    def _of_values(self, values: Tensor, parameter: Tensor, rows: MomentRows) -> dict[str, Tensor]:
        kept = values.to(self._dtype_of_values(rows), copy=True, memory_format=torch.contiguous_format)
        return {self.name: wrapped_like(kept, parameter)}

    def _of_codes(self, codes: Tensor, scale: Tensor, parameter: Tensor, rows: MomentRows) -> dict[str, Tensor]:
        whole = torch.empty(grid_shape(rows.whole, BLOCK), device="meta")
        found = wrapped_like(codes, parameter), wrapped_like(scale, parameter, whole)
        return dict(zip(self.keys_of_codes(), found, strict=True))

    def loaded(self, state: dict[str, Any], parameter: Tensor, rows: MomentRows) -> dict[str, Tensor]:
        """Return this moment's tensors by key: copies from a saved ``state``, quantized or dequantized if needed.

        They are contiguous, as `parts` views them, whatever the strides of those saved.

        Raises:
            KeyError: The state has neither codes nor values of the moment.
        """
        device, quantizer = parameter.device, self.quantizer_for(rows)
        if all(key in state for key in self.keys_of_codes()):
            parts = (local_itself(state[key]).detach() for key in self.keys_of_codes())
            codes, scale = (each.to(device, copy=True, memory_format=torch.contiguous_format) for each in parts)
            if quantizer is not None:
                return self._of_codes(codes, scale, parameter, rows)
            values = ops.dequantize(codes.view(rows.local), scale, self.quantizer, torch.float32)
            return self._of_values(values.view(codes.shape), parameter, rows)
        if self.name not in state:
            raise KeyError(
                f"moments: the saved state of a parameter has {sorted(state)}, but neither {self.name} nor "
                f"{' and '.join(self.keys_of_codes())}. Load the state of an optimizer with the same states."
            )
        values = local_itself(state[self.name]).detach().to(device)
        if quantizer is None:
            return self._of_values(values, parameter, rows)
        in_blocks = values.float().reshape(rows.in_blocks()[0])
        if isinstance(quantizer, RootScaling):  # torch.optim's may be infinite, which would make a block NaN
            in_blocks = in_blocks.clamp(max=LARGEST_ROOT**2)
        codes, scale = quantized(in_blocks, quantizer, rows.place(device))
        scale = scale.view(grid_shape(rows.local, BLOCK))
        return self._of_codes(codes.view(values.shape), scale, parameter, rows)


def quantized(values: Tensor, quantizer: CurrentScaling, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Quantize a float32 moment in the shape `MomentRows.in_blocks` to codes and scales.

    ``place`` is from `MomentRows.place`. Ranks send nothing, because no block is divided between ranks.
    """
    multiplier, scale = ops.scale(ops.amax(values, quantizer), quantizer)
    return ops.cast(values, multiplier, quantizer, *place), scale
