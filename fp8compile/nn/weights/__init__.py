"""FP8 weights in the place of high-precision parameters: quantized, frozen, with master weights or a shared scale."""
