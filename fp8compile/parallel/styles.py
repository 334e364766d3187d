"""Plans for `torch.distributed.tensor.parallel.parallelize_module` that send codes instead of bfloat16.

    style              stock: what is gathered, in the tensor's dtype        here, as codes
    ColwiseParallel    the input, where it is cut, in the forward            in the forward, and for grad_weight
    RowwiseParallel    grad_output, where the output is sequence parallel    for grad_input and for grad_weight

Arguments and their defaults are PyTorch's, so a plan may be ported name by name: without layouts, tokens are whole.
A layer quantizes the part that its rank has. Linears that read one tensor (q, k, v; gate, up) share one quantization
and one gather in compiled code, where PyTorch makes equal calls once (2.15 repeats messages). Everything else is the
stock style's: sums over ranks are in the output's dtype.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, parallel

from fp8compile.nn import Linear
from fp8compile.nn.experts import ConvertedLinearLike
from fp8compile.nn.placed_weights import place_codes
from fp8compile.ops import scatter_sum

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def _check_linear(style: str, module: nn.Module) -> None:
    if isinstance(module, ConvertedLinearLike):
        raise TypeError(
            f"{style}: given a {type(module).__name__}, a linear of a class of its own, which tensor parallelism has "
            "no style for. Put a nn.Linear with the same weight in its place before fp8compile.convert."
        )
    if not isinstance(module, Linear):
        raise TypeError(
            f"{style}: given a {type(module).__name__}; it is for fp8compile.Linear, which fp8compile.convert makes. "
            f"Convert first, or take torch.distributed.tensor.parallel.{style} for this module."
        )


class ColwiseParallel(parallel.ColwiseParallel):
    """out_features cut over the ranks; codes of the input are gathered, in whatever dim it is cut.

    Args:
        input_layouts: Where a plain tensor that comes in is, whole on every rank by default; ``Shard(1)`` where the
            sequence of (batch, sequence, features) is cut. A DTensor says so itself.
        output_layouts: Where the output goes; along the last dim by default.
        use_local_output: Whether the output is a plain tensor, this rank's part, or a DTensor.

    Raises:
        TypeError: When applied: the module is no ``fp8compile.Linear``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.desired_input_layouts: Any = self.input_layouts  # as they are: the stock style redistributes nothing

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_linear("ColwiseParallel", module)
        place_codes(module, device_mesh, Shard(0), self.src_data_rank)  # the stock style leaves alone what is placed
        return super()._apply(module, device_mesh)


class RowwiseParallel(parallel.RowwiseParallel):
    """in_features cut over the ranks; of a sequence-parallel output, codes of the gradient are gathered.

    Args:
        input_layouts: Where a plain tensor that comes in is; along the last dim by default.
        output_layouts: Where the sum over the ranks goes, whole to every rank by default; ``Shard(1)`` cuts the
            sequence of (batch, sequence, features).
        use_local_output: Whether the output is a plain tensor, this rank's part, or a DTensor.

    Raises:
        TypeError: When applied: the module is no ``fp8compile.Linear``.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: Linear,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> Tensor:
        if isinstance(output_layouts[0], Shard) and outputs.placements[0].is_partial():
            outputs = scatter_sum(outputs, output_layouts[0].dim, mod.recipe)
        return parallel.RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_linear("RowwiseParallel", module)
        place_codes(module, device_mesh, Shard(1), self.src_data_rank)  # the stock style leaves alone what is placed
        return super()._apply(module, device_mesh)
