"""Finds the kernels that Inductor would launch for a graph on a GPU, and the data flow between them.

    graph on the CPU --traced again on fake CUDA tensors--> lowered, fused, printed --> Schedule

The machine needs no GPU. Nothing is launched, computed or allocated, so a layer of full size takes seconds.
"""

from __future__ import annotations

import ast
import itertools
import logging
import operator
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import fx

from fp8compile.testing.gpu.gpus import Gpu, pretend_gpu
from fp8compile.testing.gpu.graphs import GpuGraph
from fp8compile.testing.gpu.lowering import SOURCE, constants_of, take_code
from fp8compile.testing.gpu.templates import chosen_templates

__all__ = ["Schedule", "ScheduledLaunch", "is_fused_addition", "operator_of", "schedule", "taken_from"]

log: logging.Logger = logging.getLogger(__name__)
SECONDS_BETWEEN = 5  # between lines that say which kernel is being generated
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
        kind: "triton", "gemm" or "opaque"; a Triton kernel that is launched for a GEMM's operator is a "gemm".
        bytes_read: Bytes read; each buffer counts once.
        bytes_written: Bytes written; each buffer counts once, even if nobody reads it.
        made: The buffers that the launch makes, each with the node of the lowered graph whose value the buffer holds.
            The node is None for a copy by which Inductor gives a GEMM's operand the required layout.
        read: The buffers that the launch reads; for a GEMM, the operands in order.
        arguments: Names of the buffers that a Triton kernel gets, by position; "" for any other argument.
        is_template: Whether the kernel is one of Inductor's templates, which multiply matrices in tiles.
        op: The operator whose kernel is launched instead of a call, such as "fp8compile.group_cast.default"; empty for
            code that Inductor generates, and for calls.
    """

    name: str
    kind: str
    bytes_read: int
    bytes_written: int
    made: dict[str, fx.Node | None]
    read: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    is_template: bool = False
    op: str = ""


@dataclass(frozen=True)
class Schedule:
    """One graph as Inductor would run it.

    Attributes:
        source: The generated Python file: Triton kernels, and the code that launches them and calls libraries.
        bytes: Bytes read and written, as Inductor counts them: each buffer once per kernel. Results of operators that
            nobody reads are added, because Inductor leaves them out.
        launches: The launches in order.
        sources: Nodes of the graph that was passed to `schedule`, by name.
        placed: Buffers that no launch makes as a whole, each with the node whose value the buffer holds. Such a buffer
            is one of several results of an operator, or memory that several kernels write to.
        no_cuda_graph: Why Inductor would not replay the graph as a CUDA graph; None if it would.
        mutated_inputs: Positions of the arguments that the graph writes to.
        constants: Objects that the source uses without defining them: types of opaque values, constant tensors.
        lowered: The graph that was passed to `schedule`, traced again on the GPU's tensors and changed by Inductor.
        output_strides: Strides of each output; None for an output whose strides aren't known. Inductor may pad outputs
            that are saved for backward.
        templates: The largest number of templates that Inductor would time for one GEMM.
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
    templates: int = 0

    @cached_property
    def maker(self) -> dict[str, ScheduledLaunch]:
        """The launch that makes each buffer, by the buffer's name; inputs of the graph are not included."""
        return {name: launch for launch in self.launches for name in launch.made}

    @cached_property
    def _holders(self) -> dict[str, fx.Node | None]:
        """Map each buffer of the generated code to the node of the lowered graph whose value it holds.

        A copy that Inductor makes for a GEMM is mapped to the node of the GEMM's operand.
        """
        holders = {name: node for launch in self.launches for name, node in launch.made.items()} | self.placed
        for launch in self.launches:
            product = next(iter(launch.made.values()), None)
            if launch.kind == "gemm" and product is not None:
                for name, operand in zip(launch.read, product.args, strict=False):
                    if name in holders and holders[name] is None and isinstance(operand, fx.Node):
                        holders[name] = operand
        return holders

    def kernel(self, name: str) -> str:
        """Source of the Triton kernel ``name`` with the functions that it calls; empty for a library call."""
        return _definition(self.source, name)

    def holder(self, name: str) -> fx.Node | None:
        """The node of the lowered graph whose value the buffer ``name`` holds; None if unknown."""
        return self._holders.get(name)

    def computed(self, launch: ScheduledLaunch) -> list[fx.Node]:
        """Nodes of the scheduled graph (before lowering) that a launch computes, in order.

        The nodes are those between the buffers that the launch reads and the buffers that it makes.
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
        """The node of the scheduled graph from which a node of the lowered graph was traced; None if unknown."""
        return self.sources.get(lowered.meta.get("custom", {}).get(SOURCE))

    def makes(self, launch: ScheduledLaunch) -> fx.Node | None:
        """The node of the scheduled graph (before lowering) whose value a launch computes; None if unknown."""
        lowered = filter(None, (self._holders[name] for name in launch.made))
        return next(filter(None, map(self.source_of, lowered)), None)

    @cached_property
    def of_templates(self) -> dict[str, tuple[fx.Node, tuple[int, ...]]]:
        """Map buffers with results of Inductor's GEMM templates to (node, index) in the scheduled graph.

        The index selects one of the node's results; it is () if there is only one.
        """
        inside = {node for launch in self.launches if launch.is_template for node in self.computed(launch)}
        found: dict[str, tuple[fx.Node, tuple[int, ...]]] = {}
        for name, lowered in self._holders.items():
            node = None if lowered is None else self.source_of(lowered)
            if lowered is None or node not in inside or name not in self.maker:
                continue
            whole, place = taken_from(lowered)
            is_operator = isinstance(whole.target, torch._ops.OpOverload)
            is_whole = is_operator and (whole.target == node.target or is_fused_addition(whole, node))
            if place or (is_whole and self.maker[name].is_template):
                found[name] = node, place
        return found

    @cached_property
    def stored_by(self) -> dict[fx.Node, ScheduledLaunch]:
        """Map nodes of the scheduled graph (before lowering) to the launch that writes their value to memory.

        Nodes whose values stay inside of kernels are left out.
        """
        found: dict[fx.Node, ScheduledLaunch] = {}
        for launch in self.launches:
            for lowered in filter(None, (self._holders[name] for name in launch.made)):
                node = self.source_of(lowered)
                # other targets are parts of a decomposed node, and hold intermediate values
                if node is not None and node.target == lowered.target:
                    found.setdefault(node, launch)
        return found


def taken_from(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]]:
    """Split a chain of ``getitem`` nodes into the node that they index, and the tuple of their indices.

    A node that is no ``getitem`` is returned itself, with the index ().
    """
    if node.target is not operator.getitem:
        return node, ()
    whole: Any = node.args[0]
    found, place = taken_from(whole)
    index: Any = node.args[1]
    return found, (*place, index)


def is_fused_addition(lowered: fx.Node, node: fx.Node) -> bool:
    """Whether ``lowered`` is an ``addmm`` or ``baddbmm`` into which Inductor fused the addition ``node``."""
    fused = (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default)
    return node.target is torch.ops.aten.add.Tensor and lowered.target in fused


def operator_of(node: fx.Node) -> str:
    """Name of a node's operator before decomposition, such as "aten.silu" or "fp8compile.linear"."""
    return str(node.meta.get("original_aten") or node.target).removesuffix(".default")


