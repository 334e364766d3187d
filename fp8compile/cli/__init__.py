"""Command line interface: the `fp8compile` command."""

from fp8compile.cli.command import main

__all__ = ["main"]
