"""Interprets inline assembly of this package's kernels by the PTX ISA; unknown instructions raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter

__all__ = ["inline_assembly"]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # the numbers of the format, by code
LARGEST = 6
# {a, b, e, f}: the last one is in the lowest bits
CVT_RS = re.compile(r"cvt\.rs\.satfinite\.e2m1x4\.f32 \w+, \{\$4, \$3, \$2, \$1\}, \$5;")
BYTES = (
    0,
    16,
    8,
    24,
)  # bit offset of each value's noise in the word, last value first: low bytes of both halves, then high bytes


def _to_a_neighbour(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    magnitude = np.minimum(np.abs(values), np.float32(LARGEST))  # a NaN becomes the largest number
    unit = np.select([magnitude < 2, magnitude < 4], [0.5, 1.0], 2.0)
    in_units = magnitude / unit
    lower = np.floor(in_units)
    rounded = (lower + (np.floor((in_units - lower) * 256) + noise >= 256)) * unit
    code = np.minimum(np.searchsorted(E2M1, np.where(np.isnan(rounded), LARGEST, rounded)), 7)
    return code.astype(np.int32) | (np.signbit(values).astype(np.int32) << 3)


def _cvt_rs(*operands: np.ndarray) -> np.ndarray:
    *values, word = operands
    codes = np.zeros(np.broadcast_shapes(*(each.shape for each in operands)), np.int32)
    for i, (value, shift) in enumerate(zip(values, BYTES, strict=True)):
        codes |= _to_a_neighbour(value, word.astype(np.uint32) >> np.uint32(shift) & np.uint32(0xFF)) << (4 * i)
    return codes


KNOWN: dict[re.Pattern[str], Callable[..., np.ndarray]] = {CVT_RS: _cvt_rs}


def inline_assembly(
    builder: Any, text: str, constraints: str, values: Sequence[Any], kinds: Sequence[Any], is_pure: bool, pack: int
) -> SimpleNamespace:
    """Interpret ``tl.inline_asm_elementwise`` on NumPy arrays; replaces a method of Triton's interpreter.

    ``text`` is the assembly, ``values`` are its operands, ``kinds`` its results' types; ``pack`` is elements per call.

    Raises:
        NotImplementedError: The instruction isn't known, or takes several elements at once.
    """
    found = next((function for pattern, function in KNOWN.items() if pattern.search(text)), None)
    if found is None or pack != 1 or len(kinds) != 1:
        raise NotImplementedError(
            f"run_gpu_program: the inline assembly of a kernel is not supported: {text}. Test this kernel on a GPU."
        )
    result = interpreter.TensorHandle(found(*(each.data for each in values)), kinds[0].scalar)
    return SimpleNamespace(get_result=lambda index: result)
