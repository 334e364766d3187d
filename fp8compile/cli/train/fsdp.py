"""How `fp8compile train` shards its model: by stock FSDP2, block by block, or with all that is sent in one graph.

    converted, cut over tp --fsdp_float8_all_gather--> torch.compile of each block --> fully_shard of each, the rest

    (--graph-fsdp)          --graph_fsdp--> torch.compile of the whole model

Weights that can't be gathered as codes are in bfloat16, and the table of the run says why.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8compile as f8
from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from fp8compile.cli.train.config import TrainConfig
    from fp8compile.cli.train.model import ByteLlama

__all__ = ["gather_codes", "shard"]

# Inputs stay as they are: x is bfloat16 by autocast, and the angles of the rotary positions need float32.
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
NO_FP8 = "bfloat16: no FP8 layers"
NOTHING = "nothing: all ranks have them"


@contextmanager
def _refusals(flag: str) -> Iterator[None]:
    """What the library refuses is the user's to mend."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{flag}: {error}") from error


def gather_codes(model: ByteLlama, recipe: f8.Recipe | None, ignored: Collection[nn.Parameter] = ()) -> str:
    """Have FSDP2 gather codes of the FP8 layers' weights wherever that gives the same numbers.

    Args:
        model: Converted, not sharded yet.
        recipe: By which; None if it was not.
        ignored: Parameters that FSDP2 leaves alone.

    Returns:
        What is gathered, and why where it is not codes.

    Raises:
        UserError: This PyTorch can't.
    """
    if recipe is None:
        return NO_FP8
    with _refusals("--fsdp"):
        f8.parallel.fsdp_float8_all_gather(model, ignored_params=ignored)
    found = (row.gathered.replace("param_dtype", "bfloat16") for row in f8.conversion_report(model).rows)
    return "; ".join(dict.fromkeys(words for words in found if words))


def shard(model: ByteLlama, mesh: DeviceMesh, config: TrainConfig, recipe: f8.Recipe | None) -> str:
    """Shard a model's parameters, in place; stock FSDP2's blocks are compiled before, if asked.

    Args:
        model: Cut over tensor-parallel ranks before, if at all.
        mesh: Of the ranks that share the batch; before them their replicas, if there are any.
        config: The run's configuration.
        recipe: What the model was converted by; None if it was not.

    Returns:
        As what the FP8 layers' weights are gathered, and why where it is not codes.

    Raises:
        UserError: This PyTorch can't, or not with this recipe.
    """
    spread = f8.parallel.expert_parameters(model)
    if config.graph_fsdp:
        with _refusals("--graph-fsdp"):
            f8.parallel.graph_fsdp(model, mesh, mp_policy=POLICY, ignored_params=spread)
        return NO_FP8 if recipe is None else "codes, those that a pass needs"
    is_quantized = config.quantized_parameters and recipe is not None
    if config.ep > 1 and not config.fsdp:
        gathered = NOTHING
    else:
        gathered = "codes, which the parameters are" if is_quantized else gather_codes(model, recipe, spread)
    for index, block in enumerate(model.blocks):
        if config.compile:
            # What FSDP2 does before and after a block is then outside of its graph.
            model.blocks[index] = torch.compile(block, fullgraph=True, dynamic=False, backend=config.backend)
        fully_shard(model.blocks[index], mesh=mesh, mp_policy=POLICY, ignored_params=spread)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, ignored_params=spread)
    return gathered
