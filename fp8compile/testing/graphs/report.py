"""graph_report: runs a model under torch.compile, and reports its graphs, breaks and recompiles."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fp8compile.tables import listed, terminal_width
from fp8compile.testing.graphs.compiler_log import (
    NOTHING_HIDDEN,
    TORCH,
    CacheBypass,
    CompilerLog,
    GraphBreak,
    Recompile,
    listen,
    numbered,
    one_line,
)
from fp8compile.testing.graphs.kept_state import kept_state
from fp8compile.testing.graphs.messages import is_message, sent_bytes, size_of, tensors_in
from fp8compile.testing.graphs.recording import KeptGraph, Recording, user_place

__all__ = [
    "Call",
    "CallReport",
    "Collective",
    "GraphInfo",
    "GraphReport",
    "counted_at",
    "examined",
    "graph_report",
    "is_compiled",
    "place_text",
]


@dataclass(frozen=True)
class Call:
    """One call of the function or module that a report examines.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        train: Whether to put the module in train mode (or eval mode) before the call; None leaves the mode.
        grad: Whether autograd records the call; None uses the current grad mode.
        name: Name of the call in reports; if empty, reports show the arguments' shapes.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    train: bool | None = None
    grad: bool | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class CallReport:
    """The compilations that one call caused.

    Attributes:
        name: Name of the call, or its arguments' shapes.
        graphs: Number of graphs that the call compiled; 0 if earlier calls had compiled all of them.
    """

    name: str
    graphs: int


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective in a graph. A collective with several dtypes has one entry per dtype.

    Attributes:
        op: Name of the operator.
        dtype: Dtype of the communicated tensors, such as "uint8".
        bytes: Bytes of the operator's inputs or of its results on one rank, whichever is larger: the results of an
            all-gather, the inputs of a reduce-scatter. The algorithm of the network is not considered. A
            data-dependent size, such as the number of rows that other ranks send, counts as 0.
        backward: Whether the collective is in the backward graph.
        file: File of the user's code that issues it; empty if unknown.
        line: Line in that file; 0 if unknown.
    """

    op: str
    dtype: str
    bytes: int
    backward: bool
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class GraphInfo:
    """A compiled graph.

    Attributes:
        function: Name of the function that was compiled.
        file: File that defines the function.
        line: First line of the function.
        forward: Operators of the forward in order, such as "aten.mm.default".
        backward: Operators of the backward in order; None if there is no backward.
        collectives: The collectives in the graph.
        saved_bytes: Bytes that the forward saves for the backward, excluding inputs and parameters.
    """

    function: str
    file: str
    line: int
    forward: tuple[str, ...]
    backward: tuple[str, ...] | None
    collectives: tuple[Collective, ...]
    saved_bytes: int


def place_text(file: str, line: int) -> str:
    """Format a location as ``file:line``; the path is relative if the file is in the working directory."""
    if not file:
        return "an unknown place"
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line}"


def _counted(head: str, ops: Sequence[str]) -> list[str]:
    counts = Counter(ops)
    order = sorted(counts, key=lambda op: (op.startswith(("aten.", "prims.")), -counts[op]))
    shown = [f"{op} x{counts[op]}" if counts[op] > 1 else op for op in order]
    return listed(head, shown or ["nothing"], width=terminal_width())


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """The result of `graph_report`: what was compiled for some calls, and what went wrong.

    Attributes:
        backend: Name of the backend.
        calls: For each call, the number of graphs that it compiled.
        graphs: The compiled graphs.
        breaks: Locations where a graph ended early.
        recompiles: Recompilations of functions, with the guards that failed.
        bypasses: Graphs that an on-disk cache can't store.
    """

    backend: str
    calls: tuple[CallReport, ...]
    graphs: tuple[GraphInfo, ...]
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    bypasses: tuple[CacheBypass, ...]

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of all operators in all graphs, forward and backward."""
        return tuple(op for graph in self.graphs for op in (*graph.forward, *(graph.backward or ())))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in all graphs."""
        return tuple(c for graph in self.graphs for c in graph.collectives)

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, tuples, strings and numbers."""
        return asdict(self)

    def to_json(self, *, indent: int | None = 1) -> str:
        """The report as a JSON object; ``indent`` is that of `json.dumps`."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{numbered(len(self.graphs), 'graphs')}, {numbered(len(self.breaks), 'breaks')}, "
                f"{numbered(len(self.recompiles), 'recompiles')}, "
                f"{len(self.bypasses)} cache {'bypass' if len(self.bypasses) == 1 else 'bypasses'} ({self.backend})",
                *_call_lines(self),
                *_graph_lines(self),
                *(line for each in self.breaks for line in break_lines(each)),
                *(line for each in self.recompiles for line in recompile_lines(each)),
                *(line for each in self.bypasses for line in bypass_lines(each)),
            ]
        )


def _call_lines(report: GraphReport) -> Iterator[str]:
    if not report.graphs:
        yield "nothing was compiled: Dynamo skips this function, or it contains no tensor operation"
    for number, call in enumerate(report.calls):
        yield f"call {number} ({call.name}): {numbered(call.graphs, 'new graphs')}"


def _graph_lines(report: GraphReport) -> Iterator[str]:
    for number, graph in enumerate(report.graphs):
        yield f"graph {number}: {graph.function}" + (f" at {place_text(graph.file, graph.line)}" if graph.file else "")
        yield from _counted("  forward: ", graph.forward)
        if graph.backward is not None:
            yield from _counted("  backward: ", graph.backward)
            yield f"  saved for backward: {graph.saved_bytes} bytes"
        for collective in graph.collectives:
            where = "backward" if collective.backward else "forward"
            yield f"  {where} sends {collective.bytes} bytes of {collective.dtype} by {collective.op}"


def counted_at(found: Sequence[GraphBreak] | Sequence[Recompile] | Sequence[CacheBypass], noun: str) -> str:
    """Format the location of ``found[0]`` and the count: "model.py:5: the first of 3 graph breaks".

    The location comes first, because pytest cuts long lines. ``noun`` is the plural, "graph breaks".
    """
    count = numbered(len(found), noun)
    if not found:
        return count
    return f"{place_text(found[0].file, found[0].line)}: {'the first of ' if len(found) > 1 else ''}{count}"


def break_lines(found: GraphBreak) -> Iterator[str]:
    """Lines that describe a graph break: its location, its reason and how to fix it."""
    yield f"graph break at {place_text(found.file, found.line)}: {found.reason}"
    if found.gives_up:
        yield from (f"  {each} runs without a graph" for each in found.without_graph or ["the rest of the function"])
    if found.explanation:
        yield f"  {found.explanation}"
    yield from (f"  hint: {hint}" for hint in found.hints)
    if found.code:
        yield f"  {found.code}: {found.url}"


def recompile_lines(found: Recompile) -> Iterator[str]:
    """Lines that describe a recompilation and the failed guard of the newest graph."""
    call = "" if found.call is None else f" for call {found.call}"
    yield f"recompile of {found.function} at {place_text(found.file, found.line)}{call}"
    for guard in found.guards[:1]:
        yield f"  failed: {guard}"
        if hint := _mends_guard(guard):
            yield f"  {hint}"


def bypass_lines(found: CacheBypass) -> Iterator[str]:
    """Lines that describe why an on-disk cache can't store a graph: the cache, the reason, the location."""
    yield f"the {found.cache} cache is bypassed at {place_text(found.file, found.line)}: {found.reason}"
    if "autograd_function_apply" in found.reason:
        yield "  usual fix: a torch.library custom op with register_autograd instead of the autograd.Function"


