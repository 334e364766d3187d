"""Watch the first forward after `convert`: warn if other code multiplies weights of FP8 layers.

Uses of parameters are also kept for the conversion report. In eager mode, hooks on the model begin and end the
watching, and remove themselves after the first forward. For compiled code, the graphs that Dynamo has made are read.
Nothing is added to a graph, its guards or its cache key.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import fx, nn

from fp8compile import _compat
from fp8compile.nn.convertible.convertible_layers import weight_slots
from fp8compile.nn.layer.forward_dtype import unnoted
from fp8compile.nn.layer.layer_registry import CONVERTED
from fp8compile.nn.parameter_uses.compiled import uses_in_graph
from fp8compile.nn.parameter_uses.eager import Watching
from fp8compile.nn.parameter_uses.owners import Owners
from fp8compile.nn.parameter_uses.past_forward import PAST_FORWARD, past_forward, settled
from fp8compile.nn.parameter_uses.uses import Uses, keep_uses, uses_seen

__all__ = ["stop_watching", "suppress_warnings", "watch_first_forward", "watched"]

STRICT = "_fp8compile_strict"  # on a layer: convert was called with strict=True
ROOTS: WeakSet[nn.Module] = WeakSet()  # models that convert was given
# on a module whose next forward is watched, and on its copies: `_Traced.count` when the hooks were registered
WATCHED = "_fp8compile_watched"


class _Traced:
    count = 0  # how often Dynamo has traced a hook of any module


class _Running(threading.local):
    module: nn.Module | None = None  # the module whose call ends the watching; None if `watched` ends it
    watching: Watching | None = None  # the mode that watches; None if no forward is watched
    is_suppressed: bool = False  # whether code runs inside `suppress_warnings`, and warns about nothing

    def begin(self, model: nn.Module, module: nn.Module | None) -> Watching:
        self.module, self.watching = module, Watching(model)
        return self.watching.__enter__()

    def end(self) -> Watching:
        watching, self.module, self.watching = self.watching, None, None
        assert watching is not None
        watching.__exit__(None, None, None)
        return watching


RUNNING = _Running()


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Context in which no use of a parameter raises or warns, and no forward counts as the first after `convert`.

    No forward counts as training either.

    The caller reports the uses of parameters itself.
    """
    before, RUNNING.is_suppressed = RUNNING.is_suppressed, True
    try:
        with unnoted():
            yield
    finally:
        RUNNING.is_suppressed = before


@contextmanager
def watched(model: nn.Module) -> Iterator[Watching]:
    """Context that yields a record of how code inside it uses a model's parameters, and warns of nothing itself."""
    with suppress_warnings():
        watching = RUNNING.begin(model, None)
        try:
            yield watching
        finally:
            RUNNING.end()


def watch_first_forward(model: nn.Module, layers: set[nn.Module], *, strict: bool) -> None:
    """Watch a model's next forward; warn if code outside of ``layers``, FP8 layers, multiplies their weights.

    With ``strict`` an error is raised instead.
    """
    ROOTS.add(model)
    for layer in layers if strict else ():
        setattr(layer, STRICT, True)
    # no hooks on its children: blocks that share compiled code would get guards on hooks of their own
    if model not in layers and not layers.isdisjoint(model.modules()):
        _hook(model)


def _hook(module: nn.Module) -> None:
    setattr(module, WATCHED, _Traced.count)
    if _begin not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_begin)
        module.register_forward_hook(_end, always_call=True)


def stop_watching(model: nn.Module) -> None:
    """Remove the hooks that `watch_first_forward` registered.

    If Dynamo has traced any module's hooks since then, the hooks stay and do nothing: compiled code has a guard on the
    number of hooks.
    """
    if vars(model).pop(WATCHED, None) != _Traced.count:
        return
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_begin, _end)]:
            del hooks[key]
            model._forward_hooks_always_called.pop(key, None)


@_compat.constant_when_traced
def _note_traced() -> None:
    """Count how often Dynamo has traced a module's hooks, and so has guarded the number of hooks.

    The count is global: an attribute of the module would be guarded too, and blocks could not share code.
    """
    _Traced.count += 1


def _begin(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        _note_traced()
    else:
        _untraced(_start)(module)


def _end(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        _untraced(_finish)(module)


def _untraced(fn: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return _compat.untraced(fn) if "torch._dynamo" in sys.modules else fn


def _start(module: nn.Module) -> None:
    if RUNNING.watching is not None or RUNNING.is_suppressed or WATCHED not in vars(module):
        return
    if not _compat.is_in_mode():  # under a tracer's mode, the call is no real forward
        RUNNING.begin(module, module)


def _finish(module: nn.Module) -> None:
    if RUNNING.module is not module:
        return
    watching = RUNNING.end()
    if sys.exc_info()[0] is None:  # a forward that failed did not show everything
        text = _told(watching.uses, watching.owners, RuntimeError)
        stop_watching(module)
        _warn(text)


def _in_graph(graph: fx.GraphModule, inputs: Sequence[Any], traced: object) -> None:
    """Record how a graph from Dynamo uses parameters; warn of weights that are multiplied outside FP8 layers.

    ``inputs`` are the graph's inputs, and ``traced`` is the module whose method was traced.
    """
    if not any(isinstance(each, nn.Parameter) for each in inputs):
        return
    modules = dict.fromkeys(module for model in (*ROOTS, *CONVERTED) for module in model.modules())
    owners = Owners(modules)
    _warn(_told(uses_in_graph(graph, inputs, owners, type(traced)), owners, torch._dynamo.exc.TorchRuntimeError))


_compat.when_graph_is_made(_in_graph)


def _told(uses: Uses, owners: Owners, error: type[RuntimeError]) -> str:
    """Keep ``uses`` for the report, and return a warning about weights multiplied outside of layers, or "".

    Raise ``error`` with the warning's text instead if one of the layers was converted with ``strict=True``.
    """
    uses = settled(uses, owners)
    weights = {slot for layer in CONVERTED for slot in weight_slots(layer)}
    if RUNNING.is_suppressed:
        keep_uses(Uses({slot: use for slot, use in uses.found.items() if slot not in weights}), weights)
        return ""
    seen = {layer: method for layer in CONVERTED if (method := past_forward(layer, uses))}
    new = {layer: method for layer, method in seen.items() if past_forward(layer, uses_seen(layer.modules())) is None}
    text = _text(new, owners) if new else ""
    if any(hasattr(layer, STRICT) for layer in new):
        raise error(text)
    keep_uses(uses, weights)
    return text


def _warn(text: str) -> None:
    if text:
        warnings.warn(text, stacklevel=3)


def _text(found: dict[nn.Module, str], owners: Owners) -> str:
    names = {module: name for model in (*ROOTS, *owners.modules[:1]) for name, module in model.named_modules()}
    called = [(names.get(layer) or type(layer).__name__, method) for layer, method in found.items()]
    shown = "; ".join(f"{method} {PAST_FORWARD}: {name}" for name, method in called[:5])
    more = f"; and {len(called) - 5} more" if len(called) > 5 else ""
    return (
        f"convert: a weight is used in a GEMM outside of its layer, which does not run in FP8. {shown}{more}. Call "
        f'the layer there, or exclude it with convert(..., filter=["!{called[0][0]}"]). See '
        "fp8compile.conversion_report(model)."
    )
