"""Choices of the flag ``--gpu``, copied from `fp8compile.testing.gpu.gpus.GPUS` to not import PyTorch."""

from __future__ import annotations

__all__ = ["GPUS"]

GPUS = (
    "h200", "b200", "rtx4090", "l40s", "h100", "b300", "rtx5090", "rtx_pro_6000", "gb10", "mi300x", "mi355x", "rx9070",
)  # fmt: skip
