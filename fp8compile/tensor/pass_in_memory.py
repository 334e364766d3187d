"""Record which codes are in the memory that both sets of a weight share, if FSDP2 gathers one set in each pass."""

from __future__ import annotations

from fp8compile import inductor
from fp8compile.quantizers import GEMMS, Gemm

__all__ = ["PassInMemory"]

OUTPUT, GRAD_INPUT = GEMMS[:2]
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


class PassInMemory:
    """Records the name of the GEMM whose codes were gathered last; None before the first gather and while tracing."""

    def __init__(self) -> None:
        self.gemm: str | None = None

    def check_forward(self) -> None:
        """Raise a RuntimeError if a forward is repeated in the backward, when memory holds the other set of codes."""
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
