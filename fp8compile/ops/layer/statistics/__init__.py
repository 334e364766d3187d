"""Statistics of the operands of a layer's GEMMs, for `fp8compile.Monitor`.

observe.py      ops that look at operands beside a layer's own ops
definitions.py  the statistics: a number of each element, and what is computed from the totals
elements.py     values of an operand with their codes and scales
pieces.py       partial counts that are made beside a cast, one number for each row or block
add_pieces.py   the op that adds these numbers to totals
"""
