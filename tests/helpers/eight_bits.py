"""The ready recipes of eight bits, for tests that multiply the suite's time by the recipes, or count bytes of each.

``blockwise_bf16_wgrad`` is left out: it has the FP8 data of ``blockwise`` and the grad_weight of
``rowwise_bf16_wgrad``. Tests of all `fp8compile.recipes.names` and of experts have it. Four bits have files of their
own, such as tests/nn/test_nvfp4.py and compile_tests/test_four_bit_bytes.py.
"""

from __future__ import annotations

__all__ = ["EIGHT_BITS"]

EIGHT_BITS = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "delayed")
