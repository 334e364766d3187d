"""FP8 training for PyTorch that torch.compile sees through.

import fp8compile as f8

model = f8.convert(model, f8.recipes.rowwise())
model = torch.compile(model, fullgraph=True)
"""

from typing import Any

from fp8compile import _compat, library, ops, recipes
from fp8compile.nn import ConversionReport, DelayedState, Linear, conversion_report, convert, linear, revert
from fp8compile.quantizers import CurrentScaling, DelayedScaling, Quantizer, Recipe
from fp8compile.tensor import QuantizedTensor, quantize, scaled_mm

__version__ = "0.1.0.dev0"

__all__ = [
    "ConversionReport",
    "CurrentScaling",
    "DelayedScaling",
    "DelayedState",
    "Linear",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "__version__",
    "conversion_report",
    "convert",
    "library",
    "linear",
    "ops",
    "quantize",
    "recipes",
    "revert",
    "scaled_mm",
]


def _register_on_dtensors() -> None:
    from fp8compile.parallel import dtensor

    dtensor.register()


# DTensor costs half a second to import: who has imported it meets our ops there, and nobody else pays
_compat.when_imported("torch.distributed.tensor", _register_on_dtensors)


def __getattr__(name: str) -> Any:
    if name == "parallel":  # its plans are made of DTensor's
        import importlib

        return importlib.import_module("fp8compile.parallel")
    raise AttributeError(f"module 'fp8compile' has no attribute {name!r}")
