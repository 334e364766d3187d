"""Registers libraries, whose operators generated code may call, with the GEMMs that each GPU runs.

The rest of ``testing/gpu`` imports no operators but PyTorch's. The package fp8compile registers its own operators
here, in ``fp8compile/testing/own_library.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8compile.target import Target

__all__ = ["Library", "gates_of", "make_known", "operator_called"]


@dataclass(frozen=True)
class Library:
    """A library's operators and its table of GEMMs.

    Attributes:
        operator: Takes an operator's name with its namespace, and returns the Python function that a GPU runs for it;
            None for an operator of another library.
        gates: Takes the name of a kind of GEMM, such as "mx", and a GPU's target. Returns entries with ``out_dtypes``;
            an empty sequence if the target does not run the GEMM.
    """

    operator: Callable[[str], Callable[..., Any] | None]
    gates: Callable[[str, Target], Sequence[Any]]


_KNOWN: list[Library] = []


def make_known(library: Library) -> None:
    """Register a library, so that generated code may call its operators."""
    _KNOWN.append(library)


def operator_called(name: str) -> Callable[..., Any] | None:
    """Python function that a GPU runs for an operator of a registered library; None if not registered."""
    return next(filter(None, (library.operator(name) for library in _KNOWN)), None)


def gates_of(product: str, target: Target) -> list[Any]:
    """Entries of the libraries' tables on how a target runs ``product``, such as "mx"; [] if it doesn't."""
    return [gate for library in _KNOWN for gate in library.gates(product, target)]
