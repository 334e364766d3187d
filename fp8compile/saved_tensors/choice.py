"""SavedAsCodes: an immutable choice of the saved tensors that become codes, and of their quantizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from fp8compile.quantizers import CurrentScaling, DelayedScaling, Quantizer
from fp8compile.quantizers.constant import source_salt
from fp8compile.saved_tensors.filter_text import filter_text
from fp8compile.saved_tensors.saved_tensor import DEFAULT_KINDS, KINDS, SMALLEST, SavedTensor

__all__ = ["SavedAsCodes"]

Filter = tuple[str | SavedTensor, ...] | Callable[[SavedTensor], bool] | None
ALONE = (1, 128)  # the block if no recipe quantizes anything beside a tensor
WHOLE, ROW = (-1, -1), (1, -1)


class KeptRow(Protocol):
    """Protocol of one saved tensor in a `KeptReport`; `fp8compile.testing.KeptTensor` implements it."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensor's storage."""

    @property
    def code_bytes(self) -> int | None:
        """Bytes of the tensor's codes and scales; None if it can't be saved as codes."""

    @property
    def saved(self) -> SavedTensor | None:
        """The tensor's description, as a filter gets it; None if the tensor can't be saved as codes."""


class KeptReport(Protocol):
    """Protocol of a report on the tensors that a model saves, such as `fp8compile.testing.MemoryReport`."""

    @property
    def kept(self) -> Sequence[KeptRow]:
        """The tensors that the forward makes and saves for the backward."""


