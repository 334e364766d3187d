"""A callback for each operator of an exported program, called before the program is written to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from fp8compile._compat.imports import when_imported

__all__ = ["when_program_is_saved"]


def _operators(programs: Any) -> Iterator[object]:
    for program in programs.values() if isinstance(programs, dict) else [programs]:
        for module in program.graph_module.modules():
            if isinstance(module, torch.fx.GraphModule):
                yield from (node.target for node in module.graph.nodes if node.op == "call_function")


def when_program_is_saved(callback: Callable[[object], None]) -> None:
    """Call ``callback`` with each operator of a program that ``torch.export.save`` is about to write.

    An error that ``callback`` raises ends the saving before the file is opened.
    """

    def register() -> None:
        from torch.export.pt2_archive import _package

        plain = _package.package_pt2

        @wraps(plain)
        def asked_first(f: Any, *, exported_programs: Any = None, **others: Any) -> Any:
            for target in () if exported_programs is None else _operators(exported_programs):
                callback(target)
            return plain(f, exported_programs=exported_programs, **others)

        _package.package_pt2 = asked_first

    when_imported("torch.export.pt2_archive._package", register)
