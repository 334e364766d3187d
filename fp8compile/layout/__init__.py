"""Layouts of values and codes: stacked matrices, groups of rows, shards, packed bytes.

quantized.py   Plain, Quantized and their TensorLayout
cuts.py        the shard of a dim that each rank has, and its position among the scale blocks of the whole tensor
four_bit_packing.py  codes of four bits, stored one or two to a byte
shapes.py      shapes of codes and scales of a weight
"""
