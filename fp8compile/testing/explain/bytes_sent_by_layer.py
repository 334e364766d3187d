"""sends: lists the messages that each FP8 layer of a model sends, if the model is spread over ranks.

    x --plan--> layer: output --plan--> y          plan: messages before and after a layer, by `parallelize_module`
    dx <--plan-- layer: grad_input, grad_weight <--plan-- dy

The model runs once, forward and backward, and each message is recorded when it is sent. Placements decide what is
sent, so a fake process group without other ranks gives the same list. `fp8compile.ops.layer.sharded_gemm` tells
which operand a GEMM gathers. Compiled code may send one message for several layers; this list has one for each layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile import _compat
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.nn import Linear
from fp8compile.nn.check_model import check_model
from fp8compile.ops.layer import LAYER_OPS
from fp8compile.ops.layer.sharded_gemm import plans_of
from fp8compile.quantizers import GEMMS, Gemm, Recipe
from fp8compile.tables import folded, table_lines, terminal_width
from fp8compile.testing.graphs.kept_state import kept_state
from fp8compile.testing.graphs.messages import COLLECTIVES, tensors_in
from fp8compile.testing.graphs.report import Call, run_call

__all__ = ["NUMBERS", "Send", "Sends", "is_spread", "sends"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
OPS = {op.name(): gemm for op, gemm in LAYER_OPS.items()}
NO_MESSAGES = ("wait_tensor", "_wrap_tensor_autograd")
PLAN = "plan"  # for a message that a style of the plan sends, before or after a layer
GRADIENTS = "gradients"  # what FSDP2 reduces
FSDP = "fsdp"  # for a message that FSDP2 sends, of the module that `fully_shard` was called with
BETWEEN = "(between layers)"
OUT_OPS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
NUMBERS = (5, 6)  # columns


@dataclass(frozen=True, kw_only=True)
class Send:
    """A collective of a layer, and how often the layer issues it.

    Attributes:
        layer: Name of the layer; for a message of FSDP2, of the module that it shards; "(between layers)" for a
            message outside of all layers, such as a sum of gradients of several layers that read one tensor.
        gemm: The GEMM that needs the message: "output", "grad_input" or "grad_weight"; "plan" if a style of the
            plan sends it before or after the layer; "fsdp" if FSDP2 sends it; empty between layers.
        what: The content: "quantized data of grad_output", "scales of input", "amax", or a tensor in its own dtype,
            such as "input".
        op: "all_gather", "all_reduce max", "all_reduce sum", "reduce_scatter sum", or another operator's name.
        dtype: Dtype of the tensor that is sent, such as "uint8".
        bytes_per_element: Bytes of each element.
        bytes: Bytes of the collective's inputs or of its results on one rank, whichever is larger.
        backward: Whether the message is sent in the backward.
        times: Number of times that the message is sent.
    """

    layer: str
    gemm: str
    what: str
    op: str
    dtype: str
    bytes_per_element: int
    bytes: int
    backward: bool
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Sends:
    """Collectives in the order in which they are first issued; ``str`` returns a table.

    Attributes:
        rows: The collectives.
        layers: Names of the sharded layers. A layer without rows does not communicate.
    """

    rows: tuple[Send, ...]
    layers: tuple[str, ...]

    def of(self, layer: str, gemm: str | None = None) -> tuple[Send, ...]:
        """The collectives of a layer, or those issued for one purpose.

        Args:
            layer: Name of the layer.
            gemm: "output", "grad_input" or "grad_weight" for messages of that GEMM, "plan" for those of the tensor
                parallel plan, "fsdp" for FSDP2's; None for all.
        """
        return tuple(row for row in self.rows if row.layer == layer and gemm in (None, row.gemm))

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield header and rows of the table; layers with the same collectives share a row."""
        yield "layer", "for", "what", "how", "dtype", "bytes", "times"
        rows: list[tuple[str, ...]] = []
        sharded = dict.fromkeys(row.layer for row in self.rows if row.gemm == FSDP)
        nothing = "only what FSDP2 sends" if sharded else "nothing"
        for name in dict.fromkeys([*self.layers, *sharded]):
            sent = self.of(name)
            rows += map(_cells, sent) if sent else [(name or "(the model)", "-", nothing, *("-" for _ in range(4)))]
        rows += map(_cells, self.of(BETWEEN))
        yield from ((name, *rest) for name, rest in folded((row[0], row[1:]) for row in rows))

    def __str__(self) -> str:
        columns, *rows = self.cells()
        return "\n".join(table_lines(columns, rows, width=terminal_width(), right=NUMBERS))


def _cells(row: Send) -> tuple[str, ...]:
    direction = "backward" if row.backward else "forward"
    reason = row.gemm if row.gemm in {gemm.name for gemm in GEMMS} else f"{row.gemm} {direction}".strip()
    return row.layer or "(the model)", reason, row.what, row.op, row.dtype, f"{row.bytes:,}", str(row.times)


# ---------------------------------------------------------------------------------- the layer of a message


