"""WeightCodes: codes of a plain weight, valid until something writes to the weight.

    parameter --codes_of--> WeightCodes, an attribute of the parameter --pair--> the codes that products read
        |                       ^
        +---optimizer.step------+  makes the codes again, in the same memory

Whether the codes are valid is part of the tensor's metadata, on which Dynamo guards: a graph that reads codes never
runs with codes of another version of the weight. The guard is outside of the graph, without a graph break.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8compile import _compat
from fp8compile.layout.quantized import STACK, WHOLE, Quantized
from fp8compile.ops.layer.make_weight_codes import Sets, sets_of_weight, weight_codes
from fp8compile.ops.layer.operands import WEIGHT_ROLES
from fp8compile.quantizers import Recipe
from fp8compile.tensor.parameter_attributes import KEPT_CODES
from fp8compile.tensor.quantized_tensor import QuantizedTensor

__all__ = ["WeightCodes", "codes_of", "forget_codes", "known_codes", "pair"]


class WeightCodes(QuantizedTensor):
    """Codes of a plain weight that can tell whether the weight has changed since they were made.

    Attributes:
        recipe: The recipe of the layer that multiplies by them.
        is_turned: Whether they are codes of the transposed matrices.
        is_compiled: Whether a compiled graph reads them, so that compiled code makes them too.
        is_in_step: Whether an optimizer's step runs. Until it ends, each forward (of a closure) quantizes the weight.
    """

    recipe: Recipe | None = None
    is_turned = False
    is_compiled = False
    is_in_step = False
    _weight: weakref.ref[Tensor] | None = None
    _made_of: tuple[Any, ...] = ()
    _storage: StorageWeakRef | None = None  # while it lives, no other storage has the address of the weight's
    _flattened: tuple[list[str], tuple[Any, ...]] | None = None
    _holds: bool | None = None  # of a tracer's copy, which has no weight

    @staticmethod
    def of(weight: Tensor, recipe: Recipe, dtype: torch.dtype, *, is_turned: bool) -> WeightCodes:
        """Make the codes of a weight with the quantizers of ``recipe``.

        ``dtype`` is the dtype in which the layer computes. ``is_turned`` says whether matrices are transposed first.
        """
        sets = sets_of_weight(_values(weight, dtype, is_turned), recipe)
        own = sets[:1] if sets[0] is sets[1] else sets
        found = WeightCodes.of_sets(own, dtype, batch=weight.ndim - 2)
        found.recipe, found.is_turned = recipe, is_turned
        found._weight = weakref.ref(weight)
        found._made_now(weight)
        return found

    def _made_now(self, weight: Tensor) -> None:
        self._made_of = _version(weight)
        self._storage = StorageWeakRef(weight.untyped_storage())

    def holds(self) -> bool:
        """Whether nothing was written to the weight since the codes were made; False while `may_miss_writes`."""
        if self._holds is not None:
            return self._holds
        weight = None if self._weight is None else self._weight()
        return weight is not None and not self.may_miss_writes() and self._made_of == _version(weight)

    def may_miss_writes(self) -> bool:
        """Whether something may write to the weight without counting a version of it, so that nobody may read these.

        It is an optimizer's step, or another tensor that has the weight's memory and a version of its own, as tied
        weights have after ``load_state_dict(assign=True)``, and parameters that are views of a flat buffer.
        """
        weight = None if self._weight is None else self._weight()
        if weight is not None and not _compat.is_fake(weight) and _compat.shares_memory(weight):
            self._made_of = self._made_of[:1]  # the other tensor may be gone later, and what it wrote is not
            return True
        return self.is_in_step

    def fits(self, recipe: Recipe | None, dtype: torch.dtype, *, is_turned: bool) -> bool:
        """Whether a layer with these arguments can read the codes, even if the weight has changed.

        ``dtype`` is the dtype in which the layer computes, ``is_turned`` whether it reads transposed matrices.
        """
        weight = None if self._weight is None else self._weight()
        is_same = self.recipe is recipe or self.recipe == recipe
        same = is_same and self.dtype == dtype and self.is_turned == is_turned
        return same and weight is not None and weight.device == self.device and weight.shape == self._made_of[0]

    @torch.inference_mode(mode=False)  # training reads them too
    @torch.no_grad()
    def renew(self) -> None:
        """Quantize the weight's present values again, into the memory that graphs refer to."""
        weight: Any = None if self._weight is None else self._weight()
        how: Any = self.recipe, self.dtype, self.is_turned
        run = _compiled(*how) if self.is_compiled else partial(_renew, how)
        run(weight, [own.parts() for own in self.sets()])
        self._made_now(weight)

    # ------------------------------------------------------------------ what torch.compile asks

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        # guards of compiled code ask twice a call, and only `holds` ever has another answer
        if self._flattened is None:
            self._flattened = super().__tensor_flatten__()
        names, metadata = self._flattened
        return names, (metadata, self.holds(), self.is_turned)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], metadata: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> WeightCodes:
        found = WeightCodes._unflattened(inner, metadata[0])
        _, found._holds, found.is_turned = metadata
        return found

    def _stable_hash_for_caching(self) -> str:
        return f"{super()._stable_hash_for_caching()} {self.holds()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a copy of the parameter makes its own; torch.load(weights_only=True) takes this class, and not that of None
        return OrderedDict, ()


