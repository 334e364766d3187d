"""What FSDP2 gathers for a weight whose output and grad_input read different codes.

The choices are the codes of one GEMM, the codes of both, or values. `BufferOwner` records which codes are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8compile import _compat, inductor
from fp8compile.quantizers import GEMMS, Gemm

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BOTH", "GATHERED", "OWN", "PLAIN", "GatherPolicy", "BufferOwner"]

GATHERED = "gathered"  # attribute of a layer: text that says what FSDP2 gathers for its weight
PAIR = OUTPUT, GRAD_INPUT = GEMMS[:2]
OWN, BOTH, PLAIN = "own", "codes", "param_dtype"
IN_WORDS = {
    OWN: "quantized data, separate for each pass",
    BOTH: "quantized data of both passes at once",
    PLAIN: "param_dtype: one all-gather serves both passes, which quantize the weight differently",
}


REPEATED = (
    "fp8compile.parallel.fsdp_float8_all_gather: {what}, but FSDP2 has all-gathered only the FP8 data for "
    "grad_input in this pass. This is activation checkpointing, which repeats a forward in the backward. Pass "
    "checkpointed=True, so that each all-gather serves both."
)
TOO_EARLY = (
    "fp8compile.parallel.fsdp_float8_all_gather: grad_input reads a weight for which FSDP2 has all-gathered only "
    "the FP8 data for the output, because unshard() was called between forward and backward, or the weight was "
    "kept. Leave this to FSDP2, or pass checkpointed=True, so that each all-gather serves both."
)


class BufferOwner:
    """Records which GEMM reads the codes that FSDP2 gathered last.

    ``gemm`` is the GEMM's name; None before the first gather and while tracing.
    """

    def __init__(self) -> None:
        self.gemm: str | None = None

    def check_forward(self) -> None:
        """Raise a RuntimeError if memory holds grad_input's codes, as when the backward repeats a forward."""
        if self.gemm == GRAD_INPUT.name:
            raise RuntimeError(REPEATED.format(what="a forward reads a weight in the backward"))

    def check(self, gemm: Gemm) -> None:
        """Raise a RuntimeError if the codes that ``gemm`` reads are not in memory."""
        if gemm is not OUTPUT:
            if self.gemm == OUTPUT.name:
                raise RuntimeError(TOO_EARLY)
            return
        if inductor.is_repeated_in_backward():
            raise RuntimeError(REPEATED.format(what="a checkpointed region of a compiled forward reads a weight"))
        self.check_forward()


@dataclass
class GatherPolicy:
    """Decides, at a weight's first gather, what all its gathers send, as FSDP2's buffers keep their size.

    Attributes:
        for_both: What is gathered if one gather serves forward and backward: ``"codes"`` or ``"param_dtype"``.
        checkpointed: Whether the backward repeats the forward.
        kind: ``OWN`` (codes of one pass), ``BOTH`` (codes of both) or ``PLAIN`` (values); None before a gather.
        in_memory: Records which codes were gathered last, if each pass gathers its own codes.
        name: Name of the weight in its module.
    """

    for_both: str
    checkpointed: bool
    kind: str | None = None
    in_memory: BufferOwner = field(default_factory=BufferOwner)
    name: str = "weight"
    _parameter: _compat.FsdpParameter | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherPolicy:
        """Return the policy for a copy of the weight: the same settings, but nothing was gathered yet."""
        return GatherPolicy(self.for_both, self.checkpointed, name=self.name)

    def now(self, module: nn.Module) -> tuple[str, tuple[Gemm, ...]]:
        """Return the ``kind`` of the gather that is about to start, and the GEMMs whose codes it sends.

        ``module`` is the module that has the weight.
        """
        if self._parameter is None:
            self._parameter = next(
                each for each in _compat.fsdp_parameters() if (each.module, each.name) == (module, self.name)
            )
        kind = self._kind_for(self._parameter)
        own_pass = (GRAD_INPUT,) if self._parameter.is_in_backward else (OUTPUT,)
        return kind, PAIR if kind == BOTH else own_pass

    def _kind_for(self, parameter: _compat.FsdpParameter) -> str:
        """Return the ``kind`` of all gathers, chosen by FSDP2's settings for the parameter at the first gather.

        Raise a RuntimeError if each pass has gathered its own codes so far, and FSDP2 now keeps the weight after the
        forward.
        """
        kind = self.for_both if self.checkpointed or parameter.stays_after_forward else OWN
        if self.kind is None:
            self.kind = kind
            for module in parameter.modules:
                setattr(module, GATHERED, IN_WORDS[kind])
        if self.kind == OWN != kind:
            raise RuntimeError(
                "fsdp_float8_all_gather: so far each pass has all-gathered its own FP8 data, but now weights are "
                "kept from the forward to the backward, which needs different data. Call "
                "set_reshard_after_forward(False) before the first forward."
            )
        return self.kind

    def in_words(self) -> str:
        """Return a text that says what gathers will send, for a report before the first gather."""
        for_both = IN_WORDS[self.for_both]
        return for_both if self.checkpointed else f"{IN_WORDS[OWN]}; or, if FSDP2 keeps the weight, {for_both}"
