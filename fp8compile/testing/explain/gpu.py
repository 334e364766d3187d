"""What a GPU would launch for a model: kernels, GEMMs and bytes, and with what each operand's cast shares its kernel.

    gpu_code's graphs --every node named--> Inductor's schedule --> Launch, the nodes it stores, the buffers it reads

The operators that Inductor lists for a kernel include some of those that its inputs were made by. So what a kernel
computes is read off the graph: everything between the buffers that it reads and those that it stores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from fp8compile.nn import Linear, revert
from fp8compile.testing.explain.graphs import layer_of_stack
from fp8compile.testing.gpu_code import SOURCE_OP, GpuCode, Launch

__all__ = ["Cast", "GpuExplanation", "GraphCost", "explain_gpu"]

gpu_code_module = import_module("fp8compile.testing.gpu_code")  # the package's attribute is its function

GEMM_OF = {"linear": "output", "grad_input": "grad_input", "grad_weight": "grad_weight"}
NO_WORK = ("view", "permute", "expand", "squeeze", "unsqueeze", "full", "reshape", "clone", "slice", "t", "transpose")


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Where an operand of an FP8 GEMM is cast on the GPU.

    Attributes:
        layer: Name of the layer.
        gemm: "output", "grad_input" or "grad_weight".
        operand: "a" or "b" of the product (m, k) by (k, n).
        kernel: The Triton kernel that writes the codes; empty if they come from the forward.
        fused_with: Operators that the same kernel computes beside quantizing, such as "aten.silu".
        serves: How many GEMMs read these codes.
    """

    layer: str | None
    gemm: str
    operand: str
    kernel: str
    fused_with: tuple[str, ...]
    serves: int

    @property
    def is_fused(self) -> bool:
        """Whether the cast shares its kernel with something else."""
        return bool(self.fused_with)


@dataclass(frozen=True, kw_only=True)
class GraphCost:
    """What one graph launches.

    Attributes:
        backward: Whether it is the backward.
        kernels: Launches of Triton kernels.
        gemms: Matrix products of a library.
        fp8_gemms: Of ``gemms``, those with FP8 operands.
        opaque: Other operators, which launch what they will.
        bytes: Read and written, each buffer once a launch.
    """

    backward: bool
    kernels: int
    gemms: int
    fp8_gemms: int
    opaque: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuExplanation:
    """Generated code for a GPU, in numbers.

    Attributes:
        gpu: Its name.
        problem: Why there is none; empty if there is.
        costs: Forward, and backward if there is one.
        bf16_costs: Of the same model unconverted; empty if that can't be built.
        bf16_problem: Why not; empty if it can, or if nothing is converted.
        casts: Of every FP8 GEMM's operands.
    """

    gpu: str
    problem: str = ""
    costs: tuple[GraphCost, ...] = ()
    bf16_costs: tuple[GraphCost, ...] = ()
    bf16_problem: str = ""
    casts: tuple[Cast, ...] = ()


@dataclass(frozen=True)
class _Scheduled:
    """A launch, with names of the buffers that it makes and reads, and the nodes that the made ones hold.

    Of a buffer that a product asked for, in the layout it wants, no node is known here.
    """

    launch: Launch
    made: dict[str, fx.Node | None]
    read: tuple[str, ...]


# ---------------------------------------------------------------------------------- from Inductor's schedule


def _node_of(buffer: Any) -> fx.Node | None:
    """The graph's node whose value a buffer holds; None if Inductor made it while it lowered a product."""
    data = getattr(buffer, "data", None)
    node = getattr(data, "origin_node", None) or getattr(buffer, "origin_node", None)
    if node is None and getattr(data, "origins", None):
        node = max(data.origins)  # the last one; those before it are what its inputs come from
        return None if "mm" in str(node.target) else node
    return node


def _scheduled(node: Any, launch: Launch) -> _Scheduled:
    parts = list(node.get_nodes())
    made = {part.node.get_name(): _node_of(part.node) for part in parts}
    read: list[str] = []
    for part in parts:
        inputs = getattr(part.node, "inputs", None)
        # a library's product has its operands in their order, generated code only a set
        names = [each.get_name() for each in inputs] if inputs else sorted({d.name for d in part.read_writes.reads})
        read += [name for name in names if name not in made]
    return _Scheduled(launch, made, tuple(read))


def _watch(found: list[list[_Scheduled]]) -> Callable[[Sequence[Any], str], tuple[Launch, ...]]:
    from torch._inductor import ir

    launches_of = gpu_code_module._launches

    def launches(nodes: Sequence[Any], source: str) -> tuple[Launch, ...]:
        launches = launches_of(nodes, source)
        kept = [node for node in nodes if not isinstance(getattr(node, "node", None), ir.MultiOutput)]
        found.append([_scheduled(node, launch) for node, launch in zip(kept, launches, strict=True)])
        return launches

    return launches


@dataclass(frozen=True)
class _Origin:
    """What a node was before Inductor took it apart."""

    op: str
    layer: str | None


def _mark(graph: fx.GraphModule, layers: Sequence[str]) -> dict[str, _Origin]:
    """Give each node its own name as the operator it comes from, which `Launch` and new nodes keep."""
    origins = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            op = str(node.meta.get("original_aten") or node.target).removesuffix(".default")
            origins[node.name] = _Origin(op, layer_of_stack(node, layers))
            node.meta["original_aten"] = node.name
    return origins


def _lowered(
    model: nn.Module, args: tuple, kwargs: dict, layers: Sequence[str]
) -> Iterator[tuple[GpuCode, list[_Scheduled], dict[str, _Origin]]]:
    fn = (lambda *args: model(*args, **kwargs)) if kwargs else model
    for graph, inputs in gpu_code_module._graphs(fn, args):
        origins = _mark(graph, layers)
        found: list[list[_Scheduled]] = []
        with mock.patch.object(gpu_code_module, "_launches", _watch(found)):
            code = gpu_code_module._lower(graph, inputs)
        yield code, found[0], origins


