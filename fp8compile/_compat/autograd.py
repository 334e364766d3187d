"""Private interfaces of autograd and dispatcher: derivatives, autocast, version counters, saved-tensor hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from fp8compile._compat.tracing import no_dispatch

__all__ = [
    "active_saved_tensor_hooks",
    "as_kernel",
    "autocast_dtype",
    "counting_versions",
    "impl_autograd",
    "is_written_in_graph",
    "loop_under_vmap",
    "keep_grad_dtype",
    "lost_by_hooks",
    "plain_alias",
    "runs_in_backward",
    "saved_by_checkpoint",
    "saved_tensor_context",
    "shares_memory",
    "uncounted_write",
    "version_in_eager",
    "will_run",
]

FRAMES = 24  # from a hook up to the function that saves: calls of a graph module are a dozen
ABOVE_KERNELS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
)


def impl_autograd(
    lib: torch.library.Library,
    op: torch._ops.OpOverload,
    setup_context: Callable[..., Any] | None,
    backward: Callable[..., Any],
    jvp: Callable[..., Any],
    prepare: Callable[..., Any] | None = None,
) -> None:
    """Register the derivative of an operator.

    ``setup_context(ctx, args, output)`` saves tensors; ``backward(ctx, *grads)`` and ``jvp(ctx, *tangents)`` are those
    of an autograd.Function. If gradients are recorded, the op is called below autograd with the arguments that
    ``prepare(needs_input_grad, args)`` returns.

    Unlike `torch.library.register_autograd`, this works with `torch.func.grad`, and calls ``jvp`` with
    `torch.func.jvp` instead of silently returning zeros. AOTAutograd's cache accepts the derivative.
    """

    def forward(ctx: Any, *args_and_caller: Any) -> Any:
        *args, keyset, modes = args_and_caller
        # apply() switched both modes off; levels of torch.func below this one need the caller's modes to record
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.set_grad_enabled(modes[0]),
            forward_ad._set_fwd_grad_enabled(modes[1]),
        ):
            own = args if prepare is None or not modes[0] else prepare(ctx.needs_input_grad, args)
            output = op.redispatch(keyset & torch._C._after_autograd_keyset, *own)
        if setup_context is not None and modes[0]:  # without gradients there is no backward to save anything for
            setup_context(ctx, tuple(args), output)
        return output

    def call_backward(ctx: Any, *grads: Any) -> Any:
        return *backward(ctx, *grads), None, None

    members = {
        "forward": staticmethod(forward),
        "jvp": staticmethod(jvp),
        "backward": staticmethod(call_backward),
    }
    function: Any = type(f"{op._opname}_backward", (_SingleLevelFunction,), members)

    def kernel(keyset: Any, *args: Any) -> Any:
        if _records_nothing():
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        # run even if no argument requires a gradient: a forward-mode tangent of an argument has to raise
        with enable_single_level_autograd_function():
            # the op's own arguments first: ctx.needs_input_grad counts from them
            return function.apply(*args, keyset, (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()))

    lib.impl(op._opname, kernel, "Autograd", with_keyset=True)


def loop_under_vmap(lib: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Let `torch.vmap` call an operator that takes a list of tensors, once for each entry of a batch.

    PyTorch itself does so for all other operators, and raises for these.
    """
    kinds = [str(each.type) for each in op._schema.arguments]
    if not any("List" in kind and "Tensor" in kind for kind in kinds):
        return

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        dims = pytree.tree_leaves(in_dims)
        found = []
        for index in range(info.batch_size):
            own = [each if dim is None else each.select(dim, index) for each, dim in zip(leaves, dims, strict=True)]
            found.append(op(*pytree.tree_unflatten(own, spec)))
        if isinstance(found[0], torch.Tensor):
            return torch.stack(found), 0
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])

    torch.library.register_vmap(op._schema.name, rule, lib=lib)


def is_written_in_graph(tensor: torch.Tensor) -> bool:
    """Whether the graph that AOTAutograd is tracing has written to a tensor's memory so far, through any alias."""
    if type(tensor) is torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FunctionalTensor) and torch._functionalize_has_data_mutation(tensor.elem)


