"""What a library makes known to programs: its own operators, and which GPU runs which scaled product.

The rest of ``testing/gpu`` knows PyTorch and Triton, and nothing of a library. This package makes its operators known
in ``fp8compile/testing/own_library.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8compile.target import Target

__all__ = ["Library", "gates_of", "make_known", "operator_called"]


@dataclass(frozen=True)
class Library:
    """What a library knows.

    Attributes:
        operator: Returns the Python function that a GPU runs for an operator, by the operator's name with its
            namespace; None for an operator of another library.
        gates: Returns the entries of a table of products that apply to a product, by its name, on a target. An entry
            has ``out_dtypes``. None apply if the GPU does not run the product.
    """

    operator: Callable[[str], Callable[..., Any] | None]
    gates: Callable[[str, Target], Sequence[Any]]


_KNOWN: list[Library] = []


def make_known(library: Library) -> None:
    """Let programs call the operators of a library."""
    _KNOWN.append(library)


def operator_called(name: str) -> Callable[..., Any] | None:
    """The Python function that a GPU runs for an operator of a known library; None for any other."""
    return next(filter(None, (library.operator(name) for library in _KNOWN)), None)


def gates_of(product: str, target: Target) -> list[Any]:
    """Entries of the libraries' tables that say how a target runs a product; none if it doesn't."""
    return [gate for library in _KNOWN for gate in library.gates(product, target)]
