"""FSDP whose collectives are ops in the model's graph."""
