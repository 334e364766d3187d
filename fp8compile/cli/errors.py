"""How a subcommand ends early; the command turns each into one line and an exit code."""

from __future__ import annotations

__all__ = ["Failed", "UserError"]


class UserError(Exception):
    """A mistake or a lack that the user can mend; exit code 2."""


class Failed(Exception):
    """The run ended, and what it should show did not come true; exit code 1."""
