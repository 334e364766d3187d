"""Monitoring: statistics of the operands of a model's FP8 GEMMs, and the first operand with a NaN.

monitor.py                `Monitor`
nonfinite.py              the first operand with a NaN or an infinity
statistics_over_ranks.py  one sum and one maximum over all ranks
execution_order.py        the order in which observed layers run
definitions.py            the statistics, each computed from sums and maxima over elements (totals)
observe.py                ops that compute totals separately from a layer's own ops
elements.py               values of an operand with their codes and scales
pieces.py                 partial sums and maxima of rows or blocks, computed together with a cast
add_pieces.py             the op that combines these partial results to totals
on_quantized_weights.py, on_dtensors.py   the ops that observe, on weights that are codes, and on DTensors

The core calls an observer by `fp8compile.ops.layer.observer.Observer`, and imports nothing of this folder.
"""

from fp8compile.monitor import on_quantized_weights as on_quantized_weights  # it fills a table of the class
from fp8compile.monitor.monitor import STATISTICS, TE_NAMES, Monitor, NonFiniteError, Observed, Reading, flat

__all__ = ["STATISTICS", "TE_NAMES", "Monitor", "NonFiniteError", "Observed", "Reading", "flat"]
