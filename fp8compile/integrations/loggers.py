"""Functions that write the statistics of an `fp8compile.Monitor` to other loggers.

```python
from torch.utils.tensorboard import SummaryWriter

import fp8compile as f8
from fp8compile.integrations import loggers

monitor = f8.Monitor(model, ("amax", "underflow", "exponents"), every=10)
loggers.to_tensorboard(SummaryWriter("runs"), monitor.read(), step)
```
"""

from __future__ import annotations

import math
from typing import Any

from fp8compile.monitor import Reading, flat

__all__ = ["finite", "to_tensorboard", "to_wandb"]


def finite(reading: Reading) -> dict[str, float]:
    """Flatten statistics into one dict of finite numbers; drops lists, inf and NaN."""
    numbers = {name: each for name, each in flat(reading).items() if not isinstance(each, list)}
    return {name: each for name, each in numbers.items() if math.isfinite(each)}


def to_tensorboard(writer: Any, reading: Reading, step: int) -> None:
    """Write statistics to TensorBoard: finite numbers as scalars, and exponent counts as histograms.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``.
        reading: A result of `fp8compile.Monitor.read`.
        step: The training step.
    """
    for name, value in finite(reading).items():
        writer.add_scalar(name, value, step)
    for name, counts in flat(reading).items():
        if isinstance(counts, list) and sum(counts):
            limits = [field + 0.5 for field in range(len(counts))]
            writer.add_histogram_raw(
                name,
                min=next(field for field, count in enumerate(counts) if count),
                max=max(field for field, count in enumerate(counts) if count),
                num=int(sum(counts)),
                sum=float(sum(field * count for field, count in enumerate(counts))),
                sum_squares=float(sum(field * field * count for field, count in enumerate(counts))),
                bucket_limits=limits,
                bucket_counts=[int(count) for count in counts],
                global_step=step,
            )


def to_wandb(run: Any, reading: Reading, step: int) -> None:
    """Log the finite numbers of the statistics to Weights & Biases at step ``step``; drops lists.

    ``run`` is the result of ``wandb.init``, or the module ``wandb``.
    """
    run.log(finite(reading), step=step)
