"""torchtitan's models in FP8: a registry of configs, one function a training, for torchtitan's own command.

torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan.configs --config llama3_8b_float8
"""

from __future__ import annotations

from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

import fp8compile as f8
from fp8compile.integrations import torchtitan as f8titan

__all__ = ["llama3_8b_float8", "llama3_debug_float8", "qwen3_moe_debug_float8"]


def llama3_debug_float8() -> Trainer.Config:
    """The smallest Llama, all linears in FP8."""
    return f8titan.convert(llama3_debugmodel(), f8.recipes.rowwise())


def llama3_8b_float8() -> Trainer.Config:
    """Llama 3 8B, blocks in FP8 but for the first and the last; FSDP2 gathers codes."""
    config = llama3_8b()
    config.parallelism.spmd_backend = "partial_dtensor"  # the one under which weights can be gathered as codes
    return f8titan.convert(
        config, f8.recipes.tensorwise(), filter="layers.*", keep_ends=1, fsdp_float8_all_gather=True
    )


def qwen3_moe_debug_float8() -> Trainer.Config:
    """A small mixture of experts: linears and experts in FP8, routers not."""
    return f8titan.convert(qwen3_moe_debug(), f8.recipes.rowwise())
