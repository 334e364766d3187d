"""Let stock FSDP2 (`torch.distributed.fsdp.fully_shard`) gather weights as codes.

    once a step      each rank: amaxes of its shards --one message: maximum--> scales of all weights
    before a layer   shard -> param_dtype -> codes --all-gather of bytes--> QuantizedTensor, which the layer multiplies

The codes have the same bits as if the layer had quantized the gathered weight itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding
from fp8compile.nn import Linear
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.convert.check_not_in_ddp import check_not_in_ddp
from fp8compile.nn.convertible.convertible_layers import is_converted, weight_names
from fp8compile.nn.experts.known_modules import holds_no_stacks
from fp8compile.nn.layer.redistribute_like import wrapped_like
from fp8compile.nn.layer.warn_if_not_sharded import MARK
from fp8compile.nn.parameter_uses.owners import users_of_parameters
from fp8compile.nn.weights.quantize_weights import COMPUTED
from fp8compile.parallel.dtensor_placements import part_of
from fp8compile.parallel.expert_gradients import check_meshes
from fp8compile.parallel.fsdp2.sharded_weight import ShardedWeight
from fp8compile.parallel.fsdp2.weight_scales import WeightScales
from fp8compile.quantizers import GEMMS, DelayedScaling
from fp8compile.tensor import (
    BOTH,
    GATHERED,
    PLAIN,
    GatherPolicy,
    QuantizedParameter,
    QuantizedTensor,
    allow_groups,
    in_place_of,
    mark_replaced,
)

__all__ = ["fsdp_float8_all_gather"]

CALLS = count()  # numbers the calls of fsdp_float8_all_gather
PAIR = GEMMS[:2]  # the products that read a weight

ORDER = (
    "The order is: fp8compile.convert, parallelize_module (if used), fsdp_float8_all_gather, torch.compile on each "
    "block, fully_shard on the compiled blocks."
)


@dataclass(frozen=True)
class _Weight:
    """A weight of an FP8 layer: the layer's module, and the name of the parameter in it."""

    module: Any  # an FP8 layer
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        return attrgetter(self.name)(self.module)

    def suits_all(self, users: list[nn.Module]) -> bool:
        """Whether one set of gathered codes serves all ``users``, the modules that have the parameter.

        Experts' weights and weights with delayed scaling may have one user only.
        """
        if len(users) == 1 or self.parameter.ndim == 3 or isinstance(self.module.recipe.weight, DelayedScaling):
            return len(users) == 1
        kind = Linear if isinstance(self.module, Linear) else type(self.module)
        return all(isinstance(user, kind) and user.recipe == self.module.recipe for user in users)


def _check_model(model: nn.Module, ignored: set[nn.Parameter]) -> list[_Weight]:
    """Return the weights of a model's FP8 layers that FSDP2 will shard, except weights in ``ignored``.

    Raise a ValueError if there are none, or if the model is sharded already.
    """
    check_model("fsdp_float8_all_gather", model)
    if sharded := _compat.fsdp_modules(model):
        raise ValueError(f"fsdp_float8_all_gather: {', '.join(sharded)} is already sharded by fully_shard. {ORDER}")
    layers = [module for module in model.modules() if is_converted(module)]
    weights = [_Weight(layer, name) for layer in layers for name in weight_names(layer)]
    if not weights:
        raise ValueError(
            f"fsdp_float8_all_gather: {type(model).__name__} has no FP8 layers. Call fp8compile.convert "
            "first, with a filter that includes some."
        )
    if any(isinstance(_compat.local_itself(weight.parameter), ShardedWeight) for weight in weights):
        raise ValueError("fsdp_float8_all_gather: it was already called for this model. Call it only once.")
    if not (shared := [weight for weight in weights if weight.parameter not in ignored]):
        raise ValueError(
            f"fsdp_float8_all_gather: all FP8 weights of {type(model).__name__} are in ignored_params, so "
            "fully_shard does not gather any of them. Remove this call."
        )
    return shared


OWN_CODES = "quantized data: it is an FP8 parameter"


def _why_no_pair(weight: _Weight) -> str | None:
    if weight.module.recipe.delayed()[1] is not None:
        return "the weight uses delayed scaling for only one of its two GEMMs"
    if getattr(weight.module, "scale_group", ()):
        return "layers share its global scale, and forward and backward quantize it differently"
    return None


