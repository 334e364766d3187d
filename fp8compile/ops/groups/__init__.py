"""Ops that quantize and multiply groups of tokens, such as the tokens of each expert, without padding activations."""
