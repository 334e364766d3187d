"""Find layers whose weight other code multiplies without calling the layer, so not in FP8."""

from __future__ import annotations

from torch import nn

from fp8compile.nn.convertible.convertible_layers import weight_slots
from fp8compile.nn.layer.layer_registry import CONVERTED
from fp8compile.nn.parameter_uses.owners import Owners
from fp8compile.nn.parameter_uses.uses import Slot, Uses

__all__ = ["PAST_FORWARD", "known_past_forward", "past_forward", "settled"]

PAST_FORWARD = "reads its weight directly, without calling the layer's forward"
# PyTorch modules, and the names of their children whose weights they multiply themselves
KNOWN: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("out_proj",),
    nn.TransformerEncoderLayer: ("linear1", "linear2"),
}


def known_past_forward(model: nn.Module) -> dict[nn.Module, str]:
    """Return {layer: method} for layers whose weight a PyTorch module multiplies without calling the layer.

    An example is the ``out_proj`` of ``nn.MultiheadAttention``.
    """
    return {
        getattr(module, name): f"{cls.__name__}.forward"
        for module in model.modules()
        for cls, names in KNOWN.items()
        if isinstance(module, cls)
        for name in names
        if isinstance(getattr(module, name, None), nn.Module)
    }


def past_forward(layer: nn.Module, uses: Uses) -> str | None:
    """Return the method that multiplied a layer's weight without calling the layer; None if there is none."""
    found = (uses.found.get(slot) for slot in weight_slots(layer))
    return next((use.method for use in found if use is not None and use.multiplies), None)


def settled(uses: Uses, owners: Owners) -> Uses:
    """Return a copy of ``uses`` without those uses of tied weights that need no warning.

    A weight needs none if a layer multiplies it in FP8 and another module, such as an embedding, shares it.
    """
    of_layers = {slot for layer in CONVERTED for slot in weight_slots(layer)}

    def is_by_another_name(slot: Slot) -> bool:
        return slot in of_layers and slot in uses.in_float8 and not owners.sharing(slot) <= of_layers

    return Uses({slot: use for slot, use in uses.found.items() if not is_by_another_name(slot)}, uses.in_float8)
