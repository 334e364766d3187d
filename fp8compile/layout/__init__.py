"""How numbers and codes lie: in stacks of matrices, in groups of rows, over ranks, in bytes. Values, no operators.

quantized.py   Plain, Quantized and their TensorLayout
cuts.py        what each rank has of a dim, and how its part lies among the blocks that share a scale
packing.py     codes of four bits, one or two to a byte
shapes.py      shapes of codes and scales of a weight
"""