# ---------------------------------------------------------------------------------- from Inductor's schedule


def _definition(source: str, name: str | None) -> str:
    start = source.find(f"{name} = async_compile.triton(") if name else -1
    return source[start : source.index("'''", source.index("'''", start) + 3)] if start >= 0 else ""


def _node_of(buffer: Any) -> fx.Node | None:
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


def _launch(node: Any, call: dict[str, str], text: str) -> ScheduledLaunch:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    name = call["triton"] or call["extern"] or call["op"]
    total, written = _moved_bytes(node), node.get_write_buffer_sizes()
    parts = list(node.get_nodes())
    # all results of a template but the first are buffers that it is given to write to
    names = [each.get_name() for part in parts for each in getattr(part.node, "mutated_inputs", None) or ()]
    given = [V.graph.name_to_buffer[name] for name in names]
    op = ""
    if own := [part.node for part in parts if isinstance(part.node, ir.UserDefinedTritonKernel)]:
        target = own[0].fx_node.target
        op = str(target) if isinstance(target, torch._ops.OpOverload) else ""
        buffers = [buffer for kernel in own for buffer in kernel.mutable_args]  # it returns nothing
    else:
        buffers = [*(part.node for part in parts), *given]
    made = {buffer.get_name(): _node_of(buffer) for buffer in buffers}
    for kernel in own:  # readers name its arguments after what it wrote
        written_to = zip(kernel.mutation_outputs, kernel.mutable_args, strict=True)
        made |= {output.get_name(): _node_of(buffer) for output, buffer in written_to}
    written += sum(_bytes(buffer) for buffer in given)
    unread = _unread_bytes(node)
    called = op if call["triton"] else name
    is_product = "mm" in called.rpartition(".")[2] or "mm." in called
    return ScheduledLaunch(
        name=name,
        kind="gemm" if is_product else "triton" if call["triton"] else "opaque",
        bytes_read=total - written,
        bytes_written=written + unread,
        made=made,
        read=tuple(_reads(parts, made)),
        arguments=_names(call["text"]) if call["triton"] else (),
        is_template=name.startswith("triton_tem") and "tl.dot(" in text,
        op=op,
    )


