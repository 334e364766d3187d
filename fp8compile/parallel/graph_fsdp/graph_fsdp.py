"""graph_fsdp: shard a model's parameters, with every collective as a node of the model's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8compile import _compat
from fp8compile.nn import Linear
from fp8compile.nn.check_model import Model
from fp8compile.nn.convertible.convertible_layers import is_converted, weight_names
from fp8compile.nn.experts.converted_class import ConvertedExperts
from fp8compile.nn.experts.module_spec import stacks
from fp8compile.nn.layer.cached_weights import CACHES
from fp8compile.nn.parameter_uses.owners import users_of_parameters
from fp8compile.parallel.expert_gradients import check_meshes
from fp8compile.parallel.graph_fsdp.delayed_scaling import amax_reduction
from fp8compile.parallel.graph_fsdp.modules import ForwardScope, ModuleState, become_sharded, is_sharded
from fp8compile.parallel.graph_fsdp.shards import ParameterSharding, TensorParallelLayout, shard_parameter
from fp8compile.parallel.graph_fsdp.weight_amaxes import weight_amax_plan
from fp8compile.quantizers import STEP
from fp8compile.tensor import QuantizedTensor, shown

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # importing it needs DTensor, which imports this

__all__ = ["graph_fsdp"]


def _check_arguments(model: object, mesh: object, mp_policy: object) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(model, nn.Module):
        raise TypeError(f"graph_fsdp: `model` is {shown(model)}; it must be a torch.nn.Module.")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"graph_fsdp: `mesh` must be a DeviceMesh, such as init_device_mesh('cuda', (8,)); got {shown(mesh)}."
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"graph_fsdp: `mesh` has {mesh.ndim} dims; it must have one, over which rows are sharded, or two, of "
            "which the first replicates. Pass the data parallel part of a larger mesh: mesh['dp_replicate', "
            "'dp_shard']."
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"graph_fsdp: `mp_policy` must be a MixedPrecisionPolicy or None, got {shown(mp_policy)}.")


def _check_module(name: str, module: nn.Module) -> None:
    what = f"graph_fsdp: {name or 'the model'} ({type(module).__name__})"
    if is_sharded(module):
        raise ValueError(f"{what} is already sharded. Call graph_fsdp once, on the root model.")
    if isinstance(module, Linear) and module.scale_group:
        raise ValueError(
            f"{what} shares a global scale with other layers (share_outer_scale of fp8compile.convert), which "
            "graph_fsdp does not support. Use fully_shard, with or without fsdp_float8_all_gather."
        )
    if _compat.is_fsdp(module):
        raise ValueError(f"{what} is already sharded by fully_shard. Use only one of the two.")
    if is_converted(module) and module.recipe.weight_lifetime == STEP:
        raise ValueError(
            f"{what} has a recipe with {CACHES}, but graph_fsdp quantizes shards in each forward. Use "
            "weight_lifetime='call', or use fully_shard with fsdp_float8_all_gather, which caches quantized shards."
        )
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        raise ValueError(
            f"{what} has a forward replaced on the instance, by .compile() or another library, which would not "
            "gather parameters. Call graph_fsdp first, then torch.compile."
        )


def _check_parameter(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    what = f"graph_fsdp: {name}"
    local = _compat.local_itself(parameter.data)
    if isinstance(local, QuantizedTensor) or hasattr(local, "fsdp_pre_all_gather"):
        raise TypeError(
            f"{what} is a {type(local).__name__}, but graph_fsdp requires plain tensors. Use fully_shard for a "
            "QuantizedTensor, and fsdp_float8_all_gather only with fully_shard."
        )
    if parameter.ndim == 0:
        raise ValueError(f"{what} has no dims, but graph_fsdp shards dim 0. Give it the shape (1,).")
    if parameter.device.type not in (mesh.device_type, "meta"):
        raise ValueError(
            f"{what} is on {parameter.device}, but the mesh is on {mesh.device_type!r}. Move the model to the device "
            "of the mesh."
        )
    if isinstance(parameter, DTensor):
        if any(placement.is_partial() for placement in parameter.placements):
            raise ValueError(
                f"{what} has placements {parameter.placements}; each must be Shard or Replicate. Call .redistribute() "
                "first."
            )
        names, tp_names = mesh.mesh_dim_names or (), parameter.device_mesh.mesh_dim_names or ()
        if not names or not tp_names or set(names) & set(tp_names):
            raise ValueError(
                f"{what} is a DTensor on {parameter.device_mesh}, and the mesh is {mesh}; they must be different "
                "named dims of one mesh. Get both from init_device_mesh(..., mesh_dim_names=('dp', 'tp'))."
            )


def _check_model(model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    for name, module in model.named_modules():
        _check_module(name, module)
    for name, parameter in model.named_parameters():
        if parameter not in ignored:
            _check_parameter(name, parameter, mesh)


def _stacks_of_whole_experts(module: nn.Module, state: ModuleState) -> frozenset[str]:
    """Return the names of a module's stacked weights of experts that GEMMs gather as codes.

    ``state`` says how parameters are sharded. A stack that tensor parallelism shards within experts is gathered as a
    DTensor instead, and FP8 GEMMs raise for it.
    """

    def is_cut_by_experts(layout: TensorParallelLayout | None) -> bool:
        return layout is None or all(each.is_replicate() or each.is_shard(0) for each in layout.placements)

    sharded = (name for name in stacks(module) if name in state.shardings)
    return frozenset(name for name in sharded if is_cut_by_experts(state.shardings[name].tensor_parallel))


def _reads_children(module: nn.Module) -> bool:
    """Whether a module multiplies by parameters of its children without calling them."""
    return is_converted(module) and any("." in name for name in weight_names(module))


def _gathers_codes(module: nn.Module, users: dict[nn.Parameter, list[nn.Module]]) -> bool:
    """Whether the op of a `Linear` gathers the weight as codes: every module that has the weight is a `Linear`."""
    weight = module._parameters.get("weight") if isinstance(module, Linear) else None
    return weight is not None and all(isinstance(user, Linear) for user in users[weight])


def _tie(model: Any) -> None:
    """Prepare a model so that a parameter that several modules share is gathered once in a forward.

    Weights of FP8 layers are left out, because the layers' ops gather them.
    """
    owners: dict[nn.Parameter, list[tuple[Any, str]]] = {}
    sharded: Iterable[Any] = filter(is_sharded, model.modules())
    for module in sharded:
        for name, parameter in module._parameters.items():
            if parameter is not None and not (module.graph_fsdp.weight_amax_plan is not None and name == "weight"):
                owners.setdefault(parameter, []).append((module, name))
    tied = [every for every in owners.values() if len(every) > 1]
    for place, every in enumerate(tied):
        for module, name in every:
            module.graph_fsdp.tied[name] = place
    model.graph_fsdp.owners = [every[0] for every in tied]


def graph_fsdp(
    model: Model,
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
) -> Model:
    """Shard all parameters of a model over ranks, in place, with collectives as nodes in its graph.

    ``torch.compile(model, fullgraph=True)`` then compiles a single graph. Weights of ``fp8compile.Linear`` and stacked
    (3-D) weights of FP8 experts are all-gathered in FP8, quantized as the forward or backward needs them. Other
    parameters, such as those of Conv1D and of DBRX's experts, are all-gathered in the dtype in which they are used.
    Gradients are reduced in ``reduce_dtype``. Of the gathered tensors, compiled code keeps only vectors (biases and
    norms) for the backward. Results are bit-identical to those with ``fully_shard``.

    Parameters become DTensors with ``Shard(0)``, placed as ``fully_shard`` places them; shards may be uneven or empty.
    While the model's forward runs, its modules see full parameters. Each rank takes its shard from its own values, so
    either give all ranks the same values before this call, or initialize the shards afterwards. Create optimizers
    afterwards.

    Args:
        model: A converted model. Apply tensor parallelism before this call, and compile afterwards.
        mesh: A 1-D mesh over which rows are sharded, or a 2-D mesh whose first dim replicates. With tensor
            parallelism, these are dims of the same named mesh, without the tensor parallel dim.
        mp_policy: Mixed precision policy, as for ``fully_shard``. Only the inputs and outputs of the model are cast,
            not those of its submodules.
        ignored_params: Parameters that are not sharded, such as experts that `ExpertParallel` has sharded over the
            ranks of ``mesh``. The caller reduces their gradients.

    Returns:
        The model.

    Raises:
        TypeError: An argument has a wrong type, or a parameter is a QuantizedTensor or is all-gathered in FP8 by
            FSDP2.
        ValueError: The mesh has an unsupported shape, a parameter is on another device or is 0-D, the model is already
            sharded or compiled, or its layers share a global scale or cache quantized weights.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mp_policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    _check_arguments(model, mesh, mp_policy)
    modules, ignored = dict(model.named_modules()), set(ignored_params)
    check_meshes("graph_fsdp", model, ignored, mesh)
    _check_model(model, mesh, ignored)
    users = users_of_parameters(model)
    by_ops = {module for module in modules.values() if _gathers_codes(module, users)}
    forward = ForwardScope()
    done: dict[nn.Parameter, tuple[Any, ParameterSharding]] = {}
    layers: list[nn.Module] = []
    delayed: list[nn.Module] = []
    for module in modules.values():
        own = {name: each for name, each in module._parameters.items() if each is not None and each not in ignored}
        for name, parameter in own.items():
            if parameter not in done:  # so that tied parameters stay tied
                done[parameter] = shard_parameter(parameter, mesh, mp_policy)
            setattr(module, name, done[parameter][0])
        if not own and module is not model and not _reads_children(module):
            continue
        state = ModuleState(forward, {name: done[parameter][1] for name, parameter in own.items()})
        if isinstance(module, ConvertedExperts):
            state.stacks = _stacks_of_whole_experts(module, state)
        if module in by_ops and "weight" in own:
            shard, sharding = done[own["weight"]]
            layer: Any = module
            state.weight_amax_plan = weight_amax_plan(layer, shard.detach().to_local(), sharding)
            state.amax_reduction = amax_reduction(layer, sharding)
            layers.append(module)
            if state.amax_reduction is not None:
                delayed.append(module)
        if module is model:
            state.cast, state.layers, state.delayed = mp_policy, layers, delayed
        become_sharded(module, state, [name for name, each in module._parameters.items() if each not in ignored])
    _tie(model)
    return model
