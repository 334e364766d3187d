"""Styles for `torch.distributed.tensor.parallel.parallelize_module` that send codes.

    style              gathers codes of                         for
    ColwiseParallel    the input, if it is sharded              the output, and again for grad_weight
    RowwiseParallel    grad_output, if the output is sharded    grad_input, and again for grad_weight

PyTorch's styles gather the same tensors in their own dtype. A layer that is not FP8 gets PyTorch's style, so that one
plan serves models in FP8, in part or not at all.
Arguments and defaults are PyTorch's, so a plan can be ported name by name. Without layouts, each rank has all tokens.
A layer quantizes its rank's shard. Compiled code merges equal calls, so linears that read one tensor (q, k, v; gate,
up) share one quantization and one gather (PyTorch 2.15 repeats the gather). Sums over ranks are in the output's dtype,
as in PyTorch's styles.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, parallel

from fp8compile.nn import Linear
from fp8compile.nn.experts.converted_class import ConvertedLinearLike
from fp8compile.nn.layer.tensor_parallel_weights import PLAIN_STYLE, place_codes
from fp8compile.ops import scatter_sum

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def _pytorchs_style(cls: type[Any], style: Any, module: nn.Module) -> Any:
    """Return PyTorch's style ``cls`` with the arguments of ``style`` if the module is not FP8; None if it is FP8."""
    if isinstance(module, ConvertedLinearLike):
        raise TypeError(
            f"{cls.__name__}: got a {type(module).__name__}, a linear layer of another library, for which tensor "
            "parallelism has no style. Replace it by a nn.Linear with the same weight before fp8compile.convert."
        )
    if isinstance(module, Linear):
        return None
    (taken,), (returned,) = style.input_layouts, style.output_layouts
    setattr(module, PLAIN_STYLE, True)
    plain = cls(input_layouts=taken, output_layouts=returned, use_local_output=style.use_local_output)
    plain.src_data_rank = style.src_data_rank
    return plain


class ColwiseParallel(parallel.ColwiseParallel):
    """Shard the weight's out_features over the ranks, and all-gather a sharded input in FP8.

    For embeddings and layers in high precision, PyTorch's style with the same arguments is used.

    Args:
        input_layouts: Placement of an input that is a plain tensor; by default it is replicated. ``Shard(1)`` means
            that the sequence of (batch, sequence, features) is sharded. A DTensor keeps its placement.
        output_layouts: Placement of the output; by default it is sharded along the last dim.
        use_local_output: Whether the output is a plain tensor with this rank's shard instead of a DTensor.

    Raises:
        TypeError: When the style is applied: the module is an FP8 linear of another library's class.
        NotImplementedError: When the style is applied: the module is neither a linear nor an embedding.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.desired_input_layouts: Any = self.input_layouts  # equal layouts: PyTorch's style redistributes nothing

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if (plain := _pytorchs_style(parallel.ColwiseParallel, self, module)) is not None:
            return plain._apply(module, device_mesh)
        place_codes(module, device_mesh, Shard(0), self.src_data_rank)  # PyTorch's style skips placed parameters
        return super()._apply(module, device_mesh)


class RowwiseParallel(parallel.RowwiseParallel):
    """Shard the weight's in_features over the ranks.

    If the output's sequence is sharded, the backward all-gathers grad_output in FP8. For embeddings and layers in high
    precision, PyTorch's style with the same arguments is used.

    Args:
        input_layouts: Placement of an input that is a plain tensor; by default it is sharded along the last dim.
        output_layouts: Placement of the sum over ranks; by default it is replicated. ``Shard(1)`` shards the sequence
            of (batch, sequence, features).
        use_local_output: Whether the output is a plain tensor with this rank's shard instead of a DTensor.

    Raises:
        TypeError: When the style is applied: the module is an FP8 linear of another library's class.
        NotImplementedError: When the style is applied: the module is neither a linear nor an embedding.
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
        if (plain := _pytorchs_style(parallel.RowwiseParallel, self, module)) is not None:
            return plain._apply(module, device_mesh)
        place_codes(module, device_mesh, Shard(1), self.src_data_rank)  # PyTorch's style skips placed parameters
        return super()._apply(module, device_mesh)
