"""A small model in bfloat16."""

from tinybf16.model import Model

__all__ = ["Model"]
