"""fp8compile train: a small model trained beside bf16, from the text to the table."""

from fp8compile.cli.train.subcommand import add_parser

__all__ = ["add_parser"]