def _why_plain(weight: _Weight, users: list[nn.Module]) -> str | None:
    """Return why FSDP2 gathers a weight in ``param_dtype`` and not as codes; None if it gathers codes.

    ``users`` are the modules that have the parameter.
    """
    recipe = weight.module.recipe
    if (missing := holds_no_stacks(weight.module)) is not None:
        return f"the module {missing}"
    if isinstance(_compat.local_itself(weight.parameter), QuantizedTensor):
        return OWN_CODES
    if (missing := next((gemm.name for gemm in PAIR if recipe.quantizer_read(gemm.b) is None), None)) is not None:
        return f"the recipe leaves {missing} in high precision"
    if not recipe.shares_weight_codes() and (reason := _why_no_pair(weight)) is not None:
        return reason
    for quantizer in (recipe.quantizer_read(gemm.b) for gemm in PAIR):
        if not quantizer.is_local():
            return f"quantization by {quantizer!r} depends on the position of a value in the tensor"
        if quantizer.unpacked() is None:
            return (
                f"{quantizer!r} stores several values per byte, and its unpacked() returns no quantizer with one "
                "per byte, which sharding requires"
            )
    if not weight.suits_all(users):
        return "another module also uses the weight (tied), in high precision or with another recipe"
    if weight.parameter.ndim == 3 and any(cut.dim > 0 for cut in _cuts_of(weight.parameter)):
        return "tensor parallelism shards the matrix of each expert"
    return None


def _cuts_of(weight: nn.Parameter) -> tuple[DimSharding, ...]:
    """Return how tensor parallelism shards a weight; () without tensor parallelism."""
    if not isinstance(weight, DTensor):
        return ()
    return tuple(cut.by_name() for cut in part_of("fsdp_float8_all_gather", weight).cuts if cut is not None)


def _wrapped(weight: _Weight, gathers: GatherPolicy | None) -> nn.Parameter:
    """Return the weight as a `ShardedWeight` parameter, which FSDP2 gathers as codes.

    ``gathers`` says what is sent if forward and backward read different codes; otherwise it is None.
    """
    parameter = weight.parameter
    cuts = () if parameter.ndim == 3 else _cuts_of(parameter)  # other ranks have other experts, not parts of these
    local = ShardedWeight(_compat.local_itself(parameter.detach()), weight.name, gathers, cuts)
    return in_place_of(parameter, wrapped_like(local, parameter))


