"""How long does a model of 8 blocks take to compile, cold and warm, against bf16? Does a warm start hit its caches?

Each compilation, forward and backward by Inductor, runs in a process of its own; a cold one gets an empty cache
folder, a warm one that of the cold one before. The header that Inductor has the C++ compiler digest once a machine is
made before the first of them. Contenders take turns, and ratios are of medians. CPU seconds, of the
process and the C++ compiler that it calls, say the same on a machine that others use too. Misses are counted, not
timed: a warm start has none. A model is compiled in three ways:

    whole     in one graph, block after block: `torch.compile`
    regions   in one graph, the block compiled once for all: `fp8compile.compile`
    blocks    each block by itself, `block.compile()`, one graph that serves all of them

Ratios are those to bf16 compiled as a whole and, like for like, to bf16 compiled the same way. ``--phases`` prints a
second table: where the seconds of a cold compilation go, and what Inductor was given and made of it, which is exact: a
C++ file has the kernels between two products.

    python -m benchmarks.compile_time [--json] [--phases] [--rounds 1] [--blocks 8] [--contenders rowwise ...]
        [--kinds whole ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.mlp import contenders
from benchmarks.table import Row, emit

__all__ = ["KINDS", "compile_once"]

KINDS = ("whole", "regions", "blocks")
PHASES = {  # PyTorch's names for its own clocks; none contains another
    "bytecode_tracing": "Dynamo s",
    "aot_trace_joint_graph": "joint graph s",
    "min_cut_rematerialization_partition": "partition s",
    "_recursive_post_grad_passes": "passes s",
    "GraphLowering.run": "lowering s",
    "GraphLowering.codegen": "scheduling, printing s",
    "compile_file": "C++ compiler s",
}
EXACT = ("IR nodes", "kernels", "C++ files", "C++ KB")

PROGRAM = """
import json, resource, sys, time, torch
from torch import nn
import fp8compile
from torch._dynamo.utils import compilation_time_metrics, counters
from torch._inductor import metrics
from benchmarks.blocks import SHAPES, block
from benchmarks.machine import machine
from benchmarks.timing import device

contender, blocks, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        parts = [block(kind, contender, 64, SHAPES["tiny"], device()) for kind in ("attention", "mlp")]
        self.attention, self.mlp = (part for part, _ in parts)
        self.sample = [parts[0][1]]

    def forward(self, x):
        return self.mlp(self.attention(x))

model = nn.Sequential(*(Block() for _ in range(blocks)))
x = model[0].sample[0]
usage_before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
began = time.perf_counter()
if kind == "blocks":
    for each in model:
        each.compile(fullgraph=True, backend=machine().backend)
    compiled = model
else:
    compile = {"whole": torch.compile, "regions": fp8compile.compile}[kind]
    # Sequential.compile() would compile block by block
    compiled = compile(model, fullgraph=True, backend=machine().backend)
y = compiled(x)
y.sum().backward()
seconds = time.perf_counter() - began
usage_after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
count = lambda group, name: counters[group][name]
graphs = count("stats", "unique_graphs")
assert graphs == 1, f"{graphs} graphs for {blocks} blocks alike"
print(json.dumps({
    "seconds": seconds,
    "cpu": sum(a.ru_utime - b.ru_utime for a, b in zip(usage_after, usage_before)),
    "hits": count("aot_autograd", "autograd_cache_hit") + count("inductor", "fxgraph_cache_hit"),
    "misses": count("aot_autograd", "autograd_cache_miss") + count("inductor", "fxgraph_cache_miss"),
    "bypasses": count("aot_autograd", "autograd_cache_bypass") + count("inductor", "fxgraph_cache_bypass"),
    "IR nodes": metrics.ir_nodes_pre_fusion,
    "kernels": metrics.generated_kernel_count,
    "phases": {name: sum(each) for name, each in compilation_time_metrics.items()},
}))
"""


def compile_once(contender: str, blocks: int, folder: str, kind: str = "whole") -> dict[str, Any]:
    """Seconds, counters and C++ files of one compilation, of a kind of `KINDS`, in a fresh process with this cache."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, contender, str(blocks), kind],
        # one worker: its CPU time, and the C++ compiler's, is then that of this process and its children
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise RuntimeError(f"compile_time: {contender} failed: {found.stderr[-2000:]}")
    files = [path.stat().st_size for path in Path(folder).rglob("*.main.cpp")]
    return {**json.loads(found.stdout.splitlines()[-1]), "C++ files": len(files), "C++ KB": sum(files) / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile time of a model of several blocks, cold and warm.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument(
        "--contenders", nargs="+", choices=contenders(), default=["tensorwise", "rowwise", "blockwise"]
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    asked = [(name, kind) for name in ["bf16", *args.contenders] for kind in args.kinds]
    names = list(dict.fromkeys([("bf16", "whole"), *asked]))  # which all are compared with
    found: dict[tuple[str, str], list[tuple[dict, dict]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        compile_once("bf16", 1, folder)
    for _ in range(args.rounds):
        for name, kind in names:
            with tempfile.TemporaryDirectory() as folder:
                cold, warm = (compile_once(name, args.blocks, folder, kind) for _ in range(2))
            found[name, kind].append((cold, warm))
    measured = ((0, "seconds"), (0, "cpu"), (1, "seconds"))
    medians = {
        name: [statistics.median(pair[which][what] for pair in pairs) for which, what in measured]
        for name, pairs in found.items()
    }
    whole = medians["bf16", "whole"]
    rows: list[Row] = [
        {
            "contender": name,
            "compiled": kind,
            "cold s": cold,
            "to bf16 whole": cold / whole[0],
            "cold CPU s": cold_cpu,
            "CPU to bf16 whole": cold_cpu / whole[1],
            "to bf16 alike": cold_cpu / medians["bf16", kind][1],
            "warm s": warm,
            "warm to bf16 whole": warm / whole[2],
            "warm hits": found[name, kind][-1][1]["hits"],
            "misses": found[name, kind][-1][1]["misses"],
            "bypasses": found[name, kind][-1][1]["bypasses"],
        }
        for (name, kind), (cold, cold_cpu, warm) in medians.items()
    ]
    emit(f"Compilation of {args.blocks} blocks, forward and backward", rows, as_json=args.json)
    if args.phases:
        rows = [
            {"contender": name, "compiled": kind, **_phases(pairs[-1][0])} for (name, kind), pairs in found.items()
        ]
        emit("Where the seconds of the last cold compilation go", rows, as_json=args.json)


def _phases(cold: dict[str, Any]) -> Row:
    seconds = {title: cold["phases"].get(name, 0.0) for name, title in PHASES.items()}
    return {**{name: cold[name] for name in EXACT}, **seconds}


if __name__ == "__main__":
    main()
