"""Runs a user's code in this process, and turns its exceptions and exits into a `UserError`.

Without this, code that calls `sys.exit(0)` or `os._exit(0)` would end the command with exit code 0, which means
success. A crash by a signal is not caught, but its exit code is above 128 and can't be mistaken for success.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fp8compile.cli.errors import UserError

__all__ = ["running"]

# Functions that end or replace a process at once, without an exception; all of os.exec* call the last two.
AT_ONCE = ("_exit", "execv", "execve")
# PyTorch 2.15 logs the traceback of an error in a fake kernel, besides raising it.
ALSO_LOGGED = "torch._subclasses.fake_tensor"


class _EndedAtOnce(BaseException):
    """Raised in place of a call, such as ``os._exit``, that would end the process without an exception.

    A BaseException, which ``except Exception`` in the user's code does not catch.
    """


def _raising(name: str) -> Callable[..., Any]:
    real, owner = getattr(os, name), os.getpid()

    def end(*args: Any) -> Any:
        if os.getpid() != owner:  # a process that the code has forked may end in any way
            return real(*args)
        raise _EndedAtOnce(f"os.{name}({', '.join(map(repr, args))})")

    return end


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        call = f"sys.exit({'' if error.code is None else repr(error.code)})"
    elif isinstance(error, _EndedAtOnce):
        call = str(error)
    else:
        return f"{type(error).__name__}: {error}"
    return f"it called {call}, which would end this command too; leave that to code under if __name__ == '__main__'"


@contextmanager
def running(what: str) -> Iterator[None]:
    """Context that turns an exception or exit of a user's code into a `UserError`.

    Args:
        what: What the code does, such as "x.py: loading it"; the error's text is ``what`` and "failed".

    Raises:
        UserError: The code raised an exception, or called ``sys.exit`` or ``os._exit``.
        KeyboardInterrupt: The user pressed Ctrl-C, for which the command has an exit code.
    """
    with ExitStack() as stack:
        for name in AT_ONCE:
            stack.enter_context(mock.patch.object(os, name, _raising(name)))
        stack.enter_context(mock.patch.object(logging.getLogger(ALSO_LOGGED), "disabled", new=True))
        try:
            yield
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code may raise anything
            raise UserError(f"{what} failed: {_said(error)}") from error
