"""Public import path of `ptx_of`, which is defined in `fp8compile.testing.gpu.ptx_report`."""

from __future__ import annotations

from fp8compile.testing.gpu.ptx_report import ptx_of

__all__ = ["ptx_of"]
