"""Queries of PyTorch's tracers: fake tensors, symbolic sizes, active transforms, Dynamo's graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch._guards
from torch import fx
from torch.autograd import forward_ad

from fp8compile._compat.imports import when_imported
from fp8compile._compat.process_groups import has_process_groups

__all__ = [
    "any_is_zero",
    "assert_on_device",
    "new_dynamic_size",
    "constant_when_traced",
    "faking_as",
    "forget_graphs",
    "graph_tracer",
    "guard_or_false",
    "is_fake",
    "is_faking",
    "is_stand_in",
    "is_static",
    "is_traced",
    "is_traced_as_subgraph",
    "is_transformed",
    "is_unbacked",
    "is_written_in_trace",
    "module_path",
    "no_dispatch",
    "nodes_of",
    "statically_equal",
    "statically_true",
    "untraced",
    "unwrapped",
    "when_graph_is_made",
    "without_elements",
]

F = TypeVar("F", bound=Callable[..., Any])
STEP = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.(\w+)")
# Returns the mode that records operators as nodes, or None: then no tensor has a node. An eager call asks ten times.
graph_tracer = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, or has a node in a graph that is being traced."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # the wrapper itself has no node
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or bool(nodes_of(tensor))


def nodes_of(tensor: torch.Tensor) -> list[Any]:
    """Return a tensor's FX nodes: one for each inner tensor of a subclass, none if no graph is being traced."""
    if graph_tracer() is None:
        return []
    from torch.fx.experimental.proxy_tensor import _get_proxies

    return [proxy.node for proxy in _get_proxies(tensor)]


def is_written_in_trace(tensor: torch.Tensor) -> bool:
    """Whether the graph that Dynamo is tracing has already written in place to its input ``tensor``.

    Writes that do not change version counters are not seen.
    """
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    fake = None if mode is None else mode.fake_tensor_converter._get_memo(tensor)
    return fake is not None and fake._version > 0  # that of an input starts at 0


def is_traced_as_subgraph() -> bool:
    """Whether make_fx is tracing a graph inside another graph, such as the graph of a compiled region."""
    from torch.fx.experimental import proxy_tensor

    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    return tracer is not None and tracer.parent_tracer is not None


