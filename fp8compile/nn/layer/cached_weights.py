"""Keep codes of plain weights between optimizer steps, if the recipe has ``weight_lifetime="step"``.

eager      the first forward after a change of the weight makes the codes
compiled   tracing makes the first codes, and the end of `optimizer.step` all later ones

After any other write to a weight, until the next step, compiled code runs a second graph that quantizes the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from fp8compile import _compat
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.layer.functional import check_recipe
from fp8compile.nn.layer.layer_registry import CONVERTED
from fp8compile.ops.layer.make_weight_codes import Sets
from fp8compile.quantizers import CALL, PARAMETER, STEP, Recipe
from fp8compile.tensor import has_codes
from fp8compile.tensor.weight_codes import codes_of, forget_codes, known_codes, pair

if TYPE_CHECKING:
    from torch.nn import Module  # the mixin is always combined with a Module
else:
    Module = object

__all__ = ["CACHES", "KeepsCodes", "check_caches", "invalidate_weight_cache", "why_not_cached"]

CACHES = f"weight_lifetime={STEP!r}"
OTHERWISE = f"Use weight_lifetime={CALL!r} for this layer."
SHARED_SCALE = "layers share a global scale, which changes with the weights of all of them"


def check_caches(recipe: Recipe, missing: str | None = None, *, shares_scale: bool = False) -> None:
    """Raise a ValueError if ``recipe`` keeps codes for a step and a layer can't keep them.

    A layer can't keep codes if it shares an outer scale with other layers (``shares_scale``). See `why_not_cached` for
    ``missing``.
    """
    reason = SHARED_SCALE if shares_scale else why_not_cached(recipe, missing)
    if recipe.weight_lifetime == STEP and reason is not None:
        raise ValueError(f"recipe: {CACHES} is not supported for this layer, because {reason}. {OTHERWISE}")


def why_not_cached(recipe: Recipe, missing: str | None) -> str | None:
    """Return why a layer can't keep the codes of its weights between steps; None if it can.

    ``missing`` is what `fp8compile.nn.experts.known_modules.holds_no_stacks` returns for the layer.
    """
    if recipe.delayed()[1] is not None:
        return "the weight uses delayed scaling, so each backward changes its scale and its FP8 data"
    if None in (recipe.weight, recipe.quantizer_read("weight_for_grad_input")):
        return "the recipe leaves a GEMM of the weight in high precision, which needs the original values"
    return None if missing is None else f"the module {missing}"


class KeepsCodes(Module):
    """Mixin of layers that keep the codes of their weights between steps if the recipe says so."""

    _recipe: Recipe
    _caches_weights = False  # as the recipe says, of which PyTorch 2.11 traces no attribute

    @property
    def recipe(self) -> Recipe:
        """Quantizers for the operands of the three GEMMs. It can be set to another recipe."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        check_recipe(type(self).__name__, recipe)
        lifetime, is_parameter = recipe.weight_lifetime, self.is_quantized()
        if lifetime != self._recipe.weight_lifetime and (lifetime == PARAMETER) is not is_parameter:
            has = "FP8 parameters" if is_parameter else "weights in high precision"
            raise ValueError(
                f"recipe: weight_lifetime is {lifetime!r}, but the layer has {has}. Only convert, freeze_weights and "
                "load_quantized change that."
            )
        self.take_recipe(recipe)

    def is_quantized(self) -> bool:
        """Whether the weights are FP8 parameters."""
        raise NotImplementedError

    def take_recipe(self, recipe: Recipe) -> None:
        """Set the recipe; weights are replaced later if its ``weight_lifetime`` says so."""
        self._set_caching(recipe)
        self._recipe = recipe

    def _set_caching(self, recipe: Recipe) -> None:
        """Store whether codes live for a step, else drop them; raise a ValueError if this layer can't keep them."""
        check_caches(recipe, self._holds_no_stacks())
        self._caches_weights = recipe.weight_lifetime == STEP
        if not self._caches_weights:
            self.forget_codes()

    def _holds_no_stacks(self) -> str | None:
        """Return why experts can't be codes, as `holds_no_stacks` says for modules that hold experts; else None."""
        return None

    def forget_codes(self) -> None:
        """Drop the codes that are kept beside the layer's weights."""
        for weight in self._parameters.values():
            forget_codes(weight)

    def cached_weights(self) -> Mapping[str, bool]:
        """Return {name: whether it is stored transposed} for parameters whose codes may be kept between steps."""
        raise NotImplementedError

    def step_codes(self, name: str, *, is_turned: bool = False) -> Sets | None:
        """Return the codes of the weight ``name`` kept for this step: those for the output, and for grad_input.

        None if no codes are kept (the GEMM's op then quantizes the weight), or if the weight is a QuantizedTensor.
        ``is_turned`` tells whether GEMMs read the parameter's matrices transposed.

        Raises:
            ValueError: The weight is sharded in a way for which codes can't be kept.
        """
        if not self._caches_weights:
            return None
        weight = self._parameters.get(name)
        if weight is None or not isinstance(weight, nn.Parameter) or has_codes(_compat.local_itself(weight)):
            return None  # it is computed in each forward, as by a parametrization or torch.func.functional_call
        _check_here(self, weight)
        autocast = _compat.autocast_dtype(weight)
        if torch.compiler.is_compiling():
            _make_at_trace(autocast)
            found = known_codes(weight)
            if found is None or not _are_read(weight, found, self.recipe, autocast or weight.dtype, is_turned):
                return None
            return pair(found)
        if not _can_count(weight):
            return None
        found = codes_of(weight, self.recipe, autocast or weight.dtype, is_turned=is_turned)
        if found.may_miss_writes():
            return None
        if not found.holds():
            found.renew()
        return pair(found)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._forget_before_a_swap()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._forget_before_a_swap()
        super()._load_from_state_dict(*args)

    def _forget_before_a_swap(self) -> None:
        """Drop kept codes before PyTorch swaps a weight's tensor: the swap fails if a weak reference to it exists."""
        if torch.__future__.get_swap_module_params_on_conversion():
            self.forget_codes()

    def check_gathered_as_codes(self, weight: Tensor) -> None:
        """Raise a ValueError if codes should live for a step, but ``weight`` holds values.

        For layers that get their weights without names: they can't find kept codes, which are looked up by name.
        """
        if self._caches_weights and not has_codes(_compat.local_itself(weight)):
            raise ValueError(
                f"{CACHES}: quantized weights of {type(self).__name__} can't be cached, because its method "
                "receives tensors and not the names of the weights. Call "
                f"fp8compile.parallel.fsdp_float8_all_gather before fully_shard to cache them. {OTHERWISE}"
            )


