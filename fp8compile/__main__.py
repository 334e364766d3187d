"""`python -m fp8compile` is the `fp8compile` command."""

from __future__ import annotations

import sys

from fp8compile.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