@dataclass(frozen=True)
class _Place:
    """A part of a layer's call: its op, or a redistribution of a tensor by the tensor parallel plan.

    ``tensor`` is the redistributed tensor: "input", "output", "grad_input", "grad_output"; None for the op.
    """

    layer: str
    tensor: str | None  # name of the tensor that the plan moves; None in the op


def _nodes(start: Any, end: set[Any]) -> Iterator[Any]:
    pending, seen = [start], set(end)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending += [following for following, _ in node.next_functions]


def _grad_fns(value: Any) -> set[Any]:
    return {leaf.grad_fn for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)} - {None}


class _Places:
    """Tracks by module hooks which layer and phase (`_Place`) is running, and which created each autograd node."""

    def __init__(self, layers: dict[str, Linear]) -> None:
        self.sharded: list[str] = []  # names of modules whose parameters FSDP2 gathers or reduces now
        self.now: list[_Place] = []
        self.of_node: dict[Any, _Place] = {}
        self.handles = [handle for name, layer in layers.items() for handle in self._hooks(name, layer)]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def current(self) -> _Place | None:
        """The `_Place` of the code that is running, in forward or backward; None outside of all layers."""
        node = torch._C._current_autograd_node()
        return self.now[-1] if self.now else self.of_node.get(node)

    def _hooks(self, name: str, layer: Linear) -> Iterator[Any]:
        # autograd's nodes in the last call: of the inputs before the plan, of those after it, of the op's output
        ends: list[set[Any]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            ends[:] = [_grad_fns((args, kwargs))]
            self.now.append(_Place(name, "input"))

        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            ends.append(_grad_fns((args, kwargs)))
            self.now[-1] = _Place(name, None)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            ends.append(_grad_fns(output))
            self.now[-1] = _Place(name, "output")

        def left(module: nn.Module, args: Any, output: Any) -> None:
            self.now.pop()
            came, got, made = ends
            sides = ((_grad_fns(output), made, "grad_output"), (made, got, None), (got, came, "grad_input"))
            for starts, end, tensor in sides:
                for start in starts:
                    self.of_node.update(dict.fromkeys(_nodes(start, end), _Place(name, tensor)))

        # the styles of a plan are hooks too: two of our hooks run before theirs, and two after
        yield layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        yield layer.register_forward_pre_hook(entered, with_kwargs=True)
        yield layer.register_forward_hook(leave, prepend=True)
        yield layer.register_forward_hook(left)


# ---------------------------------------------------------------------------------- messages


def _gathered(gemm: Gemm, a: Tensor, b: Tensor) -> dict[str, str]:
    """Return, by process group, which operand a GEMM of two DTensors gathers: a layer's tensor, such as "input"."""
    from fp8compile.parallel.dtensor_placements import cuts_of

    given: tuple[Any, ...] = (("a", a), ("b", b))  # DTensors
    parts = {side: Plain(t.to_local(), TensorLayout(cuts_of(t))) for side, t in given}
    plans = [(index, plan.gather) for index, plan in enumerate(plans_of(gemm, **parts)) if plan.gather is not None]
    cuts: dict[str, Any] = {side: part.cuts for side, part in parts.items()}
    return {cuts[side][index].group.group_name: _tensor_name(getattr(gemm, side)) for index, side in plans}


def _tensor_name(role: str) -> str:
    return role.partition("_for_")[0]


def _by_fsdp(op: str, reduction: str, sent: Tensor) -> str:
    if "gather" in op:
        if not op.startswith("_"):  # an operator of ours: FSDP2 has one that writes to its argument
            return "scales"
        return "parameters, FP8 parameters with their scales" if sent.dtype == torch.uint8 else "parameters"
    return "amaxes" if reduction == "max" else GRADIENTS


def _accumulate_gradients(value: Any) -> None:
    """Run a backward from the tensors in ``value`` that accumulates parameters' gradients.

    FSDP2 reduces no gradients that `torch.autograd.grad` returns.
    """
    outputs = [output for output in tensors_in(value) if output.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


class _Listener(TorchDispatchMode):
    """Dispatch mode that records each message with the layer, the GEMM and the tensor that it is for."""

    def __init__(self, places: _Places) -> None:
        super().__init__()
        self.places = places
        self.found: Counter[Any] = Counter()
        self.gemm = OUTPUT
        self.recipe: Recipe | None = None
        self.gathered: dict[str, str] = {}
        self.partial: list[str] = []  # operands that are partial sums, not yet summed over ranks
        self.codes_of: set[str] = set()  # groups that have already sent codes of their operand; scales come next

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(_compat.is_dtensor, args)):
            if (gemm := OPS.get(func._schema.name)) is not None:
                self.gemm, self.recipe = gemm, next(arg for arg in args if isinstance(arg, Recipe))
                self.gathered, self.codes_of = _gathered(gemm, *args[:2]), set()
                roles = zip((gemm.a, gemm.b), args, strict=False)
                self.partial = [
                    _tensor_name(role)
                    for role, t in roles
                    if any(placement.is_partial() for placement in t.placements)
                ]
            return NotImplemented  # DTensor handles the op, and its collectives come back here
        made = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES and func._opname not in NO_MESSAGES:
            self._note(func, args, made)
        return made

    def _note(self, func: Any, args: tuple[Any, ...], made: Any) -> None:
        given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        words = [arg for arg in args if isinstance(arg, str)]
        reduction = next((word for word in words if word in ("sum", "max", "min", "avg", "product")), "")
        op = func._opname.removesuffix("_into_tensor").removesuffix("_tensor")
        if self.places.sharded:
            whole = max(given, key=Tensor.numel)  # the rest are its parts: these collectives write to an argument
            what, op = _by_fsdp(op, reduction, whole), OUT_OPS.get(op, op)
            self._add(self.places.sharded[-1], FSDP, what, op, reduction, [whole], [])
            return
        place = self.places.current()
        is_sum = op.startswith("reduce_scatter") or reduction == "sum"
        if place is not None and place.tensor is None and is_sum and not self.partial:
            place = None  # autograd's sum of the gradients of several readers, which runs in the last reader's node
        gemm = "" if place is None else PLAN if place.tensor else self.gemm.name
        name = BETWEEN if place is None else place.layer
        self._add(name, gemm, self._what(op, reduction, words, place), op, reduction, given, results)

    def _add(
        self, layer: str, gemm: str, what: str, op: str, reduction: str, given: list[Tensor], results: list[Tensor]
    ) -> None:
        self.found[
            Send(
                layer=layer,
                gemm=gemm,
                what=what,
                op=f"{op} {reduction}".strip(),
                dtype=str(given[0].dtype).removeprefix("torch."),
                bytes_per_element=given[0].element_size(),
                bytes=max(sum(t.numel() * t.element_size() for t in tensors) for tensors in (given, results)),
                # FSDP2's last gradients are reduced in a callback at the end of the backward, in no node
                backward=what == GRADIENTS or torch._C._current_autograd_node() is not None,
            )
        ] += 1

    def _what(self, op: str, reduction: str, words: list[str], place: _Place | None) -> str:
        if place is None:
            return "a tensor"
        if place.tensor is not None:
            return place.tensor
        if op == "all_reduce":
            return "amax" if reduction == "max" else " and ".join(self.partial)
        tensor = next((self.gathered[word] for word in words if word in self.gathered), "an operand")
        if self.recipe is None or self.recipe.quantizers(self.gemm) is None:
            return tensor
        group = words[-1]
        kind = "scales" if group in self.codes_of else "quantized data"
        self.codes_of.add(group)
        return f"{kind} of {tensor}"


def _spread_layers(model: nn.Module) -> dict[str, Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and _compat.is_dtensor(module._parameters.get("weight"))
    }


def is_spread(model: nn.Module) -> bool:
    """Whether a weight of some ``fp8compile.Linear`` of the model is a DTensor."""
    return bool(_spread_layers(model))


def sends(model: nn.Module, *args: Any, **kwargs: Any) -> Sends:
    """List the collectives that a model's FP8 layers on DTensors issue in one forward and backward.

    Collectives depend only on the plan passed to ``parallelize_module``, not on values. You can therefore use a fake
    process group (``torch.testing._internal.distributed.fake_pg``) without other ranks. With a real process group, all
    ranks must call this. Collectives of FSDP2 are listed under the modules on which `fully_shard` was called, with the
    bytes of FP8 data and scales if weights are all-gathered in FP8. Modes, buffers, gradients and random states are
    restored.

    Args:
        model: A parallelized module. Compiled modules run in eager mode here.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The collectives. Print the result, or iterate over ``rows``. Functions that accept a process group, such as
        `fp8compile.parallel.column_parallel_linear`, are not included; see `docs/parallel.md` for their collectives.

    Raises:
        TypeError: The model is not a module.
        ValueError: No weight of a ``fp8compile.Linear`` of the model is a DTensor.
    """
    check_model("sends", model)
    layers = _spread_layers(model)
    if not layers:
        raise ValueError(
            "sends: no fp8compile.Linear of the model has a DTensor as its weight, so nothing is sharded over "
            "ranks. Convert the model, then apply a plan with torch.distributed.tensor.parallel.parallelize_module."
        )
    places = _Places(layers)
    listener = _Listener(places)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(kept_state(model, (args, kwargs)))
            stack.enter_context(listener)
            sharded = {name: module for name, module in model.named_modules() if _compat.is_fsdp(module)}
            for name, module in sharded.items():
                begin, end = partial(places.sharded.append, name), partial(places.sharded.pop, -1)
                stack.enter_context(_compat.fsdp_messages_told(module, begin, end))
            if sharded:
                _accumulate_gradients(model(*args, **kwargs))
            else:
                run_call(model, model, Call(args, kwargs), backward=True)
    finally:
        places.remove()
    return Sends(rows=tuple(replace(row, times=n) for row, n in listener.found.items()), layers=tuple(layers))
