"""Prints a command's progress to standard error, one line per step; standard output has only results.

Modules report a step by ``logging.getLogger(__name__).info``, so that users of the library see nothing by default.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["steps_shown"]


@contextmanager
def steps_shown() -> Iterator[None]:
    """Context in which the package's log messages are printed to standard error."""
    logger = logging.getLogger("fp8compile")
    level, propagates = logger.level, logger.propagate
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s ..."))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a target that sets up logging would print each line twice
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