def _mends_guard(guard: str) -> str:
    if "size mismatch" in guard or "stride mismatch" in guard or ".size()" in guard:
        return "usual fix: torch._dynamo.mark_dynamic(tensor, dim), or padding to one shape"
    if "training" in guard:
        return "train and eval require two graphs; compile both during warm-up"
    if "grad_mode" in guard.lower() or "requires_grad" in guard:
        return "calls with and without gradients require two graphs; compile both during warm-up"
    if "___check_obj_id" in guard or "___check_type_id" in guard:
        return "usual fix: keep one object, or use one that compares by value (a frozen dataclass)"
    if "==" in guard:
        return "a Python number became a constant of the graph; make it a tensor, or keep it constant"
    return ""


# ---------------------------------------------------------------------------------- reading graphs


def _op_names(graph: fx.GraphModule) -> tuple[str, ...]:
    names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return tuple(name for name in names if not name.startswith("<built-in"))


def _collectives(graph: fx.GraphModule, *, backward: bool) -> Iterator[Collective]:
    for node in filter(is_message, graph.graph.nodes):
        file, line = user_place(node)
        for dtype, count in sent_bytes(node).items():
            yield Collective(
                op=str(node.target),
                dtype=str(dtype).removeprefix("torch."),
                bytes=count,
                backward=backward,
                file=file,
                line=line,
            )


