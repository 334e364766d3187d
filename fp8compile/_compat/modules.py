"""PyTorch's modules: hooks, and what pipeline stages overwrite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_address", "keep_through_inference", "rebind_load_hooks"]


def rebind_load_hooks(module: torch.nn.Module) -> None:
    """Move the `load_state_dict` hooks of a module to the module that replaces it.

    Those registered with their module hold a weak reference to it, which would die with the one replaced.
    """
    hooks: dict[int, Any] = module._load_state_dict_pre_hooks
    for key, hook in hooks.items():
        if getattr(hook, "with_module", False):
            hooks[key] = type(hook)(hook.hook, module)


def keep_address(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that compiled code may write to, like a buffer, without recording a CUDA graph anew.

    ``torch._dynamo.mark_static_address`` without importing the compiler.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def keep_through_inference(tensors_of: Callable[[torch.nn.Module], list[torch.Tensor]]) -> None:
    """Let `PipelineStage` restore these tensors of its module after it inferred shapes.

    It infers them by a forward and a backward on uninitialised memory. From 2.15 it gives buffers their values back
    itself; where it has no method for the backward, none ran. Called once the module of PyTorch is there.
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
