"""Optimizers with the interface of ``torch.optim`` and FP8 optimizer states, and master weights of FP8 parameters.

    state --dequantize--> float32 moments --update rule--> parameter, new float32 moments --quantize--> state

A single compiled graph runs these steps for all parameters. If the row length of a parameter is a multiple of 128, its
float32 moments are never written to memory.
"""

from fp8compile.optim.adamw import AdamW
from fp8compile.optim.master_weights import MasterWeights
from fp8compile.optim.muon import Muon

__all__ = ["AdamW", "MasterWeights", "Muon"]
