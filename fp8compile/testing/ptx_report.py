"""Public home of `ptx_of`; its code is in `fp8compile.testing.gpu.ptx_report`."""

from __future__ import annotations

from fp8compile.testing.gpu.ptx_report import ptx_of

__all__ = ["ptx_of"]
