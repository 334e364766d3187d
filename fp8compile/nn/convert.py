"""convert and revert: swap the linears of a model, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from fp8compile.nn.filters import Filter, resolve_filter
from fp8compile.nn.functional import DTYPES
from fp8compile.nn.linear import Linear
from fp8compile.quantizers import Recipe

__all__ = ["LEFT_OUT", "convert", "linears", "revert"]

LEFT_OUT = "_fp8compile_left_out"  # on a nn.Linear that convert saw and left: why


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """All ``nn.Linear`` of a model, subclasses too, with their names; one that sits in two places, once."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield fqn, module


def _swap(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace modules wherever they sit; the root, where it is one, by what is returned."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is None:
                continue
            if child not in made and (new := replacement(child)) is not None:
                made[child] = new
            if child in made:
                parent._modules[name] = made[child]
    return made.get(model) or replacement(model) or model


def _is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module runs what was compiled of it: ``torch.compile(module)``, ``module.compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model is a {type(model).__name__}; it is a torch.nn.Module.")
    compiled = [fqn or "the model" for fqn, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            f"convert: {', '.join(compiled)} went through torch.compile already. Convert first, compile what convert "
            "returns."
        )


def _cannot_convert(module: nn.Linear) -> str | None:
    if type(module) is not nn.Linear:
        return f"a subclass of nn.Linear ({type(module).__qualname__}), whose own forward would be lost"
    if "forward" in vars(module):
        return "its forward was replaced on the instance (a hook of another library?) and would be lost"
    if module.weight.dtype not in DTYPES:
        return f"weights are {module.weight.dtype}; FP8 layers take bfloat16, float16, float32"
    return None


def convert(model: nn.Module, recipe: Recipe, *, filter: Filter | None = None) -> nn.Module:
    """Swap the ``nn.Linear`` layers of a model for ``fp8compile.Linear``, in place.

    Parameters stay the same objects, so optimizers, tied weights and state dicts do not notice. Convert before
    ``torch.compile``. What was left out and why: ``fp8compile.conversion_report(model)``.

    Args:
        model: Any module.
        recipe: Quantizers for the layers' GEMMs.
        filter: Which layers: a function ``(module, fqn) -> bool``, or name patterns (``"layers.*"``, ``"!lm_head"``);
            by default all but those that FP8 can't help.

    Returns:
        The model; a new module where the model itself is a ``nn.Linear``.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: There is no linear, a pattern matches none, a layer has another recipe already, or the model was
            compiled. Nothing is changed then.
    """
    _check_model(model)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"convert: recipe is {recipe!r}; it is a fp8compile.Recipe, such as fp8compile.recipes.rowwise() or "
            "fp8compile.recipes.by_name('rowwise')."
        )
    found = dict(linears(model))
    if not found:
        raise ValueError(f"convert: {type(model).__name__} has no nn.Linear, so there is nothing to convert.")
    filter_reason = resolve_filter(filter, list(found))
    reasons: dict[nn.Module, str | None] = {}
    for fqn, module in found.items():
        if isinstance(module, Linear):
            if filter_reason(module, fqn) is None and module.recipe != recipe:
                raise ValueError(
                    f"convert: {fqn or 'the model'} is converted already, with another recipe. Call "
                    "fp8compile.revert(model) first, or leave it out by the filter."
                )
            continue
        reasons[module] = _cannot_convert(module) or filter_reason(module, fqn)
    for module, reason in reasons.items():
        if reason is not None:
            setattr(module, LEFT_OUT, reason)
        elif hasattr(module, LEFT_OUT):
            delattr(module, LEFT_OUT)

    def replacement(module: nn.Module) -> nn.Module | None:
        wanted = module in reasons and reasons[module] is None
        return Linear.from_linear(module, recipe) if wanted else None

    return _swap(model, replacement)


def revert(model: nn.Module) -> nn.Module:
    """Swap every ``fp8compile.Linear`` back to a ``nn.Linear``, in place: the way back from ``convert``.

    Args:
        model: Any module.

    Returns:
        The model; a new module where the model itself is a ``fp8compile.Linear``.
    """

    def replacement(module: nn.Module) -> nn.Module | None:
        return module.to_linear() if isinstance(module, Linear) else None

    for _, module in linears(model):
        if hasattr(module, LEFT_OUT):
            delattr(module, LEFT_OUT)
    return _swap(model, replacement)
