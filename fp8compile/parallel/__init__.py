"""Layers whose tensors are spread over ranks."""
