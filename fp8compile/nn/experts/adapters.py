"""Let adapters, such as LoRA's, add their product to an expert module's product with stacked weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["Added", "add_to_product", "no_longer_add", "takes_additions", "with_additions"]

# Maps rows sorted by expert (R, in_features) and the experts' ends (E,) to what is added (R, out_features), or None.
Added = Callable[[Tensor, Tensor], Tensor | None]
NAME = "_fp8compile_added"  # attribute of a module: for each of its weights, by name, what is added to the product


def takes_additions(module: nn.Module) -> bool:
    """Whether `add_to_product` works for a module."""
    spec = getattr(type(module), "_own_spec", None)
    return spec is not None and bool(spec.takes_additions)


def add_to_product(module: nn.Module, weight: str, added: Added) -> None:
    """Make a module add ``added(x, offsets)`` to products of rows ``x`` with the weight named ``weight``.

    Replaces an earlier addition. ``offsets`` are the ends of the experts' rows.
    """
    vars(module).setdefault(NAME, {})[weight] = added


def no_longer_add(module: nn.Module, weight: str) -> None:
    """Undo `add_to_product` for the weight named ``weight`` of a module."""
    vars(module).get(NAME, {}).pop(weight, None)


def with_additions(module: Any, weight: str, x: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    """Return ``y``, plus the addition that `add_to_product` has set for the weight named ``weight``, if any.

    ``y`` is the product of the rows ``x`` and the weight; ``offsets`` are the ends of the experts' rows.
    """
    own = getattr(module, NAME, None)
    if not own or weight not in own:
        return y
    added = own[weight](x, offsets)
    return y if added is None else y + added.to(y.dtype)
