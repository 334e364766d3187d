"""What does a rank hold beside its shards while it takes the stream of `f8.export.tensors`?

Two or four processes of gloo on this machine. "matrix kB" is the largest matrix as it is written, codes and scales;
"most kB" the most that a rank has allocated at one time, by PyTorch's profiler; "tile kB" their difference: the values
in float32 that are quantized at a time. "gathered" is computed: 2.5 times the matrix, as a gather of gloo over two
ranks holds the part of a rank, and the whole twice. "equal": the bytes are those of one process, each tensor once.

    python -m benchmarks.stream [--json] [--recipes blockwise ...] [--ways "EP 2" ...]
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import fp8compile as f8
from benchmarks.table import Row, emit

__all__ = ["FORMATS", "WAYS", "held_by_stream", "largest_matrix", "made", "spread"]

FORMATS = {
    "blockwise": "fine_grained_fp8",
    "tensorwise": "compressed-tensors",
    "mxfp8": "modelopt",
    "nvfp4": "modelopt",
}
WAYS = {"FSDP 2": ("dense", 2), "TP 2": ("dense", 2), "EP 2": ("experts", 2), "TP 2 x EP 2": ("experts", 4)}
ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()) | {"o_proj": RowwiseParallel()}


def made(kind: str, recipe: str, size: int = 1024) -> nn.Module:
    """A converted model: ``"dense"``, two matrices of (4 size, size) and its transposed, or ``"experts"``, 16 of them.

    Experts are those of Qwen3-MoE, ``size / 2`` wide, whose largest matrix is (size, size / 2).
    """
    torch.manual_seed(0)
    model: nn.Module
    if kind == "dense":
        model = nn.Sequential(nn.Linear(size, 4 * size, bias=False), nn.Linear(4 * size, size, bias=False)).bfloat16()
        return f8.convert(model, f8.recipes.by_name(recipe), filter="*")
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=size // 2,
        moe_intermediate_size=size // 2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
    )
    model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    return f8.convert(model, f8.recipes.by_name(recipe), filter=["*", "!lm_head"])


def spread(model: Any, way: str, mesh: DeviceMesh) -> nn.Module:
    """Spread a model of `made` over ranks; ``mesh`` has a dim for each part of ``way``, the last for its first."""
    dim = mesh[mesh.mesh_dim_names[-1]] if mesh.mesh_dim_names else mesh
    if way == "FSDP 2":
        fully_shard(model, mesh=dim)
    elif way == "TP 2":
        parallelize_module(model, dim, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if "EP 2" in way:
        own = mesh[mesh.mesh_dim_names[0]] if mesh.mesh_dim_names else mesh
        parallelize_module(model, own, {"model.layers.*.mlp.experts": f8.parallel.ExpertParallel()})
    if way.startswith("TP 2 x"):
        parallelize_module(
            model, dim, {f"model.layers.*.self_attn.{name}": style for name, style in ATTENTION.items()}
        )
    found: nn.Module = model
    return found


def largest_matrix(stream: Iterator[tuple[str, Tensor]]) -> int:
    """Bytes of the largest matrix of a parameter as it is written, with its scales; gate and up are one."""
    sizes: dict[str, int] = {}
    for name, tensor in stream:
        layer = name.rpartition(".")[0].replace("up_proj", "gate_proj")
        sizes[layer] = sizes.get(layer, 0) + tensor.numel() * tensor.element_size()
    return max(sizes.values())


def _held(model: nn.Module, format: str, group: Any) -> int:
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with profiler:
        stream = f8.export.tensors(model, format)
        while next(stream, None) is not None:  # holds no tensor while the next one is made
            dist.barrier(group)
            time.sleep(0.005)  # until gloo's thread has let go of the last message
    held = most = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def held_by_stream(model: nn.Module, format: str, group: Any = None, *, runs: int = 3) -> int:
    """The most bytes that this rank allocates at one time while it takes a model's stream.

    The smallest of some runs, because runs on a busy machine differ: gloo may hold a message after it has arrived.
    """
    return min(_held(model, format, group) for _ in range(runs))


def _rows(way: str, recipes: list[str]) -> list[Row]:
    kind, ranks = WAYS[way]
    names = ("ep", "tp") if ranks == 4 else ("all",)
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    rows: list[Row] = []
    for recipe in recipes:
        whole = dict(f8.export.tensors(made(kind, recipe), FORMATS[recipe]))
        matrix = largest_matrix(iter(whole.items()))
        model = spread(made(kind, recipe), way, mesh)
        found = list(f8.export.tensors(model, FORMATS[recipe]))
        equal = [name for name, _ in found] == list(whole) and all(
            torch.equal(own.flatten().view(torch.uint8), whole[name].flatten().view(torch.uint8))
            for name, own in found
        )
        del found
        answer = torch.tensor([held_by_stream(model, FORMATS[recipe]), not equal])
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        most, differ = answer.tolist()
        rows.append(
            {
                "ranks": way,
                "recipe": recipe,
                "matrix kB": round(matrix / 1e3),
                "most kB": round(most / 1e3),
                "tile kB": round((most - matrix) / 1e3),
                "gathered kB": round(2.5 * matrix / 1e3),
                "equal": "no" if differ else "yes",
            }
        )
    return rows


def _run(rank: int, port: int, way: str, recipes: list[str], queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ["KINETO_LOG_LEVEL"] = "5"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WAYS[way][1])
    rows = _rows(way, recipes)
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipes", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    rows: list[Row] = []
    context = torch.multiprocessing.get_context("spawn")
    for way in args.ways:
        ranks = WAYS[way][1]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        queue = context.SimpleQueue()
        started = torch.multiprocessing.start_processes(
            _run, (port, way, args.recipes, queue), nprocs=ranks, join=False, start_method="spawn"
        )
        while not started.join():  # raises what a rank raises
            pass
        rows += queue.get()
    emit("what a rank holds beside its shards", rows, as_json=args.json)


if __name__ == "__main__":
    main()