def _records_nothing() -> bool:
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts on a tensor's device; None if autocast is off there, or on ``meta``."""
    if not torch._C._is_any_autocast_enabled():  # takes less time than to ask for one device
        return None
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def counting_versions() -> AbstractContextManager[None]:
    """Context in which ops called in a `__torch_dispatch__` increase the version counters of tensors they write to.

    Views made in this context share their base's version counter. By default PyTorch counts writes to a wrapper
    tensor, but not writes to the tensors inside it.
    """
    is_excluded = False
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, is_excluded)


def uncounted_write(memory: torch.Tensor) -> AbstractContextManager[None]:
    """Context in which writes to ``memory`` do not change its version counter.

    A backward that saved ``memory`` then raises no error, and reads the new content.
    """
    return torch.autograd._unsafe_preserve_version_counter(memory)


def version_in_eager(tensor: torch.Tensor) -> int | None:
    """Return a tensor's version counter; None for traced tensors and tensor subclasses."""
    return tensor._version if type(tensor) is torch.Tensor else None


def _uses_of_memory(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_USES_OF_ONE = _uses_of_memory(torch.empty(1))


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether another tensor, such as a view, or another process may write to the memory of a real tensor."""
    return _uses_of_memory(tensor) > _USES_OF_ONE or (tensor.is_cpu and tensor.is_shared())


def runs_in_backward() -> bool:
    """Whether the caller runs in the autograd engine: in a backward, or in a forward that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def will_run(ctx: Any, place: int) -> bool:
    """Whether the running backward also computes the gradient of an op's tensor argument number ``place``.

    ``torch.autograd.grad`` skips arguments that do not depend on its ``inputs``. ``ctx`` is the op's autograd context.
    """
    node = ctx.next_functions[place][0]
    return hasattr(node, "variable") or torch._C._will_engine_execute_node(node)  # the call does not take leaves


def saved_tensor_context() -> dict[str, Any] | None:
    """Return what AOTAutograd passes to a saved-tensor hook while it inlines the hook; None at other times.

    The entries are ``_node``, the saved node, and ``_fw_graph`` and ``_bw_graph``, the forward and backward graphs.
    """
    from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context

    return _get_saved_tensor_hook_context()


def saved_by_checkpoint() -> bool:
    """Whether the pack hook that calls this got an input of a ``torch.utils.checkpoint`` region; reads the stack."""
    frame: Any = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return False
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "save_inputs" and file == torch.utils.checkpoint.__file__:
            return True
        if name == "apply" and getattr(frame.f_locals.get("cls"), "__name__", "") == "_NoopSaveInputs":
            return True
        frame = frame.f_back
    return False


def lost_by_hooks(backward: fx.Graph) -> str | None:
    """Describe the first input of a backward graph that AOTAutograd may lose if it inlines hooks; None without one.

    Up to PyTorch 2.15 AOTAutograd loses inputs that are neither tensors nor numbers, and may lose tensors that are
    attributes of an autograd ``ctx``.
    """
    for place in backward.find_nodes(op="placeholder"):
        value = place.meta.get("val")
        if not isinstance(value, (torch.Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"a {getattr(value, 'script_class_name', type(value).__name__)}"
        if place.meta.get("saved_tensor_with_no_vc_check"):
            return "a tensor as an attribute of an autograd.Function's ctx"
    return None


def active_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost active (pack, unpack) saved-tensor hooks; None if there are none."""
    ignore_is_tracing = True
    return torch._C._autograd._top_saved_tensors_default_hooks(ignore_is_tracing)


def keep_grad_dtype(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the ``grad_dtype`` that a user set on parameter ``source`` to parameter ``target``.

    FSDP2 reads ``grad_dtype`` from PyTorch 2.15 on.
    """
    if getattr(source, "_has_grad_dtype_override", False):
        target.grad_dtype = source.grad_dtype


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached plain tensor that shares memory and version counter with a tensor subclass."""
    with no_dispatch():
        return tensor.detach()


def as_kernel(impl: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``impl`` so that it runs below autocast and autograd, like PyTorch's own kernels.

    Otherwise autocast would turn the float32 matmul of rowwise `torch._scaled_mm` on a CPU into bfloat16, and autograd
    would forbid in-place writes, such as ReLU(inplace=True), to results that are views.
    """

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(ABOVE_KERNELS):
            return impl(*args)

    return kernel
