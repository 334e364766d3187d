"""Prediction of the memory of a training step, from the code that Inductor generates for it."""

from fp8compile.testing.memory.cached import CachedCodes
from fp8compile.testing.memory.kept import KeptTensor
from fp8compile.testing.memory.measure import memory_beside_unconverted, memory_of_call, memory_report
from fp8compile.testing.memory.report import MemoryReport
from fp8compile.testing.memory.timeline import Moment

__all__ = [
    "CachedCodes",
    "KeptTensor",
    "MemoryReport",
    "Moment",
    "memory_beside_unconverted",
    "memory_of_call",
    "memory_report",
]
