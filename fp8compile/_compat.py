"""The one file that knows PyTorch versions and PyTorch's private interfaces.

What differs (measured on 2.11.0, 2.13.0, 2.15.0):

    constants of a graph   register_opaque_type(typ="value") up to 2.13, register_custom_class(typ="constant") in 2.15
    group on a subclass    not in 2.11; 2.13 after ProcessGroup is registered; 2.15 as it is
    rowwise CPU GEMM       `torch._scaled_mm` takes a scale a row from 2.13
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library import opaque_object
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

try:
    from torch._custom_class_base import CustomClassBase as OpaqueBase  # 2.15
except ImportError:
    from torch._opaque_base import OpaqueBase  # to 2.13

__all__ = [
    "FsdpParameter",
    "fsdp_parameters",
    "is_fsdp",
    "is_fsdp_managed",
    "is_sharded_class",
    "keep_through_inference",
    "left_in_backward",
    "left_in_forward",
    "make_in_backward",
    "OpaqueBase",
    "all_gather_single",
    "allow_group_in_subclass",
    "as_kernel",
    "as_region",
    "async_tp",
    "constant_when_traced",
    "counting_versions",
    "concatenated",
    "cpu_has_rowwise_gemm",
    "declare_grad_dtype",
    "default_reduce_dtype",
    "dtypes_of_calls",
    "guard_or_false",
    "impl_autograd",
    "is_constant_type",
    "is_fusible",
    "is_dtensor",
    "local_itself",
    "is_exporting",
    "is_fake",
    "is_stand_in",
    "is_traced",
    "is_transformed",
    "is_unbacked",
    "is_static",
    "keep_grad_dtype",
    "never_recompute",
    "no_dispatch",
    "rebind_load_hooks",
    "reduce_scatter_single",
    "register_constant_type",
    "register_decomposition",
    "register_fallback",
    "register_lowering",
    "placement_of",
    "plain_alias",
    "rank_salt",
    "recomputed",
    "replicated",
    "scattered_like",
    "set_local_itself",
    "statically_true",
    "tell_apart_by_local_tensors",
    "strided_shard",
    "version_in_eager",
    "when_imported",
    "will_run",
]

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def register_constant_type(cls: type) -> None:
    """Tell torch.compile that instances of ``cls`` are constants: compared by ``==``, printed by ``__fx_repr__``."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    by_name = getattr(opaque_object, "_OPAQUE_TYPES_BY_NAME", {})
    if name in by_name:
        # the cell of a notebook, run again, makes a new class of the same name: it takes the old one's place
        by_name.pop(name)
        torch._C._unregister_opaque_type(name)
    if hasattr(opaque_object, "register_custom_class"):
        opaque_object.register_custom_class(cls, typ="constant")
    else:
        opaque_object.register_opaque_type(cls, typ="value")


def is_constant_type(cls: type) -> bool:
    """Whether instances of ``cls`` are constants to torch.compile."""
    ask = getattr(opaque_object, "is_custom_class", None) or opaque_object.is_opaque_type
    return ask(cls)


def is_stand_in(value: object) -> bool:
    """Whether an op's fake was given something without content for a constant: one that the traced function makes.

    It claims the constant's class, so only its type tells.
    """
    return type(value).__name__ == "FakeScriptObject"


# ---------------------------------------------------------------------------------- Inductor, lazily


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs callbacks right after a module was imported for the first time.

    Inductor's decomposition table costs a second to import, which `import fp8compile` must not pay; and no compile may
    ever see the table without our entries. So they are added in the moment the table comes into being.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.callbacks: list[Callable[[], None]] = []
        self.searching = threading.local()  # an import in another thread must still meet this finder

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != self.name or getattr(self.searching, "now", False):
            return None
        self.searching.now = True  # ask the finders behind this one; to look for a spec is not to import
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching.now = False
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)  # who asks the spec's loader for source gets it

    def exec_module(self, module: Any) -> None:
        # the module gets its own loader back: what it says of itself is as if we had not been here
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)  # if it fails or is interrupted, this stays for the next attempt
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for callback in self.callbacks:
            callback()


