"""QuantizedPair: a weight as two sets of codes, those that the output multiplies and those that grad_input does.

    for_output        blocks along the rows of w_NK (rowwise: 1 x K, MX: 1 x 32)     y  = x @ w^T
    for_grad_input    blocks along its columns    (rowwise: N x 1, MX: 32 x 1)       dx = dy @ w

Where FSDP2 gathers a weight once for each pass, both lie in the same memory in turns: see `Turns`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile import inductor
from fp8compile.quantizers import GEMMS, Gemm, Quantizer
from fp8compile.tensor.quantized import HANDLERS, LAYERS, VIEWS, QuantizedTensor
from fp8compile.tensor.refusals import refuse_operators

__all__ = ["QuantizedPair", "Turns", "has_codes"]

OUTPUT, GRAD_INPUT, _ = GEMMS
REPEATED = (
    "fp8compile.parallel.fsdp_float8_all_gather: {what}, and FSDP2 has gathered for that pass the codes that "
    "grad_input multiplies, and no others. This is activation checkpointing, which repeats a forward in the backward: "
    "pass checkpointed=True, so that gathers serve both."
)
TOO_EARLY = (
    "fp8compile.parallel.fsdp_float8_all_gather: grad_input reads a weight of which FSDP2 has gathered the codes for "
    "the output, and no others: something called unshard() between forward and backward, or kept the weight. Leave "
    "that to FSDP2, or pass checkpointed=True, so that gathers serve both."
)


class Turns:
    """Says whose codes lie in the memory that both sets of a weight share: those of the product ``gemm``.

    It is None where nothing is known: in a graph that is being traced, and before the first gather.
    """

    def __init__(self) -> None:
        self.gemm: str | None = None


class QuantizedPair(Tensor):
    """Two `QuantizedTensor`s that were made of one weight, for the two products that read it.

    ``fp8compile.linear`` takes it for a weight. The views that a QuantizedTensor has are views of both; any other op
    raises a TypeError.

    Attributes:
        for_output: The codes that the output multiplies.
        for_grad_input: The codes that grad_input multiplies.
        quantizer: The quantizer of the first set.
        quantizer_for_grad_input: The quantizer of the second set.
        turns: Says which set is in memory, where both share one; else None.
    """

    for_grad_input: QuantizedTensor
    quantizer: Quantizer
    quantizer_for_grad_input: Quantizer
    turns: Turns | None
    _for_output: QuantizedTensor

    @staticmethod
    def __new__(
        cls: type[QuantizedPair],
        for_output: QuantizedTensor,
        for_grad_input: QuantizedTensor,
        turns: Turns | None = None,
    ) -> QuantizedPair:
        """Wrap two sets of codes of one shape and dtype."""
        codes = for_output.codes
        with torch.inference_mode(torch.is_inference_mode_enabled() and codes.is_inference()):
            return Tensor._make_wrapper_subclass(
                cls,
                for_output.shape,
                strides=for_output.stride(),
                storage_offset=codes.storage_offset(),
                dtype=for_output.dtype,
                device=codes.device,
            )

    def __init__(
        self, for_output: QuantizedTensor, for_grad_input: QuantizedTensor, turns: Turns | None = None
    ) -> None:
        self._for_output, self.for_grad_input, self.turns = for_output, for_grad_input, turns
        self.quantizer, self.quantizer_for_grad_input = for_output.quantizer, for_grad_input.quantizer

    @property
    def for_output(self) -> QuantizedTensor:
        """The codes that the output multiplies; raises in a forward that is repeated, which a graph asks for too."""
        if self.turns is not None and self.turns.gemm == GRAD_INPUT.name:
            raise RuntimeError(REPEATED.format(what="a forward reads a weight in the backward"))
        return self._for_output

    def sets(self) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Both sets, whichever of them is in memory: callers fill or view them."""
        return self._for_output, self.for_grad_input

    def read_by(self, gemm: Gemm) -> QuantizedTensor:
        """The set that a product multiplies.

        Raises:
            RuntimeError: It is not the one that is in memory.
        """
        if gemm is OUTPUT:
            if self.turns is not None and inductor.is_repeated_in_backward():
                raise RuntimeError(REPEATED.format(what="a checkpointed region of a compiled forward reads a weight"))
            return self.for_output
        if self.turns is not None and self.turns.gemm == OUTPUT.name:
            raise RuntimeError(TOO_EARLY)
        return self.for_grad_input

    @property
    def is_in_turns(self) -> bool:
        """Whether both sets share one memory, which holds one of them in the forward and the other in the backward."""
        return self.turns is not None

    # ------------------------------------------------------------------ what torch.compile asks

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        return ["for_output", "for_grad_input"], (self.is_in_turns,)

    @staticmethod
    def __tensor_unflatten__(inner: dict, metadata: tuple, outer_size: Any, outer_stride: Any) -> QuantizedPair:
        return QuantizedPair(inner["for_output"], inner["for_grad_input"], Turns() if metadata[0] else None)

    def _stable_hash_for_caching(self) -> str:
        """What stands for an argument in the key of AOTAutograd's cache."""
        sets = (each._stable_hash_for_caching() for each in self.sets())
        return "-".join([*sets, str(self.is_in_turns), str(self.requires_grad)])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedPair(for_output={self._for_output!r}, for_grad_input={self.for_grad_input!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a QuantizedPair is what FSDP2 gathered, for a while; save its module's state_dict().")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS:
            return LAYERS[func](func, *args)
        if func not in HANDLERS and func._can_decompose():
            return func.decompose(*args, **kwargs)
        if func not in HANDLERS or not isinstance(args[0], QuantizedPair):
            raise TypeError(no_meaning(func))
        pair, others = args[0], args[1:]
        sets = (func(each, *others, **kwargs) for each in pair.sets())
        result = QuantizedPair(*sets, pair.turns)
        return return_and_correct_aliasing(func, args, kwargs, result) if func in VIEWS else result


def has_codes(tensor: object) -> bool:
    """Whether a tensor is made of codes, of one set or of two."""
    return isinstance(tensor, (QuantizedTensor, QuantizedPair))


def no_meaning(op: object) -> str:
    return (
        f"{op} has no FP8 meaning for a weight that is two sets of codes, and nothing dequantizes in silence. "
        "Multiply by it through fp8compile.linear, or keep that layer's weight in high precision."
    )


refuse_operators(QuantizedPair, no_meaning)
