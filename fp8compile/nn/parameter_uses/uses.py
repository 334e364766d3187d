"""Records of how forwards use parameters, from which the conversion report is made."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from torch import nn

from fp8compile.nn.layer.layer_registry import USES

__all__ = ["Kind", "Met", "Slot", "Use", "Uses", "forget_uses", "keep_uses", "uses_seen"]

Slot = tuple[nn.Module, str]  # a module, and the name of a parameter in it


class Kind(enum.IntEnum):
    """How an operator uses a parameter together with data. Of several uses, the greatest kind is kept."""

    FLOAT8 = 0  # in an operator of this library, or one registered with it
    OTHER = 1  # in an operator that is no product
    HANDED = 2  # in an operator of an unknown library
    CONVOLUTION = 3
    PRODUCT = 4


Met = dict[Kind, frozenset[Slot]]  # the parameters that meet data in an operator


@dataclass(frozen=True)
class Use:
    """One use of a parameter: its kind, and the method that called the operator."""

    kind: Kind  # how the parameter is used
    method: str  # the method of a module that uses the parameter, such as ``"MultiheadAttention.forward"``

    @property
    def multiplies(self) -> bool:
        """Whether the use is a product, a convolution, or an operator of an unknown library."""
        return self.kind > Kind.OTHER


@dataclass
class Uses:
    """How parameters are used in high precision, and which parameters FP8 operators multiply."""

    found: dict[Slot, Use] = field(default_factory=dict)  # for each parameter, the use with the greatest kind
    # parameters that an operator of this library, or one registered with it, has read
    in_float8: set[Slot] = field(default_factory=set)

    def add(self, slot: Slot, use: Use) -> None:
        """Record a use of ``slot``, (module, parameter name), unless a use of the same or a greater kind is known."""
        known = self.found.get(slot)
        if known is None or known.kind < use.kind:
            self.found[slot] = use

    def note(self, met: Met, method: str) -> None:
        """Record which parameters one operator uses, by kind in ``met``; ``method`` is the method that called it."""
        for kind, slots in met.items():
            if kind is Kind.FLOAT8:
                self.in_float8 |= slots
                continue
            for slot in slots:
                self.add(slot, Use(kind, method))

    def update(self, other: Uses) -> None:
        """Add all uses that ``other`` has recorded."""
        for slot, use in other.found.items():
            self.add(slot, use)
        self.in_float8 |= other.in_float8

    def kind(self, module: nn.Module, name: str) -> Kind | None:
        """Return the greatest kind of use of the parameter ``name`` of ``module``; None if none was seen."""
        use = self.found.get((module, name))
        return None if use is None else use.kind


def keep_uses(uses: Uses, of_layers: Container[Slot]) -> None:
    """Save ``uses`` for the conversion report.

    ``of_layers`` has the weights of FP8 layers; uses of these weights are saved only if they are products, in FP8 or
    not.
    """
    kept = [(slot, use) for slot, use in uses.found.items() if use.multiplies or slot not in of_layers]
    kept += [(slot, Use(Kind.FLOAT8, "")) for slot in uses.in_float8 if slot in of_layers]
    for (module, name), use in kept:
        USES.setdefault(module, {}).setdefault(name, set()).add(use)


def uses_seen(modules: Iterable[nn.Module]) -> Uses:
    """Return the uses of the modules' parameters that `keep_uses` has saved."""
    uses = Uses()
    for module in modules:
        for name, kept in USES.get(module, {}).items():
            for use in kept:
                uses.note({use.kind: frozenset([(module, name)])}, use.method)
    return uses


def forget_uses(module: nn.Module) -> None:
    """Drop the uses of a module's parameters that `keep_uses` has saved."""
    USES.pop(module, None)
