"""convert and revert: swap the linears of a model, in place."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fp8compile._compat import is_sharded_class
from fp8compile.nn.assignment import Recipes, assigner, ends
from fp8compile.nn.filters import Filter, resolve_filter
from fp8compile.nn.linear import Linear, become_float8, become_plain, cannot_revert
from fp8compile.nn.quantized_weights import check_weights, quantize_weights
from fp8compile.nn.state import check_amax_group
from fp8compile.nn.subclasses import float8_class, names_taken
from fp8compile.nn.uses import Uses, parameter_uses
from fp8compile.quantizers import Recipe
from fp8compile.tensor import SOURCE_DTYPES, QuantizedTensor

__all__ = ["LEFT_OUT", "convert", "linears", "revert"]

LEFT_OUT = "_fp8compile_left_out"  # on a nn.Linear that convert saw and left: why
PAST_FORWARD = "reads its weight itself, past the layer's forward"
REASONS = 5  # in the warning; the report has them all
EXPORTED_LINEAR = torch.ops.aten.linear.default


def linears(model: nn.Module) -> Iterator[tuple[nn.Linear, list[str]]]:
    """All ``nn.Linear`` of a model, subclasses too, each with all names that it has there."""
    names: dict[nn.Linear, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(module, []).append(fqn)
    yield from names.items()


def _is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module runs what was compiled of it: ``torch.compile(module)``, ``module.compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model is a {type(model).__name__}; it is a torch.nn.Module.")


def _check_not_compiled(model: nn.Module) -> None:
    compiled = [fqn or "the model" for fqn, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            f"convert: {', '.join(compiled)} went through torch.compile already. Convert first, compile what convert "
            "returns."
        )


def _is_frozen(module: nn.Module) -> bool:
    """Whether linears of the module became calls in a graph: by TorchScript, or by `torch.export`."""
    graph = getattr(module, "graph", None)
    exported = isinstance(graph, torch.fx.Graph) and graph.find_nodes(op="call_function", target=EXPORTED_LINEAR)
    return isinstance(module, torch.jit.ScriptModule) or bool(exported)


def _check_not_frozen(model: nn.Module) -> None:
    frozen = [fqn or "the model" for fqn, module in model.named_modules() if _is_frozen(module)]
    if frozen:
        raise ValueError(
            f"convert: {frozen[0]} is a graph made by torch.jit or torch.export, and its linears are calls in it. "
            "Convert the model that it was made of, or only the parts of this one that are no graph."
        )


def _cannot_keep_class(module: nn.Linear) -> str | None:
    """Why a subclass of ``nn.Linear`` can't be in FP8 and stay what it is, or None."""
    cls = type(module)
    subclass = f"a subclass of nn.Linear ({cls.__qualname__})"
    if is_parametrized(module):
        return "its weight or bias is parametrized; convert first and parametrize what convert returns"
    if is_lazy(module.weight):
        return f"{subclass} whose parameters have no shape before the first call; call the model, then convert"
    if is_sharded_class(cls):
        return f"{subclass} that fully_shard made; convert first"
    if cls.forward is not nn.Linear.forward or cls.__call__ is not nn.Linear.__call__:
        return f"{subclass}, whose own forward would be lost"
    return None


def _cannot_convert(module: nn.Linear) -> str | None:
    if type(module) is not nn.Linear and (reason := _cannot_keep_class(module)):
        return reason
    if names := names_taken(module):
        return f"it has an attribute {names[0]} of its own, and so has an FP8 layer"
    if "forward" in vars(module):
        return "its forward was replaced on the instance (a hook of another library?) and would be lost"
    if isinstance(module.weight, QuantizedTensor) or module.weight.layout != torch.strided:
        kind = type(module.weight).__name__ if isinstance(module.weight, QuantizedTensor) else module.weight.layout
        return f"its weight is {kind}; FP8 layers take a dense one and quantize it themselves"
    if module.weight.dtype not in SOURCE_DTYPES:
        return f"weights are {module.weight.dtype}; FP8 layers take bfloat16, float16, float32"
    return None


def _past_forward(module: nn.Linear, uses: Uses) -> str | None:
    method = uses.past_forward(module)
    return None if method is None else f"{method} {PAST_FORWARD}, which would not be FP8"


def _plan(
    model: nn.Module, recipe: Recipes, filter: Filter | None, keep_ends: int
) -> tuple[dict[nn.Linear, tuple[Recipe | None, str]], bool]:
    """For each linear that isn't converted yet: its recipe, or None and why it is left out.

    And whether there is one that is converted already and would be again.
    """
    found = dict(linears(model))
    if not found:
        raise ValueError(f"convert: {type(model).__name__} has no nn.Linear, so there is nothing to convert.")
    fqns = [fqn for names in found.values() for fqn in names]
    filter_reason, assign, kept = resolve_filter(filter, fqns), assigner(recipe, fqns), ends(model, keep_ends)
    uses = parameter_uses(model)
    plan: dict[nn.Linear, tuple[Recipe | None, str]] = {}
    again = False
    for module, names in found.items():
        # a layer with several names is one layer: whoever leaves out one of them leaves it out
        left_out = next((reason for fqn in names if (reason := filter_reason(module, fqn)) is not None), None)
        if left_out is None and module in kept:
            left_out = f"at an end of the model (keep_ends={keep_ends})"
        own = assign(module, names) if left_out is None else None
        if left_out is None and own is None:
            left_out = "no recipe is given for it"
        if isinstance(module, Linear):
            if left_out is None and module.recipe != own:
                raise ValueError(
                    f"convert: {names[0] or 'the model'} is converted already, with another recipe. Call "
                    "fp8compile.revert(model) first, or leave it out by the filter."
                )
            again |= left_out is None
        elif reason := _cannot_convert(module) or _past_forward(module, uses) or left_out:
            plan[module] = None, reason
        else:
            plan[module] = own, ""
    return plan, again


