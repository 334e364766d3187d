"""Results that are kept in files, so that a script that was killed goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["resumed"]


def resumed(path: Path | None, compute: Callable[[], Any]) -> Any:
    """What a JSON file has, or else what is computed now and written there; without a file it is always computed."""
    if path is not None and path.exists():
        return json.loads(path.read_text())
    found = compute()
    if path is not None:
        path.write_text(json.dumps(found))
    return found
