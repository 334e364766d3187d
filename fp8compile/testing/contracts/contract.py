"""Runs contracts, which are named checks; all failures are reported together, each with advice.

The name of each contract that holds is printed. A contract that can't check everything raises `NotLookedAt`; its
reason is printed and returned, and the contract does not count as held.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["BrokenContract", "NotLookedAt", "check_contracts", "compiled_afresh", "looked_at", "looking_at", "shown"]

Input = TypeVar("Input")
_INPUT: ContextVar[str | None] = ContextVar("input of the current contract check", default=None)


class BrokenContract(Exception):
    """Raised by a contract (a named check) if the checked object does not fulfill it.

    Args:
        expected: What the contract requires, as text.
        found: What was found instead, as text.
        mend: Advice: how to fix the code so that the contract holds.
    """

    expected: str
    found: str
    mend: str

    def __init__(self, *, expected: str, found: str, mend: str) -> None:
        super().__init__(expected, found, mend)
        self.expected, self.found, self.mend = expected, found, mend


class NotLookedAt(Exception):
    """Raised by a contract that found nothing wrong, but could not check everything.

    Args:
        what: What was not checked, and what the caller can do about it.
    """


def shown(value: Any) -> str:
    """Format an input of a contract for messages: shape and dtype of tensors, the repr of anything else."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}".replace("torch.", "")
    return ", ".join(map(shown, value)) if isinstance(value, (tuple, list)) else repr(value)


def looking_at(value: Input) -> Input:
    """Return ``value``, and record its shapes and dtypes for the report if a later check fails."""
    _INPUT.set(shown(value))
    return value


def looked_at(inputs: Iterable[Input]) -> Iterator[Input]:
    """Yield each input, and record its shapes and dtypes for the report if a check of it fails."""
    for each in inputs:
        yield looking_at(each)
    _INPUT.set(None)


def compiled_afresh(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Drop all compiled graphs, and compile ``fn`` with ``fullgraph=True`` and ``options``."""
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, **options)


def _first_sentence(contract: Callable[..., Any]) -> str:
    return (contract.__doc__ or "").strip().partition("\n")[0]


def _breach(contract: Callable[..., Any], arguments: Sequence[Any], state: Callable[[], Any]) -> BrokenContract | None:
    try:
        _INPUT.set(None)
        before = state()
        contract(*arguments)
        if (after := state()) != before:
            return BrokenContract(
                expected="the checked object is unchanged",
                found=f"{after} instead of {before}",
                mend="do not assign to it, not even with object.__setattr__; keep what changes in buffers of a module",
            )
    except BrokenContract as broken:
        return broken
    except NotLookedAt:
        raise
    except Exception as error:  # the code that is checked may raise anything
        return BrokenContract(
            expected=_first_sentence(contract),
            found=f"{type(error).__name__}: {error}",
            mend="fix the error that was raised; its traceback is the cause of this error",
        ).with_traceback(error.__traceback__)
    return None


def _lines(name: str, broken: BrokenContract, given: str | None) -> str:
    parts = [("expected", broken.expected), ("found", broken.found), ("to fix", broken.mend)]
    if given is not None:
        parts.insert(0, ("input", given))
    body = [textwrap.indent(f"{label:<10}{text}", "    ").replace("\n    ", "\n" + " " * 14) for label, text in parts]
    return "\n".join([f"  {name}", *body])


def _nothing() -> None:
    return None


def check_contracts(
    subject: str,
    contracts: Sequence[Callable[..., Any]],
    arguments: Sequence[Any],
    *,
    skip: Sequence[str] = (),
    foundation: str = "",
    state: Callable[[], Any] = _nothing,
) -> dict[str, str]:
    """Run each contract, print those that hold or were not checked, and raise one error for all broken contracts.

    Args:
        subject: Name of the object that is checked, for printed lines and errors.
        contracts: Functions named after what they check. Each raises a BrokenContract at its first breach.
        arguments: Arguments that each contract is called with.
        skip: Names of contracts to leave out.
        foundation: Name of a contract. If this contract is broken, the contracts after it are not run.
        state: Function that is called before and after each contract; both results have to be equal.

    Returns:
        For each contract that was not checked, by name, the reason, such as that it was skipped.

    Raises:
        TypeError: ``skip`` is a single string, not a list of names.
        ValueError: ``skip`` contains a name that no contract has.
        AssertionError: One or more contracts are broken.
    """
    if isinstance(skip, str):
        raise TypeError(f"`skip` is {skip!r}; it must be a tuple of names: skip=({skip!r},).")
    known = {contract.__name__: contract for contract in contracts}
    if unknown := [name for name in skip if name not in known]:
        raise ValueError(f"`skip` contains {', '.join(map(repr, unknown))}; the contracts are {', '.join(known)}.")
    broken: dict[str, BrokenContract] = {}
    told, unseen = [], dict.fromkeys(skip, "skipped")
    asked = [name for name in known if name not in skip]
    for name in asked:
        if foundation in broken:
            unseen[name] = f"not run, because it depends on {foundation}"
            continue
        try:
            breach = _breach(known[name], arguments, state)
        except NotLookedAt as unlooked:
            unseen[name] = str(unlooked)
            continue
        if breach is None:
            print(f"{subject}: {name} holds", flush=True)
        else:
            broken[name] = breach
            told.append(_lines(name, breach, _INPUT.get()))
    for name, reason in unseen.items():
        print(f"{subject}: {name} was not checked: {reason}", flush=True)
    if broken:
        if left_out := [name for name in asked if unseen.get(name, "").startswith("not run")]:
            told.append(f"  Not run, because they depend on {foundation}: {', '.join(left_out)}.")
        count = f"{len(broken)} of {len(asked)} contracts"
        raise AssertionError("\n\n".join([f"{subject} breaks {count}:", *told])) from next(iter(broken.values()))
    return unseen