def _storages(nodes: Sequence[fx.Node]) -> dict[int, int]:
    storages = [t.untyped_storage() for node in nodes for t in tensors_in(node.meta.get("val"))]
    return {storage._cdata: size_of(storage.nbytes()) for storage in storages}


def _saved_bytes(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    wanted = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    inputs = _storages(forward.graph.find_nodes(op="placeholder"))
    saved = _storages([node for node in forward.graph.nodes if node.name in wanted and node.op != "placeholder"])
    return sum(size for storage, size in saved.items() if storage not in inputs)


def _graph_info(kept: KeptGraph, log: CompilerLog, name: str) -> GraphInfo:
    function, file, line = log.functions.get(kept.compile_id, (name, "", 0))
    if file.startswith(TORCH):  # PyTorch's own frame, through which Dynamo calls one of PyTorch's modules
        function, file, line = name, "", 0
    forward = kept.forward or kept.dynamo
    collectives = list(_collectives(forward, backward=False))
    if kept.backward is not None:
        collectives += _collectives(kept.backward, backward=True)
    return GraphInfo(
        function=function,
        file=file,
        line=line,
        forward=_op_names(forward),
        backward=None if kept.backward is None else _op_names(kept.backward),
        collectives=tuple(collectives),
        saved_bytes=0 if kept.backward is None else _saved_bytes(forward, kept.backward),
    )


def _uncacheable(kept: KeptGraph) -> Iterator[CacheBypass]:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_node_safe

    for node in kept.dynamo.graph.nodes:
        try:
            check_node_safe(node)
        except BypassAOTAutogradCache as bypass:
            file, line = user_place(node)
            yield CacheBypass(cache="AOTAutograd", reason=one_line(str(bypass)), file=file, line=line)


def _bypasses(recording: Recording, log: CompilerLog) -> tuple[CacheBypass, ...]:
    located = [bypass for kept in recording.graphs for bypass in _uncacheable(kept)]
    reasons = {bypass.reason for bypass in located}
    # the log has the first node's reason again, in the same words
    others = [bypass for bypass in log.bypasses if bypass.reason not in reasons]
    return tuple(dict.fromkeys([*located, *others]))


# ---------------------------------------------------------------------------------- running


def _shapes(call: Call) -> str:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    shown = ["x".join(map(str, leaf.shape)) or "scalar" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    modes = [] if call.train is None else ["train" if call.train else "eval"]
    return ", ".join([*shown, *modes, *(["no_grad"] if call.grad is False else [])])


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    pending, seen, found = [output.grad_fn for output in outputs], set(), []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        pending += [following for following, _ in node.next_functions]
    return found


def run_call(compiled: Callable[..., Any], fn: Any, call: Call, *, backward: bool) -> None:
    if call.train is not None:
        fn.train(call.train)
    with torch.set_grad_enabled(torch.is_grad_enabled() if call.grad is None else call.grad):
        outputs = tensors_in(compiled(*call.args, **call.kwargs))
    outputs = [output for output in outputs if output.requires_grad]
    if not (backward and outputs):
        return
    ones = [torch.ones_like(output) for output in outputs]
    # not .backward(), which would leave gradients in the caller's parameters
    if leaves := _leaves(outputs):
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def is_compiled(fn: Any) -> bool:
    """Whether a function or module is compiled, by ``torch.compile`` or ``module.compile()``."""
    wrapped = hasattr(fn, "_torchdynamo_orig_callable") and not getattr(fn, "_torchdynamo_disable", False)
    in_place = getattr(fn, "_compiled_call_impl", None) is not None
    return type(fn).__name__ == "OptimizedModule" or wrapped or in_place


def _checked_calls(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], calls: Sequence[Any]) -> list[Call]:
    if isinstance(calls, (Tensor, dict, Call)):
        raise TypeError(
            f"graph_report: `calls` is a {type(calls).__name__}; it must be a list of calls, each a tuple of "
            "arguments or a Call: calls=[(x,), (y,)]."
        )
    calls = list(calls)
    if any(isinstance(call, dict) for call in calls):
        raise TypeError(
            "graph_report: a call is a dict. Write Call(kwargs={...}) for keyword arguments, or ({...},) for "
            "one argument that is a dict."
        )
    first = [Call(args, kwargs)] if args or kwargs or not calls else []
    rest = [call if isinstance(call, Call) else Call(call if isinstance(call, tuple) else (call,)) for call in calls]
    for call in rest:
        if call.train is not None and not isinstance(fn, nn.Module):
            raise TypeError(
                f"graph_report: a call sets train={call.train}, but {fn!r} is not a torch.nn.Module. Omit train."
            )
    return [*first, *rest]


def examined(
    recording: Recording, fn: Callable[..., Any], calls: Sequence[Call], *, backward: bool, dynamic: bool | None = None
) -> GraphReport:
    """Run calls with ``recording`` as the backend of torch.compile, and report what was compiled.

    Args:
        recording: A new `Recording`.
        fn: The function or module, already checked by `graph_report`.
        calls: At least one call.
        backward: Whether to run the backward of each call too.
        dynamic: The ``dynamic`` of ``torch.compile``.
    """
    reports: list[CallReport] = []
    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        torch._dynamo.reset()
        log = stack.enter_context(listen())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\._dynamo")  # warnings about breaks, which the report has
        stack.enter_context(kept_state(fn, [(call.args, call.kwargs) for call in calls]))
        stack.enter_context(torch._dynamo.config.patch(NOTHING_HIDDEN))
        # compile backward graphs at once: outputs inside of an unknown object get no backward call here
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=backward))
        if recording.backend == "inductor":
            from torch._inductor.utils import fresh_cache

            stack.enter_context(fresh_cache())  # graphs from a cache would bypass the recording
        compiled = torch.compile(fn, backend=recording, dynamic=dynamic)
        for log.call, call in enumerate(calls):
            before = len(recording.graphs)
            run_call(compiled, fn, call, backward=backward)
            reports.append(CallReport(name=call.name or _shapes(call), graphs=len(recording.graphs) - before))
    name = getattr(fn, "__name__", type(fn).__name__)
    return GraphReport(
        backend=recording.backend,
        calls=tuple(reports),
        graphs=tuple(_graph_info(kept, log, name) for kept in recording.graphs),
        breaks=tuple(log.breaks),
        recompiles=tuple(log.recompiles),
        bypasses=_bypasses(recording, log),
    )


