"""A loop of reinforcement learning in FP8: what generates has the codes of what trains."""
