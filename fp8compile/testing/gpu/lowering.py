"""Makes Inductor compile a graph for a device, and takes the generated code before it is loaded.

graph on the CPU --traced again on fake tensors of the device--> lowered, fused, printed --> source
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from fp8compile.testing.gpu.graphs import GpuGraph

__all__ = ["SOURCE", "constants_of", "empty_on", "take_code"]

LARGEST_CONSTANT = 64  # elements of a tensor of numbers in the function, which become a part of the program
SOURCE = "fp8compile.testing.source"  # key of a node's meta["custom"], which the second tracing keeps


def constants_of(lowering: Any) -> dict[str, Any]:
    """Objects that generated code uses but doesn't define: constant tensors, types of opaque values."""
    return {**getattr(lowering, "opaque_value_type_classes", {}), **lowering.constants}


def empty_on(device: torch.device, value: Any) -> Any:
    """Empty tensor on a device with a tensor's sizes and strides; other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device.type)


def _shape_env(inputs: Sequence[Any]) -> Any:
    """The ShapeEnv of a graph's symbolic sizes, which Inductor reuses; None if all sizes are static."""
    sizes = (size for value in inputs for size in (value.size() if isinstance(value, Tensor) else (value,)))
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def _device_argument(node: fx.Node) -> str | None:
    """The name of an operator's device argument; None if it has none or if it is passed by position."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return "device" if "device" in names[len(node.args) :] else None


def _moved(graph: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Copy a graph; sets device arguments to ``device``, and stores node names in ``meta["custom"]``."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    constants = {
        each.target: operator.attrgetter(str(each.target))(graph) for each in graph.graph.find_nodes(op="get_attr")
    }
    # constants are real tensors, which can't be copied under fake ones
    graph = copy.deepcopy(graph, {id(value): value for value in constants.values() if isinstance(value, Tensor)})
    view_to_reshape(graph)  # as Inductor does: views were traced for other strides than saved tensors have
    for node in graph.graph.nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), SOURCE: node.name}
        node.args = fx.node.map_aggregate(node.args, lambda each: device if isinstance(each, torch.device) else each)
        if (name := _device_argument(node)) is not None:
            node.kwargs = {**node.kwargs, name: device}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = constants[node.target]
        if isinstance(value, Tensor) and value.device.type != device.type:
            _write_out(node, value, device)
    graph.recompile()
    return graph


def _write_out(node: fx.Node, value: Tensor, device: torch.device) -> None:
    """Replace a constant tensor in a graph by operators that fill it with its numbers on a device.

    Raises:
        NotImplementedError: The tensor has too many numbers.
    """
    if value.numel() > LARGEST_CONSTANT:
        raise NotImplementedError(
            f"the function makes a tensor of {value.numel()} numbers, as torch.tensor([...]) does; a GPU's program "
            f"can have {LARGEST_CONSTANT} of them here. Make it a buffer of the module, or an argument."
        )
    graph, options = node.graph, dict[str, Any](dtype=value.dtype, device=device)
    with _disable_current_modes():  # the numbers are real, and a fake mode may be active
        numbers = value.flatten().tolist()
    with graph.inserting_before(node):
        if len(set(map(repr, numbers))) <= 1:
            made = graph.call_function(
                torch.ops.aten.full.default, (list(value.shape), *(numbers[:1] or [0])), options
            )
        else:
            parts = [graph.call_function(torch.ops.aten.full.default, ([1], number), options) for number in numbers]
            made = graph.call_function(
                torch.ops.aten.view.default,
                (graph.call_function(torch.ops.aten.cat.default, (parts,)), list(value.shape)),
            )
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _name_inputs(graph: fx.Graph, names: Sequence[str]) -> None:
    """Rename a graph's inputs as AOTAutograd does, to names such as "primals_1" and "tangents_1".

    The names tell Inductor which inputs the caller keeps. Inductor orders operators to minimize peak memory, and
    counts as freed only what the graph itself can free.
    """
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(name)  # to another name if a node has it
        node.target = node.name


def take_code(
    made_for: GpuGraph, device: torch.device, take: Callable[[Any, str], None]
) -> tuple[tuple[int, ...] | None, ...]:
    """Make Inductor compile a graph for a device, up to the step that would load the generated code.

    Args:
        made_for: A graph as `gpu_graphs` returns it.
        device: The device. A GPU has to be simulated while this runs, see `pretend_gpu`.
        take: Called once, with Inductor's ``GraphLowering`` and the Python source that it printed.

    Returns:
        Strides of each output; None if they aren't known.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def taken(lowering: GraphLowering) -> SimpleNamespace:
        code, _ = lowering.codegen()
        source: Any = getattr(code, "value", code)
        take(lowering, source)
        return SimpleNamespace(call=lambda inputs: None, __file__="not loaded", runner=None)

    moved = _moved(made_for.graph, device)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_shape_env(made_for.inputs))
    context = torch._guards.TracingContext(mode)
    context.output_strides = []
    if made_for.donated is not None:
        metadata: Any = SimpleNamespace(bw_donated_idxs=list(made_for.donated), static_input_indices=[])
        context.fw_metadata = metadata
    with (
        mock.patch.object(GraphLowering, "compile_to_module", taken),
        config.patch({"fx_graph_cache": False, "compile_threads": 1}),
        torch._guards.tracing(context),
        mode,
    ):
        fakes = [empty_on(device, value) for value in made_for.inputs]
        with fx.traceback.preserve_node_meta():  # keeps SOURCE: which node each one was before the second tracing
            graph = make_fx(fx.Interpreter(moved).run)(*fakes)
        graph.graph.eliminate_dead_code()  # results of an operator that nobody takes, which not all lowerings have
        _name_inputs(graph.graph, [node.name for node in made_for.graph.graph.find_nodes(op="placeholder")])
        output = graph.graph.output_node()
        outputs: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [at for at in made_for.returned if isinstance(outputs[at], fx.Node)]
        compile_fx.compile_fx_inner(graph, fakes, is_backward=made_for.donated is not None)
    strides: Any = context.output_strides  # filled while it compiled
    return tuple(strides)
