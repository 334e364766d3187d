"""Groups of tokens, such as those of an expert: how they are quantized and multiplied without padding activations."""
