"""fp8compile explain: is this model really running in FP8?"""

from fp8compile.cli.explain.subcommand import add_parser

__all__ = ["add_parser"]
