"""Compute one amax over several weights that share a scale, in each forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile import ops
from fp8compile._compat import autocast_dtype, is_dtensor, local_itself, replicated
from fp8compile.quantizers import CurrentScaling, Quantizer
from fp8compile.tensor import SOURCE_DTYPES, has_codes

__all__ = ["WHOLE_TENSOR", "shared_outer_amax"]

WHOLE_TENSOR = CurrentScaling()  # its amax is one number


def _check_together(weights: Sequence[Tensor]) -> None:
    """Raise a RuntimeError unless all weights are plain tensors, or all are DTensors on the same mesh."""
    meshes = {each.device_mesh if is_dtensor(each) else None for each in weights}
    if len(meshes) > 1:
        raise RuntimeError(
            "Linear: layers share a global scale (share_outer_scale of fp8compile.convert), but their weights are "
            "sharded differently while one of them runs. Put all layers of a group, such as q_proj and k_proj, "
            "into the same fully_shard unit, and pass either all or none of them to parallelize_module."
        )


def _amax(weight: Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> Tensor:
    weight = weight.detach() if dtype is None else weight.detach().to(dtype)
    if is_dtensor(weight):  # the amaxes of blocks would gather a weight whose blocks ranks cut
        return replicated(ops.amax(weight, WHOLE_TENSOR)).view(1)
    amaxes = ops.amax(weight, quantizer)  # compiled code computes it once, here and for the scales of blocks
    return amaxes.view(1) if amaxes.numel() == 1 else ops.outer_amax(amaxes, quantizer)


def shared_outer_amax(weights: Sequence[Tensor], quantizer: Quantizer) -> Tensor | None:
    """Return the amax over several weights, (1,) float32; None if the weights are kept as codes.

    Under autocast, the weights are first cast to autocast's dtype.

    Raises:
        RuntimeError: Some weights are plain and others DTensors, or DTensors are on different meshes.
    """
    if any(has_codes(local_itself(each)) for each in weights):
        return None
    _check_together(weights)
    dtype = autocast_dtype(weights[0]) if weights[0].dtype in SOURCE_DTYPES else None
    found = torch.cat([_amax(each, quantizer, dtype) for each in weights]).amax(0, keepdim=True)
    if not is_dtensor(weights[0]):
        return found
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weights[0].device_mesh
    return DTensor.from_local(found, mesh, [Replicate()] * mesh.ndim, run_check=False)
