"""samples_of: find the sample arguments of an op, those of this package or its own."""

from __future__ import annotations

from fp8compile.ops.registry import Op, Samples
from fp8compile.testing.samples import exchange, gemms, groups, hints, layer, monitor, quantizing

__all__ = ["samples_of"]

OURS: dict[str, Samples] = {}
for each in (exchange, gemms, groups, hints, layer, monitor, quantizing):
    OURS |= each.SAMPLES


def samples_of(op: Op) -> Samples:
    """Return the function that yields an op's sample arguments; it yields nothing if there are none."""
    return op.samples or OURS.get(op.name, tuple)