def _version(weight: Tensor) -> tuple[Any, ...]:
    """Return a tuple that changes if something writes to a weight, or gives it other memory, as ``module.to`` does.

    It names the storage object, not the address of its memory, which another tensor may get later.
    """
    return weight.shape, weight._version, weight.untyped_storage()._cdata, weight.storage_offset(), weight.dtype


def _values(weight: Tensor, dtype: torch.dtype, is_turned: bool) -> Tensor:
    """Return the values to quantize: the weight in ``dtype``, with transposed matrices if ``is_turned``."""
    values = weight.detach().to(dtype)
    return values.transpose(-2, -1) if is_turned else values


def _renew(how: tuple[Recipe, torch.dtype, bool], weight: Tensor, memories: list[tuple[Tensor, ...]]) -> None:
    recipe, dtype, is_turned = how
    values = _values(weight, dtype, is_turned)
    for role, memory in zip(WEIGHT_ROLES, memories, strict=False):
        for old, new in zip(memory, weight_codes(values, role, recipe), strict=False):
            old.copy_(new)


@cache
def _compiled(recipe: Recipe, dtype: torch.dtype, is_turned: bool) -> Any:
    """Return the compiled function that renews codes, one graph for each shape; see `WeightCodes.of`."""
    return _compat.compiled_alone(_renew, (recipe, dtype, is_turned), "inductor")


def codes_of(weight: Tensor, recipe: Recipe, dtype: torch.dtype, *, is_turned: bool) -> WeightCodes:
    """Return the codes that are kept with a plain parameter; make codes if none fit the arguments.

    For the arguments see `WeightCodes.of`. The codes may be out of date, see `WeightCodes.holds`.
    """
    found = known_codes(weight)
    if found is None or not found.fits(recipe, dtype, is_turned=is_turned):
        _listen()
        with torch.inference_mode(mode=False), torch.no_grad():
            found = WeightCodes.of(weight, recipe, dtype, is_turned=is_turned)
        setattr(weight, KEPT_CODES, found)
    return found


def known_codes(weight: Any) -> WeightCodes | None:
    """Return the codes that are kept with a parameter; None if no codes are kept."""
    found = getattr(weight, KEPT_CODES, None)
    return found if isinstance(found, WeightCodes) else None  # a parameter out of a file has an empty dict there


def pair(codes: WeightCodes) -> Sets:
    """Return the codes that output and grad_input read, as plain tensors; this function can be traced."""
    layout = STACK if codes.batch else WHOLE
    first = Quantized(
        codes=codes.codes, scale=codes.scale, quantizer=codes.quantizer, outer_scale=codes.outer_scale, layout=layout
    )
    if codes.quantizer_for_grad_input is None:
        return first, first
    second: Any = Quantized(
        codes=codes.codes_for_grad_input,  # type: ignore[arg-type]  # there is a second set
        scale=codes.scale_for_grad_input,  # type: ignore[arg-type]
        quantizer=codes.quantizer_for_grad_input,
        outer_scale=codes.outer_scale_for_grad_input,
        layout=layout,
    )
    return first, second


def forget_codes(weight: Tensor | None) -> None:
    """Drop the codes that are kept beside a parameter, if there are any."""
    if known_codes(weight) is not None:
        delattr(weight, KEPT_CODES)


def _codes_of_parameters(optimizer: Optimizer) -> Iterator[WeightCodes]:
    every = (known_codes(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return (codes for codes in every if codes is not None)


@_compat.untraced
def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for codes in _codes_of_parameters(optimizer):
        codes.is_in_step = True


@_compat.untraced
def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Renew the kept codes of an optimizer's parameters after its step, even if its kernels count no version."""
    for codes in _codes_of_parameters(optimizer):
        codes.is_in_step = False
        if not codes.may_miss_writes() and codes.fits(codes.recipe, codes.dtype, is_turned=codes.is_turned):
            codes.renew()  # else the parameter has other memory since, and the next forward makes others


@cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
