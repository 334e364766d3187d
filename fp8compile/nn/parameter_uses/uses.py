"""Uses of parameters: what was seen, and what is kept of each module for the report."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from torch import nn

from fp8compile.nn.converted_layers import USES

__all__ = ["Kind", "Slot", "Use", "Uses", "forget_uses", "keep_uses", "uses_seen"]

Slot = tuple[nn.Module, str]  # a module, and the name of a parameter in it


class Kind(enum.IntEnum):
    """What becomes of a parameter; of several uses the greatest one counts."""

    OTHER = 1  # it meets data, but in no product
    HANDED = 2  # it is given with data to an operator of a library that is unknown here
    CONVOLUTION = 3
    PRODUCT = 4


@dataclass(frozen=True)
class Use:
    """One use.

    Attributes:
        kind: What becomes of the parameter.
        method: The method of a module that uses it, such as ``"MultiheadAttention.forward"``.
    """

    kind: Kind
    method: str

    @property
    def multiplies(self) -> bool:
        """Whether it is a product, or may be one."""
        return self.kind > Kind.OTHER


@dataclass
class Uses:
    """Uses in high precision of parameters, and the parameters that operators in FP8 multiply.

    Attributes:
        found: The use that counts, for each parameter.
        in_float8: Parameters that an operator of this library, or one registered with it, has read.
    """

    found: dict[Slot, Use] = field(default_factory=dict)
    in_float8: set[Slot] = field(default_factory=set)

    def add(self, slot: Slot, use: Use) -> None:
        """Keep a use, unless one is known that counts as much."""
        known = self.found.get(slot)
        if known is None or known.kind < use.kind:
            self.found[slot] = use

    def update(self, other: Uses) -> None:
        """Keep what others have seen too."""
        for slot, use in other.found.items():
            self.add(slot, use)
        self.in_float8 |= other.in_float8

    def kind(self, module: nn.Module, name: str) -> Kind | None:
        """The use of a parameter that counts; None if none was seen."""
        use = self.found.get((module, name))
        return None if use is None else use.kind


def keep_uses(uses: Uses, of_layers: Container[Slot]) -> None:
    """Keep what was seen of parameters; if they are weights of layers, only products."""
    for slot, use in uses.found.items():
        module, name = slot
        if use.multiplies or slot not in of_layers:
            USES.setdefault(module, {})[name] = use


def uses_seen(modules: Iterable[nn.Module]) -> Uses:
    """What is kept of these modules."""
    uses = Uses()
    for module in modules:
        for name, use in USES.get(module, {}).items():
            uses.add((module, name), use)
    return uses


def forget_uses(module: nn.Module) -> None:
    """Undo `keep_uses` for a module."""
    USES.pop(module, None)
