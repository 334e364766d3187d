"""A parallel style for experts: each rank has some experts, and rows of tokens travel to their ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from fp8compile.nn.experts.converted_class import ConvertedExperts
from fp8compile.nn.experts.known_modules import holds_no_stacks, layout_of, spec_of
from fp8compile.nn.experts.overflow import counter_of, start_counting
from fp8compile.nn.experts.spread_over_ranks import DispatchOptions, check_mesh, spread_experts
from fp8compile.nn.experts.transformers_experts import ROUTED
from fp8compile.nn.layer.expert_routes import check_capacity

__all__ = ["ExpertParallel", "overflowed_rows"]


class ExpertParallel(ParallelStyle):
    """Expert parallelism: shard experts over the ranks of a mesh, and send tokens to the ranks of their experts.

    Parameters become DTensors with ``Shard(0)``. If every GEMM that reads the rows supports FP8 input, rows are
    dispatched in FP8 with the recipe's input quantizer, and results are combined in their own dtype. In the backward,
    gradients of the results are sent in FP8 with the recipe's grad_output quantizer, and gradients of the rows are
    returned in their own dtype.

    Args:
        capacity: Maximum number of rows that a rank may send to another. None sets no limit; the host then
            synchronizes once per forward to read the numbers of rows. With a capacity, compiled code never
            synchronizes. Rows that do not fit raise an error in eager mode, and are dropped and counted in compiled
            code (see `overflowed_rows`).
        float8_dispatch: Whether rows may be sent in FP8. A GEMM that quantizes the rows differently, such as
            grad_weight of ``rowwise``, then quantizes the received values again, and losses differ slightly from those
            without expert parallelism. If False, losses are the same.
        same_tokens: A 1-D mesh whose ranks have the same tokens, such as the tensor parallel ranks of the preceding
            attention. Experts are sharded over all of these ranks. Each rank sends its share of the tokens, and all
            ranks get all results. None if each rank has its own tokens. If you omit it although ranks have the same
            tokens, each token counts several times in the gradients of experts.

    Raises:
        TypeError: ``same_tokens`` is not a DeviceMesh. When the style is applied: the module is not an experts module
            that ``fp8compile.convert`` converted and that routes tokens itself, or it is already sharded.
        ValueError: ``capacity`` is not a positive int. When the style is applied: a mesh has more than one dim, the
            number of experts is not a multiple of the number of ranks, or ``same_tokens`` has ranks outside of the
            mesh.
    """

    def __init__(
        self, *, capacity: int | None = None, float8_dispatch: bool = True, same_tokens: DeviceMesh | None = None
    ) -> None:
        check_capacity("ExpertParallel", capacity)
        if same_tokens is not None and not isinstance(same_tokens, DeviceMesh):
            raise TypeError(f"ExpertParallel: `same_tokens` must be a DeviceMesh, got a {type(same_tokens).__name__}.")
        super().__init__()
        self.options: DispatchOptions = DispatchOptions(
            capacity=capacity, codes=float8_dispatch, same_tokens=same_tokens
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        _check_same_tokens(self.options.same_tokens, device_mesh)
        spread_experts(module, device_mesh, src_data_rank=self.src_data_rank)
        experts: Any = module
        experts.dispatch_options = self.options
        if self.options.capacity is not None:
            start_counting(module)
        return module


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, ConvertedExperts):
        raise TypeError(
            f"ExpertParallel: expected experts converted by fp8compile.convert, got a {type(module).__name__}. "
            "Convert first, and name the module of experts in the plan."
        )
    if (reason := holds_no_stacks(module)) is not None:
        raise TypeError(
            f"ExpertParallel: got a {type(module).__name__}, which {reason}, so it can't be sharded by expert. "
            "Shard it with fully_shard or fp8compile.parallel.graph_fsdp."
        )
    if spec_of(module) is not ROUTED:
        raise TypeError(
            f"ExpertParallel: got a {type(module).__name__}, which receives its rows already sorted by expert. Send "
            "the rows where they are sorted, with fp8compile.parallel.expert_routes or the library's own expert "
            "parallelism."
        )
    check_mesh("ExpertParallel", layout_of(module).num_experts, mesh)
    if any(isinstance(each, DTensor) for each in module.parameters(recurse=False)):
        raise TypeError(
            "ExpertParallel: the parameters of the experts are already DTensors. Apply ExpertParallel once, "
            "before other styles."
        )


def _check_same_tokens(same: DeviceMesh | None, mesh: DeviceMesh) -> None:
    if same is None:
        return
    if same.ndim != 1:
        raise ValueError(
            f"ExpertParallel: `same_tokens` must have one dim, got {same.ndim}: {same.mesh_dim_names}. Pass the dim "
            "whose ranks have the same tokens, such as mesh['tp']."
        )
    if others := sorted({*same.mesh.tolist()} - {*mesh.mesh.tolist()}):
        raise ValueError(
            f"ExpertParallel: ranks {others} of same_tokens are not among the ranks over which experts are sharded, "
            f"{mesh.mesh.tolist()}. Shard experts over all of them, for example over a flattened mesh, or omit "
            "same_tokens; ranks with the same tokens and experts then compute the same."
        )


def overflowed_rows(model: nn.Module) -> dict[str, int]:
    """Return how many rows this rank has dropped so far, for each experts module with a capacity.

    Args:
        model: A model, compiled or not. The call synchronizes with its device.

    Returns:
        The numbers by module name; 0 means that no rows were dropped.
    """
    counters = {
        name: counter_of(module) for name, module in model.named_modules() if isinstance(module, ConvertedExperts)
    }
    return {name: int(counter) for name, counter in counters.items() if counter is not None}
