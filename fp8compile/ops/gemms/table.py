"""The table of GEMMs, and the loop that selects the first one for a product.

fp8compile's GEMMs come first, then GEMMs of other packages, then emulation.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from fp8compile.formats import Float4Format, Float8Format
from fp8compile.ops.gemms.blockwise import BLOCKWISE
from fp8compile.ops.gemms.by_mx import BLOCKWISE_BY_MX, SCALED_BY_MX
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.mx import MX
from fp8compile.ops.gemms.nvfp4 import NVFP4
from fp8compile.ops.gemms.rowwise import ROWWISE, SCALED_AFTER
from fp8compile.ops.gemms.tensorwise import TENSORWISE
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import is_own

__all__ = ["NATIVE", "REGISTERED", "first_running", "gemm_for", "gemm_table", "multiplying_calls"]

NATIVE = (SCALED_BY_MX, TENSORWISE, ROWWISE, SCALED_AFTER, BLOCKWISE, BLOCKWISE_BY_MX, MX, NVFP4)
REGISTERED: dict[str, GemmKernel] = {}  # GEMMs that other packages registered, by name


def gemm_table() -> tuple[GemmKernel, ...]:
    """Return all GEMMs, in the order in which they are tried."""
    return (*NATIVE, *REGISTERED.values(), EMULATED)


def multiplying_calls() -> frozenset[str]:
    """Return the names of the PyTorch operators that multiply codes, such as ``"_scaled_mm"``."""
    return frozenset(call for gemm in gemm_table() for call in gemm.calls)


def _codes_of(quantizer: Quantizer) -> str:
    """Return a name for an operand's codes in errors: the format, or the class of another package's quantizer."""
    stored: Float8Format | Float4Format | None = quantizer.gemm_format()
    if stored is None and is_own(type(quantizer)):  # type: ignore[arg-type]  # classes are hashable
        stored = quantizer.element_format()
    return f"codes of {type(quantizer).__name__}" if stored is None else stored.name


def _refused(function: str, problem: GemmProblem, reason: str) -> RuntimeError:
    a, b, (major, minor) = problem.a, problem.b, problem.target.capability
    has = f" This GPU has compute capability {major}.{minor}." if problem.target.type == "cuda" else ""
    if problem.target.hip is not None:
        has = f" This is {', '.join(filter(None, (problem.target.gcn, f'ROCm {problem.target.hip}')))}."
    return RuntimeError(
        f"{function}: {_codes_of(a)} with block {a.block} by {_codes_of(b)} with block {b.block} {reason}{has}"
    )


def first_running(
    function: str, problem: GemmProblem, tiers: Sequence[Sequence[Any]], registered: Container[str]
) -> Any:
    """Return the first GEMM that takes the operands of a product and runs on its target.

    Args:
        function: Name of the function for error messages.
        problem: The product.
        tiers: Lists of GEMMs, all `GemmKernel` or all `GroupedGemm`; one list is tried after the other.
        registered: Names of the GEMMs that other packages registered.

    Raises:
        RuntimeError: No GEMM runs; the message says why the first one that takes the operands doesn't. Or two
            registered GEMMs of one list run.
    """
    reasons = {gemm.name: gemm.lacks(problem) for tier in tiers for gemm in tier if gemm.takes(problem.a, problem.b)}
    running = [[gemm for gemm in tier if reasons.get(gemm.name, "") is None] for tier in tiers]
    first = next(filter(None, running), None)
    if first is None:
        raise _refused(function, problem, next(iter(reasons.values())))
    if first[0].name in registered and len(first) > 1:
        names = " and ".join(gemm.name for gemm in first)
        reason = f"are supported by several GEMMs, {names}. Let `takes` of all but one return False for them."
        raise _refused(function, problem, reason)
    return first[0]


def gemm_for(problem: GemmProblem) -> GemmKernel:
    """Return the first GEMM of the table that takes the operands of a product and runs on its target.

    The blocks of both operands must fit together, as `gemm_kind` checks.

    Raises:
        RuntimeError: No GEMM runs; the message says why the first one that takes the operands doesn't. Or GEMMs of two
            packages run.
    """
    return first_running("scaled_mm", problem, (NATIVE, tuple(REGISTERED.values()), (EMULATED,)), REGISTERED)
