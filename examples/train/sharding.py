"""FSDP in two ways: stock FSDP2, block by block, or FSDP with all messages in one graph.

    --fsdp         fsdp_float8_all_gather --> torch.compile of each block --> fully_shard of each, and of the rest
    --graph-fsdp   graph_fsdp --> torch.compile of the whole model

Stock FSDP2 gathers weights of FP8 layers in FP8, one byte per element, if that gives the same numbers, and in
bfloat16 otherwise. The table of the run says which, and why. Losses have the same bits either way.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8compile as f8
from examples.train.config import TrainConfig
from examples.train.model import ByteLlama

# Inputs stay as they are: x is bfloat16 by autocast, and the angles of the rotary positions need float32.
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _gather_codes(model: ByteLlama, ignored: Collection[nn.Parameter]) -> str:
    """Have FSDP2 all-gather FP8 data if possible; return what is gathered, with the reason if it is not FP8."""
    f8.parallel.fsdp_float8_all_gather(model, ignored_params=ignored)
    found = (row.gathered.replace("param_dtype", "bfloat16") for row in f8.conversion_report(model).rows)
    return "; ".join(dict.fromkeys(words for words in found if words))


def _gathered(model: ByteLlama, config: TrainConfig, *, is_fp8: bool, ignored: Collection[nn.Parameter]) -> str:
    if config.ep > 1 and not config.is_sharded:
        return "nothing: all ranks have them"
    if not is_fp8:
        return "bfloat16: no FP8 layers"
    if config.quantized_parameters:
        return "quantized data: FP8 parameters"
    return "bfloat16: told so" if config.bf16_gather else _gather_codes(model, ignored)


def shard(model: ByteLlama, mesh: DeviceMesh, config: TrainConfig, *, is_fp8: bool) -> str:
    """Shard a model's parameters in place. With stock FSDP2 each block is compiled before, if the config says so.

    Returns:
        How weights of FP8 layers are gathered, with the reason if it is not in FP8.
    """
    ignored = f8.parallel.expert_parameters(model)
    if config.graph_fsdp:
        f8.parallel.graph_fsdp(model, mesh, mp_policy=POLICY, ignored_params=ignored)
        return "quantized data, what each pass needs" if is_fp8 else "bfloat16: no FP8 layers"
    gathered = _gathered(model, config, is_fp8=is_fp8, ignored=ignored)
    for index, block in enumerate(model.blocks):
        if config.compile:
            # Compiled before fully_shard, so that FSDP2's hooks run outside of the block's graph.
            model.blocks[index] = torch.compile(block, fullgraph=True, dynamic=False, backend=config.backend)
        fully_shard(model.blocks[index], mesh=mesh, mp_policy=POLICY, ignored_params=ignored)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, ignored_params=ignored)
    if config.quantized_parameters and is_fp8:
        f8.parallel.share_scales(model)  # because a checkpoint is loaded before the first forward, which would do it
    return gathered
