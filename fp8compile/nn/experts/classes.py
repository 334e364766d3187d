"""The class of converted experts: their own, with the method that multiplies in FP8."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fp8compile._compat import is_sharded_class
from fp8compile.nn.codes_in_state import CodesInState
from fp8compile.nn.experts.hosts import host_of, plain_class, stacks
from fp8compile.nn.experts.overflow import NAME, place_counter
from fp8compile.nn.experts.placed import DispatchOptions
from fp8compile.nn.functional import check_recipe
from fp8compile.nn.made_classes import MadeClass
from fp8compile.ops.layer.grouped_operands import check_recipe_of_groups
from fp8compile.quantizers import Recipe
from fp8compile.recipes import describe
from fp8compile.tensor import SOURCE_DTYPES, has_codes, not_dense, shown

__all__ = [
    "ConvertedExperts",
    "become_float8_experts",
    "become_plain_experts",
    "cannot_convert_experts",
    "cannot_revert_experts",
    "cannot_take_experts",
    "experts_class",
]


class ConvertedExperts(CodesInState, MadeClass):
    """What converted experts have beside their own class. Parameters and the state dict are as they were.

    Only ``fp8compile.convert`` with ``quantized_parameters=True`` makes the weights codes and scales.

    Attributes:
        recipe: Quantizers for the operands of each grouped product; another may be set.
        dispatch_options: How rows travel, where ranks have different experts.
    """

    dispatch_options: DispatchOptions = DispatchOptions()
    _plain_experts: ClassVar[type[nn.Module]]  # what `revert` makes of it
    _recipe: Recipe

    @property
    def recipe(self) -> Recipe:
        """Quantizers for the operands of each grouped product; another may be set."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        check_recipe("recipe", recipe)
        check_recipe_of_groups(recipe)
        self._recipe = recipe

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[misc]
        place_counter(self)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        place_counter(self)  # assign=True brings parameters on another device

    def is_quantized(self) -> bool:
        """Whether the weights are kept as codes and scales."""
        return bool(self._quantized_parameters())

    def extra_repr(self) -> str:
        """What the class shows, and the recipe: its name if it has one."""
        name = describe(self.recipe)
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}{', ' if own else ''}recipe={shown(self.recipe) if name == 'custom' else name}"

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: torch.jit.script has no type for a recipe. Use torch.compile or torch.export, or "
            "script the model after fp8compile.revert."
        )


OWN_NAMES = frozenset({"recipe", "_recipe", "dispatch_options", NAME, "is_quantized"})


@cache
def experts_class(plain: type[nn.Module]) -> type[ConvertedExperts]:
    """The class that experts of a class get when they are converted.

    Args:
        plain: A class that a host takes.
    """
    host = host_of(plain)
    assert host is not None
    names = {
        "__module__": __name__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_plain_experts": plain,
        "made_by": (experts_class, plain),
        host.method: host.replacement,
    }
    return types.new_class(plain.__name__, (ConvertedExperts, plain), exec_body=lambda space: space.update(names))


def _bypassed(module: nn.Module) -> str | None:
    """The method kept on the instance that would run whatever the class becomes, or None."""
    host = host_of(plain_class(module))
    return host.method if host is not None and host.method in vars(module) else None


def cannot_convert_experts(module: nn.Module) -> str | None:
    """Why experts can't be in FP8, whatever the recipe, or None."""
    if is_parametrized(module):
        return "a weight is parametrized; convert first and parametrize what convert returns"
    if is_sharded_class(type(module)):
        return f"{type(module).__name__} is a class that fully_shard made; convert first"
    if name := _bypassed(module):
        return f"its {name} was replaced on the instance (a hook of another library?) and would be lost"
    taken = OWN_NAMES & set(vars(module)).union(*map(vars, type(module).__mro__))
    if taken:
        return f"it has an attribute {min(taken)} of its own, and so have FP8 experts"
    for name, weight in stacks(module).items():
        if has_codes(weight) or not_dense(weight) is not None:
            return f"its {name} is no dense tensor; FP8 experts take one and quantize it themselves"
        if weight.dtype not in SOURCE_DTYPES:
            return f"its {name} is {weight.dtype}; FP8 layers take bfloat16, float16, float32"
    return None


def cannot_take_experts(recipe: Recipe) -> str | None:
    """Why no experts can be in FP8 with this recipe, or None."""
    try:
        check_recipe_of_groups(recipe)
    except ValueError as error:
        return f"experts take no such recipe: {error}"
    return None


def cannot_revert_experts(module: nn.Module) -> str | None:
    """Why converted experts can't become again what they were, or None."""
    if "_plain_experts" not in vars(type(module)):
        return f"this is a {type(module).__name__}, and its own methods would be lost. Undo that."
    if module.is_quantized():
        return "its weights are codes and scales, which no plain experts have. Put values there: weight.dequantize()."
    if "dispatch_options" in vars(module):
        return "ExpertParallel has spread it over ranks, of which its own methods know nothing. Make the model anew."
    if _bypassed(module) is not None or module._compiled_call_impl is not None:
        return "forward was replaced or compiled on the instance, and would go on in FP8. Undo that first."
    return None


def become_float8_experts(module: nn.Module, recipe: Recipe) -> None:
    """Swap the class of experts for the one in FP8, in place."""
    module.__class__ = experts_class(type(module))
    module.recipe = recipe


def become_plain_experts(module: nn.Module) -> None:
    """Undo `become_float8_experts`."""
    vars(module).pop("_recipe", None)
    module.__class__ = type(module)._plain_experts
