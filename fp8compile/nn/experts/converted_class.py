"""The FP8 class of another library's module: a subclass of the module's class that multiplies in FP8."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fp8compile._compat import is_sharded_class
from fp8compile.nn.dynamic_classes import DynamicClass, dynamic_class
from fp8compile.nn.experts.known_modules import (
    holds_no_stacks,
    is_experts,
    is_transposed,
    layout_of,
    spec_of,
    spec_of_class,
)
from fp8compile.nn.experts.module_spec import ModuleSpec
from fp8compile.nn.experts.overflow import NAME, place_counter
from fp8compile.nn.experts.spread_over_ranks import DispatchOptions
from fp8compile.nn.layer.codes_in_state import CodesInState
from fp8compile.nn.layer.layer_registry import CONVERTED
from fp8compile.nn.layer.warn_if_not_sharded import warn_if_not_sharded
from fp8compile.ops.layer.check_recipe_of_groups import check_recipe_of_groups
from fp8compile.quantizers import Recipe
from fp8compile.tensor import SOURCE_DTYPES, has_codes, not_dense

__all__ = [
    "ConvertedExperts",
    "ConvertedLinearLike",
    "ConvertedModule",
    "become_float8_by_spec",
    "become_plain_by_spec",
    "cannot_convert_by_spec",
    "cannot_revert_by_spec",
    "cannot_take_by_spec",
    "experts_class",
    "fp8_class",
]


class ConvertedModule(CodesInState, DynamicClass):
    """Mixin of converted modules of other libraries.

    The class of a converted module derives from this mixin and from its original class. Parameters and the state dict
    stay as they were, unless ``fp8compile.convert(..., weight_lifetime="parameter")`` makes the weights codes and
    scales.

    Attributes:
        recipe: Quantizers for the operands of each GEMM. It can be set to another recipe.
    """

    _plain_class: ClassVar[type[nn.Module]]  # the class that `revert` restores
    _own_spec: ClassVar[ModuleSpec]  # the spec by which the module was converted
    _recipe: Recipe

    @staticmethod
    def check_takes(recipe: Recipe) -> None:
        """Raise a ValueError if modules of this class can't run with the recipe."""
        raise NotImplementedError

    def take_recipe(self, recipe: Recipe) -> None:
        """Set the recipe; raise a ValueError if modules of this class can't run with it."""
        self.check_takes(recipe)
        super().take_recipe(recipe)

    def weights_to_observe(self) -> dict[str, int]:
        """Return {name of a weight: number of experts}; the number is 0 if the module is one linear."""
        layout = layout_of(self)
        names = layout.weights if self._own_spec.observed is None else self._own_spec.observed(self)
        return dict.fromkeys(names, layout.num_experts)

    def _holds_no_stacks(self) -> str | None:
        return holds_no_stacks(self)

    def is_quantized(self) -> bool:
        """Whether the weights are kept as codes and scales."""
        return bool(self._quantized_parameters())

    def cached_weights(self) -> dict[str, bool]:
        """Return {name: is stored transposed} for the weights whose codes may be kept between steps."""
        if self._own_spec.observed is not None:
            return {}
        return dict.fromkeys(layout_of(self).weights, is_transposed(self))


class ConvertedExperts(ConvertedModule):
    """Mixin of converted experts, whose class derives from this mixin and from the original class.

    Attributes:
        dispatch_options: How rows are sent to experts on other ranks.
    """

    dispatch_options: DispatchOptions = DispatchOptions()

    @staticmethod
    def check_takes(recipe: Recipe) -> None:
        """Raise a ValueError if experts can't run with the recipe, for example with delayed scaling."""
        check_recipe_of_groups(recipe)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        place_counter(self)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        place_counter(self)  # with assign=True, parameters may be on another device now


class ConvertedLinearLike(ConvertedModule):
    """Mixin of converted linear layers of other libraries, whose original class is not a ``nn.Linear``."""

    @staticmethod
    def check_takes(recipe: Recipe) -> None:
        """Raise a ValueError if the recipe has delayed scaling, whose state only ``fp8compile.Linear`` keeps."""
        if recipe.history():
            raise ValueError(
                "recipe: delayed scaling is only supported for fp8compile.Linear, which keeps its state. Use a "
                "recipe with current scaling, such as fp8compile.recipes.tensorwise()."
            )


