"""The recipes that are paired: the ready ones, and two of other libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import fsdp_models as models
import own_arithmetic

import fp8compile as f8

__all__ = ["FOREIGN", "READY", "recipe_of"]

READY = (
    "tensorwise",
    "rowwise",
    "rowwise_bf16_wgrad",
    "blockwise",
    "blockwise_bf16_wgrad",
    "mxfp8",
    "delayed",
    "nvfp4",
    models.FOUR_BITS,
)
FOREIGN = ("int8", "packed", "packed, cuttable")
PACKED = {"packed": own_arithmetic.Packed, "packed, cuttable": own_arithmetic.Cuttable}


def recipe_of(name):
    """A recipe by name. "int8" is the example library's, which registers a GEMM; "packed" lays two codes in a byte."""
    if name == "int8":
        folder = str(Path(__file__).parents[2] / "examples" / "custom_quantizer")
        if folder not in sys.path:
            sys.path.insert(0, folder)
        import swiglu8

        return f8.library.recipe(swiglu8.Int8())
    if name in PACKED:
        return f8.library.recipe(PACKED[name](block=(1, -1)))
    return models.recipe_of(name)
