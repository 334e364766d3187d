"""What a call passes through in a checkout and costs, and which ops share nothing with their twin for groups.

    PYTHONPATH=TREE python benchmarks/house_calls.py ROUNDS

Prints JSON. It uses public names, and of the rest the table of ops and the checkout's own `benchmarks.overhead`, so
that it runs in any checkout. Four calls have warmed all caches before the one that counts; x asks for its gradient;
the recipe is tensorwise, the bias none.

    plain            f8.Linear, 16 x 32 by 32 x 32
    grouped          f8.grouped_linear, four groups of 16 rows; to the product of the last group
    tensor_parallel  f8.parallel.column_parallel_linear, which makes its recipe in the call
    graph_fsdp       the same Linear as plain; from the model on

The last two run on one of two ranks; a fake group stands for the other.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fp8compile as f8

__all__ = ["passes"]

PRODUCTS = ("_scaled_mm", "_scaled_grouped_mm")
PACKAGE = str(Path(f8.__file__).parent)
WARM = 4
LAYERS = ".ops.layer."  # modules of layer ops, which are counted as families
PARTS = ("impl", "fake", "decompose", "portable", "sharding", "samples")
# modules that every op passes, which are about no op
INFRASTRUCTURE = (
    "registry", "register_product", "register_layer", "quantization_steps", "samples", "portable", "export_masks",
)  # fmt: skip


def passes(call: Callable[[], object]) -> dict[str, int]:
    """Files of the package, and calls of its functions, up to the last product that a call makes."""
    for _ in range(WARM):
        call()
    files: set[str] = set()
    counted = {"files": 0, "calls": 0}
    calls = 0

    def listen(frame: types.FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)
            calls += 1
        elif event == "c_call" and getattr(argument, "__name__", "") in PRODUCTS:
            counted.update(files=len(files), calls=calls)

    sys.setprofile(listen)
    try:
        call()
    finally:
        sys.setprofile(None)
    if not counted["calls"]:
        raise RuntimeError(f"house_calls: no product was seen; it is one of {PRODUCTS}, called by Python.")
    return counted


def _converted() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32, bias=False, dtype=torch.bfloat16))
    return f8.convert(model, f8.recipes.tensorwise(), filter=lambda *_: True)


def _plain() -> Callable[[], object]:
    model, x = _converted(), torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    return lambda: model[0](x)


def _grouped() -> Callable[[], object]:
    recipe, offsets = f8.recipes.tensorwise(), torch.arange(16, 80, 16, dtype=torch.int32)
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    return lambda: f8.grouped_linear(x, weight, offsets, recipe=recipe)


def _tensor_parallel() -> Callable[[], object]:
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    column_parallel_linear, group = f8.parallel.column_parallel_linear, dist.group.WORLD
    return lambda: column_parallel_linear(x, weight, recipe=f8.recipes.tensorwise(), group=group)


def _graph_fsdp() -> Callable[[], object]:
    from fp8compile.parallel import graph_fsdp

    model = graph_fsdp(_converted(), init_device_mesh("cpu", (2,)))
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    return lambda: model(x)


# ---------------------------------------------------------------------------------- ops and their twins


def _functions(value: object) -> Iterator[types.FunctionType]:
    """A function, and those that it is made of: wrapped ones, and those in its closure."""
    pending, seen = [value], set()
    while pending:
        each = pending.pop()
        if isinstance(each, functools.partial):
            pending += [each.func, *each.args]
        elif isinstance(each, types.FunctionType) and each not in seen:
            seen.add(each)
            pending.append(getattr(each, "__wrapped__", None))
            pending += [cell.cell_contents for cell in each.__closure__ or ()]
            yield each


def _names(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_of_ops(function: object) -> bool:
    module = getattr(function, "__module__", "")
    return (
        isinstance(function, types.FunctionType)
        and module.startswith("fp8compile.ops.")
        and module.rpartition(".")[2] not in INFRASTRUCTURE
    )


def _made_of(op: Any) -> set[types.CodeType]:
    """The functions of an op, and those of the package's ops that they name, and those name."""
    pending = [function for part in PARTS for function in _functions(getattr(op, part))]
    found: set[types.CodeType] = set()
    while pending:
        function = pending.pop()
        if not _is_of_ops(function) or function.__code__ in found:
            continue
        found.add(function.__code__)
        pending += [function.__globals__.get(name) for name in _names(function.__code__)]
    return found


def twins() -> dict[str, list[str]]:
    """For each op for groups that has a twin without, the functions that both are made of: none, if it is a copy."""
    from fp8compile.ops.registry import OPS

    found = {}
    for name, op in OPS.items():
        twin = OPS.get(re.sub(r"(?<=::)grouped_|(?<=::)group_|_grouped(?=_)", "", name))
        if twin is not None and twin is not op and LAYERS not in op.impl.__module__:
            shared = _made_of(op) & _made_of(twin)
            found[name.rpartition(":")[2]] = sorted(code.co_qualname for code in shared)
    return found


# ---------------------------------------------------------------------------------- what it costs


def _us(call: Callable[[], object], calls: int) -> float:
    """Processor time of this thread: other processes may want the same cores."""
    began = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - began) * 1e6 / calls


def times(rounds: int, calls: int = 20) -> dict[str, dict[str, float]]:
    """Microseconds of a forward call without gradients, in the fastest round, and of the same steps by hand."""
    from benchmarks.overhead import by_hand

    torch.set_num_threads(1)
    x, weight = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(32, 32, dtype=torch.bfloat16)
    found = {}
    for name in ("tensorwise", "rowwise", "blockwise"):
        recipe = f8.recipes.by_name(name)
        hand = by_hand(recipe)
        steps = {
            "by hand": functools.partial(hand, x, weight),
            "f8.linear": functools.partial(f8.linear, x, weight, recipe=recipe),
        }
        with torch.no_grad():
            every = [{which: _us(step, calls) for which, step in steps.items()} for _ in range(rounds)]
        found[name] = {which: min(each[which] for each in every) for which in steps}
    return found


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rounds = int(sys.argv[1])
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ways = {"plain": _plain, "grouped": _grouped, "tensor_parallel": _tensor_parallel, "graph_fsdp": _graph_fsdp}
    found = {"times": times(rounds), "calls": {name: passes(made()) for name, made in ways.items()}, "twins": twins()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
