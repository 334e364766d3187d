"""FP8 and FP4 training for PyTorch, built for ``torch.compile(fullgraph=True)``.

```python
import torch
import fp8compile as f8

model = f8.convert(model, f8.recipes.rowwise())
model = torch.compile(model, fullgraph=True)
```
"""

from fp8compile import library, monitor, ops, optim, recipes
from fp8compile.lazy import __dir__ as __dir__
from fp8compile.lazy import __getattr__ as __getattr__
from fp8compile.monitor import Monitor
from fp8compile.nn import (
    ConversionReport,
    DelayedState,
    Linear,
    calibrate,
    compile,
    conversion_report,
    convert,
    freeze_weights,
    grouped_linear,
    grouped_mm,
    invalidate_weight_cache,
    linear,
    repeated_blocks,
    reset_delayed_scaling,
    revert,
    set_recipe,
)
from fp8compile.optim import MasterWeights
from fp8compile.quantizers import CurrentScaling, DelayedScaling, Quantizer, Recipe, TwoLevelScaling
from fp8compile.saved_tensors import SavedAsCodes, SavedTensor, saved_as_codes
from fp8compile.tensor import QuantizedTensor, quantize, scaled_mm

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "CurrentScaling",
    "DelayedScaling",
    "DelayedState",
    "Linear",
    "MasterWeights",
    "Monitor",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "SavedAsCodes",
    "SavedTensor",
    "TwoLevelScaling",
    "__version__",
    "calibrate",
    "compile",
    "conversion_report",
    "convert",
    "freeze_weights",
    "grouped_linear",
    "grouped_mm",
    "library",
    "linear",
    "monitor",
    "ops",
    "optim",
    "quantize",
    "recipes",
    "invalidate_weight_cache",
    "repeated_blocks",
    "reset_delayed_scaling",
    "revert",
    "saved_as_codes",
    "scaled_mm",
    "set_recipe",
]
