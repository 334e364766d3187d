"""Warning text on recipes that a model's device can only emulate."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from fp8compile import recipes
from fp8compile.nn.convertible.convertible_layers import device_of, is_converted
from fp8compile.nn.experts.converted_class import ConvertedExperts
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
from fp8compile.quantizers import Recipe
from fp8compile.testing.explain.recipe_support import recipe_support

__all__ = ["emulation_note"]


def _is_emulated(recipe: Recipe, device: torch.device, *, grouped: bool) -> bool:
    """Whether a device emulates a GEMM of a recipe; ``grouped`` is whether the GEMMs are those of experts.

    If the device multiplies the experts' groups one by one, the GEMM of one group decides.
    """
    kinds = {gemm.kind for gemm in recipe_support(recipe, device, grouped=grouped)}
    return EMULATED.name in kinds or (ONE_BY_ONE.name in kinds and _is_emulated(recipe, device, grouped=False))


def emulation_note(model: nn.Module) -> str:
    """Return a string with one line per recipe that the model's device can only emulate; empty if there is none.

    A line begins with a text such as "nvfp4 is emulated here in 2 layers:".

    Args:
        model: A converted model; layers on the meta device are skipped.
    """
    emulated: Counter[Recipe] = Counter()
    for layer in filter(is_converted, model.modules()):
        device = device_of(layer)
        if device.type != "meta" and _is_emulated(layer.recipe, device, grouped=isinstance(layer, ConvertedExperts)):
            emulated[layer.recipe] += 1
    return "\n".join(
        f"{recipes.describe(recipe)} is emulated here in {layers} {'layer' if layers == 1 else 'layers'}: the "
        "values are correct, but it is much slower than bf16"
        for recipe, layers in emulated.items()
    )
