"""`fp8compile monitor`: plots the statistics that `fp8compile.Monitor` recorded in a run."""

from fp8compile.cli.monitor.subcommand import add_parser

__all__ = ["add_parser"]
