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
from fp8compile.nn.convertible_layers import is_converted, weight_names
from fp8compile.nn.experts.known_modules import holds_no_stacks
from fp8compile.nn.parameter_uses.owners import users_of_parameters
from fp8compile.nn.placed_like import wrapped_like
from fp8compile.nn.warn_if_not_sharded import MARK
from fp8compile.parallel.dtensor_placements import part_of
from fp8compile.parallel.expert_gradients import check_meshes
from fp8compile.parallel.fsdp2.sharded_weight import ShardedWeight
from fp8compile.parallel.fsdp2.weight_scales import WeightScales
from fp8compile.quantizers import GEMMS, DelayedScaling
from fp8compile.tensor import BOTH, GATHERED, PLAIN, GatherPolicy, QuantizedParameter, QuantizedTensor, in_place_of

__all__ = ["fsdp_float8_all_gather"]

CALLS = count()  # numbers the calls of fsdp_float8_all_gather
PAIR = GEMMS[:2]  # the products that read a weight

ORDER = (
    "The order is: fp8compile.convert, parallelize_module if any, fsdp_float8_all_gather, torch.compile of each "
    "block, fully_shard of what that returns."
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
    if sharded := [fqn or "the model" for fqn, module in model.named_modules() if _compat.is_fsdp(module)]:
        raise ValueError(f"fsdp_float8_all_gather: {', '.join(sharded)} went through fully_shard already. {ORDER}")
    layers = [module for module in model.modules() if is_converted(module)]
    weights = [_Weight(layer, name) for layer in layers for name in weight_names(layer)]
    if not weights:
        raise ValueError(
            f"fsdp_float8_all_gather: {type(model).__name__} has no fp8compile.Linear and no experts in FP8. Call "
            "fp8compile.convert first."
        )
    if any(isinstance(_compat.local_itself(weight.parameter), ShardedWeight) for weight in weights):
        raise ValueError("fsdp_float8_all_gather: it was called for this model already. Call it once.")
    if not (shared := [weight for weight in weights if weight.parameter not in ignored]):
        raise ValueError(
            f"fsdp_float8_all_gather: all FP8 weights of {type(model).__name__} are in ignored_params, so that "
            "fully_shard gathers none of them. Leave this call out."
        )
    return shared


OWN_CODES = "codes: the parameter itself is made of them"


def _why_no_pair(weight: _Weight) -> str | None:
    if weight.module.recipe.delayed()[1] is not None:
        return "delayed scaling makes codes of one product of the weight, and not of the other"
    if getattr(weight.module, "scale_group", ()):
        return "layers share its outer scale, and forward and backward multiply different codes"
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
            return f"codes of {quantizer!r} depend on where in the tensor a value stands"
        if quantizer.unpacked() is None:
            return f"{quantizer!r} packs codes, and its unpacked() returns no quantizer of one a byte, which ranks cut"
    if not weight.suits_all(users):
        return "another module reads the weight too (tied), in high precision or by another recipe"
    if weight.parameter.ndim == 3 and any(cut.dim > 0 for cut in _cuts_of(weight.parameter)):
        return "tensor parallel ranks have parts of each expert's matrix"
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
    codes = "codes" if gathers is None else gathers.in_words()
    said = {None: codes, OWN_CODES: OWN_CODES}
    return "; ".join(dict.fromkeys(said.get(reason, f"param_dtype: {reason}") for reason in reasons))


def _check_arguments(checkpointed: object, one_gather: object) -> None:
    if type(checkpointed) is not bool:
        raise TypeError(f"fsdp_float8_all_gather: checkpointed is {checkpointed!r}; it is True or False.")
    if one_gather not in (BOTH, PLAIN):
        raise ValueError(f"fsdp_float8_all_gather: one_gather is {one_gather!r}; it is {BOTH!r} or {PLAIN!r}.")


def fsdp_float8_all_gather(
    model: Model,
    *,
    checkpointed: bool = False,
    one_gather: str = "codes",
    ignored_params: Collection[nn.Parameter] = (),
) -> Model:
    """Have `fully_shard` gather the weights of FP8 layers as codes, one byte an element.

    Weights of experts are gathered as codes too, sharded along experts or along another dim (``shard_placement_fn``).
    Each expert has its own scales. Weights that can't be gathered as codes are gathered in ``param_dtype``;
    ``fp8compile.conversion_report`` says which and why.

    Some recipes multiply different codes of the weight in forward and backward: ``recipes.rowwise``,
    ``rowwise_bf16_wgrad``, ``mxfp8``, and ``nvfp4`` with ``weight_block=(1, 16)``. If FSDP2 frees the weight between
    the passes, each pass gathers its own codes. One gather serves both passes if FSDP2 keeps the weight
    (``reshard_after_forward=False``, a number, or the default of the root) or if the backward repeats the forward
    (activation checkpointing); ``one_gather`` chooses what that gather sends.

    With delayed scaling (``recipes.delayed``), a gather casts by the multiplier (1 / scale) that the layer has at that
    time. The layer itself uses the same multiplier, if each backward runs before the next forward.

    Weights are cast to ``mp_policy.param_dtype`` before they are quantized. Scales are computed from the whole weight,
    over the ranks of FSDP2 and of tensor parallelism. Codes, scales and outputs are therefore the same as without this
    call, bit for bit. After weights change, ranks exchange the amaxes of all changed weights in one message.

    Call it after ``fp8compile.convert`` and ``parallelize_module``, before ``fully_shard``. To compile, wrap each
    block in ``torch.compile(block, fullgraph=True)`` and shard the module that ``torch.compile`` returns.

    Args:
        model: A converted model that is not sharded yet.
        checkpointed: Whether the backward repeats forwards (``torch.utils.checkpoint``). If it is False, a repeated
            forward raises if memory holds the codes of the backward.
        one_gather: What is gathered if one gather serves both passes: ``"codes"`` gathers the codes of both passes,
            two bytes an element (one byte for codes of four bits); ``"param_dtype"`` gathers values.
        ignored_params: The parameters that ``fully_shard`` will be given as ``ignored_params``, such as experts that
            `ExpertParallel` has spread over ranks. These parameters are not replaced.

    Returns:
        The model. Make optimizers afterwards, because parameters of these layers are new objects.

    Raises:
        TypeError: The model is not a module, or ``checkpointed`` is not a bool.
        ValueError: FSDP2 shards no FP8 weight of the model, no weight can be gathered as codes, the model is sharded
            already, or ``one_gather`` is neither ``"codes"`` nor ``"param_dtype"``.
        RuntimeError: PyTorch 2.11.
    """
    _check_arguments(checkpointed, one_gather)
    weights = _check_model(model, set(ignored_params))
    check_meshes("fsdp_float8_all_gather", model, set(ignored_params))
    _compat.allow_group_in_subclass()
    users = users_of_parameters(model)
    reasons = {weight: _why_plain(weight, users[weight.parameter]) for weight in weights}
    chosen = [weight for weight, reason in reasons.items() if reason is None]
    every = [_compat.local_itself(weight.parameter) for weight in weights]
    pairs = [each for each in every if isinstance(each, QuantizedParameter) and each.gathers is not None]
    for parameter in pairs:
        _ask_pair(parameter, checkpointed, one_gather)
    if not chosen and not pairs:
        raise ValueError(
            "fsdp_float8_all_gather: no weight of this model can be gathered as codes, for "
            f"{'; '.join(dict.fromkeys(reason for reason in reasons.values() if reason))}. Where it is the recipe, "
            "take another, such as recipes.rowwise or tensorwise, or fp8compile.parallel.graph_fsdp, which gathers "
            "codes of each fp8compile.Linear; else leave fsdp_float8_all_gather out: fully_shard gathers the weights."
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


def _ask_pair(parameter: QuantizedParameter, checkpointed: bool, one_gather: str) -> None:
    """Store ``checkpointed`` in a quantized parameter that has separate codes for grad_input.

    Raise a ValueError for ``one_gather="param_dtype"``, because a quantized parameter has no values to gather.
    """
    if one_gather == PLAIN:
        raise ValueError(
            f"fsdp_float8_all_gather: one_gather is {PLAIN!r}, and parameters that are codes (quantized_parameters of "
            f"fp8compile.convert) have no values to gather. Take {BOTH!r}."
        )
    parameter.gathers.checkpointed = checkpointed  # type: ignore[union-attr]  # there are two sets of its codes


def _wrap_all(chosen: list[_Weight], gathers: dict[nn.Parameter, GatherPolicy]) -> None:
    """Replace the ``chosen`` weights by parameters that FSDP2 gathers as codes.

    ``gathers`` says what is sent of parameters whose forward and backward read different codes.
    """
    number, scales = next(CALLS), WeightScales((weight.module, weight.name) for weight in chosen)
    wrapped: dict[nn.Parameter, nn.Parameter] = {}
    for weight in chosen:
        if weight.parameter not in wrapped:
            wrapped[weight.parameter] = _wrapped(weight, gathers.get(weight.parameter))
        setattr(weight.module, weight.name, wrapped[weight.parameter])
        weight.module.weight_scales = scales
        setattr(weight.module, MARK, number)
        weight.module.register_load_state_dict_pre_hook(partial(_wrap_loaded, weight.name))
