"""Table of the serving formats by name."""

from __future__ import annotations

from fp8compile.export.compressed_tensors import COMPRESSED_TENSORS
from fp8compile.export.fine_grained import FINE_GRAINED_FP8
from fp8compile.export.modelopt import MODELOPT
from fp8compile.export.scheme import Format

__all__ = ["FORMATS", "format_named"]

FORMATS = {each.name: each for each in (FINE_GRAINED_FP8, COMPRESSED_TENSORS, MODELOPT)}


def format_named(function: str, name: object) -> Format:
    """Return the serving format ``name``; raise a ValueError that begins with ``function`` if there is none."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"{function}: `format` is {name!r}; it must be one of {', '.join(map(repr, FORMATS))}.")
    return FORMATS[name]
