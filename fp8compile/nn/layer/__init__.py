"""The layers, the functions that they call, and the state and FP8 weights that layers keep."""
