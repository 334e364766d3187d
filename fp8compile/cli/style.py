"""Bold and red text on a terminal."""

from __future__ import annotations

import os
import sys

__all__ = ["Style"]


class Style:
    """Makes text bold or red if standard output is a terminal; the variable NO_COLOR turns this off."""

    def __init__(self) -> None:
        self._is_on = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def _marked(self, text: str, codes: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self._is_on and text else text

    def bold(self, text: str) -> str:
        """The text in bold, for titles and headings."""
        return self._marked(text, "1")

    def alarm(self, text: str) -> str:
        """The text in bold red, for problems."""
        return self._marked(text, "1;31")
