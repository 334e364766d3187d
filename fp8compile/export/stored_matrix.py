"""StoredMatrix: a matrix of a serving checkpoint, checked against a recipe and read as FP8 or FP4 data with scales.

    headers --shapes, dtypes--> problems    scales --range, repeated rows--> problems    tensors --> Quantized

`load_quantized` collects the problems of all matrices before it reads one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.export.checkpoint_names import Place
from fp8compile.export.read_folder import StoredFiles
from fp8compile.export.scheme import CODES, Scheme, numbers_of
from fp8compile.export.whole_matrix import empty_matrix
from fp8compile.layout.four_bit_packing import packed_in_rows
from fp8compile.layout.quantized import Quantized
from fp8compile.quantizers import Quantizer

__all__ = ["FLOATS", "StoredMatrix", "unshared"]

FLOATS = ("F32", "BF16", "F16", "F64")  # dtypes of values, as headers of safetensors files name them
NAMES = {CODES: ("F8_E4M3",), torch.uint8: ("U8",), torch.float32: FLOATS}
SCALES = {"mx": ("U8", "F8_E8M0"), "block": (*FLOATS, "F8_E8M0"), "block_ue8m0": ("F8_E8M0", *FLOATS)}


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix (N, K) of a checkpoint, which is a parameter of the model or a part of one.

    Attributes:
        place: The matrix's name in the checkpoint, and its rows in the parameter.
        scheme: How the format stores it.
        quantizer: The recipe's quantizer of the parameter.
        columns: K.
    """

    place: Place
    scheme: Scheme
    quantizer: Quantizer
    columns: int

    def names(self) -> list[str]:
        """Return the names of the matrix's tensors: first the codes, then the scales."""
        return [self.place.name + suffix for suffix in self.scheme.suffixes]

    def is_quantized(self, files: StoredFiles) -> bool:
        """Whether the checkpoint has a scale of the matrix."""
        return self.names()[1] in files.names()

    def problems(self, files: StoredFiles) -> list[str]:
        """Return what keeps the model from taking the matrix, in words."""
        rows, step = self.place.rows, self.quantizer.block[0]
        if step > 1 and (self.place.step > 1 or self.place.start % step):
            return [f"{self.place.name}: a row has several blocks {self.quantizer.block}. Use weight_block=(1, n)."]
        wanted = self.scheme.write(empty_matrix(self.quantizer, rows, self.columns, "meta"))
        headers = [each for suffix, tensor in wanted.items() for each in self._of_header(suffix, tensor, files)]
        return headers or list(self._of_scales(files))

    def _of_header(self, suffix: str, wanted: Tensor, files: StoredFiles) -> Iterator[str]:
        name = self.place.name + suffix
        if name not in files.names():
            yield f"{name} is missing"
            return
        shape, dtype = files.shape(name), files.dtype(name)
        if shape != tuple(wanted.shape) and (wanted.numel(), *shape) != (1, 1):
            yield (
                f"{name} has shape {shape}; for the recipe's weight, {self.place.rows} x {self.columns} quantized "
                f"by {self.quantizer!r}, it must be {tuple(wanted.shape)}"
            )
        is_scale = suffix == self.scheme.suffixes[1]
        allowed = (is_scale and SCALES.get(self.scheme.kind)) or NAMES[wanted.dtype]
        if dtype not in allowed:
            yield f"{name} has dtype {dtype}; for {self.scheme.name!r} it must be {' or '.join(allowed)}"

    def _of_scales(self, files: StoredFiles) -> Iterator[str]:
        _, name, *outer = self.names()
        scale: Any = files.get(name)
        numbers = numbers_of(scale)
        if not bool((numbers.isfinite() & (numbers >= 0)).all()):
            yield f"{name} contains a negative, infinite or NaN scale"
        elif self.scheme.kind == "block_ue8m0" and not bool((numbers.frexp().mantissa == 0.5).all()):
            yield f'{name} contains a scale that is not a power of two. Use a recipe without scale="pow2".'
        elif self._has_unequal_rows(scale):
            rows, columns = self.quantizer.block
            yield (
                f"{self.place.name} has one scale per row, but the recipe's weight has one per {rows} x {columns} "
                f"values. Use a recipe with weight_block=(1, {columns})."
            )
        for each in outer:
            stored: Any = files.get(each)
            if not 0 <= float(self._global_scale(stored)) < math.inf:
                yield f"{each} is {float(stored)}; a global scale must be finite and not negative"

    def _global_scale(self, stored: Any) -> Tensor:
        number: Tensor = stored.float().reshape(1)
        return 1.0 / number if self.scheme.stores_divisor else number

    def _has_unequal_rows(self, scale: Tensor) -> bool:
        """Whether a file that repeats a scale for each row of its block has different scales there."""
        step = self.quantizer.block[0]
        if step <= 1 or self.scheme.kind not in ("mx", "nvfp4"):
            return False
        scale = scale.view(torch.uint8)
        return not torch.equal(scale[::step].repeat_interleave(step, 0)[: scale.shape[0]], scale)

    def _grid(self, scale: Tensor) -> Tensor:
        """Reshape a file's scales to one scale for each block; a file may repeat a scale for each row of its block."""
        if self.scheme.kind in ("mx", "nvfp4"):
            return scale.view(torch.uint8)[:: max(1, self.quantizer.block[0])].contiguous()
        return numbers_of(scale).reshape(self.quantizer.scale_shape((self.place.rows, self.columns)))

    def scales(self, files: StoredFiles) -> tuple[Tensor, Tensor | None]:
        """Return one scale for each block, and the global scale, (1,) float32, if the format has one."""
        scale, *outer = (files.get(name) for name in self.names()[1:])
        assert scale is not None
        return self._grid(scale), self._global_scale(outer[0]) if outer else None

    def read(self, files: StoredFiles) -> Quantized:
        """Return the matrix's codes and scales."""
        codes: Any = files.get(self.names()[0])
        scale, outer = self.scales(files)
        quantizer = packed_in_rows(self.quantizer, (self.place.rows, self.columns))
        return Quantized(codes=codes.view(torch.uint8), scale=scale, quantizer=quantizer, outer_scale=outer)


def unshared(stored: Sequence[StoredMatrix], files: StoredFiles) -> list[str]:
    """Return, in words, which parts of one matrix of the model differ in a scale that the matrix has only once."""
    found: list[str] = []
    first: dict[tuple[int | None, str], Tensor] = {}
    for each in stored:
        scale, outer = each.scales(files)
        for what, own in (("scale", scale if each.quantizer.block[0] == -1 else None), ("global scale", outer)):
            if own is None or torch.equal(first.setdefault((each.place.expert, what), own), own):
                continue
            found.append(
                f"{each.place.name} and the other part of the same matrix of the model have different {what}s. A "
                "model that has them as one matrix requires a single scale."
            )
    return found
