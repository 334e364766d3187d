"""Ops that quantize and multiply groups of tokens, such as each expert's; activations aren't padded."""
