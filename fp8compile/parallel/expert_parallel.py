"""A parallel style for experts: each rank has some experts, and rows of tokens travel to their ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from fp8compile.nn.expert_routes import check_capacity
from fp8compile.nn.experts.converted_class import ConvertedExperts
from fp8compile.nn.experts.known_modules import holds_no_stacks, host_of, layout_of
from fp8compile.nn.experts.overflow import counter_of, start_counting
from fp8compile.nn.experts.spread_over_ranks import DispatchOptions, check_mesh, spread_experts
from fp8compile.nn.experts.transformers_experts import ROUTED

__all__ = ["ExpertParallel", "overflowed_rows"]


class ExpertParallel(ParallelStyle):
    """Spread experts over the ranks of a mesh; rows of tokens are sent to the ranks of their experts.

    Parameters become DTensors with ``Shard(0)``. If every GEMM that reads the rows takes codes, rows travel as codes
    and scales of the recipe's input quantizer, and results come back in their own dtype. In the backward, gradients of
    the results travel as codes of the recipe's grad_output, and gradients of the rows come back in their own dtype.

    Args:
        capacity: Number of rows that a rank may send to another. None sets no limit; the host then waits for the
            numbers of rows once in a forward. With a capacity, it never waits in compiled code. Rows that do not fit
            raise in eager mode, and are dropped and counted in compiled code (see `overflowed_rows`).
        float8_dispatch: Whether rows may travel as codes. A GEMM that needs other codes of the rows, as grad_weight of
            ``rowwise`` does, then quantizes the received values, and losses differ in the last digits from losses
            without expert parallelism. If False, losses are the same.
        same_tokens: A mesh with one dim whose ranks have the same tokens, such as the tensor parallel ranks of the
            attention before; experts are spread over all of these ranks. Each rank sends its share of the tokens, and
            all ranks get all results. None if each rank has its own tokens. If ranks with the same tokens are not
            named here, each token counts several times in the gradients of experts.

    Raises:
        TypeError: ``same_tokens`` is not a DeviceMesh. When the style is applied: the module is no module of experts
            that ``fp8compile.convert`` converted and that routes tokens itself, or was spread over ranks before.
        ValueError: ``capacity`` is not a positive int. When the style is applied: a mesh has more than one dim, the
            number of experts is not a multiple of the number of ranks, or ``same_tokens`` has ranks that are not on
            the mesh.
    """

    def __init__(
        self, *, capacity: int | None = None, float8_dispatch: bool = True, same_tokens: DeviceMesh | None = None
    ) -> None:
        check_capacity("ExpertParallel", capacity)
        if same_tokens is not None and not isinstance(same_tokens, DeviceMesh):
            raise TypeError(f"ExpertParallel: same_tokens is a {type(same_tokens).__name__}; it is a DeviceMesh.")
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
            f"ExpertParallel: given a {type(module).__name__}; it is for experts that fp8compile.convert has "
            "converted. Convert first, and name the module of experts in the plan."
        )
    if (reason := holds_no_stacks(module)) is not None:
        raise TypeError(
            f"ExpertParallel: given a {type(module).__name__}, which {reason}; they alone are spread over ranks. "
            "Shard it by fully_shard or fp8compile.parallel.graph_fsdp."
        )
    if host_of(module) is not ROUTED:
        raise TypeError(
            f"ExpertParallel: given a {type(module).__name__}, which is handed its rows sorted by expert. Send them "
            "where they are sorted, by fp8compile.parallel.expert_routes or the library's own expert parallel."
        )
    check_mesh("ExpertParallel", layout_of(module).num_experts, mesh)
    if any(isinstance(each, DTensor) for each in module.parameters(recurse=False)):
        raise TypeError(
            "ExpertParallel: parameters of the experts are DTensors already; apply it once, before others."
        )


def _check_same_tokens(same: DeviceMesh | None, mesh: DeviceMesh) -> None:
    if same is None:
        return
    if same.ndim != 1:
        raise ValueError(
            f"ExpertParallel: same_tokens has {same.ndim} dims, {same.mesh_dim_names}; take the one whose ranks have "
            "the same tokens, mesh['tp'] for one."
        )
    if others := sorted({*same.mesh.tolist()} - {*mesh.mesh.tolist()}):
        raise ValueError(
            f"ExpertParallel: ranks {others} of same_tokens are not among those over which experts are cut, "
            f"{mesh.mesh.tolist()}. Cut experts over all of them, by a flattened mesh for one, or leave same_tokens "
            "out: then ranks with the same tokens and the same experts compute the same."
        )


def overflowed_rows(model: nn.Module) -> dict[str, int]:
    """Return how many rows this rank has dropped so far, for each module of experts with a capacity.

    Args:
        model: A model, compiled or not. Reading the numbers waits for its device.

    Returns:
        The numbers by the name of the module; 0 means that all rows fit in their messages.
    """
    counters = {
        name: counter_of(module) for name, module in model.named_modules() if isinstance(module, ConvertedExperts)
    }
    return {name: int(counter) for name, counter in counters.items() if counter is not None}
