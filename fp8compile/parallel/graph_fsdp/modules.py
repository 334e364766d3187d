"""The class of a module with parameters that graph_fsdp shards, and that are whole while the model's forward runs.

Each parameter becomes a property that gathers. Initialization, optimizers and state dicts find the shards. The op of
an FP8 layer gathers the weight itself, as codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp8compile import _compat
from fp8compile.nn.layer.forward_dtype import note_forward_dtype
from fp8compile.nn.layer.ungathered_experts import UngatheredStack
from fp8compile.ops import delayed_linear, linear
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import OverFsdp
from fp8compile.parallel.graph_fsdp.delayed_scaling import AmaxCarrier, AmaxReduction, attach, consume
from fp8compile.parallel.graph_fsdp.shards import ParameterSharding, gather, used_dtype
from fp8compile.parallel.graph_fsdp.weight_amaxes import WeightAmaxPlan, exchange
from fp8compile.quantizers import Recipe
from fp8compile.tensor import SOURCE_DTYPES

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # importing it needs DTensor, which imports this
    from torch.distributed.tensor import DTensor

__all__ = ["ForwardScope", "ModuleState", "become_sharded", "is_sharded"]


@dataclass
class ForwardScope:
    """State of the model's forward, shared by all of its modules: whether it runs, and parameters gathered once."""

    runs: bool = False  # whether a forward is running
    # The gathered parameters that several modules share. Each is gathered once, so its gradients are added up before
    # they are reduced over ranks.
    tied: list[Tensor] = field(default_factory=list)


