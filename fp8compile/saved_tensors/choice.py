"""SavedAsCodes: an immutable choice of the saved tensors that become codes, and of their quantizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Options to save tensors for the backward as codes and scales, which the backward dequantizes.

    Pass it to ``fp8compile.compile(model, saved=...)``, or to the context ``fp8compile.saved_as_codes(...)`` around a
    call. The forward's results stay the same, bit for bit. Gradients are computed from the rounded tensors.

    Attributes:
        quantizer: Quantizes each tensor as a matrix whose rows run along the last dim. None means e4m3 with scales
            that are powers of two. Blocks are then chosen by the nearest layer in the graph that quantizes the tensor
            or values computed from it: whole rows if its recipe is rowwise, tensorwise or delayed, else the recipe's
            own blocks. Without such a layer, and in eager mode, blocks are 1 x 128.
        filter: Which tensors become codes. None is ``("norm", "activation", "checkpoint")``. A tuple names kinds of
            `SavedTensor`: tensors of these kinds with at least 65,536 elements become codes. A tuple may also contain
            `SavedTensor` values: these tensors become codes whatever their size, together with those of equal layers
            (same module name up to numbers). A function takes a `SavedTensor` of any size and returns whether it
            becomes codes. Compile caches know a function again in another process if its code is the same and it
            reads only globals that can be compared: numbers, strings, bools, None, tuples of them, functions of its
            own module, and names of ``torch``, ``fp8compile``, ``builtins``, ``math``, ``re`` and ``fnmatch``. Any
            other function compiles again in each process: one that reads other globals, imports, or has a closure,
            defaults or attributes.

    Raises:
        TypeError: ``quantizer`` is not a quantizer, or ``filter`` is neither a tuple nor a function.
        ValueError: The quantizer can't quantize a tensor of three dims without other inputs, or a kind is unknown.
    """

    quantizer: Quantizer | None = None
    filter: Filter = None

    def __post_init__(self) -> None:
        self._check_quantizer()
        if self.filter is None or (callable(self.filter) and not isinstance(self.filter, type)):
            return
        if not isinstance(self.filter, tuple):
            raise TypeError(
                f"SavedAsCodes: filter is {self.filter!r}; it is None, a tuple of kinds, {KINDS}, or a function that "
                "takes a fp8compile.SavedTensor and returns a bool."
            )
        if unknown := [each for each in self.filter if not isinstance(each, SavedTensor) and each not in KINDS]:
            raise ValueError(f"SavedAsCodes: filter has the kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}.")

    def _check_quantizer(self) -> None:
        quantizer = self.quantizer
        if quantizer is None:
            return
        if not isinstance(quantizer, Quantizer):
            raise TypeError(
                f"SavedAsCodes: quantizer is {quantizer!r}; it is a quantizer, such as "
                "fp8compile.CurrentScaling(...), or None for e4m3 in the blocks of the recipe."
            )
        if isinstance(quantizer, DelayedScaling):
            raise ValueError(
                f"SavedAsCodes: {quantizer!r} takes its scale from earlier steps, and a saved tensor has no history. "
                "Take fp8compile.CurrentScaling."
            )
        shape = (2, 16, 256)
        try:
            codes = quantizer.codes_shape(shape)
            keeps_dims = tuple(quantizer.values_shape(codes)) == shape
        except ValueError:
            keeps_dims = False
        if not keeps_dims:
            raise ValueError(
                f"SavedAsCodes: {quantizer!r} does not quantize a tensor of three dims, such as {shape}, along its "
                "rows. Saved tensors have any number of dims: take blocks and pairs of codes along rows, as "
                "fp8compile.TwoLevelScaling() has."
            )

    def chooses(self, tensor: SavedTensor) -> bool:
        """Whether the filter chooses a tensor to be saved as codes."""
        if self.filter is None or isinstance(self.filter, tuple):
            chosen = DEFAULT_KINDS if self.filter is None else self.filter
            if tensor.kind in chosen and tensor.nbytes >= SMALLEST * tensor.dtype.itemsize:
                return True
            return any(tensor.is_like(each) for each in chosen if isinstance(each, SavedTensor))
        return bool(self.filter(tensor))

    @staticmethod
    def for_budget(report: KeptReport, budget: int) -> SavedAsCodes:
        """Choose tensors so that a model keeps at most ``budget`` bytes, with the least effect on gradients.

        Kinds become codes in the order of the list in `SavedTensor`, which begins with those that change gradients
        least. Within a kind, tensors that save the most bytes come first. Equal layers are treated alike.

        Args:
            report: What the model keeps, by ``fp8compile.testing.memory_report``.
            budget: The most bytes that the model may keep.

        Returns:
            A value whose filter lists the tensors that become codes; the list is empty if no codes are needed.

        Raises:
            ValueError: The model keeps more than the budget even if all tensors become codes.
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
                f"SavedAsCodes.for_budget: the budget is {budget:,} bytes, and with {len(chosen)} kinds of tensors "
                f"as codes {kept:,} bytes are kept. Take fewer tokens, checkpointing, or a budget of that size."
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
        """Return a text for keys of compile caches, equal in all processes for equal fields and source code.

        The text of a filter function has the values of the globals that it reads now. A function that can't be
        compared, see ``filter``, gets a new text in each process.
        """
        chosen = repr(self.filter) if not callable(self.filter) else filter_text(self.filter)
        return f"SavedAsCodes {source_salt(SavedAsCodes)} {self.quantizer!r} {chosen}"


@lru_cache
def _powers_of_two(block: tuple[int, int]) -> CurrentScaling:
    return CurrentScaling(block=block, scale="pow2")
