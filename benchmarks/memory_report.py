"""What does `fp8compile.testing.memory_report` say of blocks, and how near is it to a real run?

run      small blocks on this machine's CPU: the report's largest moments beside those of the compiled block really
         run, whose allocations PyTorch's profiler tells. What a library's call allocates and frees inside is left out,
         because nothing but a run knows it; "with calls" has it.
blocks   blocks of Llama 3 8B's size, 8192 tokens, in code for an H200 (mxfp8: B200): what they keep, their largest
         moments, and what codes of the kept tensors would save

    python -m benchmarks.memory_report [--json] [--only run | blocks] [--recipes rowwise ...]
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fp8compile as f8
from benchmarks.blocks import SHAPES, block
from benchmarks.experts import experts_arguments
from benchmarks.experts_bytes import CONTENDERS
from benchmarks.kernels import arch_for
from benchmarks.mlp import mlp
from benchmarks.table import Row, emit
from fp8compile.testing import MemoryReport, memory_report

__all__ = ["CACHED", "RUN", "real_peaks", "report_row", "run_row", "small_block"]

TOKENS = 8192
CACHED = "rowwise(weight_lifetime='step')"
RUN = {  # blocks that really run, and their recipes
    "mlp": ("bf16", "tensorwise", "rowwise", "blockwise", "tensorwise(weight_lifetime='step')", CACHED),
    "experts": ("bf16", "rowwise_bf16_wgrad", "rowwise", "blockwise"),
}
OPERATORS = ("aten::", "fp8compile::", "mkldnn::")
RECIPES = ("bf16", "rowwise", "blockwise", "mxfp8")


def _mean_square(call: Callable[..., Tensor], *args: Any) -> Tensor:
    return call(*args).float().square().mean()


class _Loss(nn.Module):
    """The mean square of a module's result, so that a step needs no gradient from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return _mean_square(self.module, x)


def small_block(kind: str, recipe: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A small block with a loss behind it, and its arguments.

    Args:
        kind: "mlp" or "experts".
        recipe: Name of a recipe, or the text of its call, or "bf16".
    """
    torch.manual_seed(0)
    if kind == "mlp":
        model, x = mlp("bf16", 256, 128, 384)
        return _Loss(model if recipe == "bf16" else f8.convert(model, f8.recipes.by_name(recipe), filter="*")), (x,)
    *tensors, ends = experts_arguments(256, 128, 64, 4)
    values = [torch.randn_like(each).requires_grad_() for each in tensors]
    return partial(_mean_square, CONTENDERS[recipe]()), (*values, torch.tensor([64, 100, 200, 240], dtype=ends.dtype))


def real_peaks(call: Callable[[], Any]) -> tuple[Any, int, int, int]:
    """Run a function on the CPU, and count what it allocates.

    Args:
        call: The function.

    Returns:
        Its result; the most bytes that it held beyond what was there before; the same without what an operator
        allocates and frees inside; and the bytes that are left when it is over.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda each: (each.start_ns(), -each.duration_ns()))
    held = most = most_between = inside_until = 0
    for event in events:
        between = event.start_ns() > inside_until
        if between:
            most_between = max(most_between, held)
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
        elif between and event.name().startswith(OPERATORS):  # operators that it calls begin inside
            inside_until = event.start_ns() + event.duration_ns()
    return result, most, max(most_between, held), held


def _leaves(call: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
    return [*parameters, *(arg for arg in args if isinstance(arg, Tensor))]


def run_row(kind: str, recipe: str) -> Row:
    """The largest moments of a small block by a run and by the report.

    Bytes beyond parameters, the codes of them that live from micro-batch to micro-batch, and inputs.
    """
    torch._dynamo.reset()
    call, args = small_block(kind, recipe)
    compiled = torch.compile(call, fullgraph=True)
    compiled(*args).backward()
    for each in _leaves(call, args):
        each.grad = None
    loss, forward_calls, forward, left = real_peaks(lambda: compiled(*args))
    _, backward_calls, backward, _ = real_peaks(loss.backward)
    report = memory_report(call, *args, arch="cpu")
    outside = report.forward.parameters + report.forward.weight_codes + report.forward.inputs
    return {
        "block": kind,
        "recipe": recipe,
        "forward": forward,
        "report forward": report.forward.bytes - outside,
        "with calls": forward_calls,
        "backward": left + backward,
        "report backward": report.backward.bytes - outside,
        "backward with calls": left + backward_calls,
    }


def _full_block(kind: str, recipe: str) -> MemoryReport:
    torch._dynamo.reset()
    with torch.device("meta"):
        model, x = block(kind, recipe, TOKENS, SHAPES["llama3-8b"], device="meta")
    return memory_report(model, x, arch=arch_for(recipe))


def report_row(kind: str, recipe: str) -> Row:
    """MB of a block of Llama 3 8B; "all in FP8" is what it saves if every tensor that can be compressed is."""
    report = _full_block(kind, recipe)
    saves = sum(each.bytes - each.code_bytes for each in report.kept if each.code_bytes is not None)
    moves = sum(each.moved or 0 for each in report.kept)
    return {
        "block": kind,
        "recipe": recipe,
        "parameters": report.parameters / 1e6,
        "saved": report.kept_bytes / 1e6,
        "all in FP8": (report.kept_bytes - saves) / 1e6,
        "moved, at least": moves / 1e6,
        "forward": report.forward.bytes / 1e6,
        "backward": report.backward.bytes / 1e6,
        "temporaries": (report.backward.temporaries + report.backward.gradients) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a training step, by the report and by a run.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=("run", "blocks"))
    parser.add_argument("--recipes", nargs="+", choices=["bf16", *f8.recipes.names()], default=RECIPES)
    args = parser.parse_args()
    if args.only != "blocks":
        rows = [run_row(kind, recipe) for kind, recipes in RUN.items() for recipe in recipes]
        emit("Largest moments on a CPU, bytes beyond parameters and inputs", rows, as_json=args.json)
    if args.only != "run":
        rows = [report_row(kind, recipe) for kind in ("mlp", "attention") for recipe in args.recipes]
        emit("Memory of a step, MB: Llama 3 8B, 8192 tokens", rows, as_json=args.json)


if __name__ == "__main__":
    main()
