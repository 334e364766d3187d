"""`fp8compile explain`: reports whether a model really runs in FP8."""

from fp8compile.cli.explain.subcommand import add_parser

__all__ = ["add_parser"]
