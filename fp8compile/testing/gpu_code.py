"""The code that Inductor makes for an H200, on a machine without a GPU.

    fn, args on the CPU
     |  Dynamo, AOTAutograd with Inductor's decompositions, min-cut partitioner
     v
    forward graph, backward graph
     |  each traced again on fake CUDA tensors, lowered, fused, printed
     v
    GpuCode: Triton source, kernels, GEMMs, bytes

Nothing is launched, and with fake tensors nothing is computed or allocated either, so a layer of full size costs
seconds. Generated code says which operators were fused, how many kernels there are and what they read and write; it
does not say how long they take.

The GEMMs are those that our ops choose for an H200. What else they decide by device is decided for the CPU that
traces: no padding of a GEMM's n to a multiple of 16, and the block index of a partial last block
(`quantizers/blocks.py`). Sizes that are multiples of the block and of 16 show exactly what a GPU gets.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from fp8compile.ops import gemm
from fp8compile.quantizers import Quantizer
from fp8compile.testing.h200 import H200, pretend_h200

__all__ = ["GpuCode", "Launch", "gpu_code"]

Graph = tuple[fx.GraphModule, list[Any]]  # and its inputs

SOURCE_OP = "fp8compile.testing.source_op"  # in a node's meta, where tracing again keeps it
KERNEL = re.compile(r"^def (triton_\w+)\(", re.MULTILINE)
LAUNCH = re.compile(
    r"^\s+(?:\w+ = )?(?:(?P<triton>triton_\w+)\.run|extern_kernels\.(?P<extern>\w+)|torch\.ops\.(?P<op>[\w.]+))\(",
    re.MULTILINE,
)
GEMM = re.compile(r"^(?!\s*#).*?\b(?:extern_kernels|torch\.ops\.\w+)\.(\w*mm\w*)(?:\.\w+)?\(", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel that the generated code starts.

    Attributes:
        name: Of the Triton kernel, or of the operator that is called.
        kind: "triton" for generated code, "gemm" for a library's matrix product, "opaque" for any other operator that
            Inductor can't look into: what it launches inside isn't known.
        ops: Operators that it does the work of, before Inductor took them apart, in their order.
        bytes_read: Each buffer once.
        bytes_written: Each buffer once.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    bytes_read: int
    bytes_written: int

    def __str__(self) -> str:
        moved = f"{self.bytes_read / 1e6:.3f} MB read, {self.bytes_written / 1e6:.3f} MB written"
        return f"{self.kind} {self.name}: {moved}, {', '.join(self.ops) or 'no operator of the graph'}"


@dataclass(frozen=True)
class GpuCode:
    """One graph as Inductor would run it.

    Attributes:
        source: The Python file with Triton kernels and the calls.
        bytes: Read and written by kernels and GEMMs, as Inductor counts: each buffer once a kernel.
        launches: Kernels and library calls in their order.
    """

    source: str
    bytes: int
    launches: tuple[Launch, ...]

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        """Names of the distinct Triton kernels."""
        return tuple(KERNEL.findall(self.source))

    @cached_property
    def gemms(self) -> tuple[str, ...]:
        """Names of the matrix products, one entry a call."""
        return tuple(GEMM.findall(self.source))

    def kernel(self, name: str) -> str:
        """The source of one kernel."""
        start = self.source.index(f"def {name}(")
        return self.source[start : self.source.index("'''", start)]

    def __str__(self) -> str:
        return f"{len(self.kernels)} Triton kernels, {len(self.gemms)} GEMMs, {self.bytes / 1e9:.2f} GB"


@contextmanager
def _gemms_of_the_gpu() -> Iterator[None]:
    """Let our ops, while they are traced on the CPU, choose the GEMM that they choose on an H200."""
    choose, device = gemm.select_gemm, torch.device("cuda", 0)

    def select_gemm(a: Quantizer, b: Quantizer, _: torch.device, out_dtype: torch.dtype) -> str:
        return choose(a, b, device, out_dtype)

    with (
        mock.patch.object(gemm, "select_gemm", select_gemm),
        mock.patch.object(import_module("fp8compile.ops.scaled_mm"), "select_gemm", select_gemm),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(H200.major, H200.minor)),
    ):
        yield


def _on_gpu(value: Any) -> Any:
    """A fake tensor on the GPU with the layout of this one."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")


def _empty_outputs(graph: fx.GraphModule) -> list[Any]:
    """Something of the shapes that the graph returns: what it computes is not asked for."""
    (outputs,) = graph.graph.find_nodes(op="output")[0].args
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
    return [
        torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device) if isinstance(v, Tensor) else v
        for v in values
    ]