OWN_NAMES = frozenset({"recipe", "_recipe", "dispatch_options", NAME, "is_quantized", "check_takes", "observer"})


def _multiplying(replacement: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(replacement)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        warn_if_not_sharded(self)
        return replacement(self, *args, **kwargs)

    return method


def fp8_class(plain: type[nn.Module]) -> type[ConvertedModule]:
    """Return the FP8 class for modules of class ``plain``; a `ModuleSpec` must be registered for the class."""
    spec: Any = spec_of_class(plain)  # type: ignore[arg-type]  # classes are hashable
    return class_of_spec(spec, plain)  # type: ignore[arg-type]  # classes are hashable


@cache
def class_of_spec(spec: ModuleSpec, plain: type[nn.Module]) -> type[ConvertedModule]:
    """Make the FP8 class of ``plain``: a subclass that multiplies with the FP8 method of ``spec``."""
    base = ConvertedLinearLike if spec.is_linear else ConvertedExperts
    methods = {spec.method: _multiplying(spec.replacement)}
    return dynamic_class(base, plain, (fp8_class, plain), _plain_class=plain, _own_spec=spec, **methods)


experts_class = hosted_class = fp8_class  # older pickles have these names


def _bypassed(module: nn.Module) -> str | None:
    spec = spec_of(module)
    return spec.method if spec is not None and spec.method in vars(module) else None


def cannot_convert_by_spec(module: nn.Module) -> str | None:
    """Return why another library's module can't be converted with any recipe; None if it can."""
    if is_parametrized(module):
        return "a weight is parametrized; convert the model first, then parametrize the converted layer"
    if is_sharded_class(type(module)):
        return f"{type(module).__name__} is sharded by fully_shard; convert first"
    if name := _bypassed(module):
        return f"its {name} was replaced on the instance (a hook of another library?) and would be lost"
    taken = OWN_NAMES & set(vars(module)).union(*map(vars, type(module).__mro__))
    if taken:
        return f"it already has an attribute {min(taken)}, which a converted module also uses"
    for name, weight in layout_of(module).weights.items():
        if is_lazy(weight):
            return f"its {name} is not initialized; call the model once before convert"
        if has_codes(weight) or not_dense(weight) is not None:
            return f"its {name} is not a dense tensor; FP8 layers require one and quantize it themselves"
        if weight.ndim != 2 and not is_experts(module):
            return f"its {name} has {weight.ndim} dims; that of a linear layer must have 2"
        if weight.dtype not in SOURCE_DTYPES:
            return f"its {name} is {weight.dtype}; FP8 layers support bfloat16, float16 and float32"
    return None


def cannot_take_by_spec(module: nn.Module, recipe: Recipe) -> str | None:
    """Return why another library's module can't be converted with this recipe; None if it can."""
    try:
        (ConvertedExperts if is_experts(module) else ConvertedLinearLike).check_takes(recipe)
    except ValueError as error:
        text = str(error).removeprefix("recipe: ")
        return f"experts do not support this recipe: {text}" if is_experts(module) else text
    return None


def cannot_revert_by_spec(module: Any) -> str | None:
    """Return why a converted module of another library can't be reverted; None if it can."""
    if "_plain_class" not in vars(type(module)):
        return f"this is a {type(module).__name__}, and its own methods would be lost. Undo that change first."
    if module.is_quantized():
        return (
            "its weights are FP8 parameters, which plain modules do not support. Replace them by weight.dequantize()."
        )
    if "dispatch_options" in vars(module):
        return "ExpertParallel has sharded it over ranks, which its own methods do not support. Create a new model."
    if _bypassed(module) is not None or module._compiled_call_impl is not None:
        return "its forward was replaced or compiled on the instance, and would still run in FP8. Undo that first."
    return None


def become_float8_by_spec(module: nn.Module, recipe: Recipe) -> None:
    """Convert another library's module in place: replace its class by the FP8 one, and set the recipe."""
    converted: Any = module
    converted.__class__ = fp8_class(type(module))
    converted.take_recipe(recipe)
    CONVERTED.add(module)


def become_plain_by_spec(module: nn.Module) -> None:
    """Revert a converted module of another library in place, to its original class."""
    for name in ("_recipe", "_caches_weights", "_observers"):
        vars(module).pop(name, None)
    CONVERTED.discard(module)
    module.__class__ = vars(type(module))["_plain_class"]
