"""Contracts: named checks whose breaches are collected and told together, each with what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["BrokenContract", "check_contracts", "compiled_afresh"]


class BrokenContract(Exception):
    """What a contract found.

    Args:
        expected: What has to be so.
        found: What is.
        mend: What to write.
    """

    def __init__(self, *, expected: str, found: str, mend: str) -> None:
        super().__init__(expected, found, mend)
        self.expected, self.found, self.mend = expected, found, mend


def compiled_afresh(fn: Callable, **options: Any) -> Callable:
    """``fn`` as one graph, with no graph of an earlier check in the way."""
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, **options)


def _first_sentence(contract: Callable) -> str:
    return (contract.__doc__ or "").strip().partition("\n")[0]


def _breach(contract: Callable, arguments: Sequence[Any], state: Callable[[], Any]) -> BrokenContract | None:
    try:
        before = state()
        contract(*arguments)
        if (after := state()) != before:
            return BrokenContract(
                expected="what is checked is the same afterwards as before",
                found=f"{after} instead of {before}",
                mend="assign nothing to it, by object.__setattr__ neither; what changes goes into a module's buffers",
            )
    except BrokenContract as broken:
        return broken
    except Exception as error:  # what is checked is the code of others
        return BrokenContract(
            expected=_first_sentence(contract),
            found=f"{type(error).__name__}: {error}",
            mend="make what raised this work; its traceback is the cause of this error",
        ).with_traceback(error.__traceback__)
    return None


def _lines(name: str, broken: BrokenContract) -> str:
    parts = (("expected", broken.expected), ("found", broken.found), ("to mend", broken.mend))
    body = [textwrap.indent(f"{label:<10}{text}", "    ").replace("\n    ", "\n" + " " * 14) for label, text in parts]
    return "\n".join([f"  {name}", *body])


def _nothing() -> None:
    return None


def check_contracts(
    subject: str,
    contracts: Sequence[Callable],
    arguments: Sequence[Any],
    *,
    skip: Sequence[str] = (),
    foundation: str = "",
    state: Callable[[], Any] = _nothing,
) -> None:
    """Run each contract; tell all that are broken.

    Args:
        subject: What is checked, for the text.
        contracts: Functions named after what they check; each raises a BrokenContract at its first breach.
        arguments: Of each of them.
        skip: Names of contracts to leave out.
        foundation: Name of one without which those behind it would only say the same again: they are not run.
        state: What no contract may change.

    Raises:
        TypeError: ``skip`` is one name and no list of them.
        ValueError: ``skip`` names none of them.
        AssertionError: One or more are broken.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip is {skip!r}; it is a tuple of names: skip=({skip!r},).")
    known = {contract.__name__: contract for contract in contracts}
    if unknown := [name for name in skip if name not in known]:
        raise ValueError(f"skip names {', '.join(map(repr, unknown))}; the contracts are {', '.join(known)}.")
    asked = {name: contract for name, contract in known.items() if name not in skip}
    broken, left_out = {}, []
    for name, contract in asked.items():
        if foundation in broken:
            left_out.append(name)
        elif (breach := _breach(contract, arguments, state)) is not None:
            broken[name] = breach
    if broken:
        told = [_lines(name, breach) for name, breach in broken.items()]
        if left_out:
            told.append(f"  Not run, for they build on {foundation}: {', '.join(left_out)}.")
        count = f"{len(broken)} of {len(asked)} contracts"
        raise AssertionError("\n\n".join([f"{subject} breaks {count}:", *told])) from next(iter(broken.values()))
