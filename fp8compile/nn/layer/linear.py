"""fp8compile.Linear: a torch.nn.Linear whose GEMMs run in FP8."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8compile._compat import autocast_dtype, is_fsdp_managed, local_itself, rebind_load_hooks
from fp8compile.nn.layer.cached_weights import check_caches
from fp8compile.nn.layer.codes_in_state import CodesInState, reach_codes
from fp8compile.nn.layer.delayed_state import DelayedState, RowOfWeight, check_amax_group
from fp8compile.nn.layer.forward_dtype import note_forward_dtype
from fp8compile.nn.layer.functional import check_recipe, linear
from fp8compile.nn.layer.layer_registry import CONVERTED, FORWARD_DTYPES
from fp8compile.nn.layer.redistribute_like import on_all_ranks_of
from fp8compile.nn.layer.shared_outer_amax import shared_outer_amax
from fp8compile.nn.layer.warn_if_not_sharded import MARK, warn_if_not_sharded
from fp8compile.quantizers import CALL, PARAMETER, DelayedScaling, Quantizer, Recipe
from fp8compile.tensor import SOURCE_DTYPES, is_quantized_parameter

__all__ = ["Linear", "become_float8", "become_plain", "cannot_revert"]

STATE = ("amax_history", "multiplier")  # buffers of delayed scaling

ONE_RANK = (
    "Linear: delayed scaling is used without amax_group, so each rank has its own state (amax_history, "
    "multiplier), but a checkpoint keeps the state of only one rank. All ranks would continue with it, and "
    "training would not be bit-identical to an uninterrupted run. For a common state, pass amax_group to "
    "fp8compile.convert; to save the state of each rank, see 'Distributed checkpoints' in docs/delayed-scaling.md."
)


class Linear(CodesInState, nn.Linear):
    """A ``torch.nn.Linear`` whose GEMMs run in FP8.

    It is a subclass of ``nn.Linear``, so tools that look for ``nn.Linear`` find it. Parameters and state dict are as
    in ``nn.Linear``, unless the layer was created by ``fp8compile.convert`` with ``weight_lifetime="parameter"``. The
    state dict then contains FP8 data and scales instead of the weight. Loading a state dict with a high-precision
    weight quantizes it.

    With delayed scaling, the layer has two more buffers, the fields of ``fp8compile.DelayedState``. Each backward pass
    updates them. Loading a state dict without these buffers, such as that of an ``nn.Linear``, resets them. The
    buffers stay float32 when the layer is cast to another dtype.

    Args:
        in_features: Size of the last dim of the input.
        out_features: Size of the last dim of the output.
        bias: Whether the layer has a bias.
        recipe: Quantizers for the operands of the three GEMMs.
        amax_group: The ranks over which amaxes are reduced for delayed scaling, with one collective per backward pass.
            All these ranks must run the same backward passes.
        device: Device of the parameters.
        dtype: Dtype of the parameters: bfloat16, float16 or float32.

    Raises:
        TypeError: ``recipe`` or ``amax_group`` has a wrong type, or ``dtype`` is not one of the three.
        ValueError: A group is given for a recipe without delayed scaling, the recipe has ``weight_lifetime="step"``
            and its quantized weight can't be cached, or it has ``"parameter"``, which needs `convert`.
    """

    amax_group: str | None = None  # the group's name: a group can be neither copied nor pickled
    # the layers with which this one shares an outer scale, itself among them; a tuple, so that they are no submodules
    scale_group: tuple[nn.Module, ...] = ()
    scale_quantizer: Quantizer | None = None  # that of their weights; Dynamo of PyTorch 2.11 can't ask a recipe for it
    observed_weights: ClassVar[Sequence[str]] = ("weight",)
    amax_history: Tensor  # this and `multiplier` exist only if the recipe has delayed scaling
    multiplier: Tensor
    _recipe_under_fsdp: Recipe | None = None  # the recipe for a weight that FSDP frees, if it is another one
    _plain: ClassVar[type[nn.Linear]] = nn.Linear  # the class that `revert` restores; made subclasses set their own

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe,
        amax_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_recipe(recipe)
        if dtype not in (None, *SOURCE_DTYPES):
            raise TypeError(f"Linear: `dtype` is {dtype}; it must be bfloat16, float16 or float32.")
        check_amax_group("Linear", [recipe], amax_group)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        become_float8(self, recipe, amax_group)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe, *, amax_group: ProcessGroup | None = None) -> Self:
        """Create an FP8 layer that shares the parameters, hooks and training mode of ``linear``.

        Args:
            linear: An ``nn.Linear``, not a subclass of it.
            recipe: Quantizers for the operands of the three GEMMs.
            amax_group: The ranks over which amaxes are reduced for delayed scaling.

        Raises:
            TypeError: ``linear`` is not a plain ``nn.Linear``, its forward was replaced on the instance, or ``recipe``
                or ``amax_group`` has a wrong type.
            ValueError: A group is given for a recipe without delayed scaling.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(
                "Linear.from_linear: expected a torch.nn.Linear and not a subclass, because the class would be "
                f"lost; got a {type(linear).__name__}. fp8compile.convert keeps the class."
            )
        if _bypasses_class(linear):
            raise TypeError(
                "Linear.from_linear: the layer's forward was replaced on the instance, by .compile() or a hook of "
                "another library, and would be called instead of FP8. Convert the model before the forward is "
                "replaced."
            )
        _check_recipe(recipe)
        check_amax_group("Linear", [recipe], amax_group)
        module = cls.__new__(cls)
        module.__dict__.update(linear.__dict__, _buffers=dict(linear._buffers))  # a copy: no new buffers for linear
        rebind_load_hooks(module)
        become_float8(module, recipe, amax_group)
        return module

    def to_linear(self) -> nn.Linear:
        """Create a ``torch.nn.Linear`` with the same parameters and hooks.

        If `convert` created the layer from a subclass of ``nn.Linear``, the result is of that class.

        Raises:
            TypeError: The layer's class is a user's subclass of this class, or the weight is parametrized or
                quantized, or the forward was replaced or compiled on the instance.
        """
        if (reason := cannot_revert(self)) is not None:
            raise TypeError(f"Linear.to_linear: {reason}")
        module = self._plain.__new__(self._plain)
        module.__dict__.update(self.__dict__, _buffers=dict(self._buffers))
        become_plain(module)
        rebind_load_hooks(module)
        return module

    def take_recipe(self, recipe: Recipe) -> None:
        """Set the recipe, and the one for weights that FSDP frees."""
        super().take_recipe(recipe)
        # FSDP would free a weight, but not its kept codes
        self._recipe_under_fsdp = recipe.with_lifetime(CALL) if recipe.keeps_weight_for_backward() else None
        if self.scale_group:
            self.share_scale(self.scale_group)

    def share_scale(self, layers: tuple[nn.Module, ...]) -> None:
        """Share one global scale among ``layers``, which include this layer."""
        check_caches(self.recipe, shares_scale=True)
        self.scale_group = layers
        self.scale_quantizer = self.recipe.weight or self.recipe.weight_for_grad_input

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ weight.T + bias``, (..., out_features), in the dtype of the input (or of autocast)."""
        recipe = self._recipe
        beside: dict[str, Any] = {}  # what few layers have, and few steps
        if self._recipe_under_fsdp is not None and is_fsdp_managed(self):
            recipe = self._recipe_under_fsdp
        if MARK in self.__dict__:
            warn_if_not_sharded(self)
        own = self._parameters.get("weight")  # most forwards have nothing new to note, which this tells without a call
        if torch.compiler.is_compiling() or own is None or autocast_dtype(own) not in FORWARD_DTYPES.get(self, ()):
            note_forward_dtype(self, "weight")
        if torch.is_grad_enabled() and self._observers is not None:  # an evaluation is not read
            beside["observer"] = self.observer("weight")
        if self.scale_group and (outer_amax := self.outer_amax()) is not None:
            return linear(input, self.weight, self.bias, recipe=recipe, outer_amax=outer_amax, **beside)
        if self._caches_weights:
            beside["weight_codes"] = self.step_codes("weight")
        if "amax_history" in self._buffers:
            beside["state"] = self.delayed_state()
        return linear(input, self.weight, self.bias, recipe=recipe, **beside)

    def cached_weights(self) -> dict[str, bool]:
        """Return {name: is stored transposed} for the weights that may stay quantized between steps."""
        return {"weight": False}

    def outer_amax(self) -> Tensor | None:
        """Return the amax of all weights that share this layer's global scale, (1,) float32.

        None if the layer doesn't share a global scale, or if it has FP8 parameters.
        """
        if not self.scale_group or self.scale_quantizer is None:
            return None
        layers: Any = self.scale_group
        return shared_outer_amax([layer.weight for layer in layers], self.scale_quantizer)

    def delayed_state(self) -> DelayedState | None:
        """Return the layer's delayed scaling buffers as a DelayedState; None without delayed scaling."""
        if "amax_history" not in self._buffers:
            return None
        return DelayedState(self.amax_history, self.multiplier, self.amax_group)

    def reset_parameters(self) -> None:
        """Initialize parameters as ``nn.Linear`` does, and reset the state of delayed scaling."""
        self._reset_state()  # first, because writing a quantized weight uses the state's multiplier
        super().reset_parameters()

    def _reset_state(self) -> None:
        if (state := self.delayed_state()) is not None:
            state.reset()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        buffers: dict[str, Any] = self._buffers
        before = {name: buffers[name] for name in STATE if name in buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = buffers[name]
            if after.dtype != buffer.dtype:  # .half() casts values, but the state stays float32
                buffers[name] = buffer.to(after.device)
        if any(buffer.is_meta and not buffers[name].is_meta for name, buffer in before.items()):
            self.amax_history.zero_()  # to_empty() leaves memory uninitialized, which would go unnoticed in a scale
            self._reset_state()
        self.own_weight()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.own_weight()

    def own_weight(self) -> None:
        """Make a quantized weight with delayed scaling read its multiplier from this layer's buffers."""
        if self._delays_codes():
            local_itself(self.weight).state = RowOfWeight(self)

    def _delays_codes(self) -> bool:
        return self.is_quantized() and isinstance(self.recipe.weight, DelayedScaling)

    def is_quantized(self) -> bool:
        """Whether the weight is an FP8 parameter."""
        weight = self._parameters.get("weight")  # not self.weight, which computes a parametrized weight
        return weight is not None and is_quantized_parameter(local_itself(weight))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._state_is_of_one_rank():
            warnings.warn(ONE_RANK, stacklevel=2)

    def _state_is_of_one_rank(self) -> bool:
        """Whether ranks have different delayed-scaling states: FSDP shards the layer, and no group reduces amaxes."""
        if (state := self.delayed_state()) is None or state.group is not None:
            return False
        is_sharded = is_fsdp_managed(self) or hasattr(self, "graph_fsdp")
        return is_sharded and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *rest: Any,
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        state_keys = [prefix + name for name in STATE]
        if f"{prefix}weight" in state_dict and not any(key in state_dict for key in state_keys):
            self._reset_state()  # the state belongs to the weights before
            missing_keys[:] = [key for key in missing_keys if key not in state_keys]
        values = state_dict.get(f"{prefix}weight")
        if self._delays_codes() and values is not None and values.shape == self.weight.shape:
            with torch.no_grad():
                self.weight.copy_(values)  # again, with the multiplier that was loaded after the weight


reach_codes(Linear, "weight")


def _check_recipe(recipe: Recipe) -> None:
    check_recipe("Linear", recipe)
    if recipe.weight_lifetime == PARAMETER:
        raise ValueError(
            f"Linear: a recipe with weight_lifetime={PARAMETER!r} needs fp8compile.convert. Convert an nn.Linear."
        )


def become_float8(layer: Linear, recipe: Recipe, amax_group: ProcessGroup | None) -> None:
    """Set up a layer that has the class `Linear`: the recipe and, for delayed scaling, the buffers of the state.

    ``amax_group`` are the ranks that reduce amaxes of delayed scaling, or None.
    """
    layer.take_recipe(recipe)
    CONVERTED.add(layer)
    if recipe.history():
        state = DelayedState.initial(recipe, device=layer.weight.device, group=amax_group)
        layer.amax_group = state.group
        for name in STATE:
            layer.register_buffer(name, on_all_ranks_of(layer.weight, getattr(state, name)))


def become_plain(layer: nn.Linear) -> None:
    """Remove the attributes and buffers that a `Linear` has and a ``nn.Linear`` has not; the class stays."""
    for name in (
        "_recipe",
        "_recipe_under_fsdp",
        "_caches_weights",
        "_observers",
        "amax_group",
        "scale_group",
        "scale_quantizer",
    ):
        vars(layer).pop(name, None)
    CONVERTED.discard(layer)
    for name in STATE:
        layer._buffers.pop(name, None)


def _bypasses_class(layer: nn.Linear) -> bool:
    return "forward" in vars(layer) or layer._compiled_call_impl is not None


def cannot_revert(layer: Linear) -> str | None:
    """Return why a `Linear` can't be reverted to a ``nn.Linear``; None if it can."""
    if "_plain" not in vars(type(layer)):
        return (
            f"this is a {type(layer).__name__}, and its own forward or parametrization would be lost. Undo that first."
        )
    if _bypasses_class(layer):
        return "its forward was replaced or compiled on the instance, and would still run in FP8. Undo that first."
    if layer.is_quantized():
        return "its weight is an FP8 parameter. Replace it by nn.Parameter(weight.dequantize())."
    return None
