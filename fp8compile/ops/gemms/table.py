"""The table of GEMMs, in the order in which a product asks them, and the one loop over it.

Ours come first, so a GEMM that is registered changes no product that has one; emulation comes last.
"""

from __future__ import annotations

from fp8compile.ops.gemms.blockwise import BLOCKWISE
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.kernel import GemmKernel, GemmProblem
from fp8compile.ops.gemms.mx import MX
from fp8compile.ops.gemms.rowwise import ROWWISE
from fp8compile.ops.gemms.scaled_after import SCALED_AFTER
from fp8compile.ops.gemms.tensorwise import TENSORWISE
from fp8compile.quantizers import Quantizer

__all__ = ["NATIVE", "REGISTERED", "gemm_for", "gemm_table", "multiplying_calls", "refused"]

NATIVE = (TENSORWISE, ROWWISE, SCALED_AFTER, BLOCKWISE, MX)
REGISTERED: dict[str, GemmKernel] = {}  # of other packages, by name


def gemm_table() -> tuple[GemmKernel, ...]:
    """All GEMMs, in the order in which they are asked."""
    return (*NATIVE, *REGISTERED.values(), EMULATED)


def multiplying_calls() -> frozenset[str]:
    """Names of the PyTorch operators that multiply codes, such as ``"_scaled_mm"``."""
    return frozenset(call for gemm in gemm_table() for call in gemm.calls)


def _codes_of(quantizer: Quantizer) -> str:
    stored = quantizer.gemm_format()
    return f"codes of {type(quantizer).__name__}" if stored is None else stored.name


def refused(function: str, problem: GemmProblem, reason: str) -> RuntimeError:
    """The error of a product that no GEMM of a table makes."""
    a, b, (major, minor) = problem.a, problem.b, problem.target.capability
    has = f" This GPU has compute capability {major}.{minor}." if problem.target.type == "cuda" else ""
    return RuntimeError(
        f"{function}: {_codes_of(a)} with block {a.block} by {_codes_of(b)} with block {b.block} {reason}{has}"
    )


def gemm_for(problem: GemmProblem) -> GemmKernel:
    """The first GEMM of the table that takes the operands and runs on the target.

    Args:
        problem: Whose blocks some sum can undo.

    Raises:
        RuntimeError: None does; the text is the reason of the first one that takes the operands. Or two packages have
            registered one for these operands, and which to take is not for us to say.
    """
    reasons = {gemm.name: gemm.lacks(problem) for gemm in gemm_table() if gemm.takes(problem.a, problem.b)}
    running = [gemm for gemm in gemm_table() if reasons.get(gemm.name, "") is None]
    if not running:
        raise refused("scaled_mm", problem, next(iter(reasons.values())))
    rivals = [gemm.name for gemm in running if gemm.name in REGISTERED]
    if running[0].name in REGISTERED and len(rivals) > 1:
        names = " and of ".join(rivals)
        reason = f"are operands of {names}; let `takes` of all but one return False for them."
        raise refused("scaled_mm", problem, reason)
    return running[0]