def _names(call: str) -> tuple[str, ...]:
    given = next(node for node in ast.walk(ast.parse(call.strip())) if isinstance(node, ast.Call)).args
    return tuple(each.id if isinstance(each, ast.Name) else "" for each in given)


def _unread_bytes(node: Any) -> int:
    """Return the bytes of results that nobody reads, which an operator writes and Inductor doesn't count."""
    from torch._inductor import ir

    if not isinstance(getattr(node, "node", None), ir.FallbackKernel):
        return 0
    made = [each for each in node.node.outputs if isinstance(each, ir.MultiOutput)]
    return max(0, sum(map(_bytes, made)) - node.get_write_buffer_sizes())


def _moved_bytes(node: Any) -> int:
    """Return the bytes that a kernel reads and writes; Inductor counts all results of a user's kernel as read too."""
    from torch._inductor import ir

    over = 0
    for kernel in (part.node for part in node.get_nodes() if isinstance(part.node, ir.UserDefinedTritonKernel)):
        accesses = getattr(kernel, "arg_accesses", None)  # 2.11 does not know what a kernel reads
        names = () if accesses is None else {each.name for each in accesses.read_writes.reads}
        read = [kernel.get_kwargs_value(name).get_name() for name in names if name in kernel.kwargs]
        over += sum(_bytes(each) for each in kernel.mutable_args if each.get_name() not in read)
    return node.get_read_write_buffers_sizes() - over


def _bytes(buffer: Any) -> int:
    from torch._inductor.virtualized import V

    return V.graph.sizevars.optimization_hint(buffer.get_numel(), fallback=0) * buffer.get_dtype().itemsize


def _is_called(node: Any) -> bool:
    from torch._inductor import ir
    from torch._inductor.scheduler import NopKernelSchedulerNode

    is_part = isinstance(getattr(node, "node", None), ir.MultiOutput | ir.TMADescriptor)
    return not (is_part or isinstance(node, NopKernelSchedulerNode) or _is_replaced(node))


def _is_replaced(node: Any) -> bool:
    return all(each.get_name() in node.scheduler.removed_ops for each in node.get_nodes())


def _kernels_of(node: Any) -> list[Any]:
    """Split a fused node of Inductor's scheduler into one node for each kernel that is printed for it.

    Two kernels are printed for a reduction along both rows and columns: the first leaves partial sums of the columns,
    and the second computes what needs the complete sums.
    """
    from torch._inductor import ir, scheduler

    if not isinstance(node, scheduler.FusedMixOrderReductions):
        return [node]
    # Printing made sums by parts of the reductions, so `is_reduction` is False now. Their buffers are as they were.
    columns: Sequence[Any] = node.node2.get_nodes()
    later = [each for each in columns if not isinstance(each.node.data, ir.Reduction)]
    if not later:
        return [node]
    first = [each for each in node.get_nodes() if each not in later]
    return [scheduler.FusedSchedulerNode(node.scheduler, each) for each in (first, later)]


