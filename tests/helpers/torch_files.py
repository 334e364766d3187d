"""Values as files of `torch.save` have them."""

from __future__ import annotations

import io

import torch

__all__ = ["through_a_file"]


def through_a_file(value):
    """What ``weights_only`` loads of a value that was saved."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
