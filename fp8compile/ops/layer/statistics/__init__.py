"""Statistics of the operands of a layer's GEMMs, for `fp8compile.Monitor`.

observe.py      ops that compute statistics separately from a layer's own ops
definitions.py  the statistics, each computed from sums and maxima over elements (totals)
elements.py     values of an operand with their codes and scales
pieces.py       partial sums and maxima of rows or blocks, computed together with a cast
add_pieces.py   the op that combines these partial results to totals
"""
