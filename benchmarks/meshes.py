"""A layer of DeepSeek-V3 and of Qwen3-235B on meshes of 64, 512 and 4,096 ranks, FP8 beside bf16, without a rank.

Experts are spread over the ranks of `ep`, parameters over those of `fsdp` (FSDP in the graph, with replicas if there
is a dim `replicate`); each rank has sequences of its own. A rank is traced as `fp8compile explain --mesh` does it, and
messages to experts have room for twice the rows of an even spread. Least times are bounds by published peaks, one
after another.

    python -m benchmarks.meshes [--json] [--models qwen3-235b] [--meshes fsdp=8,ep=8] [--recipe rowwise] [--gpu b200]
    fp8compile explain --mesh fsdp=8,ep=8 --recipe rowwise benchmarks/meshes.py:qwen3_235b
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fp8compile as f8
from benchmarks.table import Row, emit
from fp8compile.cli.explain.mesh import sizes_of
from fp8compile.testing.explain.mesh import MeshExplanation, explain_mesh

__all__ = ["MODELS", "deepseek_v3", "mesh_rows", "qwen3_235b"]

TOKENS = 4096  # of a rank
ROOM = 2  # rows that a message has room for, to those of an even spread
# each rank of ep has four experts, one for each rank of fsdp: more would send places that hold nothing
MESHES = {
    "deepseek-v3": ("fsdp=1,ep=64", "replicate=2,fsdp=4,ep=64", "replicate=16,fsdp=4,ep=64"),
    "qwen3-235b": ("fsdp=2,ep=32", "replicate=4,fsdp=4,ep=32", "replicate=32,fsdp=4,ep=32"),
}


class _Layer(nn.Module):
    """A decoder layer of transformers with the arguments that its model gives it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.layer(x, position_embeddings=(cos, sin), position_ids=None, attention_mask=None)


def _spread(layer: nn.Module, mesh: DeviceMesh, recipe: f8.Recipe | None, config: Any) -> tuple[nn.Module, tuple]:
    from torch.distributed.tensor.parallel import parallelize_module

    f8.convert(layer, f8.Recipe() if recipe is None else recipe)  # experts send their rows in either case
    ranks = mesh["ep"].size()
    rows = TOKENS * config.num_experts_per_tok
    experts = f8.parallel.ExpertParallel(capacity=ROOM * rows // ranks)
    parallelize_module(layer, mesh["ep"], {"mlp.experts": experts})
    f8.parallel.graph_fsdp(layer, mesh["replicate", "fsdp"] if "replicate" in mesh.mesh_dim_names else mesh["fsdp"])
    layer.to_empty(device="cpu")  # one rank's part, and nothing is written to it
    x = torch.empty(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.empty(1, TOKENS, getattr(config, "qk_rope_head_dim", config.head_dim), dtype=torch.bfloat16)
    return _Layer(layer), (x, angles, angles)


def qwen3_235b(mesh: DeviceMesh, recipe: f8.Recipe | None) -> tuple[nn.Module, tuple]:
    """A layer of Qwen3-235B-A22B: 128 experts, 8 for a token."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    config = Qwen3MoeConfig(
        hidden_size=4096, num_attention_heads=64, num_key_value_heads=4, head_dim=128, moe_intermediate_size=1536,
        num_experts=128, num_experts_per_tok=8, num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = Qwen3MoeDecoderLayer(config, 0).bfloat16()
    return _spread(layer, mesh, recipe, config)


def deepseek_v3(mesh: DeviceMesh, recipe: f8.Recipe | None) -> tuple[nn.Module, tuple]:
    """A layer of DeepSeek-V3: 256 experts, 8 for a token, and one for all."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    config = DeepseekV3Config(num_hidden_layers=4)  # its defaults are the sizes of the model
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = DeepseekV3DecoderLayer(config, 3).bfloat16()
    return _spread(layer, mesh, recipe, config)


MODELS = {"deepseek-v3": deepseek_v3, "qwen3-235b": qwen3_235b}


def _cells(found: MeshExplanation) -> Row:
    return {
        "graphs": found.graphs,
        "messages": len(found.messages),
        "sent MB": found.sent_bytes / 1e6,
        "kept MB": found.kept_bytes / 1e6,
        "products ms": found.product_seconds * 1e3,
        "messages ms": found.message_seconds * 1e3,
    }


def mesh_rows(model: str, mesh: str, recipe: str, gpu: str) -> list[Row]:
    """A layer on a mesh, with a recipe and in bf16; in a process on its own."""
    rows = []
    for name, chosen in (("bf16", None), (recipe, f8.recipes.by_name(recipe))):
        found = explain_mesh(lambda made, chosen=chosen: MODELS[model](made, chosen), sizes_of(mesh), gpu=gpu)
        if chosen is not None and found.problem:
            raise RuntimeError(f"{model} on {mesh}: {found.problem}")
        ranks = torch.Size(found.mesh.values()).numel()
        rows.append({"model": model, "mesh": mesh, "ranks": ranks, "recipe": name, **_cells(found)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="A layer with experts on a mesh of many ranks, FP8 beside bf16.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", help="in place of those of 64, 512 and 4,096 ranks")
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--gpu", default="h200")
    args = parser.parse_args()
    rows: list[Row] = []
    for model in args.models:
        for mesh in args.meshes or MESHES[model]:
            # a process of its own: PyTorch keeps meshes beyond their group
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                rows += pool.submit(mesh_rows, model, mesh, args.recipe, args.gpu).result()
    emit(f"One rank, {TOKENS} tokens, {args.gpu}: least times, bytes sent to others", rows, as_json=args.json)


if __name__ == "__main__":
    main()
