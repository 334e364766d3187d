"""PyTorch's autograd: derivatives of our ops, version counters, dtypes of gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fp8compile._compat.tracing import no_dispatch

__all__ = [
    "counting_versions",
    "impl_autograd",
    "keep_grad_dtype",
    "plain_alias",
    "runs_in_backward",
    "uncounted_write",
    "version_in_eager",
    "will_run",
]


def impl_autograd(
    lib: torch.library.Library,
    op: torch._ops.OpOverload,
    setup_context: Callable[..., Any] | None,
    backward: Callable[..., Any] | None,
    prepare: Callable[..., Any] | None = None,
) -> None:
    """Register the derivative of an operator. Without ``backward``, a backward pass through the op raises.

    ``prepare(needs_input_grad, args)`` gives the arguments of the call below autograd, where gradients are recorded.

    `torch.library.register_autograd` would do, but breaks `torch.func.grad` and makes `torch.func.jvp` return zeros
    without a word. This form works with the first and raises with the second, and AOTAutograd caches it all the same.
    """
    name = str(op).removesuffix(".default").replace(".", "::")

    def forward(ctx: Any, *args_and_caller: Any) -> Any:
        *args, keyset, modes = args_and_caller
        # apply() switched both modes off; the levels of torch.func below this one need the caller's, or record nothing
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.set_grad_enabled(modes[0]),
            forward_ad._set_fwd_grad_enabled(modes[1]),
        ):
            own = args if prepare is None or not modes[0] else prepare(ctx.needs_input_grad, args)
            output = op.redispatch(keyset & torch._C._after_autograd_keyset, *own)
        if setup_context is not None and modes[0]:  # else there is no backward, and nothing to keep for it
            setup_context(ctx, tuple(args), output)
        return output

    def no_backward(ctx: Any, *grads: Any) -> Any:
        if op.namespace != "fp8compile":
            raise RuntimeError(f"{name} has no derivative: it was registered with backward=None. Detach its inputs.")
        raise RuntimeError(
            f"{name} has no derivative. Of the products only fp8compile::linear and grouped_linear can be "
            "differentiated, and only once: take second derivatives of the unconverted model (fp8compile.revert)."
        )

    def call_backward(ctx: Any, *grads: Any) -> Any:
        return *backward(ctx, *grads), None, None  # type: ignore[misc]  # `members` has it where backward is not None

    def no_jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            f"{name} has no forward-mode derivative. Use reverse mode, or take it of the unconverted model "
            "(fp8compile.revert)."
        )

    members = {
        "forward": staticmethod(forward),
        "jvp": staticmethod(no_jvp),
        "backward": staticmethod(no_backward if backward is None else call_backward),
    }
    function: Any = type(f"{op._opname}_backward", (_SingleLevelFunction,), members)

    def kernel(keyset: Any, *args: Any) -> Any:
        if _records_nothing():
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        # also where no argument requires a gradient: it may carry a tangent of forward mode, which has to raise
        with enable_single_level_autograd_function():
            # the op's own arguments first: ctx.needs_input_grad counts from them
            return function.apply(*args, keyset, (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()))

    lib.impl(op._opname, kernel, "Autograd", with_keyset=True)


def _records_nothing() -> bool:
    """Whether neither reverse nor forward mode nor a transform of `torch.func` can ask for a derivative of a call."""
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def counting_versions() -> AbstractContextManager[None]:
    """Let ops inside of a `__torch_dispatch__` count writes, and give views the version counter of their base.

    PyTorch does both for the tensors that an op is called with, and leaves both out for those that they wrap.
    """
    is_excluded = False
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, is_excluded)


def uncounted_write(memory: torch.Tensor) -> AbstractContextManager[None]:
    """Write to memory without counting a version, as FSDP2's gathers do; a backward that saved it does not notice."""
    return torch.autograd._unsafe_preserve_version_counter(memory)


def version_in_eager(tensor: torch.Tensor) -> int | None:
    """A tensor's version counter; None for a traced tensor, because a graph orders writes by itself."""
    return tensor._version if type(tensor) is torch.Tensor else None


def runs_in_backward() -> bool:
    """Whether the autograd engine is running: in a backward, or in a forward that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def will_run(ctx: Any, place: int) -> bool:
    """Whether this backward continues to the origin of a tensor; ``torch.autograd.grad`` goes only where it is asked.

    Args:
        ctx: Context of an op, in its ``backward``.
        place: Index of the tensor, among the op's arguments that are tensors.
    """
    node = ctx.next_functions[place][0]
    return hasattr(node, "variable") or torch._C._will_engine_execute_node(node)  # of a leaf PyTorch does not say it


def keep_grad_dtype(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the gradient dtype that was set for one parameter to another; before 2.15 FSDP2 does not use it."""
    if getattr(source, "_has_grad_dtype_override", False):
        target.grad_dtype = source.grad_dtype


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor, without history, on a subclass's memory and with its version counter."""
    with no_dispatch():
        return tensor.detach()