@dataclass
class ModuleState:
    """The state that graph_fsdp keeps for one module, such as its parameters' sharding and its weight's amaxes."""

    forward: ForwardScope  # state of the model's forward
    shardings: dict[str, ParameterSharding]  # sharding of each parameter, by name
    # policy by which the root casts inputs and outputs; None in other modules
    cast: MixedPrecisionPolicy | None = None
    # index in `ForwardScope.tied` of each parameter that another module gathers too
    tied: dict[str, int] = field(default_factory=dict)
    stacks: frozenset[str] = frozenset()  # names of the experts' weights that their products gather
    layers: list[Any] = field(default_factory=list)  # the FP8 layers of the model; filled in the root
    delayed: list[Any] = field(default_factory=list)  # FP8 layers with delayed scaling; filled in the root
    # for each entry of `ForwardScope.tied` one module that has the parameter, and its name there; filled in the root
    owners: list[tuple[Any, str]] = field(default_factory=list)
    # which amaxes of this layer's weight the ranks exchange; None if ops don't gather the weight
    weight_amax_plan: WeightAmaxPlan | None = None
    # amaxes of the whole weight by the recipe's field, while the model's forward runs
    amaxes: dict[str, Tensor] = field(default_factory=dict)
    amax_reduction: AmaxReduction | None = None  # the ranks that reduce this layer's amaxes, if it has delayed scaling
    # brings this layer's amaxes out of its backward, if it has delayed scaling; None once it is consumed
    carrier: AmaxCarrier | None = None
    key: int = field(default_factory=count().__next__)  # a number that no other module has


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast all floating-point tensors in a nest of values to ``dtype``; None casts nothing."""
    if dtype is None:
        return values
    return pytree.tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values)


def _check_elements(inputs: Any) -> None:
    """Raise a ValueError if a model is compiled for training with inputs of which none has an element.

    The partitioner chooses by sizes what the backward computes again, and so which parameters it gathers again. Other
    ranks would wait for gathers that this rank leaves out.
    """
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return
    sizes = [value.numel() for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
    if sizes and all(_compat.guard_or_false(size == 0) for size in sizes):
        raise ValueError(
            "graph_fsdp: no input of the compiled model has an element on this rank. Its backward would run "
            "different collectives than those of ranks with tokens, which would wait forever. Pad the batch to the "
            "shape on the other ranks, and mask the loss of the padding."
        )


class _ShardedModule(nn.Module):
    graph_fsdp: ModuleState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.graph_fsdp
        if state.cast is not None and state.cast.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), state.cast.param_dtype)
        starts = not state.forward.runs
        if starts:  # a nested or repeated forward writes nothing: PyTorch 2.11 traces no write in checkpointed code
            _check_elements((args, kwargs))
            state.forward.runs = True
        layers = self._without_amaxes()
        try:
            if state.owners:
                own: list[Any] = [
                    (module._parameters[name], module.graph_fsdp.shardings[name]) for module, name in state.owners
                ]
                state.forward.tied = [gather(*each) for each in own]
            if layers:
                exchange(layers)
            if state.delayed:
                attach(state.delayed, self, (args, kwargs))
            output = self._forward(*args, **kwargs)
        finally:
            if starts:
                state.forward.runs = False
            if state.owners:
                state.forward.tied = []
            for layer in layers:
                layer.graph_fsdp.amaxes.clear()
            for layer in state.delayed:
                layer.graph_fsdp.carrier = None
        return output if state.cast is None else _cast(output, state.cast.output_dtype)

    def _without_amaxes(self) -> list[Any]:
        return self.graph_fsdp.layers

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    def _parameter(self, name: str) -> Tensor | UngatheredStack | None:
        parameter: Any = self._parameters[name]
        state = self.graph_fsdp
        if parameter is None or not state.forward.runs:
            return parameter
        if name in state.tied and state.forward.tied:
            return state.forward.tied[state.tied[name]]
        if name in state.stacks:
            return _ungathered(parameter, state.shardings[name])
        return gather(parameter, state.shardings[name])


def _check_one_cast(name: str, weight: Tensor, sharding: ParameterSharding, used: torch.dtype) -> None:
    """Raise a TypeError if autocast and ``mp_policy`` would cast a weight to different dtypes.

    ``name`` names the layer in the error, and ``used`` is the dtype in which the weight is used under autocast.
    """
    if used != sharding.dtype and sharding.dtype != weight.dtype:
        raise TypeError(
            f"{name}: autocast casts to {used}, but param_dtype of mp_policy is {sharding.dtype}. Use the same dtype "
            "for both, or omit either autocast or param_dtype."
        )


def _ungathered(weight: DTensor, sharding: ParameterSharding) -> UngatheredStack:
    """Wrap a shard of experts' stacked weights in an object with the shape of the whole stack.

    The grouped GEMMs gather the codes.
    """
    local = weight.to_local()
    used = used_dtype(sharding, local)
    _check_one_cast("experts", weight, sharding, used)
    spread = None
    if sharding.tensor_parallel is not None:
        layout = sharding.tensor_parallel
        spread = layout.mesh, layout.placements, sharding.experts
    return UngatheredStack(local, sharding.rows, used, weight.shape[0], spread)


def _checked(layer: Any, x: Tensor, bias: Tensor | None, sharding: ParameterSharding) -> tuple[Tensor, Tensor | None]:
    """Check a linear layer's input; return ``x`` and bias, cast to autocast's dtype if autocast is on.

    ``sharding`` says how the layer's weight is sharded.
    """
    if not isinstance(x, Tensor) or x.dtype not in SOURCE_DTYPES:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"Linear: `x` is {given}; it must be a tensor of bfloat16, float16 or float32. Cast it.")
    if x.ndim == 0 or x.shape[-1] != layer.in_features:
        raise ValueError(f"Linear: the last dim of x must be in_features, {layer.in_features}; got {tuple(x.shape)}.")
    if _compat.is_dtensor(x) != (sharding.tensor_parallel is not None):
        one, other = ("x", "the weight") if sharding.tensor_parallel is None else ("the weight", "x")
        raise TypeError(
            f"Linear: {one} is sharded over tensor parallel ranks, but {other} is not. Call parallelize_module for "
            "the full layer or not at all."
        )
    used = used_dtype(sharding, x)
    _check_one_cast("Linear", layer._parameters["weight"], sharding, used)
    if used != sharding.dtype:
        bias = None if bias is None else bias.to(used)
    if _compat.autocast_dtype(x) is not None:
        x = x.to(used)
    if x.dtype != used:
        raise TypeError(
            f"Linear: `x` is {x.dtype}, but the weight is used in {used}. Cast x, pass "
            "mp_policy=MixedPrecisionPolicy(param_dtype=...), or run under torch.autocast."
        )
    return x, bias


class _ShardedLinear(_ShardedModule):
    recipe: Recipe  # this and `multiplier` are attributes of the layer's own class
    multiplier: Tensor

    def _without_amaxes(self) -> list[Any]:
        # if checkpointing repeats a layer's forward alone, it has to save the same tensors as the first time
        state: Any = self.graph_fsdp
        return [self] if state.weight_amax_plan.exchanged_roles() and not state.amaxes else []

    def _forward(self, input: Tensor) -> Tensor:
        sharding = self.graph_fsdp.shardings["weight"]
        given: Any = self._parameter("bias")  # a bias is no stack of experts
        x, bias = _checked(self, input, given, sharding)
        state: Any = self.graph_fsdp
        amax = state.amaxes.get("weight")
        for_grad_input = amax if state.weight_amax_plan.same else state.amaxes.get("weight_for_grad_input")
        known = [*Known(amax=amax), *Known(amax=for_grad_input)]
        weight: Any = self._parameters["weight"]
        operands, where = (x, weight.to_local(), bias), OverFsdp(sharding.rows)
        layer: Any = self
        note_forward_dtype(self, "weight")
        observer, used = None if self._observers is None else layer.observer("weight"), None
        if state.amax_reduction is None:
            y = linear(*operands, None, known, [], where, self.recipe)
        else:
            multiplier = _compat.replicated(self.multiplier)
            carriers = consume(self, x)
            own = *carriers, None, multiplier, None
            y, used, *_ = delayed_linear(*operands, *own, None, known, [], where, self.recipe)
        if observer is None:
            return y
        # the op that observes takes one amax: if products have two, or the recipe is another, it exchanges its own
        is_known = state.weight_amax_plan.same and observer.recipe is None
        known = [*Known(amax=amax if is_known else None, multiplier=used)]
        return observer.observe(y, x, weight.to_local(), None, known, [], where, self.recipe)


@cache
def _class_of(cls: type[nn.Module], names: tuple[str, ...], *, gathers_codes: bool) -> type[nn.Module]:
    """Return a subclass of ``cls`` in which the parameters ``names`` are properties that gather.

    If ``gathers_codes``, ``cls`` is a linear layer, and its op gathers the weight as codes instead.
    """
    base = _ShardedLinear if gathers_codes else _ShardedModule
    members = {
        name: property(lambda self, name=name: self._parameter(name))  # type: ignore[misc]  # the default
        for name in names
    }
    return type(f"GraphFSDP{cls.__name__}", (base, cls), {**members, "__module__": cls.__module__})


def is_sharded(module: nn.Module) -> bool:
    """Whether `become_sharded` has changed the class of ``module``."""
    return isinstance(module, _ShardedModule)


def become_sharded(module: nn.Module, state: ModuleState, names: Sequence[str]) -> None:
    """Change the class of a module, so that reading the parameters ``names`` in a forward gathers them.

    ``state`` becomes the module's attribute ``graph_fsdp``.
    """
    sharded: Any = module
    sharded.graph_fsdp = state
    gathers_codes = state.weight_amax_plan is not None
    cls = _class_of(type(module), tuple(names), gathers_codes=gathers_codes)  # type: ignore[arg-type]  # it is hashable
    sharded.__class__ = cls