def without_elements(result: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Return ``result`` of operands of which one has no elements; with torch.distributed it depends on all operands.

    Its values are constants. A rank without tokens has to send what other ranks send, but compilers merge messages
    whose operands are equal constants, and drop messages of the backward that depend on no gradient.
    """
    if has_process_groups():
        for each in operands:
            nothing = each.narrow(0, 0, 0) if each.ndim else each.expand(0)
            result = result + nothing.to(result.dtype).sum()
    return result


def is_stand_in(value: object) -> bool:
    """Whether PyTorch passed a fake script object in place of a constant such as a recipe.

    A fake kernel gets such an object if the traced function itself creates the constant. To ``isinstance``, the object
    has the constant's class.
    """
    return type(value).__name__ == "FakeScriptObject"


def unwrapped(value: Any) -> Any:
    """Return the constant that a stand-in of PyTorch's has the place of (`is_stand_in`), or ``value`` itself."""
    return value.real_obj if is_stand_in(value) else value


def assert_on_device(condition: torch.Tensor, text: str) -> None:
    """Assert a condition tensor on its device without blocking the host; ``text`` is the error message."""
    torch.ops.aten._assert_async.msg(condition, text)


def statically_true(condition: Any) -> bool:
    """Whether a condition on sizes holds for all sizes that the traced graph allows; never adds a guard."""
    if isinstance(condition, bool):  # a condition on plain numbers, as always in eager mode
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def statically_equal(sizes: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two shapes are equal for all sizes that the traced graph allows; never adds a guard."""
    for size, other in zip(sizes, others, strict=True):
        equal = size == other
        if not (equal if isinstance(equal, bool) else statically_true(equal)):
            return False
    return True


def any_is_zero(sizes: Iterable[Any]) -> bool:
    """Whether one of the sizes is 0; an unbacked size, known only at run time, does not count as 0."""
    for size in sizes:
        is_zero = size == 0
        if is_zero if isinstance(is_zero, bool) else guard_or_false(is_zero):
            return True
    return False


def is_static(size: Any) -> bool:
    """Whether a size is a number and not a symbol of the graph being traced."""
    if not torch.compiler.is_compiling():
        return isinstance(size, int)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # to Dynamo, a symbol is an int too

    return has_static_value(size)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake tensor, with which a tracer computes shapes."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def faking_as(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context in which new tensors are fake if ``tensor`` is fake."""
    from torch._subclasses import FakeTensor

    return tensor.fake_mode if isinstance(tensor, FakeTensor) else nullcontext()


def is_faking() -> bool:
    """Whether a fake tensor mode is active, in which operators return fake tensors for any input."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def no_dispatch() -> AbstractContextManager[None]:
    """Context in which operators bypass dispatch modes and subclasses' `__torch_dispatch__`."""
    return torch._C._DisableTorchDispatch()


def guard_or_false(condition: Any) -> bool:
    """Whether a condition on sizes holds; False if unknown, because it depends on an unbacked size."""
    if isinstance(condition, bool):
        return condition  # an eager call asks five times, a microsecond each
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_unbacked(size: Any) -> bool:
    """Whether a size is an unbacked symbol, known only at run time."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def new_dynamic_size() -> torch.SymInt:
    """Make a symbol, in a fake kernel, for a size that depends on data, without a graph break.

    PyTorch's own `new_dynamic_size` breaks the graph unless ``fullgraph=True`` or Dynamo's option
    ``capture_dynamic_output_shape_ops`` is set.
    """
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    context = torch.library.get_ctx()
    shapes = context._shape_env
    if shapes is None or shapes.allow_dynamic_output_shape_ops:
        return context.new_dynamic_size()
    size = shapes.create_unbacked_symint()
    _constrain_range_for_size(size, min=0)
    return size


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether `torch.func` (grad, vmap, jvp) or forward-mode autograd acts on a tensor, in eager mode."""
    if torch.compiler.is_compiling():
        return False  # Dynamo can't trace the calls below
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
    return is_dual or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def constant_when_traced(fn: F) -> F:
    """Decorator: while tracing, Dynamo calls ``fn`` and puts the result into the graph as a constant.

    This is `torch.compiler.assume_constant_result` without the import of Dynamo, which costs a second.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def untraced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: Dynamo breaks its graph at a call of ``fn``, which runs uncompiled.

    This is `torch.compiler.disable` without the import of Dynamo, which costs a second.
    """
    return torch._disable_dynamo(fn)


def when_graph_is_made(callback: Callable[[fx.GraphModule, Sequence[Any], object], None]) -> None:
    """Call ``callback(graph, inputs, owner)`` for each graph that Dynamo makes, before compilation.

    ``owner`` is ``self`` of the traced method, or None. The call comes before the backend and before all caches of
    compiled code. An error that ``callback`` raises ends the compilation.
    """

    def register() -> None:
        from torch._dynamo.output_graph import OutputGraph

        plain = OutputGraph.call_user_compiler

        @wraps(plain)
        def seen_first(self: Any, gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
            callback(gm, example_inputs, self.local_scope.get("self"))
            return plain(self, gm, example_inputs)

        OutputGraph.call_user_compiler = seen_first

    when_imported("torch._dynamo.output_graph", register)


def module_path(text: str) -> str:
    """Convert Dynamo's source text of a module, ``L['self']._modules['layers'][0].gate``, to ``layers.0.gate``."""
    rest = re.sub(r"^L\['\w+'\]", "", text)
    return ".".join(next(filter(None, match)) for match in STEP.findall(rest))


def forget_graphs() -> None:
    """Call `torch._dynamo.reset`, but keep the table of Triton kernels that the user's code in graphs launches."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    kept = table.id_to_kernel, table.kernel_to_id, table.constant_args
    torch._dynamo.reset()
    table.id_to_kernel, table.kernel_to_id, table.constant_args = kept
