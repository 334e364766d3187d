"""Finds buffers of generated code that hold codes, scales, or values from which these are computed.

    activation bf16 --amax--> f32 --> multiplier f32 --> scale --> GEMM
          |                               |                          ^
          +--------- multiply, round <----+--> codes ----------------+

A walk starts at the operands of GEMMs, at the states of delayed scaling and at returned codes. It goes back through
every value that isn't a 16-bit float, because 16-bit floats are activations, weights and gradients, which the model
computes. Values that a backward gets from its forward are followed in the forward. The walk does not start at
float32 outputs, because a scale looks like any other number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fp8compile.testing.gpu.graphs import GpuGraph
from fp8compile.testing.gpu.schedule import Schedule, ScheduledLaunch

__all__ = ["written_parameters"]

LAUNCH = re.compile(r"^\s+((\w+)\.run\(.*\))$", re.MULTILINE)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
OPERANDS = 4  # the first arguments of a scaled product: two of codes, two of scales


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _followed(node: fx.Node) -> bool:
    return _dtype(node) not in (torch.bfloat16, torch.float16)


def _roots(graph: fx.Graph) -> Iterable[fx.Node]:
    for node in graph.nodes:
        if "scaled_mm" in str(node.target):
            yield from (each for each in node.args[:OPERANDS] if isinstance(each, fx.Node))
        elif str(node.target).startswith("aten.copy_") or _dtype(node) in FLOAT8:
            yield node


def _behind(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node for node in roots if _followed(node)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += filter(_followed, node.all_input_nodes)
    return found


def _returned(graph: fx.Graph) -> Sequence[fx.Node]:
    (outputs,) = graph.find_nodes(op="output")[0].args
    return outputs


def _nodes_on_path(graphs: Sequence[GpuGraph], schedules: Sequence[Schedule]) -> list[set[fx.Node]]:
    found: list[set[fx.Node]] = []
    asked_for: set[str] = set()  # names of the forward's outputs that the backward's path goes through
    for made, scheduled in zip(reversed(graphs), reversed(schedules), strict=True):
        named = zip(_returned(made.graph.graph), _returned(scheduled.lowered), strict=True)
        wanted = [node for given, node in named if isinstance(given, fx.Node) and given.name in asked_for]
        nodes = _behind([*_roots(scheduled.lowered), *wanted])
        inputs = zip(
            made.graph.graph.find_nodes(op="placeholder"), scheduled.lowered.find_nodes(op="placeholder"), strict=True
        )
        asked_for = {given.name for given, node in inputs if node in nodes}
        found.insert(0, nodes)
    return found


def _arguments(call: str, inputs: set[str]) -> list[str | None]:
    statement: Any = ast.parse(call).body[0]
    given = statement.value.args
    names = [[each.id for each in ast.walk(argument) if isinstance(each, ast.Name)] for argument in given]
    return [next((name for name in each if name.startswith("buf") or name in inputs), None) for each in names]


def _positions(launch: ScheduledLaunch, call: str, scheduled: Schedule, nodes: set[fx.Node]) -> set[int]:
    wanted = {name for name in launch.made if scheduled.holder(name) in nodes}
    if not wanted:
        return set()
    inputs = {node.name for node in scheduled.lowered.find_nodes(op="placeholder")}
    arguments = _arguments(call, inputs)
    if wanted <= set(arguments):
        return {position for position, name in enumerate(arguments) if name in wanted}
    # a state that changes in place is written through an argument of the graph
    found = {position for position, name in enumerate(arguments) if name in wanted or name in inputs}
    if not found:
        raise _unknown_form(f"{launch.name} makes {', '.join(sorted(wanted))}, and is called as {call}")
    return found


def _unknown_form(what: str) -> RuntimeError:
    return RuntimeError(
        f"written_parameters: {what}. PyTorch {torch.__version__} prints generated code in an unknown form."
    )


def written_parameters(graphs: Sequence[GpuGraph], schedules: Sequence[Schedule]) -> list[dict[str, set[int]]]:
    """Find kernel parameters through which codes, scales, or their source values are written.

    Args:
        graphs: Forward and backward, as `gpu_graphs` returns them.
        schedules: The schedule of each graph.

    Returns:
        For each graph, the positions of such parameters by the kernel's name. For a kernel that is launched several
        times, the positions of all launches are merged, so a single launch may only read at some of them.

    Raises:
        RuntimeError: This version of PyTorch prints launches in a form that isn't known here.
    """
    found = []
    for scheduled, nodes in zip(schedules, _nodes_on_path(graphs, schedules), strict=True):
        launches = [launch for launch in scheduled.launches if launch.kind == "triton"]
        calls = LAUNCH.findall(scheduled.source)
        if [name for _, name in calls] != [launch.name for launch in launches]:
            raise _unknown_form(
                f"kernels {[launch.name for launch in launches]} were scheduled, calls of "
                f"{[name for _, name in calls]} found"
            )
        parameters: dict[str, set[int]] = {}
        for launch, (call, name) in zip(launches, calls, strict=True):
            parameters.setdefault(name, set()).update(_positions(launch, call, scheduled, nodes))
        found.append(parameters)
    return found