# ---------------------------------------------------------------------------------- what a kernel computes


def _origin(node: fx.Node | None, origins: dict[str, _Origin]) -> _Origin | None:
    return None if node is None else origins.get(node.meta.get("custom", {}).get(SOURCE_OP))


def _holders(scheduled: Sequence[_Scheduled]) -> dict[str, fx.Node | None]:
    """The node that each buffer holds; a product's operands are those of its node."""
    holders = {name: node for launch in scheduled for name, node in launch.made.items()}
    for launch in scheduled:
        product = next(iter(launch.made.values()), None)
        if launch.launch.kind == "gemm" and product is not None:
            for name, operand in zip(launch.read, product.args, strict=False):
                if name in holders and holders[name] is None and isinstance(operand, fx.Node):
                    holders[name] = operand
    return holders


def _computed(launch: _Scheduled, holders: dict[str, fx.Node | None]) -> set[fx.Node]:
    """Nodes between what a launch reads and what it stores."""
    edge = {holders.get(name) for name in launch.read}
    found: set[fx.Node] = set()
    todo = [node for name in launch.made if (node := holders[name]) is not None]
    while todo:
        node = todo.pop()
        if node not in found and node.op == "call_function":
            found.add(node)
            todo += [other for other in node.all_input_nodes if other not in edge]
    return found


def _works(op: str) -> bool:
    """Whether an operator computes something, and is no part of quantizing."""
    namespace, _, rest = op.partition(".")
    return namespace != "fp8compile" and rest.partition(".")[0].lstrip("_") not in NO_WORK


def _fused_with(
    launch: _Scheduled, holders: dict[str, fx.Node | None], origins: dict[str, _Origin]
) -> tuple[str, ...]:
    nodes = sorted(_computed(launch, holders))
    ops = [origin.op for node in nodes if (origin := _origin(node, origins)) is not None]
    return tuple(dict.fromkeys(".".join(op.split(".")[:2]) for op in ops if _works(op)))


def _casts(scheduled: list[_Scheduled], origins: dict[str, _Origin]) -> Iterator[Cast]:
    holders = _holders(scheduled)
    maker = {name: launch for launch in scheduled for name in launch.made}
    products = [each for each in scheduled if each.launch.kind == "gemm" and "scaled" in each.launch.name]
    for product in products:
        origin = next((found for node in product.made.values() if (found := _origin(node, origins))), None)
        if origin is None:
            continue
        gemm = GEMM_OF.get(origin.op.rpartition(".")[2], "output")
        for operand, name in zip("ab", product.read, strict=False):
            by = maker.get(name)
            is_kernel = by is not None and by.launch.kind == "triton"
            yield Cast(
                layer=origin.layer,
                gemm=gemm,
                operand=operand,
                kernel=by.launch.name if is_kernel else "",
                fused_with=_fused_with(by, holders, origins) if is_kernel else (),
                serves=sum(name in other.read[:2] for other in products),
            )


def _cost(code: GpuCode, *, backward: bool) -> GraphCost:
    kinds = [launch.kind for launch in code.launches]
    return GraphCost(
        backward=backward,
        kernels=kinds.count("triton"),
        gemms=kinds.count("gemm"),
        fp8_gemms=sum(launch.kind == "gemm" and "scaled" in launch.name for launch in code.launches),
        opaque=kinds.count("opaque"),
        bytes=sum(launch.bytes_read + launch.bytes_written for launch in code.launches),
    )


def _costs(
    model: nn.Module, args: tuple, kwargs: dict, layers: Sequence[str]
) -> tuple[tuple[GraphCost, ...], tuple[Cast, ...]]:
    costs, casts = [], []
    for number, (code, scheduled, origins) in enumerate(_lowered(model, args, kwargs, layers)):
        costs.append(_cost(code, backward=number > 0))
        casts += _casts(scheduled, origins)
    return tuple(costs), tuple(casts)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _unconverted(
    model: nn.Module, args: tuple, kwargs: dict, layers: Sequence[str]
) -> tuple[tuple[GraphCost, ...], str]:
    if not any(isinstance(module, Linear) for module in model.modules()):
        return (), ""
    try:
        plain = revert(copy.deepcopy(model))
        return _costs(plain, args, kwargs, layers)[0], ""
    except Exception as error:  # a model that can't be copied or taken back; the report goes on without it
        return (), _one_line(error)


def explain_gpu(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layers: Sequence[str], *, name: str
) -> GpuExplanation:
    """What a GPU would launch, beside the same model unconverted.

    Args:
        model: The model, without graph breaks.
        args: Of a call.
        kwargs: Of it.
        layers: Names of its linears.
        name: Of the GPU.

    Returns:
        The numbers, or the reason why there are none.
    """
    try:
        costs, casts = _costs(model, args, kwargs, layers)
    except ModuleNotFoundError as error:
        return GpuExplanation(gpu=name, problem=f"needs {error.name}, which is not installed")
    except Exception as error:  # code for a GPU that isn't here, by PyTorch's private interfaces: what fails is said
        return GpuExplanation(gpu=name, problem=f"not with PyTorch {torch.__version__} here: {_one_line(error)}")
    finally:
        torch._dynamo.reset()
    bf16_costs, bf16_problem = _unconverted(model, args, kwargs, layers)
    return GpuExplanation(gpu=name, costs=costs, casts=casts, bf16_costs=bf16_costs, bf16_problem=bf16_problem)
