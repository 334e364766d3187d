"""Save tensors as codes in eager mode, where autograd's pack hook runs before the operator that saves.

The hook can't know what reads the tensor (a norm, an activation, ...), so it returns a `Kept` that still holds the
tensor. The next operator tells, and codes then replace the tensor if this kind was chosen.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8compile import _compat
from fp8compile.saved_tensors.choice import SavedAsCodes
from fp8compile.saved_tensors.operator_tables import COPIES, NONLINEAR, NORMS, SUMS, VIEWS, kind_of_call, operator_name
from fp8compile.saved_tensors.packing import PYTHON_OF_STEPS, Packing
from fp8compile.saved_tensors.saved_tensor import SavedTensor

__all__ = ["Kept", "Watch", "packed_in_eager"]

WATCHES = threading.local()


class Kept:
    """What autograd saves for a tensor: the tensor at first, its codes once `settle` has chosen them."""

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value
        self.version = value._version
        self.square: Tensor | None = None  # the result of the operator that squared it
        self.packing: Packing | None = None
        self.parts: tuple[Tensor, ...] = ()
        self.spec: Any = None  # of a DTensor

    def settle(self, kind: str, saved: SavedAsCodes) -> None:
        """Replace the tensor by codes if ``saved`` chooses tensors of this kind; otherwise keep the tensor."""
        value, self.square = self.value, None
        if value is None or value._version != self.version:
            return
        local = _compat.local_itself(value)
        if not saved.chooses(SavedTensor(kind=kind, shape=tuple(local.shape), dtype=local.dtype)):
            return
        packing = Packing.of(local, saved.quantizer_for(None))
        if packing is None:
            return
        with torch.no_grad():
            self.parts = packing.pack(local.detach(), PYTHON_OF_STEPS)
        self.packing, self.spec = packing, value._spec if _compat.is_dtensor(value) else None
        self.value = None

    def tensor(self) -> Tensor:
        """The saved tensor, dequantized if it was stored as codes."""
        if self.value is not None:
            if self.value._version != self.version:
                raise RuntimeError(
                    f"saved_as_codes: a tensor of shape {tuple(self.value.shape)} that the backward needs was "
                    "modified in place after the forward saved it. Use an out-of-place operation, or modify a clone "
                    "of the tensor."
                )
            return self.value
        assert self.packing is not None, "a tensor that is gone was packed"
        local = self.packing.unpack(self.parts)
        return local if self.spec is None else _compat.dtensor_of(local, self.spec)


class Watch(_compat.OnlookingMode):
    """Dispatch mode that sees each operator, to determine the kind of the tensors saved just before it."""

    supports_higher_order_operators = True  # a compiled region may run as one

    def __init__(self, saved: SavedAsCodes, name: str) -> None:
        super().__init__()
        self.saved, self.name = saved, name
        self.pending: list[Kept] = []
        # A tensor that two operators save is packed once. Neither keys nor values keep anything alive.
        self.known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __enter__(self) -> Any:
        _watches().append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _watches().remove(self)
        return super().__exit__(*error)

    def keep(self, x: Tensor) -> Any:
        """Return the `Kept` that autograd saves for ``x``; the next operator tells the kind of ``x``."""
        kept = self.known[x]() if x in self.known else None
        if kept is not None and kept.version == x._version:
            return kept
        kept = Kept(x)
        self.known[x] = weakref.ref(kept)
        if _compat.saved_by_checkpoint():
            kept.settle("checkpoint", self.saved)
        else:
            self.pending.append(kept)
        return kept

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Settle the saved tensors whose kind the operator ``func`` tells, then call it and return its result.

        To settle a tensor is to replace it by codes if its kind was chosen (`Kept.settle`).
        """
        if not self.pending or operator_name(func) in VIEWS | COPIES:
            return func(*args, **kwargs)
        pending, self.pending = self.pending, []
        for kept in pending:
            if (kind := _kind(func, args, kept)) is None:
                self.pending.append(kept)
            else:
                kept.settle(kind, self.saved)
        result = func(*args, **kwargs)
        for kept in self.pending:
            kept.square = result
        return result

    def settle(self) -> None:
        """Settle all remaining tensors as kind "other", because no operator follows."""
        for kept in self.pending:
            kept.settle("other", self.saved)
        self.pending = []


def _kind(func: Any, args: tuple[Any, ...], kept: Kept) -> str | None:
    """Return a saved tensor's kind from ``func``, the operator that runs after the tensor was saved.

    None if ``func`` squares the tensor: the operator after it tells whether the tensor is the input of a norm.
    """
    name, x = operator_name(func), kept.value
    if kept.square is not None:
        return "norm" if name in SUMS and args[0] is kept.square and len(args) > 1 else "other"
    given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    if not any(each is x for each in given):
        return "other"
    if (name == "pow" and args[1] == 2) or name == "square" or (name == "mul" and args[0] is args[1]):
        return None
    if name in SUMS or (name in NORMS and args[0] is x):
        return "norm"
    if name in NONLINEAR or (name == "mul" and all(isinstance(each, Tensor) and each.ndim > 1 for each in args)):
        return "activation"
    return kind_of_call(func) or "other"


def _watches() -> list[Watch]:
    if not hasattr(WATCHES, "active"):
        WATCHES.active = []
    found: list[Watch] = WATCHES.active
    return found


def _may_be_packed(x: Tensor) -> bool:
    """Whether ``x`` may become codes: a floating-point tensor of two or more dims that the forward computed.

    False for an operator's own result, such as that of exp, because it is saved before it has a ``grad_fn``.
    """
    is_callers = x._base is not None and x._base.is_leaf and x._base.requires_grad  # a part of a parameter
    return (
        x.grad_fn is not None
        and not is_callers
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.ndim > 1
        and x.shape[-1] > 1
        and type(_compat.local_itself(x)) is Tensor
        and not _compat.is_traced(_compat.local_itself(x))
    )


def packed_in_eager(x: Tensor, name: str) -> Any:
    """Return what autograd saves for ``x`` in eager mode: a `Kept`, or ``x`` itself if it can't become codes.

    ``name`` is that of the active `Watch` whose hook got ``x``. Autograd's own threads (backwards on GPUs) have the
    hook without a watch.
    """
    watch = next((each for each in reversed(_watches()) if each.name == name), None)
    return watch.keep(x) if watch is not None and _may_be_packed(x) else x