def _check_here(module: nn.Module, weight: Tensor) -> None:
    reason = None
    if _compat.is_dtensor(weight):
        reason = "it is a DTensor, as in tensor and expert parallelism"
    elif _compat.is_fsdp_managed(module):
        reason = "FSDP all-gathers it in high precision; fsdp_float8_all_gather, before fully_shard, caches it"
    if reason is not None:
        raise ValueError(f"{CACHES}: this weight can't be cached in FP8, because {reason}. {OTHERWISE}")


def _can_count(weight: Tensor) -> bool:
    return not (weight.is_meta or weight.is_inference() or _compat.is_traced(weight) or _compat.is_transformed(weight))


def _every(layers: Iterable[Any]) -> Iterator[tuple[Any, Tensor, bool]]:
    """Yield (layer, parameter, whether it is stored transposed) for each weight whose codes may be kept."""
    for module in layers:
        # a layer may have been reverted since
        if not getattr(module, "_caches_weights", False) or _compat.is_fsdp_managed(module):
            continue
        for name, is_turned in module.cached_weights().items():
            weight = module._parameters.get(name)
            if weight is not None and not has_codes(weight) and not _compat.is_dtensor(weight):
                yield module, weight, is_turned


@_compat.constant_when_traced
def _make_at_trace(autocast: torch.dtype | None) -> None:
    """Make the missing codes of all layers' weights, before the first graph that may read these codes is traced.

    All layers get them, because a graph traced for one block also runs for other blocks. Fake weights get fake codes.
    """
    if _compat.is_exporting() or _compat.is_faking():
        return
    for module, weight, is_turned in _every(list(CONVERTED)):
        if not (_compat.is_fake(weight) or _can_count(weight)):
            continue
        how: Any = module.recipe, autocast or weight.dtype
        found = known_codes(weight)
        if found is None or not (found.holds() or found.fits(*how, is_turned=is_turned)):
            with _compat.faking_as(weight):
                found = codes_of(weight, *how, is_turned=is_turned)
        found.is_compiled = True


@_compat.constant_when_traced
def _are_read(weight: Tensor, codes: Any, recipe: Recipe, dtype: torch.dtype, is_turned: bool) -> bool:
    """Whether the traced graph may read kept codes: they are current, and the graph has not written to the weight."""
    if _compat.is_exporting() or _compat.is_written_in_trace(weight):
        return False
    return codes.holds() and codes.fits(recipe, dtype, is_turned=is_turned)


def invalidate_weight_cache(model: Model) -> Model:
    """Requantize the weights of all layers with ``weight_lifetime="step"``, and replace the cached weights.

    Call this after you write to weights in a way that bypasses both PyTorch's version counters and ``optimizer.step``,
    such as through ``.data`` or with a custom kernel. With FSDP2, the cached weights are discarded, and the next
    all-gather quantizes again.

    Args:
        model: A converted model.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module.
        ValueError: No layer of the model has ``weight_lifetime="step"``.
    """
    check_model("invalidate_weight_cache", model)
    layers: list[Any] = [each for each in model.modules() if each in CONVERTED and each._caches_weights]
    if not layers:
        raise ValueError(
            f"invalidate_weight_cache: no layer of the model has {CACHES}. Call fp8compile.convert(model, recipe, "
            f"{CACHES})."
        )
    for layer in layers:
        if (scales := getattr(layer, "weight_scales", None)) is not None:
            scales.forget()
    for module, weight, is_turned in _every(layers):
        if _can_count(weight):
            codes = codes_of(
                weight, module.recipe, _compat.autocast_dtype(weight) or weight.dtype, is_turned=is_turned
            )
            codes.is_in_step = False
            codes.renew()
    return model
