"""FSDP whose messages are ops of the graph."""
