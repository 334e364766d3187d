"""FSDP whose messages between ranks are ops in the model's graph."""
