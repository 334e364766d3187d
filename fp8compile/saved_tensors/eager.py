"""Saved tensors in eager mode: autograd asks for each of them before the operator that saves it runs.

The hook returns a `Kept`, which still has the tensor. The next operators tell what it is: the one that takes the tensor
decides. Then the codes take the tensor's place.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from fp8compile import _compat
from fp8compile.saved_tensors.packing import PYTHON_OF_STEPS, Packing
from fp8compile.saved_tensors.reading import GEMMS, NONLINEAR, NORMS, SPREADS, SUMS
from fp8compile.saved_tensors.choice import SavedAsCodes
from fp8compile.saved_tensors.saved_tensor import SavedTensor

__all__ = ["Kept", "Watch", "packed_in_eager", "unpacked_in_eager"]

PATIENCE = 8  # operators that may run before one takes a tensor: a view, a cast, a product that saved it after it ran
SAME = {"view", "_unsafe_view", "transpose", "permute", "t", "unsqueeze", "squeeze", "slice", "select", "alias"}
COPIED = {"_to_copy", "clone", "detach", "expand", "split", "split_with_sizes"}
NONLINEAR_NODES = ("Silu", "Gelu", "Sigmoid", "Tanh", "Softplus", "Mish", "Hardswish", "Erf", "Exp")
FRAMES = 24  # from a hook up to the function that saves: calls of a graph module are a dozen
CHECKPOINT = torch.utils.checkpoint.__file__
WATCHES = threading.local()


class Kept:
    """What autograd keeps in place of a tensor: the tensor until its kind is known, then the tensor or its codes."""

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value
        self.version = value._version
        self.same: list[Tensor] = [value]  # tensors with its values
        self.squares: list[Tensor] = []  # tensors with their squares
        self.seen = 0
        self.packing: Packing | None = None
        self.parts: tuple[Tensor, ...] = ()
        self.spec: Any = None  # of a DTensor

    def settle(self, kind: str, saved: SavedAsCodes) -> None:
        """Pack the tensor, or keep it as it is."""
        value = self.value
        self.same, self.squares = [], []
        if value is None or value._version != self.version:
            return
        local = _compat.local_itself(value)
        if not saved.chooses(SavedTensor(kind=kind, shape=tuple(local.shape), dtype=local.dtype)):
            return
        with torch.no_grad():
            packing = Packing.of(local, saved.quantizer_for(None))
            if packing is None:
                return
            self.parts = packing.pack(local.detach(), PYTHON_OF_STEPS)
        self.packing, self.spec = packing, value._spec if _compat.is_dtensor(value) else None
        self.value = None

    def tensor(self) -> Tensor:
        """The tensor, for the backward."""
        if self.value is not None:
            if self.value._version != self.version:
                raise RuntimeError(
                    f"saved_as_codes: a tensor of shape {tuple(self.value.shape)} that the backward reads was written to "
                    "in place after the forward saved it. Write out of place, or clone the tensor first."
                )
            return self.value
        assert self.packing is not None, "a tensor that is gone was packed"
        local = self.packing.unpack(self.parts)
        return local if self.spec is None else _compat.dtensor_of(local, self.spec)


class Watch(_compat.OnlookingMode):
    """Sees the operators that run in a context, and tells by them what saved tensors are."""

    supports_higher_order_operators = True  # a compiled region may run as one

    def __init__(self, saved: SavedAsCodes) -> None:
        super().__init__()
        self.saved = saved
        self.pending: list[Kept] = []
        # A tensor that two operators save is packed once. Keys are identities, values hold nothing alive.
        self.known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Kept]]] = {}

    def __enter__(self) -> Any:
        _watches().append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _watches().remove(self)
        return super().__exit__(*error)

    def keep(self, x: Tensor) -> Any:
        """What autograd keeps in place of ``x``."""
        if (found := self.known.get(id(x))) is not None:
            source, version, kept = found[0](), found[1], found[2]()
            if source is x and version == x._version and kept is not None:
                return kept
        kept = Kept(x)
        self.known[id(x)] = weakref.ref(x, lambda _, key=id(x): self.known.pop(key, None)), x._version, weakref.ref(kept)
        if _is_checkpoints_input():
            kept.settle("checkpoint", self.saved)
        else:
            self.pending.append(kept)
        return kept

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator, and settle the tensors that it takes."""
        if self.pending and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for kept in self.pending:
                if _is_in(list(args), kept.same):
                    kept.settle("other", self.saved)
        result = func(*args, **kwargs)
        if self.pending:
            self.pending = [kept for kept in self.pending if not self._settled(kept, func, args, result)]
        return result

    def settle(self) -> None:
        """Settle the tensors that no operator took."""
        for kept in self.pending:
            kept.settle("other", self.saved)
        self.pending = []

    def _settled(self, kept: Kept, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        takes = _is_in(given, kept.same)
        kind = None
        if takes or _is_in(given, kept.squares):
            kind = _kind(func, args, result, kept)
        kept.seen += 1
        if kind is None and kept.seen >= PATIENCE:
            kind = "other"
        if kind is not None:
            kept.settle(kind, self.saved)
        return kind is not None


def _is_in(given: list[Any], tensors: list[Tensor]) -> bool:
    return any(each is tensor for tensor in tensors for each in given)


def _kind(func: Any, args: tuple[Any, ...], result: Any, kept: Kept) -> str | None:
    """The kind of a tensor that an operator takes; None if the operator tells nothing yet, as a view does."""
    name = func._overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else str(func)
    of_squares = _is_in(list(args), kept.squares)
    if name in SAME or name in COPIED:
        made = [each for each in (result if isinstance(result, (list, tuple)) else [result])]
        (kept.squares if of_squares else kept.same).extend(made)
        return None
    if of_squares:
        return "norm" if name in SUMS and len(args) > 1 else "other"
    if name in NORMS:
        return "norm" if args and _is_in([args[0]], kept.same) else "other"
    if name in SPREADS:
        return "norm"
    if (name == "pow" and args[1] == 2) or (name in ("mul", "square") and args[0] is args[-1]):
        kept.squares.append(result)
        return None
    if name in NONLINEAR or (name == "mul" and any(map(_is_of_nonlinear, args))):
        return "activation"
    if "attention" in name:
        return "attention"
    return "gemm" if name in GEMMS or getattr(func, "namespace", "") == "fp8compile" else "other"


def _is_of_nonlinear(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None and value.grad_fn.name().startswith(NONLINEAR_NODES)


def _is_checkpoints_input() -> bool:
    """Whether `torch.utils.checkpoint` saves the inputs of a region: it calls the hook itself, up to 2.11 by autograd."""
    frame: Any = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return False
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "save_inputs" and file == CHECKPOINT:
            return True
        if name == "apply" and getattr(frame.f_locals.get("cls"), "__name__", "") == "_NoopSaveInputs":
            return True
        frame = frame.f_back
    return False


def _watches() -> list[Watch]:
    if not hasattr(WATCHES, "active"):
        WATCHES.active = []
    found: list[Watch] = WATCHES.active
    return found


def _may_be_packed(x: Tensor) -> bool:
    """Whether the forward made a floating-point tensor of rows, and not its caller; saved results have no history."""
    source = x if x._base is None else x._base
    return (
        x.grad_fn is not None
        and source.grad_fn is not None
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.ndim > 1
        and x.shape[-1] > 1
        and type(_compat.local_itself(x)) is Tensor
        and not _compat.is_traced(_compat.local_itself(x))
    )


def packed_in_eager(x: Tensor, saved: SavedAsCodes) -> Any:
    """What autograd keeps in place of ``x``; ``x`` itself if the context was left or ``x`` is never packed."""
    watch = next((each for each in reversed(_watches()) if each.saved == saved), None)
    return watch.keep(x) if watch is not None and _may_be_packed(x) else x


def unpacked_in_eager(kept: Kept) -> Tensor:
    """The tensor, from what `packed_in_eager` returned."""
    return kept.tensor()
