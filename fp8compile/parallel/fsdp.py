"""Weights that stock FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers as codes, one byte an element.

    once a step      each rank: amaxes of its shards --one message: maximum--> scales of all weights
    before a layer   shard -> param_dtype -> codes --all-gather of bytes--> QuantizedTensor, which the layer multiplies

The codes are those that the layer would have made of the gathered weight itself, bit for bit.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from fp8compile import _compat
from fp8compile.nn import Linear
from fp8compile.nn.experts import ConvertedExperts
from fp8compile.nn.linear import GATHERED
from fp8compile.nn.local import wrapped_like
from fp8compile.ops.layer.shards import DimSharding
from fp8compile.parallel.placed import part_of
from fp8compile.parallel.sharded_weight import ShardedWeight
from fp8compile.parallel.weight_scales import WeightScales
from fp8compile.tensor import QuantizedTensor, in_place_of

__all__ = ["fsdp_float8_all_gather"]

ORDER = (
    "The order is: fp8compile.convert, parallelize_module if any, fsdp_float8_all_gather, torch.compile of each "
    "block, fully_shard of what that returns."
)


def _check_model(model: object) -> list[Linear]:
    """The FP8 layers of a model that is not sharded yet."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fsdp_float8_all_gather: model is a {type(model).__name__}; it is a torch.nn.Module.")
    if sharded := [fqn or "the model" for fqn, module in model.named_modules() if _compat.is_fsdp(module)]:
        raise ValueError(f"fsdp_float8_all_gather: {', '.join(sharded)} went through fully_shard already. {ORDER}")
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    if not layers:
        has_experts = any(isinstance(module, ConvertedExperts) for module in model.modules())
        experts = " Its experts are in FP8, and their weights are gathered in param_dtype." if has_experts else ""
        raise ValueError(
            f"fsdp_float8_all_gather: {type(model).__name__} has no fp8compile.Linear. Call fp8compile.convert first."
            f"{experts}"
        )
    if any(isinstance(_compat.local_itself(layer.weight), ShardedWeight) for layer in layers):
        raise ValueError("fsdp_float8_all_gather: it was called for this model already. Call it once.")
    return layers


def _why_plain(layer: Linear, users: list[nn.Module]) -> str | None:
    """Why a layer's weight is gathered in its own dtype, or None."""
    if isinstance(_compat.local_itself(layer.weight), QuantizedTensor):
        return "the parameter is quantized, and travels as codes without this"
    if not layer.recipe.shares_weight_codes():
        return "forward and backward multiply different codes of the weight"
    if not layer.recipe.weight.is_local():
        return f"codes of {layer.recipe.weight!r} depend on where in the tensor a value stands"
    if any(not isinstance(user, Linear) or user.recipe != layer.recipe for user in users):
        return "another module reads the weight too (tied), in high precision or by another recipe"
    return None


def _cuts_of(weight: nn.Parameter) -> tuple[DimSharding, ...]:
    """How tensor parallelism cut a weight."""
    if not isinstance(weight, DTensor):
        return ()
    return tuple(cut.by_name() for cut in part_of("fsdp_float8_all_gather", weight).cuts if cut is not None)


def _wrapped(weight: nn.Parameter) -> nn.Parameter:
    """The parameter with a local tensor that FSDP2 asks how to gather it."""
    local = ShardedWeight(_compat.local_itself(weight.detach()), _cuts_of(weight))
    return in_place_of(weight, wrapped_like(local, weight))


def _wrap_loaded(module: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Keep a weight what it is when `load_state_dict(assign=True)` puts a plain one in its place."""
    loaded = state_dict.get(f"{prefix}weight")
    if isinstance(loaded, DTensor) and not isinstance(_compat.local_itself(loaded), ShardedWeight):
        own = _compat.local_itself(module.weight)
        local = ShardedWeight(_compat.local_itself(loaded.detach()), own.cuts)
        state_dict[f"{prefix}weight"] = wrapped_like(local, loaded)


def fsdp_float8_all_gather(model: nn.Module) -> nn.Module:
    """Have `fully_shard` gather the weights of FP8 layers as codes, one byte an element, instead of ``param_dtype``.

    For weights of which forward and backward multiply the same codes (``recipes.tensorwise``, ``blockwise``). Others
    are gathered as ever, in ``param_dtype``; which and why is in ``fp8compile.conversion_report``. To gather them as
    codes, too: ``fp8compile.parallel.graph_fsdp``.

    Weights are cast to ``mp_policy.param_dtype`` before they are quantized, and a scale is that of the whole weight,
    over the ranks of FSDP2 and of tensor parallelism: codes, scales and so outputs are those without this call, bit
    for bit. Scales are computed anew after a weight changed, of all of them in one message.

    Call it after ``fp8compile.convert`` and ``parallelize_module``, before ``fully_shard``. To compile, wrap each
    block in ``torch.compile(block, fullgraph=True)`` and shard what that returns.

    Args:
        model: Converted, not sharded yet.

    Returns:
        The model. Optimizers are made afterwards: parameters of these layers are new objects.

    Raises:
        TypeError: The model is no module.
        ValueError: There is no FP8 layer, none whose weight can be gathered as codes, or the model is sharded already.
        RuntimeError: PyTorch 2.11.
    """
    layers = _check_model(model)
    _compat.allow_group_in_subclass()
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in dict.fromkeys(module.parameters(recurse=False)):
            users.setdefault(parameter, []).append(module)
    reasons = {layer: _why_plain(layer, users[layer.weight]) for layer in layers}
    chosen = [layer for layer, reason in reasons.items() if reason is None]
    if not chosen:
        raise ValueError(
            "fsdp_float8_all_gather: no weight of this model can be gathered as codes, for "
            f"{'; '.join(dict.fromkeys(reason for reason in reasons.values() if reason))}. Take recipes.tensorwise "
            "or recipes.blockwise, or fp8compile.parallel.graph_fsdp, which gathers what each pass needs."
        )
    scales = WeightScales(chosen)
    wrapped: dict[nn.Parameter, nn.Parameter] = {}
    for layer, reason in reasons.items():
        setattr(layer, GATHERED, "codes" if reason is None else f"param_dtype: {reason}")
        if reason is None:
            layer.weight = wrapped.setdefault(layer.weight, _wrapped(layer.weight))
            layer.weight_scales = scales
            layer.register_load_state_dict_pre_hook(_wrap_loaded)
    for module in model.modules():
        if isinstance(module, ConvertedExperts):
            setattr(module, GATHERED, "param_dtype: codes of experts are made after their weights are gathered")
    return model