def graph_report(
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "aot_eager",
    backward: bool = True,
    calls: Sequence[Call | tuple[Any, ...] | Tensor] = (),
    dynamic: bool | None = None,
    **kwargs: Any,
) -> GraphReport:
    """Compile and run a function or module, and report its graphs, graph breaks and recompilations.

    The run does not stop at the first break. The report has each break with its location and PyTorch's hints, each
    recompilation with the guards that failed, cache bypasses, and for each graph the operators, the collectives and
    the bytes saved for the backward. Gradients, modes and buffers of a module and random states are restored
    afterwards; arguments that are changed in place stay changed. All earlier compiled graphs are dropped.

    Args:
        fn: A module or function that is not compiled.
        args: Arguments of the first call.
        backend: "aot_eager", which is quick, or "inductor", which decomposes the graphs.
        backward: Whether to compile backward graphs, and to run the backward of outputs that require grad.
        calls: Further calls: tuples of arguments, or `Call` objects with modes.
        dynamic: Passed to `torch.compile`.
        kwargs: Keyword arguments of the first call.

    Returns:
        The report. Print it, or pass it to the assertions of this package.

    Raises:
        TypeError: ``fn`` can't be called, or is compiled already; ``calls`` is not a list of calls; or a call sets
            ``train`` and ``fn`` is not a module.
        ValueError: There is no such backend.
    """
    if not callable(fn):
        raise TypeError(f"graph_report: `fn` is a {type(fn).__name__}; it must be a module or function.")
    if is_compiled(fn):
        raise TypeError("graph_report: `fn` is already compiled. Pass the module or function before torch.compile.")
    return examined(
        Recording(backend), fn, _checked_calls(fn, args, kwargs, calls), backward=backward, dynamic=dynamic
    )
