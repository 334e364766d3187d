"""How a subcommand ends early; the command turns each into one line and an exit code."""

from __future__ import annotations

__all__ = ["Failed", "Quiet", "Stopped", "UserError"]


class UserError(Exception):
    """A mistake or a lack that the user can mend; exit code 2."""


class Failed(Exception):
    """The run ended, and what it should show did not come true; exit code 1."""


class Stopped(BaseException):
    """A signal asked the run to stop.

    Not an ``Exception``, so that no handler of errors on the way takes it for one.

    Attributes:
        exit_code: 128 plus the number of the signal.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        """Keep the line to print and the exit code."""
        super().__init__(message)
        self.exit_code = exit_code


class Quiet(BaseException):
    """Another rank of the run failed first and says why.

    Not an ``Exception``, as :class:`Stopped`.

    Attributes:
        exit_code: Of what this rank failed by.
    """

    def __init__(self, *, exit_code: int) -> None:
        """Keep the exit code."""
        super().__init__()
        self.exit_code = exit_code
