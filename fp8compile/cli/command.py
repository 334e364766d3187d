"""Parses the command line, runs a subcommand, and turns errors into one line and an exit code.

    0  done          2    an error that the user can fix, such as a wrong argument or a full disk
    1  failed        130  stopped by Ctrl-C

Any other exception is a bug of this program, and its traceback is shown.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import re
import sys
from typing import Any, NoReturn

from fp8compile import __version__
from fp8compile.cli.errors import Failed, UserError
from fp8compile.cli.progress import steps_shown

__all__ = ["main"]

# Modules or packages of this folder that have add_parser(subparsers), which sets the default `run`: a function of the
# parsed arguments that returns an exit code.
SUBCOMMANDS = ("explain", "advise", "monitor", "doctor", "run-gpu")
# Former subcommands, and where their code is now.
MOVED = {
    "train": "training the example is not part of the package. In a clone of the repository see examples/train/ "
    "and run `make train`, or `python -m examples.train --recipe rowwise --compare bf16`",
    "bench": "the report is a script outside of the package. In a clone of the repository run `python -m "
    "benchmarks.report`",
}
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


# argparse's words for what it doesn't know, and for what is none of some choices
UNKNOWN = re.compile(r"unrecognized arguments: (?P<given>--?[\w-]+)")
NO_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


class _OneLineParser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Report unknown options here in the subcommand's parser, which knows similar options to suggest."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest and not self._subparsers:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}{self._did_you_mean(message)}; see {self.prog} --help\n")

    def _did_you_mean(self, message: str) -> str:
        if unknown := UNKNOWN.search(message):
            given, known = unknown["given"], list(self._option_string_actions)
        elif wrong := NO_CHOICE.search(message):
            given, known = wrong["given"], re.findall(r"[\w-]+", wrong["known"])
        else:
            return ""
        close = difflib.get_close_matches(given, known, n=1)
        return f". Did you mean {close[0]}?" if close else ""


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="fp8compile", description="FP8 and FP4 training for torch.compile.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fp8compile {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="|".join(SUBCOMMANDS), required=True, parser_class=_OneLineParser
    )
    for name in SUBCOMMANDS:
        importlib.import_module(f"fp8compile.cli.{name.replace('-', '_')}").add_parser(subparsers)
    return parser


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _lack(error: Exception) -> str | None:
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in NO_SPACE:
            place = f" {cause.filename}" if cause.filename else ""
            return f"cannot write{place}: {cause.strerror}; free some space and start again"
    return None


def _complain(command: str, message: str) -> None:
    line = " ".join(message.split())
    print(f"fp8compile {command}: {line}", file=sys.stderr)


def _check_streams() -> None:
    if sys.stderr is None:
        # print(file=None) would take standard output
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        raise UserError(
            "standard output is closed, so the report can't be printed. To discard it, redirect standard output to "
            "/dev/null."
        )


def _settle_output() -> None:
    """Flush standard output, or discard it if a flush fails, so that Python does not exit with code 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand that the command line names, and return the exit code.

    ``arguments`` are the words after ``fp8compile``, by default from the command line of the process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] and words[0] in MOVED:
        _complain(words[0], MOVED[words[0]])
        return 2
    parsed = _parser().parse_args(words)
    try:
        _check_streams()
        with steps_shown():
            code = parsed.run(parsed)
        sys.stdout.flush()  # so that a failure to write is reported before the exit code is decided
        return code
    except UserError as error:
        _complain(parsed.command, str(error))
        return 2
    except Failed as error:
        _complain(parsed.command, str(error))
        return 1
    except KeyboardInterrupt:
        _complain(parsed.command, "stopped by Ctrl-C")
        return 130
    except BrokenPipeError:
        _settle_output()  # the reader has closed the pipe
        return 1
    except Exception as error:
        lack = _lack(error)
        if lack is None:
            raise
        _settle_output()
        _complain(parsed.command, lack)
        return 2
