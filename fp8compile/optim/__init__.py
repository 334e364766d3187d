"""Optimizers with the interface of ``torch.optim`` that store moments as FP8 codes and scales.

    state --dequantize--> float32 moments --update rule--> parameter, new float32 moments --quantize--> state

One compiled graph runs these steps for all parameters. If a parameter's rows have a multiple of 128 elements, its
float32 moments are never written to memory.
"""

from fp8compile.optim.adamw import AdamW
from fp8compile.optim.muon import Muon

__all__ = ["AdamW", "Muon"]
