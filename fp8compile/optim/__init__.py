"""Optimizers in the shape of ``torch.optim`` whose moments are codes between steps: a byte a value and their scales.

    state --dequantize--> float32 moments --rule of the optimizer--> parameter, float32 moments --quantize--> state

All of that is one compiled graph for all parameters, in which float32 moments never reach memory.
"""

from fp8compile.optim.adamw import AdamW
from fp8compile.optim.muon import Muon

__all__ = ["AdamW", "Muon"]