def _ops_of(node: Any) -> tuple[str, ...]:
    """Operators that a node of Inductor's schedule comes from, as they were in the graph before decomposition."""
    origins = {origin for part in node.get_nodes() for origin in getattr(part.node, "origins", ())}
    ops = (origin.meta.get("custom", {}).get(SOURCE_OP) for origin in sorted(origins))
    return tuple(dict.fromkeys(op for op in ops if op))


def _launches(nodes: Sequence[Any], source: str) -> tuple[Launch, ...]:
    """Nodes of the schedule beside the calls that were printed for them, both in one order."""
    from torch._inductor import ir

    nodes = [node for node in nodes if not isinstance(getattr(node, "node", None), ir.MultiOutput)]
    calls = [match.groupdict() for match in LAUNCH.finditer(source[source.index("def call(") :])]
    if len(nodes) != len(calls):
        raise RuntimeError(
            f"gpu_code: {len(nodes)} kernels were scheduled, {len(calls)} calls found in the generated code: their "
            f"bytes can't be told apart. PyTorch {torch.__version__} prints code in another form than is known here."
        )
    found = []
    for node, call in zip(nodes, calls, strict=True):
        name = call["triton"] or call["extern"] or call["op"]
        kind = "triton" if call["triton"] else "gemm" if "mm" in name.rpartition(".")[2] or "mm." in name else "opaque"
        total, written = node.get_read_write_buffers_sizes(), node.get_write_buffer_sizes()
        found.append(
            Launch(name=name, kind=kind, ops=_ops_of(node), bytes_read=total - written, bytes_written=written)
        )
    return tuple(found)


def _moved(graph: fx.GraphModule) -> fx.GraphModule:
    graph = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        if source := node.meta.get("original_aten"):
            node.meta["custom"] = {**node.meta.get("custom", {}), SOURCE_OP: str(source).removesuffix(".default")}
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    return graph


def _lower(graph: fx.GraphModule, inputs: Sequence[Any]) -> GpuCode:
    """Let Inductor compile a graph of ATen operators; take the source where it would load it."""
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    found: list[GpuCode] = []

    def take(lowering: GraphLowering) -> SimpleNamespace:
        code, _ = lowering.codegen()
        source = getattr(code, "value", code)
        total, counts, _ = lowering.count_bytes()
        found.append(GpuCode(source, total, _launches([node for node, _ in counts], source)))
        return SimpleNamespace(call=lambda inputs: None, __file__="not loaded", runner=None)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        pretend_h200(),
        mock.patch.object(GraphLowering, "compile_to_module", take),
        # names without operators: equal kernels are one, whatever they come from
        config.patch({"fx_graph_cache": False, "compile_threads": 1, "triton.descriptive_names": False}),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        mode,
    ):
        fakes = [_on_gpu(value) for value in inputs]
        with fx.traceback.preserve_node_meta():  # which operator each node was before decomposition
            graph = make_fx(fx.Interpreter(_moved(graph)).run)(*fakes)
        compile_fx.compile_fx_inner(graph, fakes)
    return found[0]


def _graphs(fn: Callable, args: Sequence[Any]) -> list[Graph]:
    """The graphs that Inductor would get: forward and, where an output requires grad, backward."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    forwards: list[Graph] = []
    backwards: list[Graph] = []

    def forward_compiler(graph: fx.GraphModule, inputs: list[Any]) -> Callable:
        forwards.append((graph, inputs))
        return make_boxed_func(lambda *_: _empty_outputs(graph))

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        backwards.append((backward, [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]))
        return forward, backward

    backend = aot_autograd(
        fw_compiler=forward_compiler, decompositions=compile_fx.select_decomp_table(), partition_fn=partition
    )
    torch._dynamo.reset()
    with _gemms_of_the_gpu():
        torch.compile(fn, fullgraph=True, backend=backend)(*args)
    torch._dynamo.reset()
    return forwards + backwards


def gpu_code(fn: Callable, *args: Any) -> list[GpuCode]:
    """What Inductor generates for ``fn(*args)`` and its backward on an H200.

    The function is traced with ``fullgraph=True`` and computes nothing. Compiled graphs of other functions are
    forgotten. For sizes that don't fit here, make arguments and parameters under
    ``torch._subclasses.fake_tensor.FakeTensorMode``, and call this inside it.

    Args:
        fn: A module or function.
        args: Its arguments, on the CPU.

    Returns:
        Forward and, where an output requires grad, backward.

    Raises:
        ModuleNotFoundError: There is no Triton.
    """
    return [_lower(graph, inputs) for graph, inputs in _graphs(fn, args)]
