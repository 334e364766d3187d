"""The kernels that Inductor would launch for a graph on a GPU, and the data that flows between launches.

    graph on the CPU --traced again on fake CUDA tensors--> lowered, fused, printed --> Schedule

The machine needs no GPU. Nothing is launched, computed or allocated, so a layer of full size takes seconds.
"""

from __future__ import annotations

import copy
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from fp8compile.testing.gpu.gpus import Gpu, pretend_gpu
from fp8compile.testing.gpu.graphs import GpuGraph

__all__ = ["Schedule", "ScheduledLaunch", "operator_of", "schedule"]

log: logging.Logger = logging.getLogger(__name__)
SECONDS_BETWEEN = 5  # between lines that say which kernel is being generated
SOURCE = "fp8compile.testing.source"  # key of a node's meta["custom"], which the second tracing keeps
GPU = torch.device("cuda", 0)
LAUNCH = re.compile(
    r"^\s+(?:\w+ = )?(?:(?P<triton>\w+)\.run|extern_kernels\.(?P<extern>\w+)|"
    r"(?:torch\.ops\.|(?=aten\.))(?P<op>[\w.]+))\(",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class ScheduledLaunch:
    """One kernel or library call that the generated code starts.

    Attributes:
        name: Name of the Triton kernel, or of the operator that is called.
        kind: "triton", "gemm" or "opaque".
        bytes_read: Bytes read; each buffer counts once.
        bytes_written: Bytes written; each buffer counts once, even if nobody reads it.
        made: The buffers that it makes, each with the node of the lowered graph whose value the buffer holds. The node
            is None for a copy that Inductor makes to give a product's operand the layout that it needs.
        read: The buffers that it reads. For a product they are the operands in order.
    """

    name: str
    kind: str
    bytes_read: int
    bytes_written: int
    made: dict[str, fx.Node | None]
    read: tuple[str, ...]


@dataclass(frozen=True)
class Schedule:
    """One graph as Inductor would run it.

    Attributes:
        source: The Python file with Triton kernels and the calls.
        bytes: Bytes read and written, as Inductor counts them: each buffer once a kernel. Results of operators that
            nobody reads are added, because Inductor leaves them out.
        launches: The launches in order.
        sources: Nodes of the given graph by name.
        placed: Buffers that no launch makes as a whole, each with the node whose value it holds. Such a buffer is one
            of several results of an operator, or memory that several kernels write to.
        no_cuda_graph: Why Inductor would not replay the graph as a CUDA graph; None if it would.
        mutated_inputs: Positions of the arguments that the graph writes to.
        constants: Objects that the source names and doesn't define: types of opaque values, tensors of the graph.
        lowered: The graph on the GPU that Inductor lowered.
        output_strides: Strides of each output; None if they aren't known. Inductor may pad outputs that are saved for
            backward.
    """

    source: str
    bytes: int
    launches: tuple[ScheduledLaunch, ...]
    sources: dict[str, fx.Node] = field(repr=False)
    placed: dict[str, fx.Node | None] = field(repr=False)
    no_cuda_graph: str | None
    mutated_inputs: tuple[int, ...]
    constants: dict[str, Any] = field(repr=False)
    lowered: fx.Graph = field(repr=False)
    output_strides: tuple[tuple[int, ...] | None, ...] = ()

    @cached_property
    def maker(self) -> dict[str, ScheduledLaunch]:
        """The launch that makes each buffer, by the buffer's name. Inputs of the graph are not included."""
        return {name: launch for launch in self.launches for name in launch.made}

    @cached_property
    def _holders(self) -> dict[str, fx.Node | None]:
        """The node whose value each buffer holds.

        Inductor has no node for a copy that it makes for a product; such a buffer gets the product's operand.
        """
        holders = {name: node for launch in self.launches for name, node in launch.made.items()} | self.placed
        for launch in self.launches:
            product = next(iter(launch.made.values()), None)
            if launch.kind == "gemm" and product is not None:
                for name, operand in zip(launch.read, product.args, strict=False):
                    if name in holders and holders[name] is None and isinstance(operand, fx.Node):
                        holders[name] = operand
        return holders

    def holder(self, name: str) -> fx.Node | None:
        """The node of the lowered graph whose value a buffer holds; None if that isn't known."""
        return self._holders.get(name)

    def computed(self, launch: ScheduledLaunch) -> list[fx.Node]:
        """Nodes of the given graph that a launch computes, in order.

        Inductor's own list for a kernel includes some nodes of its inputs. This list has everything between the
        buffers that the launch reads and those that it makes.
        """
        edge = {self._holders.get(name) for name in launch.read}
        found: set[fx.Node] = set()
        todo = [node for name in launch.made if (node := self._holders[name]) is not None]
        while todo:
            node = todo.pop()
            if node not in found and node.op == "call_function":
                found.add(node)
                todo += [other for other in node.all_input_nodes if other not in edge]
        sources = (self.source_of(node) for node in sorted(found))
        return list(dict.fromkeys(node for node in sources if node is not None))

    def source_of(self, lowered: fx.Node) -> fx.Node | None:
        """The node of the given graph from which a node of the lowered graph was traced; None if that isn't known."""
        return self.sources.get(lowered.meta.get("custom", {}).get(SOURCE))

    def makes(self, launch: ScheduledLaunch) -> fx.Node | None:
        """The node of the given graph whose value a launch makes; None if that isn't known."""
        lowered = filter(None, (self._holders[name] for name in launch.made))
        return next(filter(None, map(self.source_of, lowered)), None)

    @cached_property
    def stored_by(self) -> dict[fx.Node, ScheduledLaunch]:
        """Nodes of the given graph whose values are in a buffer, and the launch that writes it."""
        found: dict[fx.Node, ScheduledLaunch] = {}
        for launch in self.launches:
            for lowered in filter(None, (self._holders[name] for name in launch.made)):
                node = self.source_of(lowered)
                # other targets are parts of a decomposed node, and hold intermediate values
                if node is not None and node.target == lowered.target:
                    found.setdefault(node, launch)
        return found


def operator_of(node: fx.Node) -> str:
    """The operator that a node was before decomposition, such as "aten.silu" or "fp8compile.linear"."""
    return str(node.meta.get("original_aten") or node.target).removesuffix(".default")


# ---------------------------------------------------------------------------------- from Inductor's schedule


def _node_of(buffer: Any) -> fx.Node | None:
    """The node whose value a buffer holds; None if Inductor made the buffer while it lowered a product."""
    data: Any = getattr(buffer, "data", None)
    node = getattr(data, "origin_node", None) or getattr(buffer, "origin_node", None)
    if node is None and getattr(data, "origins", None):
        node = max(data.origins)  # the last origin; earlier ones compute its inputs
        return None if "mm" in str(node.target) else node
    return node


def _reads(parts: Sequence[Any], made: dict[str, Any]) -> Iterator[str]:
    for part in parts:
        inputs = getattr(part.node, "inputs", None)
        # a library's product lists its operands in order; generated code has only a set of reads
        names = [each.get_name() for each in inputs] if inputs else sorted({d.name for d in part.read_writes.reads})
        yield from (name for name in names if name not in made)


def _launch(node: Any, call: dict[str, str]) -> ScheduledLaunch:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    name = call["triton"] or call["extern"] or call["op"]
    is_product = "mm" in name.rpartition(".")[2] or "mm." in name
    total, written = node.get_read_write_buffers_sizes(), node.get_write_buffer_sizes()
    parts = list(node.get_nodes())
    # all results of a template but the first are buffers that it is given to write to
    names = [each.get_name() for part in parts for each in getattr(part.node, "mutated_inputs", None) or ()]
    given = [V.graph.name_to_buffer[name] for name in names]
    if own := [part.node for part in parts if isinstance(part.node, ir.UserDefinedTritonKernel)]:
        buffers = [buffer for kernel in own for buffer in kernel.mutable_args]  # it returns nothing
    else:
        buffers = [*(part.node for part in parts), *given]
    made = {buffer.get_name(): _node_of(buffer) for buffer in buffers}
    for kernel in own:  # readers name its arguments after what it wrote
        written_to = zip(kernel.mutation_outputs, kernel.mutable_args, strict=True)
        made |= {output.get_name(): _node_of(buffer) for output, buffer in written_to}
    written += sum(_bytes(buffer) for buffer in given)
    unread = _unread_bytes(node)
    return ScheduledLaunch(
        name=name,
        kind="triton" if call["triton"] else "gemm" if is_product else "opaque",
        bytes_read=total - written,
        bytes_written=written + unread,
        made=made,
        read=tuple(_reads(parts, made)),
    )


def _unread_bytes(node: Any) -> int:
    """Bytes of an operator's results that nobody reads. The operator writes them, but Inductor doesn't count them."""
    from torch._inductor import ir

    if not isinstance(getattr(node, "node", None), ir.FallbackKernel):
        return 0
    made = [each for each in node.node.outputs if isinstance(each, ir.MultiOutput)]
    return max(0, sum(map(_bytes, made)) - node.get_write_buffer_sizes())


def _bytes(buffer: Any) -> int:
    from torch._inductor.virtualized import V

    return V.graph.sizevars.optimization_hint(buffer.get_numel(), fallback=0) * buffer.get_dtype().itemsize


def _is_called(node: Any) -> bool:
    """Whether the generated code has a call for a node of Inductor's schedule."""
    from torch._inductor import ir
    from torch._inductor.scheduler import NopKernelSchedulerNode

    is_part = isinstance(getattr(node, "node", None), ir.MultiOutput)
    return not (is_part or isinstance(node, NopKernelSchedulerNode))


def _kernels_of(node: Any) -> list[Any]:
    """The nodes of the schedule that one fused node is printed as.

    A kernel that reduces along rows and along columns leaves sums by parts of the columns. What is computed from the
    whole sums is a kernel of its own, in the same fused node.
    """
    from torch._inductor import scheduler

    mixed = getattr(scheduler, "FusedMixOrderReductions", None)  # from PyTorch 2.10 on
    if mixed is None or not isinstance(node, mixed):
        return [node]
    # once printed, the reductions of a mixed kernel say that they are none: ask what they were lowered from
    later = [each for each in node.node2.get_nodes() if not each.node.get_reduction_type()]
    if not later:
        return [node]
    first = [each for each in node.get_nodes() if each not in later]
    return [scheduler.FusedSchedulerNode(node.scheduler, each) for each in (first, later)]


def _launches(nodes: Sequence[Any], source: str) -> tuple[ScheduledLaunch, ...]:
    """Pair nodes of the schedule with the calls that were printed for them, in order."""
    calls = [match.groupdict() for match in LAUNCH.finditer(source[source.index("def call(") :])]
    if len(nodes) != len(calls):
        raise RuntimeError(
            f"gpu_kernels: {len(nodes)} kernels were scheduled, {len(calls)} calls found in the generated code: their "
            f"bytes can't be told apart. PyTorch {torch.__version__} prints code in another form than is known here."
        )
    return tuple(_launch(node, call) for node, call in zip(nodes, calls, strict=True))


def _schedule(nodes: Sequence[Any], source: str, total: int, sources: dict[str, fx.Node], lowering: Any) -> Schedule:
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes

    called = [kernel for node in nodes if _is_called(node) for kernel in _kernels_of(node)]
    devices = lowering.device_node_mapping
    reason = lowering.disable_cudagraphs_reason or check_multiple_devices_or_any_cpu_nodes(devices)
    mutated = tuple(lowering.mutated_input_idxs)
    parts = [part.node for node in nodes if not _is_called(node) for part in node.get_nodes()]
    placed = {part.get_name(): _node_of(part) for part in parts}
    constants = {**getattr(lowering, "opaque_value_type_classes", {}), **lowering.constants}
    total += sum(map(_unread_bytes, called))
    return Schedule(
        source, total, _launches(called, source), sources, placed, reason, mutated, constants, lowering.graph
    )


# ---------------------------------------------------------------------------------- lowering


def _on_gpu(value: Any) -> Any:
    """An empty tensor on the GPU with the sizes and strides of a tensor; any other value is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")


def _shape_env(inputs: Sequence[Any]) -> Any:
    """The environment of a graph's symbolic sizes; without it Inductor would make new symbols."""
    sizes = (size for value in inputs for size in (value.size() if isinstance(value, Tensor) else (value,)))
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def _device_argument(node: fx.Node) -> str | None:
    """The name of an operator's device argument, if it has one that is not given by position."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return "device" if "device" in names[len(node.args) :] else None


def _moved(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph whose device arguments name the GPU. Each node notes its name in ``meta["custom"]``."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    graph = copy.deepcopy(graph)
    view_to_reshape(graph)  # as Inductor does: views were traced for other strides than saved tensors have
    for node in graph.graph.nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), SOURCE: node.name}
        node.args = fx.node.map_aggregate(node.args, lambda each: GPU if isinstance(each, torch.device) else each)
        if (name := _device_argument(node)) is not None:
            node.kwargs = {**node.kwargs, name: GPU}
    graph.recompile()
    return graph


def _telling(enter: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A method of Inductor's scheduler, called once a kernel, that also logs the kernel's number every few seconds."""
    number, told = itertools.count(1), 0.0

    def enter_and_tell(scheduler: Any, node: Any) -> None:
        nonlocal told
        at = next(number)
        if time.monotonic() - told > SECONDS_BETWEEN:
            told = time.monotonic()
            log.info("generating kernel %d of %d", at, len(scheduler.nodes))
        enter(scheduler, node)

    return enter_and_tell


def schedule(made_for: GpuGraph, gpu: Gpu) -> Schedule:
    """Let Inductor compile a graph for a GPU, and take the generated code at the step that would load it.

    Args:
        made_for: A graph as `gpu_graphs` returns it.
        gpu: The GPU.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        RuntimeError: This version of PyTorch prints code in a form that isn't known here.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    found: list[Schedule] = []
    sources = {node.name: node for node in made_for.graph.graph.nodes}

    def take(lowering: GraphLowering) -> SimpleNamespace:
        code, _ = lowering.codegen()
        source: Any = getattr(code, "value", code)
        total, counts, _ = lowering.count_bytes()
        found.append(_schedule([node for node, _ in counts], source, total, sources, lowering))
        return SimpleNamespace(call=lambda inputs: None, __file__="not loaded", runner=None)

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_shape_env(made_for.inputs))
    context = torch._guards.TracingContext(mode)
    context.output_strides = []
    with (
        pretend_gpu(gpu),
        mock.patch.object(GraphLowering, "compile_to_module", take),
        mock.patch.object(Scheduler, "enter_context", _telling(Scheduler.enter_context)),
        # kernel names without operators, so that kernels with equal code are one kernel
        config.patch({"fx_graph_cache": False, "compile_threads": 1, "triton.descriptive_names": False}),
        torch._guards.tracing(context),
        mode,
    ):
        fakes = [_on_gpu(value) for value in made_for.inputs]
        with fx.traceback.preserve_node_meta():  # keeps SOURCE: which node each one was before the second tracing
            graph = make_fx(fx.Interpreter(_moved(made_for.graph)).run)(*fakes)
        output = graph.graph.output_node()
        outputs: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [at for at in made_for.returned if isinstance(outputs[at], fx.Node)]
        compile_fx.compile_fx_inner(graph, fakes)
    strides: Any = context.output_strides  # filled while it compiled
    return replace(found[0], output_strides=tuple(strides))
