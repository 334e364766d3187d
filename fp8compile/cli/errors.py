"""Exceptions that end a subcommand early; the command turns each into one line and an exit code."""

from __future__ import annotations

__all__ = ["Failed", "UserError"]


class UserError(Exception):
    """An error that the user can fix, such as a wrong argument or a missing package; exit code 2."""


class Failed(Exception):
    """The subcommand ran, but its success criterion was not met; exit code 1."""
