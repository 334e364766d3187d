"""`fp8compile monitor`: draws what `fp8compile.Monitor` read in a run."""

from fp8compile.cli.monitor.subcommand import add_parser

__all__ = ["add_parser"]
