"""Private interfaces of modules: load_state_dict hooks, static addresses, and pipeline stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_address", "keep_through_inference", "rebind_load_hooks"]


def rebind_load_hooks(module: torch.nn.Module) -> None:
    """Rebind `load_state_dict` pre-hooks to ``module``, after they were copied from another module.

    A hook registered with ``with_module=True`` holds a weak reference to the old module.
    """
    hooks: dict[int, Any] = module._load_state_dict_pre_hooks
    for key, hook in hooks.items():
        if getattr(hook, "with_module", False):
            hooks[key] = type(hook)(hook.hook, module)


def keep_address(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor's address as static, so that CUDA graphs may write to the tensor without recapture.

    This is ``torch._dynamo.mark_static_address`` without the import of the compiler.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def keep_through_inference(tensors_of: Callable[[torch.nn.Module], list[torch.Tensor]]) -> None:
    """Make `PipelineStage` restore the tensors ``tensors_of(module)`` after it has inferred shapes.

    The stage infers shapes by a forward and a backward on uninitialized memory, which would change amax histories.
    Nothing is patched if PyTorch restores buffers itself (2.15) or runs only the forward. Call this function after the
    import of `torch.distributed.pipelining.stage`.
    """
    from torch.distributed.pipelining.stage import PipelineStage

    if hasattr(PipelineStage, "_pre_metadata_inference_backup") or not hasattr(
        PipelineStage, "_backward_metadata_inference"
    ):
        return
    infer, clean_up = PipelineStage._forward_metadata_inference, PipelineStage._post_metadata_inference_cleanup

    @functools.wraps(infer)
    def infer_shapes(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._kept = [(tensor, tensor.clone()) for tensor in tensors_of(self.submod)]
        return infer(self, *args, **kwargs)

    @functools.wraps(clean_up)
    def give_back(self: Any) -> None:
        with torch.no_grad():
            for tensor, before in vars(self).pop("_kept", ()):
                tensor.copy_(before)
        clean_up(self)

    PipelineStage._forward_metadata_inference = infer_shapes
    PipelineStage._post_metadata_inference_cleanup = give_back