def _wrap_loaded(name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Hook before loading: wrap a plain weight in the state dict as a `ShardedWeight`.

    The weight's key is ``prefix + name``. Without the hook, FSDP2 gathers values after `load_state_dict(assign=True)`.
    """
    key = f"{prefix}{name}"
    loaded = state_dict.get(key)
    if isinstance(loaded, DTensor) and not isinstance(_compat.local_itself(loaded), ShardedWeight):
        own = _compat.local_itself(getattr(module, name))
        state_dict[key] = wrapped_like(own.like(_compat.local_itself(loaded.detach())), loaded)


def _what_is_gathered(reasons: Iterable[str | None], gathers: GatherPolicy | None) -> str:
    """Return the report's text on what FSDP2 gathers of a module's weights.

    ``reasons`` has, for each weight, why it is gathered in ``param_dtype``; None if it is gathered as codes.
    ``gathers`` says what is sent if forward and backward multiply different codes; else it is None.
    """
    data = "quantized data" if gathers is None else gathers.in_words()
    said = {None: data, OWN_CODES: OWN_CODES}
    return "; ".join(dict.fromkeys(said.get(reason, f"param_dtype: {reason}") for reason in reasons))


def _check_arguments(checkpointed: object, one_gather: object) -> None:
    if type(checkpointed) is not bool:
        raise TypeError(f"fsdp_float8_all_gather: `checkpointed` is {checkpointed!r}; it must be True or False.")
    if one_gather not in (BOTH, PLAIN):
        raise ValueError(f"fsdp_float8_all_gather: `one_gather` is {one_gather!r}; it must be {BOTH!r} or {PLAIN!r}.")


def fsdp_float8_all_gather(
    model: Model,
    *,
    checkpointed: bool = False,
    one_gather: str = "codes",
    ignored_params: Collection[nn.Parameter] = (),
) -> Model:
    """Make `fully_shard` all-gather the weights of FP8 layers in FP8, at one byte per element.

    Weights of experts are also all-gathered in FP8, sharded along experts or along another dim
    (``shard_placement_fn``). Each expert has its own scales. FP8 parameters (``weight_lifetime="parameter"``) are
    already quantized. Weights that can't be all-gathered in FP8 are all-gathered in ``param_dtype``;
    ``fp8compile.conversion_report`` shows which and why.

    Some recipes quantize the weight differently for forward and backward: ``recipes.rowwise``, ``rowwise_bf16_wgrad``,
    ``mxfp8``, and ``nvfp4`` with ``weight_block=(1, 16)``. If FSDP2 frees the weight between the passes, each pass
    all-gathers its own FP8 data. If FSDP2 keeps the weight (``reshard_after_forward=False``, a number, or the default
    of the root), or if the backward recomputes the forward (activation checkpointing), a single all-gather serves both
    passes; ``one_gather`` selects what it communicates.

    With delayed scaling (``recipes.delayed``), an all-gather casts with the current multiplier (1 / scale) of the
    layer. The layer itself uses the same multiplier if each backward runs before the next forward.

    Weights are cast to ``mp_policy.param_dtype`` before they are quantized. Scales are computed from the full weight,
    across the ranks of FSDP2 and of tensor parallelism. Quantization and outputs are therefore bit-identical to those
    without this call. After weights change, the amaxes of all changed weights are reduced in one collective.

    Call this after ``fp8compile.convert`` and ``parallelize_module`` and before ``fully_shard``. To compile, replace
    each block with ``torch.compile(block, fullgraph=True)`` and shard the replacement.

    Args:
        model: A converted model that is not yet sharded.
        checkpointed: Whether the backward recomputes forwards (``torch.utils.checkpoint``). If False, a recomputed
            forward raises an error if the buffer holds the weight for the backward.
        one_gather: What to communicate if a single all-gather serves both passes. ``"codes"`` sends the quantized
            weights for both passes, two bytes per element (one byte in four bits). ``"param_dtype"`` sends the weight
            in high precision.
        ignored_params: The parameters that you will pass to ``fully_shard`` as ``ignored_params``, such as experts
            sharded by `ExpertParallel`. These parameters are not replaced.

    Returns:
        The model. Create optimizers afterwards, because the parameters of these layers are new objects.

    Raises:
        TypeError: The model is not a module, or ``checkpointed`` is not a bool.
        ValueError: The model has no FP8 weight for FSDP2 to shard, no weight can be all-gathered in FP8, the model is
            already sharded or wrapped in DistributedDataParallel, ``one_gather`` is neither ``"codes"`` nor
            ``"param_dtype"``, or it is ``"param_dtype"`` and the model has FP8 parameters.
        RuntimeError: PyTorch is version 2.11.
    """
    _check_arguments(checkpointed, one_gather)
    weights = _check_model(model, set(ignored_params))
    check_meshes("fsdp_float8_all_gather", model, set(ignored_params))
    allow_groups()
    users = users_of_parameters(model)
    reasons = {
        weight: _why_plain(weight, users[weight.parameter]) if weight.parameter in users else COMPUTED
        for weight in weights
    }
    chosen = [weight for weight, reason in reasons.items() if reason is None]
    check_not_in_ddp("fsdp_float8_all_gather", [weight.parameter for weight in chosen])
    every = [_compat.local_itself(weight.parameter) for weight in weights]
    quantized = [each for each in every if isinstance(each, QuantizedParameter)]
    for parameter in quantized:
        _ask_quantized(parameter, checkpointed, one_gather)
    if not chosen and not quantized:
        raise ValueError(
            "fsdp_float8_all_gather: no weight of this model can be all-gathered in FP8, because "
            f"{'; '.join(dict.fromkeys(reason for reason in reasons.values() if reason))}. If this is due to the "
            "recipe, use another one, such as recipes.rowwise or tensorwise, or use fp8compile.parallel.graph_fsdp, "
            "which all-gathers each fp8compile.Linear in FP8. Otherwise, omit fsdp_float8_all_gather; fully_shard "
            "then all-gathers the weights in high precision."
        )
    gathers = {
        weight.parameter: GatherPolicy(one_gather, checkpointed, name=weight.name)
        for weight in chosen
        if not weight.module.recipe.shares_weight_codes()
    }
    for module in {weight.module: None for weight in weights}:
        own = [weight for weight in weights if weight.module is module]
        what = _what_is_gathered((reasons[weight] for weight in own), gathers.get(own[0].parameter))
        setattr(module, GATHERED, what)
    _wrap_all(chosen, gathers)
    return model


def _ask_quantized(parameter: QuantizedParameter, checkpointed: bool, one_gather: str) -> None:
    """Store ``checkpointed`` in a quantized parameter, if it has separate codes for grad_input.

    Raise a ValueError for ``one_gather="param_dtype"``, because a quantized parameter has no values to gather.
    """
    if one_gather == PLAIN:
        raise ValueError(
            f"fsdp_float8_all_gather: one_gather is {PLAIN!r}, but FP8 parameters (weight_lifetime of "
            f"fp8compile.convert) can't be gathered in high precision. Use {BOTH!r}."
        )
    if parameter.gathers is not None:
        parameter.gathers.checkpointed = checkpointed


def _wrap_all(chosen: list[_Weight], gathers: dict[nn.Parameter, GatherPolicy]) -> None:
    """Replace the ``chosen`` weights by parameters that FSDP2 gathers as codes.

    ``gathers`` says what is sent of parameters whose forward and backward read different codes.
    """
    number, scales = next(CALLS), WeightScales((weight.module, weight.name) for weight in chosen)
    wrapped: dict[nn.Parameter, nn.Parameter] = {}
    for weight in chosen:
        if weight.parameter not in wrapped:
            wrapped[weight.parameter] = _wrapped(weight, gathers.get(weight.parameter))
            mark_replaced(weight.parameter, "fp8compile.parallel.fsdp_float8_all_gather")
        setattr(weight.module, weight.name, wrapped[weight.parameter])
        weight.module.weight_scales = scales
        setattr(weight.module, MARK, number)
        weight.module.register_load_state_dict_pre_hook(partial(_wrap_loaded, weight.name))
