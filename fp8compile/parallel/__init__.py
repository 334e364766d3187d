"""Models that are spread over ranks: tensor and sequence parallel.

Layers on DTensors need nothing from here: a converted model runs under PyTorch's own plans as it is. What is here
sends fewer bytes.
"""

from fp8compile.parallel.styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "RowwiseParallel"]