_PENDING: dict[str, _AfterImport] = {}


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` now if module ``name`` is there, else right after its first import."""
    if name in sys.modules and name not in _PENDING:
        callback()
        return
    if name not in _PENDING:
        hook = _PENDING[name] = _AfterImport(name)
        hook.callbacks.append(lambda: _PENDING.pop(name))
        sys.meta_path.insert(0, hook)
    _PENDING[name].callbacks.append(callback)


ABOVE_KERNELS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
)


def as_kernel(impl: Callable) -> Callable:
    """``impl`` as PyTorch's own kernels run, below autocast and autograd.

    Rowwise `torch._scaled_mm` on a CPU is a float32 matmul, which autocast would turn into a bfloat16 one. A kernel
    that ends in a reshape would return a view, which autograd lets nobody write to: no ReLU(inplace=True) after it.
    """

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(ABOVE_KERNELS):
            return impl(*args)

    return kernel


def register_decomposition(op: torch._ops.OpOverload, fn: Callable) -> None:
    """Let Inductor see through ``op``, by ``fn`` with the same arguments."""

    @functools.wraps(fn)
    def decompose(*args: Any) -> Any:
        return NotImplemented if _seeks_schema() else fn(*args)

    def register() -> None:
        from torch._inductor import decomposition

        decomposition.decompositions.pop(op, None)
        decomposition.register_decomposition([op])(decompose)
        decomposition.fast_random_decomps.cache_clear()  # holds a copy of the table

    when_imported("torch._inductor.decomposition", register)


def _seeks_schema() -> bool:
    """Whether PyTorch traces a region only to learn which of its inputs are written to.

    It does so at each call of the region, twice, and throws the graph away. An op's schema answers the question, and
    its decomposition would be traced for nothing: a quarter of the time that a joint graph takes.
    """
    from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP

    sought, frame = InvokeSubgraphHOP.gen_schema.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not sought:
        frame = frame.f_back
    return frame is not None


def register_lowering(op: torch._ops.OpOverload, fn: Callable) -> None:
    """Let Inductor lower ``op`` by ``fn``, from its IR to its IR."""

    def register() -> None:
        from torch._inductor import lowering

        lowering.register_lowering(op, type_promotion_kind=None)(fn)

    when_imported("torch._inductor.lowering", register)


def register_fallback(op: torch._ops.OpOverload) -> None:
    """Let Inductor call ``op`` where its decomposition returned NotImplemented."""

    def register() -> None:
        from torch._inductor import lowering

        lowering.make_fallback(op, warn=False, override_decomp=True)

    when_imported("torch._inductor.lowering", register)


# ---------------------------------------------------------------------------------- autograd


def impl_autograd(
    lib: torch.library.Library,
    op: torch._ops.OpOverload,
    setup_context: Callable | None,
    backward: Callable | None,
) -> None:
    """Give ``op`` its derivative; without ``backward``, one that raises.

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
            output = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        if setup_context is not None:
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
        return *backward(ctx, *grads), None, None

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
    function = type(f"{op._opname}_backward", (_SingleLevelFunction,), members)

    def kernel(keyset: Any, *args: Any) -> Any:
        # also where no argument requires a gradient: it may carry a tangent of forward mode, which has to raise
        with enable_single_level_autograd_function():
            # the op's own arguments first: ctx.needs_input_grad counts from them
            return function.apply(*args, keyset, (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()))

    lib.impl(op._opname, kernel, "Autograd", with_keyset=True)


VIEWS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "permute",
        "squeeze",
        "unsqueeze",
        "expand",
        "alias",
        "detach",
    )
} | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor}
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.prims.convert_element_type.default}


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands in a graph that is being traced, or has no data for another reason."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or bool(_nodes_of(tensor))


def _nodes_of(tensor: torch.Tensor) -> list[Any]:
    """The nodes that stand for a tensor in graphs that are being traced."""
    from torch.fx.experimental.proxy_tensor import _get_proxies

    return [proxy.node for proxy in _get_proxies(tensor)]


def never_recompute(tensor: torch.Tensor) -> None:
    """Let a traced backward have this tensor as the forward made it, checkpointed or not."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in _nodes_of(tensor):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def make_in_backward(tensor: torch.Tensor) -> None:
    """Let a traced backward make this tensor, where PyTorch's partitioner could have the forward make and keep it."""
    for node in _nodes_of(tensor):
        node.meta.update(IN_BACKWARD)


@contextmanager
def _marked(marks: dict[str, Any]) -> Iterator[None]:
    """What is traced inside carries these marks, which PyTorch's partitioner reads."""
    from torch.fx import traceback

    meta = traceback.current_meta
    before = {key: meta[key] for key in marks if key in meta}
    meta.update(marks)
    try:
        yield
    finally:
        for key in marks:
            meta.pop(key, None)
        meta.update(before)


def recomputed(*, in_backward: bool = False) -> AbstractContextManager[None]:
    """What is traced inside is never kept for the backward, which makes it once more, as with checkpointing.

    Args:
        in_backward: It belongs to the backward alone. PyTorch's partitioner would put it in the forward too where it
            needs no gradient, and as a collective is no dead code, it would be sent there for nothing.
    """
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    marks = {"recompute": CheckpointPolicy.MUST_RECOMPUTE}
    # inside of a checkpointed region its own number: PyTorch keeps what leads from one region into a later one
    marks["ac_graph_id"] = traceback.current_meta.get("ac_graph_id", 0)
    return _marked({**marks, **(IN_BACKWARD if in_backward else {})})


def left_in_forward() -> AbstractContextManager[None]:
    """What is traced inside stays in the forward, for nothing in the backward reads it.

    PyTorch's partitioner holds the wait for a collective for a side effect, and would have the backward repeat it and
    keep its operand. In a checkpointed region the backward repeats it together with what reads it.
    """
    from torch.fx import traceback

    return recomputed() if "ac_graph_id" in traceback.current_meta else _marked(IN_FORWARD)


IN_FORWARD = {"partitioner_tag": "must_be_in_forward"}
IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}


def left_in_backward() -> AbstractContextManager[None]:
    """What is traced inside stays in the backward, where PyTorch's partitioner could have it in the forward as well.

    It decides by sizes. Where those of ranks differ, so may what it decides, and a rank would wait in its forward for
    a message that another one sends in its backward.
    """
    return _marked(IN_BACKWARD)


def is_fusible(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is being traced comes out of code that Inductor fuses with what reads it.

    Inputs of the graph don't, nor do results of products and of other calls; nor does anything in eager mode.
    """
    for node in _nodes_of(tensor):
        while node.op == "call_function" and node.target in VIEWS:
            node = node.args[0]
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and (torch.Tag.pointwise in tags or node.target in COPIES):
            return True
    return False


def counting_versions() -> AbstractContextManager[None]:
    """Let ops inside of a `__torch_dispatch__` count writes, and give views the version counter of their base.

    PyTorch does both for the tensors that an op is called with, and leaves both out for those that they wrap.
    """
    is_excluded = False
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, is_excluded)


def version_in_eager(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to; None for one that stands in a graph, whose writes have an order there."""
    return tensor._version if type(tensor) is torch.Tensor else None


# ---------------------------------------------------------------------------------- the rest


def rebind_load_hooks(module: torch.nn.Module) -> None:
    """Hand the `load_state_dict` hooks of a module to the one that takes its place.

    Those registered with their module hold a weak reference to it, which would die with the one replaced.
    """
    hooks = module._load_state_dict_pre_hooks
    for key, hook in hooks.items():
        if getattr(hook, "with_module", False):
            hooks[key] = type(hook)(hook.hook, module)


def as_region(function: Callable, often: int) -> Callable:
    """A function that is compiled once wherever a graph calls it.

    Args:
        function: Takes and returns tensors, constants, and containers of them.
        often: How often one graph may call it with what needs other code, from 2.13 on; there PyTorch raises at more.
    """
    if TORCH_VERSION < (2, 13):
        return torch.compiler.nested_compile_region(function)
    return torch.compiler.nested_compile_region(function, max_reuse_entries=max(often, 8))


def is_exporting() -> bool:
    """Whether `torch.export` traces; False before 2.13, whose Dynamo answers True whoever traces."""
    return TORCH_VERSION >= (2, 13) and torch.compiler.is_exporting()


def statically_true(condition: Any) -> bool:
    """Whether a condition on sizes holds for every size that the graph is made for; never adds a guard."""
    if isinstance(condition, bool):  # of plain numbers, which is all that eager mode has
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_static(size: Any) -> bool:
    """Whether a size is a number, and no symbol for which a graph is made."""
    if not torch.compiler.is_compiling():
        return isinstance(size, int)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # to Dynamo, a symbol is an int too

    return has_static_value(size)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one without content, that a tracer computes shapes with."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def no_dispatch() -> AbstractContextManager[None]:
    """What is computed inside is on memory, whatever tracer is at work."""
    return torch._C._DisableTorchDispatch()


def guard_or_false(condition: Any) -> bool:
    """Truth of a condition on sizes; False where a size is not known when compiling."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_unbacked(size: Any) -> bool:
    """Whether a size is known only when the graph runs, and no condition on it can be decided before."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def new_dynamic_size() -> torch.SymInt:
    """A size that is data, for a fake kernel: `new_dynamic_size` of its context, without asking for permission.

    PyTorch gives one to ``fullgraph=True`` and otherwise breaks the graph, unless an option of Dynamo says that such
    operators are to be traced. A graph that may break has no reason to break here.
    """
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    context = torch.library.get_ctx()
    shapes = context._shape_env
    if shapes is None or shapes.allow_dynamic_output_shape_ops:
        return context.new_dynamic_size()
    size = shapes.create_unbacked_symint()
    _constrain_range_for_size(size, min=0)
    return size


def all_gather_single(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """The functional collective, which 2.13 gave this name."""
    from torch.distributed import _functional_collectives as funcol

    return (getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor)(x, dim, group)


def reduce_scatter_single(x: torch.Tensor, reduction: str, dim: int, group: Any) -> torch.Tensor:
    """The functional collective, which 2.13 gave this name."""
    from torch.distributed import _functional_collectives as funcol

    return (getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor)(x, reduction, dim, group)


def async_tp() -> bool:
    """Whether Inductor is asked to fuse products with the messages beside them (a private option to 2.15)."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and config._micro_pipeline_tp


def rank_salt() -> str:
    """What tells graphs of different ranks apart in a cache's key; empty outside of torch.distributed.

    A rank's graph holds where its part of a tensor begins. The key of AOTAutograd's cache is made of the graph before
    DTensors are taken apart, which is the same on all ranks, and the ranks of one machine share a folder: on 2.13 a
    rank ran the graph of another one, with wrong numbers.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    return f"-{distributed.get_rank()}"


def keep_through_inference(tensors_of: Callable[[torch.nn.Module], list[torch.Tensor]]) -> None:
    """Let `PipelineStage` leave these tensors of its module as they were before it finds out about shapes.

    It does so by a forward and a backward on uninitialised memory. From 2.15 it gives buffers their values back
    itself; where it has no method for the backward, none ran. Called once the module of PyTorch is there.
    """
    from torch.distributed.pipelining.stage import PipelineStage

    if hasattr(PipelineStage, "_pre_metadata_inference_backup") or not hasattr(
        PipelineStage, "_backward_metadata_inference"
    ):
        return
    infer, clean_up = PipelineStage._forward_metadata_inference, PipelineStage._post_metadata_inference_cleanup

    @functools.wraps(infer)
    def infer_shapes(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._kept = [(tensor, tensor.clone()) for tensor in tensors_of(self.submod)]
        return infer(self, *args, **kwargs)

    @functools.wraps(clean_up)
    def give_back(self: Any) -> None:
        with torch.no_grad():
            for tensor, before in vars(self).pop("_kept", ()):
                tensor.copy_(before)
        clean_up(self)

    PipelineStage._forward_metadata_inference = infer_shapes
    PipelineStage._post_metadata_inference_cleanup = give_back


def dtypes_of_calls(profiler: torch.profiler.profile) -> dict[int, list[str]]:
    """Dtypes of the arguments of each profiled call, by the id of its event.

    The profiler's own events have them from 2.13 on; Kineto's have them always.
    """
    return {event.correlation_id(): event.dtypes() for event in profiler.profiler.kineto_results.events()}


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor: by name, for its module costs half a second to import."""
    return type(tensor).__name__ == "DTensor"


def tell_apart_by_local_tensors() -> None:
    """Put what a DTensor wraps into the key of AOTAutograd's cache, where that has a key of its own.

    PyTorch's key holds the placements alone (2.13, 2.15): one that wraps codes met the code compiled for one that
    wraps a plain tensor, and the process died.
    """
    from torch.distributed.tensor import DTensor

    original = getattr(DTensor, "_stable_hash_for_caching", None)
    if original is None:  # 2.11
        return

    def key(self: torch.Tensor) -> str:
        local = getattr(local_itself(self), "_stable_hash_for_caching", None)
        return original(self) if local is None else f"{original(self)}-{local()}"

    DTensor._stable_hash_for_caching = key


def local_itself(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor wraps, and any other tensor as it is. ``to_local()`` may return a view of it."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def set_local_itself(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Give a tensor, or the one that a DTensor wraps, the memory of another one."""
    if is_dtensor(tensor):
        tensor._local_tensor = local  # .data of what it wraps, which is a view, would leave the old memory alive
    else:
        tensor.data = local


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """What every rank has of a DTensor that is replicated, and any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def placement_of(tensor: torch.Tensor) -> tuple | None:
    """How a DTensor lies on its mesh; None of any other tensor."""
    return tensor.placements if is_dtensor(tensor) else None


def scattered_like(grad: torch.Tensor | None, placements: tuple | None) -> torch.Tensor | None:
    """The gradient of an input: what is a sum over ranks is cut at once where the input, by its placements, was.

    Left a sum, a norm before the layer would go on with it and have ranks add three float32 tensors in its place.
    """
    if placements is None or not is_dtensor(grad):
        return grad
    cut = [
        wanted if own.is_partial() and wanted.is_shard() else own
        for own, wanted in zip(grad.placements, placements, strict=True)
    ]
    return grad if cut == list(grad.placements) else grad.redistribute(placements=cut)


def declare_grad_dtype(ctx: Any, dtype: torch.dtype, used: torch.dtype) -> None:
    """Have a backward get the gradient of its op's one result as FSDP2 gets that of a parameter that it gathered.

    From 2.15 on a norm's float32 gradient of a bfloat16 weight reaches the sum over ranks as it is; before, autograd
    rounds it to the dtype of the weight first.

    Args:
        ctx: Of the op, in its ``setup_context``.
        dtype: In which ranks add. Gradients that are to be cast to a wider one come as they are.
        used: Of the result.
    """
    if TORCH_VERSION >= (2, 15) and ctx.needs_input_grad[0]:
        ctx.set_output_grad_dtype(None if dtype.itemsize > used.itemsize else dtype)


def default_reduce_dtype(own: torch.dtype, used: torch.dtype) -> torch.dtype:
    """The dtype in which FSDP2 sums a parameter's gradients if no policy names one: its own, or that of its use."""
    return own if TORCH_VERSION >= (2, 15) else used


def will_run(ctx: Any, place: int) -> bool:
    """Whether this backward goes on to where a tensor comes from: ``torch.autograd.grad`` goes where it is asked to.

    Args:
        ctx: Of an op, in its ``backward``.
        place: Of the tensor, among the op's arguments that are tensors.
    """
    node = ctx.next_functions[place][0]
    return hasattr(node, "variable") or torch._C._will_engine_execute_node(node)  # of a leaf PyTorch does not say it


def keep_grad_dtype(source: torch.Tensor, target: torch.Tensor) -> None:
    """Have gradients of a parameter in the dtype that was set for another one; before 2.15 FSDP2 does not ask."""
    if getattr(source, "_has_grad_dtype_override", False):
        target.grad_dtype = source.grad_dtype


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor without history on the memory of a subclass that has memory, with the same version counter."""
    with no_dispatch():
        return tensor.detach()


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called for a module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def is_sharded_class(cls: type) -> bool:
    """Whether `fully_shard` or `replicate` made a class in place of a module's own; by name, to import neither."""
    return any(base.__name__ in ("FSDPModule", "ReplicateModule") for base in cls.__mro__)


def is_fsdp_managed(module: torch.nn.Module) -> bool:
    """Whether a module's parameters are among those that FSDP, of itself or of a module above, shards and frees."""
    return getattr(module, "_is_fsdp_managed_module", False)


class FsdpParameter:
    """What FSDP2 knows of a parameter that it manages."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def module(self) -> torch.nn.Module:
        """The first of the modules that have it."""
        return self._parameter._module_info.module

    @property
    def name(self) -> str:
        """Its name there."""
        return self._parameter._module_info.param_name

    @property
    def sharded(self) -> torch.Tensor:
        """The parameter as optimizers see it, a DTensor; `load_state_dict` may make it another one."""
        return self._parameter.sharded_param

    @property
    def mesh(self) -> Any:
        """Whose ranks have its shards, one dim."""
        return self._parameter.shard_mesh

    @property
    def size(self) -> torch.Size:
        """The size of what these ranks have together."""
        return self._parameter._orig_size

    @property
    def mp_policy(self) -> Any:
        """Mixed precision."""
        return self._parameter.mp_policy

    @property
    def device(self) -> torch.device:
        """Where it is gathered."""
        return self._parameter.device


def fsdp_parameters() -> Iterator[FsdpParameter]:
    """All parameters that FSDP2 manages in this process.

    It tells a tensor of its mesh and policy when it gathers it, too late for who has to know all tensors at once.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # 2.12
            groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) is not None else []
        for group in groups:
            yield from map(FsdpParameter, group.fsdp_params)


@cache
def allow_group_in_subclass() -> None:
    """Make a ProcessGroup acceptable as an inner value of a tensor subclass.

    Raises:
        RuntimeError: This PyTorch takes every inner value for a tensor.
    """
    if TORCH_VERSION < (2, 12):
        raise RuntimeError(
            f"a process group on a QuantizedTensor needs PyTorch 2.12 or later, this is {torch.__version__}. "
            "Upgrade PyTorch, or quantize without group=."
        )
    from torch.distributed import device_mesh

    if hasattr(device_mesh, "_register_distributed_opaque_types"):  # 2.13; at import in 2.15
        device_mesh._register_distributed_opaque_types()


def has_groups(mesh: Any) -> bool:
    """Whether a mesh has process groups; one made to ask how an op would be spread over ranks has none."""
    return hasattr(mesh, "_dim_group_names")  # its get_group raises without, and nothing public tells


def concatenated(first: Any, second: Any) -> Any:
    """The mesh that has the dims of two others, parts of one mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate([first, second])


def strided_shard(dim: int, parts: int) -> Any:
    """The placement of a tensor of which each of so many parts was cut along ``dim`` once more."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jvp) or forward-mode autograd looks on, in eager mode."""
    if torch.compiler.is_compiling():
        return False  # Dynamo can't trace the question
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
    return is_dual or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def constant_when_traced(fn: Callable) -> Callable:
    """Let Dynamo call ``fn`` while it traces, and take the result for a constant.

    For texts of errors: Dynamo can't trace the `repr` of every object, and its own error would take their place.
    `torch.compiler.assume_constant_result` is this line behind an import of Dynamo, which costs a second.
    """
    fn._dynamo_marked_constant = True
    return fn


def cpu_has_rowwise_gemm() -> bool:
    """Whether `torch._scaled_mm` on a CPU takes a scale a row."""
    return TORCH_VERSION >= (2, 13)