def _launches(nodes: Sequence[Any], source: str) -> tuple[ScheduledLaunch, ...]:
    body = source[source.index("def call(") :]
    calls = [
        {**match.groupdict(), "text": body[match.start() : body.index("\n", match.end())].lstrip("\n")}
        for match in LAUNCH.finditer(body)
    ]
    if len(nodes) != len(calls):
        raise RuntimeError(
            f"gpu_kernels: {len(nodes)} kernels were scheduled, but {len(calls)} calls were found in the generated "
            f"code, so their bytes can't be assigned. The generated code of PyTorch {torch.__version__} is not "
            "supported; use another version."
        )
    return tuple(
        _launch(node, call, _definition(source, call["triton"])) for node, call in zip(nodes, calls, strict=True)
    )


def _schedule(nodes: Sequence[Any], source: str, total: int, sources: dict[str, fx.Node], lowering: Any) -> Schedule:
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes

    fused = [node for node in nodes if _is_called(node)]
    called = [kernel for node in fused for kernel in _kernels_of(node)]
    devices = lowering.device_node_mapping
    reason = lowering.disable_cudagraphs_reason or check_multiple_devices_or_any_cpu_nodes(devices)
    mutated = tuple(lowering.mutated_input_idxs)
    parts = [part.node for node in nodes if not _is_called(node) for part in node.get_nodes()]
    placed = {part.get_name(): _node_of(part) for part in parts}
    constants = constants_of(lowering)
    total += sum(map(_unread_bytes, called))
    # what passes from one kernel of a node to the next; and what nodes would pass that are not printed
    total += sum(map(_moved_bytes, called))
    total -= sum(each.get_read_write_buffers_sizes() for each in (*fused, *filter(_is_replaced, nodes)))
    return Schedule(
        source, total, _launches(called, source), sources, placed, reason, mutated, constants, lowering.graph
    )


# ---------------------------------------------------------------------------------- by lowering for a GPU


def _telling(enter: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap a scheduler's method that runs once per kernel, to log progress every few seconds."""
    number, told = itertools.count(1), 0.0

    def enter_and_tell(scheduler: Any, node: Any) -> None:
        nonlocal told
        at = next(number)
        if time.monotonic() - told > SECONDS_BETWEEN:
            told = time.monotonic()
            log.info("generating kernel %d of %d", at, len(scheduler.nodes))
        enter(scheduler, node)

    return enter_and_tell


def schedule(made_for: GpuGraph, gpu: Gpu, template: int | None = None) -> Schedule:
    """Make Inductor compile a graph for a GPU, without loading the code, and return what it would launch.

    Args:
        made_for: A graph as `gpu_graphs` returns it.
        gpu: The GPU.
        template: Number of the template for each GEMM, see `chosen_templates`.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        RuntimeError: This version of PyTorch prints code in a form that isn't known here.
    """
    from torch._inductor import config
    from torch._inductor.scheduler import Scheduler

    found: list[Schedule] = []
    sources = {node.name: node for node in made_for.graph.graph.nodes}

    def take(lowering: Any, source: str) -> None:
        total, counts, _ = lowering.count_bytes()
        found.append(_schedule([node for node, _ in counts], source, total, sources, lowering))

    with (
        pretend_gpu(gpu),
        mock.patch.object(Scheduler, "enter_context", _telling(Scheduler.enter_context)),
        # kernel names without operators, so that kernels with equal code are one kernel
        config.patch({"triton.descriptive_names": False}),
        chosen_templates(template) as choices,
    ):
        strides = take_code(made_for, GPU, take)
    return replace(found[0], output_strides=strides, templates=choices.most)
