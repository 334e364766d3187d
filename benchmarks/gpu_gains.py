"""What each recipe can gain on each GPU, by published peaks: bf16's least time over that of the recipe.

    python -m benchmarks.gpu_gains

writes docs/results/gpu-gains.md. The block is a Llama-3-8B's feed-forward, 8192 tokens, forward and backward: its
products as the graphs have them, and the casts. It is traced once for each recipe; `fp8compile explain --gpu` computes
the same for any model. For two GPUs that share the parameters by FSDP in the graph, one rank is traced, as `fp8compile
explain --mesh fsdp=2` does. `tests/package/test_support.py` compares a column of the page with the code.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fp8compile as f8
from benchmarks.blocks import SHAPES
from benchmarks.mlp import Mlp
from fp8compile.testing.explain.capture import reported
from fp8compile.testing.explain.gpu_code import missing_gemm
from fp8compile.testing.explain.graphs import graph_gemms
from fp8compile.testing.explain.layers import layer_weights
from fp8compile.testing.explain.mesh import explain_mesh
from fp8compile.testing.explain.module_stack import Names
from fp8compile.testing.explain.roofline import PEAKS, roofline
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.graphs.without_values import without_values

__all__ = ["PAGE", "RECIPES", "gains", "main", "page"]

PAGE = Path(__file__).parents[1] / "docs" / "results" / "gpu-gains.md"
TOKENS, SHAPE = 8192, SHAPES["llama3-8b"]
HEAD = """# What each recipe can gain, by peaks

Written by `python -m benchmarks.gpu_gains`: the minimum time in bf16 divided by the minimum time
with the recipe, from published peak rates, for the feed-forward of Llama-3-8B with 8192 tokens,
forward and backward. GEMMs and casts are counted. **This is an upper bound, not a measurement**: see
[an H200](h200.md). "-" is a GPU without the recipe's GEMMs; see [why](support.md).
`fp8compile explain TARGET --gpu rtx5090` computes it for a model.
"""
SHARED = """
## Two GPUs of a desktop

The same block with its parameters sharded over two GPUs (`graph_fsdp`) that are connected by PCIe;
gradients are sent in float32, as in [its page](../graph-fsdp.md). Numbers are for one GPU, again
from peak rates; casts are not included here.
"""
COLUMNS = ("GPU", "recipe", "MB sent", "minimum ms of GEMMs", "minimum ms of communication")
TWO = ("l40s", "rtx5090")
RECIPES = {
    "`tensorwise()`": f8.recipes.tensorwise(),
    "`rowwise()`": f8.recipes.rowwise(),
    "`rowwise(by_mx=True)`": f8.recipes.rowwise(by_mx=True),
    "`blockwise()`": f8.recipes.blockwise(),
    '`blockwise(scale="pow2")`': f8.recipes.blockwise(scale="pow2"),
    "`mxfp8()`": f8.recipes.mxfp8(),
    "`nvfp4()`": f8.recipes.nvfp4(),
}


def gains(recipe: f8.Recipe) -> dict[str, float | None]:
    """For each GPU how many times faster than bf16 a recipe is by peaks; None if the GPU lacks its products."""
    with torch.device("meta"):
        model = f8.convert(Mlp(SHAPE.d, SHAPE.h), recipe, filter="*")
        x = torch.empty(TOKENS, SHAPE.d, dtype=torch.bfloat16, requires_grad=True)
    with without_values(model, (x,), {}) as (args, kwargs):
        _, recorded = reported(model, args, kwargs)
        gemms, _ = graph_gemms(recorded, layer_weights(model), set(), Names.of(model))
    return {
        arch: None if missing_gemm(model, GPUS[arch]) else roofline(gemms, peaks).ratio
        for arch, peaks in PEAKS.items()
        if arch in GPUS
    }


def _shared(recipe: f8.Recipe | None, mesh: DeviceMesh) -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(Mlp(SHAPE.d, SHAPE.h))
    if recipe is not None:
        f8.convert(model, recipe, filter="*")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = f8.parallel.graph_fsdp(model, mesh, mp_policy=policy).to_empty(device="cpu")
    return model, (torch.empty(TOKENS, SHAPE.d, dtype=torch.bfloat16, requires_grad=True),)


def _two_gpus() -> list[list[str]]:
    """Rows for one of two GPUs that share the parameters, in bf16 and with a recipe."""
    rows = []
    for arch, (name, recipe) in itertools.product(TWO, (("bf16", None), ("`rowwise()`", f8.recipes.rowwise()))):
        found = explain_mesh(partial(_shared, recipe), {"fsdp": 2}, gpu=arch)
        times = (found.product_seconds, found.message_seconds)
        sent = f"{found.sent_bytes / 1e6:.0f}"
        rows.append([PEAKS[arch].name, name, sent, *(f"{seconds * 1e3:.1f}" for seconds in times)])
    return rows


def page() -> str:
    """The whole page."""
    columns = {name: gains(recipe) for name, recipe in RECIPES.items()}
    lines = [["GPU", *columns], ["---"] * (len(columns) + 1)]
    for arch in next(iter(columns.values())):
        found = [column[arch] for column in columns.values()]
        lines.append([PEAKS[arch].name, *("-" if each is None else f"{each:.2f}" for each in found)])
    two = [list(COLUMNS), ["---"] * len(COLUMNS), *_two_gpus()]
    return "\n".join([HEAD, *_table(lines), SHARED, *_table(two)]) + "\n"


def _table(rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(PAGE.parents[2])}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
