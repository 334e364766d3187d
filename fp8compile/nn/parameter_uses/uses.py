"""Uses: what was found, for each parameter."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

__all__ = ["Kind", "Use", "Uses"]


class Kind(enum.IntEnum):
    """What becomes of a parameter; of several uses the greatest one counts."""

    OTHER = 1  # it meets data, but in no product
    HANDED = 2  # it is given with data to something whose source can't be read
    CONVOLUTION = 3
    PRODUCT = 4


@dataclass(frozen=True)
class Use:
    """One use.

    Attributes:
        kind: What becomes of the parameter.
        module: Whose method uses it.
        method: That method, such as ``"MultiheadAttention.forward"``.
    """

    kind: Kind
    module: nn.Module
    method: str


@dataclass
class Uses:
    """Uses of parameters, by their module and their name in it."""

    found: dict[tuple[nn.Module, str], Use] = field(default_factory=dict)

    def add(self, module: nn.Module, name: str, use: Use) -> None:
        """Keep a use, unless one is known that counts as much."""
        known = self.found.get((module, name))
        if known is None or known.kind < use.kind:
            self.found[module, name] = use

    def kind(self, module: nn.Module, name: str) -> Kind | None:
        """The use of a parameter that counts; None if none was seen."""
        use = self.found.get((module, name))
        return None if use is None else use.kind

    def past_forward(self, layer: nn.Module, names: Iterable[str] = ("weight",)) -> str | None:
        """The method that multiplies a layer's weights itself, past the layer's forward; None if none was seen."""
        uses = (self.found.get((layer, name)) for name in names)
        past = (use for use in uses if use is not None and use.kind != Kind.OTHER and use.module is not layer)
        return next((use.method for use in past), None)