def _say_that_nothing_is_converted(reasons: list[str], *, strict: bool) -> None:
    counted = Counter(reasons).most_common()
    left = ", ".join(f"{count} ({reason})" for reason, count in counted[:REASONS])
    more = f", and {len(counted) - REASONS} reasons more" if len(counted) > REASONS else ""
    text = (
        f"convert: no linear is converted. Left as they are: {left}{more}. See fp8compile.conversion_report(model) "
        "for each of them."
    )
    if strict:
        raise ValueError(text)
    warnings.warn(text, stacklevel=3)


def convert(
    model: nn.Module,
    recipe: Recipes,
    *,
    filter: Filter | None = None,
    keep_ends: int = 0,
    amax_group: ProcessGroup | None = None,
    quantized_parameters: bool = False,
    keep_initial: bool = False,
    strict: bool = False,
) -> nn.Module:
    """Turn the ``nn.Linear`` layers of a model into ``fp8compile.Linear``, in place.

    Modules and parameters stay the same objects, so optimizers, hooks, tied weights and state dicts do not notice.
    Layers of a subclass that inherits its forward stay of that class too. Layers whose weight the model multiplies
    itself, past their forward, stay as they are. Convert before ``torch.compile``. What was left out and why:
    ``fp8compile.conversion_report(model)``; a convert that leaves out all warns.

    Args:
        model: Any module.
        recipe: Quantizers for the layers' GEMMs; or one recipe for each name pattern, of which the first that matches
            decides (``{"*.down_proj": a, "layers.*": b}``); or a function ``(module, fqn) -> Recipe``, called once a
            layer. None in place of a recipe, and a name that no pattern matches, leave a layer in high precision.
        filter: Which layers: a function ``(module, fqn) -> bool``, or name patterns (``"layers.*"``, ``"!lm_head"``);
            by default all but those that FP8 can't help.
        keep_ends: How many blocks at each end of the model stay in high precision, with what is before the first and
            behind the last one: 1 for the first and last layers in bfloat16. Blocks are the entries of the model's
            largest ``ModuleList`` or ``Sequential``; without one, each linear is a block.
        amax_group: Of delayed scaling: ranks whose amaxes become one, as ``fp8compile.Linear`` takes it.
        quantized_parameters: Whether the layers' weights themselves become codes and scales, with nothing in high
            precision beside them; parameters are new objects then. For recipes whose weight codes serve both
            directions, tensorwise and blockwise; see ``docs/parameters.md``.
        keep_initial: With it, whether the values that weights had are kept on the CPU, until
            ``fp8compile.MasterWeights`` takes them. Under FSDP2 each rank keeps those of its shards; of weights on the
            meta device, what is written to them later.
        strict: Whether to raise where no layer at all is converted, instead of warning.

    Returns:
        The model.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: There is no linear, or with ``strict`` none that is converted; a pattern matches none, a layer has
            another recipe already, the model was compiled, scripted or exported, or a group is given for recipes
            without delayed scaling; a recipe's weight codes don't serve both directions, a weight to be quantized is
            a DTensor whose parts cut blocks or that FSDP2 has sharded, or a module that stays as it is has it too.
            Nothing is changed then.
        RuntimeError: A weight to be quantized is a DTensor, on PyTorch 2.11.
    """
    _check_module("convert", model)
    _check_not_compiled(model)
    _check_not_frozen(model)
    plan, again = _plan(model, recipe, filter, keep_ends)
    given = [own for own, _ in plan.values() if own is not None]
    check_amax_group("convert", given, amax_group, none_has="no layer gets")
    if keep_initial and not quantized_parameters:
        raise ValueError("convert: keep_initial is for quantized_parameters=True; else weights keep their values.")
    chosen = [module for module, (own, _) in plan.items() if own is not None]
    if quantized_parameters:
        check_weights(model, {module: plan[module][0] for module in chosen})
    classes = {module: float8_class(type(module)) for module in chosen}
    if plan and not chosen and not again:
        _say_that_nothing_is_converted([reason for _, reason in plan.values()], strict=strict)
    for module, (own, reason) in plan.items():
        vars(module).pop(LEFT_OUT, None)
        if own is None:
            setattr(module, LEFT_OUT, reason)
        else:
            # the class, not the module: whoever else holds the module, in a list or a closure, has FP8 too
            module.__class__ = classes[module]
            become_float8(module, own, amax_group if own.history() else None)
    if quantized_parameters:
        quantize_weights(chosen, keep_initial=keep_initial)
    return model


def revert(model: nn.Module) -> nn.Module:
    """Turn every ``fp8compile.Linear`` back into a ``nn.Linear``, in place: the way back from ``convert``.

    Args:
        model: Any module.

    Returns:
        The model.

    Raises:
        TypeError: The model is no module, or a layer can't go back without losing something. Nothing is changed then.
    """
    _check_module("revert", model)
    layers = [module for module, _ in linears(model)]
    for module in layers:
        if isinstance(module, Linear) and (reason := cannot_revert(module)) is not None:
            raise TypeError(f"revert: {reason}")
    if type(model).__name__ == "OptimizedModule" and isinstance(model._orig_mod, Linear):
        raise TypeError("revert: the layer itself was compiled, and would go on in FP8. Revert what was compiled.")
    for module in layers:
        vars(module).pop(LEFT_OUT, None)
        if isinstance(module, Linear):
            become_plain(module)
            module.__class__ = module._plain
    return model
