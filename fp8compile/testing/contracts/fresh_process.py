"""Evaluates ``__fx_repr__`` of a graph's constant in new processes, with unchanged or edited code."""

from __future__ import annotations

import importlib
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8compile.quantizers.constant import SALTED_MODULES, Constant

__all__ = ["ConstantElsewhere", "fresh_texts"]

PROGRAM = """
import importlib, json, pickle, sys
path, modules, data = pickle.load(sys.stdin.buffer)
sys.path[:] = path
for module in modules:
    importlib.import_module(module)
value = pickle.loads(data)
text, names = value.__fx_repr__()
again = eval(text, dict(names))
print(json.dumps({"text": text, "equal": again == value and hash(again) == hash(value)}))
"""


class ConstantElsewhere:
    """What a fresh process reported about a graph's constant, such as a quantizer.

    Attributes:
        text: The constant's text in a graph, from ``__fx_repr__``.
        equal: Whether the text evaluates to an equal constant with the same hash.
        error: Last line of the process's errors if it gave no answer, else None.
    """

    def __init__(self, output: bytes, errors: bytes) -> None:
        answer: dict[str, Any] = json.loads(output) if output.strip() else {"text": "", "equal": False}
        self.text: str = answer["text"]
        self.equal: bool = answer["equal"]
        self.error: str | None = None if output.strip() else errors.decode().strip().rpartition("\n")[2]


def _edited_copy(module: ModuleType, folder: Path) -> None:
    """Copy a module's package (or single file) to ``folder``, and append a comment to the module's copy."""
    top = importlib.import_module(module.__name__.partition(".")[0])
    source = Path(module.__file__ or "")
    if not getattr(top, "__path__", None):
        copied = Path(shutil.copy(source, folder / f"{module.__name__}.py"))
    else:
        root = Path(top.__path__[0])
        shutil.copytree(root, folder / top.__name__, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        copied = folder / top.__name__ / source.relative_to(root)
    with copied.open("a") as file:
        file.write("\n# a change\n")


def _start(value: Constant, path: list[str], modules: list[str]) -> tuple[subprocess.Popen[bytes], bytes]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    pipe = subprocess.PIPE
    return (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe),
        pickle.dumps((path, modules, pickle.dumps(value))),
    )


def fresh_texts(value: Constant, module: ModuleType) -> tuple[ConstantElsewhere, ConstantElsewhere, ConstantElsewhere]:
    """A constant's text in three fresh processes: two with unchanged code, one with ``module`` edited.

    Two processes run unchanged code, because this process may have imported older versions of the files.

    Args:
        value: A constant whose class can be imported by name.
        module: The module to edit: that of a quantizer's class, or of an op's implementation.

    Returns:
        The reports of the two unedited processes, and of the edited one.
    """
    modules = sorted({*SALTED_MODULES, module.__name__} - {"__main__"})
    with tempfile.TemporaryDirectory() as folder:
        _edited_copy(module, Path(folder))
        started = [_start(value, path, modules) for path in (sys.path, sys.path, [folder, *sys.path])]
        first, second, edited = (ConstantElsewhere(*process.communicate(data)) for process, data in started)
    return first, second, edited
