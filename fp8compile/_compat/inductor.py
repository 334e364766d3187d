"""Inductor's tables of decompositions and lowerings, filled when it is imported, and what a rank compiles."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "as_kernel",
    "async_tp",
    "rank_salt",
    "register_decomposition",
    "register_fallback",
    "register_lowering",
    "when_imported",
]


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


def register_fallback(op: torch._ops.OpOverload, *, contiguous: bool = False) -> None:
    """Let Inductor call ``op`` where it has no decomposition, or that returned NotImplemented.

    Args:
        op: The operator.
        contiguous: Whether its tensors have to be laid down contiguous, as they are in eager mode.
    """

    def register() -> None:
        from torch._inductor import lowering

        layout = lowering.require_contiguous if contiguous else None
        lowering.make_fallback(op, layout, warn=False, override_decomp=True)

    when_imported("torch._inductor.lowering", register)


def _share_constant_types() -> None:
    """Let a file of generated code know the classes of constants that regions in it name.

    A call of an op with a quantizer names the quantizer's class. PyTorch (2.11 to 2.15) hands a file those that its
    outermost graph names: a call inside of a region is a NameError when it runs.
    """
    from torch._inductor.graph import SubgraphLowering

    plain = SubgraphLowering.__init__

    @functools.wraps(plain)
    def with_types_of_parent(self: Any, parent: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, parent, *args, **kwargs)
        self.opaque_value_type_classes = parent.opaque_value_type_classes

    SubgraphLowering.__init__ = with_types_of_parent


when_imported("torch._inductor.graph", _share_constant_types)


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
