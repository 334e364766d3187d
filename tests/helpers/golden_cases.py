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
