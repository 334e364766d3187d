"""Compression of tensors saved for the backward to FP8 codes, in an eager context or in Inductor."""

from fp8compile.saved_tensors.choice import SavedAsCodes
from fp8compile.saved_tensors.hooks import saved_as_codes
from fp8compile.saved_tensors.partitioner import partitioner
from fp8compile.saved_tensors.saved_tensor import SavedTensor

__all__ = ["SavedAsCodes", "SavedTensor", "partitioner", "saved_as_codes"]