@dataclass(frozen=True)
class SavedAsCodes:
    """Options for FP8 activation compression: tensors saved for the backward are quantized.

    Pass it to ``fp8compile.compile(model, saved=...)``, or to the context manager ``fp8compile.saved_as_codes(...)``
    around a call. The results of the forward are bit-identical. The backward dequantizes the tensors, so gradients are
    computed from rounded values.

    Attributes:
        quantizer: Quantizer for each tensor, viewed as a matrix whose rows run along the last dim. None means e4m3
            with power-of-two scales. The blocks are then taken from the nearest layer in the graph that quantizes the
            tensor or values computed from it: full rows if its recipe is rowwise, tensorwise or delayed, else the
            blocks of the recipe. Without such a layer, and in eager mode, blocks are 1 x 128.
        filter: Which tensors to quantize. None is ``("norm", "activation", "checkpoint")``. A tuple lists kinds of
            `SavedTensor`: tensors of these kinds with at least 65,536 elements are quantized. A tuple may also contain
            `SavedTensor` values: these tensors are quantized regardless of their size, and so are those of identical
            layers (same module name up to numbers). A function receives a `SavedTensor` of any size and returns
            whether to quantize it. Compile caches can reuse the graph of a function in another process if its code is
            the same and it reads only globals that can be compared: numbers, strings, bools, None, tuples of them,
            functions of its own module, and names of ``torch``, ``fp8compile``, ``builtins``, ``math``, ``re`` and
            ``fnmatch``. A function that reads other globals, imports, or has a closure, defaults or attributes
            recompiles in each process.

    Raises:
        TypeError: ``quantizer`` is not a quantizer, or ``filter`` is neither a tuple nor a function.
        ValueError: The quantizer can't quantize a 3-D tensor without further inputs, or a kind is unknown.
    """

    quantizer: Quantizer | None = None
    filter: Filter = None

    def __post_init__(self) -> None:
        self._check_quantizer()
        is_function = callable(self.filter) and not isinstance(self.filter, type)
        if self.filter is None or (is_function and isinstance(self.filter, Hashable)):
            return
        if not isinstance(self.filter, tuple):
            raise TypeError(
                f"SavedAsCodes: `filter` is {self.filter!r}; it must be None, a tuple of kinds, {KINDS}, or a "
                "hashable function that takes a fp8compile.SavedTensor and returns a bool."
            )
        if unknown := [each for each in self.filter if not isinstance(each, SavedTensor) and each not in KINDS]:
            raise ValueError(f"SavedAsCodes: filter has the kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}.")

    def _check_quantizer(self) -> None:
        quantizer = self.quantizer
        if quantizer is None:
            return
        if not isinstance(quantizer, Quantizer):
            raise TypeError(
                f"SavedAsCodes: `quantizer` is {quantizer!r}; it must be a quantizer, such as "
                "fp8compile.CurrentScaling(...), or None for e4m3 in the blocks of the recipe."
            )
        if isinstance(quantizer, DelayedScaling):
            raise ValueError(
                f"SavedAsCodes: {quantizer!r} computes its scale from previous steps, but a saved tensor has no "
                "history. Use fp8compile.CurrentScaling."
            )
        shape = (2, 16, 256)
        try:
            codes = quantizer.codes_shape(shape)
            keeps_dims = tuple(quantizer.values_shape(codes)) == shape
        except ValueError:
            keeps_dims = False
        if not keeps_dims:
            raise ValueError(
                f"SavedAsCodes: {quantizer!r} does not quantize a tensor with three dims, such as {shape}, along "
                "its rows. Saved tensors can have any number of dims, so use blocks and packing along rows, as in "
                "fp8compile.TwoLevelScaling()."
            )

    def chooses(self, tensor: SavedTensor) -> bool:
        """Whether the filter selects a tensor to be quantized."""
        if self.filter is None or isinstance(self.filter, tuple):
            chosen = DEFAULT_KINDS if self.filter is None else self.filter
            if tensor.kind in chosen and tensor.nbytes >= SMALLEST * tensor.dtype.itemsize:
                return True
            return any(tensor.is_like(each) for each in chosen if isinstance(each, SavedTensor))
        return bool(self.filter(tensor))

    @staticmethod
    def for_budget(report: KeptReport, budget: int) -> SavedAsCodes:
        """Choose tensors such that a model saves at most ``budget`` bytes, with the least effect on gradients.

        Kinds are quantized in the order of the list in `SavedTensor`, starting with those that change gradients least.
        Within a kind, tensors that free the most bytes come first. Identical layers are treated alike.

        Args:
            report: The memory report of the model, from ``fp8compile.testing.memory_report``.
            budget: Maximum number of bytes that the model may save for the backward.

        Returns:
            Options whose filter lists the tensors to quantize; the list is empty if the model fits without.

        Raises:
            ValueError: The model exceeds the budget even if all tensors are quantized.
        """
        classes: dict[SavedTensor, int] = {}  # bytes that codes save, by one tensor of the equal ones
        for each in report.kept:
            if each.saved is not None and each.code_bytes is not None:
                like = next((one for one in classes if one.is_like(each.saved)), each.saved)
                classes[like] = classes.get(like, 0) + each.bytes - each.code_bytes
        kept = sum(each.bytes for each in report.kept)
        chosen: list[SavedTensor] = []
        for tensor, saves in sorted(classes.items(), key=lambda each: (KINDS.index(each[0].kind), -each[1])):
            if kept <= budget:
                break
            if saves > 0:
                kept -= saves
                chosen.append(tensor)
        if kept > budget:
            raise ValueError(
                f"SavedAsCodes.for_budget: the budget is {budget:,} bytes, but {kept:,} bytes are saved even with "
                f"{len(chosen)} kinds of tensors compressed. Use fewer tokens, activation checkpointing, or a "
                "budget of at least that size."
            )
        return SavedAsCodes(filter=tuple(chosen))

    def quantizer_for(self, block: tuple[int, int] | None) -> Quantizer:
        """Return the quantizer for one saved tensor: ``quantizer``, or e4m3 with power-of-two scales for ``block``.

        ``block`` is (rows, columns) that share a scale; None means 1 x 128.
        """
        if self.quantizer is not None:
            return self.quantizer
        return _powers_of_two(ALONE if block is None else ROW if block == WHOLE else block)

    def uuid(self) -> str:
        """Return a compile cache key, the same in all processes for equal fields and source code.

        The key of a filter function includes the current values of the globals that it reads. A function that can't be
        compared (see ``filter``) gets a new key in each process.
        """
        chosen = repr(self.filter) if not callable(self.filter) else filter_text(self.filter)
        quantizer = self.quantizer and self.quantizer.__fx_repr__()[0]  # classes may share a name, and so their repr
        return f"SavedAsCodes {source_salt(SavedAsCodes)} {quantizer} {chosen}"


@lru_cache
def _powers_of_two(block: tuple[int, int]) -> CurrentScaling:
    return CurrentScaling(block=block, scale="pow2")
