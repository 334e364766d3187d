"""The golden vectors as cases: the input, the quantizer, and the codes and scales that have to come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fp8compile as f8

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = {
    "tensorwise": (-1, -1),
    "rowwise": (1, -1),
    "rowwise_axis0": (-1, 1),
    "blockwise_1x128": (1, 128),
    "blockwise_128x128": (128, 128),
    "blockwise_128x1": (128, 1),
    "mx_1x32": (1, 32),
    "mx_32x1": (32, 1),
    "mx_32x32": (32, 32),
}
STORED_TRANSPOSED = ("blockwise_128x1", "mx_32x1")
RULES = {"none": "fp32", "floor_pow2": "pow2", "e8m0_floor": "e8m0_floor", "e8m0_rceil": "e8m0_rceil"}


class Case(NamedTuple):
    """One golden case: the input, the quantizer that stands for the reference's settings, what has to come out."""

    name: str
    kind: str
    x: Tensor
    quantizer: f8.CurrentScaling
    codes: Tensor
    scale: Tensor

    def signature(self) -> tuple:
        return self.quantizer, self.x.dtype, self.x.shape


def _load(entry: dict) -> Case:
    arrays = np.load(GOLDEN / entry["file"])
    x = arrays["x"]
    x = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == np.uint16 else torch.from_numpy(x)
    quantizer = f8.CurrentScaling(
        format=entry["format"],
        block=BLOCKS[entry["kind"]],
        scale=RULES[entry["scale_rounding"]],
        eps=entry["eps"] or 0.0,
    )
    codes = torch.from_numpy(arrays["codes"])
    scale = torch.from_numpy(arrays["scale_e8m0"] if "scale_e8m0" in arrays else arrays["scale"])
    if entry["kind"] in STORED_TRANSPOSED:
        codes, scale = codes.t(), scale.t()
    if entry["kind"] == "tensorwise":
        scale = scale.reshape(1, 1)
    return Case(entry["name"], entry["kind"], x, quantizer, codes, scale)


CASES = [_load(entry) for entry in json.loads((GOLDEN / "manifest.json").read_text())["cases"] if entry["promised"]]


# ---------------------------------------------------------------------------------- two levels of scales

TWO_LEVEL_BLOCKS = {"nvfp4_1x16": (1, 16), "nvfp4_16x16": (16, 16)}
TWO_LEVEL_RULES = {"te": "transformer_engine", "ao": "torchao"}


class TwoLevelCase(NamedTuple):
    """One golden case in four bits: codes are two to a byte, and a block of rows has its scale once."""

    name: str
    x: Tensor
    quantizer: f8.TwoLevelScaling
    codes: Tensor
    scale: Tensor
    outer_scale: Tensor

    def wanted(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.outer_scale


def two_level_cases(source: str) -> list[TwoLevelCase]:
    """All finite cases of TransformerEngine's rule ("te") or torchao's ("ao") that have two levels."""
    found = []
    for entry in json.loads((GOLDEN / "manifest.json").read_text())["cases"]:
        wanted = entry["kind"] in TWO_LEVEL_BLOCKS and not entry["nonfinite_input"] and "2lvl" in entry["name"]
        if not wanted or not entry["name"].endswith(source):
            continue
        arrays, block = dict(np.load(GOLDEN / entry["file"])), TWO_LEVEL_BLOCKS[entry["kind"]]
        if arrays["x"].dtype == np.uint16:  # bits of bfloat16
            arrays["x"] = (arrays["x"].astype(np.uint32) << 16).view(np.float32)
        x, codes, scale, outer = (
            torch.from_numpy(arrays[name]) for name in ("x", "packed", "scale_e4m3", "global_scale")
        )
        quantizer = f8.TwoLevelScaling(block=block, scale=TWO_LEVEL_RULES[source])
        given = x.bfloat16() if "_bf16_" in entry["name"] else x
        found.append(TwoLevelCase(entry["name"], given, quantizer, codes, scale[:: block[0]], outer))
    return found
